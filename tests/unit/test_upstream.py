"""The engines' side of the byte path: what an engine may send, what becomes of it, and which connections are used again."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from engines.errors import EngineBroken, EngineClosed, EngineError, EngineTimeout, EngineUnreachable
from router.pool import IDLE_LIMIT_S, MARGIN, EnginePool
from router.upstream import EngineConnection, ResponseHead, Timeouts
from tests.raw import Script, read_request, scripted
from tests.transports import FakeTransport
from tests.waiting import until

REQUEST = [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"]


class Record:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.heads: list[ResponseHead] = []
        self.pieces: list[bytes] = []
        self.error: EngineError | None = None
        self.over = False
        self.last = False
        self.waited = False

    def head(self, head: ResponseHead) -> None:
        self.heads.append(head)

    def body(self, data: bytes, *, last: bool) -> None:
        assert data
        assert not self.last, "something came after the last piece"
        self.pieces.append(data)
        self.last = last

    def waits(self) -> None:
        self.waited = True

    def switched(self, transport: asyncio.Transport, first: bytes) -> bool:
        return False

    def finished(self, error: EngineError | None) -> None:
        assert not self.over
        assert not (self.last and error), "a last piece was followed by no end"
        self.error = error
        self.over = True

    @property
    def text(self) -> bytes:
        return b"".join(self.pieces)


def connected(pool: EnginePool, unsent: int = 0) -> tuple[EngineConnection, FakeTransport, Record]:
    """A connection with a request on its way, whose reads the test cuts as it likes."""
    connection, wire, sink = EngineConnection(pool), FakeTransport(unsent), Record()
    connection.connection_made(wire)
    connection.send(REQUEST, sink)
    return connection, wire, sink


def pool_of(port: int = 1, **timeouts: float) -> EnginePool:
    return EnginePool("127.0.0.1", port, Timeouts(**timeouts))


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\ntransfer-encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nx-trailer: 1\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\ncontent-length: 5\r\n\r\nabcde"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"


@pytest.mark.parametrize("answer", [CHUNKED, SIZED, INTERIM + SIZED], ids=["chunked", "sized", "after 1xx"])
async def test_an_answer_may_be_cut_at_every_byte(answer: bytes) -> None:
    for at in range(len(answer)):
        pool = pool_of()
        connection, _, sink = connected(pool)
        connection.data_received(answer[:at]) if at else None
        connection.data_received(answer[at:])
        assert (sink.over, sink.error, sink.text) == (True, None, b"abcde")
        assert [(head.status, head.header(b"content-type"), head.header(b"link"), head.header(b"x-trailer")) for head in sink.heads] == [
            (200, b"a/b", None, None)
        ]
        assert pool.take_idle() is connection
    connection, _, sink = connected(pool_of())
    for byte in answer:
        connection.data_received(bytes([byte]))
    assert (sink.over, sink.error, sink.text) == (True, None, b"abcde")


async def test_what_one_read_brings_is_handed_on_in_one_piece() -> None:
    connection, _, sink = connected(pool_of())
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 50)
    assert sink.pieces == [b"a" * 50]


@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 100\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nab", b"ab", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nab", b"ab", False),
        (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nab", b"ab", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabGARBAGE", b"ab", False),
        (b"HTTP/1.1 200 OK\r\nupgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\nab", b"ab", True),
        # what nobody asked for, behind it in the same read
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 500 X\r\ncontent-length: 5\r\n\r\nhello", b"ab", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 503 X\r\ncontent-length: 5\r\n\r\nhe", b"ab", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhe", b"ab", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 100 Continue\r\n\r\n", b"ab", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1", b"ab", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\nhe", b"ab", False),
    ],
)
async def test_an_answer_that_says_its_length_is_whole_at_once(answer: bytes, body: bytes, kept: bool) -> None:
    pool = pool_of()
    connection, wire, sink = connected(pool)
    connection.data_received(answer)
    assert (sink.over, sink.error, sink.text) == (True, None, body)
    assert len(sink.heads) == 1
    assert (pool.take_idle() is connection) is kept
    assert (wire.ended == "abort") is not kept
    assert pool.open == int(kept)


@pytest.mark.parametrize("framing", [b"", b"transfer-encoding: identity\r\n"])
async def test_an_answer_without_a_length_ends_with_its_connection_and_breaks_with_a_reset(framing: bytes) -> None:
    for cause in (None, ConnectionResetError("reset")):
        pool = pool_of()
        connection, _, sink = connected(pool)
        connection.data_received(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\nab")
        connection.data_received(b"cd")
        assert not sink.over
        connection.connection_lost(cause)
        assert sink.text == b"abcd"
        assert isinstance(sink.error, EngineBroken) if cause else sink.error is None
        assert (pool.open, pool.take_idle()) == (0, None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", "not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", "gzip, chunked"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n\x81", "nobody had asked"),
        (b"HTTP/1.1 200 OK\r\nx-endless: " + b"a" * 300_000, "longer than"),
    ],
)
async def test_an_answer_that_is_not_one_is_broken_and_gives_no_body(answer: bytes, words: str) -> None:
    pool = pool_of()
    connection, wire, sink = connected(pool)
    connection.data_received(answer)
    assert isinstance(sink.error, EngineBroken)
    assert words in str(sink.error)
    assert sink.text == b""
    assert (wire.ended, pool.open) == ("abort", 0)


async def test_what_came_before_an_answer_broke_is_handed_on() -> None:
    connection, _, sink = connected(pool_of())
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nNOT A LENGTH\r\n")
    assert isinstance(sink.error, EngineBroken)
    assert sink.text == b"abc"


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", EngineClosed),
        (b"HTTP/1.1 200 OK\r\nx: ", EngineClosed),
        (b"HTTP/1.1 100 Continue\r\n\r\n", EngineClosed),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", EngineBroken),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", EngineBroken),
    ],
)
async def test_a_connection_that_ends_too_soon_says_whether_the_answer_had_begun(sent: bytes, kind: type[EngineError]) -> None:
    connection, _, sink = connected(pool_of())
    if sent:
        connection.data_received(sent)
    connection.connection_lost(None)
    assert type(sink.error) is kind


async def test_an_engine_that_answers_before_it_has_read_the_request_gets_no_other_on_that_connection() -> None:
    pool = pool_of()
    connection, wire, sink = connected(pool, unsent=1_000_000)
    connection.data_received(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
    assert (sink.over, sink.error, sink.text) == (True, None, b"no")
    assert (wire.ended, pool.take_idle(), pool.open) == ("abort", None, 0)


async def test_an_early_answer_is_read_although_the_engine_closes_on_the_rest_of_the_request() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")

    async with scripted(refuse) as port:
        pool = pool_of(port)
        sink = Record()
        connection = await pool.connect()
        connection.send([b"POST / HTTP/1.1\r\ncontent-length: 30000000\r\n\r\n", b"x" * 30_000_000], sink)
        await until(lambda: sink.over)
        assert (sink.error, sink.text, sink.heads[0].status) == (None, b"no", 413)
        assert pool.open == 0


async def test_a_connection_paused_at_the_end_of_an_answer_reads_again_for_the_next() -> None:
    pool = pool_of()
    connection, wire, sink = connected(pool)
    connection.data_received(SIZED[:-1])
    connection.pause()
    paused = wire.paused
    assert paused
    connection.data_received(SIZED[-1:])  # it had been read already
    assert sink.over
    again = pool.take_idle()
    assert again is connection
    assert not wire.paused
    second = Record()
    again.send(REQUEST, second)
    again.data_received(SIZED)
    assert second.text == b"abcde"


async def test_pausing_twice_and_resuming_once_reads_again() -> None:
    connection, wire, _ = connected(pool_of())
    connection.pause()
    connection.pause()
    connection.resume()
    assert not wire.paused
    connection.resume()
    connection.abandon()
    connection.pause()
    connection.resume()
    assert wire.ended == "abort"


async def test_an_abandoned_answer_is_told_to_nobody_and_its_connection_is_closed() -> None:
    pool = pool_of()
    connection, wire, sink = connected(pool)
    connection.data_received(SIZED[:-2])
    connection.abandon()
    connection.connection_lost(None)
    assert (wire.ended, sink.over, pool.open, pool.take_idle()) == ("abort", False, 0, None)


async def test_bytes_that_nobody_asked_for_close_an_idle_connection() -> None:
    pool = pool_of()
    connection, wire, _ = connected(pool)
    connection.data_received(SIZED)
    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert (wire.ended, pool.take_idle()) == ("abort", None)


async def test_each_stage_has_its_own_time_limit() -> None:
    pool = pool_of(response_head_s=10.0, stream_idle_s=3.0)
    now = pool.loop.time()
    connection, wire, sink = connected(pool)
    pool.sweep(now + 9.9)
    assert not sink.over
    pool.sweep(now + 10.1)
    assert isinstance(sink.error, EngineTimeout)
    assert (sink.error.stage, sink.error.timeout_s, wire.ended) == ("response head", 10.0, "abort")

    connection, wire, sink = connected(pool)
    connection.data_received(SIZED[:-2])
    pool.sweep(now + 20)  # something came since the last look
    pool.sweep(now + 22.9)
    assert not sink.over
    pool.sweep(now + 23.1)
    assert isinstance(sink.error, EngineTimeout)
    assert (sink.error.stage, sink.error.timeout_s) == ("idle stream", 3.0)

    connection, wire, sink = connected(pool)
    connection.data_received(SIZED[:20])
    pool.sweep(now + 9.9)
    connection.data_received(SIZED[20:21])
    pool.sweep(now + 10.1)  # half a head is no sign of life
    pool.sweep(now + 10.2)
    assert isinstance(sink.error, EngineTimeout)
    assert sink.error.stage == "response head"

    connection, wire, sink = connected(pool)
    connection.data_received(SIZED[:-2])
    pool.sweep(now + 1)
    connection.pause()
    pool.sweep(now + 100)
    pool.sweep(now + 1000)
    assert not sink.over  # the client's silence is not the engine's
    connection.resume()
    pool.sweep(now + 1000)
    assert isinstance(sink.error, EngineTimeout)


async def test_idle_connections_are_taken_newest_first_and_never_when_stale() -> None:
    pool = pool_of()
    (first, *_), (second, *_) = connected(pool), connected(pool)
    first.data_received(SIZED)
    second.data_received(SIZED)
    assert pool.idle == 2
    assert pool.take_idle() is second
    first.idle_since -= IDLE_LIMIT_S + 0.1
    assert pool.take_idle() is None
    assert first.closed


async def test_the_sweep_closes_connections_before_the_engine_would() -> None:
    pool = pool_of()
    connection, wire, _ = connected(pool)
    connection.data_received(SIZED)
    pool.sweep(pool.loop.time() + IDLE_LIMIT_S - 0.1)
    assert not wire.ended
    pool.sweep(pool.loop.time() + IDLE_LIMIT_S + 0.1)
    assert (wire.ended, pool.open, pool.idle) == ("abort", 0, 0)


async def test_an_engine_that_says_how_long_it_keeps_a_connection_is_believed() -> None:
    pool = pool_of()
    connection, _, _ = connected(pool)
    connection.data_received(SIZED.replace(b"Content-Type: a/b", b"Keep-Alive: timeout=2, max=100"))
    assert pool.idle_limit_s == 2 * MARGIN
    pool.told(b"timeout=3600")
    assert pool.idle_limit_s == IDLE_LIMIT_S
    pool.told(b"max=5, timeout=x")
    assert pool.idle_limit_s == IDLE_LIMIT_S


async def test_an_engine_that_closes_an_idle_connection_shows_how_long_it_keeps_one() -> None:
    pool = pool_of()
    connection, _, _ = connected(pool)
    connection.data_received(SIZED)
    connection.idle_since -= 1.0
    connection.connection_lost(None)
    assert pool.idle_limit_s == pytest.approx(1.0 * MARGIN, abs=0.05)
    pool.closed_by_engine(30.0)
    pool.closed_by_engine(0.01)  # it was restarting
    assert pool.idle_limit_s == pytest.approx(1.0 * MARGIN, abs=0.05)
    pool.sweep(pool.loop.time() + 3600)
    assert pool.idle_limit_s == IDLE_LIMIT_S


async def test_connections_that_we_close_or_that_are_lost_teach_nothing() -> None:
    pool = pool_of()
    connection, _, _ = connected(pool)
    connection.data_received(SIZED)
    connection.idle_since -= 1.0
    connection.abandon()
    connection.connection_lost(None)
    connection, _, _ = connected(pool)
    connection.data_received(SIZED)
    connection.idle_since -= 1.0
    connection.connection_lost(ConnectionResetError())
    assert pool.idle_limit_s == IDLE_LIMIT_S


async def test_nobody_listening_is_unreachable_and_so_is_silence() -> None:
    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    with pytest.raises(EngineUnreachable, match="cannot connect"):
        await pool_of(probe.getsockname()[1]).connect()
    probe.listen(0)
    fill = []
    for _ in range(3):  # the queue of a listener that never accepts fills up, and then nothing answers
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(probe.getsockname())
        fill.append(filler)
    with pytest.raises(EngineUnreachable, match=r"connect timed out after 0\.1 s"):
        await pool_of(probe.getsockname()[1], connect_s=0.1).connect()
    for filler in [*fill, probe]:
        filler.close()


async def test_a_cancelled_connect_leaves_nothing_open() -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(hold) as port:
        pool = pool_of(port)
        for turns in range(8):
            task = asyncio.create_task(pool.connect())  # noqa: TID251  it is cancelled below
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result().abandon()
        await until(lambda: pool.open == 0, what="no connection is left open")


def answering(count: int, *, reset: bool = False) -> Script:
    """Answers `count` requests on a connection, then closes it."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(count):
            await read_request(reader)
            writer.write(SIZED)
        if reset:
            await read_request(reader)
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    return script


async def test_a_connection_says_that_it_was_used_before() -> None:
    async with scripted(answering(1, reset=True)) as port:
        pool = pool_of(port)
        connection = await pool.connect()
        assert not connection.reused
        sink = Record()
        connection.send(REQUEST, sink)
        await until(lambda: sink.over)
        again = pool.take_idle()
        assert again is connection
        assert again.reused
        sink = Record()
        again.send(REQUEST, sink)
        await until(lambda: sink.over)
        assert type(sink.error) is EngineClosed
        assert connection._transport is not None


async def test_sending_on_a_connection_that_has_closed_is_told_to_the_sink() -> None:
    connection, _, _ = connected(pool_of())
    connection.data_received(SIZED)
    connection.connection_lost(None)
    sink = Record()
    connection.send(REQUEST, sink)
    assert type(sink.error) is EngineClosed


async def test_a_vanished_engine_is_asked_for_by_the_kernel() -> None:
    async with scripted(answering(0)) as port:
        connection = await pool_of(port).connect()
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        connection.abandon()
