"""An engine in virtual time does what the simulator's scheduler does step by step, and what the simulated engine does by a loop's clock."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import selectors
from collections.abc import Sequence as Many

import pytest

from engines.simulator.cache import BlockCache
from engines.simulator.core import Core
from engines.simulator.handover import Fetch, Keep
from engines.simulator.hashes import BlockNamer
from engines.simulator.scheduler import Limits, Scheduler
from engines.simulator.sequences import Prompt, Sequence
from engines.simulator.timing import Timing
from engines.simulator.words import Words
from engines.types import EngineKind
from engines.virtual.engine import Pace, VirtualEngine
from engines.virtual.link import Link
from engines.virtual.models import MODELS, EngineModel

SIZE = 16
TIMING = EngineModel().timing()


class Ask:
    """One request, by what is random about it."""

    def __init__(self, rng: random.Random, at: float, number: int) -> None:
        self.at = at
        self.family, shared, own = rng.randrange(4), rng.randrange(0, 30), rng.randrange(1, 40)
        self.tokens = [self.family + 1] * (shared * SIZE) + [1000 + number] * own
        self.limit = rng.choice([1, 2, 5, 40, 120])

    def sequence(self) -> Sequence:
        full = [hash((self.family, depth)) & 0xFFFF for depth in range(len(self.tokens) // SIZE)]
        shared = self.tokens.count(self.family + 1) // SIZE
        own = [hash((self.at, depth)) & 0xFFFFFFFF | 1 << 40 for depth in range((len(self.tokens) + self.limit) // SIZE)]
        return Sequence(Prompt([], self.limit), len(self.tokens), full[:shared] + own[shared:])


def asks(seed: int, count: int = 60, per_s: float = 12.0) -> list[Ask]:
    rng = random.Random(seed)
    at = 0.0
    made = []
    for number in range(count):
        at += rng.expovariate(per_s)
        made.append(Ask(rng, at, number))
    return made


def step_by_step(asked: Many[Ask], cache: BlockCache, timing: Timing, limits: Limits) -> list[tuple[float, float, int]]:
    """First token, end and hits of each, by the scheduler alone, one step after another."""
    scheduler = Scheduler(cache, timing, limits)
    coming, seen, now = list(asked), dict[Sequence, list[float]](), 0.0
    while coming or scheduler.running or scheduler.waiting:
        while coming and coming[0].at <= now:
            sequence = coming.pop(0).sequence()
            seen[sequence] = []
            scheduler.submit(sequence)
        step = scheduler.plan()
        if step is None:
            now = coming[0].at
            continue
        now += step.duration_s
        for sequence, _ in scheduler.complete(step):
            seen[sequence].append(now)
    return [(times[0], times[-1], sequence.cached) for sequence, times in seen.items()]


def in_virtual_time(asked: Many[Ask], engine: VirtualEngine) -> list[tuple[float, float, int]]:
    """The same, by the virtual engine, driven by events."""
    moments: list[tuple[float, int, Ask | None]] = [(ask.at, number, ask) for number, ask in enumerate(asked)]
    heapq.heapify(moments)
    first, last, sequences = dict[Sequence, float](), dict[Sequence, float](), []
    while moments or engine.due < math.inf:
        if moments and moments[0][0] < engine.due:
            at, _, ask = heapq.heappop(moments)
            if ask is not None:
                sequences.append(ask.sequence())
                engine.submit(sequences[-1], at)
            continue
        now = engine.due
        for sequence, _ in engine.advance():
            if sequence.generated == 1:
                first[sequence] = now
            if sequence.done:
                last[sequence] = now
    return [(first[sequence], last[sequence], sequence.cached) for sequence in sequences]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("blocks", [90, 2000])
def test_runs_of_alike_steps_change_nothing(seed: int, blocks: int) -> None:
    limits = Limits(8, 256)
    told = list[Pace]()
    one = step_by_step(asks(seed), BlockCache(blocks, SIZE), TIMING, limits)
    engine = VirtualEngine(TIMING, limits, BlockCache(blocks, SIZE), paced=told.append)
    other = in_virtual_time(asks(seed), engine)
    assert [hits for *_, hits in other] == [hits for *_, hits in one]
    assert [times for pair in other for times in pair[:2]] == pytest.approx([times for pair in one for times in pair[:2]])
    engine.scheduler._check()
    assert engine.scheduler.cache.used == 0
    if not engine.scheduler.counters.preemptions:
        tokens = sum(pace.steps * pace.sequences for pace in told)
        assert tokens == engine.scheduler.counters.generated - len(one)
        assert any(pace.steps > 1 for pace in told), "nothing was done in one go"


def test_a_look_in_between_changes_nothing() -> None:
    plain, looked = (VirtualEngine(TIMING, Limits(8, 256), BlockCache(200, SIZE)) for _ in range(2))
    for engine in (plain, looked):
        engine.submit(Sequence(Prompt([], 90), 100, list(range(20))), 0.0)
    began = 0.0
    while plain.due < math.inf:
        for share in (0.2, 0.5, 0.9):
            looked.settle(began + (plain.due - began) * share)
        assert looked.due == pytest.approx(plain.due)
        began = plain.due
        for engine in (plain, looked):
            engine.advance()
    assert looked.busy_s == pytest.approx(plain.busy_s)


def test_one_that_is_aborted_leaves_its_blocks_and_its_time_to_others() -> None:
    engine = VirtualEngine(TIMING, Limits(8, 256), BlockCache(200, SIZE))
    one, other = (Sequence(Prompt([], 100), 64, [base + n for n in range(20)]) for base in (100, 200))
    engine.submit(one, 0.0)
    engine.submit(other, 0.0)
    engine.advance()
    engine.advance()
    engine.abort(one, engine.due - 1e-4)
    while engine.due < math.inf:
        engine.advance()
    assert (one.done, one.generated < 100, other.generated) == (True, True, 100)
    assert engine.scheduler.cache.used == 0


def test_kv_from_another_engine_waits_for_its_link() -> None:
    there, here = (VirtualEngine(TIMING, Limits(8, 256), BlockCache(200, SIZE)) for _ in range(2))
    names = list(range(20))
    there.submit(computed := Sequence(Prompt([], 1, handover=Keep("")), 100, names), 0.0)
    there.advance()
    assert computed.done
    assert there.scheduler.cache.used == 7
    here.submit(wanted := Sequence(Prompt([], 3, handover=Fetch("", "")), 100, names), 1.0)
    assert here.scheduler.take_to_fetch() == [wanted]
    assert (here.due, here.scheduler.missing(wanted)) == (math.inf, 7)
    here.scheduler.fetched(wanted, (), computed.cached)
    there.scheduler.forget(computed)
    here.nudge(2.0)
    assert 2.0 < here.due < 2.0 + TIMING.step_s(100, 0)
    here.advance()
    assert (wanted.generated, there.scheduler.cache.used) == (1, 0)


def test_transfers_share_a_link() -> None:
    link = Link[str](100.0)
    link.begin("long", 300, now=0.0)
    link.begin("short", 50, now=1.0)
    assert link.due == 2.0
    assert link.arrived(2.0) == ["short"]
    assert link.due == pytest.approx(3.5)
    assert link.arrived(3.5) == ["long"]
    assert link.due == math.inf
    at_once = Link[str](math.inf)
    at_once.begin("any", 1e12, now=5.0)
    assert (at_once.due, at_once.arrived(5.0)) == (5.0, ["any"])


def test_the_default_model_is_the_one_that_numbers_are_compared_by() -> None:
    model = MODELS["8b-h100"]
    assert model.timing().step_s(1000, 10, 100_000) == pytest.approx(0.006 + 1000 * 50e-6 + 10 * 50e-6 + 100_000 * 5e-8)
    assert model.timing(0.5).step_s(0, 1) == pytest.approx(2 * 0.00605)
    assert (model.limits, model.cache(16).capacity) == (Limits(256, 8192), 25_000)
    assert all(other.kv_tokens > 8192 and other.source for other in MODELS.values())


class _Selector(selectors.DefaultSelector):
    """One that does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_for = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.asked_for += timeout or 0.0
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose clock is what it would have slept so far."""

    def __init__(self) -> None:
        self._skipping = _Selector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.asked_for


def test_a_simulated_engine_takes_as_long_by_its_loop() -> None:
    """`commutator simulate`'s own core, with tokens and names of its own, on a clock that is not the wall's."""
    asked, limits = asks(3), Limits(8, 256)
    told: dict[int, tuple[float, float, int]] = {}

    async def one(core: Core, number: int, ask: Ask) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(ask.at)
        with core.generate([Prompt(ask.tokens, ask.limit)]) as feed:
            times = list[float]()
            while feed.left:
                tokens = await feed.take()
                times += [loop.time()] * len(tokens)
            told[number] = (times[0], times[-1], feed.sequences[0].cached)

    async def served() -> None:
        scheduler = Scheduler(BlockCache(200, SIZE), TIMING, limits)
        core = Core(scheduler, BlockNamer(EngineKind.VLLM, SIZE), Words({5: " a"}), lambda _: None)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(core.run())
            async with asyncio.TaskGroup() as clients:
                for number, ask in enumerate(asked):
                    clients.create_task(one(core, number, ask))
            running.cancel()

    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(served())
    by_clock = [told[number] for number in range(len(asked))]
    virtual = in_virtual_time(asked, VirtualEngine(TIMING, limits, BlockCache(200, SIZE)))
    assert [hits for *_, hits in virtual] == [hits for *_, hits in by_clock]
    ttfts = [[first - ask.at for ask, (first, _, _) in zip(asked, times, strict=True)] for times in (virtual, by_clock)]
    ends = [[last for _, last, _ in times] for times in (virtual, by_clock)]
    assert ttfts[0] == pytest.approx(ttfts[1], rel=0.02, abs=1e-3)
    assert ends[0] == pytest.approx(ends[1], rel=0.02)
