"""Where bytes move: one engine's answer on its way to one client.

A `Relay` is the sink of an engine connection. It decides once, at the head, whether this answer is the client's; from
then on every piece read from the engine is written to the client in the same callback. Nothing is kept: when the client's socket
is full, the engine's is no longer read.

Of a stream of events only whole lines are passed on: an unfinished line is no use to anybody who reads events, and should the engine
die within it, the client must not be left with half an event, nor with one that our error event completes. (The network rarely cuts
a line; lines longer than `MAX_LINE_BYTES` pass as they come.)

Two kinds of answers are held whole, up to a limit: one that is not accepted (the engine is overloaded, and another may serve the
request), in case no other engine is left; and an error that is not JSON, which is put in the API's own shape.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from router.api import error_event
from router.errand import Bell
from router.retry import Attempt, judge
from router.sse import Scanner, Usage
from router.tracing import REQUEST_ID
from router.tunnel import Tunnel

if TYPE_CHECKING:
    from engines.errors import EngineError
    from router.exchange import Exchange, Headers
    from router.upstream import ResponseHead

MAX_HELD_BYTES: Final = 1024 * 1024
MAX_LINE_BYTES: Final = 64 * 1024
MAX_QUOTED_CHARS: Final = 1000
LINE_FEED: Final = 0x0A

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
OVERLOADED: Final = frozenset({429, 503})
"""Answers that are not the client's as long as another engine may be asked."""
NOT_PASSED_BACK: Final = HOP_BY_HOP | {REQUEST_ID}
"""The request's id is given by the router, whatever the engine calls it."""
_OF_THE_BODY: Final = frozenset({b"content-type", b"content-length", b"content-encoding", b"content-language", b"etag", b"last-modified"})
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_TAG: Final = re.compile(r"<[^>]*>")


