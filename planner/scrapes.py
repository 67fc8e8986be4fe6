"""What do two metrics pages of a router tell? What clients asked for and saw between them, and what each engine carries.

    page at 12:00:00 ─┐
                      ├─▶ traffic of those 15 s          counts are subtracted: each request is in one window, whoever looks how often
    page at 12:00:15 ─┘─▶ engines, as they are now

A page has less than a report on the bus: no models, no context lengths, and wider buckets, within which values are taken to be spread
evenly, as Prometheus' own `histogram_quantile` does. What is known of an answer is counted when it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from discovery.observations import BOUNDS, EngineReport, Histogram, TrafficReport
from engines.types import Role
from planner.sightings import Look, together, traffic_of

MS: Final = 1e3
SCRAPED_AT: Final = "scraped_at"
"""Not on a page: when it was read, in seconds since the epoch."""
REQUESTS: Final = "router_requests_total"
IN_PROGRESS: Final = "router_in_progress"
SHED: Final = "router_admission_shed_total"
WAITING: Final = "router_admission_waiting"
PROMPT, OVERLAP = "router_prompt_tokens_total", "router_overlap_tokens_total"
ISL, OSL = "router_input_tokens", "router_output_tokens"
TTFT, ITL, WAIT = "router_time_to_first_token_seconds", "router_inter_token_latency_seconds", "router_admission_wait_seconds"
STATE, INFO = "router_engine_state", "router_engine_info"
IN_FLIGHT, PREFILL = "router_active_requests", "router_active_prefill_tokens"
RUNNING, QUEUED, KV = "router_engine_running_requests", "router_engine_waiting_requests", "router_engine_kv_usage_ratio"
NAMES: Final = (
    *(REQUESTS, IN_PROGRESS, SHED, WAITING, PROMPT, OVERLAP, STATE, INFO, IN_FLIGHT, PREFILL, RUNNING, QUEUED, KV),
    *(f"{name}_{part}" for name in (ISL, OSL, TTFT, ITL, WAIT) for part in ("bucket", "sum")),
)
"""All that is read of a page."""
COUNTED: Final = ("_total", "_bucket", "_sum")
NOT_READ: Final = frozenset({"400", "404"})
"""Statuses of requests that no engine was to have."""
ROLES: Final = {role.value: role for role in Role}
NOT_THERE: Final = "waiting"
LONGEST_S: Final = 300.0
"""Pages that lie further apart say nothing of now."""

Labels = frozenset[tuple[str, str]]


class Page(msgspec.Struct, frozen=True):
    """What a router's page had."""

    scraped_at: float
    values: Mapping[str, Mapping[Labels, float]]
    """By name and labels."""

    def of(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """A name's series."""
        return ((dict(labels), value) for labels, value in self.values.get(name, {}).items())

    def sum(self, name: str) -> float:
        """Of all series of a name; 0 where there is none."""
        return sum(self.values.get(name, {}).values())

    def by_engine(self, name: str) -> dict[str, list[float]]:
        """A name's values of each engine, one for each rank."""
        found: dict[str, list[float]] = {}
        for labels, value in self.of(name):
            found.setdefault(labels.get("engine", ""), []).append(value)
        return found


class Scrapes:
    """Pages of all routers, as they were when somebody last looked."""

    def __init__(self) -> None:
        self._told: Mapping[str, Page] = {}

    def look(self, pages: Mapping[str, Page]) -> Look:
        """What has happened since the last look, and what is. A router that is not among `pages` could not be scraped, and is not counted on.

        Nothing is new until every router has been scraped again: a rate of some of them would be less than that of all.
        """
        if not pages:
            return Look(None, {})
        engines = together(report for page in pages.values() for report in engines_of(page))
        told = self._told
        if any(name in told and page.scraped_at <= told[name].scraped_at for name, page in pages.items()):
            return Look(None, engines, nothing_new=True)
        self._told = pages
        windows, parts = [], []
        for name, page in pages.items():
            more = more_of(page, told[name]) if name in told else None
            if more is not None:
                windows.append(more.scraped_at)
                parts.append(_traffic(more, page))
        return Look(traffic_of(windows, parts), engines)


def more_of(page: Page, before: Page) -> Page | None:
    """What has been added to each count, `scraped_at` to the time; None where the router has begun anew, or nobody looked for too long."""
    elapsed = page.scraped_at - before.scraped_at
    if elapsed > LONGEST_S:
        return None
    more: dict[str, dict[Labels, float]] = {}
    for name in {*page.values, *before.values}:
        now, then = page.values.get(name, {}), before.values.get(name, {})
        if name.endswith(COUNTED):
            if any(now.get(labels, 0.0) < value for labels, value in then.items()):
                return None
            more[name] = {labels: value - then.get(labels, 0.0) for labels, value in now.items()}
    # Requests are counted when they end; with the difference of those under way they are those that came.
    more[IN_PROGRESS] = {frozenset(): page.sum(IN_PROGRESS) - before.sum(IN_PROGRESS)}
    return Page(elapsed, more)


def engines_of(page: Page) -> Iterator[EngineReport]:
    """What one router knows of each engine."""
    roles = {labels.get("engine", ""): ROLES.get(labels.get("role", ""), Role.AGGREGATED) for labels, _ in page.of(INFO)}
    states: dict[str, tuple[float, str]] = {}
    for labels, value in page.of(STATE):  # with several processes, that of most of them
        if labels.get("state") == NOT_THERE:
            continue  # as in reports on the bus: who cannot see it says nothing of it
        engine = labels.get("engine", "")
        states[engine] = max(states.get(engine, (0.0, "")), (value, labels.get("state", "")))
    in_flight, prefill, running, queued, kv = map(page.by_engine, (IN_FLIGHT, PREFILL, RUNNING, QUEUED, KV))
    for engine, (_, state) in states.items():
        yield EngineReport(
            engine=engine,
            role=roles.get(engine, Role.AGGREGATED),
            state=state,
            models=(),
            in_flight=round(sum(in_flight.get(engine, ()))),
            prefill_tokens=round(sum(prefill.get(engine, ()))),
            running=round(sum(running[engine])) if engine in running else None,
            waiting=round(sum(queued[engine])) if engine in queued else None,
            kv_usage=max(kv[engine]) if engine in kv else None,
        )


def _traffic(more: Page, now: Page) -> TrafficReport:
    ended = sum(value for labels, value in more.of(REQUESTS) if labels.get("status") not in NOT_READ)
    return TrafficReport(
        "",
        arrived=max(0, round(ended + more.sum(IN_PROGRESS))),
        shed=round(sum(value for labels, value in more.of(SHED) if labels.get("reason") != "client_left")),
        isl=distribution(more, ISL, 1.0),
        osl=distribution(more, OSL, 1.0),
        ttft_ms=distribution(more, TTFT, MS),
        itl_ms=distribution(more, ITL, MS),
        wait_ms=distribution(more, WAIT, MS),
        prompt_tokens=round(more.sum(PROMPT)),
        overlap_tokens=round(more.sum(OVERLAP)),
        waiting=round(now.sum(WAITING)),
    )


def distribution(page: Page, name: str, unit: float) -> Histogram:
    """Cumulative buckets of a page in ours, times `unit`, and their exact sum."""
    buckets = sorted((float(labels["le"]), value) for labels, value in page.of(f"{name}_bucket") if "le" in labels)
    counts, below, lower = [0] * (len(BOUNDS) + 1), 0.0, 0.0
    for bound, value in buckets:
        upper = bound * unit if math.isfinite(bound) else 2 * lower
        number = round(value - below)
        if number > 0:
            counts = [ours + theirs for ours, theirs in zip(counts, _spread(number, lower, upper), strict=True)]
        below, lower = max(below, value), upper
    return Histogram(counts, page.sum(f"{name}_sum") * unit)


def _spread(number: int, lower: float, upper: float) -> Iterable[int]:
    """So many values, evenly between two ends, by bucket of ours."""
    width = max(upper - lower, 1e-9)
    up_to = [round(number * min(1.0, max(0.0, (bound - lower) / width))) for bound in BOUNDS] + [number]
    return (reached - before for reached, before in zip(up_to, [0, *up_to[:-1]], strict=True))
