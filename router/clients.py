"""How are requests read off a client's socket? One `ClientConnection` per socket, parsing with httptools in the socket's callback.

Each complete request becomes an `Exchange`, handled by one task, one at a time and in order; pipelined requests wait. A client that
leaves cancels the task: its half-close counts as leaving, since nothing tells `close` from `shutdown` until something is written.

What cannot become an exchange is refused here, once, in its turn; the rest of the input is then read only to be thrown away, so that
the sender sees the refusal and not a reset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, cast

import httptools

from router import sockets
from router.api import api_error
from router.exchange import Exchange

if TYPE_CHECKING:
    from router.exchange import Headers
    from router.server import Server

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_PIPELINED: Final = 16
MAX_WAITING_BYTES: Final = 1 << 20
"""Bodies of pipelined requests that wait; with more, or more requests, the socket is not read."""
MAX_CHUNK_OVERHEAD: Final = 16
"""Bytes of framing for each byte of a chunked body; one byte to a chunk takes five."""
MAX_EARLY_BYTES: Final = 64 * 1024
"""What a client may send before its WebSocket is accepted."""
WRITE_HIGH_WATER_BYTES: Final = 256 * 1024
LINGER_S: Final = 2.0
"""After a refusal, a client that has been silent so long is not sending any more."""
MAX_LINGER_S: Final = 30.0


class ClientConnection(asyncio.Protocol):
    """One client's socket."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_client",
        "_deaf",
        "_early",
        "_head_bytes",
        "_headers",
        "_in_head",
        "_last_request",
        "_message_bytes",
        "_number",
        "_offered",
        "_owes_continue",
        "_parser",
        "_reading_paused",
        "_refusal",
        "_server",
        "_unsent",
        "_unsent_since",
        "_upgrading",
        "_url",
        "_waiting",
        "_waiting_bytes",
        "closed",
        "current",
        "full",
        "head_since",
        "last_seen",
        "receiving",
        "transport",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self.transport: asyncio.Transport | None = None
        """The socket; None before there is one, and once it is gone or given away."""
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Exchange] = deque()
        self._waiting_bytes = 0
        self._reading_paused = False
        self._deaf = False
        """Nothing that still comes is a request."""
        self._last_request = False
        """What came last said `Connection: close`."""
        self._refusal: tuple[bytes, int, str] | None = None
        self._offered = ""
        """Method of the message that offers to upgrade the connection; the parser stops there."""
        self._upgrading = False
        self._early = b""
        self._owes_continue = False
        self.current: Exchange | None = None
        self.closed = False
        self.full = False
        """The client reads more slowly than the engine writes: the socket takes no more."""
        self.last_seen = server.loop.time()
        self.receiving = False
        """Part of a request has come."""
        self.head_since = 0.0
        self._unsent = 0
        self._unsent_since = 0.0
        self._number = 0
        """Of the message being received."""
        self._message_bytes = 0
        self._in_head = False
        self._head_bytes = 0
        self._url = b""
        self._headers: Headers = []
        self._client = ""
        self._body: list[bytes] = []
        self._body_bytes = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's signature
        """The client has left: whatever is being done for it is cancelled."""
        self.closed = True
        self.transport = None
        del self._parser  # it holds us; without this cycle, everything is freed at once
        self._server.connections.discard(self)
        self._waiting.clear()
        if self.current is not None and self.current.task is not None:
            self.current.task.cancel()
            self.current.task = None  # it will hold its own frames, and they the exchange

    def data_received(self, data: bytes) -> None:
        """Parse; complete requests are queued by `on_message_complete`."""
        self.last_seen = self._server.loop.time()
        if self._deaf:
            if self._upgrading:
                self._keep_early(data)
            return
        number, unfinished = self._number, self.receiving
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self._not_http(error)
        if unfinished and self.receiving and number == self._number:
            self._message_bytes += len(data)  # a header or trailer without an end stays inside the parser, and only shows here
            if self._message_bytes > MAX_HEAD_BYTES + MAX_CHUNK_OVERHEAD * self._body_bytes:
                self._refuse_long_head()

    def pause_writing(self) -> None:
        """The client reads more slowly than the engine writes."""
        self.full = True
        if self.current is not None and self.current.flow is not None:
            self.current.flow.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.full = False
        if self.current is None:
            self._go_on()
        elif self.current.flow is not None:
            self.current.flow.resume()

    # httptools

    def on_message_begin(self) -> None:
        """A request starts."""
        self._number += 1
        self._message_bytes = 0
        self.receiving = self._in_head = True
        self.head_since = self.last_seen
        self._url = b""
        self._headers = []
        self._head_bytes = 0
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """The target, perhaps in pieces."""
        self._url += url
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_long_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, whole. Trailers come here too, and are dropped: they must not pass for headers."""
        if not self._in_head:
            return
        self._headers.append((name.lower(), value))
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_long_head()

    def on_headers_complete(self) -> None:
        """The head is whole: refuse what cannot be served before its body comes, and let a waiting client go on."""
        self._in_head = False
        expects: bytes | None = None
        door = self._server.door
        if door is not None:
            client = door.admit(path_of(self._url), self._headers)
            self._client = client or ""
            if client is None:
                self._refuse(401, door.wanted)
        for name, value in self._headers:
            if name == b"content-length":
                if value.isdigit() and int(value) > self._server.max_body_bytes:
                    self._refuse_long_body()
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    self._refuse(501, "this transfer coding is not known here; only `chunked` is")
            elif name == b"expect":
                expects = value
        if expects is not None and not self._deaf and self._parser.get_http_version() != "1.0":
            self._answer_expectation(expects)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._deaf:
            return
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._server.max_body_bytes:
            self._refuse_long_body()

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self._deaf:
            return
        parser = self._parser
        method = parser.get_method().decode("ascii")
        if parser.should_upgrade():
            self._offered = method
            if method != "GET" or not self._wants_websocket():
                return  # `_decline` follows
            self._deaf = self._upgrading = True
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        exchange = Exchange(self, method, self._url if self._url.startswith(b"/") else origin_form(self._url), self._headers, body)
        exchange.client = self._client
        exchange.http11 = parser.get_http_version() != "1.0"
        exchange.upgrade = self._upgrading
        exchange.keep_alive = parser.should_keep_alive() and not self._upgrading
        self._last_request = not exchange.keep_alive
        self.receiving = self._owes_continue = False
        self._body = []
        if self.current is None and not self.full:
            self._start(exchange)
            return
        self._waiting.append(exchange)
        self._waiting_bytes += len(body)
        if (len(self._waiting) >= MAX_PIPELINED or self._waiting_bytes > MAX_WAITING_BYTES) and self.transport is not None:
            self._reading_paused = True
            self.transport.pause_reading()

    # for Exchange and Server

    @property
    def leaving(self) -> bool:
        """The server stops: every answer is the last on its connection."""
        return self._server.stopping

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket; nothing happens when the client has left."""
        if self.transport is not None:
            self.transport.write(data)

    def finished(self, exchange: Exchange) -> None:
        """The current answer is over: close, or go on to what comes next."""
        self.current = None
        if self.transport is None:
            return
        if not exchange.keep_alive:
            self.transport.close()
            return
        self.last_seen = self._server.loop.time()
        self._go_on()

    def sweep(self, now: float, idle_s: float, stall_s: float) -> bool:
        """End the connection if it has been silent too long; whether a client was dropped that did not take its answer."""
        unsent = 0 if self.transport is None else self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif now - self._unsent_since > stall_s:
            self.drop()
            return True
        if self.current is None and (self.last_seen < now - idle_s or (self._in_head and self.head_since < now - idle_s)):
            self.close()
        return False

    def close(self) -> None:
        """End the connection after what has been written is delivered."""
        if self.transport is not None:
            self.transport.close()

    def drop(self) -> None:
        """End the connection now."""
        if self.transport is not None:
            self.transport.abort()

    def reset_when_closed(self) -> None:
        """Let the connection end in a reset, which no client takes for the end of an answer."""
        if self.transport is not None:
            sockets.reset_when_closed(self.transport.get_extra_info("socket"))

    def hand_over(self) -> tuple[asyncio.Transport, bytes] | None:
        """Give the socket away, with what has come on it since the request; it is no business of this object any more."""
        transport, self.transport = self.transport, None
        self.current = None
        self._server.connections.discard(self)
        if transport is None:
            return None
        if self._reading_paused:
            transport.resume_reading()
        return transport, self._early

    # inside

    def _start(self, exchange: Exchange) -> None:
        self.current = exchange
        exchange.task = self._server.start(exchange)

    def _go_on(self) -> None:
        """Nothing is being answered: start what waits, or give the client what it waits for."""
        if not self._waiting:
            self._give_due()
            return
        if self.full:
            return
        exchange = self._waiting.popleft()
        self._waiting_bytes -= len(exchange.body)
        self._start(exchange)
        if self._reading_paused and not self._upgrading and self.transport is not None:
            self._reading_paused = False
            self.transport.resume_reading()

    def _give_due(self) -> None:
        if self._refusal is not None:
            self._send_refusal(*self._refusal)
        elif self._owes_continue:
            self._owes_continue = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _answer_expectation(self, expects: bytes) -> None:
        if expects.lower() != b"100-continue":
            self._refuse(417, "this expectation is not known here; only `100-continue` is")
        elif self.current is None and not self._waiting:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        else:
            self._owes_continue = True

    def _wants_websocket(self) -> bool:
        return any(name == b"upgrade" and value.lower() == b"websocket" for name, value in self._headers)

    def _decline(self, rest: bytes) -> None:
        """Read a request again without its offer to upgrade (Java's client offers h2c with every request).

        The parser has stopped at the offer, and takes what follows, the request's own body included, for the other protocol.
        """
        for _ in range(MAX_PIPELINED):
            if self._deaf:
                break
            if self._offered == "CONNECT":
                self._refuse(405, "this is no proxy for other protocols")
                return
            self._parser = httptools.HttpRequestParser(self)
            data = b"%b %b HTTP/1.1\r\n%b\r\n%b" % (self._offered.encode(), self._url, b"".join(_without_offer(self._headers)), rest)
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = data[offer.args[0] :]
            except httptools.HttpParserError as error:
                self._not_http(error)
                return
        if self._upgrading:
            self._keep_early(rest)
        else:
            self._refuse(400, "too many offers to upgrade at once")

    def _keep_early(self, data: bytes) -> None:
        """Keep what comes before the WebSocket is accepted."""
        self._early += data
        if len(self._early) > MAX_EARLY_BYTES and not self._reading_paused and self.transport is not None:
            self._reading_paused = True
            self.transport.pause_reading()

    def _not_http(self, error: Exception) -> None:
        if isinstance(error, httptools.HttpParserCallbackError) and not self._deaf:
            raise error  # ours: the loop logs it and closes the connection
        if self._last_request:
            self._deaf = True  # what comes after a last request is no request, and no reason to disturb its answer
        else:
            self._refuse(400, f"not a valid HTTP/1.1 request: {error}")

    def _refuse_long_head(self) -> None:
        self._refuse(431, f"the request line and headers are longer than {MAX_HEAD_BYTES} bytes")

    def _refuse_long_body(self) -> None:
        self._refuse(413, f"the request body is longer than {self._server.max_body_bytes} bytes (set by max_body_bytes)")

    def _refuse(self, status: int, message: str) -> None:
        """Answer outside any handler, once what came before has been answered."""
        if self._deaf:
            return
        self._deaf = True
        self.receiving = False
        self._body = []
        self._refusal = (self._url if status != 431 else b"", status, message)
        self._server.refused(status)
        if self.current is None and not self._waiting:
            self._send_refusal(*self._refusal)

    def _send_refusal(self, url: bytes, status: int, message: str) -> None:
        exchange = Exchange(self, "", url, [], b"")
        exchange.keep_alive = False
        self.current = exchange  # nothing else is answered here, and `sweep` leaves the connection alone
        body = api_error(exchange.path, status, message, "invalid_api_key" if status == 401 else None)
        challenge = [(b"www-authenticate", b"Bearer")] if status == 401 else []
        exchange.begin(status, [(b"content-type", b"application/json"), *challenge], len(body))
        exchange.write(body)
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger(self._server.loop.time() + MAX_LINGER_S)

    def _linger(self, until: float) -> None:
        """Read on for as long as the client sends, within bounds, then close."""
        now = self._server.loop.time()
        if self.closed or now >= until or self.last_seen + LINGER_S <= now:
            self.close()
        else:
            self._server.loop.call_at(min(until, self.last_seen + LINGER_S), self._linger, until)


def origin_form(target: bytes) -> bytes:
    """A request target as path and query: `http://host/path` names the same resource as `/path`, whatever its host."""
    scheme, found, rest = target.partition(b"://")
    if not found or scheme.lower() not in (b"http", b"https"):
        return target  # `*`, or nothing we know
    slash = rest.find(b"/")
    return rest[slash:] if slash >= 0 else b"/"


def path_of(target: bytes) -> bytes:
    """The path of a request target, as an `Exchange` has it."""
    return (target if target.startswith(b"/") else origin_form(target)).partition(b"?")[0]


def _without_offer(headers: Headers) -> list[bytes]:
    """Header lines without what offers to upgrade, nor what has been answered already."""
    lines = []
    for name, value in headers:
        if name == b"connection":
            kept = [token for token in value.split(b",") if token.strip().lower() not in (b"upgrade", b"http2-settings")]
            if kept:
                lines.append(b"connection: " + b",".join(kept) + b"\r\n")
        elif name not in (b"upgrade", b"http2-settings", b"expect"):
            lines.append(name + b": " + value + b"\r\n")
    return lines
