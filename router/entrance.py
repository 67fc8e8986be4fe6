"""May this request go now? At once while an engine has room and nobody waits; else in its turn; else 429 with an honest `Retry-After`.

    at_once ──room, nobody waits─────────────────────────▶ Place: an endpoint chosen, the request counted there
      None ──▶ queue: AdmissionQueue ──a request ends, or a tick──▶ Place
                   └────full, or waited long enough──────────────▶ Shed

Whoever makes room also chooses and counts for the one whose turn it is, in the same breath. So a request that is let in has its place
already, and nobody can slip in before it goes on.

Pure: who waits is told by a `Promise`, be it a future of the loop (`router.gate`) or a moment of virtual time (`router.replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

import msgspec

from router.admission import AdmissionQueue, Pace, QueueLimits, Reason, Shed, Ticket, retry_after
from router.scheduling.scheduler import NoCandidate, PolicyError
from router.scheduling.types import Rejection

if TYPE_CHECKING:
    from engines.types import Endpoint
    from router.chooser import Choice
    from router.exchange import Headers
    from router.intake import Asked
    from router.load import Reservation

TICK_S: Final = 0.02
AT_ONCE: Final = 32
"""Requests let in before the loop may do something else: choosing takes up to 0.2 ms each."""
LOOK_AHEAD: Final = 100
"""How far behind one that cannot go yet others are looked for that can."""
PASSING: Final = frozenset({Rejection.SATURATED, Rejection.COOLING, Rejection.EJECTED})
TOKENS_A_TURN: Final = 1024
"""A request is one share of its tenant's turns, and one more for every so many prompt tokens."""


class Chooses(Protocol):
    """What is needed of the chooser."""

    def decide(self, asked: Asked, tried: set[str]) -> Choice:
        """Choose an endpoint; raises NoCandidate, PolicyError."""
        ...

    def reserve(self, choice: Choice) -> Reservation:
        """Count the request there."""
        ...

    def rejections(self, asked: Asked, tried: set[str]) -> list[tuple[Endpoint, Rejection]] | None:
        """Why no endpoint can take the request now, or None when one can."""
        ...

    def cooled_in(self, asked: Asked, tried: set[str]) -> float | None:
        """Seconds until the first engine that is being left alone may be asked again; None when there is none."""
        ...

    def serves(self, model: str) -> bool:
        """Whether there is an engine that serves the model."""
        ...


class Promise(Protocol):
    """Where one who waits is told; the part of a future that is needed."""

    def done(self) -> bool:
        """Whether nobody waits for it any more: it has been told, or has left."""
        ...

    def set_result(self, place: Place, /) -> None:
        """It has its turn."""
        ...

    def set_exception(self, error: BaseException, /) -> None:
        """It will have none."""
        ...


class HeaderNames(msgspec.Struct, frozen=True):
    """Where a client says how it wants to wait. Lower case."""

    tenant: bytes | None
    priority: bytes
    deadline: bytes


class Visit:
    """One request's dealings with the gate, over all its tries."""

    __slots__ = ("arrived", "client", "headers", "let_in")

    def __init__(self, headers: Headers, client: str, arrived: float) -> None:
        """`client` is the name of the client's API key; empty where none is asked for."""
        self.headers = headers
        self.client = client
        self.arrived = arrived
        self.let_in = False
        """It has had its turn once; a further try goes ahead of those who have not."""


class Place:
    """An endpoint chosen and counted. Use it as a context: the place is given back at its end."""

    __slots__ = ("_began", "_door", "_entrance", "choice", "reservation")

    def __init__(self, entrance: Entrance, door: _Door, choice: Choice, reservation: Reservation, began: float) -> None:
        self.choice = choice
        self.reservation = reservation
        self._entrance = entrance
        self._door = door
        self._began = began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.reservation.release()
        self._entrance.left(self._door, self._began)


class _Wish(msgspec.Struct, frozen=True):
    """How a client wants to wait."""

    tenant: str
    priority: int
    deadline: float
    own_deadline: bool
    """The client's own, earlier than ours."""


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    """A request in the queue."""

    asked: Asked
    tried: set[str]
    wish: _Wish
    place: Promise


class _Door:
    """What is kept for each model."""

    __slots__ = ("model", "pace", "queue")

    def __init__(self, model: str, limits: QueueLimits) -> None:
        self.model = model
        self.queue: AdmissionQueue[_Waiting] = AdmissionQueue(limits)
        self.pace = Pace()


