"""What the live page is made of: the last minutes in bounded memory, several processes added up, and what is wrong, in words."""

# ruff: noqa: ANN401 - fields of Structs, of whatever type each has

from __future__ import annotations

import doctest
import random
import sys
from types import ModuleType
from typing import Any

import msgspec
import pytest

from discovery.observations import PlanMessage, PlanPool
from discovery.signal import Signal, SignalState
from engines.types import Endpoint, Role
from router.disagg import Split, Why
from router.scheduling.types import Candidate, Decision, Load, Reason, Rejection
from router.ui import document as documents
from router.ui import plans as planning
from router.ui import recent as recents
from router.ui.document import document
from router.ui.parts import Index, Link, Part
from router.ui.plans import MAX_PLANNERS, Plans
from router.ui.recent import MAX_CANDIDATES, MAX_DECISIONS, SLOT_S, SLOTS, Ended, Recent, bin_of, quantile

A, B = "http://a:1", "http://b:1"


@pytest.mark.parametrize("module", [recents, documents, planning])
def test_the_examples_in_their_text_are_true(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def decision(engines: int = 2, rejected: int = 0) -> Decision:
    candidates = [Candidate(Endpoint(f"http://e{n}:1"), 16, 4, 4) for n in range(engines)]
    out = [(Endpoint(f"http://r{n}:1"), Rejection.COOLING) for n in range(rejected)]
    return Decision(candidates[0], 0, 1.0, Reason.KV, "kv", candidates, [1.0] * engines, out)


def ended(at: float, **fields: Any) -> Ended:
    return Ended(at=at, path="/v1/chat/completions", status=fields.pop("status", 200), duration_s=fields.pop("duration_s", 1.0), **fields)


def part(**fields: Any) -> Part:
    told: dict[str, Any] = {
        "now": 1000.0,
        "policy": "kv",
        "engines": [engine(A)],
        "slots": [],
        "decisions": [],
        "index": Index(),
        "in_progress": 0,
        "connections": 0,
        "waiting": {},
        "models": {"m": 1},
        "bus": "",
        "peers": 0,
        "links": [],
        "transfers": {},
        "disagg": "",
    }
    return Part(**(told | fields))


def engine(id_: str, state: str = "serving", signal: Signal | None = None, **load: Any) -> dict[str, Any]:
    endpoint = {
        "rank": 0,
        "signal": msgspec.to_builtins(signal or Signal(SignalState.LIVE)),
        "load": msgspec.to_builtins(Load(**load)),
        "cached_blocks": {"device": 0, "host": 0, "disk": 0},
        "predicted_blocks": 0,
    }
    joined = {} if state == "waiting" else {"models": [{"id": "m"}], "endpoints": [endpoint]}
    return {"id": id_, "role": "aggregated", "state": state, "draining": False, "leaving": False, "in_flight": 0} | joined


def wrong(**fields: Any) -> list[str]:
    return [trouble["what"] for trouble in document({0: part(**fields)}, "1")["troubles"]]


def test_ten_minutes_are_remembered_and_no_more() -> None:
    recent = Recent()
    for second in range(3600):
        recent.ended(ended(float(second), ttft_s=0.1))
    slots = recent.slots(3599.0)
    assert len(slots) == SLOTS
    assert sum(slot.ended for slot in slots) == SLOTS * SLOT_S
    assert recent.slots(3599.0 + SLOTS * SLOT_S) == []


def test_memory_does_not_grow_with_requests_nor_with_engines_asked_about() -> None:
    recent = Recent()
    for number in range(5_000):
        recent.ended(ended(number * 0.01, decision=decision(3), model="m", ttft_s=random.Random(number).random()))
    assert len(list(recent.decided())) == MAX_DECISIONS
    assert all(len(slot.ttft) <= 121 for slot in recent.slots(50.0))
    for number in range(200):
        recent.ended(ended(60.0 + number, decision=decision(600, rejected=100)))
        kept = [one.decision for one in recent.decided()]
        assert len(kept) == 1 or sum(700 for one in kept if one is not None and len(one.candidates) == 600) <= MAX_CANDIDATES


def test_one_decision_is_kept_however_many_candidates_it_has() -> None:
    recent = Recent()
    for number in range(3):
        recent.ended(ended(float(number), decision=decision(MAX_CANDIDATES + 1)))
        assert [one.at for one in recent.decided()] == [float(number)]


def test_quantiles_are_right_to_seven_percent() -> None:
    rng = random.Random(7)
    values = sorted(rng.lognormvariate(-3, 1.5) for _ in range(10_000))
    bins: dict[int, int] = {}
    for value in values:
        bins[bin_of(value)] = bins.get(bin_of(value), 0) + 1
    for share in (0.05, 0.5, 0.95, 0.99):
        found = quantile(bins, share)
        assert found == pytest.approx(values[int(share * len(values)) - 1], rel=0.08)


def test_O7_what_has_failed_is_no_first_token_and_no_time_between_tokens() -> None:
    recent = Recent()
    recent.ended(ended(5.0, status=502, failure="connection refused"))
    recent.ended(ended(5.0, status=200, failure="it broke off", ttft_s=0.1, completion_tokens=10))
    recent.ended(ended(5.0, status=429))
    recent.ended(ended(5.0, status=499))
    recent.ended(ended(5.0, status=400, failure="not JSON"))
    (slot,) = recent.slots(5.0)
    assert (slot.ended, slot.failed, slot.shed, slot.left) == (5, 2, 1, 1)
    assert sum(slot.ttft.values()) == 1
    assert slot.itl == {}


def test_the_time_between_tokens_is_counted_where_it_is_known() -> None:
    recent = Recent()
    recent.ended(ended(5.0, ttft_s=0.1, itl_s=0.1))
    recent.ended(ended(5.0, ttft_s=0.1))
    (slot,) = recent.slots(5.0)
    assert slot.itl == {bin_of(0.1): 1}


def test_the_latency_of_a_fleet_is_that_of_all_its_requests() -> None:
    parts = {}
    for index, seconds in enumerate((0.010, 1.0)):
        recent = Recent()
        for _ in range(100):
            recent.ended(ended(995.0, ttft_s=seconds, decision=decision(), prompt_tokens=100, overlap_tokens=50))
        parts[index] = part(slots=recent.slots(1000.0))
    told = document(parts, "1")
    assert told["late"]["requests"] == 200
    assert told["late"]["ttft"]["p50"] == pytest.approx(0.010, rel=0.08)
    assert told["late"]["ttft"]["p95"] == pytest.approx(1.0, rel=0.08)
    assert told["latency"]["ttft"]["p50"][-2:] == [told["late"]["ttft"]["p50"], None]
    assert len(told["latency"]["requests"]) == SLOTS


def test_decisions_of_several_processes_are_told_in_the_order_they_were_made() -> None:
    def told(at: float) -> dict[str, Any]:
        return {"at": at, "candidates": [], "rejected": []}

    found = document({0: part(decisions=[told(999.0), told(990.0)]), 1: part(decisions=[told(995.0)])}, "1")["decisions"]
    assert [(one["process"], one["age_s"]) for one in found] == [(0, 1.0), (1, 5.0), (0, 10.0)]
    assert len({one["id"] for one in found}) == 3


def test_a_process_that_does_not_answer_is_named_and_the_others_are_shown() -> None:
    told = document({0: part(), 1: None}, "1")
    assert told["processes"] == {"up": 1, "silent": [1]}
    assert "Process 1 did not answer" in told["troubles"][0]["what"]
    assert [one["id"] for one in told["engines"]] == [A]


def test_when_no_process_answers_the_page_says_so_and_nothing_else_is_made_up() -> None:
    told = document({0: None}, "1")
    assert told["engines"] == []
    assert told["late"]["hit_rate"] is None
    assert any("did not answer" in trouble["what"] for trouble in told["troubles"])


def test_where_all_is_well_nothing_is_wrong() -> None:
    assert wrong() == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engines": [], "models": {}}, "No engine is followed"),
        ({"models": {"m": 1, "lost": 0}}, "No engine takes requests for lost"),
        ({"engines": [engine(A, "waiting") | {"waiting_for": "connection refused"}]}, "Not there: http://a:1: connection refused"),
        ({"engines": [engine(A, "ejected")]}, "Cannot be reached"),
        ({"engines": [engine(A, "cooling")]}, "429 or 503"),
        ({"engines": [engine(A, "asleep")]}, "Asleep"),
        ({"engines": [engine(A, "draining")]}, "Draining"),
        (
            {"engines": [engine(A, signal=Signal(SignalState.BLIND, "it publishes none"))]},
            "KV events are blind at http://a:1: it publishes none",
        ),
        ({"engines": [engine(A, signal=Signal(SignalState.PARTIAL, "no replay"))]}, "KV events are partial"),
        ({"waiting": {"m": 3}}, "3 requests wait"),
        ({"engines": [engine(A, kv_usage=0.99, waiting=4)]}, "KV cache full"),
        ({"index": Index(1, 1, refused=1)}, "index is full"),
        ({"bus": "nats://h:4222"}, "nats://h:4222 cannot be reached"),
        ({"engines": [engine(A, active_requests=40), engine(B, active_requests=1)]}, "40 requests in flight"),
        ({"disagg": "always", "links": [Link(A, B, 1e6, "1 MB/s")]}, "are slow: 1 MB/s"),
    ],
)
def test_each_thing_that_is_wrong_is_named_and_nothing_else(fields: dict[str, Any], words: str) -> None:
    (found,) = wrong(**fields)
    assert words in found


