"""What did an engine publish while we were not listening? Its replay socket says, as far back as its memory goes.

    DEALER ──["", first]──▶ ROUTER
           ◀──["", (topic,) seq, payload]── …       the topic frame is missing before vLLM 0.26
           ◀──["", (topic,) ff·8, ""]──             the end

There is no "too old": a reply that begins later than asked says the rest is gone. Nor is every reply sure to come, since a ROUTER
drops what its queue does not hold; then the answer has a hole or no end, and the asker asks again from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
import xxhash
import zmq
import zmq.asyncio

SEQ_BYTES = 8
_END = b"\xff" * SEQ_BYTES


class Message(msgspec.Struct, frozen=True):
    """One published batch, undecoded."""

    seq: int
    payload: bytes

    @property
    def fingerprint(self) -> int:
        """Tells this payload from another one with the same number."""
        return xxhash.xxh3_64_intdigest(self.payload)


def read_frames(frames: Sequence[bytes]) -> Message | None:
    """The message in `[topic, seq, payload]` or `[seq, payload]`, from either socket; None when it is neither, or an end marker."""
    if len(frames) not in {2, 3} or len(frames[-2]) != SEQ_BYTES or frames[-2] == _END:
        return None
    return Message(int.from_bytes(frames[-2], "big"), frames[-1])


async def replay(context: zmq.asyncio.Context, endpoint: str, first: int, *, silence_s: float) -> AsyncGenerator[Message, None]:
    """Messages from number `first` on, as the engine sends them; ends at its end marker.

    Raises TimeoutError when nothing comes for `silence_s`, be it at once or half-way, and at once when nothing ever can, the endpoint
    being none. A socket of its own for each question, so
    that a late answer to an earlier one is never taken for the answer to this. Close it with `contextlib.aclosing`.
    """
    with context.socket(zmq.DEALER, socket_class=zmq.asyncio.Socket) as dealer:
        dealer.linger = 0
        dealer.ipv6 = True
        dealer.rcvhwm = 0
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            raise TimeoutError(f"{endpoint}: {error}") from error
        await dealer.send_multipart([b"", first.to_bytes(SEQ_BYTES, "big")])
        while True:
            async with asyncio.timeout(silence_s):
                frames = await dealer.recv_multipart()
            if len(frames) > 1 and frames[-2] == _END:
                return
            if message := read_frames(frames[1:] if frames[0] == b"" else frames):
                yield message
