"""Where else a planner learns from: a Prometheus server, and an idle engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web

from discovery.bus import Bus
from discovery.observations import Histogram, RouterReport
from discovery.subjects import Subjects
from engines.types import Role
from planner.capacity import Capacity
from planner.observer import BusObserver
from planner.profiling import NotMeasured, profile_of
from planner.prometheus import PrometheusObserver
from planner.sightings import Look
from planner.types import Mix, Slo
from router.metrics import ITL_BUCKETS_S, LENGTH_BUCKETS, TTFT_BUCKETS_S
from tests.integration.nats_servers import nats_server
from tests.integration.prometheus_servers import NONE_HERE, PROMETHEUS, asked, prometheus
from tests.integration.test_planner import bus_of
from tests.planning.orchestrators import served
from tests.rig import Router, fleet, prompt, routing
from tests.waiting import until


class Heard:
    """What is told on the bus, and by a server that scrapes the same routers."""

    def __init__(self, bus: Bus, session: aiohttp.ClientSession, url: str) -> None:
        self.reports: dict[str, RouterReport] = {}
        self.arrived = 0
        """As scrapes tell it."""
        self._bus, self._session, self._url = bus, session, url
        self._by_bus = BusObserver(bus, "commutator", None, clock=asyncio.get_running_loop().time)
        self._by_scrapes = PrometheusObserver(session, url)

    async def both_begin(self) -> None:
        """From here on, both tell of the same requests: there were none before."""
        self._by_bus.start()
        self._bus.subscribe(Subjects("commutator").observations, self._on_report)
        await until(lambda: len(self.reports) == 2, what="both routers are heard")

        async def scraped() -> bool:
            return len(await self.asked("router_build_info")) == 2 and (await self._by_scrapes.look()).traffic is not None

        await until(scraped, what="both routers are scraped")
        await self._by_bus.look()

    async def asked(self, query: str) -> list[float]:
        return await asked(self._session, self._url, query)

    async def look(self) -> tuple[Look, Look]:
        by_bus, by_scrapes = await self._by_bus.look(), await self._by_scrapes.look()
        self.arrived += by_scrapes.traffic.arrived if by_scrapes.traffic is not None else 0
        return by_bus, by_scrapes

    def _on_report(self, subject: str, payload: bytes, reply: str) -> None:
        report = msgspec.msgpack.decode(payload, type=RouterReport)
        self.reports[report.router] = report


def near(told: Histogram, scraped: Histogram, bounds_ms: Sequence[float]) -> bool:
    """As many values, the same mean; and percentiles that no page with these buckets could tell apart (ours are 19 % wide)."""
    assert scraped.count == told.count
    assert scraped.mean == pytest.approx(told.mean, rel=1e-3)
    for share in (0.5, 0.95):
        value = told.percentile(share)
        lower = max((bound for bound in bounds_ms if bound < value / 1.2), default=0.0)
        upper = min(bound for bound in bounds_ms if bound >= value * 1.2)
        assert lower / 1.2 <= scraped.percentile(share) <= 1.2 * upper
    return True


@pytest.mark.skipif(PROMETHEUS is None, reason=NONE_HERE)
async def test_a_real_prometheus_tells_what_two_routers_tell_on_the_bus(tmp_path: Path) -> None:
    async with (
        nats_server(tmp_path) as nats,
        fleet(2, speedup=1, decode_step_ms=20.0, prefill_tokens_per_s=20_000.0) as engines,
        routing(engines, nats=nats.url) as one,
        routing(engines, nats=nats.url) as other,
        aiohttp.ClientSession() as session,
    ):
        targets = [router.url.removeprefix("http://") for router in (one, other)]
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "routers", "static_configs": [{"targets": targets}]}],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        async with prometheus(tmp_path, session) as url, bus_of(nats.url) as bus:
            heard = Heard(bus, session, url)
            await heard.both_begin()
            await _requests_are_told_alike(heard, one, other)
            await _loads_are_told_alike(heard, one, other)


async def _requests_are_told_alike(heard: Heard, one: Router, other: Router) -> None:
    """Some are streamed, some have prompts that an engine knows, one cannot be read."""
    count = 24

    async def ask(number: int) -> int:
        router, text = (one, other)[number % 2], prompt(f"{'same' if number % 3 else number}", 30 * (1 + number % 5))
        if number % 4:
            answer = await router.chat(text, max_tokens=2 + 2 * number, stream=True, stream_options={"include_usage": True})
        else:
            answer = await router.chat(text, max_tokens=2 + 2 * number)
        return answer.status

    for turn in range(0, count, 4):
        assert await asyncio.gather(*map(ask, range(turn, turn + 4))) == [200] * 4
    assert (await one.post("/v1/chat/completions", b"{")).status == 400

    def told() -> bool:
        return sum(traffic.finished for report in heard.reports.values() for traffic in report.traffic) == count

    async def scraped() -> bool:
        return await heard.asked('sum(router_requests_total{status="200"})') == [count]

    async def nobody_is_under_way() -> bool:
        return await heard.asked("sum(router_in_progress)") == [2.0]  # the scrapes themselves

    await until(told, what="routers tell of all requests on the bus")
    await until(scraped, what="all requests are scraped")
    await until(nobody_is_under_way, what="their ends are scraped")
    by_bus, by_scrapes = (look.traffic for look in await heard.look())
    assert by_bus is not None
    assert by_scrapes is not None
    assert (by_bus.arrived, by_scrapes.arrived) == (count, count)
    assert (by_bus.shed, by_scrapes.shed, by_bus.waiting, by_scrapes.waiting) == (0, 0, 0, 0)
    assert near(by_bus.ttft_ms, by_scrapes.ttft_ms, [1e3 * bound for bound in TTFT_BUCKETS_S])
    assert near(by_bus.itl_ms, by_scrapes.itl_ms, [1e3 * bound for bound in ITL_BUCKETS_S])
    assert near(by_bus.isl, by_scrapes.isl, LENGTH_BUCKETS)
    assert near(by_bus.osl, by_scrapes.osl, LENGTH_BUCKETS)
    assert by_bus.hit_rate == by_scrapes.hit_rate
    assert by_bus.hit_rate


async def _loads_are_told_alike(heard: Heard, one: Router, other: Router) -> None:
    """Streams that go on are under way for both; each has come once, however often somebody looks."""

    def carried(look: Look) -> dict[str, tuple[object, ...]]:
        return {name: (told.role, told.state, told.in_flight, told.running, told.waiting) for name, told in look.engines.items()}

    async def alike(count: int) -> bool:
        by_bus, by_scrapes = await heard.look()
        under_way = sum(told.in_flight for told in by_scrapes.engines.values())
        return len(by_bus.engines) == 2 and under_way == count and carried(by_bus) == carried(by_scrapes)

    heard.arrived = 0
    streams = [
        await router.begin(f"{number} goes on", stream=True, max_tokens=2000) for number, router in enumerate((one, other, one, one, other))
    ]
    assert [stream.status for stream in streams] == [200] * 5
    await until(lambda: alike(5), what="five streams are under way for both")
    by_bus, by_scrapes = await heard.look()
    for engine, told in by_scrapes.engines.items():
        assert told.kv_usage == pytest.approx(by_bus.engines[engine].kv_usage, abs=0.1)
    for stream in streams:
        stream.close()
    await until(lambda: alike(0), what="none is under way for both")
    assert heard.arrived == 5


async def test_a_prometheus_server_that_is_away_or_has_scraped_no_router_is_no_data() -> None:
    answer = web.json_response({"status": "success", "data": {"resultType": "vector", "result": []}})
    application = web.Application()

    async def query(request: web.Request) -> web.Response:
        return answer

    application.add_routes([web.get("/api/v1/query", query)])
    async with served(application) as url, aiohttp.ClientSession() as session:
        observer = PrometheusObserver(session, url)
        assert await observer.look() == Look(None, {})
        answer = web.Response(status=503, text="starting up")
        assert await observer.look() == Look(None, {})
        away = PrometheusObserver(session, "http://127.0.0.1:9")
        assert await away.look() == Look(None, {})


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
