"""What does a client ask? Bytes in, messages out, however they are cut; what cannot be served is refused in words.

Knows the grammar of HTTP/1 (httptools) and its limits, and nothing of sockets, turns and answers: those are the listener's.

    feed ──httptools──▶ head: `admits`, `expected` ──▶ body ──▶ `asked`          or, once and for all, `refused`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import httptools

if TYPE_CHECKING:
    from router.exchange import Headers

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_CHUNK_OVERHEAD: Final = 16
"""Bytes of framing for each byte of a chunked body; one byte to a chunk takes five."""
MAX_OFFERS: Final = 16
"""Requests in one read that offer to upgrade."""


class Listener(Protocol):
    """Who is told what was read. Called from within `feed`."""

    def admits(self, target: bytes, headers: Headers) -> str:
        """A head has come: why its sender may not come in, or empty."""
        ...

    def expected(self) -> None:
        """The client sends its body when it is told to go on."""
        ...

    def asked(  # noqa: PLR0913  a struct between the two would cost more than making the exchange
        self, method: str, target: bytes, headers: Headers, body: bytes, *, http11: bool, keep_alive: bool, upgrade: bool
    ) -> None:
        """A request is whole. `target`: path and query. `headers`: names in lower case, no trailers.

        `keep_alive`: the connection may go on after it. `upgrade`: it asks to go on by WebSocket; what follows is no HTTP.
        """
        ...

    def refused(self, target: bytes, status: int, words: str) -> None:
        """What came cannot be served, and nothing behind it will be read."""
        ...


class RequestReader:
    """Reads one connection's requests."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_headers",
        "_last_request",
        "_listener",
        "_max_body_bytes",
        "_message_bytes",
        "_method",
        "_parser",
        "_target",
        "deaf",
        "in_head",
        "number",
        "receiving",
    )

    def __init__(self, listener: Listener, max_body_bytes: int) -> None:
        self._listener = listener
        self._max_body_bytes = max_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._last_request = False
        """What came last said `Connection: close`."""
        self._method = ""
        self._target = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._message_bytes = 0
        self.number = 0
        """Of the message being received."""
        self.receiving = False
        """Part of a message has come."""
        self.in_head = False
        """Its head is not whole."""
        self.deaf = False
        """Nothing that still comes is a request."""

    def feed(self, data: bytes) -> bytes:
        """Read on. What comes back is behind a request for a WebSocket, and no HTTP."""
        number, unfinished, early = self.number, self.receiving, b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            early = self._upgrade(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self._not_http(error)
        if unfinished and self.receiving and number == self.number:
            self._message_bytes += len(data)  # a header or trailer without an end stays inside the parser, and only shows here
            if self._message_bytes > MAX_HEAD_BYTES + MAX_CHUNK_OVERHEAD * self._body_bytes:
                self._refuse_long_head()
        return early

    def close(self) -> None:
        """Read no more. Parser and listener hold this object; without those cycles, everything is freed at once."""
        del self._parser, self._listener

    # httptools

    def on_message_begin(self) -> None:
        """A request starts."""
        self.number += 1
        self.receiving = self.in_head = True
        self._message_bytes = 0
        self._target = b""
        self._headers = []
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """The target, perhaps in pieces."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, whole. Trailers come here too, and are dropped: they must not pass for headers."""
        if self.in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole: refuse what cannot be served before its body comes, and let a waiting client go on."""
        self.in_head = False
        words = self._listener.admits(self._target, self._headers)
        if words:
            self._refuse(401, words)
        expects = self._check_headers()
        if expects is None or self.deaf or self._parser.get_http_version() == "1.0":
            return
        if expects.lower() == b"100-continue":
            self._listener.expected()
        else:
            self._refuse(417, "this expectation is not known here; only `100-continue` is")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self.deaf:
            return
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._max_body_bytes:
            self._refuse_long_body()

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self.deaf:
            return
        parser = self._parser
        self._method = parser.get_method().decode("ascii")
        upgrade: bool = parser.should_upgrade()
        if upgrade:
            if self._method != "GET" or (b"upgrade", b"websocket") not in [(name, value.lower()) for name, value in self._headers]:
                return  # `_upgrade` follows
            self.deaf = True
        target = self._target if self._target.startswith(b"/") else origin_form(self._target)
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        keep_alive = parser.should_keep_alive() and not upgrade
        self._last_request = not keep_alive
        self._body = []
        self.receiving = False
        http11 = parser.get_http_version() != "1.0"
        self._listener.asked(self._method, target, self._headers, body, http11=http11, keep_alive=keep_alive, upgrade=upgrade)

    # inside

    def _check_headers(self) -> bytes | None:
        """Refuse what cannot be served; what the client expects, if anything."""
        expects: bytes | None = None
        head_bytes = len(self._target)
        for name, value in self._headers:
            head_bytes += len(name) + len(value) + 4
            if name == b"content-length":
                if value.isdigit() and int(value) > self._max_body_bytes:
                    self._refuse_long_body()
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    self._refuse(501, "this transfer coding is not known here; only `chunked` is")
            elif name == b"expect":
                expects = value
        if head_bytes > MAX_HEAD_BYTES:
            self._refuse_long_head()
        return expects

    def _upgrade(self, rest: bytes) -> bytes:
        """The parser has stopped at an offer to upgrade: `rest` is of the other protocol if it was taken, else to be read as HTTP.

        An offer (Java's client makes one, of h2c, with every request) is declined by reading the request again without it: the parser
        takes what follows, the request's own body included, for the other protocol.
        """
        for _ in range(MAX_OFFERS):
            if self.deaf:
                return rest
            if self._method == "CONNECT":
                self._refuse(405, "this is no proxy for other protocols")
                return b""
            version = self._parser.get_http_version()
            self._parser = httptools.HttpRequestParser(self)
            data = b"%b %b HTTP/%b\r\n%b\r\n%b" % (
                self._method.encode(),
                self._target,
                version.encode(),
                b"".join(_without_offer(self._headers)),
                rest,
            )
            try:
                self._parser.feed_data(data)
                return b""
            except httptools.HttpParserUpgrade as offer:
                rest = data[offer.args[0] :]
            except httptools.HttpParserError as error:
                self._not_http(error)
                return b""
        self._refuse(400, "too many offers to upgrade at once")
        return b""

    def _not_http(self, error: Exception) -> None:
        if isinstance(error, httptools.HttpParserCallbackError) and not self.deaf:
            raise error  # ours: the loop logs it and closes the connection
        if self._last_request:
            self.deaf = True  # what comes after a last request is no request, and no reason to disturb its answer
        else:
            self._refuse(400, f"not a valid HTTP/1.1 request: {error}")

    def _refuse_long_head(self) -> None:
        self._target = b""
        self._refuse(431, f"the request line and headers are longer than {MAX_HEAD_BYTES} bytes")

    def _refuse_long_body(self) -> None:
        self._refuse(413, f"the request body is longer than {self._max_body_bytes} bytes (set by max_body_bytes)")

    def _refuse(self, status: int, words: str) -> None:
        if not self.deaf:
            self.deaf = True
            self.receiving = False
            self._body = []
            self._listener.refused(self._target, status, words)


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
