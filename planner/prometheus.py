"""What does a Prometheus server know of routers and engines? The same as routers tell on the bus, asked of it in PromQL.

It has no prompt lengths by model and knows what it has scraped: its window must be longer than its scrapes are apart. Use the bus where it
can be reached.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec

from discovery.logs import event
from discovery.observations import BOUNDS, EngineReport, Histogram
from engines.types import Role
from planner.sightings import Look
from planner.types import Traffic

TIMEOUT_S: Final = 10.0
LEAST_WINDOW_S: Final = 60.0
"""Four scrapes of the usual fifteen seconds: `increase` needs two within the window."""
MS: Final = 1e3
QUERIES: Final = {
    "arrived": "sum(increase(router_requests_total[{window}]))",
    "ttft": "sum by (le) (increase(router_time_to_first_token_seconds_bucket[{window}]))",
    "prompt_tokens": "sum(increase(router_prompt_tokens_total[{window}]))",
    "overlap_tokens": "sum(increase(router_overlap_tokens_total[{window}]))",
    "waiting": "sum(router_admission_waiting)",
    "shed": "sum(increase(router_admission_shed_total[{window}]))",
    "state": "max by (engine, state) (router_engine_state)",
    "in_flight": "sum by (engine) (router_active_requests)",
    "prefill_tokens": "sum by (engine) (router_active_prefill_tokens)",
}

_log = logging.getLogger(__name__)


class _Result(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: list[_Result]


class _Answer(msgspec.Struct):
    status: str
    data: _Data


class PrometheusObserver:
    """Asks a server; see `planner.observer.Observer`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, interval_s: float) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._window_s = max(LEAST_WINDOW_S, interval_s)
        self._said = ""

    async def look(self) -> Look:
        """See `Observer`. A server that is away, or has never scraped a router, is no data."""
        try:
            found = {name: await self._ask(query.format(window=f"{self._window_s:g}s")) for name, query in QUERIES.items()}
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            self._say(f"{error or type(error).__name__}")
            return Look(None, {})
        self._say("")
        return Look(self._traffic(found), _engines(found))

    def _traffic(self, found: Mapping[str, list[_Result]]) -> Traffic | None:
        if not found["state"]:
            return None
        requests = round(_one(found["arrived"]))
        tokens, overlap = _one(found["prompt_tokens"]), _one(found["overlap_tokens"])
        isl = Histogram()
        for _ in range(min(requests, 1000)):  # their mean is all that is known
            isl.add(tokens / requests)
        return Traffic(
            window_s=self._window_s,
            arrived=requests,
            isl=isl if tokens else Histogram(),
            osl=Histogram(),
            ttft_ms=_distribution(found["ttft"]),
            itl_ms=Histogram(),
            wait_ms=Histogram(),
            shed=round(_one(found["shed"])),
            hit_rate=min(1.0, overlap / tokens) if tokens else None,
            waiting=round(_one(found["waiting"])),
        )

    async def _ask(self, query: str) -> list[_Result]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with self._session.get(f"{self._url}/api/v1/query", params={"query": query}, timeout=timeout) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=_Answer).data.result

    def _say(self, why: str) -> None:
        if why != self._said:
            self._said = why
            if why:
                event(_log, logging.WARNING, "Prometheus cannot be asked: no data", url=self._url, error=why)


def _engines(found: Mapping[str, list[_Result]]) -> dict[str, EngineReport]:
    states = {one.metric.get("engine", ""): one.metric.get("state", "") for one in found["state"] if float(one.value[1]) > 0}
    counts = {
        name: {one.metric.get("engine", ""): round(float(one.value[1])) for one in found[name]} for name in ("in_flight", "prefill_tokens")
    }
    return {
        engine: EngineReport(
            engine, Role.AGGREGATED, state, (), counts["in_flight"].get(engine, 0), counts["prefill_tokens"].get(engine, 0)
        )
        for engine, state in states.items()
        if engine
    }


def _distribution(buckets: list[_Result]) -> Histogram:
    """Prometheus' cumulative buckets in ours: each one's values are taken to be at its upper end, so no time looks shorter than it was."""
    made, below, lower = Histogram(), 0.0, BOUNDS[0] / MS
    for bound, count in sorted((float(one.metric["le"]), float(one.value[1])) for one in buckets if "le" in one.metric):
        for _ in range(round(count - below)):
            made.add(min(bound, 2 * lower) * MS)
        below, lower = max(below, count), min(bound, BOUNDS[-1])
    return made


def _one(found: list[_Result]) -> float:
    value: Any = found[0].value[1] if found else 0.0
    number = float(value)
    return number if number == number and abs(number) < 1e15 else 0.0  # noqa: PLR0124  NaN
