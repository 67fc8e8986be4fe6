"""The engines' side of the byte path: connections that hand what they read to a sink, from the socket's own callback.

    EngineConnection.send(request, sink) ── head · body · body · finished ──▶ sink
                     └── back into the pool when the engine keeps the connection, closed otherwise

One request at a time. What arrives in one read is handed on in one piece.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol, cast

import httptools
import msgspec

from engines.errors import EngineBroken, EngineClosed, EngineError, EngineTimeout

if TYPE_CHECKING:
    from router.exchange import Headers
    from router.pool import EnginePool

MAX_HEAD_BYTES: Final = 256 * 1024
NEVER: Final = float("inf")


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

    @property
    def retry_after_s(self) -> float | None:
        """Its `Retry-After`, where that is a number of seconds."""
        value = self.header(b"retry-after")
        return float(value) if value is not None and value.isdigit() else None


class Sink(Protocol):
    """Where a response goes. Called from the socket's callback: must not block, must not raise."""

    def head(self, head: ResponseHead) -> None:
        """The response has begun."""
        ...

    def body(self, data: bytes, *, last: bool) -> None:
        """A piece of the body, without transfer framing; `last`, when `finished` follows at once."""
        ...

    def waits(self) -> None:
        """The head has come, and nothing with it."""
        ...

    def switched(self, transport: asyncio.Transport, first: bytes) -> bool:
        """The engine has agreed to another protocol: take the socket, and the first bytes of it; False when nobody had asked."""
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
        "_head_bytes",
        "_headers",
        "_heard",
        "_keep",
        "_parser",
        "_paused",
        "_pieces",
        "_pool",
        "_sink",
        "_steady",
        "_transport",
        "_until_close",
        "_whole",
        "closed",
        "deadline",
        "idle_since",
        "on_body",
        "reused",
        "stage",
    )

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._headers: Headers = []
        self._head: ResponseHead | None = None
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        """Of the body, from one read. It stays the same list, so that the parser can append to it without a call of ours in between."""
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._steady = False
        """The head has come and nothing else has happened: a read brings body, and that is all."""
        self._complete = False
        self._whole = 0
        """How many of the pieces are of the answer that is complete."""
        self._keep = False
        self._until_close = False
        self._paused = False
        self._heard = False
        """Something has come since `expire` last looked: asking the clock there costs less than asking it at every piece."""
        self._error: EngineError | None = None
        self.closed = False
        self.reused = False
        """An earlier request was answered on this connection."""
        self.idle_since = 0.0
        self.deadline = NEVER
        """Loop time at which the current stage has taken too long."""
        self.stage = ""

    # for the proxy

    def send(self, request: list[bytes], sink: Sink) -> None:
        """Send one whole request; its response goes to `sink`."""
        self._sink = sink
        self._headers = []
        self._head = None
        self._head_bytes = 0
        self._complete = False
        self._until_close = False
        self._steady = False
        self._heard = False
        self.stage = "response head"
        self.deadline = self._pool.loop.time() + self._pool.timeouts.response_head_s
        if self.closed or self._transport is None:
            self._finish(EngineClosed("the connection was already closed"))
            return
        for part in request:
            self._transport.write(part)

    def pause(self) -> None:
        """Read no more for now: the client cannot take it. The kernel then slows the engine."""
        if self._transport is not None and not self.closed and not self._paused:
            self._paused = True
            self._transport.pause_reading()
            self.deadline = NEVER  # the silence is ours; how long a client may stall is the server's to say

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and not self.closed and self._paused:
            self._paused = False
            self._transport.resume_reading()
            self.deadline = self._pool.loop.time() + self._pool.timeouts.stream_idle_s

    def abandon(self) -> None:
        """Close at once: nobody wants the rest. The engine sees its connection end and stops working."""
        self._sink = None
        self._close()

    def expire(self, now: float) -> None:
        """End the response with a timeout if its deadline has passed."""
        if self._heard:
            self._heard = False
            self._pool.heard_at = now
            if self._head is not None:  # half a head is no sign of life
                self.deadline = NEVER if self._paused else now + self._pool.timeouts.stream_idle_s
        elif self._sink is not None and now > self.deadline:
            timeouts = self._pool.timeouts
            limit = timeouts.response_head_s if self._head is None else timeouts.stream_idle_s
            self._fail(EngineTimeout(self.stage, limit))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The engine has accepted."""
        self._transport = cast("asyncio.Transport", transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        """Parse, then hand on everything this read brought in one piece."""
        sink = self._sink
        if sink is None:  # bytes after the end of an answer: the engine does not speak HTTP as we do
            self._close()
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._hand_over(data[upgrade.args[0] :]):
                return
        except httptools.HttpParserCallbackError:
            raise  # ours: the loop logs it and closes the connection
        except httptools.HttpParserError as error:
            self._not_http(error)
        if self._complete:
            del self._pieces[self._whole :]
        if self._pieces:
            self._hand_on(sink)
        elif self._steady:
            sink.waits()
        if not self._steady:
            self._conclude(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine closed, or the network did."""
        del self._parser  # it holds us; without this cycle, everything is freed at once
        if not self.closed:
            self.closed = True
            self._pool.forget(self)
            if self.reused and self._sink is None and exc is None:
                self._pool.closed_by_engine(self._pool.loop.time() - self.idle_since)
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

    def on_message_begin(self) -> None:
        """A response starts; behind one that was asked for, it is one that was not: the connection is not used again."""
        if self._complete:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, whole; trailers come here too, and are dropped."""
        if self._head is None and not self._complete:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status < 200 and status != 101:  # 100 Continue and its like: the real head follows
            self._headers = []
            return
        self._until_close = status not in (101, 204, 304)
        for name, value in self._headers:
            if name == b"content-length":
                self._until_close = False
            elif name == b"transfer-encoding":
                coding = value.lower()
                if coding == b"chunked":
                    self._until_close = False
                elif coding != b"identity":
                    self._error = EngineBroken(
                        f"the engine's answer has the transfer coding {value.decode('latin-1')!r}, which nobody asked for"
                    )
                    return
            elif name == b"keep-alive":
                self._pool.told(value)
        self._head = ResponseHead(status, self._headers)
        self._steady = True
        self.stage = "idle stream"
        if self._sink is not None:
            self._sink.head(self._head)

    def on_message_complete(self) -> None:
        """The response is whole."""
        if self._head is not None and not self._complete:
            self._complete = True
            self._whole = len(self._pieces)
            self._steady = False
            self._keep = self._parser.should_keep_alive()  # only true to ask here: the parser then forgets this message

    # inside

    def _conclude(self, count: int) -> None:
        """What follows from a read of so many bytes, beyond the body that it brought."""
        if self._complete:
            self._release()
        elif self._error is not None:
            self._fail(self._error)
        elif self._head is None:
            self._head_bytes += count
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(EngineBroken(f"the head of the engine's answer is longer than {MAX_HEAD_BYTES} bytes"))

    def _release(self) -> None:
        """The answer is complete. A connection is used again only if nothing is left on it, in either direction."""
        transport = self._transport
        if self._keep and not self.closed and not self._until_close and transport is not None and not transport.get_write_buffer_size():
            if self._paused:
                self.resume()
            self.reused = True
            self.stage = ""
            self.deadline = NEVER
            self._finish(None, back_to_pool=True)
        else:
            self._close()
            self._finish(None)

    def _fail(self, error: EngineError) -> None:
        self._close()
        self._finish(error)

    def _not_http(self, error: Exception) -> None:
        if self._complete:
            self._keep = False  # the answer is whole; what came behind it is no part of it
        elif self._error is None:
            self._error = EngineBroken(f"the engine's answer is not valid HTTP: {error}")
        self._steady = False

    def _hand_on(self, sink: Sink) -> None:
        """Everything that a read brought of the body, in one piece."""
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._head is not None:
            sink.body(body, last=self._complete)

    def _hand_over(self, first: bytes) -> bool:
        """Give the socket to the sink: the engine has agreed to another protocol. False when it says so behind an answer, to nobody."""
        if self._head is None or self._head.status != 101:
            return False
        if self._sink is not None and self._transport is not None and self._sink.switched(self._transport, first):
            self._sink = None
            self._pool.forget(self)
        else:
            self._fail(EngineBroken("the engine switched to another protocol, and nobody had asked"))
        return True

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
