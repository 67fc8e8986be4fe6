"""What several processes answer as one: metrics, readiness, admin replies, and what a later process is told."""

from __future__ import annotations

import doctest
import json
from types import ModuleType

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.metrics import Metrics
from router.processes import journal, merging, pages
from router.processes.journal import Journal
from router.processes.merging import reply
from router.processes.messages import AdminCall, AdminReply, Family, Page, Readiness
from router.processes.pages import Pages, page_of


@pytest.mark.parametrize("module", [journal, merging, pages])
def test_the_examples_in_their_text_are_true(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def counter(value: float, **labels: str) -> Page:
    return Page([Family("requests", "Requests.", "counter", [("requests_total", tuple(labels.items()), value)])])


def gauge(name: str, value: float) -> Page:
    return Page([Family(name, "A gauge.", "gauge", [(name, (), value)])])


def total(pages_: Pages) -> dict[str, float]:
    return {sample.name: sample.value for metric in pages_.collect() for sample in metric.samples}


def test_counters_are_sums_that_a_process_s_end_does_not_lower() -> None:
    together = Pages()
    together.take("a", counter(5))
    together.take("b", counter(7))
    assert total(together) == {"requests_total": 12}
    together.gone("a")
    assert total(together) == {"requests_total": 12}
    together.take("c", counter(1))
    assert total(together) == {"requests_total": 13}
    together.gone("b")
    together.gone("c")
    assert total(together) == {"requests_total": 13}


@pytest.mark.parametrize("name", ["router_kv_link_bytes_per_second", "router_kv_link_slow"])
def test_a_link_is_one_link_for_all_processes(name: str) -> None:
    together = Pages()
    together.take("a", gauge(name, 5))
    together.take("b", gauge(name, 7))
    together.take("c", counter(1))
    assert total(together)[name] == 7


def test_a_series_that_begins_anew_within_a_process_goes_on_where_it_was() -> None:
    together = Pages()
    together.take("a", counter(5, engine="e"))
    together.take("a", counter(2, engine="e"))
    assert total(together) == {"requests_total": 7}
    together.take("a", Page([]))
    assert total(together) == {}, "of an engine that no process knows nothing is shown"
    together.take("b", counter(1, engine="e"))
    assert total(together) == {"requests_total": 8}


def test_what_is_kept_of_the_dead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_KEPT", 10)
    together = Pages()
    for number in range(100):
        together.take(f"r{number}", counter(1, engine=f"e{number}"))
        together.gone(f"r{number}")
    assert len(together._kept) == 10
    assert sum(len(keys) for _, keys in together._families.values()) == 10


@pytest.mark.parametrize(
    ("name", "values", "merged"),
    [
        ("router_active_requests", (2, 3), 5),
        ("router_engine_state", (1, 0), 0.5),
        ("router_engine_state", (1, 1), 1),
        ("router_model_engines", (2, 1), 1),
        ("router_cached_blocks", (90, 100), 100),
        ("router_bus_connected", (1, 0), 0),
        ("router_peers", (1, 1), 1),
    ],
)
def test_gauges_are_sums_unless_they_say_the_same_everywhere(name: str, values: tuple[float, ...], merged: float) -> None:
    together = Pages()
    for number, value in enumerate(values):
        together.take(str(number), gauge(name, value))
    assert total(together) == {name: merged}


def test_what_one_process_lacks_is_not_told_as_if_all_had_it() -> None:
    together = Pages()
    together.take("a", gauge("router_model_engines", 2))
    together.take("b", Page([]))
    assert total(together) == {"router_model_engines": 0}


def test_a_group_s_page_of_one_process_is_that_process_s_page() -> None:
    metrics = Metrics()
    metrics.ended(b"/v1/chat/completions", 200, 0.3)
    metrics.first_token(0.1)
    metrics.retried("engine_closed")
    together = Pages()
    together.take("a", page_of(metrics.registry.collect()))
    registry = CollectorRegistry()
    registry.register(together)
    assert sorted(generate_latest(registry).splitlines()) == sorted(metrics.page().splitlines())


def test_readiness_is_what_can_be_relied_on_in_every_process() -> None:
    assert merging.ready([]) == Readiness(accepting=False, models={}, joining=[])
    merged = merging.ready([Readiness(True, {"a": 2, "b": 1}, ["http://x:1"]), Readiness(True, {"a": 1}, [])])
    assert merged == Readiness(True, {"a": 1, "b": 0}, ["http://x:1"])
    assert merging.ready([Readiness(True, {}, []), Readiness(False, {}, [])]).accepting is False


def done(status: int, **body: object) -> AdminReply:
    return AdminReply(status, json.dumps(body).encode())


def test_processes_that_agree_reply_as_one() -> None:
    merged = reply({0: done(200, id="e", state="serving", in_flight=1), 1: done(200, id="e", state="serving", in_flight=2)})
    assert (merged.status, json.loads(merged.body)) == (200, {"id": "e", "state": "serving", "in_flight": 3})


def test_a_refusal_that_all_share_is_said_once() -> None:
    refusal = AdminReply(400, error="no", allow="")
    assert reply({0: refusal, 1: refusal}) == refusal


def test_a_removal_is_done_when_the_last_process_has_done_it() -> None:
    removed, draining = done(200, id="e", state="removed"), done(202, id="e", state="draining", in_flight=1)
    assert reply({0: removed, 1: draining}).status == 202
    assert json.loads(reply({0: removed, 1: draining}).body)["state"] == "draining"
    assert reply({0: AdminReply(404, error="no engine e is followed"), 1: removed}).status == 200
    assert reply({0: AdminReply(404, error="a"), 1: AdminReply(404, error="a")}).status == 404


def test_it_is_said_which_processes_did_not_do_it() -> None:
    fine = done(200, id="e", state="serving")
    silent = reply({0: fine, 1: None, 2: None})
    assert silent.status == 504
    assert "processes 1, 2 did not answer in time" in silent.error
    assert "process 0 did it" in silent.error
    refused = reply({0: fine, 1: AdminReply(400, error="the host 'h' is not known")})
    assert refused.status == 502
    assert refused.error == "process 1 did not do it (the host 'h' is not known); process 0 did"
    assert reply({}).status == 503


def test_a_list_of_engines_has_each_once_and_names_who_differs() -> None:
    endpoint = {"rank": 0, "load": {"active_requests": 1, "active_prefill_tokens": 2, "active_blocks": 3}, "predicted_blocks": 4}
    one = {"id": "e", "state": "serving", "draining": False, "leaving": False, "in_flight": 1, "endpoints": [endpoint]}
    merged = json.loads(reply({0: done(200, engines=[one]), 1: done(200, engines=[one | {"state": "cooling"}])}).body)["engines"]
    assert [(e["id"], e["state"], e["states"], e["in_flight"]) for e in merged] == [("e", "cooling", {"0": "serving", "1": "cooling"}, 2)]
    assert merged[0]["endpoints"] == [
        {"rank": 0, "load": {"active_requests": 2, "active_prefill_tokens": 4, "active_blocks": 6}, "predicted_blocks": 8}
    ]


def test_a_later_process_is_told_only_what_still_has_an_effect() -> None:
    book = Journal()
    name, engine = AdminCall("POST", b"/admin/engines", body=b"{}"), b"/admin/engines/e"
    drain, undrain = AdminCall("POST", engine + b"/drain"), AdminCall("POST", engine + b"/undrain")
    for call in (name, drain, undrain, drain):
        book.done("e", call)
    assert book.calls() == [name, drain]
    book.done("e", AdminCall("DELETE", engine))
    assert book.calls() == [name, drain, AdminCall("DELETE", engine, b"now=1")]
    book.done("e", undrain)
    assert book.calls() == [name, undrain]
    book.done("e", name)
    assert book.calls() == [name]
    assert book.version == 7


def test_what_is_told_of_removed_engines_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_REMOVED", 3)
    book = Journal()
    for number in range(10):
        book.done(f"e{number}", AdminCall("DELETE", b"/admin/engines/e%d" % number))
    book.done("kept", AdminCall("POST", b"/admin/engines"))
    assert [call.path[-1:] for call in book.calls()] == [b"7", b"8", b"9", b"s"]
