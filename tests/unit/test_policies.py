"""Each policy by tables; how they behave together is in test_scheduling."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from engines.types import Endpoint
from router.load import LoadBook
from router.scheduling.policies.kv import Kv, KvWeights
from router.scheduling.policies.least_loaded import LeastLoaded
from router.scheduling.policies.power_of_two import PowerOfTwo
from router.scheduling.policies.random import Random
from router.scheduling.policies.round_robin import RoundRobin
from router.scheduling.policies.session import Session
from router.scheduling.types import Candidate, Load, Overlap, RoutingRequest
from tests.choosing import candidate, context, request


def cost(one: Candidate, asked: RoutingRequest | None = None, weights: KvWeights | None = None) -> float:
    return Kv(weights).score(asked or request(10), [one], context())[0]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (candidate("idle"), 10 + 10),
        (candidate("warm", overlap=Overlap(device=4, in_flight=4)), 6 + 10),
        (candidate("host", overlap=Overlap(host=4)), 10 - 3 + 10),
        (candidate("disk", overlap=Overlap(disk=4)), 10 - 1 + 10),
        (candidate("tiers", overlap=Overlap(device=2, host=4, disk=4, in_flight=2)), 10 - 2 - 3 - 1 + 10),
        (candidate("decoding", load=Load(active_requests=3, active_blocks=7)), 10 + 17),
        (candidate("prefilling", load=Load(active_requests=1, active_prefill_tokens=112, active_blocks=7)), 17 + 17),
        (candidate("shared", new_blocks=2, load=Load(active_requests=1, active_blocks=8)), 10 + 10),
    ],
)
def test_kv_costs_what_its_formula_says(one: Candidate, expected: float) -> None:
    assert cost(one) == expected


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (KvWeights(), 32.0),
        (KvWeights(overlap_score_credit=0.5), 33.0),
        (KvWeights(overlap_score_credit=100.0), 18.0),
        (KvWeights(prefill_load_scale=0.0), 18.0),
        (KvWeights(prefill_load_scale=2.0), 46.0),
        (KvWeights(host_cache_hit_weight=0.0), 33.5),
        (KvWeights(disk_cache_hit_weight=1.0), 30.5),
        (KvWeights(decode_active_request_weight=3.0), 38.0),
    ],
)
def test_every_weight_of_kv_has_its_effect(weights: KvWeights, expected: float) -> None:
    load = Load(active_requests=2, active_prefill_tokens=128, active_blocks=8)
    one = candidate("one", overlap=Overlap(device=2, host=2, disk=2, in_flight=2), load=load)
    assert cost(one, weights=weights) == expected


@pytest.mark.parametrize("field", KvWeights.__struct_fields__)
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_weight_that_cannot_be_weighed_with_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        KvWeights(**{field: value})
    with pytest.raises(msgspec.ValidationError, match="unknown"):
        msgspec.convert({"unknown": 1.0}, KvWeights)


def test_kv_ties_where_dynamo_was_measured_to_tie() -> None:
    disk = candidate("w1", overlap=Overlap(device=4, disk=2, in_flight=4))
    host = candidate("w2", overlap=Overlap(host=6))
    assert cost(disk) == cost(host)
    cached = Overlap(device=4, in_flight=4)
    idle = candidate("w2")
    assert cost(candidate("w1", overlap=cached, load=Load(active_requests=1, active_blocks=4))) == cost(idle)
    assert cost(candidate("w1", overlap=cached, load=Load(active_requests=1, active_prefill_tokens=32, active_blocks=2))) == cost(idle)


def test_kv_counts_tokens_of_a_started_block_as_prefill_and_not_as_decode() -> None:
    assert cost(candidate("one"), RoutingRequest("m", 170)) == 170 / 16 + 10


@pytest.mark.parametrize("tokens", [1, 31, 100, 2217])
def test_R2_idle_engines_cost_the_same_whatever_their_block_size(tokens: int) -> None:
    """Else all prompts that share nothing would go to the one with the larger blocks."""
    sizes = (16, 32, 48, 16)
    engines = [
        candidate(str(number), block_size=size, prompt_blocks=tokens // size, new_blocks=tokens // size)
        for number, size in enumerate(sizes)
    ]
    costs = Kv().score(RoutingRequest("m", tokens), engines, context())
    assert costs == pytest.approx([tokens / 16 + tokens // 16] * 4)


@pytest.mark.parametrize(
    ("in_flight", "queued_blocks", "expected"),
    [
        (8, 8, 12.0),  # the queue is this very prefix
        (8, 20, 24.0),  # and others' prompts
        (8, 0, 12.0),  # it has just been computed, its events are on their way
        (10, 10, 10.0),
    ],
)
def test_kv_does_not_charge_a_prompt_for_the_prefix_it_waits_for(in_flight: int, queued_blocks: int, expected: float) -> None:
    load = Load(active_requests=1, active_prefill_tokens=queued_blocks * 16, active_blocks=in_flight)
    one = candidate("one", new_blocks=10 - in_flight, overlap=Overlap(in_flight=in_flight), load=load)
    assert cost(one) == expected


@pytest.mark.parametrize(
    ("overlap", "prefill"),
    [
        (Overlap(device=2, host=4, in_flight=5), 10 - 5 - 0.75),
        (Overlap(device=2, host=4, disk=2, in_flight=7), 10 - 7 - 0.25),
        (Overlap(device=2, host=4, disk=2, in_flight=9), 10 - 9),
    ],
)
def test_kv_gives_a_block_in_flight_no_second_credit_for_its_copy_in_a_slower_tier(overlap: Overlap, prefill: float) -> None:
    assert cost(candidate("one", overlap=overlap)) == prefill + 10


def test_R13_a_copy_on_the_device_is_preferred_to_one_in_host_memory() -> None:
    device, host, none = Overlap(device=8, in_flight=8), Overlap(host=8), Overlap()
    costs = [cost(candidate("a", overlap=overlap)) for overlap in (device, host, none)]
    assert costs == [12.0, 14.0, 20.0]


def test_kv_without_tokens_prefers_the_less_loaded() -> None:
    asked = RoutingRequest("m", untokenizable="no tokenizer")
    busy = candidate("a", 0, load=Load(active_requests=1, active_blocks=5))
    assert Kv().score(asked, [busy, candidate("b", 0)], context()) == [5.0, 0.0]


def chosen(costs: Sequence[float]) -> list[int]:
    return [position for position, value in enumerate(costs) if value == min(costs)]


@pytest.mark.parametrize(
    ("last_assigned", "expected"),
    [([3, 1, 2], [1]), ([3, 0, 2], [1]), ([0, 0, 7], [0, 1]), ([10**12 + 1, 10**12, 10**12 + 2], [1])],
)
def test_round_robin_takes_the_longest_unassigned(last_assigned: list[int], expected: list[int]) -> None:
    candidates = [candidate(str(number), load=Load(last_assigned=last)) for number, last in enumerate(last_assigned)]
    assert chosen(RoundRobin().score(request(), candidates, context())) == expected


def test_random_prefers_nobody() -> None:
    asked = context()
    drawn = [Random().score(request(), [candidate("a"), candidate("b", load=Load(active_requests=9))], asked) for _ in range(600)]
    first = sum(a < b for a, b in drawn)
    assert 240 < first < 360
    assert any(one[0] < one[1] and other[0] < other[1] for one, other in itertools.pairwise(drawn)), "not in turns"


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([Load(active_requests=2), Load(active_requests=1)], [1]),
        ([Load(active_requests=1, active_blocks=900), Load(active_requests=2)], [0]),
        ([Load(active_requests=1, active_blocks=9), Load(active_requests=1, active_blocks=8)], [1]),
        ([Load(active_requests=1, active_prefill_tokens=16), Load(active_requests=1)], [1]),
        ([Load(), Load()], [0, 1]),
        # R26, R27: what engines report, stuck or frozen, is no match for what we count ourselves
        ([Load(active_requests=1, running=0, kv_usage=0.0), Load(running=50, waiting=9, kv_usage=0.99)], [1]),
    ],
)
def test_least_loaded_counts_requests_then_blocks(loads: list[Load], expected: list[int]) -> None:
    candidates = [candidate(str(number), load=load) for number, load in enumerate(loads)]
    assert chosen(LeastLoaded().score(request(), candidates, context())) == expected


def test_power_of_two_takes_the_less_loaded_of_two_drawn() -> None:
    candidates = [candidate(str(number), load=Load(active_requests=number)) for number in range(5)]
    ctx = context()
    wins: Counter[int] = Counter()
    for _ in range(2000):
        costs = PowerOfTwo().score(request(), candidates, ctx)
        assert sum(math.isfinite(value) for value in costs) == 2
        wins[chosen(costs)[0]] += 1
    assert wins[4] == 0, "the busiest loses against whoever is drawn with it"
    assert [round(wins[number] / 200) for number in range(4)] == [4, 3, 2, 1]
    assert PowerOfTwo().score(request(), candidates[:1], ctx) == [0.0]


def place(endpoints: list[str], session: str) -> Endpoint:
    candidates = [candidate(name) for name in endpoints]
    return candidates[chosen(Session().score(request(session=session), candidates, context()))[0]].endpoint


def test_session_sends_one_session_to_one_endpoint_whatever_the_order_and_load() -> None:
    names = ["a", "b", "c", "d"]
    for session in ("s1", "s2", "", "ünï\ud800"):
        assert place(names, session) == place(names[::-1], session)
    busy = [candidate(name, load=Load(active_requests=number)) for number, name in enumerate(names)]
    assert Session().score(request(session="s"), busy, context()) == Session().score(
        request(session="s"), [candidate(name) for name in names], context(9)
    )


def test_session_spreads_sessions_evenly_and_moves_few_when_endpoints_come_and_go() -> None:
    names = ["a", "b", "c", "d"]
    sessions = [f"session-{number}" for number in range(2000)]
    before = {session: place(names, session) for session in sessions}
    assert all(400 < count < 600 for count in Counter(before.values()).values())
    gone = [session for session in sessions if before[session].engine == "http://d:8000"]
    after = {session: place(names[:3], session) for session in sessions}
    assert [session for session in sessions if before[session] != after[session]] == gone
    joined = {session: place([*names, "e"], session) for session in sessions}
    moved = [session for session in sessions if before[session] != joined[session]]
    assert all(joined[session].engine == "http://e:8000" for session in moved)
    assert 300 < len(moved) < 500


def test_session_without_a_session_goes_to_the_least_loaded() -> None:
    candidates = [candidate("a", load=Load(active_requests=2)), candidate("b", load=Load(active_requests=1))]
    assert chosen(Session().score(request(), candidates, context())) == [1]


def test_R27_frozen_engine_metrics_leave_the_spread_to_our_own_counts() -> None:
    book = LoadBook()
    names = [f"e{number}" for number in range(8)]
    ctx = context(3)
    for policy in (LeastLoaded(), Kv()):
        held = []
        sent: Counter[Endpoint] = Counter()
        for arrival in range(64):
            candidates = [candidate(name, load=book.load(candidate(name).endpoint, 0.0)) for name in names]
            costs = policy.score(request(), candidates, ctx)
            end = candidates[ctx.rng.choice(chosen(costs))].endpoint
            book.report(end, running=0, waiting=0, kv_usage=0.0, now=0.0)
            held.append(book.reserve(end, [arrival * 100 + depth for depth in range(10)], 160))
            sent[end] += 1
        assert all(7 <= count <= 9 for count in sent.values())
        assert len(sent) == 8
        for reservation in held:
            reservation.release()