class Queued(msgspec.Struct, frozen=True, eq=False):
    """One who waits."""

    door: _Door
    ticket: Ticket[_Waiting]
    began: float


class Entrance:
    """Lets requests in. While anybody waits, `pump` has to be called every `TICK_S`: nothing tells of an engine that has room again."""

    def __init__(
        self,
        chooser: Chooses,
        limits: QueueLimits,
        names: HeaderNames,
        *,
        waited: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        """`waited` is told how long each request that had to wait has waited, once it is let in."""
        self.admitted_at_once = 0
        self.admitted_after_waiting = 0
        self.gave_up = 0
        """Clients that left while they waited."""
        self.shed: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self._chooser = chooser
        self._limits = limits
        self._names = names
        self._waited = waited
        self._clock = clock
        self._doors: dict[str, _Door] = {}
        self._queues: dict[str, _Door] = {}
        """Doors before which somebody waits; whose turn it is among models comes first."""

    @property
    def somebody_waits(self) -> bool:
        """Whether `pump` has anybody to look after."""
        return bool(self._queues)

    def at_once(self, asked: Asked, tried: set[str], visit: Visit) -> Place | None:
        """A place at an engine not in `tried`; None where there is none now and one may come: `queue`.

        Raises NoCandidate when waiting would be no use, PolicyError when the policy fails.
        """
        door = self._door(asked.request.model)
        if not visit.let_in and door.queue:
            return None
        try:
            place = self._place(door, asked, tried)
        except NoCandidate as nowhere:
            if not _may_come(nowhere.rejected):
                raise
            return None
        self.admitted_at_once += not visit.let_in
        visit.let_in = True
        return place

    def queue(self, asked: Asked, tried: set[str], visit: Visit, promise: Promise) -> Queued:
        """Wait for a place; `promise` may be told before this returns.

        Raises Shed when the queue is full or there would be none in time, NoCandidate when waiting would be no use.
        """
        door, wish, now = self._door(asked.request.model), self._wish(asked, visit), self._clock()
        self._check_use(door, asked, tried, wish)
        waiting = _Waiting(asked, tried, wish, promise)
        ticket = self._queue(door, waiting, work=0.0 if visit.let_in else 1 + asked.request.prompt_tokens / TOKENS_A_TURN)
        queued = Queued(door, ticket, now)
        self.pump()
        return queued

    def leave(self, queued: Queued) -> None:
        """It waits no more, whatever came of it."""
        queued.door.queue.leave(queued.ticket)
        self._forget_if_empty(queued.door)

    def let_in(self, queued: Queued, visit: Visit) -> None:
        """It has been given its place after waiting, and takes it."""
        self.admitted_after_waiting += not visit.let_in
        visit.let_in = True
        self._waited(self._clock() - queued.began)

    def pump(self) -> None:
        """Turn away whose time is up, and let in as many as there is room for, models taking turns."""
        now = self._clock()
        for door in list(self._queues.values()):
            self._expire(door, now)
        left = AT_ONCE
        progress = True
        while progress and left > 0:
            progress = False
            for door in list(self._queues.values()):
                if self._let_next_in(door):
                    left -= 1
                    progress = True
                    if door.queue:
                        self._queues[door.model] = self._queues.pop(door.model)

    def left(self, door: _Door, began: float) -> None:
        """A request has given its place back."""
        door.pace.ended(self._clock() - began)
        if self._queues:
            self.pump()

    def waiting(self) -> Iterable[tuple[str, int]]:
        """How many requests wait, by model."""
        return [(model, len(door.queue)) for model, door in self._doors.items()]

    def sweep(self) -> None:
        """Forget models that nobody serves any more, and nobody waits for."""
        for model in [
            name for name, door in self._doors.items() if not (door.queue or door.pace.in_progress or self._chooser.serves(name))
        ]:
            del self._doors[model]

    # inside

    def _door(self, model: str) -> _Door:
        door = self._doors.get(model)
        if door is None:
            door = self._doors[model] = _Door(model, self._limits)
        return door

    def _place(self, door: _Door, asked: Asked, tried: set[str]) -> Place:
        choice = self._chooser.decide(asked, tried)
        reservation = self._chooser.reserve(choice)
        door.pace.began()
        return Place(self, door, choice, reservation, self._clock())

    def _check_use(self, door: _Door, asked: Asked, tried: set[str], wish: _Wish) -> None:
        """Raise NoCandidate or Shed where waiting would be no use."""
        now = self._clock()
        rejected = self._chooser.rejections(asked, tried)
        if rejected is not None:
            if not _may_come(rejected):
                raise NoCandidate(door.model, rejected)
            cooled_in = self._chooser.cooled_in(asked, tried)
            full = any(rejection is Rejection.SATURATED for _, rejection in rejected)
            if not full and cooled_in is not None and now + cooled_in > wish.deadline:
                raise Shed(Reason.COOLING, f"every engine of `{door.model}` has asked to be left alone", retry_after(cooled_in))
        if now >= wish.deadline:
            raise self._late(door, wish)

    def _queue(self, door: _Door, waiting: _Waiting, *, work: float) -> Ticket[_Waiting]:
        """Into the queue. Raises Shed when it is full, and nobody has to yield."""
        wish = waiting.wish
        if door.queue.full:
            yields = door.queue.displace(wish.tenant, wish.priority)
            if yields is None:
                raise self._shed(door, Reason.QUEUE_FULL, "too many requests are waiting already")
            if not yields.request.place.done():
                yields.request.place.set_exception(self._shed(door, Reason.DISPLACED, "too many requests are waiting already"))
        ticket = door.queue.enter(waiting, tenant=wish.tenant, now=self._clock(), priority=wish.priority, deadline=wish.deadline, work=work)
        self._queues[door.model] = door
        return ticket

    def _let_next_in(self, door: _Door) -> bool:
        """Whether somebody could be let in."""
        hopeless: set[tuple[object, frozenset[str]]] = set()
        for position, ticket in enumerate(door.queue.in_order()):
            waiting = ticket.request
            if waiting.place.done():  # its client has just left
                door.queue.leave(ticket)
                return bool(door.queue)
            kind = (waiting.asked.route.engines, frozenset(waiting.tried))
            if kind not in hopeless and self._chooser.rejections(waiting.asked, waiting.tried) is None:
                door.queue.let_in(ticket)
                self._forget_if_empty(door)
                self._give_place(door, waiting)
                return True
            hopeless.add(kind)
            if position >= LOOK_AHEAD:
                break
        return False

    def _give_place(self, door: _Door, waiting: _Waiting) -> None:
        try:
            waiting.place.set_result(self._place(door, waiting.asked, waiting.tried))
        except (NoCandidate, PolicyError) as error:
            waiting.place.set_exception(error)

    def _expire(self, door: _Door, now: float) -> None:
        for ticket in door.queue.expired(now):
            waiting = ticket.request
            if not waiting.place.done():
                served = self._chooser.serves(door.model)
                waiting.place.set_exception(self._late(door, waiting.wish) if served else self._without_engine(door))
        self._forget_if_empty(door)

    def _forget_if_empty(self, door: _Door) -> None:
        if not door.queue:
            self._queues.pop(door.model, None)

    def _late(self, door: _Door, wish: _Wish) -> Shed:
        if wish.own_deadline:
            return self._shed(door, Reason.DEADLINE, "no engine had room within the time the client gave")
        return self._shed(door, Reason.WAITED, f"no engine had room within {self._limits.max_wait_s:g} s")

    def _without_engine(self, door: _Door) -> Shed:
        return self._shed(door, Reason.NO_ENGINE, f"no engine serves `{door.model}` at the moment")

    def _shed(self, door: _Door, reason: Reason, why: str) -> Shed:
        wait_s = door.pace.drain_s(len(door.queue) + 1)
        return Shed(reason, why, retry_after(self._limits.max_wait_s if wait_s is None else wait_s))

    def _wish(self, asked: Asked, visit: Visit) -> _Wish:
        """What a header says that cannot be understood counts as not said."""
        named = dict(reversed(visit.headers))  # the first of a name wins
        names = self._names
        tenant = named.get(names.tenant, b"") if names.tenant is not None else b""
        tenant = tenant or visit.client.encode() or named.get(b"authorization") or named.get(b"x-api-key") or b""
        urgency, patience = _number(named.get(names.priority)), _number(named.get(names.deadline))
        priority = asked.priority if urgency is None else int(urgency)
        own_deadline = patience is not None and 0 <= patience < self._limits.max_wait_s
        wait_s = patience if patience is not None and own_deadline else self._limits.max_wait_s
        return _Wish(tenant.decode("latin-1"), priority, visit.arrived + wait_s, own_deadline)


def _may_come(rejected: Iterable[tuple[Endpoint, Rejection]]) -> bool:
    """Whether one of these reasons passes by itself."""
    return any(rejection in PASSING for _, rejection in rejected)


def _number(value: bytes | None) -> float | None:
    """A header's value as a number of sensible size."""
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    return number if number is not None and abs(number) < 1e9 else None
