"""One of several processes on one port. Started by `parent`, which is at the other end of its standard input.

python -m router.processes.worker: not a command for people.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

import msgspec

from discovery import logs
from discovery.config import ConfigError
from discovery.logs import event
from discovery.reasons import reasons
from router.answers import GroupSilent
from router.processes.channel import Channel, ChannelClosed
from router.processes.messages import AdminCall, Failed, GetPage, GetPart, GetReadiness, Orders, PeerGone, Readiness, Request, Up
from router.processes.part import Inside, Part
from router.running import stopped_by_signals
from router.settings import ServeSettings

if TYPE_CHECKING:
    from asyncio import Future

GROUP_TIMEOUT_S: Final = 5.0
KNOW_WITHIN_S: Final = 10.0
"""How long one that comes back puts off listening for engines that do not join; the others serve meanwhile."""
POLL_S: Final = 0.02

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Worker:
    """The worker's side of the channel."""

    def __init__(self) -> None:
        self.orders: Future[Orders] = asyncio.get_running_loop().create_future()
        self._inside: Inside | None = None
        self._gone: list[str] = []
        self._channel: Channel | None = None

    async def serve(self, request: Request) -> object:
        """What the parent wants."""
        match request:
            case Orders():
                self.orders.set_result(request)
            case GetPage() if self._inside is not None:
                return self._inside.page()
            case GetReadiness() if self._inside is not None:
                return self._inside.readiness()
            case GetPart() if self._inside is not None:
                return await self._inside.part()
            case AdminCall() if self._inside is not None:
                return await self._inside.admin(request)
            case PeerGone(router):
                self._gone.append(router)
                if self._inside is not None:
                    self._inside.gone(router)
            case _:
                event(_log, logging.ERROR, "a request that this process cannot answer", request=type(request).__name__)
        return None

    async def work(self, channel: Channel) -> None:
        """Do as the orders say, until told to end."""
        from router.app import collect_less, running  # noqa: PLC0415  it is what builds everything, the parent's side of this included

        self._channel = channel
        orders = await self.orders
        settings = msgspec.msgpack.decode(orders.settings, type=ServeSettings)
        logs.configure(settings.log_level, settings.log_format, sys.stderr, process=orders.index)
        stop = stopped_by_signals(signal.SIGTERM)

        async def prepare(inside: Inside) -> None:
            self._inside = inside
            for router in self._gone:
                inside.gone(router)
            for call in orders.calls:
                await inside.admin(call)
            if orders.rejoins:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KNOW_WITHIN_S):
                        while not inside.knows_its_engines:  # noqa: ASYNC110  once in a process's life
                            await asyncio.sleep(POLL_S)

        part = Part(orders.processes, orders.router, orders.nats, orders.port, self, prepare)
        async with running(settings, part):
            collect_less()
            channel.tell(Up())
            await stop.wait()

    # router.answers.Group

    async def page(self) -> bytes:
        """The metrics page of all processes."""
        return await self._of_all(GetPage(), bytes)

    async def readiness(self) -> Readiness:
        """What all processes take."""
        return await self._of_all(GetReadiness(), Readiness)

    async def _of_all(self, request: GetPage | GetReadiness, answer: type[T]) -> T:
        if self._channel is None:
            raise GroupSilent("this process has not begun")
        try:
            return await self._channel.ask(request, answer, timeout_s=GROUP_TIMEOUT_S)
        except (ChannelClosed, TimeoutError):
            raise GroupSilent(f"the process that started this one has not answered within {GROUP_TIMEOUT_S:g} s") from None


async def _hear(channel: Channel) -> None:
    """Until the parent ends; then so do we, in order: unless the kernel has ended us already, as Linux does if the parent was killed."""
    await channel.run()
    os.kill(os.getpid(), signal.SIGTERM)


async def _run(sock: socket.socket) -> int:
    """The exit code."""
    worker = Worker()
    channel = await Channel.over(sock, worker.serve)
    async with asyncio.TaskGroup() as tasks:
        hearing = tasks.create_task(_hear(channel), name="channel")
        try:
            await worker.work(channel)
        except Exception as error:  # noqa: BLE001  whatever it was, the parent says it, once for all workers
            _log.debug("this process failed", exc_info=error)
            channel.tell(Failed("\n".join(reasons(error)), isinstance(error, ConfigError)))
            await channel.flush()
            return 1
        finally:
            hearing.cancel()
    return 0


def main() -> NoReturn:
    """The process."""
    import uvloop  # noqa: PLC0415  as in the command line: not needed to be imported

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to act on
    sock = socket.socket(fileno=0)
    sys.exit(uvloop.run(_run(sock)))


if __name__ == "__main__":
    main()
