"""What is sent arrives, byte for byte, in both directions: rows S7, S11, S13, S16, S21, C1 and C2."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import resource

import aiohttp
import httpx
import pytest

from engines.types import EngineKind, EngineSpec
from router.routes import INFERENCE
from tests.raw import Request, port_of, request, talking
from tests.raw_engine import DONE, SSE, Close, RawEngine, answering, chunk, token, whole
from tests.rig import fleet, routing
from tests.tcp_relay import TcpRelay

STREAM = b'{"model":"sim","stream":true,"messages":[{"role":"user","content":"hello"}]}'
USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":11,"total_tokens":13,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
)
SPEECH = "data: " + json.dumps({"choices": [{"delta": {"content": "🎉 你好, 世界 — żółć"}}]}, ensure_ascii=False) + "\n\n"
ODD_STREAMS = {
    "emoji and CJK": SPEECH.encode() + token(1) + USAGE + DONE,
    "CRLF": (SPEECH.encode() + token(1) + USAGE + DONE).replace(b"\n", b"\r\n"),
    "CR": (token(1) + USAGE + DONE).replace(b"\n", b"\r"),
    "no finish reason, no DONE": token(1) + token(2),
    "no last newline": token(1) + USAGE.rstrip(b"\n"),
    "comments": b": ping\n\n: ping - 2026-01-01 00:00:00+00:00\r\n\r\n" + token(1) + b":\n" + DONE,
    "names, ids, retries": b"event: own.kind\nid: 7\nretry: 3000\n" + token(1) + b"event:\ndata\n\n" + DONE,
    "several lines of data": b'data: {"choices":\ndata: [{"delta":{"content":"x"}}]}\n\n' + DONE,
    "byte order mark": b"\xef\xbb\xbf" + token(1) + DONE,
    "not UTF-8": b"data: \xff\xfe\x00\n\n" + token(1),
    "a very long line": b"data: " + b"A" * 300_000 + b"\n\n" + DONE,
    "nothing": b"",
}


@pytest.mark.parametrize("name", ODD_STREAMS)
async def test_S21_unusual_streams_pass_byte_for_byte(name: str) -> None:
    stream = ODD_STREAMS[name]
    answer = SSE + b"".join(chunk(stream[at : at + 7_000]) for at in range(0, len(stream), 7_000)) + chunk(b"")
    async with RawEngine(answering(answer)) as engine, routing([engine.url], policy="round-robin") as router:
        answered = await router.post("/v1/chat/completions", STREAM)
        assert (answered.status, answered.body) == (200, stream)
        cached = await router.metric("router_engine_cached_tokens_total")
        assert cached == (8 if b"usage" in stream else 0)


@pytest.mark.parametrize("name", ["emoji and CJK", "CRLF", "CR"])
async def test_S11_one_byte_to_a_segment_in_both_directions_changes_nothing(name: str) -> None:
    stream = ODD_STREAMS[name]
    answer = SSE + b"".join(chunk(stream[at : at + 50]) for at in range(0, len(stream), 50)) + chunk(b"")
    async with (
        RawEngine(answering(answer)) as engine,
        TcpRelay(engine.port) as engines_side,
        routing([engines_side.url], policy="round-robin") as router,
        TcpRelay(port_of(router.url)) as clients_side,
    ):
        engines_side.split = clients_side.split = True
        async with router.session.post(clients_side.url + "/v1/chat/completions", data=STREAM) as answered:
            assert await answered.read() == stream
        assert engine.requests[-1].body == STREAM
        assert await router.metric("router_engine_cached_tokens_total") == 8
        assert await router.metric("router_time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_S7_a_compressed_answer_passes_consistently_and_every_client_can_read_it(streamed: bool) -> None:
    plain = token(1) + token(2) + DONE if streamed else json.dumps({"choices": [{"text": "x" * 10_000}]}).encode()
    packed = gzip.compress(plain)
    kind = b"text/event-stream" if streamed else b"application/json"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-encoding: gzip\r\nvary: accept-encoding\r\n" % kind
    answer = head + (
        b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunk(packed[at : at + 10]) for at in range(0, len(packed), 10)) + chunk(b"")
        if streamed
        else b"content-length: %d\r\n\r\n%b" % (len(packed), packed)
    )
    async with RawEngine(answering(answer)) as engine, routing([engine.url], policy="round-robin") as router:
        url = router.url + "/v1/chat/completions"
        raw = await router.post("/v1/chat/completions", STREAM)
        assert (raw.body, raw.headers["content-encoding"], raw.headers["vary"]) == (packed, "gzip", "accept-encoding")
        assert engine.requests[-1].header("accept-encoding") == b"gzip, deflate"
        async with aiohttp.ClientSession() as session, session.post(url, data=STREAM) as answered:
            assert await answered.read() == plain
        async with httpx.AsyncClient() as client:
            assert (await client.post(url, content=STREAM)).content == plain
        command = ("curl", "--silent", "--compressed", "--data-binary", "@-", url)
        curl = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        assert (await curl.communicate(STREAM))[0] == plain


BODIES = {
    "unknown nested fields": b'{"model":"sim","x":{"y":[1,{"z":null}]},"messages":[{"role":"user","content":"a","extra":{"b":[]}}]}',
    "big integers": b'{"model":"sim","prompt":"a","seed":123456789012345678901234567890,"x":1e400,"y":-0.0,"z":1.0}',
    "repeated keys": b'{"model":"sim","stop":["a"],"prompt":"a","stop":["b"],"max_tokens":1,"max_tokens":2}',
    "odd white space": b' \r\n{ "model" : "sim" ,\t"prompt" : "a" } \n',
    "escapes": b'{"model":"s\\u0069m","prompt":"\\ud83c\\udf89\\/\\u0000"}',
    "non-ASCII": '{"model":"sim","prompt":"żółć 你好 🎉"}'.encode(),
}


@pytest.mark.parametrize("policy", ["kv", "round-robin"])
@pytest.mark.parametrize("name", BODIES)
async def test_S13_the_engine_receives_the_same_bytes(name: str, policy: str) -> None:
    async with RawEngine(answering(whole(b"{}"))) as engine, routing([engine.url], policy=policy) as router:
        answer = await router.post("/v1/completions", BODIES[name])
        assert answer.status == 200
        assert engine.requests[-1].line == b"POST /v1/completions HTTP/1.1"
        assert engine.requests[-1].body == BODIES[name]


async def test_S13_a_chunked_body_arrives_whole_with_its_length() -> None:
    body = BODIES["unknown nested fields"]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with (
        RawEngine(answering(whole(b"{}"))) as engine,
        routing([engine.url], policy="round-robin") as router,
        talking(port_of(router.url)) as client,
    ):
        await client.send(head + b"".join(chunk(body[at : at + 9]) for at in range(0, len(body), 9)) + chunk(b""))
        assert (await client.answer()).status == 200
        sent = engine.requests[-1]
        assert (sent.body, sent.header("content-length"), sent.header("transfer-encoding")) == (body, b"%d" % len(body), None)


def resident_mb() -> float:
    """Memory in use now, of this process: router, engines and client together."""
    with open("/proc/self/statm") as statm:  # noqa: PTH123  a line of the kernel's
        return int(statm.read().split()[1]) * resource.getpagesize() / 1e6


async def test_S16_bodies_pass_up_to_the_limit_and_larger_ones_are_413_in_json_and_memory_stays_flat() -> None:
    limit = 10_000_000
    async with (
        RawEngine(answering(whole(b"{}"))) as engine,
        routing([engine.url], policy="round-robin", max_body_bytes=limit) as router,
    ):
        sizes = []
        for _ in range(8):
            for size in (1_000_000, 8_500_000):
                body = b'{"model":"sim","prompt":"' + b"x" * (size - 27) + b'"}'
                async with router.session.post(router.url + "/v1/completions", data=io.BytesIO(body)) as answered:
                    assert answered.status == 200
                assert engine.requests[-1].body == body
            for head in (f"content-length: {limit + 1}", "transfer-encoding: chunked"):
                async with talking(port_of(router.url)) as client:
                    await client.send(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode())
                    await client.send(*[chunk(b"x" * 1_000_000)] * 11 if "chunked" in head else [b"x" * 11_000_000])
                    answer = await client.answer()
                    assert (answer.status, answer.headers["content-type"], answer.whole) == (413, "application/json", True)
                    assert "max_body_bytes" in json.loads(answer.body)["error"]["message"]
            engine.requests.clear()
            sizes.append(resident_mb())
        assert sizes[-1] - sizes[2] < 9  # less than one of those bodies
        assert await router.metric("router_refused_requests_total", status="413") == 16


FORM = (
    b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    + bytes(range(256)) * 2_000
    + b'\r\n--edge\r\nContent-Disposition: form-data; name="model"\r\n\r\nsim\r\n'
    + b'--edge\r\nContent-Disposition: form-data; name="response_format"\r\n\r\njson\r\n--edge--\r\n'
)


async def test_C1_a_multipart_form_arrives_byte_for_byte_and_goes_where_its_model_is() -> None:
    async with (
        RawEngine(answering(whole(b'{"text":"hi"}'))) as engine,
        RawEngine(answering(whole(b"{}")), model="other") as other,
        routing([engine.url, other.url]) as router,
    ):
        kind = {"content-type": "multipart/form-data; boundary=edge"}
        for _ in range(4):
            answer = await router.post("/v1/audio/transcriptions", FORM, kind)
            assert (answer.status, answer.body, answer.engine) == (200, b'{"text":"hi"}', engine.url)
            assert engine.requests[-1].body == FORM
            assert engine.requests[-1].header("content-type") == b"multipart/form-data; boundary=edge"
        missing = await router.post("/v1/audio/transcriptions", FORM.replace(b"\r\nsim\r\n", b"\r\nnone\r\n"), kind)
        assert missing.status == 404


async def test_C1_every_inference_route_passes_to_an_engine_of_a_kind_that_has_it_and_is_501_elsewhere() -> None:
    kinds = {EngineKind.VLLM: b"sim", EngineKind.SGLANG: b"sg"}
    async with (
        RawEngine(answering(whole(b'{"by":"vllm"}'))) as vllm,
        RawEngine(answering(whole(b'{"by":"sglang"}')), kind=EngineKind.SGLANG, model="sg") as sglang,
        routing([vllm.url, sglang.url]) as router,
    ):
        for route in INFERENCE.values():
            if route.websocket:
                continue
            for kind, model in kinds.items():
                body = b'{"model":"%b","input":"x","prompt":"x","messages":[{"role":"user","content":"x"}]}' % model
                answer = await router.post(route.path + "?a=b", body)
                if kind not in route.engines:
                    assert (answer.status, route.path in answer.json["error"]["message"]) == (501, True), route.path
                    continue
                assert (answer.status, answer.json) == (200, {"by": kind.value}), route.path
                engine = vllm if kind is EngineKind.VLLM else sglang
                last = next(sent for sent in reversed(engine.requests) if not sent.line.startswith(b"POST /tokenize HTTP"))
                assert (last.line, last.body) == (f"POST {route.path}?a=b HTTP/1.1".encode(), body)
        for path in ("/v1/images/generations", "/v1/files", "/v1", "/", "/v1/chat/completions/"):
            assert (await router.post(path, b'{"model":"sim"}')).status == 404


async def test_C2_the_messages_api_passes_with_its_query_key_and_version_and_its_errors_have_its_shape() -> None:
    async with RawEngine(answering(whole(b'{"input_tokens":3}'))) as engine, routing([engine.url]) as router:
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "tools"}
        for path in ("/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"):
            answer = await router.post(path, {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, headers)
            assert (answer.status, answer.json) == (200, {"input_tokens": 3})
            sent = engine.requests[-1]
            assert sent.line == f"POST {path} HTTP/1.1".encode()
            assert (sent.header("x-api-key"), sent.header("anthropic-beta")) == (b"k", b"tools")
        wrong = [
            await router.post("/v1/messages", b"{nope"),
            await router.post("/v1/messages", {"model": "none"}),
            await router.get("/v1/messages/count_tokens"),
        ]
        assert [answer.status for answer in wrong] == [400, 404, 405]
        assert [answer.json["type"] for answer in wrong] == ["error"] * 3
        assert [answer.json["error"]["type"] for answer in wrong] == ["invalid_request_error", "not_found_error", "invalid_request_error"]
    async with (
        RawEngine(answering(whole(b"{}"))) as engine,
        routing([EngineSpec(url=engine.url, api_key="engines-own")]) as router,
    ):
        await router.post("/v1/messages", {"model": "sim"}, {"x-api-key": "clients"})
        assert engine.requests[-1].header("x-api-key") is None
        assert engine.requests[-1].header("authorization") == b"Bearer engines-own"


async def test_C2_a_messages_stream_that_breaks_off_says_so_as_that_api_does() -> None:
    begun = b'event: message_start\ndata: {"type":"message_start"}\n\n'

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(begun) + chunk(b"event: content_bl"))
        await asyncio.sleep(0.05)
        raise Close

    async with RawEngine(script) as engine, routing([engine.url]) as router, talking(port_of(router.url)) as client:
        await client.send(request("/v1/messages", STREAM))
        answer = await client.answer()
        assert answer.body.startswith(begun + b'event: error\ndata: {"type":"error","error":{"type":"api_error"')
        assert not answer.whole


async def test_head_options_and_wrong_methods_say_what_is_allowed() -> None:
    async with fleet(1) as engines, routing(engines) as router:
        head = await router.request("HEAD", "/v1/models")
        whole_answer = await router.get("/v1/models")
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(whole_answer.body)))
        for path, allow in (
            ("/v1/models", "GET, HEAD, OPTIONS"),
            ("/v1/chat/completions", "POST, OPTIONS"),
            ("/v1/realtime", "GET, OPTIONS"),
        ):
            options = await router.request("OPTIONS", path)
            assert (options.status, options.headers["allow"], options.body) == (204, allow, b"")
            refused = await router.request("DELETE", path)
            assert (refused.status, refused.headers["allow"]) == (405, allow)
        assert (await router.request("HEAD", "/v1/chat/completions")).status == 405
        assert (await router.request("OPTIONS", "/nowhere")).status == 404
        assert (await router.get("/v1/realtime")).status == 426
