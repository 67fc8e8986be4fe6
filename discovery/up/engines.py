"""How do a host's engines start together, and stay? Side by side; and one that ends is started again in its place, later each time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp

from discovery.config import ConfigError
from discovery.logs import event
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

_log = logging.getLogger(__name__)


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
