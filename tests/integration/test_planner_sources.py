"""Where else a planner learns from: a Prometheus server (a fake of its query API, over a real router's page), and an idle engine."""

from __future__ import annotations

import re

import aiohttp
import pytest
from aiohttp import web

from engines.types import Role
from planner.capacity import Capacity
from planner.profiling import NotMeasured, profile_of
from planner.prometheus import QUERIES, PrometheusObserver
from planner.types import Mix, Slo
from tests.planning.orchestrators import served
from tests.rig import Router, fleet, routing


class FakePrometheus:
    """Answers the planner's own queries from two scrapes of a router: `increase` is what lies between them."""

    def __init__(self) -> None:
        self.scrapes: list[dict[tuple[str, tuple[tuple[str, str], ...]], float]] = []
        self.fails = False

    async def scrape(self, router: Router) -> None:
        found = {}
        for line in (await router.get("/metrics")).body.decode().splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, _, labels = series.partition("{")
                found[name, tuple(re.findall(r'(\w+)="([^"]*)"', labels))] = float(value)
        self.scrapes.append(found)

    def application(self) -> web.Application:
        made = web.Application()
        made.add_routes([web.get("/api/v1/query", self._query)])
        return made

    async def _query(self, request: web.Request) -> web.Response:
        if self.fails:
            return web.Response(status=503, text="starting up")
        query = request.query["query"]
        found = re.fullmatch(r"(?:sum|max)(?: by \(([\w, ]+)\))? ?\((?:increase\((\w+)\[(\d+)s\]\)|(\w+))\)", query)
        assert found is not None, query
        by = [label.strip() for label in (found[1] or "").split(",") if label.strip()]
        name = found[2] or found[4]
        groups: dict[tuple[tuple[str, str], ...], float] = {}
        for (series, labels), value in self.scrapes[-1].items() if self.scrapes else ():
            if series == name:
                before = self.scrapes[0].get((series, labels), 0.0) if found[2] else 0.0
                key = tuple((label, dict(labels).get(label, "")) for label in by)
                groups[key] = groups.get(key, 0.0) + value - before
        result = [{"metric": dict(key), "value": [1700000000.0, str(value)]} for key, value in groups.items()]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})


async def test_a_prometheus_server_is_asked_for_what_routers_would_tell() -> None:
    prometheus = FakePrometheus()
    async with fleet(2) as engines, routing(engines) as router, served(prometheus.application()) as url, aiohttp.ClientSession() as session:
        observer = PrometheusObserver(session, url, 5.0)
        assert (await observer.look()).traffic is None, "a server that has scraped no router knows nothing"
        await prometheus.scrape(router)
        for number in range(12):
            await router.chat(f"hello {number} " * 40, stream=True)
        await prometheus.scrape(router)
        look = await observer.look()
        assert look.traffic is not None
        assert look.traffic.arrived == 12
        assert look.traffic.ttft_ms.count == 12
        assert look.traffic.isl.mean > 40
        assert set(look.engines) == {engine.url for engine in engines}
        prometheus.fails = True
        assert (await observer.look()).traffic is None, "one that is away is no data"
        assert len(QUERIES) == 9


async def test_an_idle_engine_is_measured_and_what_it_carries_follows() -> None:
    async with (
        fleet(1, speedup=1.0, prefill_tokens_per_s=50_000.0, decode_step_ms=4.0, decode_sequence_ms=0.5) as engines,
        aiohttp.ClientSession() as session,
    ):
        made = await profile_of(session, engines[0].url)
        with pytest.raises(NotMeasured, match="no engine to measure"):
            await profile_of(session, "http://127.0.0.1:9")
    times = dict(made.prefill)
    assert times[max(times)] > times[min(times)]
    itls = dict(made.decode)
    assert itls[48.0] > itls[1.0]
    assert made.kv_tokens == 1024 * 16
    capacity = Capacity.of(Role.AGGREGATED, made)
    mix = Mix(500.0, 250_000.0, 500.0, 100.0)
    assert 1.0 < capacity.rate(mix, Slo(1.0, 0.05)) < 1 / (500 / 50_000)
