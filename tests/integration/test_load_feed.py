"""Load that an engine pushes is known at once; what it does not push is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq

from engines.load_feed import HEARTBEATS_MISSED_S, LoadFeed
from engines.metrics import EngineLoad
from engines.simulator.engine import SimulatedEngine
from engines.types import EngineKind, KvSource
from tests.rig import Router, asked, fleet, routing
from tests.waiting import alongside, until

LONG_S = 600.0


async def running_at(router: Router, engine: SimulatedEngine) -> object:
    candidates: list[dict[str, Any]] = (await router.route("x"))["candidates"]
    return next(candidate["load"]["running"] for candidate in candidates if candidate["engine"] == engine.url)


async def test_a_pushed_change_is_known_without_asking() -> None:
    """The next look is ten minutes away."""
    async with (
        fleet(1, kind=EngineKind.SGLANG, load_feed=True, speedup=1.0) as (engine,),
        routing([engine], probe_period_s=LONG_S) as router,
    ):
        looks = len(asked(engine, "/v1/loads"))
        response = await router.begin("hello", stream=True, max_tokens=2000)

        async def one_runs() -> bool:
            return await running_at(router, engine) == 1

        async def none_runs() -> bool:
            return await running_at(router, engine) == 0

        await until(one_runs, what="the pushed report of a running request")
        response.close()
        await until(none_runs, what="the pushed report of an idle engine")
        assert len(asked(engine, "/v1/loads")) == looks


async def test_an_engine_that_pushes_is_not_asked_for_its_load_and_one_that_falls_silent_is() -> None:
    async with fleet(1, kind=EngineKind.SGLANG, load_feed=True) as (engine,), routing([engine]) as router:

        async def heard() -> bool:
            return await router.metric("router_load_reports_total", engine=engine.url, outcome="read") > 0

        async def checked(count: int) -> None:
            before = len(asked(engine, "/ready"))
            await until(lambda: len(asked(engine, "/ready")) >= before + count, what=f"{count} more checks")

        await until(heard, what="a pushed report")
        await checked(2)  # one may have been under way
        asked_before = len(asked(engine, "/v1/loads"))
        await checked(3)
        assert len(asked(engine, "/v1/loads")) == asked_before
        engine.loads.stop()
        await until(lambda: len(asked(engine, "/v1/loads")) > asked_before, what="it is asked again")


NO_REPORTS = [
    b"",
    b"\xc1",
    msgspec.msgpack.encode(["LoadStat", 1]),
    msgspec.msgpack.encode(["LoadStat", -1, 0, 0, 0]),
    msgspec.msgpack.encode(["LoadStat", "1", 0, 0, 0]),
    msgspec.msgpack.encode(["OtherStat", 1, 0, 0, 0]),
    msgspec.msgpack.encode({"LoadStat": 1}),
    b"\x91" * 5000,
]


async def test_what_is_no_report_is_counted_and_does_no_harm() -> None:
    async with fleet(1, kind=EngineKind.SGLANG, load_feed=True) as (engine,), routing([engine]) as router:

        async def count(outcome: str) -> float:
            return await router.metric("router_load_reports_total", engine=engine.url, outcome=outcome)

        async def read(more_than: float) -> bool:
            return await count("read") > more_than

        async def all_counted() -> bool:
            return await count("malformed") == len(NO_REPORTS)

        await until(lambda: read(0), what="a pushed report")
        for message in NO_REPORTS:
            engine.loads.send(message)
        await until(all_counted, what="the messages to be counted")
        before = await count("read")
        assert (await router.chat("hello")).status == 200
        await until(lambda: read(before), what="a further report")


async def test_a_feed_where_nobody_listens_is_looked_for_again_and_again() -> None:
    told: list[tuple[int, EngineLoad]] = []
    async with fleet(1, kind=EngineKind.SGLANG, load_feed=True) as (engine,):
        port = engine.loads.port
        engine.loads.stop()
        source = KvSource(0, f"tcp://127.0.0.1:{port}", topic="load")
        feed = LoadFeed([source], lambda *said: told.append(said), clock=asyncio.get_running_loop().time)
        async with alongside(feed.run()):
            for _ in range(2):
                told.clear()
                await until(lambda: _bound(engine, port), what="its port is free again")
                await until(lambda: told, what="a report")
                engine.loads.stop()
    assert told[0] == (0, EngineLoad(running=0, waiting=0, kv_usage=0.0))


def _bound(engine: SimulatedEngine, port: int) -> bool:
    try:
        engine.loads.start(port)
    except zmq.ZMQError:
        engine.loads.stop()
        return False
    return True


def test_a_rank_that_misses_heartbeats_is_not_heard_any_more() -> None:
    now = 100.0
    feed = LoadFeed([KvSource(rank, f"tcp://h:{rank}") for rank in (0, 1)], lambda *_: None, clock=lambda: now)
    report = [b"load", bytes(8), msgspec.msgpack.encode(["LoadStat", 3, 1, 50, 200, 0, 0, 0, 0, 0, 0, "more"])]
    loads = EngineLoad(running=3, waiting=1, kv_usage=0.25)
    assert feed.latest() is None
    feed.take(0, [report, report])
    assert feed.latest() is None, "rank 1 has said nothing"
    feed.take(1, [report, [b"load", b"torn"]])
    assert feed.latest() == {0: loads, 1: loads}
    assert (feed.reports, feed.malformed) == (3, 1)
    now += HEARTBEATS_MISSED_S
    feed.take(0, [report])
    assert feed.latest() == {0: loads, 1: loads}
    now += 0.1
    assert feed.latest() is None
