"""What the doctor says of a router's metrics and answers, and of settings that cannot be: tables, nothing is asked."""

from __future__ import annotations

import doctest

import pytest

from engines.types import Connector, EngineInfo, EngineKind, EngineSpec, KvSource, Role
from router.doctor import trial
from router.doctor.broker import relayed
from router.doctor.findings import Finding, State, as_text, healthy, ok, unknown, warning, wrong
from router.doctor.fleet import ENOUGH_TOKENS, LEAST_FILES, Page, _files, judged, routed
from router.doctor.pairs import difference
from router.doctor.settings import DoctorSettings

LIVE = """router_bus_connected 1.0
router_engine_state{engine="http://a:1",state="serving"} 1.0
router_signal_state{engine="http://a:1",rank="0",state="live"} 1.0
router_signal_state{engine="http://a:1",rank="0",state="blind"} 0.0
router_engine_info{engine="http://a:1",kind="vllm",version="0.32.0"} 1.0
"""


def broken(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.subject) for finding in found if finding.state is not State.OK]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("", ""), []),
        (('state="serving"} 1.0', 'state="ejected"} 1.0'), [("state", "http://a:1")]),
        (('state="live"} 1.0', 'state="live"} 0.0'), []),
        (('state="blind"} 0.0', 'state="blind"} 1.0'), [("signal", "http://a:1#0")]),
        (('state="blind"} 0.0', 'state="partial"} 1.0'), [("signal", "http://a:1#0")]),
        (("router_bus_connected 1.0", "router_bus_connected 0.0"), [("bus", "router")]),
    ],
)
def test_each_state_that_is_not_good_is_named(change: tuple[str, str], expected: list[tuple[str, str]]) -> None:
    assert broken(list(judged(Page(LIVE.replace(*change))))) == expected


def test_engines_of_several_versions_are_named() -> None:
    page = LIVE + 'router_engine_info{engine="http://b:1",kind="vllm",version="0.31.0"} 1.0\n'
    assert broken(list(judged(Page(page)))) == [("version", "vllm")]
    assert not broken(list(judged(Page(page.replace('"http://b:1",kind="vllm"', '"http://b:1",kind="sglang"')))))


@pytest.mark.parametrize(("missing", "told"), [(0.05, False), (0.2, True)])
def test_a_cache_that_has_less_than_was_believed_is_named(missing: float, told: bool) -> None:
    page = LIVE + (
        f'router_cached_tokens_total{{engine="http://a:1",rank="0",by="kv",source="predicted"}} {ENOUGH_TOKENS}\n'
        f'router_cached_tokens_error_total{{engine="http://a:1",rank="0",by="kv",kind="missing"}} {ENOUGH_TOKENS * missing}\n'
    )
    assert broken(list(judged(Page(page)))) == ([("beliefs", "http://a:1#0")] if told else [])


def test_pairs_whose_link_is_slow_are_named() -> None:
    page = LIVE + 'router_kv_link_slow{prefill="http://a:1#0",decode="http://b:1#0"} 1.0\n'
    assert broken(list(judged(Page(page)))) == [("link", "http://a:1#0 ▸ http://b:1#0")]


@pytest.mark.parametrize(
    ("page", "state"),
    [(f"process_max_fds {LEAST_FILES}\n", State.OK), ("process_max_fds 1024.0\n", State.WRONG), ("", State.UNKNOWN)],
)
def test_a_router_that_may_open_few_files_is_named(page: str, state: State) -> None:
    assert [finding.state for finding in _files(Page(page), "r")] == [state]


@pytest.mark.parametrize(
    ("reason", "here", "overlap", "state"),
    [
        ("kv", "a", 64, State.OK),
        ("kv", "a", 0, State.WRONG),
        ("kv", "b", 64, State.WRONG),
        ("policy", "b", 0, State.OK),
        ("predicted", "a", 64, State.WARNING),
        ("load_outweighed", "b", 0, State.UNKNOWN),
        ("no_shared_prefix", "b", 0, State.WRONG),
        ("untokenizable", "a", 0, State.WRONG),
        ("", "", 0, State.WRONG),
    ],
)
def test_where_the_second_of_two_equal_prompts_went(reason: str, here: str, overlap: int, state: State) -> None:
    first = {"x-commutator-engine": "a"}
    second = {"x-commutator-engine": here, "x-commutator-reason": reason, "x-commutator-overlap-tokens": str(overlap)}
    assert routed("m", first, second).state is state


def test_an_engine_is_relayed_where_its_routers_listen() -> None:
    info = EngineInfo("http://a:1", EngineSpec("http://a:1"), EngineKind.VLLM, "1", (), kv_sources=(KvSource(0, "tcp://a:2"),))
    told = [
        [finding.state for finding in relayed(heard, "ours", [info])]
        for heard in ({}, {"http://a:1": {"theirs"}}, {"http://a:1": {"ours", "theirs"}})
    ]
    assert told == [[State.WRONG], [State.WRONG], [State.OK]]
    silent = EngineInfo("http://b:1", EngineSpec("http://b:1"), EngineKind.VLLM, "1", ())
    assert list(relayed({}, "ours", [silent])) == [], "there is nothing to relay"


def test_what_two_engines_of_a_pair_differ_in_is_said() -> None:
    def engine(url: str, **changed: object) -> EngineInfo:
        known = {"role": Role.PREFILL, "connector": Connector.NIXL, "block_size": 16, "kv_dtype": "bf16"} | changed
        return EngineInfo(url, EngineSpec(url), EngineKind.VLLM, "0.32.0", (), **known)  # type: ignore[arg-type]

    assert difference(engine("http://a:1"), engine("http://b:1", block_size=32, kv_dtype="fp8")) == (
        "http://b:1 has another block size 16 and 32, another KV dtype bf16 and fp8"
    )
    assert difference(engine("http://a:1"), engine("http://b:1", connector=None)) == "http://b:1 has no way to hand KV over"


def test_lines_and_whether_all_is_well() -> None:
    fine, poor, bad = ok("a", "x", "good"), warning("long-name", "y", "so so", "better"), wrong("b", "zz", "bad", "do this")
    assert as_text([fine, poor, bad]).splitlines() == [
        "ok       a          x   good",
        "warning  long-name  y   so so → better",
        "wrong    b          zz  bad → do this",
    ]
    assert healthy([fine, poor, unknown("c", "x", "not seen")])
    assert not healthy([fine, bad])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (DoctorSettings(), "router"),
        (DoctorSettings(router="h:8080"), "router"),
        (DoctorSettings(nats="nats://h", router_key="k"), "router_key"),
        (DoctorSettings(engine=(EngineSpec("http://a:1"),), namespace="x"), "namespace"),
    ],
)
def test_settings_that_cannot_be_or_have_no_effect_are_refused(settings: DoctorSettings, key: str) -> None:
    assert key in [complaint.key for complaint in settings.check(frozenset({"namespace"}))]


def test_the_examples_are_true() -> None:
    assert doctest.testmod(trial).failed == 0
