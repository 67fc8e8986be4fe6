"""The gate itself: what happens between making room and the one whose turn it is, and what cannot be arranged from outside."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from discovery.signal import LIVE, Signal
from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec, Model
from router.admission import QueueLimits, Reason, Shed
from router.caches import Caches
from router.calibration import Calibration
from router.chooser import Choice, Chooser
from router.entrance import AT_ONCE, HeaderNames, Place, Visit
from router.fleet import Fleet, Member
from router.gate import Gate
from router.intake import Asked
from router.load import LoadBook, Reservation
from router.routes import INFERENCE
from router.scheduling.policies.round_robin import RoundRobin
from router.scheduling.scheduler import NoCandidate, PolicyError, Scheduler
from router.scheduling.types import Candidate, Decision, Rejection, RoutingRequest
from router.scheduling.types import Reason as Why
from tests.waiting import alongside, until

ENGINE = Endpoint("http://a:8000")
MEMBER = Member(EngineInfo(ENGINE.engine, EngineSpec(ENGINE.engine), EngineKind.VLLM, "1", ()))
NAMES = HeaderNames(tenant=None, priority=b"x-priority", deadline=b"x-deadline")


class OneEngine:
    """Chooses among one engine with so much room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.book = LoadBook()
        self.broken = False
        self.why = Rejection.SATURATED
        self.gone = False

    @property
    def in_flight(self) -> int:
        return len(self.book)

    def decide(self, asked: Asked, tried: set[str]) -> Choice:
        if self.broken:
            raise PolicyError(self, "is broken")
        if (rejected := self.rejections(asked, tried)) is not None:
            raise NoCandidate(asked.request.model, rejected)
        candidate = Candidate(ENGINE, 16, 0, 0)
        return Choice(asked, Decision(candidate, 0, 0.0, Why.POLICY, "one", (), ()), MEMBER, [])

    def reserve(self, choice: Choice) -> Reservation:
        assert self.in_flight < self.room, "more are let in than there is room for"
        return self.book.reserve(ENGINE, [], 0)

    def rejections(self, asked: Asked, tried: set[str]) -> list[tuple[Endpoint, Rejection]] | None:
        if ENGINE.engine in tried:
            return [(ENGINE, Rejection.EXCLUDED)]
        return None if self.in_flight < self.room else [(ENGINE, self.why)]

    def cooled_in(self, asked: Asked, tried: set[str]) -> float | None:
        return None

    def serves(self, model: str) -> bool:
        return not self.gone


def gate_of(
    chooser: OneEngine, *, max_waiting: int = 1000, max_wait_s: float = 30.0, waited: Callable[[float], None] = lambda _: None
) -> Gate:
    return Gate(chooser, QueueLimits(max_waiting, max_wait_s), NAMES, waited=waited, clock=asyncio.get_running_loop().time)


def asked(model: str = "m", tokens: int = 0) -> Asked:
    return Asked(INFERENCE[b"/v1/chat/completions"], b"{}", RoutingRequest(model, tokens), {}, 0)


def visit(**headers: str) -> Visit:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Visit(named, "", asyncio.get_running_loop().time())


async def leave(place: Place) -> None:
    with place:
        pass


async def test_whoever_has_been_let_in_keeps_the_place_from_all_who_come_meanwhile() -> None:
    engine = OneEngine(room=1)
    gate = gate_of(engine)
    first = await gate.enter(asked(), set(), visit())
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(gate.enter(asked(), set(), visit()))
        await until(lambda: gate.waiting() == [("m", 1)])
        await leave(first)
        assert engine.in_flight == 1, "the place is taken before the one who gets it has run"
        late = group.create_task(gate.enter(asked(), set(), visit()))
        await leave(await waiting)
        await leave(await late)
    assert engine.in_flight == 0
    assert (gate.admitted_at_once, gate.admitted_after_waiting) == (1, 2)


