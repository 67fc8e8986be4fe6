"""Which trace is a request part of, and what is it called? W3C Trace Context, and `x-request-id`.

    client ── traceparent 00-4bf9…-00f0…-01 ──▶ router ── traceparent 00-4bf9…-<ours>-01 ──▶ engine
           ── x-request-id: abc              ──▶        ── x-request-id: abc              ──▶        both echo it

The router is one span of the trace: the engine's parent is the router, whose id is in the log line of the request. A trace is continued
and never begun: whether to trace is its client's decision, and without one the engine's own.
"""

from __future__ import annotations

import re
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
_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NO_TRACE: Final = b"0" * 32
_NO_SPAN: Final = b"0" * 16


class Trace:
    """One request's id, and its place in a trace."""

    __slots__ = ("lines", "request_id", "span_id", "trace_id")

    def __init__(self, headers: Headers, bits: Callable[[int], int]) -> None:
        """Read a request's headers; `bits(n)` gives n random bits, for an id where the client gives none that is usable, and for the span."""
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
        self.trace_id = self.span_id = b""
        self.lines = b"x-request-id: %b\r\n" % self.request_id
        """Header lines for the engine."""
        if parent is not None and (found := _parse(parent)) is not None:
            self.trace_id, flags = found
            self.span_id = b"%016x" % (bits(64) or 1)
            self.lines += b"traceparent: 00-%b-%b-%b\r\n" % (self.trace_id, self.span_id, flags)
            if state is not None:
                self.lines += b"tracestate: %b\r\n" % state

    @property
    def fields(self) -> dict[str, str]:
        """What a log line says of it."""
        fields = {"request_id": self.request_id.decode("ascii")}
        if self.trace_id:
            fields |= {"trace_id": self.trace_id.decode("ascii"), "span_id": self.span_id.decode("ascii")}
        return fields


def _is_usable(request_id: bytes) -> bool:
    return 0 < len(request_id) <= MAX_ID_BYTES and not request_id.translate(None, _ID_BYTES) and _NOT_IN_ID not in request_id


def _parse(parent: bytes) -> tuple[bytes, bytes] | None:
    """Trace id and flags; None when it is not valid. Of a later version, what this one knows is read, as the standard says."""
    found = _PARENT.match(parent)
    if found is None:
        return None
    version, trace_id, span_id, flags = found.groups()
    if trace_id == _NO_TRACE or span_id == _NO_SPAN or version == b"ff":
        return None
    if len(parent) > found.end() and (version == b"00" or parent[found.end()] != ord("-")):
        return None
    return trace_id, flags
