"""How do the parent and a worker talk? Over a socket pair of their own, that nobody else can reach and that ends when either does.

Either side asks, and answers while it waits for an answer of its own. It does without the bus, because it is what is needed when the
bus is away: who is ready, what has happened, what operators change.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final, Self, TypeVar

import msgspec

from router.processes.messages import Answer, Ask, Frame, Request

LENGTH_BYTES: Final = 4

T = TypeVar("T")
Serve = Callable[[Request], Awaitable[object]]
"""What comes of a request: something that msgpack can hold."""

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_frames: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class ChannelClosed(Exception):
    """The other side has ended, or does not answer."""


class Channel:
    """One end. `run` must be running for anything to be heard."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, serve: Serve) -> None:
        self._reader = reader
        self._writer = writer
        self._serve = serve
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._closed = False

    @property
    def _ended(self) -> bool:
        """The other side has; what was written may tell before what is read does."""
        return self._closed or self._writer.is_closing()

    @classmethod
    async def over(cls, sock: socket.socket, serve: Serve) -> Self:
        """On one socket of a pair; it is the channel's from now on."""
        sock.setblocking(False)  # noqa: FBT003  socket's own signature
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        return cls(reader, writer, serve)

    async def run(self) -> None:
        """Hear and answer; returns when the other side has ended."""
        try:
            async with asyncio.TaskGroup() as answering:
                while (frame := await self._next()) is not None:
                    match frame:
                        case Ask(number, request):
                            answering.create_task(self._answer(number, request))
                        case Answer(number, result):
                            waiting = self._waiting.pop(number, None)
                            if waiting is not None and not waiting.done():
                                waiting.set_result(result)
                self._end()
        finally:
            self._end()

    def tell(self, request: Request) -> None:
        """Send what wants no answer."""
        self._send(Ask(0, request))

    async def ask(self, request: Request, answer: type[T], *, timeout_s: float) -> T:
        """Raises ChannelClosed when the other side has ended, and TimeoutError."""
        if self._ended:
            raise ChannelClosed
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, request))
        try:
            async with asyncio.timeout(timeout_s):
                return msgspec.msgpack.decode(await waiting, type=answer)
        finally:
            self._waiting.pop(number, None)

    async def flush(self) -> None:
        """What was told has been handed to the kernel, unless the other side has ended."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def _answer(self, number: int, request: Request) -> None:
        try:
            result = await self._serve(request)
        except Exception:  # noqa: BLE001  logged whole; the channel serves other questions too
            _log.exception("a request of another process failed", extra={"fields": {"request": type(request).__name__}})
            return  # whoever asked has a time-out, and more than this one question
        if number:
            self._send(Answer(number, _encode(result)))

    def _send(self, frame: Frame) -> None:
        data = _encode(frame)
        if not self._ended:
            self._writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    async def _next(self) -> Frame | None:
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            return _frames.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def _end(self) -> None:
        self._closed = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ChannelClosed())
        self._waiting.clear()
        self._writer.close()
