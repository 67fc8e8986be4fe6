"""Which trace is a request part of, and what is it called? W3C Trace Context, and `x-request-id`.

    client ── traceparent 00-4bf9…-00f0…-01 ──▶ router ── traceparent 00-4bf9…-<ours>-01 ──▶ engine
           ── x-request-id: abc              ──▶        ── x-request-id: abc              ──▶        both echo it

The router is one span of the trace: the engine's parent is the router, whose id is in the log line of the request. A trace is continued
and not begun, whether to trace being its client's decision, unless the router is told to begin some (`trace_ratio`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Headers = list[tuple[bytes, bytes]]

REQUEST_ID: Final = b"x-request-id"
TRACE_HEADERS: Final = frozenset({REQUEST_ID, b"traceparent", b"tracestate"})
"""Written by the router, from what the client says where that is usable."""

MAX_ID_BYTES: Final = 128
_ID_BYTES: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:@/+=~-"
_NOT_IN_ID: Final = b"___"
"""How vLLM's P2P connector writes addresses into an id."""
_VERSION: Final = b"00"
_LENGTH, _TRACE_AT, _SPAN_AT, _SPAN_END = 55, 3, 36, 52
"""Of a parent: `00-` trace `-` span `-` flags."""
_HEX: Final = b"0123456789abcdef"
_DASH: Final = ord("-")
_NO_TRACE: Final = b"0" * 32
_NO_SPAN: Final = b"0" * 16


class Trace:
    """One request's id, and its place in a trace."""

    __slots__ = ("_parent", "_span", "lines", "request_id")

    def __init__(self, headers: Headers, bits: Callable[[int], int], *, begins: bool = False) -> None:
        """Read a request's headers; `bits(n)` gives n random bits, for an id where the client gives none that is usable, and for the span.

        `begins`: a trace is begun where the client is in none.
        """
        request_id = parent = state = None
        for name, value in headers:
            if name in TRACE_HEADERS:
                if name == REQUEST_ID:
                    request_id = value
                elif name == b"traceparent":
                    parent = value if parent is None else b""  # two are none
                else:
                    state = value if state is None else state + b"," + value
        self.request_id = request_id if request_id is not None and _is_usable(request_id) else b"%032x" % bits(128)
        self._parent = None if parent is None else _as_known(parent)
        if self._parent is None and begins:
            self._parent = b"00-%032x-%b-01" % (bits(128) or 1, _NO_SPAN)
        self._span = 0
        self.lines = b"x-request-id: %b\r\n" % self.request_id
        """Header lines for the engine."""
        if self._parent is not None:
            self._span = bits(64) or 1
            self.lines += b"traceparent: %b%016x%b\r\n" % (self._parent[:_SPAN_AT], self._span, self._parent[_SPAN_END:])
            if state is not None:
                self.lines += b"tracestate: %b\r\n" % state

    @property
    def trace_id(self) -> str:
        """The trace that the client began; empty when it did not."""
        return "" if self._parent is None else self._parent[_TRACE_AT : _SPAN_AT - 1].decode("ascii")

    @property
    def span_id(self) -> str:
        """The router's part of it; empty when there is none."""
        return "" if self._parent is None else f"{self._span:016x}"

    @property
    def parent_id(self) -> str:
        """The span of whoever sent the request; empty where the trace begins here."""
        parent = _NO_SPAN if self._parent is None else self._parent[_SPAN_AT:_SPAN_END]
        return "" if parent == _NO_SPAN else parent.decode("ascii")

    @property
    def sampled(self) -> bool:
        """Whether spans of it are to be kept, as whoever began it has decided."""
        return self._parent is not None and int(self._parent[-2:], 16) & 1 == 1

    @property
    def fields(self) -> dict[str, str]:
        """What a log line says of it."""
        fields = {"request_id": self.request_id.decode("ascii")}
        if self._parent is not None:
            fields |= {"trace_id": self.trace_id, "span_id": self.span_id}
        return fields


def _is_usable(request_id: bytes) -> bool:
    return 0 < len(request_id) <= MAX_ID_BYTES and not request_id.translate(None, _ID_BYTES) and _NOT_IN_ID not in request_id


def _as_known(parent: bytes) -> bytes | None:
    """A parent as version 00 writes it; None when it is not valid. Of a later version, what this one knows is read, as W3C says."""
    if len(parent) > _LENGTH and parent[:2] != _VERSION and parent[_LENGTH : _LENGTH + 1] == b"-":
        parent = parent[:_LENGTH]
    if (
        len(parent) != _LENGTH
        or parent.translate(None, _HEX) != b"---"
        or not parent[2] == parent[_SPAN_AT - 1] == parent[_SPAN_END] == _DASH
        or parent[:2] == b"ff"
        or parent[_TRACE_AT : _SPAN_AT - 1] == _NO_TRACE
        or parent[_SPAN_AT:_SPAN_END] == _NO_SPAN
    ):
        return None
    return parent if parent[:2] == _VERSION else _VERSION + parent[2:]
