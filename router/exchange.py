"""What is one request to whoever answers it? An `Exchange`: what was asked, and the way to answer.

An answer is `begin`, any number of `write`s, `end`; or `abort`, which breaks the connection so that no client can take what it has
for complete. Framing is decided once, in `begin`: by length, in chunks, or, for an HTTP/1.0 client, until the connection closes.

Each system call costs as much as all our own work on a piece, so what is known to go together goes in one: the head waits for the first
piece (or `flush`), and the last piece, where the caller knows it, for the end.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

from router.api import api_error

if TYPE_CHECKING:
    from router.clients import ClientConnection
    from router.errand import Errand
    from router.tracing import Trace

Headers = list[tuple[bytes, bytes]]
"""Header names in lower case, with their values, in the order they came."""

STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
ONE_WRITE_BYTES: Final = 64 * 1024
"""Up to here, copying costs less than a second system call."""
WITHOUT_BODY: Final = frozenset({204, 304})


class Flow(Protocol):
    """Whoever feeds an exchange: told when the client's socket is full, and when it has room again."""

    def pause(self) -> None:
        """Stop feeding."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class Exchange:
    """One request and its answer. Writing to a client that has left is harmless."""

    __slots__ = (
        "_bare",
        "_chunked",
        "_connection",
        "_flow",
        "_pending",
        "_until_close",
        "body",
        "client",
        "ended",
        "errand",
        "headers",
        "http11",
        "keep_alive",
        "method",
        "path",
        "query",
        "started",
        "status",
        "trace",
        "upgrade",
    )

    def __init__(self, connection: ClientConnection, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        self._connection = connection
        self.method = method
        self.path, _, self.query = target.partition(b"?")
        self.headers = headers
        self.body = body
        self.http11 = True
        self.keep_alive = True
        self.upgrade = False
        """The client asks to go on by WebSocket; `switch` does so."""
        self.client = ""
        """The name of the client's API key; empty where none is asked for."""
        self.trace: Trace | None = None
        self.status = 0
        """Status sent to the client; 0 before `begin`."""
        self.started = False
        self.ended = False
        self.errand: Errand | None = None
        """What answers it; None before it begins and once it is over."""
        self._flow: Flow | None = None
        self._pending = b""
        """Written, and waiting for what goes with it."""
        self._chunked = False
        self._until_close = False
        self._bare = method == "HEAD"
        """The answer has no body, whatever its headers say."""

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

    @property
    def flow(self) -> Flow | None:
        """Who feeds this exchange now, and so is held back when the client reads slowly."""
        return self._flow

    @flow.setter
    def flow(self, flow: Flow | None) -> None:
        self._flow = flow
        if flow is not None and self._connection.full:
            flow.pause()

    def begin(self, status: int, headers: Headers, length: int | None) -> None:
        """The head. `length` None means it is not known: chunked for HTTP/1.1, until close for HTTP/1.0."""
        self.started = True
        self.status = status
        parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status]
        parts += [b"%b: %b\r\n" % header for header in headers]
        if self.trace is not None:
            parts.append(b"x-request-id: %b\r\n" % self.trace.request_id)
        if status in WITHOUT_BODY:
            self._bare = True
        elif length is not None:
            parts.append(b"content-length: %d\r\n" % length)
        elif self.http11:
            self._chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            self._until_close = True
            self.keep_alive = False
        if not self.keep_alive or self._connection.leaving:
            self.keep_alive = False
            parts.append(b"connection: close\r\n")
        elif not self.http11:
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")
        self._pending = b"".join(parts)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a piece of the body; `last`, when `end` follows at once."""
        if not data or self._bare:
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._pending:
            data = self._pending + data
            self._pending = b""
        if last and len(data) < ONE_WRITE_BYTES:
            self._pending = data
            return
        transport = self._connection.transport
        if transport is not None:
            transport.write(data)

    def flush(self) -> None:
        """Send what waits: nothing goes with it soon."""
        if self._pending:
            self._connection.write(self._pending)
            self._pending = b""

    def end(self) -> None:
        """The answer is complete; the connection goes on to its next request, if it may."""
        if self.ended:
            return
        self.ended = True
        self._flow = None  # from here on, whoever fed this exchange may be feeding another
        if self._chunked and not self._bare:
            self._pending += b"0\r\n\r\n"
        self.flush()
        self._connection.finished(self)

    def abort(self) -> None:
        """Break off: what was written is delivered, then the connection ends without the answer's proper end."""
        if self.ended:
            return
        self.ended = True
        self._flow = None
        self.keep_alive = False
        self.flush()
        if self._until_close:  # closing *is* this answer's proper end: only a reset says that it broke off
            self._connection.reset_when_closed()
        self._connection.finished(self)

    def switch(self, headers: Headers) -> tuple[asyncio.Transport, bytes] | None:
        """Answer 101 and hand over the client's socket, with what has come on it since; None when the client has left."""
        self.started = self.ended = True
        self.status = 101
        self._flow = None
        parts = [STATUS_LINES[101]]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if self.trace is not None:
            parts += (b"x-request-id: ", self.trace.request_id, b"\r\n")
        parts.append(b"\r\n")
        self._connection.write(b"".join(parts))
        return self._connection.hand_over()

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", headers: Headers | None = None) -> None:
        """Send a whole answer at once."""
        self.begin(status, [(b"content-type", content_type), *(headers or [])], len(body))
        self.write(body, last=True)
        self.end()

    def error(self, status: int, message: str, code: str | None = None, headers: Headers | None = None) -> None:
        """Send an error in the shape of the API that the path belongs to."""
        self.respond(status, api_error(self.path, status, message, code), headers=headers)
