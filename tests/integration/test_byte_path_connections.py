"""Sockets on both sides of the router: stale ones, early answers, slow readers, WebSockets; rows S6 and S14."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import pytest

from tests.raw import Request, port_of, request, talking, websocket
from tests.raw_engine import DONE, OK, SSE, Close, Hang, RawEngine, answering, chunk, never, streaming, token, whole
from tests.rig import Router, routing
from tests.tcp_relay import TcpRelay
from tests.waiting import until

CHAT = b'{"model":"sim","messages":[{"role":"user","content":"hello"}]}'
STREAM = b'{"model":"sim","stream":true,"messages":[{"role":"user","content":"hello"}]}'


def numbered(model: str, number: int) -> bytes:
    return msgspec.json.encode({"model": model, "messages": [], "user": f"{model}-{number}"})


async def test_S6_an_engine_that_closes_idle_connections_costs_no_request_and_repeats_none() -> None:
    # Time runs ten times as fast as in the row, so that closing meets sending ten times as often: 0.1 s kept, 0.09 to 0.15 s apart.
    async with (
        asyncio.TaskGroup() as group,
        _engines(10, keep_alive_s=0.1) as engines,
        routing([e.url for e in engines], policy="round-robin") as router,
    ):

        async def ask(model: str) -> None:
            for number in range(50):
                answer = await router.post("/v1/chat/completions", numbered(model, number))
                assert answer.status == 200, answer
                await asyncio.sleep(random.uniform(0.09, 0.15))

        asking = [group.create_task(ask(f"m{number}")) for number in range(10)]
        await asyncio.gather(*asking)
        seen = Counter(sent.body for engine in engines for sent in engine.requests)
        assert len(seen) == 500
        assert set(seen.values()) == {1}
        assert sum(engine.connections for engine in engines) > 200  # they did close


class _engines:  # noqa: N801  a context manager that reads as a function
    """So many engines, each with a model of its own."""

    def __init__(self, count: int, *, keep_alive_s: float) -> None:
        self._engines = [RawEngine(answering(whole(b"{}")), model=f"m{number}", keep_alive_s=keep_alive_s) for number in range(count)]

    async def __aenter__(self) -> list[RawEngine]:
        return [await engine.__aenter__() for engine in self._engines]

    async def __aexit__(self, *_: object) -> None:
        for engine in self._engines:
            await engine.__aexit__()


async def test_S6_a_request_that_meets_a_closing_connection_is_sent_once_more_and_only_to_the_same_engine() -> None:
    closing = False
    served: list[bytes] = []

    async def script(sent: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal closing
        if closing:
            closing = False
            raise Close  # as if it had been closed just before: nothing was computed
        served.append(sent.body)
        writer.write(whole(b"{}"))

    async with (
        RawEngine(script) as engine,
        RawEngine(script, model="other") as other,
        routing([engine.url, other.url], policy="round-robin") as router,
    ):
        for number in range(20):
            closing = number % 2 == 1
            assert (await router.post("/v1/chat/completions", numbered("sim", number))).status == 200
        assert served == [numbered("sim", number) for number in range(20)]
        assert not other.requests
        assert await router.metric("router_retries_total", failure="engine_closed") == 10
        assert await router.serving() == 2


async def test_S6_an_engine_that_closes_a_new_connection_too_is_not_asked_for_ever() -> None:
    async def script(_: Request, __: asyncio.StreamWriter) -> None:
        raise Close

    async with RawEngine(answering(whole(b"{}"))) as engine, routing([engine.url], policy="round-robin") as router:
        assert (await router.post("/v1/chat/completions", CHAT)).status == 200
        engine.script = script
        before = len(engine.requests)
        answer = await router.post("/v1/chat/completions", CHAT)
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_closed")
        assert len(engine.requests) - before == 2


async def test_S14_three_hundred_streams_to_one_engine_start_together() -> None:
    started = 0
    everybody = asyncio.Event()

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal started
        started += 1
        if started == 300:
            everybody.set()
        await everybody.wait()  # no stream begins before all of them have reached the engine: none waits for another's end
        writer.write(SSE + chunk(token(1)) + chunk(DONE) + chunk(b""))

    async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router:

        async def ask() -> bytes:
            async with talking(port_of(router.url)) as client:
                await client.send(request("/v1/chat/completions", STREAM))
                return (await client.answer()).body

        bodies = await asyncio.gather(*[ask() for _ in range(300)])
        assert set(bodies) == {token(1) + DONE}


async def test_an_engine_that_answers_before_it_has_read_the_request_is_heard() -> None:
    async def refuse(sent: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b'{"error":{"message":"too long"}}', status=b"413 Content Too Large", headers=b"connection: close\r\n"))
        raise Close  # closes without reading

    body = b'{"model":"sim","prompt":"' + b"x" * 8_000_000 + b'"}'
    async with RawEngine(refuse) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        engine.read_bodies = False
        for _ in range(5):
            await client.send(request("/v1/completions", body))
            answer = await client.answer()
            assert (answer.status, answer.body, answer.whole) == (413, b'{"error":{"message":"too long"}}', True)


async def test_a_request_after_one_that_was_answered_early_goes_on_a_connection_of_its_own() -> None:
    async def early(sent: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b'{"early":1}'))
        assert sent.rest is not None
        await sent.rest.readexactly(int(sent.header("content-length") or 0))

    body = b'{"model":"sim","prompt":"' + b"x" * 8_000_000 + b'"}'
    async with RawEngine(early) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        engine.read_bodies = False
        for number in range(10):
            await client.send(request("/v1/completions", body if number % 2 else CHAT))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b'{"early":1}')


@pytest.mark.parametrize(
    ("answer", "body", "length"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + whole(b"{}"), b"{}", "2"),
        (b"HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n", b"", None),
        (b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\n", b"", None),
        (OK + b"content-type: a/b\r\ntrailer: x-t\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-t: 1\r\n\r\n", b"{}", None),
        (OK + b"content-length: 0\r\n\r\n", b"", "0"),
        (OK + b"connection: x-hop\r\nx-hop: 1\r\ncontent-length: 2\r\n\r\n{}", b"{}", "2"),
    ],
    ids=["1xx", "204", "304", "trailers", "empty", "hop-by-hop"],
)
async def test_answers_of_every_framing_pass_and_the_connection_goes_on(answer: bytes, body: bytes, length: str | None) -> None:
    async with (
        RawEngine(answering(answer)) as engine,
        routing([engine.url], policy="round-robin") as router,
        talking(port_of(router.url)) as client,
    ):
        for _ in range(3):
            await client.send(request("/v1/completions", CHAT))
            answered = await client.answer()
            assert (answered.body, answered.whole, answered.interim, answered.headers.get("content-length")) == (body, True, [], length)
            assert not {"trailer", "x-t", "link"} & set(answered.headers)
        assert engine.connections <= 3  # one for probes, one for requests, and one to spare


async def test_an_answer_without_a_length_ends_when_the_engine_closes() -> None:
    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-type: text/plain\r\n\r\nall ")
        await asyncio.sleep(0)
        writer.write(b"of it")
        raise Close

    async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        for _ in range(3):
            await client.send(request("/v1/completions", CHAT))
            answer = await client.answer()
            assert (answer.body, answer.whole, answer.headers["transfer-encoding"]) == (b"all of it", True, "chunked")


async def test_a_slow_reader_slows_the_engine_and_nothing_is_lost() -> None:
    written = 0
    line = b"data: " + b"x" * 9_992 + b"\n\n"

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(SSE)
        for _number in range(1_500):
            writer.write(chunk(line))
            await writer.drain()
            written += 1
        writer.write(chunk(b""))

    async with (
        RawEngine(script) as engine,
        routing([engine.url], policy="round-robin") as router,
        talking(port_of(router.url), receive_buffer=65_536) as client,
    ):
        await client.send(request("/v1/chat/completions", STREAM))
        await until(lambda: written > 0)
        before, still = -1, 0
        while still < 20:  # until the engine has stood still for 20 looks
            before, still = written, still + 1 if written == before else 0
            await asyncio.sleep(0.01)
        assert written < 1_200  # kernel buffers hold up to about 10 MB of these 15
        answer = await client.answer()
        assert (answer.body == line * 1_500, answer.whole) == (True, True)


async def test_the_next_request_on_a_connection_that_a_slow_reader_had_stopped_is_answered() -> None:
    large = whole(b"x" * 3_000_000, kind=b"text/plain")
    async with (
        RawEngine(answering(large)) as engine,
        routing([engine.url], policy="round-robin") as router,
        talking(port_of(router.url), receive_buffer=16_384) as slow,
    ):
        await slow.send(request("/v1/completions", CHAT))
        await until(lambda: engine.requests)

        async def over() -> bool:
            return await router.metric("router_active_requests") == 0

        for _ in range(50):
            await slow.read()
        async with talking(port_of(router.url)) as quick:
            for _ in range(5):
                await quick.send(request("/v1/completions", CHAT))
                assert len((await quick.answer()).body) == 3_000_000


async def test_a_client_that_takes_nothing_is_dropped_and_its_engine_let_go() -> None:
    endless = streaming([b"data: " + b"x" * 60_000 + b"\n\n"] * 10_000)
    async with (
        RawEngine(endless) as engine,
        routing([engine.url], policy="round-robin", client_stall_timeout_s=0.5, stream_idle_timeout_s=0.2) as router,
        talking(port_of(router.url), receive_buffer=16_384) as client,
    ):
        await client.send(request("/v1/chat/completions", STREAM))

        async def dropped() -> bool:
            return await router.metric("router_stalled_clients_total") == 1

        await until(dropped, what="the client is dropped")
        await until(lambda: engine.left == 1, what="the engine is let go")
        assert await router.metric("router_requests_total", status="499") == 1
        assert await router.metric("router_broken_answers_total") == 0  # the silence was not the engine's


async def _echo(sent: Request, writer: asyncio.StreamWriter) -> None:
    """A WebSocket that answers every byte with itself."""
    assert sent.rest is not None
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\nfirst"
    )
    while data := await sent.rest.read(65_536):
        writer.write(data)
        await writer.drain()


async def test_a_websocket_is_tunnelled_byte_for_byte_and_counted_on_its_engine_until_it_ends() -> None:
    async with RawEngine(_echo) as engine, RawEngine(_echo, model="other") as other, routing([engine.url, other.url]) as router:
        async with talking(port_of(router.url)) as client:
            await client.send(websocket("/v1/realtime?model=sim&x=y"))
            head = await client.read_until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n")
            assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in head
            assert await client.read_until(b"first") == b"first"
            asked = engine.requests[-1]
            assert asked.line == b"GET /v1/realtime?model=sim&x=y HTTP/1.1"
            assert (asked.header("upgrade"), asked.header("connection"), asked.header("sec-websocket-version")) == (
                b"websocket",
                b"Upgrade",
                b"13",
            )
            assert await router.metric("router_active_requests", engine=engine.url) == 1
            blob = random.randbytes(3_000_000)
            sending = asyncio.gather(client.send(blob), _read(client.reader, len(blob)))
            assert (await sending)[1] == blob
        await until(lambda: engine.answering == 0, what="the engine sees the end")

        async def none() -> bool:
            return await router.metric("router_active_requests") == 0

        await until(none)
        assert await router.metric("router_requests_total", route="/v1/realtime", status="101") == 1
        assert not other.requests


async def _read(reader: asyncio.StreamReader, count: int) -> bytes:
    return await reader.readexactly(count)


async def test_a_websocket_that_its_engine_ends_is_ended_for_the_client() -> None:
    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\r\nbye")
        raise Close

    async with RawEngine(script) as engine, routing([engine.url]) as router, talking(port_of(router.url)) as client:
        await client.send(websocket("/v1/realtime"))
        assert (await client.read_to_end()).endswith(b"\r\n\r\nbye")


async def test_a_websocket_that_its_engine_refuses_is_answered_as_the_engine_answers() -> None:
    refusal = whole(b'{"error":{"message":"no audio"}}', status=b"403 Forbidden")
    async with RawEngine(answering(refusal)) as engine, routing([engine.url]) as router, talking(port_of(router.url)) as client:
        await client.send(websocket("/v1/realtime"))
        answer = await client.answer("GET")
        assert (answer.status, answer.body, answer.headers["connection"]) == (403, b'{"error":{"message":"no audio"}}', "close")
        async with talking(port_of(router.url)) as another:
            await another.send(websocket("/v1/realtime?model=none"))
            assert (await another.answer("GET")).status == 404
        async with talking(port_of(router.url)) as another:
            await another.send(websocket("/v1/chat/completions"))
            assert (await another.answer("GET")).status == 405


async def test_an_engine_that_switches_protocols_unasked_is_broken() -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\r\n"
    async with RawEngine(answering(switch)) as engine, routing([engine.url], policy="round-robin") as router:
        answer = await router.post("/v1/completions", CHAT)
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_broken")


async def test_requests_on_one_connection_reach_engines_in_order_and_so_do_their_answers() -> None:
    async def script(sent: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(random.uniform(0, 0.01))
        writer.write(whole(sent.body))

    async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router, talking(port_of(router.url)) as client:
        await client.send(b"".join(request("/v1/completions", numbered("sim", number)) for number in range(40)))
        for number in range(40):
            assert (await client.answer()).body == numbered("sim", number)
        assert [sent.body for sent in engine.requests] == [numbered("sim", number) for number in range(40)]


async def test_a_network_that_resets_refuses_and_returns_is_survived() -> None:
    async with (
        RawEngine(streaming([token(1), token(2), DONE])) as engine,
        TcpRelay(engine.port) as network,
        routing([network.url], policy="round-robin") as router,
    ):
        assert (await router.post("/v1/chat/completions", STREAM)).status == 200
        network.reset()  # idle connections
        assert (await router.post("/v1/chat/completions", STREAM)).status == 200
        await network.refuse()
        network.reset()
        answer = await router.post("/v1/chat/completions", STREAM)
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_unreachable")
        await network.accept()
        await until(lambda: _answers(router), what="it is asked again")


async def _answers(router: Router) -> bool:
    return (await router.post("/v1/chat/completions", STREAM)).status == 200


async def test_a_network_that_half_closes_within_a_stream_breaks_it_visibly() -> None:
    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(token(1)))
        raise Hang

    async with (
        RawEngine(script) as engine,
        TcpRelay(engine.port) as network,
        routing([network.url], policy="round-robin") as router,
        talking(port_of(router.url)) as client,
    ):
        await client.send(request("/v1/chat/completions", STREAM))
        await client.read_until(token(1))
        network.half_close()
        rest = await client.read_to_end()
        assert b"engine_broken" in rest
        assert not rest.endswith(b"0\r\n\r\n")
        await until(lambda: engine.answering == 0)


async def test_a_stalled_network_ends_in_the_idle_timeout() -> None:
    async with (
        RawEngine(streaming([token(number) for number in range(1000)], gap_s=0.02)) as engine,
        TcpRelay(engine.port) as network,
        routing([network.url], policy="round-robin", stream_idle_timeout_s=0.4) as router,
        talking(port_of(router.url)) as client,
    ):
        await client.send(request("/v1/chat/completions", STREAM))
        await client.read_until(token(1))
        network.stalled = True
        answer = await client.read_to_end()
        assert b"idle stream timed out after 0.4 s" in answer
        network.stalled = False
        engine.script = never
