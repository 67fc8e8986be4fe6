"""Pages of routers, as a Prometheus server has scraped them: what comes of two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engines.types import Role
from planner.scrapes import IN_PROGRESS, REQUESTS, SHED, TTFT, Page, Scrapes, distribution, engines_of
from planner.types import Traffic


def page(at: float, requests: float, **more: float) -> Page:
    """One of a router that has served so many; `more` by name, without labels."""
    ended = {frozenset({("route", "/v1/completions"), ("status", "200")}): requests} if requests else {}
    return Page(at, {REQUESTS: ended} | {name: {frozenset(): value} for name, value in more.items()})


def labelled(name: str, values: Mapping[Any, float], *labels: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    return {name: {frozenset(zip(labels, found, strict=True)): value for found, value in values.items()}}


def told(scrapes: Scrapes, **pages: Page) -> Traffic:
    """What a look tells that has something to tell."""
    traffic = scrapes.look(pages).traffic
    assert traffic is not None
    return traffic


def test_each_request_is_told_once_however_often_somebody_looks() -> None:
    scrapes, arrived, seconds = Scrapes(), 0, 0.0
    for tick in range(100):
        scraped = 15 * (5 * tick // 15)
        traffic = scrapes.look({"a": page(scraped, 2.0 * scraped)}).traffic
        if traffic is not None:
            arrived, seconds = arrived + traffic.arrived, seconds + traffic.window_s
    assert (arrived, seconds) == (2 * 495, 495)


def test_nothing_is_new_until_every_router_has_been_scraped_again() -> None:
    scrapes = Scrapes()
    scrapes.look({"a": page(0, 10), "b": page(7, 10)})
    assert scrapes.look({"a": page(15, 40), "b": page(7, 10)}).nothing_new
    both = told(scrapes, a=page(15, 40), b=page(22, 40))
    assert (both.arrived, both.window_s, both.rate) == (60, 15, 4.0)


def test_what_routers_have_counted_before_the_first_look_is_nothing_of_now() -> None:
    first = Scrapes().look({"a": page(0, 1e6)})
    assert (first.traffic, first.nothing_new) == (None, False)


def test_a_router_that_begins_anew_is_counted_on_from_there() -> None:
    scrapes = Scrapes()
    scrapes.look({"a": page(0, 100), "b": page(0, 100)})
    assert told(scrapes, a=page(15, 3), b=page(15, 130)).arrived == 30
    assert told(scrapes, a=page(30, 13), b=page(30, 130)).arrived == 10
    assert scrapes.look({"a": page(45, 0), "b": page(45, 0)}).traffic is None


def test_a_router_that_cannot_be_scraped_is_not_waited_for_and_not_counted_on() -> None:
    scrapes = Scrapes()
    scrapes.look({"a": page(0, 0), "b": page(0, 0)})
    assert told(scrapes, a=page(15, 30)).arrived == 30
    assert told(scrapes, a=page(30, 60), b=page(30, 900)).arrived == 30
    assert told(scrapes, a=page(45, 90), b=page(45, 930)).arrived == 60


def test_pages_that_lie_far_apart_say_nothing_of_now() -> None:
    scrapes = Scrapes()
    scrapes.look({"a": page(0, 0)})
    assert scrapes.look({"a": page(301, 1000)}).traffic is None


def test_requests_under_way_have_come_and_those_of_no_use_to_an_engine_have_not() -> None:
    scrapes = Scrapes()
    scrapes.look({"a": page(0, 0, **{IN_PROGRESS: 1})})
    assert told(scrapes, a=page(15, 0, **{IN_PROGRESS: 8})).arrived == 7
    assert told(scrapes, a=page(30, 7, **{IN_PROGRESS: 1})).arrived == 0
    ended = labelled(REQUESTS, {("200",): 9.0, ("499",): 1.0, ("503",): 2.0, ("400",): 50.0, ("404",): 50.0}, "status")
    shed = labelled(SHED, {("queue_full",): 3.0, ("client_left",): 5.0}, "reason")
    before = Page(45, labelled(REQUESTS, {("200",): 7.0}, "status"))
    scrapes = Scrapes()
    scrapes.look({"a": before})
    found = told(scrapes, a=Page(60, ended | shed))
    assert (found.arrived, found.shed) == (2 + 1 + 2, 3)


def test_a_fleet_without_engines_has_traffic() -> None:
    scrapes = Scrapes()
    scrapes.look({"a": page(0, 0)})
    look = scrapes.look({"a": page(15, 1)})
    assert look.engines == {}
    assert look.traffic is not None


def test_no_router_is_no_data() -> None:
    scrapes = Scrapes()
    scrapes.look({"a": page(0, 0)})
    look = scrapes.look({})
    assert (look.traffic, look.nothing_new) == (None, False)


@pytest.mark.parametrize(
    ("cumulative", "share", "expected_ms"),
    [
        ({"0.2": 0, "0.5": 100, "+Inf": 100}, 0.5, 350),
        ({"0.2": 0, "0.5": 100, "+Inf": 100}, 0.95, 485),
        ({"0.1": 90, "0.2": 90, "0.5": 100, "+Inf": 100}, 0.95, 350),
        ({"0.001": 100, "0.002": 100, "+Inf": 100}, 0.5, 0.7),  # our first bucket begins at 0.5
        ({"50.0": 0, "100.0": 0, "+Inf": 4}, 0.5, 150_000),
    ],
)
def test_percentiles_are_those_of_prometheus_within_the_width_of_our_buckets(
    cumulative: dict[str, float], share: float, expected_ms: float
) -> None:
    buckets = labelled(f"{TTFT}_bucket", {(bound,): value for bound, value in cumulative.items()}, "le")
    found = distribution(Page(0, buckets | {f"{TTFT}_sum": {frozenset(): 30.0}}), TTFT, 1e3)
    assert found.count == cumulative["+Inf"]
    assert found.total == 30_000
    assert found.percentile(share) == pytest.approx(expected_ms, rel=0.1)


def test_an_engine_that_one_router_cannot_see_is_what_the_other_says() -> None:
    there, away = (Page(0, labelled("router_engine_state", {("e", state): 1.0}, "engine", "state")) for state in ("serving", "waiting"))
    assert [engine.state for engine in Scrapes().look({"a": away, "b": there}).engines.values()] == ["serving"]
    assert Scrapes().look({"a": away}).engines == {}


def test_what_an_engine_is_and_carries_is_of_all_its_ranks() -> None:
    at = {("e", "0"): 3.0, ("e", "1"): 4.0}
    found = Page(
        0,
        labelled("router_engine_info", {("e", "prefill"): 1.0, ("f", "new"): 1.0}, "engine", "role")
        | labelled("router_engine_state", {("e", "serving"): 0.75, ("e", "joining"): 0.25, ("f", "draining"): 1.0}, "engine", "state")
        | labelled("router_active_requests", at, "engine", "rank")
        | labelled("router_active_prefill_tokens", at, "engine", "rank")
        | labelled("router_engine_running_requests", at, "engine", "rank")
        | labelled("router_engine_kv_usage_ratio", {("e", "0"): 0.2, ("e", "1"): 0.6}, "engine", "rank"),
    )
    e, f = engines_of(found)
    assert (e.engine, e.role, e.state) == ("e", Role.PREFILL, "serving")
    assert (e.in_flight, e.prefill_tokens, e.running, e.waiting, e.kv_usage) == (7, 7, 7, None, 0.6)
    assert (f.engine, f.role, f.state, f.in_flight, f.running) == ("f", Role.AGGREGATED, "draining", 0, None)
