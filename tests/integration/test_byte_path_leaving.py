"""A client that leaves, at any moment of its request, ends everything that is done for it: rows S1 to S5."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from engines.types import EngineKind
from router.routes import INFERENCE
from router.settings import AdmissionSettings
from tests.raw import RawClient, Request, port_of, request, talking, websocket
from tests.raw_engine import SSE, Hang, RawEngine, chunk, never, streaming, token
from tests.rig import Router, routing
from tests.waiting import until

CHAT = b'{"model":"sim","messages":[{"role":"user","content":"hello"}]}'
STREAM = b'{"model":"sim","stream":true,"messages":[{"role":"user","content":"hello"}]}'
SOON_S = 0.5
"""Within this an engine has to see that its client left."""
LEAVING = pytest.mark.parametrize("leave", [RawClient.reset, RawClient.half_close], ids=["reset", "close"])


async def nothing_in_flight(router: Router) -> None:
    async def none() -> bool:
        return await router.metric("router_active_requests") == 0

    await until(none, what="nothing is in flight")


@LEAVING
async def test_S1_a_client_that_leaves_a_request_without_stream_is_seen_to_leave_by_the_engine(leave: Callable[[RawClient], None]) -> None:
    async with RawEngine(never) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        await client.send(request("/v1/chat/completions", CHAT))
        await until(lambda: engine.answering)
        assert await router.metric("router_active_requests") == 1
        leave(client)
        await until(lambda: engine.left == 1, deadline_s=SOON_S, what="the engine sees it leave")
        await nothing_in_flight(router)
        assert await router.metric("router_requests_total", status="499") == 1


@LEAVING
async def test_S2_a_client_that_leaves_after_three_chunks_is_seen_to_leave_before_the_sixth(leave: Callable[[RawClient], None]) -> None:
    written = 0

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(SSE)
        for written in range(1, 101):
            writer.write(chunk(token(written)))
            await asyncio.sleep(0.1)

    async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        await client.send(request("/v1/chat/completions", STREAM))
        await client.read_until(token(3))
        leave(client)
        await until(lambda: engine.left == 1, what="the engine sees it leave")
        assert written < 6
        await nothing_in_flight(router)


async def test_S3_a_client_that_leaves_before_the_first_token_is_seen_to_leave() -> None:
    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE)
        raise Hang

    async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        await client.send(request("/v1/chat/completions", STREAM))
        await client.read_until(b"\r\n\r\n")
        client.reset()
        await until(lambda: engine.left == 1, deadline_s=SOON_S, what="the engine sees it leave")
        await nothing_in_flight(router)
        assert await router.metric("router_time_to_first_token_seconds_count") == 0


async def test_S3_a_request_whose_client_leaves_while_it_is_queued_is_never_sent() -> None:
    admission = AdmissionSettings(max_active_requests=1)
    async with (
        RawEngine(never) as engine,
        routing([engine.url], policy="round-robin", admission=admission) as router,
        talking(port_of(router.url)) as first,
    ):
        await first.send(request("/v1/chat/completions", CHAT))
        await until(lambda: engine.answering)
        async with talking(port_of(router.url)) as queued:
            await queued.send(request("/v1/chat/completions", CHAT))

            async def waits() -> bool:
                return await router.metric("router_in_progress") == 3  # both, and this question

            await until(waits)
            queued.reset()

            async def gone() -> bool:
                return await router.metric("router_in_progress") == 2

            await until(gone, what="the queued request is given up")
        first.reset()
        await nothing_in_flight(router)
        assert len(engine.requests) == 1
        assert await router.metric("router_requests_total", status="499") == 2


async def test_S3_a_request_whose_client_leaves_while_its_prompt_is_tokenized_is_never_sent() -> None:
    async with RawEngine(never) as engine, routing([engine.url]) as router, talking(port_of(router.url)) as client:
        asked = len(engine.requests)
        await client.send(request("/v1/chat/completions", CHAT))
        await until(lambda: len(engine.requests) > asked)
        assert engine.requests[-1].line.startswith(b"POST /tokenize ")
        client.reset()
        await until(lambda: engine.answering == 0, deadline_s=SOON_S, what="the engine is asked no more")
        await nothing_in_flight(router)
        assert not [sent for sent in engine.requests if b"/v1/chat" in sent.line]


async def test_S4_leaving_is_seen_on_every_inference_route_before_the_answer_and_within_it() -> None:
    async with (
        RawEngine(never) as vllm,
        RawEngine(never, kind=EngineKind.SGLANG, model="sg") as sglang,
        routing([vllm.url, sglang.url], policy="round-robin") as router,
    ):
        for engine, model in ((vllm, b"sim"), (sglang, b"sg")):
            for route in INFERENCE.values():
                if engine.kind not in route.engines:
                    continue
                asked = (
                    websocket(f"{route.path}?model={model.decode()}") if route.websocket else request(route.path, b'{"model":"%b"}' % model)
                )
                for answer in (None, SSE + chunk(token(1))):
                    engine.script = never if answer is None else streaming([token(1)] * 1000, gap_s=0.01)
                    left, seen = engine.left, len(engine.requests)
                    async with talking(port_of(router.url)) as client:
                        await client.send(asked)
                        if answer is None:
                            await until(lambda engine=engine: engine.answering, what=route.path)
                        else:
                            await client.read_until(token(1))
                    await until(lambda engine=engine, left=left: engine.left > left or not engine.answering, what=route.path)
                    assert len(engine.requests) == seen + 1, route.path
            await until(lambda engine=engine: engine.answering == 0)
        await nothing_in_flight(router)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_S5_an_engine_that_falls_silent_ends_in_an_error_event_and_no_clean_end(path: str) -> None:
    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(token(1)) + chunk(token(2)[:-9]))
        raise Hang

    async with (
        RawEngine(script) as engine,
        routing([engine.url], policy="round-robin", stream_idle_timeout_s=0.5) as router,
        talking(port_of(router.url)) as client,
    ):
        await client.send(request(path, STREAM))
        answer = await client.answer()
        assert (answer.status, answer.whole) == (200, False)
        assert answer.body.startswith(token(1))
        assert b"t2" not in answer.body
        assert b"idle stream timed out after 0.5 s" in answer.body
        assert b"[DONE]" not in answer.body
        await nothing_in_flight(router)
        assert engine.left == 1
        assert await router.metric("router_broken_answers_total", failure="engine_timeout") == 1


async def test_S5_a_client_that_leaves_a_silent_engine_is_let_go_at_once() -> None:
    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(token(1)))
        raise Hang

    async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        await client.send(request("/v1/chat/completions", STREAM))
        await client.read_until(token(1))
        client.half_close()
        await until(lambda: engine.left == 1, deadline_s=SOON_S, what="the engine sees it leave")
        await nothing_in_flight(router)
