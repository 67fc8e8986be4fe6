"""The engines' side of the byte path: pooled connections that hand what they read to a sink, from the socket's own callback.

    Pool.acquire ──▶ EngineConnection.send(request, sink) ── head · body · body · finished ──▶ sink
                 ◀── back into the pool when the engine keeps the connection, closed otherwise

An engine's server closes a connection that has been idle for a few seconds (uvicorn: 5). A request sent at that very moment is
lost without having been seen; so idle connections are dropped before that, and `reused` tells a retry what it may assume.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, cast

import httptools
import msgspec

from engines.errors import EngineBroken, EngineClosed, EngineError, EngineTimeout, EngineUnreachable

if TYPE_CHECKING:
    import ssl

    from router.server import Headers

IDLE_LIMIT_S: Final = 4.0
"""Below uvicorn's 5 s, which both engines keep by default."""
SWEEP_PERIOD_S: Final = 0.25


class Timeouts(msgspec.Struct, frozen=True):
    """How long an engine may take for each stage."""

    connect_s: float = 5.0
    response_head_s: float = 600.0
    stream_idle_s: float = 300.0


class ResponseHead(msgspec.Struct, frozen=True):
    """What an engine answered before any body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    """Names in lower case."""

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (name in lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Sink(Protocol):
    """Where a response goes. Called from the socket's callback: must not block, must not raise."""

    def head(self, head: ResponseHead) -> None:
        """The response has begun."""
        ...

    def body(self, data: bytes) -> None:
        """A piece of the body, without transfer framing."""
        ...

    def finished(self, error: EngineError | None) -> None:
        """The response is complete (None), or will never be. Called once, last."""
        ...