def test_failures_and_refusals_of_the_last_minute_are_told_and_older_ones_are_not() -> None:
    for status, words in ((502, "failed"), (429, "answered 429")):
        recent = Recent()
        for _ in range(3):
            recent.ended(ended(990.0, status=status, failure="x"))
        assert words in wrong(slots=recent.slots(1000.0))[0]
        assert wrong(now=1200.0, slots=recent.slots(1200.0)) == []


def test_hits_that_were_expected_and_did_not_come_are_told() -> None:
    recent = Recent()
    chosen = msgspec.structs.replace(decision(), chosen=Candidate(Endpoint(A), 16, 4, 4))
    for _ in range(20):
        recent.ended(ended(990.0, decision=chosen, prompt_tokens=1000, overlap_tokens=900, cached_tokens=100))
    assert "far less in the cache" in wrong(slots=recent.slots(1000.0))[0]


def test_a_prefill_pool_without_engines_is_told() -> None:
    recent = Recent()
    recent.ended(ended(990.0, decision=decision(), split=Split(Why.NO_PARTNER)))
    told = document({0: part(disagg="always", slots=recent.slots(1000.0))}, "1")
    assert told["disagg"]["recent"] == {"no_prefill_engine": 1}
    assert "no prefill engine was usable" in told["troubles"][0]["what"]


