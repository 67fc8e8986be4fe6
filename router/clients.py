"""Whose turn is it on a client's socket? One `ClientConnection` per socket: requests in, one answered at a time, and in order.

Each request read (`reader`) becomes an `Exchange`, handled by one errand; pipelined ones wait. A client that leaves cancels it: its
half-close counts as leaving, since nothing tells `close` from `shutdown` until something is written.

What cannot become an exchange is refused here, once, in its turn; the rest of the input is then read only to be thrown away, so that
the sender sees the refusal and not a reset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from router import sockets
from router.api import api_error
from router.exchange import Exchange
from router.reader import RequestReader, path_of

if TYPE_CHECKING:
    from router.exchange import Headers
    from router.server import Server

MAX_PIPELINED: Final = 16
MAX_WAITING_BYTES: Final = 1 << 20
"""Bodies of pipelined requests that wait; with more, or more requests, the socket is not read."""
MAX_EARLY_BYTES: Final = 64 * 1024
"""What a client may send before its WebSocket is accepted."""
WRITE_HIGH_WATER_BYTES: Final = 256 * 1024
LINGER_S: Final = 2.0
"""After a refusal, a client that has been silent so long is not sending any more."""
MAX_LINGER_S: Final = 30.0


class ClientConnection(asyncio.Protocol):
    """One client's socket."""

    __slots__ = (
        "_client",
        "_early",
        "_head_since",
        "_number",
        "_owes_continue",
        "_reader",
        "_reading_paused",
        "_refusal",
        "_server",
        "_unsent",
        "_unsent_since",
        "_upgrading",
        "_waiting",
        "_waiting_bytes",
        "closed",
        "current",
        "full",
        "last_seen",
        "transport",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader = RequestReader(self, server.max_body_bytes)
        self._waiting: deque[Exchange] = deque()
        self._waiting_bytes = 0
        self._reading_paused = False
        self._refusal: tuple[bytes, int, str] | None = None
        self._owes_continue = False
        self._client = ""
        """The name of the key in the latest head."""
        self._upgrading = False
        """The client waits for its WebSocket, and nothing of HTTP follows."""
        self._early = b""
        self._unsent = 0
        self._unsent_since = 0.0
        self._number = 0
        self._head_since = 0.0
        """When the message being received began."""
        self.transport: asyncio.Transport | None = None
        """The socket; None before there is one, and once it is gone or given away."""
        self.current: Exchange | None = None
        self.closed = False
        self.full = False
        """The client reads more slowly than the engine writes: the socket takes no more."""
        self.last_seen = server.loop.time()

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
        self._reader.close()
        self._server.connections.discard(self)
        self._waiting.clear()
        if self.current is not None and self.current.errand is not None:
            self.current.errand.cancel()

    def data_received(self, data: bytes) -> None:
        """Read on; whole requests come back by `asked`."""
        self.last_seen = self._server.loop.time()
        reader = self._reader
        if not reader.deaf:
            data = reader.feed(data)
            if reader.number != self._number:
                self._number, self._head_since = reader.number, self.last_seen
        if data and self._upgrading:
            self._keep_early(data)
        if self._waiting and self.current is None:
            self._go_on()

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

    # reader.Listener

    def admits(self, target: bytes, headers: Headers) -> str:
        """Ask at the door, where there is one."""
        door = self._server.door
        if door is None:
            return ""
        client = door.admit(path_of(target), headers)
        self._client = client or ""
        return door.wanted if client is None else ""

    def expected(self) -> None:
        """Tell a client to go on, in its turn."""
        if self.current is None and not self._waiting:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        else:
            self._owes_continue = True

    def asked(  # noqa: PLR0913  a struct between the two would cost more than making the exchange
        self, method: str, target: bytes, headers: Headers, body: bytes, *, http11: bool, keep_alive: bool, upgrade: bool
    ) -> None:
        """Answer a request in its turn."""
        exchange = Exchange(self, method, target, headers, body)
        exchange.client = self._client
        exchange.http11 = http11
        exchange.keep_alive = keep_alive
        exchange.upgrade = self._upgrading = upgrade
        self._owes_continue = False
        self._waiting.append(exchange)  # `data_received` goes on with it
        self._waiting_bytes += len(body)
        if (len(self._waiting) >= MAX_PIPELINED or self._waiting_bytes > MAX_WAITING_BYTES) and self.transport is not None:
            self._reading_paused = True
            self.transport.pause_reading()

    def refused(self, target: bytes, status: int, words: str) -> None:
        """Answer outside any handler, once what came before has been answered."""
        self._refusal = target, status, words
        self._server.refused(status)
        if self.current is None and not self._waiting:
            self._send_refusal(*self._refusal)

    # for Exchange and Server

    @property
    def receiving(self) -> bool:
        """Part of a request has come."""
        return self._reader.receiving

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
        if self._waiting:
            self._server.loop.call_soon(self._go_on)  # each of many in a turn of its own
        else:
            self._give_due()

    def sweep(self, now: float, idle_s: float, stall_s: float) -> bool:
        """End the connection if it has been silent too long; whether a client was dropped that did not take its answer."""
        unsent = 0 if self.transport is None else self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif now - self._unsent_since > stall_s:
            self.drop()
            return True
        if self.current is None and (self.last_seen < now - idle_s or (self._reader.in_head and self._head_since < now - idle_s)):
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

    def _go_on(self) -> None:
        """Start what waits, if nothing is being answered; or give the client what it waits for."""
        if self.current is not None or self.full or self.closed:
            return
        if not self._waiting:
            self._give_due()
            return
        exchange = self.current = self._waiting.popleft()
        self._waiting_bytes -= len(exchange.body)
        errand = self._server.start(exchange)
        if not errand.over and not self.closed:
            exchange.errand = errand
        if self._reading_paused and not self._upgrading and self.transport is not None:
            self._reading_paused = False
            self.transport.resume_reading()

    def _give_due(self) -> None:
        if self._refusal is not None:
            self._send_refusal(*self._refusal)
        elif self._owes_continue:
            self._owes_continue = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _keep_early(self, data: bytes) -> None:
        """Keep what comes before the WebSocket is accepted."""
        self._early += data
        if len(self._early) > MAX_EARLY_BYTES and not self._reading_paused and self.transport is not None:
            self._reading_paused = True
            self.transport.pause_reading()

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
