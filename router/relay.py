"""Where bytes move: one engine's answer on its way to one client.

A `Relay` is the sink of an engine connection. It decides once, at the head, whether this answer is the client's (`accept`); from
then on every piece read from the engine is written to the client in the same callback. Nothing is kept: when the client's socket
is full, the engine's is no longer read.

An answer that is not accepted (the engine is overloaded, and another may serve the request) is held whole, up to a limit, in
case no other engine is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from router.api import error_event
from router.retry import Attempt, judge
from router.sse import Scanner, Usage

if TYPE_CHECKING:
    from engines.errors import EngineError
    from router.server import Exchange, Headers
    from router.upstream import ResponseHead

MAX_HELD_BYTES: Final = 1024 * 1024

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


class Relay:
    """Sink for one answer; `done` resolves when it is over, whatever happened."""

    def __init__(
        self, exchange: Exchange, accept: Callable[[int], bool], extra_headers: Headers, on_first_token: Callable[[], None]
    ) -> None:
        self.exchange = exchange
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.head_seen: ResponseHead | None = None
        self.accepted = False
        """The answer is being, or has been, given to the client."""
        self.error: EngineError | None = None
        self.bytes_sent = 0
        self._accept = accept
        self._extra_headers = extra_headers
        self._on_first_token = on_first_token
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._streamed = False
        self._scanner: Scanner | None = None
        self._token_seen = False

    # upstream.Sink

    def head(self, head: ResponseHead) -> None:
        """Take the answer for the client, or hold it."""
        self.head_seen = head
        self.accepted = self._accept(head.status)
        if self.accepted:
            self._begin(head)

    def body(self, data: bytes) -> None:
        """Pass a piece on."""
        if not self.accepted:
            if self._held_bytes < MAX_HELD_BYTES:
                self._held.append(data)
                self._held_bytes += len(data)
            return
        self.exchange.write(data)
        self.bytes_sent += len(data)
        if self._scanner is not None and self._scanner.feed(data):
            self._first_token()

    def finished(self, error: EngineError | None) -> None:
        """The engine is done with us."""
        self.error = error
        if self.accepted:
            if error is None:
                if not self._token_seen and self.head_seen is not None and self.head_seen.status < 300 and not self._streamed:
                    self._first_token()
                self.exchange.end()
            else:
                self._break_off(error)
        if not self.done.done():
            self.done.set_result(None)

    # for the proxy

    def give_held(self) -> None:
        """Give the client the held answer after all: it is the best there is."""
        if self.head_seen is None:
            raise AssertionError
        self.accepted = True
        self._begin(self.head_seen)
        for piece in self._held:
            self.exchange.write(piece)
        self.exchange.end()

    @property
    def over(self) -> bool:
        """The engine is done with this answer; its connection is back in the pool, or closed."""
        return self.done.done() and not self.done.cancelled()

    @property
    def streamed(self) -> bool:
        """The answer is a stream of events."""
        return self._streamed

    @property
    def usage(self) -> Usage | None:
        """Token counts, when the engine reported them."""
        return self._scanner.usage() if self._scanner is not None else None

    @property
    def stream_failed(self) -> bool:
        """The engine itself reported an error inside its stream."""
        return self._scanner is not None and self._scanner.failed

    # inside

    def _begin(self, head: ResponseHead) -> None:
        headers: Headers = []
        length: int | None = None
        encoded = False
        for name, value in head.headers:
            if name == b"content-length":
                length = int(value) if value.isdigit() else None
            elif name == b"content-type":
                self._streamed = value.startswith(b"text/event-stream")
                headers.append((name, value))
            elif name not in HOP_BY_HOP:
                encoded = encoded or name == b"content-encoding"
                headers.append((name, value))
        headers += self._extra_headers
        if head.status < 300 and not encoded:
            self._scanner = Scanner(streamed=self._streamed)
        self.exchange.begin(head.status, headers, length)

    def _first_token(self) -> None:
        self._token_seen = True
        self._on_first_token()

    def _break_off(self, error: EngineError) -> None:
        """Tell a streaming client in the stream, then end the connection improperly: it must not look complete."""
        if self._streamed:
            verdict = judge(Attempt(error, client_bytes=max(1, self.bytes_sent)))
            self.exchange.write(b"\n\n" + error_event(verdict.status, f"the answer broke off: {error}", verdict.code))
        self.exchange.abort()
