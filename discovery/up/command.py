"""What does `commutator up` do? Engines first, then the router in front of them; and all of it ends together.

    pools ──▶ engines start, side by side ──▶ all serve ──▶ commutator serve ──▶ one line: ready
    Ctrl-C, SIGTERM ──▶ the router finishes what it has ──▶ engines end

An engine that does not start ends all of it, with the reason. One that ends later is started again, in the same place, later each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from discovery.config import ConfigError
from discovery.lifetime import cancelled_at_exit, stopped_by_signals
from discovery.logs import event
from discovery.up.commands import Beside, CommandFailed
from engines.launch.engine import EngineNotStarted, LaunchedEngine, Starting
from engines.launch.plan import BadPlan
from engines.probe import describe

if TYPE_CHECKING:
    from discovery.up.settings import UpSettings
    from engines.types import EngineSpec

SAY_EVERY_S: Final = 5.0
AGAIN_MIN_S: Final = 1.0
AGAIN_MAX_S: Final = 60.0
LASTED_S: Final = 300.0
"""An engine that has served so long is started again with no more than the shortest pause."""
POLL_S: Final = 0.1

_log = logging.getLogger(__name__)


async def up(settings: UpSettings) -> None:
    """Run until SIGINT or SIGTERM. Raises ConfigError, EngineNotStarted or CommandFailed."""
    stop = stopped_by_signals()
    async with topology(settings, stop) as told:
        if not told:
            return
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()


@contextlib.asynccontextmanager
async def topology(settings: UpSettings, stop: asyncio.Event) -> AsyncIterator[dict[str, Any]]:
    """Everything runs within the context: where it is reached. Nothing is, when `stop` comes first: then nothing is told."""
    folder = Path(settings.log_folder)
    async with contextlib.AsyncExitStack() as stack:
        private = await asyncio.to_thread(stack.enter_context, tempfile.TemporaryDirectory(prefix="commutator-up-"))
        await Beside("serve", _table(settings, ()), Path(private)).check()
        session = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))
        engines = Engines(settings, folder, session)
        stack.push_async_callback(engines.stop)
        if not await _unless(stop, engines.start()):
            yield {}
            return
        router = Beside("serve", _table(settings, engines.specs), Path(private))
        stack.push_async_callback(router.stop)
        told = await router.start()
        if not await _unless(stop, _ready(session, told["url"])):
            yield {}
            return
        group = await stack.enter_async_context(cancelled_at_exit())
        group.create_task(engines.keep(), name="engines")
        group.create_task(_must_not_end(router, stop), name="router")
        event(_log, logging.INFO, "up", url=told["url"], engines=len(engines.specs), logs=str(folder))
        yield told | {"engines": [{"name": engine.name, "url": engine.spec.url, "log": str(engine.log)} for engine in engines.all]}


class Engines:
    """All of them, from `start` to `stop`."""

    def __init__(
        self, settings: UpSettings, folder: Path, session: aiohttp.ClientSession, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.all: list[LaunchedEngine] = []
        self._settings = settings
        self._folder = folder
        self._session = session
        self._clock = clock
        self._said: dict[str, float] = {}

    @property
    def specs(self) -> Sequence[EngineSpec]:
        """How routers are told of them."""
        return [engine.spec for engine in self.all]

    async def start(self) -> None:
        """Every engine serves. Raises EngineNotStarted for the first that does not, and ConfigError."""
        try:
            for pool in self._settings.pools:
                self.all += [LaunchedEngine(pool.plan(index), self._folder) for index in range(pool.size)]
        except BadPlan as error:
            raise ConfigError(str(error)) from error
        event(_log, logging.INFO, "engines start", engines=[engine.name for engine in self.all], logs=str(self._folder))
        async with asyncio.TaskGroup() as group:
            for engine in self.all:
                group.create_task(self._serve(engine), name=engine.name)

    async def keep(self) -> None:
        """Start those that end again; ends only by cancellation."""
        async with asyncio.TaskGroup() as group:
            for engine in self.all:
                group.create_task(self._keep(engine), name=engine.name)

    async def stop(self) -> None:
        """All are gone: asked together, since each takes its time."""
        for engine in self.all:
            engine.terminate()
        async with asyncio.TaskGroup() as group:
            for engine in self.all:
                group.create_task(engine.close(), name=engine.name)

    async def _serve(self, engine: LaunchedEngine) -> None:
        await engine.start()
        info = await engine.ready(self._session, within_s=self._settings.ready_within_s, told=self._say)
        event(_log, logging.INFO, "engine is ready", engine=engine.name, found=describe(info))

    async def _keep(self, engine: LaunchedEngine) -> None:
        wait_s = AGAIN_MIN_S
        while True:
            began = self._clock()
            reason = await engine.ended()
            wait_s = AGAIN_MIN_S if self._clock() - began >= LASTED_S else wait_s
            while reason:
                event(_log, logging.ERROR, "engine ended; it is started again", engine=engine.name, reason=reason, in_s=wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, AGAIN_MAX_S)
                await engine.stop(within_s=0)
                try:
                    await self._serve(engine)
                    reason = ""
                except (EngineNotStarted, OSError) as error:
                    reason = str(error)

    def _say(self, starting: Starting) -> None:
        """At most a line every few seconds for each."""
        now = self._clock()
        if now - self._said.get(starting.name, -SAY_EVERY_S) >= SAY_EVERY_S:
            self._said[starting.name] = now
            event(_log, logging.INFO, "engine starts", engine=starting.name, seconds=round(starting.seconds), says=starting.says)


def _table(settings: UpSettings, engines: Sequence[EngineSpec]) -> dict[str, object]:
    """The router's configuration. Before there are engines, one that nobody asks stands for them."""
    named = [{"url": "http://127.0.0.1:1"}] if not engines else list(engines)
    return settings.serve | {
        "engine": named,
        "host": settings.host,
        "port": settings.port,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }


async def _ready(session: aiohttp.ClientSession, url: str) -> None:
    """The router knows its engines."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/ready", ssl=False) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(POLL_S)


async def _unless(stop: asyncio.Event, doing: Coroutine[object, object, None]) -> bool:
    """Whether it was done before `stop`; cancelled when not. Raises what it raises: of several, the first."""
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(doing, name="starting")
            stopped = group.create_task(stop.wait(), name="stop")
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            done = task.done()
            task.cancel()
            stopped.cancel()
        return done
    except BaseExceptionGroup as failed:
        raise _first(failed) from None


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _must_not_end(router: Beside, stop: asyncio.Event) -> None:
    said = await router.ended()
    if not stop.is_set():
        raise CommandFailed(said)
