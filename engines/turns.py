"""Whose turn is it? Many sources share one loop, and each of them could keep it for as long as it has something to say.

    one pass of the loop    ├─ A: 20 kB ─┼─ B: 12 kB ─┤ spent │ everything else
    the next                ├─ B: 30 kB, which waited ─┼─ C ─┤ spent │ everything else

All of them together may take in so much in one pass; who has more waits for a later one, in the order of asking. To read is less work than
to take in, but many sockets at once add up to as much: all together have their share of that too, and who comes when it is spent reads on in a
later pass.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PASS_BYTES = 32 << 10
MESSAGE_BYTES = 1024
"""What a message costs beside its bytes: with this, a pass is one or two milliseconds of work."""
PASS_READ_BYTES = 256 << 10
READ_BYTES = 64 << 10
"""Of one socket, at most at once."""
LITTLE_BYTES = 4 << 10
"""The same when the share of all is spent: one that the loop has found readable is read once."""


class Turns:
    """What is left of this pass of the loop for all who share it."""

    def __init__(self) -> None:
        self._left = PASS_BYTES
        self._unread = PASS_READ_BYTES
        self._renewal: asyncio.Handle | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reading: deque[Callable[[], None]] = deque()

    @property
    def spent(self) -> bool:
        """Whether nothing may be taken in any more in this pass."""
        return self._left <= 0

    def take(self, message_bytes: int) -> None:
        """A message of so many bytes has been taken in."""
        self._left -= MESSAGE_BYTES + message_bytes
        self._renew_soon()

    @property
    def room(self) -> int:
        """How many bytes may be read of a socket at once now."""
        return READ_BYTES if self._unread > 0 else LITTLE_BYTES

    def read(self, read_bytes: int, on: Callable[[], None]) -> bool:
        """So many bytes have been read. False: no more may be, until `on` is called in a later pass."""
        self._unread -= read_bytes
        self._renew_soon()
        if self._unread > 0:
            return True
        self._reading.append(on)
        return False

    async def mine(self) -> None:
        """Returns in a later pass, for the caller to take in at least one message."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._renew_soon()
        await turn

    def _renew_soon(self) -> None:
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """A new pass has begun. Whose turn it is comes in the one after, so that is renewed before."""
        self._left = PASS_BYTES
        self._unread = PASS_READ_BYTES
        self._renewal = None
        for _ in range(min(len(self._reading), PASS_READ_BYTES // READ_BYTES)):
            self._reading.popleft()()
        if self._reading:
            self._renew_soon()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited was cancelled
                self._renew_soon()
                turn.set_result(None)
                return
