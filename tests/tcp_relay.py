"""What stands between two ends of a connection where a test wants the network to misbehave? A relay of bytes.

async with TcpRelay(engine.port) as relay, routing([relay.url]) as router:
    relay.split = True          one byte to a segment from now on
    relay.stalled = True        nothing passes any more, in either direction
    relay.reset()               every open connection is reset
    await relay.refuse()        nobody listens; `accept` listens again, on the same port
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Self

from router.sockets import reset_when_closed


class TcpRelay:
    """Passes connections on to a port of this machine."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = 0
        self.split = False
        """Each byte goes in a segment of its own."""
        self.accepted = 0
        """Connections so far."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Connections open now."""
        return len(self._tasks)

    @property
    def stalled(self) -> bool:
        """Nothing passes."""
        return not self._flowing.is_set()

    @stalled.setter
    def stalled(self, stalled: bool) -> None:
        if stalled:
            self._flowing.clear()
        else:
            self._flowing.set()

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def accept(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=4096)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def refuse(self) -> None:
        """Listen no more; open connections go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def reset(self) -> None:
        """Reset every open connection, on both sides."""
        for writer in tuple(self._writers):
            reset_when_closed(writer.get_extra_info("socket"))
            writer.transport.abort()

    def half_close(self) -> None:
        """Say to both sides of every connection that nothing more will come."""
        for writer in tuple(self._writers):
            writer.write_eof()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        try:
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._to)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, their_writer))
                group.create_task(self._pass_on(their_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65_536):
                    await self._flowing.wait()
                    if writer.transport.is_closing():  # it was reset while nothing passed
                        return
                    for piece in [data[at : at + 1] for at in range(len(data))] if self.split else [data]:
                        writer.write(piece)
                        await writer.drain()
                        if self.split:
                            await asyncio.sleep(0)  # lets the loop send it before the next is written
        finally:
            self._writers.discard(writer)
            writer.close()
