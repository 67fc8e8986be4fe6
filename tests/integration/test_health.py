"""Is an engine there? What probes see and what they cost it, and what the router's own counts decide instead of what engines say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import aiohttp
import pytest

from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import INFERENCE_PATHS, Delay
from engines.simulator.faults import Answer as Answers
from engines.types import EngineKind
from router.routes import INFERENCE, Route
from tests.rig import Router, fleet, routing
from tests.waiting import until

T = TypeVar("T")

PERIOD_S = 0.2


async def state(router: Router, engine: SimulatedEngine, name: str) -> bool:
    return await router.metric("router_engine_state", engine=engine.url, state=name) == 1


@contextlib.contextmanager
def at_line(message: str, look: Callable[[], T]) -> Iterator[list[T]]:
    """What `look` returned at the very moments when a line was logged."""
    found: list[T] = []

    class Looking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == message:
                found.append(look())

    handler = Looking()
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


async def serves(router: Router, count: int) -> None:
    async def so_many() -> bool:
        return await router.serving() == count

    await until(so_many, what=f"{count} engines serve")


@contextlib.asynccontextmanager
async def streams(router: Router, count: int) -> AsyncIterator[list[aiohttp.ClientResponse]]:
    """Long streams, all begun."""
    responses = list(await asyncio.gather(*(router.begin(f"stream {n}", stream=True, max_tokens=15_000) for n in range(count))))
    assert {response.status for response in responses} == {200}
    try:
        yield responses
    finally:
        for response in responses:
            response.close()


def probes(engine: SimulatedEngine) -> Counter[str]:
    return Counter(request.path for request in engine.requests)


async def cycles(engine: SimulatedEngine, count: int) -> None:
    """Wait until the engine has been checked so many times more."""
    path, seen = next((path, number) for path, number in probes(engine).items() if path in ("/health", "/ready"))
    await until(lambda: probes(engine)[path] >= seen + count, what=f"{count} checks", deadline_s=30.0)


async def test_H1_an_engine_that_is_gone_without_a_word_is_ejected_within_two_periods_and_readiness_says_what_is_missing() -> None:
    async with (
        fleet(1, served_model_name="a") as (stays,),
        fleet(1, served_model_name="b") as (goes,),
        routing([stays, goes], probe_period_s=2.0, probe_timeout_s=1.0) as router,
    ):
        loop = asyncio.get_running_loop()
        await goes.die()
        began = loop.time()
        await serves(router, 1)
        assert loop.time() - began < 2 * 2.0
        assert await state(router, goes, "waiting"), "an engine that is not there is not forgotten"
        ready = await router.get("/ready")
        assert (ready.status, ready.json["models"]) == (200, {"a": 1, "b": 0})
        missing = await router.get("/ready?model=b")
        assert (missing.status, missing.json["models"]["b"]) == (503, 0)
        answer = await router.chat("x", model="b")
        assert (answer.status, answer.json["error"]["code"], "`b`" in answer.json["error"]["message"]) == (503, "no_engine", True)
        assert (await router.post("/route", {"model": "b", "prompt": "x"})).json["error"]["code"] == "no_engine"
        assert (await router.chat("x", model="c")).status == 404
        assert (await router.chat("x", model="a")).status == 200
        await goes.restart()
        await serves(router, 2)
        assert (await router.get("/ready")).json["models"] == {"a": 1, "b": 1}
        assert (await router.chat("x", model="b")).status == 200


async def test_H1_an_engine_that_hangs_is_ejected_within_two_periods() -> None:
    async with fleet(2) as (stays, hangs), routing([stays, hangs], probe_period_s=1.0, probe_timeout_s=0.5) as router:
        await cycles(hangs, 1)
        seen = probes(hangs)["/health"]
        hangs.faults.add(Delay(60.0), path="/health", times=None)
        with at_line("engine left", lambda: probes(hangs)["/health"]) as checks:
            await serves(router, 1)
        assert checks[0] - seen <= 2, "the second check that fails is enough"
        hangs.faults.clear()
        await serves(router, 2)


async def test_a_refused_connection_takes_an_engine_out_before_any_probe() -> None:
    async with fleet(2) as (stays, goes), routing([stays, goes], probe_period_s=5.0, policy="round-robin") as router:
        await goes.die()
        for number in range(4):
            assert (await router.chat(str(number))).engine == stays.url
        await serves(router, 1)
        await goes.restart()
        await serves(router, 2)
        assert {(await router.chat(str(number))).engine for number in range(4)} == {stays.url, goes.url}


async def test_H6_requests_that_are_too_long_say_nothing_against_an_engine() -> None:
    async with fleet(1, kv_blocks=16) as (engine,), routing([engine]) as router:
        statuses = [(await router.chat("much too long " * 400)).status for _ in range(20)]
        assert statuses == [400] * 20
        assert await state(router, engine, "serving")
        answer = await router.chat("x")
        assert answer.status == 200
        assert await router.metric("router_admission_admitted_total", how="after_waiting") == 0


async def test_errors_of_an_engine_have_it_checked_and_no_more() -> None:
    async with fleet(1) as (engine,), routing([engine], probe_period_s=60.0) as router:
        seen = probes(engine)["/health"]
        engine.faults.add(Answers(500, b'{"error": "mine"}', (("Content-Type", "application/json"),)))
        assert (await router.chat("x")).status == 500
        await until(lambda: probes(engine)["/health"] > seen, what="it is checked")
        assert await state(router, engine, "serving")
        assert (await router.chat("x")).status == 200


async def test_H13_one_engine_of_three_is_enough_to_begin_with() -> None:
    async with fleet(3) as (first, *late):
        await asyncio.gather(*(engine.die() for engine in late))
        async with routing([*late, first], wait_for=1, policy="round-robin") as router:
            assert {(await router.chat(str(number))).engine for number in range(6)} == {first.url}
            assert (await router.get("/ready")).status == 200
            for count, engine in enumerate(late, 2):
                await engine.restart()
                await serves(router, count)
            assert {(await router.chat(str(number))).engine for number in range(6)} == {engine.url for engine in (first, *late)}


async def test_H15_an_engine_that_no_longer_exists_does_not_delay_the_others() -> None:
    loop = asyncio.get_running_loop()
    async with fleet(2) as (here, gone):
        await gone.die()
        began = loop.time()
        async with routing([gone.url, here], wait_for=1) as router:
            assert (await router.chat("x")).status == 200
            assert loop.time() - began < 3.0


async def test_R23_health_checks_take_no_count_away() -> None:
    async with fleet(1, speedup=1, decode_step_ms=5, kv_blocks=8192) as (engine,), routing([engine], probe_period_s=0.1) as router:
        async with streams(router, 50):
            await cycles(engine, 20)
            assert await router.metric("router_active_requests", engine=engine.url) == 50
            assert engine.running == 50

        async def none() -> bool:
            return await router.metric("router_active_requests") == 0

        await until(none, what="the counts are given back")


async def test_an_engine_that_streams_is_not_ejected_for_slow_checks() -> None:
    async with fleet(1, speedup=1, decode_step_ms=5) as (engine,), routing([engine], probe_timeout_s=0.1) as router:
        async with streams(router, 1) as (response,):
            engine.faults.add(Delay(60.0), path="/health", times=None)
            await cycles(engine, 5)
            assert await state(router, engine, "serving")
            assert await response.content.readany()
            assert (await router.chat("x")).status == 200
        await serves(router, 0)


async def test_an_engine_whose_streams_have_fallen_silent_is_not_taken_for_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.pool.HEARD_WITHIN_S", 0.5)
    async with fleet(1, speedup=1, decode_step_ms=5) as (engine,), routing([engine], probe_timeout_s=0.1) as router, streams(router, 1):
        engine.sleep()
        engine.faults.add(Delay(60.0), path="/health", times=None)
        await serves(router, 0)


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_checks_cost_an_engine_nothing(kind: EngineKind) -> None:
    async with fleet(1, kind=kind) as (engine,), routing([engine]) as router:
        await cycles(engine, 2)
        before = probes(engine)
        await cycles(engine, 20)
        during = probes(engine) - before
        assert not INFERENCE_PATHS & during.keys()
        assert "/health_generate" not in during
        if kind is EngineKind.SGLANG:
            assert "/health" not in during, "it generates a token"
        assert (engine.counters.queries, engine.counters.generated) == (0, 0)
        assert max(during.values()) <= 24
        assert await state(router, engine, "serving")


def gauges(engine: SimulatedEngine, **values: float) -> Callable[[], None]:
    """Let the engine report these values from now on, whatever it does."""
    lines = [f'vllm:{name}{{model_name="sim",engine="0"}} {value}' for name, value in values.items()]
    page = ("\n".join(f"# TYPE {line.split('{')[0]} gauge\n{line}" for line in lines) + "\n").encode()

    def freeze() -> None:
        engine.faults.add(Answers(200, page, (("Content-Type", "text/plain; version=0.0.4"),)), path="/metrics", times=None)

    return freeze


@pytest.mark.parametrize("policy", ["kv", "least-loaded"])
async def test_R24_requests_to_any_path_are_spread_and_counted_alike(policy: str) -> None:
    """Whether the policy can read their prompts, and whether the engine knows the path at all."""
    routes = [route for route in INFERENCE.values() if not route.websocket and EngineKind.VLLM in route.engines]
    assert len(routes) > 15
    async with fleet(4) as engines, routing(engines, policy=policy, probe_timeout_s=30.0) as router:
        for route in routes:
            for engine in engines:
                engine.faults.add(Delay(60.0), path=route.path, times=None)
            before = await router.metric("router_requests_total", route=route.path)
            body = {"model": "sim", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
            async with asyncio.TaskGroup() as group:
                sent = [group.create_task(router.post(route.path, body)) for _ in range(8)]

                async def in_flight() -> bool:
                    return await router.metric("router_active_requests") == 8

                await until(in_flight, what=f"8 requests to {route.path} are in flight")
                assert [await router.metric("router_active_requests", engine=engine.url) for engine in engines] == [2, 2, 2, 2], route.path
                for request in sent:
                    request.cancel()

            async def counted(route: Route = route, before: float = before) -> bool:
                over = await router.metric("router_requests_total", route=route.path) == before + 8
                return over and await router.metric("router_active_requests") == 0

            await until(counted, what=f"they are given back and counted under {route.path}")


@pytest.mark.parametrize("policy", ["kv", "least-loaded", "power-of-two"])
async def test_R26_an_engine_whose_gauge_is_stuck_receives_traffic_again(policy: str) -> None:
    async with fleet(2) as (stuck, fine), routing([stuck, fine], policy=policy) as router:
        gauges(stuck, kv_cache_usage_perc=0.99, num_requests_running=200.0, num_requests_waiting=50.0)()
        await cycles(stuck, 2)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not any(request.path in INFERENCE_PATHS for request in stuck.requests):
            answers = await asyncio.gather(*(router.chat(f"chat {n} {loop.time()}") for n in range(4)))
            assert {answer.status for answer in answers} == {200}
            assert loop.time() - began < 10.0, "it is starved"


@pytest.mark.parametrize("policy", ["kv", "least-loaded"])
async def test_R27_with_gauges_frozen_at_zero_the_routers_own_counts_decide(policy: str) -> None:
    async with fleet(8, speedup=1, decode_step_ms=20) as engines, routing(engines, policy=policy) as router:
        for engine in engines:
            gauges(engine, kv_cache_usage_perc=0.0, num_requests_running=0.0, num_requests_waiting=0.0)()
        for engine in engines:
            await cycles(engine, 2)
        async with streams(router, 64):
            shares = [await router.metric("router_active_requests", engine=engine.url) for engine in engines]
        assert sum(shares) == 64
        assert all(7 <= share <= 9 for share in shares), shares
