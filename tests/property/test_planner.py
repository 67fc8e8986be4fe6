"""What must hold of every plan, whatever is observed."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery.observations import Histogram, TrafficReport, histogram_of, since, summed
from engines.types import Role
from planner.capacity import Capacity, Profile
from planner.limits import bounded, victims, within_budget
from planner.policy import Memory
from planner.types import Mix, Pool, Replica, ReplicaState, Slo
from tests.planning.making import REACTIVE, policy, seen, traffic

few = settings(max_examples=40, deadline=None)
values = st.lists(st.floats(0.01, 2e6), max_size=40)
counts = st.integers(0, 30)
states = st.sampled_from(ReplicaState)


@few
@given(values, values, st.floats(0, 1))
def test_histograms_add_up_and_come_apart_again(one: list[float], other: list[float], share: float) -> None:
    both = histogram_of(one).plus(histogram_of(other))
    assert both.counts == histogram_of(one + other).counts
    assert both.minus(histogram_of(other)).counts == histogram_of(one).counts
    found = both.percentile(share)
    inside = sorted(min(value, 2**20) for value in one + other)
    if inside:
        wanted = inside[min(len(inside) - 1, max(0, -int(-share * len(inside) // 1) - 1))]
        assert found <= max(1.0, wanted * 1.2)
        assert found >= min(wanted / 1.2, 0.5) or found >= wanted / 1.2


@few
@given(st.lists(st.tuples(st.integers(0, 50), values), min_size=1, max_size=5))
def test_what_a_lost_report_said_is_in_the_next(steps: list[tuple[int, list[float]]]) -> None:
    now = TrafficReport("m")
    reports = [msgspec.msgpack.decode(msgspec.msgpack.encode(now), type=TrafficReport)]
    for arrived, times in steps:
        now.arrived += arrived
        for value in times:
            now.ttft_ms.add(value)
        reports.append(msgspec.msgpack.decode(msgspec.msgpack.encode(now), type=TrafficReport))
    whole = since(reports[-1], reports[0])
    pieces = summed([since(after, before) for before, after in itertools.pairwise(reports)])
    assert (whole.arrived, whole.ttft_ms.counts) == (pieces.arrived, pieces.ttft_ms.counts)


@few
@given(st.integers(0, 5), st.integers(0, 10), counts, counts, st.integers(1, 10))
def test_limits_hold_and_what_is_allowed_is_not_touched(least: int, more: int, current: int, wanted: int, step: int) -> None:
    pool = Pool("p", min=least, max=least + more)
    target = bounded(pool, current, wanted, step).target
    assert target >= min(least, current) if current < least else target <= max(pool.max, current - step) or target <= pool.max
    if least <= wanted <= pool.max and abs(wanted - current) <= step:
        assert target == wanted


@few
@given(st.lists(st.tuples(st.integers(0, 3), counts, counts, st.integers(1, 8)), min_size=1, max_size=4), st.integers(1, 60))
def test_a_budget_is_kept_wherever_minima_allow_it(pools: list[tuple[int, int, int, int]], budget: int) -> None:
    named = {f"p{number}": Pool(f"p{number}", min=least, max=99, gpus=gpus) for number, (least, _, _, gpus) in enumerate(pools)}
    current = {f"p{number}": pool[1] for number, pool in enumerate(pools)}
    wanted = {f"p{number}": max(pool[0], pool[2]) for number, pool in enumerate(pools)}
    given_ = within_budget(named, current, wanted, budget)
    spent = sum(given_[name] * named[name].gpus for name in given_)
    assert spent <= budget or all(given_[name] == named[name].min for name in given_)
    assert all(named[name].min <= given_[name] <= wanted[name] for name in given_)


@few
@given(st.lists(st.tuples(states, st.integers(0, 9)), max_size=12), st.integers(-3, 14))
def test_victims_are_all_that_are_lost_and_then_the_least_loaded(found: list[tuple[ReplicaState, int]], surplus: int) -> None:
    there = [Replica(f"r{number}", state, 0.0, in_flight=load) for number, (state, load) in enumerate(found)]
    gone = victims(there, surplus)
    lost = [one.id for one in there if one.state is ReplicaState.LOST]
    counted = [one for one in there if one.state in (ReplicaState.READY, ReplicaState.STARTING)]
    assert set(lost) <= set(gone)
    assert len(gone) == len(lost) + min(len(counted), max(0, surplus))
    ready = [one for one in there if one.state is ReplicaState.READY]
    taken, left = [one for one in ready if one.id in gone], [one for one in ready if one.id not in gone]
    assert max((one.in_flight for one in taken), default=0) <= min((one.in_flight for one in left), default=99)


speeds = st.tuples(st.floats(1e-6, 1e-3), st.floats(1e-3, 0.05), st.floats(1e-6, 1e-3))


@few
@given(speeds, st.floats(1, 20_000), st.floats(1, 2000), st.floats(0.05, 20), st.floats(0.01, 1))
def test_what_a_replica_carries_is_within_its_targets_and_grows_with_them(
    speed: tuple[float, float, float], isl: float, osl: float, ttft_s: float, itl_s: float
) -> None:
    c, a, b = speed
    capacity = Capacity.of(Role.AGGREGATED, Profile(((1.0, a + c), (10_000.0, a + 10_000 * c)), ((1.0, a + b), (100.0, a + 100 * b))))
    mix = Mix(isl, 2 * isl**2, 2 * isl, osl)
    slo = Slo(ttft_s, itl_s)
    rate = capacity.rate(mix, slo)
    if rate > 0.01:
        found = capacity.estimate(rate * 0.999, mix)
        assert found.ttft_s is not None
        assert found.itl_s is not None
        assert found.ttft_s <= ttft_s * 1.01
        assert found.itl_s <= itl_s * 1.01
    assert capacity.rate(mix, Slo(ttft_s * 2, itl_s * 2)) >= rate * 0.99
    assert capacity.rate(msgspec.structs.replace(mix, osl=osl * 2), slo) <= rate * 1.01


ticks = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(0, 60)), st.integers(0, 50), st.integers(0, 6), st.integers(0, 3), st.floats(0.01, 20)),
    min_size=1,
    max_size=25,
)


@few
@given(ticks, st.booleans())
def test_no_plan_leaves_its_limits_and_none_changes_without_data(
    steps: list[tuple[float | None, int, int, int, float]], profiled: bool
) -> None:
    pool = Pool("pool", min=1, max=9)
    planner = policy(pool, profile=Profile(((100.0, 0.01),), ((1.0, 0.01),)) if profiled else None)
    for number, (rate, waiting, ready, starting, ttft_s) in enumerate(steps, 1):
        there = [
            Replica(f"r{index}", ReplicaState.READY if index < ready else ReplicaState.STARTING, 0.0) for index in range(ready + starting)
        ]
        found = None if rate is None else traffic(rate, waiting=waiting, ttft_s=ttft_s)
        decided = planner.tick(seen(5.0 * number, found, {"pool": there})).of("pool")
        assert decided.current == len(there)
        assert abs(decided.target - decided.current) <= REACTIVE.max_step
        assert decided.target >= 1
        assert decided.target <= 9 or decided.target < decided.current
        if found is None:
            assert decided.target == max(1, len(there))
        if number <= REACTIVE.stabilise_s / 5:
            assert decided.target >= min(decided.current, 9), "nothing goes before it has been watched for a while"
        assert len(decided.victims) == max(0, decided.current - decided.target)
        assert decided.reasons
    kept = msgspec.msgpack.encode(planner.memory)
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(kept, type=Memory)) == kept


def test_an_empty_histogram_has_nothing_to_say() -> None:
    assert (Histogram().mean, Histogram().percentile(0.9), Histogram().mean_square, Histogram().share_within(3.0)) == (0, 0, 0, 1)
