"""Picking, explaining, loading, and how choices add up over many requests."""

import doctest
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from discovery.signal import Signal, SignalState
from engines.blocks import pack_keys
from engines.types import Tier
from router.scheduling import explain, pick
from router.scheduling.explain import reason_for, reused_blocks
from router.scheduling.loading import PolicyNotLoaded
from router.scheduling.pick import lowest, sample
from router.scheduling.policies import least_loaded
from router.scheduling.policies.blocks import Blocks, BlocksWeights
from router.scheduling.policies.kv import Kv
from router.scheduling.policies.least_loaded import LeastLoaded
from router.scheduling.scheduler import NoCandidate, PolicyError, Scheduler
from router.scheduling.table import POLICIES, load_policy
from router.scheduling.types import Candidate, Context, Load, Overlap, Policy, Reason, Rejection, RoutingRequest, Scored
from tests.choosing import Core, candidate, chain, endpoint, request

BLIND = Signal(SignalState.BLIND, "no KV events")
NAMES = [f"e{number}" for number in range(8)]


@pytest.mark.parametrize("module", [pick, explain, least_loaded])
def test_the_examples_in_the_texts_are_true(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


# -- pick


def test_the_lowest_cost_wins() -> None:
    rng = random.Random(1)
    assert {lowest([3.0, -1.0, 2.0, math.inf], [1, 9, 2, 0], rng) for _ in range(50)} == {1}
    assert lowest([math.inf], [3], rng) == 0


def test_of_equals_the_one_longest_without_a_request_wins() -> None:
    rng = random.Random(1)
    assert {lowest([1.0, 1.0, 1.0, 2.0], [5, 3, 4, 0], rng) for _ in range(50)} == {1}
    assert {lowest([1.0, 1.0, 1.0], [5, 3, 3], rng) for _ in range(50)} == {1, 2}


@pytest.mark.parametrize(
    ("costs", "winners"),
    [
        ([1.0, 1.0, 1.0], {0, 1, 2}),
        ([2.0, 1.0, 1.0], {1, 2}),
        ([0.1 + 0.2, 0.3, 0.4], {0, 1}),
        ([1e6 + 1e-4, 1e6], {0, 1}),
        ([1e6 + 1.0, 1e6], {1}),
        ([1.0 + 1e-6, 1.0], {1}),
        ([math.inf, math.inf], {0, 1}),
    ],
)
def test_R22_costs_that_differ_by_rounding_are_drawn_evenly(costs: list[float], winners: set[int]) -> None:
    rng = random.Random(1)
    drawn = Counter(lowest(costs, [0] * len(costs), rng) for _ in range(600))
    assert set(drawn) == winners
    assert max(drawn.values()) - min(drawn.values()) < 100 or len(winners) == 1


def test_temperature_is_in_the_units_of_the_costs() -> None:
    rng = random.Random(1)

    def share(gap: float, temperature: float) -> float:
        return sum(sample([0.0, gap], temperature, rng) == 0 for _ in range(4000)) / 4000

    assert share(1.0, 1.0) == pytest.approx(0.731, abs=0.03)
    assert share(10.0, 1.0) > 0.999
    assert share(10.0, 10.0) == pytest.approx(0.731, abs=0.03)
    assert share(1.0, 1000.0) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("costs", [[0.0, math.inf], [-1e300, 1e300], [1e308, 0.0]])
def test_temperature_survives_extreme_costs(costs: list[float]) -> None:
    assert sample(costs, 1e-9, random.Random(0)) == costs.index(min(costs))
    assert sample([math.inf, math.inf], 1.0, random.Random(0)) in (0, 1)


# -- explain

WARM = candidate("warm", overlap=Overlap(device=5, in_flight=5))


@pytest.mark.parametrize(
    ("asked", "chosen", "others", "reason"),
    [
        (request(), WARM, [], Reason.KV),
        (request(), WARM, [candidate("same", overlap=Overlap(device=5, in_flight=5))], Reason.KV),
        (request(), candidate("c", overlap=Overlap(host=5)), [], Reason.KV),
        (request(), candidate("c", overlap=Overlap(device=1, in_flight=4)), [], Reason.IN_FLIGHT),
        (request(), candidate("c", overlap=Overlap(device=1, host=3, in_flight=4)), [], Reason.KV),
        (request(), candidate("c", overlap=Overlap(device=3, in_flight=3, predicted=True), signal=BLIND), [], Reason.PREDICTED),
        (request(), candidate("c", overlap=Overlap(device=3, in_flight=4, predicted=True), signal=BLIND), [], Reason.IN_FLIGHT),
        (request(), candidate("c"), [WARM], Reason.OUTWEIGHED),
        (request(), candidate("c", overlap=Overlap(device=4, in_flight=4)), [WARM], Reason.OUTWEIGHED),
        (request(), candidate("c", overlap=Overlap(predicted=True), signal=BLIND), [WARM], Reason.OUTWEIGHED),
        (request(), candidate("c"), [candidate("d")], Reason.NO_OVERLAP),
        (request(), candidate("c"), [candidate("d", overlap=Overlap(predicted=True), signal=BLIND)], Reason.NO_OVERLAP),
        (request(0), candidate("c", 0), [candidate("d", 0)], Reason.SHORT),
        (request(), candidate("c", overlap=Overlap(predicted=True), signal=BLIND), [candidate("d")], Reason.BLIND),
        (request(), candidate("c", signal=Signal(SignalState.PARTIAL, "late")), [], Reason.NO_OVERLAP),
        (request(untokenizable="no tokenizer"), candidate("c", 0), [], Reason.UNTOKENIZABLE),
        # 2 blocks of 64 tokens are a longer prefix than 5 of 16
        (request(), candidate("big", overlap=Overlap(device=2, in_flight=2), block_size=64), [WARM], Reason.KV),
        (request(), WARM, [candidate("big", overlap=Overlap(device=2, in_flight=2), block_size=64)], Reason.OUTWEIGHED),
    ],
)
def test_O3_each_situation_has_its_reason(asked: RoutingRequest, chosen: Candidate, others: list[Candidate], reason: Reason) -> None:
    candidates, costs = [chosen, *others], [1.0, *(2.0 for _ in others)]
    assert reason_for(asked, candidates, costs, 0) is reason
    assert reason_for(asked, candidates[::-1], costs[::-1], len(others)) is reason


def test_a_longer_prefix_passed_over_by_the_temperature_is_not_called_outweighed() -> None:
    cold = candidate("cold")
    assert reason_for(request(), [WARM, cold], [1.0, 2.0], 1) is Reason.SAMPLED
    assert reason_for(request(), [WARM, cold], [2.0, 1.0], 1) is Reason.OUTWEIGHED


# -- scheduler


def test_U5_a_decision_carries_every_score_and_every_rejection() -> None:
    rejected = [(endpoint("x"), Rejection.DRAINING), (endpoint("y"), Rejection.EXCLUDED)]
    candidates = [candidate("cold"), WARM]
    decision = Scheduler(Blocks(), "blocks", 0.0, random.Random(0)).decide(request(), candidates, rejected, now=0.0)
    assert decision.chosen is WARM
    assert decision.cost == 15.0
    assert decision.reason is Reason.KV
    assert decision.policy == "blocks"
    assert decision.scores == (Scored(candidates[0], 20.0), Scored(WARM, 15.0))
    assert decision.rejected == rejected


def test_without_candidates_the_error_says_what_was_wrong_with_each() -> None:
    rejected = [(endpoint("x"), Rejection.DRAINING)]
    with pytest.raises(NoCandidate, match="'m'") as raised:
        Scheduler(Kv(), "kv", 0.0, random.Random(0)).decide(request(), [], rejected, now=0.0)
    assert raised.value.rejected == tuple(rejected)


def test_a_policy_that_does_not_look_at_the_cache_is_its_own_reason() -> None:
    decision = Scheduler(LeastLoaded(), "least-loaded", 0.0, random.Random(0)).decide(request(), [WARM], (), now=0.0)
    assert decision.reason is Reason.POLICY


def test_a_temperature_draws_and_none_does_not() -> None:
    candidates = [candidate("cold"), WARM]
    for temperature, expected in ((0.0, {WARM}), (100.0, set(candidates))):
        scheduler = Scheduler(Kv(), "kv", temperature, random.Random(0))
        assert {scheduler.decide(request(), candidates, (), 0.0).chosen for _ in range(100)} == expected


class Returns:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> Sequence[float]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]  # that is the point


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ZeroDivisionError("division by zero"), "raised ZeroDivisionError: division by zero"),
        (RecursionError("too deep"), "raised RecursionError"),
        (None, "raised TypeError"),
        ([1.0], "gave 1 costs for 2 candidates"),
        ([1.0, 2.0, 3.0], "gave 3 costs for 2 candidates"),
        ([], "gave 0 costs for 2 candidates"),
        ([1.0, "cheap"], "raised ValueError"),
        ([1.0, None], "raised TypeError"),
        ([1.0, math.nan], "gave http://b:8000#0 the cost nan"),
        ([-math.inf, 1.0], "gave http://a:8000#0 the cost -inf"),
    ],
)
def test_a_policy_that_fails_is_named_with_what_was_wrong(answer: object, said: str) -> None:
    scheduler = Scheduler(Returns(answer), "mine:Returns", 0.0, random.Random(0))
    with pytest.raises(PolicyError, match=r"test_scheduling:Returns ") as raised:
        scheduler.decide(request(), [candidate("a"), candidate("b")], (), now=0.0)
    assert said in str(raised.value)


