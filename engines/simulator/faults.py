r"""What can be made to go wrong with a simulated engine? A script of faults, each taken once by the next request it fits.

    engine.faults.add(Answer(status=503))                           the next inference request gets a 503
    engine.faults.add(Break(after_chunks=5, end="reset"), times=2)  the next two streams are reset after five events
    engine.faults.add(Raw((b"HTTP/1.1 200 OK\r\n", b"...")), path="/v1/models")

KV faults are switches on `engine.faults.kv`, and `engine.faults.publish` sends a frame of the test's own.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

import msgspec

from engines.simulator.publisher import Publisher, PublisherFaults

INFERENCE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate"})


class End(enum.StrEnum):
    """How a connection ends."""

    CLOSE = "close"
    RESET = "reset"
    HANG = "hang"
    """Not at all: silence, until the client leaves."""


class Answer(msgspec.Struct, frozen=True, tag_field="fault", tag="answer"):
    """A status, a body and headers of the test's choice."""

    status: int = 500
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class Raw(msgspec.Struct, frozen=True, tag_field="fault", tag="raw"):
    """Bytes written to the socket as they are, one part after the other, then an end."""

    parts: tuple[bytes, ...] = ()
    pause_s: float = 0.0
    """Between parts."""
    end: End = End.CLOSE


class Break(msgspec.Struct, frozen=True, tag_field="fault", tag="break"):
    """A true answer that ends after so many stream events; 0 ends it before its head."""

    after_chunks: int = 0
    end: End = End.RESET
    bytes_more: int = 0
    """So much of the next event is sent too."""


class Fail(msgspec.Struct, frozen=True, tag_field="fault", tag="fail"):
    """A stream that, after so many events, reports an error and ends in order: vLLM's way to say that the process that computes is dead."""

    after_chunks: int


class Delay(msgspec.Struct, frozen=True, tag_field="fault", tag="delay"):
    """A true answer whose head comes late."""

    head_s: float


HttpFault = Answer | Raw | Break | Fail | Delay


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /_sim/faults`."""

    fault: HttpFault | None = None
    path: str | None = None
    times: int | None = 1
    kv: PublisherFaults | None = None
    clear: bool = False


class _Planned:
    __slots__ = ("fault", "left", "path")

    def __init__(self, fault: HttpFault, path: str | None, left: int | None) -> None:
        self.fault = fault
        self.path = path
        self.left = left


class Faults:
    """The faults planned for one engine; they outlive its restarts."""

    def __init__(self, publisher: Callable[[], Publisher]) -> None:
        self._publisher = publisher
        self._planned: deque[_Planned] = deque()

    @property
    def kv(self) -> PublisherFaults:
        """The switches of the event feed."""
        return self._publisher().faults

    def add(self, fault: HttpFault, *, path: str | None = None, times: int | None = 1) -> None:
        """Plan a fault for the next `times` requests (None: for all) to `path` (None: any inference route)."""
        self._planned.append(_Planned(fault, path, times))

    def clear(self) -> None:
        """Plan nothing any more, and mend the event feed."""
        self._planned.clear()
        self._publisher().faults = PublisherFaults()

    def publish(self, payload: bytes, *, seq: int | None = None) -> None:
        """Publish a payload of the test's choice: as the next batch, or live only with a number of the test's choice."""
        if seq is None:
            self._publisher().publish(payload)
        else:
            self._publisher().send(seq, payload)

    def apply(self, script: Script) -> None:
        """Do what a `POST /_sim/faults` asks."""
        if script.clear:
            self.clear()
        if script.kv is not None:
            self._publisher().faults = script.kv
        if script.fault is not None:
            self.add(script.fault, path=script.path, times=script.times)

    def take(self, path: str) -> HttpFault | None:
        """The fault planned for a request to `path`, if any; the first one that fits."""
        for planned in self._planned:
            if planned.path != path and not (planned.path is None and path in INFERENCE_PATHS):
                continue
            if planned.left is not None:
                planned.left -= 1
                if not planned.left:
                    self._planned.remove(planned)
            return planned.fault
        return None
