"""How do a publisher's messages get into this process? A ZMQ SUB socket of our own, on asyncio's transports.

libzmq reads in a thread of its own and wakes the loop for each message, which took 150 to 200 µs of processor time a message; here a
message is handed over in the callback of the socket that it came from, as is done with everything else this process reads.

    connect, or listen for publishers ──handshake──▶ joined() ──▶ messages([…]) … ──▶ ended()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, cast

from engines.frames import GREETING, PING, FrameReader, NotAPublisher
from engines.turns import READ_BYTES, Turns
from engines.types import KvSource
from engines.urls import WILDCARDS, split_tcp

HANDSHAKE_TIMEOUT_S = 10.0
HEARTBEAT_S = 5.0
MISSED_HEARTBEATS = 3
"""A host that vanishes says no goodbye: after so many heartbeats without a byte from it, it is gone."""
MAX_MESSAGE_BYTES = 64 << 20
_buffer = memoryview(bytearray(READ_BYTES))
"""For all: what was read is copied out before anybody else reads."""


class BadAddress(Exception):
    """Nothing can be connected to or listened on there; the message says why."""


class Reader(Protocol):
    """Who reads. None of its methods may block; what they raise is for them to keep."""

    def joined(self) -> None:
        """A publisher has been found. Again for each further one, where publishers connect to us."""
        ...

    def messages(self, messages: list[list[bytes]]) -> bool:
        """The next messages of one publisher, each as its frames. False: no more can be taken until `Subscription.resume`."""
        ...

    def ended(self) -> None:
        """A publisher that had joined is gone, or nothing came of our connection to one."""
        ...


class Subscription:
    """The connections to the publisher of one source, or from it."""

    def __init__(self, source: KvSource, reader: Reader, turns: Turns) -> None:
        self.turns = turns
        self.listens = source.bind
        """Publishers connect to us, and so does whoever else finds the port: those are nobody's business."""
        self._reader = reader
        self._topic = source.topic.encode()
        self._open: set[_Connection] = set()
        self._paused = self._waits = False
        """For the reader to have room; for its turn."""
        self.wrong = ""
        """Why what is at the other end is no publisher; empty while nothing is known against it."""

    def pause(self) -> None:
        """Read no further than what has been read: the publisher keeps what comes."""
        self._set(paused=True, waits=self._waits)

    def resume(self) -> None:
        """Read on."""
        self._set(paused=False, waits=self._waits)

    def took(self, read_bytes: int) -> None:
        """So many bytes have been read: others have their turn when that was much."""
        if not self.turns.read(read_bytes, self._go_on):
            self._set(paused=self._paused, waits=True)

    def _go_on(self) -> None:
        self._set(paused=self._paused, waits=False)

    def _set(self, *, paused: bool, waits: bool) -> None:
        before, self._paused, self._waits = self._paused or self._waits, paused, waits
        if before != (paused or waits):
            for connection in self._open:
                connection.read(on=before)

    def protocol(self) -> asyncio.BufferedProtocol:
        """For one connection."""
        return _Connection(self, FrameReader(self._topic, MAX_MESSAGE_BYTES), self._reader)

    def close(self) -> None:
        """Nothing is told any more."""
        for connection in tuple(self._open):
            connection.close()

    def opened(self, connection: _Connection) -> None:
        """There is one more connection."""
        self._open.add(connection)
        if self._paused or self._waits:
            connection.read(on=False)

    def closed(self, connection: _Connection) -> None:
        """There is one less."""
        self._open.discard(connection)


@asynccontextmanager
async def subscribed(source: KvSource, reader: Reader, turns: Turns | None = None) -> AsyncIterator[Subscription]:
    """While inside, `reader` is told; the connection is made but for the handshake, or we listen. Raises BadAddress, OSError.

    Those who share `turns` share what is read in one pass of the loop.
    """
    loop = asyncio.get_running_loop()
    subscription = Subscription(source, reader, turns or Turns())
    address, path = split_tcp(source.events), _ipc_path(source.events)
    server: asyncio.Server | None = None
    if address is None and path is None:
        raise BadAddress(f"{source.events} is neither tcp://host:port nor ipc://path")
    try:
        match source.bind, address:
            case True, (host, port):
                server = await loop.create_server(subscription.protocol, None if host in WILDCARDS else host, port)
            case True, None:
                server = await loop.create_unix_server(subscription.protocol, path)
            case False, (host, port):
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    await loop.create_connection(subscription.protocol, host, port)
            case _:
                await loop.create_unix_connection(subscription.protocol, path)
        yield subscription
    finally:
        if server is not None:
            server.close()
        subscription.close()


def _ipc_path(endpoint: str) -> str | None:
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or not path:
        return None
    return "\0" + path[1:] if path.startswith("@") else path


class _Connection(asyncio.BufferedProtocol):
    """One TCP or Unix connection."""

    def __init__(self, subscription: Subscription, frames: FrameReader, reader: Reader) -> None:
        self._subscription = subscription
        self._frames = frames
        self._reader: Reader | None = reader
        self._transport = cast("asyncio.Transport", None)
        self._heartbeat: asyncio.TimerHandle | None = None
        self._silent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(GREETING)
        self._heartbeat = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._check_handshake)
        self._subscription.opened(self)

    def get_buffer(self, size: int) -> memoryview:
        del size
        return _buffer[: self._subscription.turns.room]

    def buffer_updated(self, size: int) -> None:
        if self._reader is None:
            return
        self._subscription.took(size)
        self._silent = 0
        was_ready = self._frames.ready
        try:
            heard = self._frames.feed(bytes(_buffer[:size]))
        except NotAPublisher as error:
            self._refuse(str(error))
            return
        if heard.answer:
            self._transport.write(heard.answer)
        if not was_ready and self._frames.ready:
            self._beat()
            self._reader.joined()
        if heard.messages and not self._reader.messages(heard.messages):
            self._subscription.pause()

    def connection_lost(self, error: Exception | None) -> None:
        del error
        reader = self._reader
        self.close()
        if reader is not None and (self._frames.ready or not self._subscription.listens):
            reader.ended()

    def read(self, *, on: bool) -> None:
        """Whether to read."""
        if self._transport.is_closing():
            return
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def close(self) -> None:
        """Tell nobody any more, and hang up."""
        self._reader = None
        self._subscription.closed(self)
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._transport.abort()

    def _check_handshake(self) -> None:
        if not self._frames.ready:
            self._refuse(f"it did not introduce itself within {HANDSHAKE_TIMEOUT_S:g} s")

    def _refuse(self, why: str) -> None:
        self._subscription.wrong = why
        self._transport.abort()

    def _beat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._silent += 1
        if self._silent > MISSED_HEARTBEATS and self._transport.is_reading():
            self._transport.abort()
            return
        self._transport.write(PING)
        self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
