"""How does a replica go? Drained at every router, then stopped; until a router can be told, it lives: that router may still send there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from discovery.logs import event
from planner.actuators.types import ActuatorError
from planner.routers import Routers, RouterUnreachable

RETRY_S: Final = 1.0

_log = logging.getLogger(__name__)


class Leaving:
    """Replicas that are on their way out."""

    def __init__(self, routers: Routers, group: asyncio.TaskGroup, drain_s: float) -> None:
        self._routers = routers
        self._group = group
        self._drain_s = drain_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, replica: str) -> bool:
        return replica in self._tasks

    def begin(self, replica: str, engine: str | None, stop: Callable[[], Awaitable[None]]) -> None:
        """Drain its engine (None: no router has known one), then `stop`. Idempotent while it goes on."""
        if replica not in self._tasks:
            self._tasks[replica] = self._group.create_task(self._end(replica, engine, stop), name=f"end {replica}")

    async def _end(self, replica: str, engine: str | None, stop: Callable[[], Awaitable[None]]) -> None:
        try:
            while True:
                try:
                    if engine is not None and not await self._routers.drained(engine, self._drain_s):
                        event(_log, logging.WARNING, "engine still has requests after its time to drain", engine=engine)
                    await stop()
                    event(_log, logging.INFO, "engine is gone", engine=engine or replica)
                    return
                except (RouterUnreachable, ActuatorError) as error:
                    event(_log, logging.WARNING, "a replica cannot be stopped yet", replica=replica, error=str(error))
                    await asyncio.sleep(RETRY_S)
        finally:
            del self._tasks[replica]