@pytest.mark.parametrize("answer", [(2, 1), iter([2, 1]), {2: "", 1: ""}, [math.inf, 1], [True, False]])
def test_any_iterable_of_numbers_will_do(answer: object) -> None:
    scheduler = Scheduler(Returns(answer), "mine:Returns", 0.0, random.Random(0))
    assert scheduler.decide(request(), [candidate("a"), candidate("b")], (), now=0.0).chosen == candidate("b")


# -- table and loading


@pytest.mark.parametrize("name", POLICIES)
def test_U2_each_policy_is_one_name_away_and_chooses_among_any_candidates(name: str) -> None:
    loaded, policy = load_policy(name)
    assert loaded == name
    for number in (1, 2, 8):
        candidates = [candidate(str(one), load=Load(active_requests=one, last_assigned=one)) for one in range(number)]
        decision = Scheduler(policy, name, 0.0, random.Random(0)).decide(request(), candidates, (), now=0.0)
        assert decision.chosen in candidates
        assert len(decision.scores) == number


def test_three_policies_look_at_the_cache_and_blocks_alone_is_given_the_weights() -> None:
    weights = BlocksWeights(decode_active_request_weight=2.0)
    loaded = {name: load_policy(name, weights)[1] for name in POLICIES}
    assert [name for name, policy in loaded.items() if Scheduler(policy, name, 0.0, random.Random(0)).uses_cache] == [
        "kv",
        "blocks",
        "threshold",
    ]
    blocks = loaded["blocks"]
    assert isinstance(blocks, Blocks)
    assert blocks.weights == weights


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory for policies; what was imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


