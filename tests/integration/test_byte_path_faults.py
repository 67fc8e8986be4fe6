"""What a client sees when an engine refuses, breaks off or never answers: rows S8, S9, S10, S15, S20 and O7."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import openai
import pytest

from engines.simulator.faults import Answer as SimAnswer
from engines.simulator.faults import Break, End
from tests.raw import Request, port_of, request, talking
from tests.raw_engine import DONE, SSE, Close, RawEngine, Reset, answering, chunk, never, token, whole
from tests.rig import Router, fleet, routing
from tests.waiting import until

STREAM = b'{"model":"sim","stream":true,"messages":[{"role":"user","content":"hello"}]}'
ERROR = b'{"error":{"message":"This model\'s maximum context length is 9","type":"BadRequestError","param":"input_tokens","code":400}}'


async def settled(router: Router) -> None:
    async def none() -> bool:
        return await router.metric("router_active_requests") == 0

    await until(none, what="nothing is in flight")


@pytest.mark.parametrize("framing", ["length", "chunked", "until close"])
async def test_S8_an_error_body_in_answer_to_a_streamed_request_is_whole_and_its_framing_true(framing: str) -> None:
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
    answers = {
        "length": head + b"content-length: %d\r\n\r\n%b" % (len(ERROR), ERROR),
        "chunked": head + b"transfer-encoding: chunked\r\n\r\n" + chunk(ERROR[:50]) + chunk(ERROR[50:]) + chunk(b""),
        "until close": head + b"connection: close\r\n\r\n" + ERROR,
    }

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answers[framing])
        if framing == "until close":
            raise Close

    async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        for _ in range(3):
            await client.send(request("/v1/chat/completions", STREAM))
            answer = await client.answer()
            assert (answer.status, answer.body, answer.whole) == (400, ERROR, True)
            assert answer.headers["content-type"] == "application/json"
            assert ("content-length" in answer.headers) == (framing == "length")
        await settled(router)


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_S9_a_refused_stream_keeps_its_status_body_and_retry_after(status: int) -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        body = b'{"error":{"message":"no","type":"t","param":null,"code":%d}}' % status
        headers = (("Retry-After", "7"), ("Content-Type", "application/json"), ("X-Own", "1"))
        engine.faults.add(SimAnswer(status=status, body=body, headers=headers))
        answer = await router.post("/v1/chat/completions", STREAM)
        assert (answer.status, answer.body) == (status, body)
        assert (answer.headers["retry-after"], answer.headers["x-own"]) == ("7", "1")
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("end", [End.RESET, End.CLOSE])
async def test_S10_a_stream_whose_engine_breaks_off_after_five_chunks_ends_in_an_error_event_and_a_broken_end(end: End) -> None:
    async with fleet(1, speedup=1, decode_step_ms=1) as (engine,), routing([engine]) as router:
        engine.faults.add(Break(after_chunks=5, end=end))
        body = json.loads(STREAM) | {"max_tokens": 20, "tools": [{"type": "function", "function": {"name": "f"}}]}  # no resuming
        with pytest.raises(aiohttp.ClientPayloadError):
            await router.post("/v1/chat/completions", body)
        async with talking(port_of(router.url)) as client:
            engine.faults.add(Break(after_chunks=5, end=end))
            await client.send(request("/v1/chat/completions", json.dumps(body).encode()))
            answer = await client.answer()
        assert (answer.status, answer.whole, answer.reset) == (200, False, False)
        events = [json.loads(event.removeprefix(b"data: ")) for event in answer.body.split(b"\n\n") if event.strip()]
        assert events.pop()["error"]["code"] == "engine_broken"
        assert len(events) <= 5
        assert [choice["finish_reason"] for event in events for choice in event["choices"]] == [None] * len(events)
        assert b"[DONE]" not in answer.body
        await settled(router)
        assert await router.metric("router_broken_answers_total", failure="engine_broken") == 2
        assert (await router.chat("x")).status == 200


async def test_S10_the_openai_client_raises_the_error_that_the_event_carries() -> None:
    async with (
        fleet(1, speedup=1, decode_step_ms=1) as (engine,),
        routing([engine]) as router,
        openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="k", max_retries=0) as client,
    ):
        engine.faults.add(Break(after_chunks=5))
        stream = await client.chat.completions.create(
            model="sim", max_tokens=20, stream=True, logprobs=True, messages=[{"role": "user", "content": "hello"}]
        )
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in stream:
                pass


async def test_S10_an_engine_that_dies_within_an_event_leaves_no_half_event() -> None:
    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(token(1)) + chunk(token(2)[:40]))
        await asyncio.sleep(0.05)
        raise Reset

    async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        await client.send(request("/v1/chat/completions", STREAM))
        answer = await client.answer()
        first, second = [event for event in answer.body.split(b"\n\n") if event.strip()]
        assert first + b"\n\n" == token(1)
        assert json.loads(second.strip().removeprefix(b"data: "))["error"]["code"] == "engine_broken"
        assert not answer.whole


async def test_S10_an_http_1_0_client_of_a_broken_stream_sees_a_reset() -> None:
    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(token(1)))
        await asyncio.sleep(0.05)
        raise Reset

    async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        await client.send(request("/v1/chat/completions", STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await client.read_until(token(1))
        with pytest.raises(ConnectionResetError):
            await client.read_until(b"never")


async def test_S15_an_engine_that_accepts_and_never_answers_costs_only_its_own_requests() -> None:
    async with (
        RawEngine(never) as silent,
        RawEngine(answering(whole(b'{"ok":1}'))) as good,
        routing([silent.url, good.url], policy="round-robin", response_head_timeout_s=3.0) as router,
    ):
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(router.post("/v1/chat/completions", STREAM)) for _ in range(20)]
            await until(lambda: sum(task.done() for task in asking) == 10, what="the other engine's requests are answered")
            assert silent.answering == 10
            answers = [task.result() for task in asking if task.done()]
            assert {(answer.status, answer.body) for answer in answers} == {(200, b'{"ok":1}')}
        late = [task.result() for task in asking if task.result().status != 200]
        assert {answer.status for answer in late} == {504}
        await settled(router)
        assert silent.left == 10


async def test_S15_a_deadline_that_passes_is_told_by_the_name_of_its_setting() -> None:
    async with RawEngine(never) as engine, routing([engine.url], policy="round-robin", response_head_timeout_s=0.3) as router:
        answer = await router.post("/v1/chat/completions", STREAM)
        assert (answer.status, answer.json["error"]["code"]) == (504, "engine_timeout")
        assert answer.json["error"]["message"] == "response head timed out after 0.3 s (response_head_timeout_s)"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_S20_a_plain_text_503_of_a_proxy_before_the_engine_takes_the_apis_shape(path: str) -> None:
    text = whole(
        b"upstream connect error or disconnect/reset before headers", status=b"503 Busy", kind=b"text/plain", headers=b"retry-after: 3\r\n"
    )
    async with RawEngine(answering(text)) as engine, routing([engine.url], policy="round-robin") as router:
        answer = await router.post(path, STREAM)
        assert (answer.status, answer.headers["retry-after"], answer.headers["content-type"]) == (503, "3", "application/json")
        error = answer.json["error"]
        assert error["message"] == "the engine answered 503: upstream connect error or disconnect/reset before headers"
        assert error["type"] == ("overloaded_error" if path == "/v1/messages" else "server_error")
        assert int(answer.headers["content-length"]) == len(answer.body)


async def test_S20_a_json_503_passes_as_it_is() -> None:
    body = b'{"object":"error","message":"busy","code":503}'
    async with RawEngine(answering(whole(body, status=b"503 Busy"))) as engine, routing([engine.url], policy="round-robin") as router:
        answer = await router.post("/v1/chat/completions", STREAM)
        assert (answer.status, answer.body) == (503, body)


async def test_O7_an_engines_error_stream_leaves_the_ttft_histogram_as_it_was() -> None:
    stream = SSE + chunk(b'data: {"error":{"message":"no","type":"t","param":null,"code":500}}\n\n') + chunk(DONE) + chunk(b"")
    async with RawEngine(answering(stream)) as engine, routing([engine.url], policy="round-robin") as router:
        answer = await router.post("/v1/chat/completions", STREAM)
        assert (answer.status, answer.body.endswith(DONE)) == (200, True)
        assert await router.metric("router_time_to_first_token_seconds_count") == 0
        engine.script = answering(SSE + chunk(token(1)) + chunk(DONE) + chunk(b""))
        await router.post("/v1/chat/completions", STREAM)
        assert await router.metric("router_time_to_first_token_seconds_count") == 1