class EngineConnection(asyncio.Protocol):
    """One socket to an engine; one request at a time."""

    __slots__ = (
        "_complete",
        "_error",
        "_head",
        "_headers",
        "_keep",
        "_parser",
        "_pieces",
        "_pool",
        "_sink",
        "_transport",
        "_until_close",
        "closed",
        "deadline",
        "idle_since",
        "reused",
        "stage",
    )

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._headers: Headers = []
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._complete = False
        self._keep = False
        self._until_close = False
        self._error: EngineError | None = None
        self.closed = False
        self.reused = False
        """An earlier request was answered on this connection."""
        self.idle_since = 0.0
        self.deadline = 0.0
        """Loop time at which the current stage has taken too long."""
        self.stage = ""

    # for the proxy

    def send(self, request: list[bytes], sink: Sink) -> None:
        """Send one whole request; its response goes to `sink`."""
        self._sink = sink
        self._headers = []
        self._head = None
        self._complete = False
        self._until_close = False
        self.stage = "response head"
        self.deadline = self._pool.loop.time() + self._pool.timeouts.response_head_s
        if self.closed or self._transport is None:
            self._finish(EngineClosed("the connection was already closed"))
            return
        for part in request:
            self._transport.write(part)

    def pause(self) -> None:
        """Read no more for now: the client cannot take it. The kernel then slows the engine."""
        if self._transport is not None and not self.closed:
            self._transport.pause_reading()
            self.deadline = float("inf")

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()
            self.deadline = self._pool.loop.time() + self._pool.timeouts.stream_idle_s

    def abandon(self) -> None:
        """Close at once: nobody wants the rest. The engine sees its connection end and stops working."""
        self._sink = None
        self._close()

    def expire(self, now: float) -> None:
        """End the response with a timeout if its deadline has passed."""
        if self._sink is not None and now > self.deadline:
            timeouts = self._pool.timeouts
            limit = timeouts.response_head_s if self._head is None else timeouts.stream_idle_s
            self._close()
            self._finish(EngineTimeout(self.stage, limit))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The engine has accepted."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse, then hand on everything this read brought in one piece."""
        if self._sink is None:  # bytes after the end of an answer: the engine does not speak HTTP as we do
            self._close()
            return
        self.deadline = self._pool.loop.time() + self._pool.timeouts.stream_idle_s
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._error = EngineBroken(f"the engine's answer is not valid HTTP: {error}")
        pieces = self._pieces
        if pieces and self._sink is not None:
            self._pieces = []
            self._sink.body(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._error is not None:
            self._close()
            self._finish(self._error)
        elif self._complete:
            self._release()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine closed, or the network did."""
        self.closed = True
        self._pool.forget(self)
        if self._sink is None:
            return
        why = f": {exc}" if exc else ""
        if self._head is None:
            self._finish(EngineClosed(f"the engine closed the connection before it answered{why}"))
        elif self._until_close and exc is None:
            self._finish(None)
        else:
            self._finish(EngineBroken(f"the engine's answer broke off{why}"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, whole."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and its like: the real head follows
            self._headers = []
            return
        self._head = ResponseHead(status, self._headers)
        self.stage = "stream"
        self._until_close = not any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)
        if self._sink is not None:
            self._sink.head(self._head)

    def on_body(self, data: bytes) -> None:
        """A piece of the body; joined with the others of the same read."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The response is whole."""
        if self._head is not None:
            self._complete = True
            self._keep = self._parser.should_keep_alive()  # only true to ask here: the parser then forgets this message

    # inside

    def _release(self) -> None:
        if self._keep and not self.closed and not self._until_close:
            self.reused = True
            self.stage = ""
            self._finish(None, back_to_pool=True)
        else:
            self._close()
            self._finish(None)

    def _finish(self, error: EngineError | None, *, back_to_pool: bool = False) -> None:
        sink, self._sink = self._sink, None
        if back_to_pool:
            self._pool.put_back(self)
        if sink is not None:
            sink.finished(error)

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self._pool.forget(self)
            if self._transport is not None:
                self._transport.abort()


class EnginePool:
    """Connections to one engine: as many as there are requests in flight, the idle ones kept for a short while."""

    def __init__(self, host: str, port: int, timeouts: Timeouts, ssl_context: ssl.SSLContext | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.host = host
        self.port = port
        self.timeouts = timeouts
        self._ssl = ssl_context
        self._idle: deque[EngineConnection] = deque()
        self._open: set[EngineConnection] = set()

    @property
    def open(self) -> int:
        """Sockets open, idle ones included."""
        return len(self._open)

    @property
    def streaming(self) -> bool:
        """Whether an answer is coming in right now."""
        return any(connection.stage == "stream" for connection in self._open)

    def take_idle(self) -> EngineConnection | None:
        """The most recently used idle connection that is still fresh, or None."""
        limit = self.loop.time() - IDLE_LIMIT_S
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.idle_since >= limit:
                return connection
            connection.abandon()
        return None

    async def connect(self) -> EngineConnection:
        """A new connection. Raises EngineUnreachable; EngineTimeout when the engine does not accept in time."""
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                _, connection = await self.loop.create_connection(
                    lambda: EngineConnection(self), self.host, self.port, ssl=self._ssl, server_hostname=self.host if self._ssl else None
                )
        except TimeoutError:
            raise EngineUnreachable(f"connect timed out after {self.timeouts.connect_s:g} s") from None
        except OSError as error:
            raise EngineUnreachable(f"cannot connect to {self.host}:{self.port}: {error.strerror or error}") from error
        self._open.add(connection)
        return connection

    def put_back(self, connection: EngineConnection) -> None:
        """A connection whose answer is complete may serve another request."""
        connection.idle_since = self.loop.time()
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """A connection is closed."""
        self._open.discard(connection)

    def sweep(self, now: float) -> None:
        """End what has taken too long, and close what has been idle too long."""
        for connection in list(self._open):
            connection.expire(now)
        while self._idle and (self._idle[0].closed or self._idle[0].idle_since < now - IDLE_LIMIT_S):
            self._idle.popleft().abandon()

    def close(self) -> None:
        """Close the idle connections; those in use close when their answers end."""
        while self._idle:
            self._idle.pop().abandon()