class Relay:
    """Sink for one answer; `done` rings when it is over, whatever happened."""

    most_held: ClassVar[int] = MAX_HELD_BYTES
    """Bytes of an answer that is held; of a longer one only the beginning is kept."""

    __slots__ = (
        "_extra_headers",
        "_held",
        "_held_bytes",
        "_last",
        "_on_first_token",
        "_passing",
        "_scanner",
        "_streamed",
        "_token_seen",
        "_unfinished",
        "accepted",
        "done",
        "error",
        "exchange",
        "head_seen",
        "pieces",
    )

    def __init__(self, exchange: Exchange, extra_headers: Headers, on_first_token: Callable[[], None]) -> None:
        self.exchange = exchange
        self.done = Bell()
        self.head_seen: ResponseHead | None = None
        self.accepted = False
        """The answer is the client's, and no other engine will be asked."""
        self.error: EngineError | None = None
        self.pieces = 0
        """Of the answer, as the network brought them: of a stream, about one for each token."""
        self._extra_headers = extra_headers
        self._on_first_token = on_first_token
        self._passing = False
        """The client has the head, and gets every piece as it comes."""
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._last = b""
        """The piece passed on last."""
        self._unfinished = b""
        """The beginning of a line of events."""
        self._streamed = False
        self._scanner: Scanner | None = None
        self._token_seen = False

    # upstream.Sink

    def head(self, head: ResponseHead) -> None:
        """Take the answer for the client, or hold it."""
        if head.status == 101 and not self.exchange.upgrade:
            return  # `switched` refuses it
        self.head_seen = head
        if head.status == 101:
            return  # `switched` follows
        self.accepted = head.status not in OVERLOADED
        if self.accepted and (head.status < 400 or _is_json(head)):
            self._begin(head, None)

    def body(self, data: bytes, *, last: bool = False) -> None:
        """Pass a piece on."""
        scanner = self._scanner
        if scanner is None:
            self._pass_unread(data)
            return
        if (data[-1] != LINE_FEED or self._unfinished) and self._streamed:
            data = self._whole_lines(data)
            if not data:
                self.exchange.flush()
                return
        self._last = data
        self.pieces += 1
        self.exchange.write(data, last=last)
        if scanner.feed(data):
            self._first_token()

    def waits(self) -> None:
        """Let the client have the head."""
        self.exchange.flush()

    def finished(self, error: EngineError | None) -> None:
        """The engine is done with us."""
        self.error = error
        if self._passing:
            if error is not None:
                self._break_off(error)
            else:
                self._complete()
        elif self.accepted and error is None:
            self.give_held()
        self.done.ring()

    def switched(self, transport: asyncio.Transport, first: bytes) -> bool:
        """The engine has agreed to a WebSocket: join the two sockets, if the client asked for it."""
        if self.head_seen is None:
            return False
        self.accepted = True
        headers = [(name, value) for name, value in self.head_seen.headers if name == b"upgrade" or name not in NOT_PASSED_BACK]
        client = self.exchange.switch([*headers, (b"connection", b"Upgrade"), *self._extra_headers])
        Tunnel(client, transport, first, self._tunnel_ended)
        self._first_token()
        return True

    # for the proxy

    def give_held(self) -> None:
        """Give the client the held answer after all: it is the best there is."""
        head = self.head_seen
        if head is None:
            raise AssertionError
        self.accepted = True
        body = b"".join(self._held)
        if self._held_bytes <= self.most_held and (head.status < 400 or _is_json(head) or _parses(body, head)):
            self._begin(head, len(body))
            self.exchange.write(body)
            self.exchange.end()
            return
        kept = [(name, value) for name, value in head.headers if name not in _OF_THE_BODY and name not in NOT_PASSED_BACK]
        self.exchange.error(head.status, f"the engine answered {head.status}{_quoted(body, head)}", headers=kept + self._extra_headers)

    @property
    def over(self) -> bool:
        """The engine is done with this answer; its connection is back in the pool, or closed."""
        return self.done.rung

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

    def _begin(self, head: ResponseHead, length: int | None) -> None:
        """Send the head on. `length` is given where the whole body is known; else it is what the engine says."""
        headers: Headers = []
        encoded = False
        for name, value in head.headers:
            if name == b"content-length":
                length = int(value) if length is None and value.isdigit() else length
            elif name == b"content-type":
                self._streamed = value[:17].lower() == b"text/event-stream"
                headers.append((name, value))
            elif name not in NOT_PASSED_BACK:
                encoded = encoded or name == b"content-encoding"
                headers.append((name, value))
        headers += self._extra_headers
        if head.status < 300 and not encoded:
            self._scanner = Scanner(streamed=self._streamed)
        self._passing = True
        self.exchange.begin(head.status, headers, length)

    def _whole_lines(self, data: bytes) -> bytes:
        data = self._unfinished + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > MAX_LINE_BYTES:
            end = len(data)
        self._unfinished = data[end:]
        return data[:end]

    def _hold(self, data: bytes) -> None:
        if self._held_bytes <= self.most_held:
            self._held.append(data)
        self._held_bytes += len(data)

    def _complete(self) -> None:
        if self._unfinished:
            self.exchange.write(self._unfinished)
            if self._scanner is not None and self._scanner.feed(self._unfinished + b"\n"):
                self._first_token()
        if not self._streamed:
            self._first_token()
        self.exchange.end()

    def _break_off(self, error: EngineError) -> None:
        """Tell a streaming client in the stream, then end the connection improperly: it must not look complete."""
        if self._streamed and self._scanner is not None:  # else it is compressed, and a plain event would be noise in it
            verdict = judge(Attempt(error, client_bytes=1))
            within = b"" if self._last.endswith(_EVENT_ENDS) else b"\n"
            self.exchange.write(within + error_event(self.exchange.path, verdict.status, f"the answer broke off: {error}", verdict.code))
        self.exchange.abort()

    def _pass_unread(self, data: bytes) -> None:
        """A piece of what is held; of an error; or of something compressed, whose first piece stands for its first token."""
        if not self._passing:
            self._hold(data)
            return
        self.exchange.write(data)
        self._first_token()

    def _first_token(self) -> None:
        if not self._token_seen and self.head_seen is not None and self.head_seen.status < 300:
            self._token_seen = True
            self._on_first_token()

    def _tunnel_ended(self) -> None:
        self.done.ring()


def _is_json(head: ResponseHead) -> bool:
    kind = (head.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    return kind == b"application/json" or kind.endswith(b"+json") or kind == b"text/event-stream"


def _parses(body: bytes, head: ResponseHead) -> bool:
    """Whether a body is a JSON object, whatever its type says."""
    if head.header(b"content-encoding") is not None or not body.lstrip().startswith(b"{"):
        return False
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _quoted(body: bytes, head: ResponseHead) -> str:
    """What an error page says, in words."""
    if head.header(b"content-encoding") is not None:
        return ""
    words = " ".join(_TAG.sub(" ", body[: 8 * MAX_QUOTED_CHARS].decode("utf-8", "replace")).split())
    return f": {words[:MAX_QUOTED_CHARS]}" if words else ""
