"""What becomes of the two answers to one request that two engines share?

    prefill ──▶ PrefillLeg      held whole: it tells of the handover, or it is an error, which may be the client's answer
    decode  ──▶ Proof ──▶ Relay ──▶ client
                └── holds back until a first token shows that the KV cache has arrived

An engine may answer 200 to a stream before any of the cache has come, and tell in the stream that the transfer has failed. So nothing
reaches the client before the first token: until then the request can still be saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engines.errors import EngineError, TransferFailed
from engines.handover import BadHandshake
from router.relay import MAX_QUOTED_CHARS, Relay
from router.sse import Scanner

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from router.exchange import Exchange
    from router.upstream import ResponseHead

MAX_PREFILL_BYTES: Final = 16 * 1024 * 1024
"""A handshake names every block of the prompt, once for each group of layers: some 8 bytes for 16 tokens."""
MAX_UNPROVEN_BYTES: Final = 256 * 1024
"""More than this without a token is no answer that waits for its KV cache."""


class PrefillLeg(Relay):
    """Holds the prefill engine's answer."""

    most_held = MAX_PREFILL_BYTES

    __slots__ = ("_ended",)

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, [], _nothing)
        self._ended: Callable[[], None] = _nothing

    def when_over(self, ended: Callable[[], None]) -> None:
        """`ended` is called when the answer is whole, or never will be; at once where that is so already."""
        self._ended = ended
        if self.over:
            ended()

    @property
    def failed(self) -> bool:
        """It is over, and the prompt has not been computed."""
        return self.over and (self.error is not None or self.head_seen is None or self.head_seen.status != 200)

    @property
    def answer(self) -> bytes:
        """The answer's body. Raises BadHandshake where there is too much of it to be held."""
        if self._held_bytes > self.most_held:
            raise BadHandshake(f"its answer is longer than the {self.most_held >> 20} MiB that are held of one")
        return b"".join(self._held)

    # upstream.Sink

    def head(self, head: ResponseHead) -> None:
        """Nothing of it is the client's for now."""
        self.head_seen = head

    def finished(self, error: EngineError | None) -> None:
        """The engine is done with us."""
        self.error = error
        self.done.rung = True
        self._ended()
        self.done.ring()


class Proof:
    """Sink for the decode engine's answer: keeps it from its relay until a token has come."""

    __slots__ = ("_first_token", "_head", "_held", "_held_bytes", "_relay", "_scanner", "failure", "over", "proven")

    def __init__(self, relay: Relay, first_token: Callable[[], None]) -> None:
        """`first_token` is called when a stream has brought one, before the client has it."""
        self.proven = False
        """The relay has the answer; what happens now happens to an answer like any other."""
        self.over = False
        """The engine is done with us."""
        self.failure: TransferFailed | None = None
        self._relay = relay
        self._first_token = first_token
        self._head: ResponseHead | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._scanner = Scanner(streamed=True)

    def fail(self, why: str) -> None:
        """There will be no token: whoever waits for the relay goes on. Harmless once there is one."""
        if not self.proven and self.failure is None:
            self.failure = TransferFailed(why)
            self._relay.done.ring()

    # upstream.Sink

    def head(self, head: ResponseHead) -> None:
        """Hold a stream, and a failure of the engine; all else is proof, or says whose fault it is."""
        self._head = head
        streams = head.status == 200 and (head.header(b"content-type") or b"")[:17].lower() == b"text/event-stream"
        failed = head.status >= 500 and head.status != 503
        if not streams and not failed:
            self._give()

    def body(self, data: bytes, *, last: bool = False) -> None:
        """Look for the first token."""
        if self.proven:
            self._relay.body(data, last=last)
            return
        self._held.append(data)
        self._held_bytes += len(data)
        if self._head is None or self._head.status != 200:
            return
        if self._scanner.feed(data):
            self._first_token()
            self._give()
        elif self._held_bytes > MAX_UNPROVEN_BYTES:
            self._give()

    def waits(self) -> None:
        """The head has come, and nothing with it."""
        if self.proven:
            self._relay.waits()

    def switched(self, transport: asyncio.Transport, first: bytes) -> bool:
        """Nobody asked for that."""
        return self._relay.switched(transport, first) if self.proven else False

    def finished(self, error: EngineError | None) -> None:
        """The engine is done with us."""
        self.over = True
        head = self._head
        if self.proven:
            self._relay.finished(error)
        elif self.failure is not None:
            return
        elif error is not None:
            if head is None:
                self._relay.finished(error)
            else:
                self.fail(f"{error}")
        elif head is not None and head.status != 200:
            self.fail(f"the decode engine answered {head.status}: {self._quoted()}")
        elif self._scanner.failed:
            self.fail(f"the decode engine reported: {self._quoted()}")
        else:  # an answer without a token, such as one that ends at once
            self._give()
            self._relay.finished(None)

    # inside

    def _give(self) -> None:
        self.proven = True
        held, self._held = self._held, []
        if self._head is not None:
            self._relay.head(self._head)
        if held:
            self._relay.body(b"".join(held))

    def _quoted(self) -> str:
        return " ".join(b"".join(self._held)[: 4 * MAX_QUOTED_CHARS].decode("utf-8", "replace").split())[:MAX_QUOTED_CHARS]


def _nothing() -> None:
    pass