GOOD = "class Mine:\n    def score(self, request, candidates, context):\n        return [0.0 for _ in candidates]\n"


def test_a_class_of_the_users_own_is_found_in_the_current_directory(folder: Path) -> None:
    (folder / "my_policies").mkdir()
    (folder / "my_policies" / "first.py").write_text(GOOD)
    name, policy = load_policy("my_policies.first:Mine")
    assert name == "my_policies.first:Mine"
    scheduler = Scheduler(policy, name, 0.0, random.Random(0))
    assert scheduler.uses_cache, "prompts are tokenized for a policy that does not say it needs no tokens"
    assert scheduler.decide(request(), [WARM], (), 0.0).policy == name


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        (
            GOOD,
            "kvv",
            "policy 'kvv' is unknown: expected one of kv, blocks, threshold, round-robin, random, least-loaded, power-of-two, session, or a class",
        ),
        (GOOD, "mine:", "expected module:Class"),
        (GOOD, ":Mine", "expected module:Class"),
        (GOOD, "yours:Mine", "no module 'yours', neither installed nor in "),
        (GOOD, "mine.inner:Mine", "no module 'mine.inner'"),
        (GOOD, "mine:Other", "mine.py) has no 'Other'"),
        (GOOD + "Other = Mine()\n", "mine:Other", "'Other' is not a class"),
        ("import absent_module\n", "mine:Mine", "importing 'mine' failed: it needs the module 'absent_module'"),
        ("1 / 0\n", "mine:Mine", "importing 'mine' failed: ZeroDivisionError: division by zero"),
        ("class Mine\n", "mine:Mine", "importing 'mine' failed: SyntaxError"),
        ("class Mine:\n    pass\n", "mine:Mine", "the class has no method score(request, candidates, context)"),
        ("class Mine:\n    score = 3\n", "mine:Mine", "the class has no method score"),
        (GOOD.replace("    def", "    async def"), "mine:Mine", "score is async"),
        (GOOD.replace("self, request, candidates, context", "self, request"), "mine:Mine", "score cannot be called as score("),
        (GOOD + "    def __init__(self, weights):\n        pass\n", "mine:Mine", "Mine() failed: TypeError"),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_refused_with_the_step_that_failed(folder: Path, source: str, name: str, said: str) -> None:
    (folder / "mine.py").write_text(source)
    with pytest.raises(PolicyNotLoaded) as raised:
        load_policy(name)
    assert said in str(raised.value)
    assert repr(name) in str(raised.value)