async def test_a_client_that_leaves_just_as_it_is_let_in_gives_the_place_back_to_the_next() -> None:
    engine = OneEngine(room=1)
    gate = gate_of(engine)
    first = await gate.enter(asked(), set(), visit())
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(gate.enter(asked(), set(), visit()))
        staying = group.create_task(gate.enter(asked(), set(), visit()))
        await until(lambda: gate.waiting() == [("m", 2)])
        await leave(first)
        leaving.cancel()
        place = await staying
        assert leaving.cancelled()
        assert engine.in_flight == 1
        await leave(place)
    assert engine.in_flight == 0
    assert gate.gave_up == 1


async def test_a_client_that_has_left_is_passed_over() -> None:
    engine = OneEngine(room=1)
    gate = gate_of(engine)
    first = await gate.enter(asked(), set(), visit())
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(gate.enter(asked(), set(), visit()))
        staying = group.create_task(gate.enter(asked(), set(), visit()))
        await until(lambda: gate.waiting() == [("m", 2)])
        leaving.cancel()
        await leave(first)
        assert engine.in_flight == 1
        await leave(await staying)
    assert engine.in_flight == 0
    assert gate.waiting() == [("m", 0)]


async def test_room_that_nobody_announces_is_found_at_the_next_tick() -> None:
    engine = OneEngine(room=0)
    gate = gate_of(engine)
    async with alongside(gate.run()), asyncio.TaskGroup() as group:
        tasks = [group.create_task(gate.enter(asked(), set(), visit())) for _ in range(3 * AT_ONCE)]
        await until(lambda: gate.waiting() == [("m", 3 * AT_ONCE)])
        engine.room = 1000
        places = [await task for task in tasks]
        assert engine.in_flight == 3 * AT_ONCE
        for place in places:
            await leave(place)


async def test_only_so_many_are_let_in_before_the_loop_may_do_something_else() -> None:
    engine = OneEngine(room=0)
    gate = gate_of(engine)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(gate.enter(asked(), set(), visit())) for _ in range(2 * AT_ONCE)]
        await until(lambda: gate.waiting() == [("m", 2 * AT_ONCE)])
        engine.room = 1000
        gate.pump()
        assert engine.in_flight == AT_ONCE
        gate.pump()
        for task in tasks:
            await leave(await task)


async def test_one_that_cannot_go_does_not_hold_up_those_who_can() -> None:
    engine = OneEngine(room=1)
    gate = gate_of(engine)
    first = await gate.enter(asked(), set(), visit())
    excluded: set[str] = set()
    async with asyncio.TaskGroup() as group:
        stuck = group.create_task(gate.enter(asked(), excluded, visit()))
        await until(lambda: gate.waiting() == [("m", 1)])
        excluded.add(ENGINE.engine)
        free = group.create_task(gate.enter(asked(), set(), visit()))
        await until(lambda: gate.waiting() == [("m", 2)])
        await leave(first)
        await leave(await free)
        assert not stuck.done()
        stuck.cancel()


async def test_a_policy_that_fails_fails_the_request_whose_turn_it_is() -> None:
    engine = OneEngine(room=1)
    gate = gate_of(engine)
    first = await gate.enter(asked(), set(), visit())
    async with asyncio.TaskGroup() as group:

        async def fails() -> None:
            with pytest.raises(PolicyError):
                await gate.enter(asked(), set(), visit())

        group.create_task(fails())
        await until(lambda: gate.waiting() == [("m", 1)])
        engine.broken = True
        await leave(first)
    assert gate.waiting() == [("m", 0)]
    assert engine.in_flight == 0


async def test_waiting_is_refused_where_it_would_be_no_use() -> None:
    gate = gate_of(OneEngine(room=0))
    with pytest.raises(NoCandidate):
        await gate.enter(asked(), {ENGINE.engine}, visit())


async def test_a_request_that_has_been_let_in_before_goes_ahead_of_those_who_have_not() -> None:
    engine = OneEngine(room=2)
    gate = gate_of(engine)
    again = visit()
    first, second = await gate.enter(asked(), set(), again), await gate.enter(asked(), set(), visit())
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(gate.enter(asked(), set(), visit()))
        await until(lambda: gate.waiting() == [("m", 1)])
        engine.room = 3  # and no tick yet
        place = await gate.enter(asked(), set(), again)
        assert not waiting.done()
        for taken in (place, first, second):
            await leave(taken)
        await leave(await waiting)
    assert gate.admitted_at_once == 2


