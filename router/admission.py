"""Who is next when every engine is full? A bounded queue per model: priority first, then fair between tenants, then first come.

Fairness is start-time fair queueing: each tenant has a virtual clock that advances with the work it has queued, and the ticket with
the smallest start goes first. A tenant that sends a thousand prompts and one that sends ten take turns; one that was silent
starts at the present, so that silence earns no credit.

    tenant a:  a1 a2 a3 a4 a5        starts 0 1 2 3 4
    tenant b:  b1 b2                 starts 0 1             order: a1 b1 a2 b2 a3 a4 a5

What cannot wait is told at once, with an honest guess of when to come back: the queue's length at the pace it has been moving.
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

import math
from typing import Final

import msgspec
from sortedcontainers import SortedKeyList

RATE_HALF_LIFE_S: Final = 10.0
MIN_RETRY_AFTER_S: Final = 1
MAX_RETRY_AFTER_S: Final = 120


class Ticket:
    """A request's place in a queue."""

    __slots__ = ("deadline", "number", "priority", "start", "tenant")

    def __init__(self, tenant: str, priority: int, start: float, deadline: float, number: int) -> None:
        self.tenant = tenant
        self.priority = priority
        self.start = start
        self.deadline = deadline
        self.number = number

    @property
    def order(self) -> tuple[int, float, int]:
        """Smallest is next: vLLM's meaning of priority, lower first."""
        return self.priority, self.start, self.number


class QueueFull(Exception):
    """There is no room to wait; `retry_after_s` is when there should be."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"too many requests are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class QueueLimits(msgspec.Struct, frozen=True):
    """How many may wait, and how long."""

    max_waiting: int = 1000
    max_wait_s: float = 30.0


class AdmissionQueue:
    """Requests for one model that wait for an engine with room.

    >>> queue = AdmissionQueue(QueueLimits(max_waiting=3))
    >>> tickets = [queue.enter(tenant, now=0.0) for tenant in ("a", "a", "b")]
    >>> [queue.next(now=0.0).tenant for _ in tickets]
    ['a', 'b', 'a']
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._waiting: SortedKeyList[Ticket, tuple[int, float, int]] = SortedKeyList(key=lambda ticket: ticket.order)
        self._by_deadline: SortedKeyList[Ticket, tuple[float, int]] = SortedKeyList(key=lambda ticket: (ticket.deadline, ticket.number))
        self._clocks: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._present = 0.0
        self._numbers = 0
        self._rate = 0.0
        self._rate_at: float | None = None

    def __len__(self) -> int:
        """Requests waiting. Runtime complexity: O(1)."""
        return len(self._waiting)

    def enter(self, tenant: str, *, now: float, priority: int = 0, deadline: float = math.inf, work: float = 1.0) -> Ticket:
        """Wait. `work` is the request's share of its tenant's turn; `deadline` and `now` are monotonic seconds.

        The ticket's deadline is never later than `max_wait_s` from now. Raises QueueFull. Runtime complexity: O(log n).
        """
        if len(self._waiting) >= self._limits.max_waiting:
            raise QueueFull(self.retry_after(now))
        if len(self._clocks) > 2 * self._limits.max_waiting:
            self._clocks = {name: clock for name, clock in self._clocks.items() if clock > self._present or name in self._counts}
        start = max(self._present, self._clocks.get(tenant, 0.0))
        self._clocks[tenant] = start + work
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self._numbers += 1
        ticket = Ticket(tenant, priority, start, min(deadline, now + self._limits.max_wait_s), self._numbers)
        self._waiting.add(ticket)
        self._by_deadline.add(ticket)
        return ticket

    def next(self, now: float) -> Ticket | None:
        """The ticket whose turn it is, no longer waiting; None when none is. Runtime complexity: O(log n)."""
        if not self._waiting:
            return None
        ticket: Ticket = self._waiting[0]
        self._present = max(self._present, ticket.start)
        self.leave(ticket)
        self._moved(now)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request waits no more: its turn has come, its client has left, or its time is up. Runtime complexity: O(log n)."""
        self._waiting.remove(ticket)
        self._by_deadline.remove(ticket)
        self._counts[ticket.tenant] -= 1
        if not self._counts[ticket.tenant]:
            # A tenant with nothing waiting is forgotten once its clock is in the past: it would start at the present anyway.
            del self._counts[ticket.tenant]
            if self._clocks[ticket.tenant] <= self._present:
                del self._clocks[ticket.tenant]
        if not self._waiting:
            self._clocks.clear()
            self._present = 0.0

    def expired(self, now: float) -> list[Ticket]:
        """Tickets whose deadline has passed, no longer waiting. Runtime complexity: O(expired · log n)."""
        late = []
        while self._by_deadline and self._by_deadline[0].deadline <= now:
            ticket = self._by_deadline[0]
            self.leave(ticket)
            late.append(ticket)
        return late

    def retry_after(self, now: float) -> int:
        """Whole seconds until a request that comes now should find room, at the pace of the last while. Runtime complexity: O(1)."""
        rate = self._rate_now(now)
        if rate <= 0:
            return max(MIN_RETRY_AFTER_S, min(MAX_RETRY_AFTER_S, math.ceil(self._limits.max_wait_s)))
        return max(MIN_RETRY_AFTER_S, min(MAX_RETRY_AFTER_S, math.ceil(len(self._waiting) / rate)))

    def _moved(self, now: float) -> None:
        """One request more has been let in: the pace is an average that forgets by half every `RATE_HALF_LIFE_S`."""
        self._rate = self._rate_now(now) + math.log(2) / RATE_HALF_LIFE_S
        self._rate_at = now

    def _rate_now(self, now: float) -> float:
        """Requests let in per second."""
        if self._rate_at is None:
            return 0.0
        return float(self._rate * 0.5 ** ((now - self._rate_at) / RATE_HALF_LIFE_S))

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(n log n)."""
        assert len(self._waiting) == len(self._by_deadline) <= self._limits.max_waiting
        assert {id(ticket) for ticket in self._waiting} == {id(ticket) for ticket in self._by_deadline}
        counts: dict[str, int] = {}
        for ticket in self._waiting:
            counts[ticket.tenant] = counts.get(ticket.tenant, 0) + 1
            assert ticket.start < self._clocks[ticket.tenant]
        assert counts == self._counts
        assert self._waiting or not self._clocks