def test_a_file_in_the_current_directory_does_not_take_the_place_of_an_installed_module(folder: Path) -> None:
    (folder / "colorsys.py").write_text(GOOD)
    with pytest.raises(PolicyNotLoaded, match="has no 'Mine'"):
        load_policy("colorsys:Mine")


DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_the_documentation_works_as_the_documentation_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS / "examples")
    name, policy = load_policy("tenant_pinning:TenantPinning")
    scheduler = Scheduler(policy, name, 0.0, random.Random(0))
    assert not scheduler.uses_cache
    candidates = [candidate(f"e{number}") for number in range(5)]
    own = {
        tenant: {scheduler.decide(request(session=f"{tenant}/{user}"), candidates, (), 0.0).chosen for user in range(40)}
        for tenant in ("acme", "umbrella", "initech")
    }
    assert all(len(engines) == 2 for engines in own.values())
    left = [one for one in candidates if one not in own["acme"]]
    assert scheduler.decide(request(session="acme/1"), left, (), 0.0).chosen in left


def test_the_documentation_shows_the_whole_example_and_its_test_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "policies.md").read_text()
    example = (DOCS / "examples" / "tenant_pinning.py").read_text()
    shown, tested = (block.split("```")[0] for block in text.split("```python\n")[1:])
    assert shown == example
    monkeypatch.chdir(DOCS / "examples")
    load_policy("tenant_pinning:TenantPinning")
    exec(tested, {})  # noqa: S102 - the page's own code


def test_the_documentation_names_every_policy_and_every_reason_and_every_weight() -> None:
    text = (DOCS / "policies.md").read_text()
    for name in (*POLICIES, *Reason, *BlocksWeights.__struct_fields__):
        assert name in text


# -- together


def test_R36_equal_prompts_go_where_the_first_is_still_being_computed() -> None:
    core = Core(Kv(), NAMES)
    keys = chain(1, 64)
    decisions = [core.send(keys)[0] for _ in range(16)]
    assert len({decision.chosen.endpoint for decision in decisions}) == 1
    assert [decision.reason for decision in decisions] == [Reason.NO_OVERLAP] + [Reason.IN_FLIGHT] * 15


def test_R36_holds_for_an_endpoint_without_events_too() -> None:
    core = Core(Kv(), NAMES, blind=NAMES, signal=BLIND)
    decisions = [core.send(chain(1, 64))[0] for _ in range(16)]
    assert len({decision.chosen.endpoint for decision in decisions}) == 1
    assert [decision.reason for decision in decisions] == [Reason.BLIND] + [Reason.IN_FLIGHT] * 15


def test_R36_until_load_outweighs_it() -> None:
    core = Core(Kv(), NAMES)
    first = core.send(chain(1, 64))[0].chosen.endpoint
    for number in range(10):
        core.book.reserve(first, chain(100 + number, 10), 160)
    decision = core.send(chain(1, 64))[0]
    assert decision.chosen.endpoint != first
    assert decision.reason is Reason.OUTWEIGHED


