"""Who is next when every engine is full? A bounded queue per model: priority first, then tenants in fair turns, then first come.

Each tenant has a counter of the work it has been let in with, and the waiting tenant with the smallest counter is next (Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024). One that begins to wait is lifted to the smallest counter of those who wait
already: silence earns no credit. A counter moves when a request is let in, so one that is given up or runs out of time costs nothing.

    tenant a waits with a1 a2 a3 a4 a5, tenant b with b1 b2:      a1 b1 a2 b2 a3 a4 a5

A full queue is not closed to those who did not fill it: a request of a tenant that has fewer waiting takes the place of the newest
one of the tenant that has most.

What cannot wait is told at once, with an honest guess of when to come back: as long as those who wait need at the present pace.
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

import msgspec
from sortedcontainers import SortedDict, SortedKeyList

MIN_RETRY_AFTER_S: Final = 1
MAX_RETRY_AFTER_S: Final = 120
PACE_WEIGHT: Final = 0.1
"""Share of the latest request in the mean duration: the last ten or so decide."""

MAX_SILENT: Final = 2048
"""Tenants remembered, per priority, that have nothing waiting."""

T = TypeVar("T")


class QueueLimits(msgspec.Struct, frozen=True):
    """How many may wait, and how long."""

    max_waiting: int = 1000
    max_wait_s: float = 10.0


class Reason(enum.StrEnum):
    """Why a request was not let in. A closed list: metrics and dashboards rely on it."""

    QUEUE_FULL = "queue_full"
    DISPLACED = "displaced"
    """The queue was full, and the place went to a tenant with fewer requests in it, or to a more urgent request."""
    WAITED = "waited"
    """No room came within `max_wait_s`."""
    DEADLINE = "deadline"
    """No room came within the time the client gave."""
    COOLING = "cooling"
    """Every engine has asked to be left alone for longer than the request may wait."""
    NO_ENGINE = "no_engine"
    """The model's last engine left meanwhile, and none came back in time."""


