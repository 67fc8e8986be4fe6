"""The clients' side of the byte path: what comes in as bytes, what goes out, and when a connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from router.clients import ClientConnection
from router.exchange import Exchange
from router.reader import MAX_HEAD_BYTES, origin_form
from router.server import Handler, Server
from tests.raw import RawClient, talking
from tests.transports import FakeTransport
from tests.waiting import alongside, until

POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


async def echo(exchange: Exchange) -> None:
    """Answer with what was understood."""
    told = {
        "method": exchange.method,
        "path": exchange.path.decode("latin-1"),
        "query": exchange.query.decode("latin-1"),
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in exchange.headers],
        "body": exchange.body.decode("latin-1"),
    }
    exchange.respond(200, json.dumps(told).encode())


@contextlib.asynccontextmanager
async def serving(handler: Handler = echo, *, max_body_bytes: int = 1 << 20, **limits: float) -> AsyncIterator[tuple[Server, int]]:
    """A server on a free port."""
    server = Server(handler, max_body_bytes=max_body_bytes, **limits)  # type: ignore[arg-type]  # each of them is a time
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.stop()
        await until(lambda: not server.connections, what="every connection is closed")


@contextlib.asynccontextmanager
async def asking(handler: Handler = echo) -> AsyncIterator[RawClient]:
    """A client of such a server."""
    async with serving(handler) as (_, port), talking(port) as client:
        yield client


def connected(handler: Handler = echo) -> tuple[ClientConnection, FakeTransport]:
    """A connection whose reads the test cuts as it likes."""
    connection, wire = ClientConnection(Server(handler, max_body_bytes=1 << 20)), FakeTransport()
    connection.connection_made(wire)
    return connection, wire


CHUNKED = POST + b"transfer-encoding: chunked\r\nx-a: 1\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nx-trailer: 1\r\n\r\n"
SIZED = POST + b"content-length: 5\r\nX-A: 1\r\n\r\nabcde"
UPGRADING = POST + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\ncontent-length: 5\r\nx-a: 1\r\n\r\nabcde"


@pytest.mark.parametrize("request_bytes", [SIZED, CHUNKED, UPGRADING], ids=["sized", "chunked", "offering h2c"])
async def test_a_request_may_be_cut_at_every_byte(request_bytes: bytes) -> None:
    both = request_bytes + b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
    answers = set()
    for at in range(len(both) + 1):
        connection, wire = connected()
        connection.data_received(both[:at]) if at else None
        connection.data_received(both[at:]) if at < len(both) else None
        await until(lambda wire=wire: wire.written.count(b"HTTP/1.1 200 OK") == 2)
        answers.add(wire.written)
    connection, wire = connected()
    for byte in both:
        connection.data_received(bytes([byte]))
    await until(lambda: wire.written.count(b"HTTP/1.1 200 OK") == 2)
    answers.add(wire.written)
    assert len(answers) == 1
    first, second = [json.loads(part[part.index(b"{") :]) for part in answers.pop().split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert (first["method"], first["path"], first["body"]) == ("POST", "/v1/chat/completions", "abcde")
    assert ["x-a", "1"] in first["headers"]
    assert not [header for header in first["headers"] if header[0] in ("x-trailer", "upgrade")]
    assert (second["method"], second["path"]) == ("GET", "/next")


async def test_two_requests_in_one_segment_are_answered_in_order() -> None:
    async with asking() as client:
        await client.send(SIZED + b"GET /two HTTP/1.1\r\nhost: x\r\n\r\n")
        assert json.loads((await client.answer()).body)["body"] == "abcde"
        assert json.loads((await client.answer()).body)["path"] == "/two"


async def test_pipelined_requests_wait_for_their_turn_and_many_are_read_only_as_they_are_answered() -> None:
    gate = asyncio.Event()
    running = 0

    async def slow(exchange: Exchange) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await gate.wait()
        running -= 1
        exchange.respond(200, exchange.path)

    async with serving(slow) as (server, port), talking(port) as client:
        for number in range(100):
            await client.send(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number)
        await until(lambda: running == 1)
        connection = next(iter(server.connections))
        await until(lambda: connection._reading_paused)
        gate.set()
        for number in range(100):
            assert (await client.answer()).body == b"/%d" % number


async def test_an_http_1_0_client_gets_no_chunks_and_its_connection_closed() -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.begin(200, [], None)
        exchange.write(b"ab")
        exchange.write(b"cd")
        exchange.end()

    async with asking(stream) as client:
        await client.send(b"POST / HTTP/1.0\r\ncontent-length: 1\r\nexpect: 100-continue\r\n\r\nx")
        answer = await client.read_to_end()
        assert answer == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabcd"


async def test_an_http_1_0_client_that_offers_to_upgrade_stays_one() -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.begin(200, [], None)
        exchange.write(exchange.body)
        exchange.end()

    async with asking(stream) as client:
        await client.send(UPGRADING.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert await client.read_to_end() == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabcde"


async def test_an_http_1_0_client_may_keep_its_connection_when_the_length_is_known() -> None:
    async with asking() as client:
        for _ in range(2):
            await client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            answer = await client.answer("GET")
            assert answer.headers["connection"] == "keep-alive"
            assert answer.whole


async def test_a_client_that_expects_100_continue_is_told_to_go_on() -> None:
    async with asking() as client:
        await client.send(POST + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert await client.read() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"abcde")
        assert json.loads((await client.answer()).body)["body"] == "abcde"


async def test_an_offer_to_upgrade_that_expects_100_continue_is_declined_and_told_to_go_on_once() -> None:
    async with asking() as client:
        await client.send(UPGRADING.replace(b"x-a: 1", b"expect: 100-continue").removesuffix(b"abcde"))
        assert await client.read() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"abcde")
        answer = await client.answer()
        assert (answer.interim, json.loads(answer.body)["body"]) == ([], "abcde")


async def test_a_client_that_expects_100_continue_behind_another_request_is_told_in_its_turn() -> None:
    gate = asyncio.Event()

    async def gated(exchange: Exchange) -> None:
        await gate.wait()
        exchange.respond(200, exchange.body)

    async with asking(gated) as client:
        await client.send(SIZED + POST + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        gate.set()
        assert (await client.answer()).body == b"abcde"
        assert await client.read() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"zz")
        assert (await client.answer()).body == b"zz"


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (POST + b"expect: 100-continue\r\ncontent-length: 2000000\r\n\r\n", 413, "1048576"),
        (POST + b"content-length: 2000000\r\nexpect: 100-continue\r\n\r\n", 413, "max_body_bytes"),
        (POST + b"transfer-encoding: chunked\r\n\r\n1FFFFF\r\n" + b"x" * 0x1FFFFF, 413, "max_body_bytes"),
        (POST + b"expect: the-unexpected\r\ncontent-length: 2\r\n\r\nab", 417, "expectation"),
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 501, "transfer coding"),
        (POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 400, "Content-Length"),
        (POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400, "Content-Length"),
        (b"GET / HTTP/1.1\r\nx: a\0b\r\n\r\n", 400, "HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "HTTP/1.1"),
        (b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n", 405, "proxy"),
        (b"GET / HTTP/1.1\r\n" + b"x-many: 0123456789\r\n" * 4000 + b"\r\n", 431, str(MAX_HEAD_BYTES)),
        (b"GET / HTTP/1.1\r\nx-endless: " + b"a" * 300_000, 431, str(MAX_HEAD_BYTES)),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 431, str(MAX_HEAD_BYTES)),
        (POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx-endless-trailer: " + b"a" * 1_000_000, 431, str(MAX_HEAD_BYTES)),
    ],
)
async def test_what_cannot_be_served_is_refused_in_words_and_the_sender_sees_them(request_bytes: bytes, status: int, words: str) -> None:
    async with serving() as (server, port), talking(port) as client:
        with contextlib.suppress(ConnectionError):
            await client.send(request_bytes)
        answer = await client.answer()
        assert (answer.status, answer.whole, answer.interim) == (status, True, [])
        assert answer.headers["connection"] == "close"
        assert words in json.loads(answer.body)["error"]["message"]
        assert server.refusals == {status: 1}
        assert await client.closed()


async def test_an_upload_that_goes_on_after_its_refusal_is_read_so_that_the_sender_sees_the_refusal() -> None:
    async with asking() as client:
        await client.send(POST + b"content-length: 20000000\r\n\r\n")
        for _ in range(20):
            await client.send(b"x" * 1_000_000)
        answer = await client.answer()
        assert (answer.status, answer.whole) == (413, True)


async def test_a_bad_request_behind_a_good_one_does_not_disturb_it() -> None:
    gate = asyncio.Event()

    async def gated(exchange: Exchange) -> None:
        await gate.wait()
        exchange.respond(200, b"good")

    async with serving(gated) as (server, port), talking(port) as client:
        await client.send(SIZED + b"BAD\r\n\r\n")
        await until(lambda: server.refusals)
        gate.set()
        assert (await client.answer()).body == b"good"
        assert (await client.answer()).status == 400


async def test_bytes_after_a_last_request_are_ignored() -> None:
    async with serving() as (server, port), talking(port) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\nGET /more HTTP/1.1\r\n\r\n")
        answer = await client.answer("GET")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.closed()
        assert server.refusals == {}


async def test_a_target_with_scheme_and_host_is_its_path() -> None:
    async with asking() as client:
        await client.send(b"GET http://elsewhere:9/v1/models?a=b HTTP/1.1\r\nhost: x\r\n\r\n")
        told = json.loads((await client.answer("GET")).body)
        assert (told["path"], told["query"]) == ("/v1/models", "a=b")
    assert origin_form(b"HTTPS://h") == b"/"
    assert origin_form(b"*") == b"*"
    assert origin_form(b"ftp://h/x") == b"ftp://h/x"


async def test_head_has_the_length_and_no_body() -> None:
    async with asking() as client:
        await client.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await client.answer("HEAD")
        assert int(head.headers["content-length"]) > 0
        assert (await client.answer("GET")).whole


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_can_have_no_body_has_no_framing_either(status: int) -> None:
    async def bare(exchange: Exchange) -> None:
        exchange.begin(status, [], 5)
        exchange.write(b"never")
        exchange.end()

    async with asking(bare) as client:
        for _ in range(2):
            await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await client.answer("GET")
            assert (answer.status, answer.body, answer.headers) == (status, b"", {})


@pytest.mark.parametrize("leave", [RawClient.reset, RawClient.half_close], ids=["reset", "half-close"])
async def test_a_client_that_leaves_cancels_what_is_done_for_it_and_what_waits_is_never_begun(leave: Callable[[RawClient], None]) -> None:
    begun, ended = [], []

    async def forever(exchange: Exchange) -> None:
        begun.append(exchange.path)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            assert exchange.client_left
            ended.append(exchange.path)

    async with serving(forever) as (server, port), talking(port) as client:
        await client.send(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\nGET /2 HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: begun)
        leave(client)
        await until(lambda: not server.connections)
        await until(lambda: not server.in_progress)
        assert begun == ended == [b"/1"]


async def test_a_request_that_never_comes_whole_is_never_begun() -> None:
    async def never(exchange: Exchange) -> None:
        raise AssertionError(exchange)

    async with serving(never) as (server, port), talking(port) as client:
        await client.send(POST + b"content-length: 5\r\n\r\nabc")
        await until(lambda: server.connections)
        client.half_close()
        await until(lambda: not server.connections)
        assert server.in_progress == 0


class Tap:
    """Feeds an exchange, as far as the client takes it."""

    def __init__(self) -> None:
        self.paused = False
        self.pauses = 0

    def pause(self) -> None:
        self.paused = True
        self.pauses += 1

    def resume(self) -> None:
        self.paused = False


async def test_a_slow_reader_holds_back_whoever_feeds_it_and_memory_stays_flat() -> None:
    tap = Tap()
    sent = 0

    async def feed(exchange: Exchange) -> None:
        nonlocal sent
        exchange.flow = tap
        exchange.begin(200, [], None)
        while sent < 8_000_000:
            await until(lambda: not tap.paused)
            exchange.write(b"x" * 50_000)
            sent += 50_000
        exchange.flow = None
        exchange.end()

    async with serving(feed) as (server, port), talking(port, receive_buffer=65536) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: tap.paused)
        connection = next(iter(server.connections))
        assert connection.transport is not None
        assert connection.transport.get_write_buffer_size() < 400_000
        answer = await client.answer("GET")
        assert (len(answer.body), answer.whole) == (8_000_000, True)
        assert tap.pauses > 1


async def test_a_client_that_does_not_read_gets_no_second_request_answered_meanwhile() -> None:
    begun = []

    async def large(exchange: Exchange) -> None:
        begun.append(exchange.path)
        exchange.respond(200, b"x" * 8_000_000)

    async with serving(large) as (server, port), talking(port, receive_buffer=65536) as client:
        await client.send(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: begun)
        connection = next(iter(server.connections))
        await until(lambda: connection.full and connection.current is None)
        await client.send(b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\nGET /3 HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: len(connection._waiting) == 2)
        assert begun == [b"/1"]
        assert len((await client.answer("GET")).body) == 8_000_000
        assert len((await client.answer("GET")).body) == 8_000_000
        assert len((await client.answer("GET")).body) == 8_000_000
        assert begun == [b"/1", b"/2", b"/3"]


async def test_whoever_feeds_a_connection_that_is_still_full_is_held_back_at_once() -> None:
    connection, _ = connected()
    tap = Tap()
    exchange = Exchange(connection, "GET", b"/", [], b"")
    connection.pause_writing()
    exchange.flow = tap
    assert tap.paused


async def test_whoever_fed_an_answer_is_not_held_back_by_its_end() -> None:
    tap = Tap()

    class Full(FakeTransport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            super().write(data)
            if bytes(data).endswith(b"0\r\n\r\n"):
                connection.pause_writing()

    async def answer(exchange: Exchange) -> None:
        exchange.flow = tap
        exchange.begin(200, [], None)
        exchange.end()

    connection = ClientConnection(Server(answer, max_body_bytes=1))
    connection.connection_made(Full())
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: connection.full)
    assert tap.pauses == 0  # by now it may be feeding another client


async def test_a_client_that_takes_nothing_is_dropped_and_one_that_takes_slowly_is_not() -> None:
    ended = []

    async def endless(exchange: Exchange) -> None:
        exchange.begin(200, [], None)
        exchange.write(b"x" * 16_000_000)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(exchange)

    async with serving(endless, stall_timeout_s=10.0) as (server, port), talking(port, receive_buffer=65536) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.in_progress)
        connection = next(iter(server.connections))
        await until(lambda: connection.full)
        now = server.loop.time()
        unsent = connection.transport.get_write_buffer_size() if connection.transport else 0
        server.sweep(now)
        server.sweep(now + 9)
        while connection.transport is not None and connection.transport.get_write_buffer_size() == unsent:
            await client.read()
        server.sweep(now + 18)
        server.sweep(now + 27)
        assert (server.stalled, len(ended)) == (0, 0)
        server.sweep(now + 29)
        await until(lambda: ended, what="the request is cancelled")
        assert server.stalled == 1


async def test_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    gate = asyncio.Event()

    async def gated(exchange: Exchange) -> None:
        await gate.wait()
        exchange.respond(200, b"")

    async with serving(gated, keep_alive_s=10.0) as (server, port), talking(port) as busy, talking(port) as idle, talking(port) as slow:
        await busy.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await slow.send(b"GET / HTTP/1.1\r\nx-drip: ")
        await until(lambda: len(server.connections) == 3 and server.in_progress == 1)
        now = server.loop.time()
        for connection in server.connections:
            if connection.receiving:
                connection.last_seen = now + 11  # one byte every few seconds for ever
        server.sweep(now + 11)
        assert await idle.closed()
        assert await slow.closed()
        assert len(server.connections) == 1
        gate.set()
        assert (await busy.answer("GET")).status == 200
        connection = next(iter(server.connections))
        assert connection.last_seen >= now  # its silence counts from its answer's end, however long that took
        connection.last_seen = now
        server.sweep(now + 11)
        assert await busy.closed()


async def test_stopping_lets_requests_finish_and_tells_their_clients_that_the_connection_ends() -> None:
    gate = asyncio.Event()

    async def gated(exchange: Exchange) -> None:
        await gate.wait()
        exchange.respond(200, b"done")

    async with serving(gated) as (server, port), talking(port) as client, talking(port) as idle:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.in_progress and len(server.connections) == 2)
        async with alongside(server.stop()) as stopping:
            assert await idle.closed()
            with pytest.raises(OSError, match="refused"):
                await asyncio.open_connection("127.0.0.1", port)
            gate.set()
            answer = await client.answer("GET")
            assert (answer.body, answer.headers["connection"]) == (b"done", "close")
            await stopping


async def test_what_is_not_finished_within_the_grace_period_is_cancelled() -> None:
    async def forever(exchange: Exchange) -> None:
        exchange.begin(200, [], None)
        exchange.write(b"x")
        await asyncio.get_running_loop().create_future()

    async with serving(forever, grace_period_s=0.05) as (server, port), talking(port) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.in_progress)
        await server.stop()
        answer = await client.answer("GET")
        assert (answer.status, answer.whole) == (200, False)


async def test_a_handler_that_fails_is_a_500_or_a_broken_end_and_never_silence() -> None:
    async def fail(exchange: Exchange) -> None:
        if exchange.path == b"/silent":
            return
        if exchange.path == b"/late":
            exchange.begin(200, [], None)
            exchange.write(b"x")
        raise RuntimeError("told to")

    async with serving(fail) as (_, port):
        async with talking(port) as client:
            await client.send(b"GET /early HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.answer("GET")).status == 500
            await client.send(b"GET /late HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await client.answer("GET")
            assert (answer.status, answer.body, answer.whole) == (200, b"x", False)
        async with talking(port) as client:
            await client.send(b"GET /silent HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await client.closed()


@pytest.mark.parametrize(("version", "reset"), [("1.1", False), ("1.0", True)])
async def test_an_answer_that_breaks_off_never_looks_whole(version: str, reset: bool) -> None:
    gate = asyncio.Event()

    async def broken(exchange: Exchange) -> None:
        exchange.begin(200, [], None)
        exchange.write(b"partial")
        await gate.wait()
        exchange.abort()

    async with asking(broken) as client:
        await client.send(b"GET / HTTP/%s\r\nhost: x\r\n\r\n" % version.encode())
        await until(lambda: b"partial" in client.reader._buffer)  # type: ignore[attr-defined]
        gate.set()
        answer = await client.answer("GET")
        assert (answer.body, answer.whole, answer.reset) == (b"partial", False, reset)


async def test_a_websocket_is_handed_over_with_what_came_early() -> None:
    given: list[tuple[asyncio.Transport, bytes]] = []

    async def switch(exchange: Exchange) -> None:
        assert exchange.upgrade
        handed = exchange.switch([(b"upgrade", b"websocket"), (b"connection", b"Upgrade")])
        assert handed is not None
        given.append(handed)

    async with serving(switch) as (server, port), talking(port) as client:
        await client.send(b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\n\r\nearly")
        await until(lambda: given)
        transport, early = given[0]
        assert early == b"early"
        assert not server.connections
        transport.write(b"raw")
        answered = await client.read_until(b"raw")
        assert answered == b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\r\nraw"
        transport.close()


async def test_a_websocket_that_is_refused_ends_its_connection() -> None:
    async with asking() as client:
        await client.send(
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        answer = await client.answer("GET")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.closed()


async def test_a_flood_before_a_websocket_is_accepted_is_not_kept() -> None:
    connection, wire = connected(lambda _: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n")
    for _ in range(10):
        connection.data_received(b"x" * 10_000) if not wire.paused else None
    assert wire.paused
    assert len(connection._early) < 80_000
    connection.connection_lost(None)


async def test_an_error_has_the_shape_of_its_api() -> None:
    async def fail(exchange: Exchange) -> None:
        exchange.error(413, "too large")

    async with asking(fail) as client:
        await client.send(POST + b"content-length: 0\r\n\r\n")
        openai = json.loads((await client.answer()).body)
        assert openai == {"error": {"message": "too large", "type": "invalid_request_error", "param": None, "code": 413}}
        await client.send(b"POST /v1/messages?beta=true HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        anthropic = json.loads((await client.answer()).body)
        assert anthropic == {"type": "error", "error": {"type": "request_too_large", "message": "too large"}}


async def test_a_vanished_client_is_asked_for_by_the_kernel() -> None:
    async def forever(_: Exchange) -> None:
        await asyncio.get_running_loop().create_future()

    async with serving(forever, grace_period_s=0) as (server, port), talking(port) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.in_progress)
        connection = next(iter(server.connections))
        assert connection.transport is not None
        assert connection.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
