"""Each policy by tables; how they behave together is in test_scheduling."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from engines.types import Endpoint
from router.load import LoadBook
from router.scheduling.policies.blocks import Blocks, BlocksWeights
from router.scheduling.policies.kv import ALIKE, DECODING_TOKENS, PARTS, Kv, Price
from router.scheduling.policies.least_loaded import LeastLoaded
from router.scheduling.policies.power_of_two import PowerOfTwo
from router.scheduling.policies.random import Random
from router.scheduling.policies.round_robin import RoundRobin
from router.scheduling.policies.session import Session
from router.scheduling.policies.threshold import Threshold
from router.scheduling.types import Candidate, Load, Overlap, RoutingRequest
from router.work import ASSUMED_S_PER_TOKEN
from tests.choosing import candidate, context, request


def cost(one: Candidate, asked: RoutingRequest | None = None, weights: BlocksWeights | None = None) -> float:
    return Blocks(weights).score(asked or request(10), [one], context())[0]


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
def test_blocks_costs_what_its_formula_says(one: Candidate, expected: float) -> None:
    assert cost(one) == expected


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (BlocksWeights(), 32.0),
        (BlocksWeights(overlap_score_credit=0.5), 33.0),
        (BlocksWeights(overlap_score_credit=100.0), 18.0),
        (BlocksWeights(prefill_load_scale=0.0), 18.0),
        (BlocksWeights(prefill_load_scale=2.0), 46.0),
        (BlocksWeights(host_cache_hit_weight=0.0), 33.5),
        (BlocksWeights(disk_cache_hit_weight=1.0), 30.5),
        (BlocksWeights(decode_active_request_weight=3.0), 38.0),
    ],
)
def test_every_weight_of_blocks_has_its_effect(weights: BlocksWeights, expected: float) -> None:
    load = Load(active_requests=2, active_prefill_tokens=128, active_blocks=8)
    one = candidate("one", overlap=Overlap(device=2, host=2, disk=2, in_flight=2), load=load)
    assert cost(one, weights=weights) == expected


@pytest.mark.parametrize("field", BlocksWeights.__struct_fields__)
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_weight_that_cannot_be_weighed_with_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        BlocksWeights(**{field: value})
    with pytest.raises(msgspec.ValidationError, match="unknown"):
        msgspec.convert({"unknown": 1.0}, BlocksWeights)


def test_blocks_ties_where_dynamo_was_measured_to_tie() -> None:
    disk = candidate("w1", overlap=Overlap(device=4, disk=2, in_flight=4))
    host = candidate("w2", overlap=Overlap(host=6))
    assert cost(disk) == cost(host)
    cached = Overlap(device=4, in_flight=4)
    idle = candidate("w2")
    assert cost(candidate("w1", overlap=cached, load=Load(active_requests=1, active_blocks=4))) == cost(idle)
    assert cost(candidate("w1", overlap=cached, load=Load(active_requests=1, active_prefill_tokens=32, active_blocks=2))) == cost(idle)


def test_blocks_counts_tokens_of_a_started_block_as_prefill_and_not_as_decode() -> None:
    assert cost(candidate("one"), RoutingRequest("m", 170)) == 170 / 16 + 10


@pytest.mark.parametrize("tokens", [1, 31, 100, 2217])
def test_R2_idle_engines_cost_the_same_whatever_their_block_size(tokens: int) -> None:
    """Else all prompts that share nothing would go to the one with the larger blocks."""
    sizes = (16, 32, 48, 16)
    engines = [
        candidate(str(number), block_size=size, prompt_blocks=tokens // size, new_blocks=tokens // size)
        for number, size in enumerate(sizes)
    ]
    costs = Blocks().score(RoutingRequest("m", tokens), engines, context())
    assert costs == pytest.approx([tokens / 16 + tokens // 16] * 4)


def test_blocks_sees_nothing_of_a_prefix_that_is_being_computed() -> None:
    """As Dynamo does: that prefix is load there, and no overlap."""
    load = Load(active_requests=1, active_prefill_tokens=160, active_blocks=10)
    assert cost(candidate("one", new_blocks=0, overlap=Overlap(in_flight=10), load=load)) == 20 + 10
    assert cost(candidate("idle")) == 10 + 10


def test_R13_a_copy_on_the_device_is_preferred_to_one_in_host_memory() -> None:
    device, host, none = Overlap(device=8, in_flight=8), Overlap(host=8), Overlap()
    costs = [cost(candidate("a", overlap=overlap)) for overlap in (device, host, none)]
    assert costs == [12.0, 14.0, 20.0]


def test_blocks_without_tokens_prefers_the_less_loaded() -> None:
    asked = RoutingRequest("m", untokenizable="no tokenizer")
    busy = candidate("a", 0, load=Load(active_requests=1, active_blocks=5))
    assert Blocks().score(asked, [busy, candidate("b", 0)], context()) == [5.0, 0.0]


def chosen(costs: Sequence[float]) -> list[int]:
    return [position for position, value in enumerate(costs) if value == min(costs)]


# -- kv


LEARNED = Load(s_per_token=1e-3)
"""An idle endpoint that computes a thousand tokens a second."""


def prices(*candidates: Candidate, asked: RoutingRequest | None = None) -> list[Price]:
    return Kv().prices(asked or request(10), candidates)


def memory_of(one: Candidate) -> float:
    return prices(one)[0][PARTS.index("memory")]


def learned(**fields: float) -> Load:
    return msgspec.structs.replace(LEARNED, **fields)


def approx(**parts: float) -> Price:
    ahead, own, memory, decoding = (parts.get(name, 0.0) for name in PARTS)
    return ahead, own, memory, decoding


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (candidate("idle", load=LEARNED), approx(own_prefill=4 / 3 * 0.160)),
        (candidate("warm", overlap=Overlap(device=4, in_flight=4), load=LEARNED), approx(own_prefill=4 / 3 * 0.096)),
        (candidate("host", overlap=Overlap(host=4), load=LEARNED), approx(own_prefill=4 / 3 * 0.112)),
        (candidate("disk", overlap=Overlap(disk=4), load=LEARNED), approx(own_prefill=4 / 3 * 0.144)),
        (
            candidate("both", overlap=Overlap(device=2, host=4, in_flight=5), load=LEARNED),
            approx(own_prefill=4 / 3 * (0.160 - 0.080 - 0.012)),
        ),
        (candidate("all", overlap=Overlap(device=10, in_flight=10), load=LEARNED), approx(own_prefill=4 / 3 * 0.001)),
        (
            candidate(
                "queued", load=learned(active_requests=5, computing=3, active_prefill_tokens=500, prefill_done=200.0, unknown_tokens=50.0)
            ),
            approx(prefill_ahead=0.350, own_prefill=0.640 / 3, decoding=5 * DECODING_TOKENS * 1e-3),
        ),
        (candidate("busy", load=learned(busy=0.75)), approx(own_prefill=4 * 0.160)),
        (candidate("saturated", load=learned(busy=1.0)), approx(own_prefill=20 * 0.160)),
    ],
)
def test_kv_prices_in_seconds_by_part(one: Candidate, expected: Price) -> None:
    assert prices(one) == [pytest.approx(expected)]
    assert Kv().score(request(10), [one], context()) == [pytest.approx(sum(prices(one)[0]))]
    assert Kv().explain(request(10), [one], context()) == [dict(zip(PARTS, prices(one)[0], strict=True))]


@pytest.mark.parametrize(("held", "expected"), [(0, 0.0), (50, 0.11 * 10.0), (75, 0.11 * 10.0 * 3), (95, 0.11 * 10.0 * 19 + 10.0 * 6 / 95)])
def test_kv_prices_memory_by_how_full_it_is_and_the_wait_for_room(held: int, expected: float) -> None:
    one = msgspec.structs.replace(candidate("one", load=learned(active_blocks=held, residence_s=10.0)), total_blocks=100)
    assert memory_of(one) == pytest.approx(expected)


def test_kv_counts_the_memory_of_what_has_been_generated() -> None:
    load = learned(active_blocks=34, generated_tokens=256.0, residence_s=10.0)
    assert memory_of(msgspec.structs.replace(candidate("one", load=load), total_blocks=100)) == pytest.approx(0.11 * 10.0)


def test_kv_takes_paces_that_differ_by_chance_for_equal_and_prices_others_as_they_are() -> None:
    def paces(*values: float | None) -> list[float]:
        found = prices(*(candidate(str(number), load=Load(s_per_token=value)) for number, value in enumerate(values)))
        return [own * 0.75 / 160 for _, own, _, _ in found]

    assert paces(None, None) == pytest.approx([ASSUMED_S_PER_TOKEN] * 2)
    assert paces(1.0, 1.1, 0.9, 1.2) == pytest.approx([1.1] * 4)
    assert paces(1.0, 1.0, 3.0, 1.0 / ALIKE - 0.01) == pytest.approx([1.0, 1.0, 3.0, 1.0 / ALIKE - 0.01])
    assert paces(1.0, 3.0, 1.0, None) == pytest.approx([1.0, 3.0, 1.0, 1.0]), "not known yet: it gets to show"


def test_kv_follows_a_prefix_that_is_being_computed_until_the_queue_outweighs_it() -> None:
    """10 k tokens, of which A is computing the first 8 k."""
    asked = RoutingRequest("m", 10_000)

    def follows(queued: int) -> bool:
        load = learned(active_requests=1, active_prefill_tokens=queued, active_blocks=500)
        one = candidate("a", 625, new_blocks=125, overlap=Overlap(in_flight=500), load=load)
        here, idle = (sum(price) for price in prices(one, candidate("b", 625, load=LEARNED), asked=asked))
        return here < idle

    assert follows(8_000)
    assert follows(10_000)
    assert not follows(11_500)


def test_R2_idle_engines_cost_the_same_in_seconds_whatever_their_block_size() -> None:
    engines = [candidate(str(size), block_size=size, prompt_blocks=1000 // size) for size in (16, 32, 48, 16)]
    assert len(set(Kv().score(RoutingRequest("m", 1000), engines, context()))) == 1


def test_kv_without_tokens_prefers_the_one_with_less_to_do() -> None:
    asked = RoutingRequest("m", untokenizable="no tokenizer")
    busy, idle = Kv().score(asked, [candidate("a", 0, load=Load(active_requests=1)), candidate("b", 0)], context())
    assert busy > idle


# -- threshold


@pytest.mark.parametrize(
    ("cached", "loads", "expected"),
    [
        ([3, 0, 0], [5, 1, 2], [0]),  # 30 % of the prompt
        ([2, 0, 0], [5, 1, 2], [1]),
        ([5, 8, 0], [0, 9, 2], [1]),
        ([9, 0, 0], [70, 5, 5], [1, 2]),  # 65 more, and over 1.5 times
        ([9, 0, 0], [69, 5, 5], [0]),
        ([9, 0, 0], [210, 140, 200], [0]),  # 70 more, but not over 1.5 times
    ],
)
def test_threshold_follows_a_long_prefix_while_the_load_is_even(cached: list[int], loads: list[int], expected: list[int]) -> None:
    candidates = [
        candidate(str(number), overlap=Overlap(device=blocks), load=Load(active_requests=load))
        for number, (blocks, load) in enumerate(zip(cached, loads, strict=True))
    ]
    assert chosen(Threshold().score(request(10), candidates, context())) == expected


# -- those that do not look at the cache


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
    for policy in (LeastLoaded(), Kv(), Blocks()):
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
