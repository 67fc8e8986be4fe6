"""What a client gets of an engine's answer: the same bytes, whole lines of events, and never a broken answer that looks whole."""

from __future__ import annotations

import asyncio
import gzip
import json

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import EngineBroken, EngineTimeout
from router.clients import ClientConnection
from router.exchange import Exchange, Headers
from router.relay import MAX_HELD_BYTES, MAX_LINE_BYTES, Relay
from router.server import Server
from router.sse import Usage
from router.upstream import ResponseHead
from tests.raw import Reply
from tests.transports import FakeTransport

SSE: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"transfer-encoding", b"chunked")]
JSON: Headers = [(b"content-type", b"application/json")]
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
GONE = EngineBroken("the engine's answer broke off")


async def never(_: Exchange) -> None:
    raise AssertionError


class Bench:
    """A relay between an engine that the test plays and a client's socket that remembers."""

    def __init__(self, path: bytes = b"/v1/chat/completions", *, http11: bool = True, upgrade: bool = False) -> None:
        self.socket = FakeTransport()
        connection = ClientConnection(Server(never, max_body_bytes=1))
        connection.connection_made(self.socket)
        self.exchange = Exchange(connection, "POST", path, [], b"")
        self.exchange.http11, self.exchange.upgrade = http11, upgrade
        self.exchange.keep_alive = http11
        self.tokens = 0
        self.relay = Relay(self.exchange, [(b"x-extra", b"1")], self.first_token)

    def first_token(self) -> None:
        self.tokens += 1

    def head(self, status: int = 200, headers: Headers = SSE) -> Bench:
        self.relay.head(ResponseHead(status, headers))
        return self

    def answer(self) -> Reply:
        """What the client's side of HTTP makes of it."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(self.socket.written)
        response = parser.next_event()
        assert isinstance(response, h11.Response)
        reply = Reply(response.status_code, {name.decode(): value.decode() for name, value in response.headers})
        while isinstance(event := parser.next_event(), h11.Data):
            reply.body += bytes(event.data)
        reply.whole = isinstance(event, h11.EndOfMessage)
        return reply


async def test_an_answer_passes_with_its_headers_less_those_of_the_connection() -> None:
    bench = Bench().head(
        200, [*JSON, (b"content-length", b"2"), (b"x-a", b"1"), (b"connection", b"keep-alive"), (b"keep-alive", b"timeout=5")]
    )
    bench.relay.body(b"{}")
    bench.relay.finished(None)
    answer = bench.answer()
    assert answer.headers == {"content-type": "application/json", "content-length": "2", "x-a": "1", "x-extra": "1"}
    assert (answer.body, answer.whole, bench.tokens, bench.relay.over) == (b"{}", True, 1, True)


async def test_each_piece_reaches_the_client_in_the_same_call_and_the_first_token_is_told_once() -> None:
    bench = Bench().head()
    for number in range(3):
        bench.relay.body(EVENT)
        assert bench.socket.written.count(EVENT) == number + 1
    bench.relay.finished(None)
    assert (bench.tokens, bench.answer().whole) == (1, True)


@given(
    st.data(),
    st.lists(st.sampled_from([EVENT, b": comment\n", b"data: \xf0\x9f\x8e\x89\r\n\r\n", b"x\r", b"\n", b"data: [DO"]), max_size=8),
)
@settings(deadline=None)
def test_S11_S21_however_it_is_cut_a_stream_passes_byte_for_byte_in_whole_lines(data: st.DataObject, parts: list[bytes]) -> None:
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))

    async def run() -> None:
        bench = Bench(http11=False).head()
        bench.relay.waits()
        begun = len(bench.socket.written)
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            if start < end:
                bench.relay.body(stream[start:end])
            passed = bench.socket.written[begun:]
            assert stream.startswith(passed)
            assert passed == b"" or passed[-1:] in b"\r\n"
        bench.relay.finished(None)
        assert bench.socket.written[begun:] == stream

    asyncio.run(run())


async def test_a_line_too_long_to_wait_for_passes_as_it_comes() -> None:
    bench = Bench().head()
    piece = b"data: " + b"x" * 10_000
    for _ in range(20):
        bench.relay.body(piece)
        assert len(bench.relay._unfinished) <= MAX_LINE_BYTES
    bench.relay.body(b"\n\n")
    bench.relay.finished(None)
    assert bench.answer().body == piece * 20 + b"\n\n"


@pytest.mark.parametrize("cut", range(len(EVENT) + 1))
async def test_S10_a_stream_that_breaks_off_anywhere_leaves_whole_events_an_error_event_and_a_broken_end(cut: int) -> None:
    bench = Bench().head()
    bench.relay.body(EVENT + EVENT[:cut])
    bench.relay.finished(GONE)
    answer = bench.answer()
    assert not answer.whole
    assert bench.socket.ended == "close"
    events = [event for event in answer.body.split(b"\n\n") if event.strip()]
    told = json.loads(events.pop().strip().removeprefix(b"data: "))
    assert (told["error"]["code"], told["error"]["type"]) == ("engine_broken", "server_error")
    assert set(events) == {EVENT.strip()}
    assert len(events) == 1 + (cut >= len(EVENT) - 1)
    assert b"[DONE]" not in answer.body


@pytest.mark.parametrize(
    ("path", "start"),
    [
        (b"/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"timeout_error"'),
        (b"/v1/responses", b'event: error\ndata: {"type":"error","code":"engine_timeout"'),
        (b"/v1/completions", b'data: {"error":{"message":'),
    ],
)
async def test_S10_the_error_event_is_the_one_that_the_api_knows(path: bytes, start: bytes) -> None:
    bench = Bench(path).head()
    bench.relay.body(EVENT)
    bench.relay.finished(EngineTimeout("idle stream", 3.0))
    assert bench.answer().body.removeprefix(EVENT).startswith(start)
    assert b"idle stream timed out after 3 s" in bench.answer().body


@pytest.mark.parametrize("headers", [[*SSE, (b"content-encoding", b"gzip")], JSON], ids=["compressed", "json"])
async def test_S10_what_is_no_plain_stream_just_breaks_off(headers: Headers) -> None:
    bench = Bench().head(200, headers)
    bench.relay.body(b"\x1f\x8b12")
    bench.relay.finished(GONE)
    answer = bench.answer()
    assert (answer.body, answer.whole, bench.socket.ended) == (b"\x1f\x8b12", False, "close")


async def test_S7_a_compressed_stream_passes_as_it_is_and_its_first_piece_is_its_first_token() -> None:
    packed = gzip.compress(EVENT)
    bench = Bench().head(200, [*SSE, (b"content-encoding", b"gzip")])
    for byte in packed:
        bench.relay.body(bytes([byte]))
    bench.relay.finished(None)
    answer = bench.answer()
    assert (answer.headers["content-encoding"], answer.body, bench.tokens) == ("gzip", packed, 1)


@pytest.mark.parametrize("status", [429, 503])
async def test_an_answer_that_is_not_accepted_is_held_and_can_be_given_after_all(status: int) -> None:
    bench = Bench().head(status, [*JSON, (b"retry-after", b"7"), (b"transfer-encoding", b"chunked")])
    bench.relay.body(b'{"error"')
    bench.relay.body(b":1}")
    bench.relay.finished(None)
    assert (bench.socket.written, bench.relay.accepted, bench.relay.over) == (b"", False, True)
    bench.relay.give_held()
    answer = bench.answer()
    assert (answer.status, answer.body, answer.whole, answer.headers["retry-after"]) == (status, b'{"error":1}', True, "7")
    assert answer.headers["content-length"] == "11"


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b"no healthy upstream", [(b"content-type", b"text/plain")], "the engine answered {}: no healthy upstream"),
        (b"", [], "the engine answered {}"),
        (b"<html><h1>503  Busy</h1>\r\n<hr></html>", [(b"content-type", b"text/html")], "the engine answered {}: 503 Busy"),
        (gzip.compress(b"no"), [(b"content-type", b"text/plain"), (b"content-encoding", b"gzip")], "the engine answered {}"),
        (b"{not json", [(b"content-type", b"application/octet-stream")], "the engine answered {}: {{not json"),
        (b"x" * 9_000, [(b"content-type", b"text/plain")], "the engine answered {}: " + "x" * 1000),
        (b"y" * (MAX_HELD_BYTES + 10), [(b"content-type", b"text/plain")], "the engine answered {}: " + "y" * 1000),
    ],
)
@pytest.mark.parametrize("status", [404, 500, 503])
async def test_S20_an_error_that_is_not_json_takes_the_apis_shape(body: bytes, headers: Headers, words: str, status: int) -> None:
    bench = Bench().head(status, [*headers, (b"retry-after", b"7"), (b"content-length", b"%d" % len(body))])
    for at in range(0, len(body), 65_536):
        bench.relay.body(body[at : at + 65_536])
    bench.relay.finished(None)
    if status == 503:
        bench.relay.give_held()
    answer = bench.answer()
    assert (answer.status, answer.whole, answer.headers["retry-after"]) == (status, True, "7")
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body)["error"]["message"] == words.format(status)
    assert bench.tokens == 0


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"error":{"message":"m"}}', b"application/json; charset=utf-8"),
        (b'{"detail":"Not Found"}', b"application/problem+json"),
        (b' {"detail":"untyped"}', b"text/plain"),
        (b"data: {}\n\n", b"text/event-stream"),
    ],
)
@pytest.mark.parametrize("status", [400, 503])
async def test_S20_an_error_that_is_json_passes_as_it_is(body: bytes, kind: bytes, status: int) -> None:
    bench = Bench().head(status, [(b"content-type", kind), (b"content-length", b"%d" % len(body))])
    bench.relay.body(body)
    bench.relay.finished(None)
    if status == 503:
        bench.relay.give_held()
    answer = bench.answer()
    assert (answer.status, answer.body, answer.whole, answer.headers["content-type"]) == (status, body, True, kind.decode())


async def test_a_json_error_too_large_to_hold_is_not_given_in_part() -> None:
    bench = Bench().head(503, [*JSON, (b"content-length", b"9000000")])
    for _ in range(90):
        bench.relay.body(b" " * 100_000)
    bench.relay.finished(None)
    bench.relay.give_held()
    answer = bench.answer()
    assert answer.whole
    assert json.loads(answer.body)["error"]["message"] == "the engine answered 503"
    assert sum(map(len, bench.relay._held)) <= MAX_HELD_BYTES + 100_000


async def test_an_error_that_breaks_off_while_it_is_held_has_given_the_client_nothing() -> None:
    bench = Bench().head(500, [(b"content-type", b"text/plain")])
    bench.relay.body(b"half")
    bench.relay.finished(GONE)
    assert (bench.socket.written, bench.relay.error, bench.exchange.started) == (b"", GONE, False)


async def test_usage_in_a_last_line_without_an_end_is_read() -> None:
    bench = Bench().head()
    bench.relay.body(EVENT + b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}')
    bench.relay.finished(None)
    assert bench.relay.usage == Usage(3, 1, None)


async def test_O7_an_error_stream_has_no_first_token_and_is_known_to_have_failed() -> None:
    bench = Bench().head()
    bench.relay.body(b'data: {"error":{"message":"no","code":500}}\n\ndata: [DONE]\n\n')
    bench.relay.finished(None)
    assert (bench.tokens, bench.relay.stream_failed, bench.relay.streamed) == (0, True, True)


async def test_a_websocket_joins_the_two_sockets_until_either_ends() -> None:
    bench = Bench(b"/v1/realtime", upgrade=True)
    engine = FakeTransport()
    bench.relay.head(ResponseHead(101, [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", b"k")]))
    assert bench.relay.switched(engine, b"hello")
    head, _, first = bench.socket.written.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 101 Switching Protocols",
        b"upgrade: websocket",
        b"sec-websocket-accept: k",
        b"connection: Upgrade",
        b"x-extra: 1",
    ]
    assert first == b"hello"
    clients, engines = bench.socket.protocol, engine.protocol
    assert isinstance(clients, asyncio.Protocol)
    assert isinstance(engines, asyncio.Protocol)
    clients.data_received(b"to the engine")
    engines.data_received(b"to the client")
    assert (engine.written, bench.socket.written[-13:]) == (b"to the engine", b"to the client")
    clients.pause_writing()
    paused = engine.paused
    clients.resume_writing()
    assert (paused, engine.paused) == (True, False)
    assert not bench.relay.over
    clients.connection_lost(None)
    assert (engine.ended, bench.relay.over) == ("close", True)
    clients.data_received(b"late")
    engines.connection_lost(ConnectionResetError())
    assert bench.socket.ended == "abort"


async def test_a_websocket_that_nobody_asked_for_is_not_joined() -> None:
    bench = Bench()
    bench.relay.head(ResponseHead(101, []))
    assert not bench.relay.switched(FakeTransport(), b"")
    assert bench.socket.written == b""


async def test_a_websocket_whose_client_left_meanwhile_closes_the_engines_side() -> None:
    bench = Bench(b"/v1/realtime", upgrade=True)
    bench.relay.head(ResponseHead(101, []))
    bench.exchange._connection.connection_lost(None)
    engine = FakeTransport()
    assert bench.relay.switched(engine, b"")
    assert (engine.ended, bench.relay.over) == ("abort", True)