class Shed(Exception):
    """The request is turned away; `retry_after_s` is when to come back."""

    def __init__(self, reason: Reason, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class QueueFull(Exception):
    """There is no room to wait."""


class Ticket(Generic[T]):
    """A request's place in a queue."""

    __slots__ = ("deadline", "number", "priority", "request", "tenant", "waiting", "work")

    def __init__(self, request: T, tenant: str, priority: int, deadline: float, work: float, number: int) -> None:
        self.request = request
        self.tenant = tenant
        self.priority = priority
        self.deadline = deadline
        self.work = work
        self.number = number
        self.waiting = True


class _Turns(Generic[T]):
    """One tenant's waiting requests of one priority, and the work it has been let in with."""

    __slots__ = ("counter", "order", "tickets")

    def __init__(self, counter: float) -> None:
        self.counter = counter
        self.tickets: dict[int, Ticket[T]] = {}
        """By number, so in the order they came."""
        self.order = (counter, 0)
        """Smallest is next; kept as it was when it was sorted."""

    def current(self) -> tuple[float, int]:
        """Equal counters: whoever has waited longest."""
        return self.counter, next(iter(self.tickets))


class _Lane(Generic[T]):
    """Waiting requests of one priority."""

    def __init__(self) -> None:
        self.tenants: dict[str, _Turns[T]] = {}
        self.order: SortedKeyList[_Turns[T], tuple[float, int]] = SortedKeyList(key=lambda turns: turns.order)
        self.silent: dict[str, float] = {}
        """Counters of tenants with nothing waiting that have had more than those who wait."""

    def add(self, ticket: Ticket[T]) -> None:
        turns = self.tenants.get(ticket.tenant)
        if turns is None:
            turns = self.tenants[ticket.tenant] = _Turns(max(self._least(), self.silent.pop(ticket.tenant, 0.0)))
            turns.tickets[ticket.number] = ticket
            self._sort(turns)
        else:
            turns.tickets[ticket.number] = ticket

    def remove(self, ticket: Ticket[T], charge: float) -> None:
        turns = self.tenants[ticket.tenant]
        self.order.remove(turns)
        del turns.tickets[ticket.number]
        turns.counter += charge
        if turns.tickets:
            self._sort(turns)
            return
        del self.tenants[ticket.tenant]
        self.silent[ticket.tenant] = turns.counter
        if len(self.silent) > MAX_SILENT:
            self._forget_some()

    def _least(self) -> float:
        return self.order[0].counter if self.order else 0.0

    def _forget_some(self) -> None:
        """Who has had no more than those who wait is treated like a stranger anyway; of the others, half who have had most."""
        least = self._least()
        ahead = sorted(((counter, name) for name, counter in self.silent.items() if counter > least), reverse=True)
        self.silent = {name: counter for counter, name in ahead[: MAX_SILENT // 2]}

    def _sort(self, turns: _Turns[T]) -> None:
        turns.order = turns.current()
        self.order.add(turns)


class AdmissionQueue(Generic[T]):
    """Requests for one model that wait for an engine with room.

    >>> queue = AdmissionQueue[str](QueueLimits(max_waiting=3))
    >>> tickets = [queue.enter(request, tenant=request[0], now=0.0) for request in ("a1", "a2", "b1")]
    >>> [queue.next().request for _ in tickets]
    ['a1', 'b1', 'a2']
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._lanes: SortedDict[int, _Lane[T]] = SortedDict()
        self._by_deadline: SortedKeyList[Ticket[T], tuple[float, int]] = SortedKeyList(key=lambda ticket: (ticket.deadline, ticket.number))
        self._numbers = 0

    def __len__(self) -> int:
        """Requests waiting. Runtime complexity: O(1)."""
        return len(self._by_deadline)

    @property
    def full(self) -> bool:
        """Nobody more may wait, unless somebody yields: `displace`. Runtime complexity: O(1)."""
        return len(self) >= self.limits.max_waiting

    def enter(self, request: T, *, tenant: str, now: float, priority: int = 0, deadline: float = math.inf, work: float = 1.0) -> Ticket[T]:
        """Wait. `work` is the request's share of its tenant's turns; `deadline` and `now` are monotonic seconds.

        A lower priority goes first, as in vLLM. The ticket's deadline is never later than `max_wait_s` from now.
        Raises QueueFull. Runtime complexity: O(log n).
        """
        if self.full:
            raise QueueFull
        self._numbers += 1
        ticket = Ticket(request, tenant, priority, min(deadline, now + self.limits.max_wait_s), work, self._numbers)
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = _Lane()
        lane.add(ticket)
        self._by_deadline.add(ticket)
        return ticket

    def displace(self, tenant: str, priority: int = 0) -> Ticket[T] | None:
        """For a newcomer to a full queue: the ticket that yields to it, no longer waiting; None when none has to.

        The newest ticket of whoever has most waiting among the least urgent, if those are less urgent than the newcomer, or as urgent
        and from a tenant that has more waiting even afterwards. Runtime complexity: O(tenants).

        >>> queue = AdmissionQueue[str](QueueLimits(max_waiting=3))
        >>> tickets = [queue.enter(request, tenant="a", now=0.0) for request in ("a1", "a2", "a3")]
        >>> queue.displace("a"), queue.displace("b").request
        (None, 'a3')
        """
        if not self._lanes:
            return None
        least_urgent, lane = self._lanes.peekitem(-1)
        if least_urgent < priority:
            return None
        heaviest = max(lane.tenants.values(), key=lambda turns: len(turns.tickets))
        if least_urgent == priority:
            own = lane.tenants.get(tenant)
            if len(heaviest.tickets) <= (len(own.tickets) if own is not None else 0) + 1:
                return None
        ticket: Ticket[T] = heaviest.tickets[next(reversed(heaviest.tickets))]
        self.leave(ticket)
        return ticket

    def in_order(self) -> Iterator[Ticket[T]]:
        """The waiting tickets, the next one first; after it, by tenant. Ends with the first change to the queue."""
        for lane in self._lanes.values():
            for turns in lane.order:
                yield from turns.tickets.values()

    def next(self) -> Ticket[T] | None:
        """Let in the request whose turn it is; None when none waits. Runtime complexity: O(log n)."""
        ticket = next(self.in_order(), None)
        if ticket is not None:
            self.let_in(ticket)
        return ticket

    def let_in(self, ticket: Ticket[T]) -> None:
        """The request waits no more: its turn has come, and its tenant is charged for it. Runtime complexity: O(log n)."""
        self._remove(ticket, ticket.work)

    def leave(self, ticket: Ticket[T]) -> None:
        """The request waits no more: its client has left, or it is given up. Harmless when it does not wait. O(log n)."""
        if ticket.waiting:
            self._remove(ticket, 0.0)

    def expired(self, now: float) -> list[Ticket[T]]:
        """Tickets whose deadline has passed, no longer waiting. Runtime complexity: O(expired · log n)."""
        late = []
        while self._by_deadline and self._by_deadline[0].deadline <= now:
            ticket = self._by_deadline[0]
            self.leave(ticket)
            late.append(ticket)
        return late

    def _remove(self, ticket: Ticket[T], charge: float) -> None:
        ticket.waiting = False
        self._by_deadline.remove(ticket)
        lane = self._lanes[ticket.priority]
        lane.remove(ticket, charge)
        if not lane.tenants:
            del self._lanes[ticket.priority]  # nobody waits: whoever has had more than the others keeps nobody waiting

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(n log n)."""
        tickets = list(self.in_order())
        assert len(tickets) == len(self) <= max(self.limits.max_waiting, 0)
        assert {id(ticket) for ticket in tickets} == {id(ticket) for ticket in self._by_deadline}
        for priority, lane in self._lanes.items():
            assert lane.tenants, "an empty lane"
            assert len(lane.order) == len(lane.tenants)
            assert {id(turns) for turns in lane.order} == {id(turns) for turns in lane.tenants.values()}
            assert not lane.silent.keys() & lane.tenants.keys()
            assert len(lane.silent) <= MAX_SILENT
            for tenant, turns in lane.tenants.items():
                assert turns.tickets
                assert turns.order == turns.current()
                assert list(turns.tickets) == sorted(turns.tickets)
                for ticket in turns.tickets.values():
                    assert ticket.waiting
                    assert (ticket.tenant, ticket.priority) == (tenant, priority)


class Pace:
    """How long until those who wait are through? By Little's law: so many in progress, each for so long.

    >>> pace = Pace()
    >>> for _ in range(4):
    ...     pace.began()
    >>> pace.ended(2.0)
    >>> pace.drain_s(6)  # three in progress, two seconds each: three leave every two seconds
    4.0
    """

    __slots__ = ("in_progress", "mean_s")

    def __init__(self) -> None:
        self.in_progress = 0
        self.mean_s: float | None = None
        """How long requests have taken lately; None before the first has ended."""

    def began(self) -> None:
        """A request has been let in."""
        self.in_progress += 1

    def ended(self, duration_s: float) -> None:
        """One has ended, so long after it was let in."""
        self.in_progress -= 1
        self.mean_s = duration_s if self.mean_s is None else self.mean_s + PACE_WEIGHT * (duration_s - self.mean_s)

    def drain_s(self, waiting: int) -> float | None:
        """Seconds until so many have been let in; None where nothing can be said."""
        if self.mean_s is None or not self.in_progress:
            return None
        return self.mean_s * waiting / self.in_progress


def retry_after(wait_s: float) -> int:
    """A wait as the whole seconds of a `Retry-After`.

    >>> retry_after(0.2), retry_after(7.1), retry_after(1e9)
    (1, 8, 120)
    """
    return max(MIN_RETRY_AFTER_S, math.ceil(min(MAX_RETRY_AFTER_S, wait_s)))
