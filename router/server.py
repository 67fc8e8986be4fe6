"""The clients' side of the byte path: sockets in, `Exchange`s out.

One `ClientConnection` per socket parses requests with httptools; each complete request becomes an `Exchange`, handled by one
task, one at a time and in order (pipelined requests wait). Bytes of an answer are written from the engine connection's own
callbacks, so no task wakes per chunk; a client that leaves cancels the task.

    data_received ──httptools──▶ Exchange ──task──▶ handler(exchange) ── begin · write · end ──▶ transport
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Protocol, cast

import httptools

from router.api import api_error

if TYPE_CHECKING:
    import ssl

Headers = list[tuple[bytes, bytes]]
"""Header names in lower case, with their values, in the order they came."""

MAX_HEADER_BYTES: Final = 64 * 1024
MAX_PIPELINED: Final = 16
WRITE_HIGH_WATER_BYTES: Final = 256 * 1024
LINGER_S: Final = 2.0
"""How long an over-long upload is read and thrown away, so that its sender sees the 413 and not a reset."""
SWEEP_PERIOD_S: Final = 1.0

STATUS_LINES: Final = {
    code: b"HTTP/1.1 %d %s\r\n" % (code, phrase)
    for code, phrase in {
        200: b"OK",
        400: b"Bad Request",
        401: b"Unauthorized",
        403: b"Forbidden",
        404: b"Not Found",
        405: b"Method Not Allowed",
        408: b"Request Timeout",
        413: b"Content Too Large",
        422: b"Unprocessable Entity",
        429: b"Too Many Requests",
        431: b"Request Header Fields Too Large",
        500: b"Internal Server Error",
        501: b"Not Implemented",
        502: b"Bad Gateway",
        503: b"Service Unavailable",
        504: b"Gateway Timeout",
    }.items()
}

log = logging.getLogger(__name__)


class Flow(Protocol):
    """Whoever feeds an exchange: told when the client's socket is full, and when it has room again."""

    def pause(self) -> None:
        """Stop feeding."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class Exchange:
    """One request and its answer.

    An answer is `begin`, any number of `write`s, `end`; or `abort`, which breaks the connection so that no client can take what
    it has for complete. Writing to a client that has left is harmless.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_headers_only",
        "body",
        "ended",
        "flow",
        "headers",
        "http11",
        "keep_alive",
        "method",
        "path",
        "query",
        "started",
        "status",
        "task",
    )

    def __init__(self, connection: ClientConnection, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        self._connection = connection
        self.method = method
        self.path, _, self.query = target.partition(b"?")
        self.headers = headers
        self.body = body
        self.http11 = True
        self.keep_alive = True
        self.status = 0
        """Status sent to the client; 0 before `begin`."""
        self.started = False
        self.ended = False
        self.flow: Flow | None = None
        self.task: asyncio.Task[None] | None = None
        self._chunked = False
        self._headers_only = method == "HEAD"

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (name in lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def client_left(self) -> bool:
        """Whether the client's socket is gone."""
        return self._connection.closed

    def begin(self, status: int, headers: Headers, length: int | None) -> None:
        """Send the head. `length` None means it is not known: chunked for HTTP/1.1, until close for HTTP/1.0."""
        self.started = True
        self.status = status
        parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if length is not None:
            parts.append(b"content-length: %d\r\n" % length)
        elif self.http11:
            self._chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            self.keep_alive = False
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        elif not self.http11:
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")
        self._connection.write(b"".join(parts))

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if self._headers_only or not data:
            return
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """The answer is complete; the connection goes on to its next request, if it may."""
        if self.ended:
            return
        self.ended = True
        if self._chunked and not self._headers_only:
            self._connection.write(b"0\r\n\r\n")
        self._connection.finished(self)

    def abort(self) -> None:
        """Break off: what was written is delivered, then the connection ends without the answer's proper end."""
        self.ended = True
        self.keep_alive = False
        self._connection.finished(self)

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", headers: Headers | None = None) -> None:
        """Send a whole answer at once."""
        self.begin(status, [(b"content-type", content_type), *(headers or [])], len(body))
        self.write(body)
        self.end()

    def error(self, status: int, message: str, code: str | None = None, headers: Headers | None = None) -> None:
        """Send an error in the API's shape: the OpenAI one."""
        self.respond(status, api_error(status, message, code), headers=headers)


Handler = Callable[[Exchange], Awaitable[None]]


class ClientConnection(asyncio.Protocol):
    """One client's socket."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Exchange] = deque()
        self._reading_paused = False
        self._discarding = False
        self.current: Exchange | None = None
        self.closed = False
        self.last_seen = server.loop.time()
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: Headers = []
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self.receiving = False
        """Part of a request has come."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's signature
        """The client has left: whatever is being done for it is cancelled."""
        self.closed = True
        self._server.connections.discard(self)
        self._waiting.clear()
        if self.current is not None and self.current.task is not None:
            self.current.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse; complete requests are queued by `on_message_complete`."""
        self.last_seen = self._server.loop.time()
        if self._discarding:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(501, "this route does not upgrade to another protocol")
        except httptools.HttpParserError as error:
            if not self._discarding:  # else a callback of ours refused, which httptools reports as a parser error too
                self._refuse(400, f"not a valid HTTP/1.1 request: {error}")

    def pause_writing(self) -> None:
        """The client reads more slowly than the engine writes."""
        if self.current is not None and self.current.flow is not None:
            self.current.flow.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        if self.current is not None and self.current.flow is not None:
            self.current.flow.resume()

    # httptools

    def on_message_begin(self) -> None:
        """A request starts."""
        self._reset()
        self.receiving = True

    def on_url(self, url: bytes) -> None:
        """The target, perhaps in pieces."""
        self._url += url
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, whole."""
        self._headers.append((name.lower(), value))
        self._count_header_bytes(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The head is whole: refuse what is too large before its body comes, and let a waiting client go on."""
        for name, value in self._headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._server.max_body_bytes:
                self._refuse_too_large()
            elif name == b"expect" and value.lower() == b"100-continue" and self.current is None:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._server.max_body_bytes:
            self._refuse_too_large()

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self._discarding:
            return
        parser = self._parser
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        exchange = Exchange(self, parser.get_method().decode("ascii"), self._url, self._headers, body)
        exchange.http11 = parser.get_http_version() != "1.0"
        exchange.keep_alive = parser.should_keep_alive() and not self._server.stopping
        self._reset()
        if self.current is None:
            self._start(exchange)
            return
        self._waiting.append(exchange)
        if len(self._waiting) >= MAX_PIPELINED and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    # for Exchange and Server

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket; nothing happens when the client has left."""
        if not self.closed and self._transport is not None:
            self._transport.write(data)

    def finished(self, exchange: Exchange) -> None:
        """The current answer is over: close, or start the next request."""
        self.current = None
        if self.closed or self._transport is None:
            return
        if not exchange.keep_alive or self._server.stopping:
            self._transport.close()
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        if self._reading_paused and len(self._waiting) < MAX_PIPELINED:
            self._reading_paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """End the connection after what has been written is delivered."""
        if self._transport is not None:
            self._transport.close()

    def _start(self, exchange: Exchange) -> None:
        self.current = exchange
        exchange.task = self._server.start(exchange)

    def _count_header_bytes(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"the request line and headers are longer than {MAX_HEADER_BYTES} bytes")

    def _refuse_too_large(self) -> None:
        limit = self._server.max_body_bytes
        self._refuse(413, f"the request body is longer than {limit} bytes (set by max_body_bytes)")

    def _refuse(self, status: int, message: str) -> None:
        """Answer outside any handler, once, and read the rest of the input only to throw it away."""
        if self._discarding:
            return
        self._discarding = True
        if self.current is None:
            exchange = Exchange(self, "", b"", [], b"")
            exchange.keep_alive = True  # `finished` must not close yet: the client may still be sending
            body = api_error(status, message)
            exchange.begin(status, [(b"content-type", b"application/json"), (b"connection", b"close")], len(body))
            exchange.write(body)
        self._server.loop.call_later(LINGER_S, self.close)
        self._server.refused(status)


class Server:
    """Accepts clients and owns one task per request in progress.

    `run` serves until cancelled, then stops in three steps: no new connections; idle ones closed and requests in progress given
    `grace_period_s`; the rest cancelled.
    """

    def __init__(self, handler: Handler, *, max_body_bytes: int, keep_alive_s: float = 75.0, grace_period_s: float = 30.0) -> None:
        self.loop = asyncio.get_running_loop()
        self.max_body_bytes = max_body_bytes
        self.connections: set[ClientConnection] = set()
        self.stopping = False
        self.refusals: dict[int, int] = {}
        """Requests answered before they reached a handler, by status."""
        self._handler = handler
        self._keep_alive_s = keep_alive_s
        self._grace_period_s = grace_period_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    @property
    def in_progress(self) -> int:
        """Requests being handled."""
        return len(self._tasks)

    async def listen(self, host: str, port: int, ssl_context: ssl.SSLContext | None = None) -> int:
        """Bind, and return the port bound: the kernel's choice when `port` is 0. Raises OSError."""
        self._listener = await self.loop.create_server(lambda: ClientConnection(self), host, port, backlog=4096, ssl=ssl_context)
        return int(self._listener.sockets[0].getsockname()[1])

    async def run(self) -> None:
        """Keep house until cancelled: close connections that have been silent too long."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            limit = self.loop.time() - self._keep_alive_s
            for connection in [c for c in self.connections if c.current is None and c.last_seen < limit]:
                connection.close()

    async def stop(self) -> None:
        """Accept nothing more, let requests in progress finish within the grace period, cancel the rest."""
        self.stopping = True
        if self._listener is not None:
            self._listener.close()
        for connection in [c for c in self.connections if c.current is None and not c.receiving]:
            connection.close()
        if self._tasks:
            log.info("stopping: waiting for requests in progress", extra={"fields": {"requests": len(self._tasks)}})
            await asyncio.wait(self._tasks, timeout=self._grace_period_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for connection in list(self.connections):
            connection.close()

    def start(self, exchange: Exchange) -> asyncio.Task[None]:
        """Handle one request in a task of its own, owned here until it is done."""
        task = self.loop.create_task(self._handle(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def refused(self, status: int) -> None:
        """Count a request that was answered before it reached the handler."""
        self.refusals[status] = self.refusals.get(status, 0) + 1

    async def _handle(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        except asyncio.CancelledError:
            if not exchange.ended:
                exchange.abort()
            raise
        except Exception:
            log.exception("a request failed inside the router", extra={"fields": {"path": exchange.path.decode("latin-1")}})
            if exchange.started:
                exchange.abort()
            else:
                exchange.error(500, "the router failed to handle this request; its log says why")
