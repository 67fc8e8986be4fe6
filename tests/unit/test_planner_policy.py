"""The planner's decisions, tick by tick: all rows of its behaviours that need no socket."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from engines.types import Role
from planner.forecast import forecaster
from planner.policy import Memory, Policy
from planner.rules import Rules, Thresholds
from planner.types import Loop, Pool, Replica, ReplicaState, Target
from tests.planning.making import (
    POOL,
    PROFILE,
    REACTIVE,
    SLO,
    TICK_S,
    Fleet,
    one_carries,
    policy,
    replica,
    replicas,
    seen,
    traffic,
)

ONE = one_carries(policy())


def test_L1_constant_load_at_0_7_on_two_engines_changes_nothing_in_100_ticks() -> None:
    assert set(Fleet(policy(), 2).run(100, 2 * 0.7 * ONE)) == {2}


@pytest.mark.parametrize("load", [0.6, 0.9])
def test_constant_load_with_ten_percent_noise_never_goes_up_and_down(load: float) -> None:
    targets = Fleet(policy(), 5).run(1000, 5 * load * ONE, noise=0.1)
    steps = [after - before for before, after in itertools.pairwise(targets) if after != before]
    assert not (any(step > 0 for step in steps) and any(step < 0 for step in steps)), steps
    assert len(set(targets[100:])) <= 2


def test_L2_load_and_then_none_goes_down_to_the_minimum() -> None:
    fleet = Fleet(policy(), 1)
    assert fleet.run(30, 3.5 * ONE)[-1] == 4
    assert fleet.run(30, 0)[-1] == POOL.min


def test_L2_a_metrics_source_that_is_gone_changes_nothing() -> None:
    fleet = Fleet(policy(), 1)
    assert fleet.run(30, 3.5 * ONE)[-1] == 4
    decisions = [fleet.tick(None) for _ in range(100)]
    assert {decision.of("pool").target for decision in decisions} == {4}
    assert all(decision.held and not decision.changes for decision in decisions)
    assert fleet.run(30, 3.5 * ONE)[-1] == 4, "it goes on where it was"


def test_without_data_a_fleet_below_its_minimum_is_still_filled_up() -> None:
    assert policy(Pool("pool", min=2)).tick(seen(5.0, None, {"pool": replicas(1)})).of("pool").target == 2


def test_L3_of_three_replicas_the_least_loaded_one_goes() -> None:
    planner = policy()
    there = [replica(number, in_flight=count) for number, count in enumerate((9, 3, 7))]
    decided = [planner.tick(seen(tick * TICK_S, traffic(1.2 * ONE), {"pool": there})).of("pool") for tick in range(1, 30)][-1]
    assert (decided.target, decided.victims) == (2, ("engine-1",))


def test_L4_a_deficit_does_not_trigger_twice_while_its_replicas_start() -> None:
    fleet = Fleet(policy(), 1, startup_s=180.0)
    targets = fleet.run(36, 3.5 * ONE, waiting=3, ttft_s=9.0)
    assert targets[1] == 4
    assert set(targets[1:]) == {4}
    assert fleet.starts == 3


def test_L5_a_replica_that_never_becomes_ready_is_lost_after_its_deadline_and_replaced() -> None:
    pool = Pool("pool", max=20, startup_deadline_s=60.0)
    fleet = Fleet(policy(pool), 1, startup_s=10.0)
    fleet.never = {"new-1", "new-2"}
    assert fleet.run(10, 3.5 * ONE)[-1] == 4
    assert {one.id for one in fleet.replicas if one.state is ReplicaState.STARTING} == {"new-1", "new-2"}
    assert fleet.run(10, 3.5 * ONE)[-1] == 4
    assert {one.id for one in fleet.replicas} == {"engine-0", "new-3", "new-4", "new-5"}


def test_L5_scaling_down_stays_possible_while_a_replica_never_becomes_ready() -> None:
    pool = Pool("pool", max=20, startup_deadline_s=60.0)
    fleet = Fleet(policy(pool), 1, startup_s=10.0)
    fleet.never = {"new-1"}
    fleet.run(5, 3.5 * ONE)
    fleet.run(40, 0)
    assert [one.state for one in fleet.replicas] == [ReplicaState.READY]


def test_L7_what_clients_wait_for_counts_and_brings_replicas_within_two_ticks() -> None:
    fleet = Fleet(policy(), 2)
    fleet.run(30, ONE)
    # A burst: engines work as hard as they did, since their slots are full; five seconds' worth of requests wait in the router.
    burst = 6 * ONE
    targets = [fleet.tick(traffic(burst, waiting=round(burst * 5), waited_s=5.0), 60).of("pool").target for _ in range(2)]
    assert targets[-1] >= 6


def test_waiting_requests_count_even_when_nothing_new_comes() -> None:
    fleet = Fleet(policy(), 1)
    fleet.run(30, 0.5 * ONE)
    assert fleet.tick(traffic(0.5 * ONE, waiting=600)).of("pool").target > 1


def test_L9_what_somebody_changes_by_hand_is_what_plans_start_from() -> None:
    fleet = Fleet(policy(), 3)
    assert fleet.run(30, 2.6 * ONE)[-1] == 3
    fleet.replicas = fleet.replicas[:1]
    decided = fleet.tick(traffic(2.6 * ONE)).of("pool")
    assert (decided.current, decided.target) == (1, 3)
    fleet.replicas = list(replicas(9))
    assert fleet.run(20, 2.6 * ONE)[-1] == 4, "too many go again, down to what leaves room"


def test_L10_an_empty_pool_starts_one_for_a_request_that_waits() -> None:
    pool = Pool("pool", min=0, max=20)
    planner = policy(pool)
    assert planner.tick(seen(5.0, traffic(0), {"pool": ()})).of("pool").target == 0
    assert planner.tick(seen(10.0, traffic(0.2, waiting=1), {"pool": ()})).of("pool").target == 1
    assert policy(pool, profile=None).tick(seen(5.0, traffic(0, waiting=1), {"pool": ()})).of("pool").target == 1


def test_a_pool_is_emptied_only_where_its_minimum_is_zero_and_nobody_has_asked_for_a_while() -> None:
    fleet = Fleet(policy(Pool("pool", min=0, max=20)), 2)
    fleet.run(20, ONE)
    targets = fleet.run(80, 0)
    assert targets[int(REACTIVE.zero_after_s / TICK_S) - 3] == 1
    assert targets[-1] == 0
    assert Fleet(policy(), 2).run(100, 0)[-1] == 1


def test_requests_in_flight_keep_replicas_that_no_new_ones_would() -> None:
    fleet = Fleet(policy(), 4)
    fleet.run(20, 3.5 * ONE, in_flight=120)
    assert fleet.run(30, 0.0, in_flight=120)[-1] >= 2, "their streams are load that survivors would carry"


def test_a_plan_makes_several_steps_at_once_up_to_its_step() -> None:
    assert Fleet(policy(), 1).run(1, 7.9 * ONE) == [8]
    assert Fleet(policy(rules=msgspec.structs.replace(REACTIVE, max_step=2)), 1).run(3, 7.9 * ONE, waiting=1) == [3, 5, 7]


def test_without_a_profile_capacity_is_learned_from_what_clients_see() -> None:
    planner = policy(profile=None)
    fleet = Fleet(planner, 2)
    # 0.1 ms a prompt token; a step of 10 ms and 0.4 ms a stream: at 3 requests/s, prompts take 30 % of the time.
    for rate, streams, itl_s in ((2.0, 10, 0.0176), (4.0, 28, 0.0269), (6.0, 64, 0.0426), (4.0, 28, 0.0269)) * 10:
        for _ in range(3):
            fleet.tick(traffic(rate, ttft_s=0.1 + itl_s, itl_s=itl_s), streams)
    learned = planner.memory.capacities["pool"]
    assert learned.rate(planner.memory.usual.mix(SLO), SLO) == pytest.approx(ONE / REACTIVE.fill, rel=0.35)


def test_when_nothing_is_known_clients_over_their_targets_bring_one_more() -> None:
    planner = policy(profile=None)
    there = {"pool": replicas(2, in_flight=4)}
    targets = [planner.tick(seen(tick * TICK_S, traffic(1, ttft_s=9.0, osl=0), there)).of("pool").target for tick in range(1, 8)]
    assert targets[-1] == 3


def test_no_replica_is_added_that_would_not_help() -> None:
    planner = policy(profile=PROFILE, rules=msgspec.structs.replace(REACTIVE, slo=msgspec.structs.replace(SLO, itl_s=0.001)))
    decided = planner.tick(seen(5.0, traffic(50.0), {"pool": replicas(2)})).of("pool")
    assert decided.target == 2
    assert "no help" in " ".join(decided.reasons)


# ------------------------------------------------------------------------------------------------------- prefill and decode

PREFILL = Pool("prefill", Role.PREFILL, max=20)
DECODE = Pool("decode", Role.DECODE, max=20)


def pair(planner: Policy, at: float, rate: float, there: dict[str, tuple[Replica, ...]], **told: float) -> dict[str, int]:
    decision = planner.tick(seen(at, traffic(rate, **told), there))  # type: ignore[arg-type]
    return {decided.pool: decided.target for decided in decision.pools}


def test_each_pool_of_a_pair_goes_by_its_own_signal() -> None:
    there = {"prefill": replicas(1), "decode": replicas(1)}
    long_prompts = policy(PREFILL, DECODE)
    assert pair(long_prompts, 5.0, 8.0, there, isl=8000, osl=10) == {"prefill": 9, "decode": 1}
    long_answers = policy(PREFILL, DECODE)
    found = pair(long_answers, 5.0, 8.0, there, isl=100, osl=2000)
    assert found["prefill"] == 1
    assert found["decode"] >= 8


def test_full_kv_caches_of_decode_engines_scale_decode_and_never_prefill() -> None:
    planner = policy(PREFILL, DECODE)
    full = replicas(2, in_flight=40, kv_usage=0.97, waiting=8, running=30)
    there = {"prefill": replicas(2, in_flight=1, kv_usage=0.1), "decode": full}
    for tick in range(1, 12):
        found = pair(planner, tick * TICK_S, 2.0, there, ttft_s=9.0)
        assert found["prefill"] <= 2
    decision = planner.tick(seen(100.0, traffic(2.0, ttft_s=9.0), there))
    assert decision.of("decode").target > 2
    assert "more prefill would not help" in " ".join(decision.of("prefill").reasons)


def test_pools_share_a_budget_of_gpus_and_grow_in_step() -> None:
    rules = msgspec.structs.replace(REACTIVE, gpu_budget=6)
    planner = policy(PREFILL, DECODE, rules=rules)
    there = {"prefill": replicas(1), "decode": replicas(1)}
    found = pair(planner, 5.0, 40.0, there)
    assert sum(found.values()) == 6
    assert min(found.values()) >= 2


# ------------------------------------------------------------------------------------------------- thresholds and prediction


@pytest.mark.parametrize(
    ("target", "kv_usage", "queued", "expected"),
    [
        (Target.THROUGHPUT, 0.8, 0, 4),
        (Target.THROUGHPUT, 0.5, 20_000, 4),
        (Target.THROUGHPUT, 0.5, 200_000, 25),
        (Target.THROUGHPUT, 0.2, 0, 1),
        (Target.LATENCY, 0.3, 0, 4),
        (Target.LATENCY, 0.8, 0, 8),
        (Target.LATENCY, 0.3, 10_000, 13),
        (Target.LATENCY, 0.05, 0, 1),
        (Target.LOAD, 0.7, 0, 5),
        (Target.LOAD, 0.2, 0, 2),
    ],
)
def test_each_target_has_its_thresholds(target: Target, kv_usage: float, queued: int, expected: int) -> None:
    thresholds = Thresholds(0.5, 0.1, 0.6, 0.3) if target is Target.LOAD else None
    rules = Rules(target=target, loops=frozenset({Loop.LOAD}), thresholds=thresholds, max_step=100)
    planner = policy(Pool("pool", max=30), rules=rules)
    there = {"pool": replicas(4, in_flight=3, kv_usage=kv_usage, prefill_tokens=queued, context=32_768, running=3)}
    found = [planner.tick(seen(tick * TICK_S, traffic(1.0), there)).of("pool") for tick in range(1, 20)][-1]
    assert found.target == expected, found.reasons


def test_an_engine_that_does_not_tell_its_kv_usage_is_not_taken_for_empty() -> None:
    planner = policy(rules=Rules(target=Target.THROUGHPUT, loops=frozenset({Loop.LOAD})))
    found = [planner.tick(seen(tick * TICK_S, traffic(1.0), {"pool": replicas(4, in_flight=3)})).of("pool") for tick in range(1, 20)][-1]
    assert found.target == 4


def test_the_predictive_loop_is_ahead_of_a_ramp_and_a_floor_for_the_other() -> None:
    both = msgspec.structs.replace(REACTIVE, loops=frozenset({Loop.LOAD, Loop.THROUGHPUT}))
    ahead, behind = Fleet(policy(Pool("pool", max=20, startup_s=60.0), rules=both), 1), Fleet(policy(), 1)
    for tick in range(120):
        rate = ONE * (0.5 + 5 * tick / 120)
        ahead.tick(traffic(rate))
        behind.tick(traffic(rate))
    assert len(ahead.replicas) > len(behind.replicas)


def test_the_predictive_loop_alone_plans_every_interval() -> None:
    alone = msgspec.structs.replace(REACTIVE, loops=frozenset({Loop.THROUGHPUT}))
    targets = Fleet(policy(rules=alone), 1).run(80, 3.5 * ONE, waiting=3, ttft_s=9.0)
    changes = [tick for tick, (before, after) in enumerate(itertools.pairwise(targets)) if before != after]
    assert targets[-1] in (4, 5)
    assert all(later - earlier >= 36 for earlier, later in itertools.pairwise(changes)), changes


def test_a_planner_that_starts_again_decides_as_if_it_had_not_stopped() -> None:
    both = msgspec.structs.replace(REACTIVE, loops=frozenset({Loop.LOAD, Loop.THROUGHPUT}))
    draw = random.Random(11)
    rates = [ONE * (2 + draw.random() * 4) for _ in range(120)]
    whole, halted = Fleet(policy(rules=both), 2), Fleet(policy(rules=both), 2)
    for at, rate in enumerate(rates):
        if at % 17 == 16:
            kept = msgspec.msgpack.encode(halted.policy.memory)
            halted.policy = policy(rules=both)
            halted.policy.resume(msgspec.msgpack.decode(kept, type=Memory))
        assert halted.tick(traffic(rate)) == whole.tick(traffic(rate))


def test_a_planner_that_starts_again_has_the_predictor_and_the_profile_that_it_is_told_now() -> None:
    first = Policy((POOL,), REACTIVE, predictor="daily")
    Fleet(first, 2).run(50, 2 * ONE, in_flight=20)
    seen_streams = first.memory.capacities["pool"].decode
    assert seen_streams is not None
    again = Policy((POOL,), REACTIVE, predictor="daily")
    again.resume(first.memory)
    assert again.memory == first.memory
    for predictor in ("weekly", "kalman"):
        other = Policy((POOL,), REACTIVE, predictor=predictor, profile=PROFILE)
        other.resume(msgspec.msgpack.decode(msgspec.msgpack.encode(first.memory), type=Memory))
        assert other.memory.arrivals == forecaster(predictor)
        decode = other.memory.capacities["pool"].decode
        assert decode is not None
        assert (decode.w, decode.fixed[0]) == (seen_streams.w, len(PROFILE.decode))
