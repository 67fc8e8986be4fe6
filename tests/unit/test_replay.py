"""Replay: queues as theory has them, nothing lost, hits as they should be; failures, pairs, waiting and scaling by the router's own rules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pytest

from engines.types import Endpoint, Role
from engines.virtual.models import EngineModel
from router.admission import QueueLimits
from router.disagg import Mode
from router.load import LoadBook
from router.pairing import DisaggRules
from router.replay.engines import Hardware, State
from router.replay.generators import GENERATORS, generate
from router.replay.measure import Run, Served, Targets, spread
from router.replay.replay import Failure, Member, Replay, Setting
from router.replay.scaling import Scaler, Seen
from router.replay.workload import Arrival, Workload, timed
from router.scheduling.scheduler import Scheduler
from router.scheduling.table import load_policy
from router.scheduling.types import Candidate, Context, Overlap, RoutingRequest
from tests.choosing import chain

SIZE = 16
MODEL = EngineModel()
IDLE = Hardware(MODEL, SIZE)


def setting(engines: int = 2, **changed: object) -> Setting:
    return msgspec.structs.replace(Setting(IDLE, (Member(),) * engines), **changed)


def played(
    arrivals: Sequence[Arrival], of: Setting | None = None, policy: str = "kv", *, speed: float = 1.0, scaler: Scaler | None = None
) -> tuple[Run, Replay]:
    name, made = load_policy(policy)
    replay = Replay(of or setting(), made, name, scaler=scaler)
    for _ in replay.run(timed(Workload("test", SIZE, tuple(arrivals)), speed)):
        pass
    return replay.tally.run("test", name, speed, 0, Targets(), MODEL), replay


def apart(count: int, prompt: int = 160, output: int = 4, every_s: float = 1.0) -> list[Arrival]:
    """Requests that share nothing."""
    return [Arrival(number * every_s, prompt, output, tuple(chain(number, (prompt + output) // SIZE))) for number in range(count)]


def outcomes(replay: Replay) -> list[str]:
    return [one.shed or one.failed or ("served" if one.e2e_s is not None else "lost") for one in replay.tally.served]


def nothing_is_left(replay: Replay) -> None:
    """No request is counted anywhere, and the index knows what the engines hold."""
    assert replay._trips.over
    assert len(replay._engines._load) == 0
    replay._engines._load._check()
    replay._engines._caches._check()
    for engine in replay._engines.present():
        engine.virtual.scheduler._check()
        assert engine.virtual.scheduler.cache.used == 0
        if engine.state is State.READY and not engine.virtual.take_changes():
            while replay._agenda._heap and replay._agenda._heap[0][0] < replay._agenda.now + IDLE.event_delay_s:
                replay._agenda.step()
            assert engine.held.keys.keys() == engine.virtual.scheduler.cache.names


# ---------------------------------------------------------------------------------------------------------------- theory


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_waiting_is_what_theory_says_of_one_server(load: float) -> None:
    """M/D/1: Poisson arrivals, equal prompts one after another; Pollaczek and Khinchine's mean wait is load · D / (2 · (1 − load))."""
    rng, at, count = random.Random(1), 0.0, 5000
    service_s = MODEL.step_s + 1000 * MODEL.prefill_token_s
    arrivals = []
    for _ in range(count):
        at += rng.expovariate(load / service_s)
        arrivals.append(Arrival(at, 1000, 1))
    one_by_one = msgspec.structs.replace(IDLE, block_size=1024, model=msgspec.structs.replace(MODEL, max_num_seqs=1))
    run, _ = played(arrivals, setting(1, hardware=one_by_one), "round-robin")
    assert run.ttft_s.mean - service_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.08)
    assert run.busy == pytest.approx(load, rel=0.03)


def test_an_idle_fleet_takes_as_long_as_the_model_says() -> None:
    run, replay = played(apart(20, prompt=1600, output=11))
    assert msgspec.structs.astuple(run.ttft_s) == pytest.approx([MODEL.step_s + 1600 * MODEL.prefill_token_s] * 4)
    steps = [MODEL.step_s + MODEL.decode_sequence_s + MODEL.kv_token_s * (1600 + gained) for gained in range(10)]
    assert run.itl_s.mean == pytest.approx(sum(steps) / 10)
    assert run.e2e_s.mean == pytest.approx(run.ttft_s.mean + sum(steps))
    assert (round(run.slowdown, 6), run.hit_rate, run.good) == (1.0, 0.0, 1.0)
    nothing_is_left(replay)


