"""Who starts the processes, keeps them running, and answers for them together? The parent: it serves no client itself.

    Ctrl-C, SIGTERM ─▶ parent ─┬─ broker (unless --nats names one)
    admin API ───────▶         ├─ worker 0 ── listens on the port ─┐
                               └─ worker 1 ── listens on the port ─┴─▶ engines
       one channel to each worker: its orders; its part of /metrics, /ready and the admin API

Workers are fresh processes: a loop, its sockets and its threads cannot be forked. One that ends is started again, later each time; one
that cannot start at first ends the command, with the reason said once. However the parent ends, the kernel ends the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from discovery.broker import Broker
from discovery.children import die_with_parent
from discovery.config import ConfigError
from discovery.logs import event
from router.admin import MAX_BODY_BYTES, respond
from router.errand import in_task
from router.guards import read_guards
from router.processes import merging
from router.processes.channel import Channel, ChannelClosed
from router.processes.journal import Journal
from router.processes.messages import (
    AdminCall,
    AdminReply,
    Failed,
    GetPage,
    GetPart,
    GetReadiness,
    Orders,
    Page,
    PeerGone,
    Readiness,
    Request,
    Up,
)
from router.processes.pages import Pages
from router.processes.port import held
from router.readings import VERSION
from router.running import Listening, cancelled_at_exit, listen, told_by_hangup, url_of
from router.server import Server
from router.ui.document import document
from router.ui.page import LivePage
from router.ui.parts import Part

if TYPE_CHECKING:
    from router.exchange import Exchange
    from router.settings import ServeSettings

RESTART_MIN_S: Final = 0.1
RESTART_MAX_S: Final = 10.0
LASTED_S: Final = 30.0
"""A worker that has run so long is started again with no more than the shortest pause."""
ANSWER_WITHIN_S: Final = 1.0
"""For a worker's part of a page; after that its last one is shown."""
ADMIN_WITHIN_S: Final = 8.0
"""For what an operator wants: looking a host's name up takes up to 5 s."""
KILL_AFTER_S: Final = 10.0
"""How much longer than `grace_period_s` workers may take to end."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class WorkerFailed(Exception):
    """A worker could not start; the message says why."""


class _Worker:
    """A process that runs."""

    def __init__(self, index: int, version: int) -> None:
        self.index = index
        self.router = secrets.token_hex(8)
        self.version = version
        """Of the journal, as far as it has been told."""
        self.up = False
        self.failed: Failed | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.channel: Channel | None = None


class Workers:
    """All of them, from `run` to `stop`."""

    def __init__(self, settings: ServeSettings, port: int, nats: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.restarts = 0
        self.pages = Pages()
        self.journal = Journal()
        self.all_up = asyncio.get_running_loop().create_future()
        """Done when every worker listens; its exception is why one cannot."""
        self._settings = settings
        self._port = port
        self._nats = nats
        self._clock = clock
        self._workers: dict[int, _Worker] = {}
        self._stopping = False

    @property
    def up(self) -> list[_Worker]:
        """Those that listen, in order."""
        return [self._workers[index] for index in sorted(self._workers) if self._workers[index].up]

    async def run(self) -> None:
        """Start all and keep them running; returns after `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._settings.processes):
                tasks.create_task(self._keep(index), name=f"process {index}")

    def stop(self) -> None:
        """Have them finish what is in progress, and end."""
        self._stopping = True
        for worker in self._workers.values():
            if worker.process is not None and worker.process.returncode is None:
                worker.process.terminate()

    def hang_up(self) -> None:
        """Have them read files again."""
        for worker in self.up:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.send_signal(signal.SIGHUP)

    async def ask(self, request: Request, answer: type[T], timeout_s: float, *, but: Collection[_Worker] = ()) -> dict[int, T | None]:
        """What each that listens answers, but those that have been asked; None: it does not in time. Who dies meanwhile is left out."""
        async with asyncio.TaskGroup() as tasks:
            asked = {worker: tasks.create_task(_asked(worker, request, answer, timeout_s)) for worker in self.up if worker not in but}
        return {worker.index: task.result() for worker, task in asked.items() if self._workers.get(worker.index) is worker}

    async def readiness(self) -> Readiness:
        """What can be relied on whichever is asked."""
        parts = await self.ask(GetReadiness(), Readiness, ANSWER_WITHIN_S)
        return merging.ready(part if part is not None else merging.NO_READINESS for part in parts.values())

    async def page(self) -> bytes:
        """What all measure."""
        routers = {worker.index: worker.router for worker in self.up}
        for index, page in (await self.ask(GetPage(), Page, ANSWER_WITHIN_S)).items():
            worker = self._workers.get(index)
            if page is not None and worker is not None and worker.router == routers[index]:
                self.pages.take(worker.router, page)
        registry = CollectorRegistry()
        registry.register(_Collected(self))
        return generate_latest(registry)

    async def state(self) -> dict[str, Any]:
        """What the live page shows."""
        return document(await self.ask(GetPart(), Part, ANSWER_WITHIN_S), VERSION)

    def _is_stopping(self) -> bool:
        """A call: what happened while something was awaited is not known to who checks types."""
        return self._stopping

    async def _keep(self, index: int) -> None:
        """One worker after the other in this place."""
        wait_s = RESTART_MIN_S
        while not self._is_stopping():
            began = self._clock()
            worker = await self._live(index)
            if self._is_stopping():
                return
            code = None if worker.process is None else worker.process.returncode
            reason = worker.failed.reason if worker.failed is not None else f"it ended with code {code}"
            if not self.all_up.done():
                usage = worker.failed is not None and worker.failed.usage
                self.all_up.set_exception(ConfigError(reason) if usage else WorkerFailed(reason))
                return
            self.restarts += 1
            wait_s = RESTART_MIN_S if self._clock() - began >= LASTED_S else min(2 * wait_s, RESTART_MAX_S)
            event(
                _log,
                logging.ERROR,
                "a process ended; it is started again",
                process=index,
                reason=reason,
                in_s=wait_s,
                restarts=self.restarts,
            )
            await asyncio.sleep(wait_s)

    async def _live(self, index: int) -> _Worker:
        """Start a worker and wait for its end."""
        worker = self._workers[index] = _Worker(index, self.journal.version)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                worker.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "router.processes.worker"),
                    stdin=theirs.fileno(),
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},  # noqa: PTH109  text
                    preexec_fn=die_with_parent(),
                    start_new_session=True,  # a terminal's Ctrl-C is ours to act on
                )
            worker.channel = await Channel.over(ours, functools.partial(self._serve, worker))
            worker.channel.tell(self._orders(worker))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(worker.channel.run(), name=f"channel to {index}")
                await worker.process.wait()
        finally:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.kill()
            self._workers.pop(index)
            self._gone(worker)
        return worker

    def _orders(self, worker: _Worker) -> Orders:
        settings = msgspec.msgpack.encode(self._settings)
        return Orders(
            settings=settings,
            index=worker.index,
            processes=self._settings.processes,
            router=worker.router,
            nats=self._nats,
            port=self._port,
            rejoins=self.all_up.done(),
            calls=self.journal.calls(),
        )

    def _gone(self, worker: _Worker) -> None:
        self.pages.gone(worker.router)
        for other in self._workers.values():
            if other.channel is not None:
                other.channel.tell(PeerGone(worker.router))

    async def _serve(self, worker: _Worker, request: Request) -> object:
        """What a worker wants."""
        match request:
            case Up():
                await self._welcome(worker)
            case Failed():
                worker.failed = request
            case GetPage():
                return await self.page()
            case GetReadiness():
                return await self.readiness()
            case _:
                event(_log, logging.ERROR, "a request that the parent cannot answer", request=type(request).__name__)
        return None

    async def _welcome(self, worker: _Worker) -> None:
        worker.up = True
        if worker.version != self.journal.version:
            # Something was changed while it started.
            worker.version = self.journal.version
            for call in self.journal.calls():
                await _asked(worker, call, AdminReply, ADMIN_WITHIN_S)
        if len(self.up) == self._settings.processes and not self.all_up.done():
            self.all_up.set_result(None)


class _Collected(Collector):
    """The workers' families and the parent's own."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._workers.pages.collect()
        yield from of_parent(len(self._workers.up), self._workers.restarts)


def of_parent(listening: int, restarts: int) -> Iterator[Metric]:
    """What only the parent knows."""
    yield GaugeMetricFamily("router_processes", "Processes that listen.", value=listening)
    yield CounterMetricFamily("router_process_restarts", "Processes that ended and were started again.", value=restarts)


class GroupAdmin:
    """The admin API of all workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._turn = asyncio.Lock()

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        call = AdminCall(exchange.method, exchange.path, exchange.query, exchange.body)
        respond(exchange, await in_task(self._answer(call)))

    async def _answer(self, call: AdminCall) -> AdminReply:
        if call.method not in ("POST", "DELETE"):
            return merging.reply(await self._workers.ask(call, AdminReply, ADMIN_WITHIN_S))
        async with self._turn:  # all workers are told in one order
            asked = self._workers.up
            replies = await self._workers.ask(call, AdminReply, ADMIN_WITHIN_S)
            done = next((reply for reply in replies.values() if reply is not None and reply.status < 300), None)
            if done is not None:
                self._workers.journal.done(str(msgspec.json.decode(done.body)["id"]), call)
                for worker in self._workers.up:  # one that has come up meanwhile was welcomed without this
                    worker.version = self._workers.journal.version
                replies |= await self._workers.ask(call, AdminReply, ADMIN_WITHIN_S, but=asked)
            return merging.reply(replies)


async def _asked(worker: _Worker, request: Request, answer: type[T], timeout_s: float) -> T | None:
    if worker.channel is None:
        return None
    try:
        return await worker.channel.ask(request, answer, timeout_s=timeout_s)
    except (ChannelClosed, TimeoutError):
        return None


@contextlib.asynccontextmanager
async def processes(settings: ServeSettings) -> AsyncIterator[Listening]:
    """As many routers as the settings say, on one port, serving within the context.

    Raises OSError, BrokerError, GuardsUnusable, or what kept a worker from starting: ConfigError or WorkerFailed.
    """
    try:
        async with _processes(settings) as listening:
            yield listening
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:  # the reason alone tells what kind of exit this is
            raise group.exceptions[0] from None
        raise


@contextlib.asynccontextmanager
async def _processes(settings: ServeSettings) -> AsyncIterator[Listening]:
    guards = await read_guards(settings)
    async with contextlib.AsyncExitStack() as stack:
        port = await asyncio.to_thread(stack.enter_context, held(settings.host, settings.port))
        broker = None if settings.nats else Broker()
        nats = settings.nats or ""
        if broker is not None:
            stack.push_async_callback(broker.stop)
            nats = await broker.start()
        group = await stack.enter_async_context(cancelled_at_exit())
        workers = Workers(settings, port, nats)
        admin = ""
        if guards.admin_door is not None:
            page = LivePage(GroupAdmin(workers).serve, workers.state)
            admins = Server(page.serve, max_body_bytes=MAX_BODY_BYTES, grace_period_s=1.0, door=guards.admin_door)
            stack.push_async_callback(admins.stop)
            admin = await listen(admins, settings.admin_host, settings.admin_port, guards)
            group.create_task(admins.run(), name="admin")
        if guards.files:
            stack.enter_context(told_by_hangup(guards.files, workers.hang_up))
            group.create_task(guards.files.run(), name="files")
        if broker is not None:
            group.create_task(broker.run(), name="broker")
        running = group.create_task(workers.run(), name="processes")
        await workers.all_up
        url = url_of(settings.host, port, guards)
        event(_log, logging.INFO, "processes serve", url=url, admin=admin, processes=settings.processes)
        yield Listening(url, admin)
        workers.stop()
        await asyncio.wait([running], timeout=settings.grace_period_s + KILL_AFTER_S)
