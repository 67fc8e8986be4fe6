"""How do two sockets become one? After a 101 both ends speak WebSocket, and the router only carries bytes.

    client socket ◀──── _End ◀───▶ _End ────▶ engine socket

What one reads, the other writes; the end of either is the end of both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Tunnel:
    """Carries bytes between two sockets until one of them ends, then calls `ended`, once."""

    def __init__(
        self, client: tuple[asyncio.Transport, bytes] | None, engine: asyncio.Transport, first: bytes, ended: Callable[[], None]
    ) -> None:
        """`client` is its socket and what it has sent already (None: it has left); `first`, what the engine has sent already."""
        self._ended: Callable[[], None] | None = ended
        if client is None:
            engine.abort()
            self._over()
            return
        transport, early = client
        for source, sink in ((transport, engine), (engine, transport)):
            source.set_protocol(_End(sink, self._over))
        if early:
            engine.write(early)
        if first:
            transport.write(first)

    def _over(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


class _End(asyncio.Protocol):
    """Reads one socket and writes the other."""

    def __init__(self, other: asyncio.Transport, over: Callable[[], None]) -> None:
        self._other = other
        self._over = over

    def data_received(self, data: bytes) -> None:
        if not self._other.is_closing():
            self._other.write(data)

    def pause_writing(self) -> None:
        if not self._other.is_closing():
            self._other.pause_reading()  # this end's own socket is full: the other one is read no further

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._other.close()  # what it has been given is delivered
        else:
            self._other.abort()
        self._over()