def test_one_engine_with_room_for_all_finds_all_that_it_has_seen() -> None:
    rng, seen, found, asked = random.Random(3), set[int](), 0, 0
    arrivals = []
    for number in range(300):
        depth, own = rng.randrange(12), rng.randrange(1, 60)
        keys = chain(rng.randrange(5), depth) + chain(1000 + number, 20)[depth:]
        prompt = depth * SIZE + own
        arrivals.append(Arrival(number * 2.0, prompt, 2, tuple(keys[: (prompt + 2) // SIZE])))
        findable = keys[: (prompt - 1) // SIZE]
        hits = next((at for at, key in enumerate(findable) if key not in seen), len(findable))
        found, asked = found + hits * SIZE, asked + prompt
        seen.update(keys[: (prompt + 1) // SIZE])
    run, replay = played(arrivals, setting(1))
    assert run.hit_rate == found / asked
    nothing_is_left(replay)


def test_one_engine_with_little_room_finds_what_a_list_of_the_latest_would() -> None:
    """Against the plainest model: a list of blocks, the longest unused first, of which nameless ones are taken first of all."""
    evicted = 0
    for seed in range(8):
        rng = random.Random(seed)
        capacity = rng.randrange(12, 60)
        unused: list[int | None] = [None] * capacity
        arrivals, hits = [], []
        for number in range(60):
            depth, own, output = rng.randrange(capacity - 3), rng.randrange(1, 2 * SIZE), rng.randrange(1, 20)
            prompt = depth * SIZE + own
            keys = [*chain(rng.randrange(3), depth), *chain(1000 + number, 20)[: (prompt + output) // SIZE - depth]]
            needed, full = -(-(prompt + output - 1) // SIZE), (prompt + output - 1) // SIZE
            if needed > capacity:
                continue
            arrivals.append(Arrival(20.0 * number, prompt, output, tuple(keys)))
            found = list(itertools.takewhile(unused.__contains__, keys[: (prompt - 1) // SIZE]))
            hits.append(len(found) * SIZE)
            for key in found:
                unused.remove(key)
            evicted += sum(key is not None for key in unused[: needed - len(found)])
            del unused[: needed - len(found)]
            unused = [*[None] * (needed - full), *unused, *keys[:full][::-1]]
        small = msgspec.structs.replace(IDLE, model=msgspec.structs.replace(MODEL, kv_tokens=capacity * SIZE))
        _, replay = played(arrivals, setting(1, hardware=small))
        assert [one.cached_tokens for one in replay.tally.served] == hits
    assert evicted > 1000


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("policy", ["kv", "least-loaded"])
def test_every_request_ends_and_leaves_nothing(kind: str, policy: str) -> None:
    traffic = generate(kind, 250, block_size=64)
    small = msgspec.structs.replace(IDLE, block_size=64, model=msgspec.structs.replace(MODEL, kv_tokens=60_000))
    name, made = load_policy(policy)
    replay = Replay(setting(3, hardware=small), made, name)
    for _ in replay.run(timed(traffic, 0.5)):
        pass
    assert outcomes(replay) == ["served"] * 250
    assert all((one.e2e_s or 0) >= (one.ttft_s or 0) > 0 for one in replay.tally.served)
    nothing_is_left(replay)


def test_the_same_seed_gives_the_same_run() -> None:
    traffic = generate("chat", 30, block_size=SIZE).arrivals
    runs = [msgspec.json.encode(played(traffic)[0]) for _ in range(2)]
    assert runs[0] == runs[1]


# ------------------------------------------------------------------------------------------------- what the router knows


def test_the_cache_is_what_events_have_told_by_then() -> None:
    same = [Arrival(at, 320, 2, tuple(chain(1, 20))) for at in (0.0, 1.0, 2.0, 3.0)]
    for delay_s, engines_used in ((0.001, 1), (60.0, 2)):
        late = msgspec.structs.replace(IDLE, event_delay_s=delay_s)
        _, replay = played(same, setting(2, hardware=late))
        assert len({one.engine for one in replay.tally.served}) == engines_used


def test_without_events_what_was_sent_is_remembered() -> None:
    same = [Arrival(at, 320, 2, tuple(chain(1, 20))) for at in (0.0, 1.0, 2.0, 3.0)]
    run, replay = played(same, setting(2, hardware=msgspec.structs.replace(IDLE, kv_events=False)))
    assert len({one.engine for one in replay.tally.served}) == 1
    assert run.hit_rate > 0.6


def test_a_slow_engine_is_slow() -> None:
    _, replay = played(apart(10), setting(members=(Member(), Member(speed=0.25))), "round-robin")
    by_engine = [{round(one.ttft_s or 0, 6) for one in replay.tally.served if one.engine == number} for number in (0, 1)]
    assert [len(times) for times in by_engine] == [1, 1]
    assert by_engine[1].pop() == pytest.approx(4 * by_engine[0].pop(), abs=1e-5)


class Pinned:
    """A third party's policy: tenants keep to an engine of their own."""

    uses_cache = False

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        own = int(request.session or 0) % len(candidates)
        return [float(number != own) for number in range(len(candidates))]


def test_a_policy_of_ones_own_runs_unchanged() -> None:
    arrivals = [msgspec.structs.replace(one, session=str(number % 2)) for number, one in enumerate(apart(10))]
    _, replay = played(arrivals, setting(2), "tests.unit.test_replay:Pinned")
    assert [one.engine for one in replay.tally.served] == [0, 1] * 5


@pytest.mark.parametrize("left_over", [0, 1, SIZE - 1])
def test_R36_equal_prompts_do_not_scatter_over_an_idle_fleet(left_over: int) -> None:
    """Whatever they have beyond their last full block, which each must compute for itself."""
    prompt = 64 * SIZE + left_over
    _, replay = played([Arrival(0.0, prompt, 2, tuple(chain(1, 64))) for _ in range(16)], setting(8))
    assert len({one.engine for one in replay.tally.served}) == 1
    assert sum(one.cached_tokens for one in replay.tally.served) >= 15 * 63 * SIZE


def test_blocks_ties_with_an_idle_engine_as_dynamo_does_while_a_prompt_is_computed_and_after() -> None:
    """Four blocks cached on A: they tie with two blocks being computed there, or four being decoded, by the book's own counts."""
    name, policy = load_policy("blocks")
    a, b = Endpoint("http://a:8000"), Endpoint("http://b:8000")
    book = LoadBook()

    def costs() -> list[float]:
        candidates = [
            Candidate(end, SIZE, 10, 10, Overlap(device=4 * (end is a), in_flight=4 * (end is a)), book.load(end, 0.0)) for end in (a, b)
        ]
        return list(Scheduler(policy, name, 0.0, random.Random(0)).decide(RoutingRequest("m", 10 * SIZE), candidates, (), 0.0).costs)

    with book.reserve(a, chain(7, 2), 2 * SIZE) as reservation:
        here, idle = costs()
        assert here == idle
        reservation.first_token()
        here, idle = costs()
        assert here == idle - 2
    with book.reserve(a, chain(8, 4), 0):
        here, idle = costs()
        assert here == idle, "what was cached is not charged as prefill"


# -------------------------------------------------------------------------------------------------------------- fullness


def test_requests_wait_in_the_router_and_some_are_turned_away() -> None:
    full = setting(1, max_active_requests=1, limits=QueueLimits(max_waiting=3, max_wait_s=0.5))
    run, replay = played(apart(8, prompt=1600, output=40, every_s=0.001), full)
    told = outcomes(replay)
    assert told[0] == "served"
    assert (told.count("queue_full"), "waited" in told, "lost" in told) == (4, True, False)
    assert run.shed == 1 - told.count("served") / 8
    patient = msgspec.structs.replace(full, limits=QueueLimits(max_waiting=10, max_wait_s=100.0))
    run, replay = played(apart(8, prompt=1600, output=40, every_s=0.001), patient)
    assert outcomes(replay) == ["served"] * 8
    one_s = run.e2e_s.mean / 4.5
    assert [one.e2e_s for one in replay.tally.served] == pytest.approx([one_s * turn for turn in range(1, 9)], rel=0.01)
    nothing_is_left(replay)


def test_a_request_that_no_engine_could_hold_is_refused_and_holds_up_nobody() -> None:
    small = msgspec.structs.replace(IDLE, model=msgspec.structs.replace(MODEL, kv_tokens=10 * SIZE + 5))
    lengths = [(160, 1), (159, 2), (160, 2), (161, 1), (10, 152), (10, 150), (10**9, 10**9), (16, 4)]
    arrivals = [Arrival(float(at), prompt, output) for at, (prompt, output) in enumerate(lengths)]
    run, replay = played(arrivals, setting(2, hardware=small))
    assert outcomes(replay) == ["served", "served", "too_long", "too_long", "too_long", "served", "too_long", "served"]
    assert run.failed == 0.5
    nothing_is_left(replay)


# -------------------------------------------------------------------------------------------------------------- failures


def test_what_a_killed_engine_had_not_answered_goes_elsewhere() -> None:
    """One request is being answered when its engine is killed, one is still being prefilled: only the first one is lost."""
    pinned = [Arrival(0.0, 160, 400, session="0"), Arrival(0.9, 4000, 4, session="0"), Arrival(2.0, 160, 4, session="0")]
    later = [Arrival(10.0 + number, 160, 4, session=str(number)) for number in range(4)]
    killed = setting(2, failures=(Failure(1.0, 0, 5.0),))
    run, replay = played([*pinned, *later], killed, "tests.unit.test_replay:Pinned")
    assert outcomes(replay) == ["engine_broken"] + ["served"] * 6
    assert run.failed == pytest.approx(1 / 7)
    assert [one.engine for one in replay.tally.served] == [0, 1, 1, 0, 1, 0, 1]
    nothing_is_left(replay)


def test_an_engine_that_comes_back_has_an_empty_cache() -> None:
    same = [Arrival(at, 320, 2, tuple(chain(1, 20))) for at in (0.0, 1.0, 20.0, 21.0)]
    _, replay = played(same, setting(1, failures=(Failure(10.0, 0, 1.0),)))
    assert [one.cached_tokens for one in replay.tally.served] == [0, 304, 0, 304]


def test_a_fleet_that_is_gone_answers_nobody() -> None:
    _, replay = played(apart(3), setting(2, failures=(Failure(0.5, 0), Failure(0.5, 1))))
    assert outcomes(replay) == ["served", "engine_unreachable", "engine_unreachable"] or outcomes(replay)[1:] == ["no_engine"] * 2
    assert replay._trips.over


# ----------------------------------------------------------------------------------------------------------------- pairs


def pairs(mode: Mode = Mode.ALWAYS, bytes_per_s: float = 1e9) -> Setting:
    hardware = msgspec.structs.replace(IDLE, kv_bytes_per_token=100_000, link_bytes_per_s=bytes_per_s)
    return setting(2, hardware=hardware, members=(Member(Role.PREFILL), Member(Role.DECODE)), disagg=DisaggRules(mode))


def test_a_prompt_is_computed_there_carried_over_and_gone_on_from_here() -> None:
    run, replay = played(apart(5, prompt=1600, output=5), pairs())
    carried_s = 1600 * 100_000 / 1e9
    prefill_s = MODEL.step_s + 1600 * MODEL.prefill_token_s
    first_s = MODEL.step_s + MODEL.prefill_token_s + MODEL.kv_token_s * 1599
    assert run.ttft_s.mean == pytest.approx(prefill_s + carried_s + first_s)
    there, here = replay._engines.all.values()
    assert there.virtual.scheduler.counters.queries == 5 * 1600
    assert (here.virtual.scheduler.counters.fetched, here.virtual.scheduler.counters.generated) == (5 * 1600, 5 * 5)
    nothing_is_left(replay)


def test_what_is_cached_there_is_told_and_only_what_is_missing_here_is_carried() -> None:
    same = [Arrival(at, 1600, 2, tuple(chain(1, 100))) for at in (0.0, 5.0)]
    _, replay = played(same, pairs())
    first, second = replay.tally.served
    assert (first.cached_tokens, second.cached_tokens) == (0, 1584)
    assert (second.ttft_s or 0) < (first.ttft_s or 0) / 10


@pytest.mark.parametrize(("bytes_per_s", "remote"), [(1e12, True), (2e8, False)])
def test_measured_pairs_carry_only_where_that_pays(bytes_per_s: float, remote: bool) -> None:
    """The decode engine has two streams or so, which a prefill beside them would hold up."""
    _, replay = played(apart(60, prompt=1600, output=150, every_s=0.5), pairs(Mode.MEASURED, bytes_per_s))
    fetched = list(replay._engines.all.values())[1].virtual.scheduler.counters.fetched // 1600
    assert fetched >= 50 if remote else fetched <= 10


def test_the_loss_of_either_engine_of_a_pair_ends_neither_in_silence() -> None:
    for number in (0, 1):
        of = msgspec.structs.replace(pairs(bytes_per_s=1e8), failures=(Failure(0.2, number, 1.0),))
        _, replay = played(apart(4, prompt=1600, every_s=0.5), of)
        assert "lost" not in outcomes(replay)
        assert outcomes(replay)[-1] == "served"
        nothing_is_left(replay)


# --------------------------------------------------------------------------------------------------------------- scaling


class Plan:
    """A scaler that follows a timetable."""

    period_s = 1.0
    startup_s = 3.0

    def __init__(self, wanted: Mapping[float, int]) -> None:
        self.wanted = wanted
        self.seen: list[Seen] = []

    def replicas(self, seen: Seen) -> Mapping[Role, int]:
        self.seen.append(seen)
        return {Role.AGGREGATED: next(count for since, count in reversed(list(self.wanted.items())) if seen.at_s >= since)}


def test_engines_start_and_drain_as_a_scaler_says() -> None:
    plan = Plan({0.0: 1, 5.0: 3, 15.0: 1})
    run, replay = played(apart(250, prompt=800, output=60, every_s=0.1), setting(1), "least-loaded", scaler=plan)
    assert outcomes(replay) == ["served"] * 250
    counts = {seen.at_s: [one.state.value for one in seen.replicas] for seen in plan.seen}
    assert counts[5.0] == ["ready"]
    assert counts[6.0] == ["ready", "starting", "starting"]
    assert counts[9.0] == ["ready"] * 3
    assert counts[18.0] == ["ready"], "those that had nothing left to do have not gone"
    used = {number: [one.at_s for one in replay.tally.served if one.engine == number] for number in range(3)}
    assert all(min(used[number]) >= 8.0 and max(used[number]) <= 15.0 for number in (1, 2))
    assert sum(len(seen.arrived) for seen in plan.seen) >= 240
    assert sum(len(seen.ended) for seen in plan.seen) >= 230
    assert 20 + 20 < run.engine_s < 25 + 2 * 11


# -------------------------------------------------------------------------------------------------------------- measures


def test_percentiles_are_values_that_were_seen() -> None:
    assert spread([float(number) for number in range(1, 101)]) == msgspec.structs.replace(
        spread([]), mean=50.5, p50=50.0, p95=95.0, p99=99.0
    )
    assert spread([1.0, 5.0], [99, 1]).p99 == 1.0
    assert spread([1.0, 5.0], [98, 2]).p99 == 5.0
    assert spread([]).mean == 0.0


def test_good_is_both_targets() -> None:
    targets = Targets(1.0, 0.1)
    good = Served(0.0, 10, 11, ttft_s=0.5, e2e_s=1.5)
    assert good.good(targets)
    assert not msgspec.structs.replace(good, ttft_s=1.2, e2e_s=1.5).good(targets)
    assert not msgspec.structs.replace(good, e2e_s=1.6).good(targets)
    assert not msgspec.structs.replace(good, e2e_s=None).good(targets)


def times(pairs_of: Iterator[tuple[float, Arrival]]) -> list[float]:
    return [at for at, _ in pairs_of]


def test_jitter_spreads_arrivals_inside_their_bin_and_nothing_else() -> None:
    stamped = Workload("t", SIZE, tuple(Arrival(3.0 * (number // 4), 16, 1, (number,)) for number in range(40)), bin_s=3.0)
    assert times(timed(stamped, 2.0)) == [1.5 * (number // 4) for number in range(40)]
    spread_out = list(timed(stamped, 2.0, jitter=random.Random(0)))
    assert times(iter(spread_out)) == sorted(times(iter(spread_out)))
    assert all(0 <= at * 2 - arrival.at_s < 3.0 for at, arrival in spread_out)
    assert len(set(times(iter(spread_out)))) == 40
    assert times(iter(spread_out)) == times(timed(stamped, 2.0, jitter=random.Random(0)))
    assert times(iter(spread_out)) != times(timed(stamped, 2.0, jitter=random.Random(1)))
