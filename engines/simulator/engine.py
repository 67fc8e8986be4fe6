"""What does a test hold in its hands? One simulated engine, started and stopped inside the test's own event loop.

async with SimulatedEngine(SimulateSettings(port=0)) as engine:
    ... engine.url, engine.kv_events, engine.requests, engine.faults, await engine.restart()
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Self, TypeVar

from aiohttp import web

from engines.simulator import events, text
from engines.simulator.cache import BlockCache, Change
from engines.simulator.connectors import exchange_of
from engines.simulator.core import Core
from engines.simulator.faults import Faults
from engines.simulator.hashes import BlockNamer
from engines.simulator.load_feed import LoadPublisher, report
from engines.simulator.parts import History, Parts, Recorded
from engines.simulator.publisher import Publisher
from engines.simulator.scheduler import Counters, Limits, Scheduler
from engines.simulator.server import EngineServer
from engines.simulator.settings import SimulateSettings
from engines.simulator.timing import Timing
from engines.simulator.transfer import Host, KvExchange
from engines.types import EngineKind, Role

_T = TypeVar("_T")
_wall_clock_s = time.time  # noqa: TID251 - `created`, process start and event timestamps are wall clock on the wire


class SimulatedEngine:
    """One engine on one port. `record` is how many requests it remembers (None: all)."""

    def __init__(self, settings: SimulateSettings, *, record: int | None = None) -> None:
        self.settings = settings
        self._history = History(record)
        self._publisher = Publisher(settings.host, settings.kv_topic, settings.kv_replay_batches)
        self.loads = LoadPublisher(settings.host)
        """Its load feed, silent unless the settings say otherwise."""
        self.faults = Faults(lambda: self._publisher)
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        self._text: text.ModelText | None = None
        self._port = settings.port
        self._kv_transfer_port = settings.kv_transfer_port
        self._exchange: KvExchange | None = None
        self._server: EngineServer | None = None
        self._runner: web.AppRunner | None = None
        self._core: Core | None = None

    async def __aenter__(self) -> Self:
        """Listen; raises OSError where a port is taken, OSError or ValueError where the model folder is none."""
        self._text = await asyncio.to_thread(text.load, self.settings.model)
        await self._group.__aenter__()
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort what is under way, close every socket, end every task."""
        await self._stop()
        # The block's own error is not handed in: the group would wrap it, and a test could not catch it by its class.
        await self._group.__aexit__(None, None, None)

    @property
    def url(self) -> str:
        """Where its HTTP server listens."""
        return f"http://{self.settings.host}:{self._port}"

    @property
    def kind(self) -> EngineKind:
        """Whose protocol it speaks."""
        return self.settings.kind

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.settings.block_size

    @property
    def kv_events(self) -> str | None:
        """Where to subscribe to its KV events; None when it publishes none."""
        return self._publisher.events if self.settings.kv_events else None

    @property
    def kv_replay(self) -> str | None:
        """Where to ask for KV events again; None when it publishes none."""
        return self._publisher.replay if self.settings.kv_events else None

    @property
    def role(self) -> Role:
        """Which part of a request it takes on."""
        return self.settings.role

    @property
    def bootstrap(self) -> str | None:
        """Where other engines ask it for KV, and routers for its id (Mooncake); None for an engine that takes whole requests."""
        return f"http://{self.settings.host}:{self._kv_transfer_port}" if self._exchange is not None else None

    @property
    def exchange(self) -> KvExchange:
        """What hands its KV over; a new one after each restart. Raises RuntimeError for an engine that takes whole requests."""
        return _started(self._exchange)

    @property
    def next_seq(self) -> int:
        """The number its next batch of KV events will have."""
        return self._publisher.next_seq

    @property
    def cache(self) -> BlockCache:
        """Its blocks."""
        return self.core.scheduler.cache

    @property
    def counters(self) -> Counters:
        """What it counts about itself."""
        return self.core.scheduler.counters

    @property
    def running(self) -> int:
        """Sequences being computed."""
        return len(self.core.scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences queued, for their turn or for KV."""
        return self.core.scheduler.queued

    @property
    def aborts(self) -> int:
        """Requests whose client left before the answer's end, over all restarts."""
        return self._history.aborts

    @property
    def requests(self) -> deque[Recorded]:
        """What has been asked of it, over all restarts."""
        return self._history.requests

    @property
    def adapters(self) -> dict[str, str]:
        """LoRA adapters it serves: name → path. May be changed at any time."""
        return self._history.adapters

    @property
    def core(self) -> Core:
        """What computes; a new one after each restart."""
        return _started(self._core)

    def sleep(self) -> None:
        """Compute nothing until woken, and lose the cache."""
        self.core.sleep()

    def wake(self) -> None:
        """Go on."""
        self.core.wake()

    async def restart(self) -> None:
        """Die and come back on the same ports: an empty cache, sequence numbers from 0, every connection reset."""
        await self._stop()
        await self._start()

    async def die(self) -> None:
        """Reset every connection and listen no more, as a process does that is killed, until `restart`."""
        await self._stop()

    async def refuse(self) -> None:
        """Stop listening, so that new connections are refused; open ones go on."""
        for site in tuple(_started(self._runner).sites):
            await site.stop()

    async def accept(self) -> None:
        """Listen again, after `refuse`."""
        await self._listen(_started(self._runner))

    async def _start(self) -> None:
        settings, model = self.settings, _started(self._text)
        sglang = settings.kind is EngineKind.SGLANG
        cache = BlockCache(settings.kv_blocks, settings.block_size, duplicates=not sglang)
        limits = Limits(settings.max_num_seqs, settings.max_num_batched_tokens)
        scheduler = Scheduler(
            cache,
            Timing.of(settings),
            limits,
            stores_generated_at_end=sglang,
            prefix_caching=not (sglang and settings.role is Role.DECODE),
        )
        namer = BlockNamer(settings.kind, settings.block_size, settings.hash_seed)
        self._core = Core(scheduler, namer, model.words, self._publish)
        if (hand_over := exchange_of(settings)) is not None:
            self._exchange = self._core.exchange = hand_over(Host(settings, self._core, self._group.create_task, self._end))
            await self._exchange.start(self._kv_transfer_port)
            self._kv_transfer_port = self._exchange.port
        if settings.load_feed:
            self.loads.start()
            self._tasks.append(self._group.create_task(self.loads.run(lambda: report(scheduler, settings.max_num_seqs))))
        started = _wall_clock_s()
        parts = Parts(
            settings, model, self._core, self._exchange, self._publisher, self.loads, self.faults, self._history, _wall_clock_s, started
        )
        self._server = EngineServer(parts)
        if settings.kv_events:
            await self._publisher.start()
            self._tasks.append(self._group.create_task(self._publisher.run()))
        self._tasks.append(self._group.create_task(self._core.run()))
        self._runner = web.AppRunner(self._server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await self._listen(self._runner)

    async def _listen(self, runner: web.AppRunner) -> None:
        site = web.TCPSite(runner, self.settings.host, self._port, backlog=1024)
        await site.start()
        if not self._port:
            self._port = int(runner.addresses[0][1])

    def _end(self) -> None:
        """Die of a request; another one that is under way cannot wait for it."""
        self._group.create_task(self.die())

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        if self._exchange is not None:
            await self._exchange.stop()
        if self._runner is not None:
            for connection in tuple(self._runner.server.connections if self._runner.server is not None else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._publisher.stop()
        self.loads.stop()
        self._tasks, self._server, self._runner, self._exchange = [], None, None, None

    def _publish(self, changes: list[Change]) -> None:
        if self.settings.kv_events:
            self._publisher.publish(events.encode(changes, self.kind, self.block_size, ts=_wall_clock_s()))


def _started(part: _T | None) -> _T:
    if part is None:
        msg = "the engine is not running: use it inside `async with`"
        raise RuntimeError(msg)
    return part