def test_what_is_worst_comes_first_and_engines_with_one_trouble_share_a_line() -> None:
    engines = [engine(f"http://d{n}:1", "draining") for n in range(5)] + [
        engine(A, signal=Signal(SignalState.STALE, "lost")),
        engine(B, "ejected"),
    ]
    told = document({0: part(engines=engines)}, "1")["troubles"]
    assert [trouble["level"] for trouble in told] == ["error", "warning", "note"]
    assert "and 2 more" in told[-1]["what"]


def test_the_latest_plan_of_each_planner_is_shown() -> None:
    plans = [{"planner": "p", "at": 990.0, "replicas": 2}, {"planner": "q", "at": 980.0, "replicas": 1}]
    newer = [{"planner": "p", "at": 995.0, "replicas": 3}]
    told = document({0: part(plans=plans), 1: part(plans=newer)}, "1")["plans"]
    assert told == [{"age_s": 5.0, "planner": "p", "replicas": 3}, {"age_s": 20.0, "planner": "q", "replicas": 1}]


def test_a_plan_is_shown_with_its_pools_and_reasons_and_names_from_the_bus_do_not_add_up() -> None:
    plans = Plans()
    for number in range(100):
        plans.heard(PlanMessage(f"planner {number}", 1, 0.0, "m", ()), now=1.0)
    plans.heard(PlanMessage("p", 3, 0.0, "m", (PlanPool("m decode", Role.DECODE, 3, 2, (), ("itl above target",)),)), now=2.0)
    told = document({0: part(now=3.0, plans=plans.told(3.0))}, "1")["plans"]
    assert len(told) == MAX_PLANNERS
    pool = {"pool": "m decode", "role": "decode", "replicas": 3, "replicas_before": 2, "why": ["itl above target"]}
    assert told[-1] == {"age_s": 1.0, "planner": "p, m", "plan": 3, "pools": [pool]}


def test_memory_of_ten_busy_minutes_is_bounded() -> None:
    recent = Recent()
    rng = random.Random(1)
    for number in range(60_000):
        recent.ended(ended(number * 0.01, ttft_s=rng.lognormvariate(-3, 2), completion_tokens=10, decision=decision(4), prompt_tokens=10))
    assert (
        sum(sys.getsizeof(slot.ttft) + sys.getsizeof(slot.itl) + sys.getsizeof(slot.endpoints) for slot in recent.slots(600.0)) < 1_000_000
    )