@pytest.mark.parametrize(("tail", "lag"), [(2, 200), (8, 200), (8, 1), (16, 20), (1, 200), (1, 1), (1, 20)])
def test_R20_one_prefix_with_distinct_tails_is_reused_and_still_spread(tail: int, lag: int) -> None:
    core = Core(Kv(), NAMES)
    waiting = []
    reused = 0
    for number in range(200):
        keys = chain(1, 64) + chain(100 + number, tail)
        decision, reservation = core.send(keys)
        reused += min(64, reused_blocks(decision.chosen.overlap))
        waiting.append((decision, reservation, keys))
        if len(waiting) > lag:
            core.computed(*waiting.pop(0))
    assert len(core.book) == 200
    assert max(core.sent.values()) <= 1.5 * 200 / 8
    assert reused >= 0.8 * 199 * 64


def test_R22_routers_that_do_not_know_of_each_other_spread_a_burst_all_the_same() -> None:
    for policy in (Kv(), LeastLoaded()):
        total: Counter[object] = Counter()
        for router in range(4):
            core = Core(policy, NAMES, seed=router)
            for arrival in range(16):
                core.send(chain(1000 * router + arrival, 20))
            total += core.sent
        assert sum(total.values()) == 64
        assert max(total.values()) <= 1.5 * 8


@pytest.mark.parametrize("repeats", [1, 4, 12])
def test_R3_a_blind_endpoint_among_live_ones_is_neither_starved_nor_flooded(repeats: int) -> None:
    core = Core(Kv(), NAMES[:4], blind=["e2"], signal=BLIND)
    rng = random.Random(repeats)
    prompts = [chain(1, 8) + chain(10 + number, 40) for number in range(60)] * repeats
    rng.shuffle(prompts)
    running = []
    reasons: Counter[Reason] = Counter()
    for now, keys in enumerate(prompts):
        decision, reservation = core.send(keys, float(now))
        if decision.chosen.endpoint == endpoint("e2"):
            reasons[decision.reason] += 1
        running.append((decision, reservation, keys))
        if len(running) > 8:
            core.computed(*running[-4], float(now))
            running.pop(0)[1].release()
    fair = len(prompts) / 4
    assert 0.5 * fair <= core.sent[endpoint("e2")] <= 1.5 * fair
    assert not reasons[Reason.KV], "what is not known from events is never called so"
    if repeats > 1:
        assert reasons[Reason.PREDICTED] > 0


def test_R4_when_events_die_the_reason_changes_from_kv_to_predicted() -> None:
    core = Core(Kv(), NAMES)
    keys = chain(1, 20)
    first, reservation = core.send(keys)
    core.computed(first, reservation, keys)
    reservation.release()
    assert core.decide(keys).reason is Reason.KV
    core.signals[first.chosen.endpoint] = Signal(SignalState.STALE, "no beacon")
    decision = core.decide(keys)
    assert decision.chosen.endpoint == first.chosen.endpoint
    assert decision.reason is Reason.PREDICTED


def test_R13_a_prompt_goes_to_the_copy_on_the_device_not_to_the_one_in_host_memory() -> None:
    core = Core(Kv(), ["a", "b"])
    keys = chain(1, 20)
    core.caches.store(endpoint("a"), Tier.DEVICE, [pack_keys(keys)])
    core.caches.store(endpoint("b"), Tier.HOST, [pack_keys(keys)])
    decision = core.decide(keys)
    assert decision.chosen.endpoint == endpoint("a")
    on_device, in_host_memory = (scored.cost for scored in decision.scores)
    assert on_device < in_host_memory


def test_R26_an_endpoint_whose_gauge_is_stuck_receives_traffic() -> None:
    for policy in (Kv(), LeastLoaded()):
        core = Core(policy, ["a", "b"])
        core.book.report(endpoint("a"), running=99, waiting=99, kv_usage=0.99, now=0.0)
        for number in range(20):
            core.send(chain(number, 10))
        assert core.sent[endpoint("a")] == 10


def test_the_same_seed_gives_the_same_choices() -> None:
    def choices(policy: Policy) -> list[str]:
        core = Core(policy, NAMES, seed=11)
        return [str(core.send(chain(number % 5, 10))[0].chosen.endpoint) for number in range(50)]

    for name in POLICIES:
        assert choices(load_policy(name)[1]) == choices(load_policy(name)[1])