@pytest.mark.parametrize(("headers", "reason"), [({"x_deadline": "0"}, Reason.DEADLINE), ({}, Reason.QUEUE_FULL)])
async def test_a_request_that_may_not_wait_is_turned_away_and_counted(headers: dict[str, str], reason: Reason) -> None:
    gate = gate_of(OneEngine(room=0), max_waiting=0)
    with pytest.raises(Shed) as shed:
        await gate.enter(asked(), set(), visit(**headers))
    assert shed.value.reason is reason
    assert {name for name, count in gate.shed.items() if count} == {reason}


async def test_the_time_to_come_back_follows_from_how_long_requests_take() -> None:
    engine = OneEngine(room=2)
    now = 100.0
    gate = Gate(engine, QueueLimits(max_waiting=3, max_wait_s=60.0), NAMES, waited=lambda _: None, clock=lambda: now)
    places = [await gate.enter(asked(), set(), Visit([], "", now)) for _ in range(2)]
    now = 108.0
    await leave(places.pop())
    places.append(await gate.enter(asked(), set(), Visit([], "", now)))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(gate.enter(asked(), set(), Visit([], "", now))) for _ in range(3)]
        await until(lambda: gate.waiting() == [("m", 3)])
        with pytest.raises(Shed) as shed:
            await gate.enter(asked(), set(), Visit([], "", now))
        assert shed.value.retry_after_s == 16  # four of them, two at a time, 8 s each
        for task in tasks:
            task.cancel()


async def test_models_that_nobody_serves_any_more_are_forgotten() -> None:
    engine = OneEngine(room=1)
    gate = gate_of(engine)
    place = await gate.enter(asked("old"), set(), visit())
    engine.gone = True
    gate.sweep()
    assert gate.waiting() == [("old", 0)]
    await leave(place)
    gate.sweep()
    assert gate.waiting() == []


class NoSignals:
    """Endpoints of which nothing is heard."""

    def signal(self, endpoint: Endpoint, now: float) -> Signal:
        return LIVE

    def block_size(self, endpoint: Endpoint) -> int | None:
        return None

    def served(self, endpoint: Endpoint, now: float, new_blocks: int, *, sent_at: float | None = None) -> None:
        pass

    def hit(self, endpoint: Endpoint, blocks: int, *, known: int, new: int, sent_at: float) -> None:
        pass


async def test_those_who_wait_do_not_fall_upon_an_engine_that_was_full_all_at_once() -> None:
    now = 100.0
    fleet, book = Fleet(), LoadBook()
    fleet.add(EngineInfo(ENGINE.engine, EngineSpec(ENGINE.engine), EngineKind.VLLM, "1", (Model("m"),)))
    fleet.serve(ENGINE.engine)
    scheduler = Scheduler(RoundRobin(), "round-robin", 0.0, random.Random(1))
    chooser = Chooser(fleet, Caches(), book, scheduler, NoSignals(), Calibration(), clock=lambda: now)
    gate = Gate(chooser, QueueLimits(max_wait_s=60.0), NAMES, waited=lambda _: None, clock=lambda: now)
    with await gate.enter(asked(), set(), Visit([], "", now)) as first:
        chooser.refused(first.choice, 5.0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(gate.enter(asked(), set(), Visit([], "", now))) for _ in range(40)]
        await until(lambda: gate.waiting() == [("m", 40)])
        in_flight = []
        for later in (4.9, 5.0, 5.4, 5.5, 6.0, 7.0, 8.0):
            now = 100.0 + later
            for _ in range(3):
                gate.pump()
            in_flight.append(len(book))
        assert in_flight == [0, 1, 1, 2, 4, 16, 40]
        for task in tasks:
            await leave(await task)
    assert len(book) == 0
