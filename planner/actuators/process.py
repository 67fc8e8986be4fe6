"""How are engines of this host made more and fewer? As processes, started and ended as `commutator up` does (`engines.launch`).

    start ─▶ ready ─▶ told to routers ─▶ serves            drained at all routers ─▶ ended ─▶ routers forget it
      └─ ends by itself, or is never ready: lost, and its place free again

The first look starts as many as each pool names (`replicas`), so that plans begin from those.

A router that was started anew has forgotten what it was told, so what it should know is told again with every look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from discovery.logs import event
from engines.launch.engine import EngineNotStarted, LaunchedEngine
from engines.launch.plan import BadPlan
from planner.actuators.types import ActuatorError
from planner.routers import Routers, RouterUnreachable
from planner.sightings import laden
from planner.types import Decision, Replica, ReplicaState

if TYPE_CHECKING:
    import aiohttp

    from discovery.observations import EngineReport
    from engines.launch.plan import Pool as LaunchPool

POLL_S: Final = 0.25

_log = logging.getLogger(__name__)


class _Place:
    """One engine, by its place in the pool."""

    def __init__(self, pool: str, index: int, engine: LaunchedEngine, now: float) -> None:
        self.pool, self.index, self.engine = pool, index, engine
        self.state, self.since = ReplicaState.STARTING, now
        self.task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """As routers call it."""
        return self.engine.spec.url

    def become(self, state: ReplicaState, now: float) -> None:
        self.state, self.since = state, now


class Processes:
    """Engines that are processes of ours: they end with us."""

    def __init__(
        self,
        pools: Sequence[LaunchPool],
        routers: Routers,
        session: aiohttp.ClientSession,
        group: asyncio.TaskGroup,
        *,
        logs: Path,
        drain_s: float,
    ) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._routers = routers
        self._session = session
        self._group = group
        self._logs = logs
        self._drain_s = drain_s
        self._places: dict[str, _Place] = {}
        self._to_begin_with = {pool.name: pool.replicas or 0 for pool in pools}
        """By pool: engines still to be started before anybody plans."""
        self._now = 0.0

    async def replicas(self, engines: Mapping[str, EngineReport], now: float) -> Mapping[str, tuple[Replica, ...]]:
        """See `Actuator`."""
        self._now = now
        await self._begin()
        await self._tell_again()
        found: dict[str, list[Replica]] = {name: [] for name in self._pools}
        for place in self._places.values():
            found[place.pool].append(laden(Replica(place.id, place.state, place.since), engines.get(place.id)))
        return {name: tuple(replicas) for name, replicas in found.items()}

    async def carry_out(self, decision: Decision) -> None:
        """See `Actuator`."""
        for decided in decision.pools:
            for victim in decided.victims:
                place = self._places.get(victim)
                if place is not None and place.state is not ReplicaState.DRAINING:
                    self._stop(place)
            for _ in range(decided.target - decided.current):
                await self._start(decided.pool)

    async def close(self) -> None:
        """End all of them, at once: whoever wants streams to end well has drained before."""
        for place in self._places.values():
            place.engine.terminate()
        await asyncio.gather(*(place.engine.close() for place in self._places.values()))
        self._places.clear()

    # inside

    async def _begin(self) -> None:
        for name in self._to_begin_with:
            while self._to_begin_with[name]:
                self._to_begin_with[name] -= 1  # each is tried once: what becomes of it is for plans
                await self._start(name)

    async def _start(self, name: str) -> None:
        pool = self._pools[name]
        taken = {place.index for place in self._places.values() if place.pool == name}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        try:
            engine = LaunchedEngine(pool.plan(index), self._logs)
        except (BadPlan, OSError) as error:
            raise ActuatorError(f"pool {name!r}: {error}") from error
        place = _Place(name, index, engine, self._now)
        self._places[place.id] = place
        try:
            await engine.start()
        except OSError as error:
            place.become(ReplicaState.LOST, self._now)
            raise ActuatorError(f"pool {name!r}: {error}") from error
        event(_log, logging.INFO, "engine is started", engine=place.id, pool=name, log=str(engine.log))
        place.task = self._group.create_task(self._live(place), name=f"live {place.id}")

    async def _live(self, place: _Place) -> None:
        """From its start to its end by itself."""
        try:
            await place.engine.ready(self._session)
            await self._introduce(place)
            place.become(ReplicaState.READY, self._now)
            event(_log, logging.INFO, "engine is ready", engine=place.id, pool=place.pool)
            why = await place.engine.ended()
        except EngineNotStarted as error:
            why = str(error)
        event(_log, logging.ERROR, "engine is lost", engine=place.id, pool=place.pool, reason=why)
        place.become(ReplicaState.LOST, self._now)

    async def _introduce(self, place: _Place) -> None:
        """Every router sends requests there."""
        while True:
            try:
                await self._routers.add(place.engine.spec)
                while not await self._routers.serving(place.id):  # noqa: ASYNC110  once in an engine's life
                    await asyncio.sleep(POLL_S)
                return
            except RouterUnreachable as error:
                event(_log, logging.WARNING, "a router does not know an engine yet", engine=place.id, error=str(error))
                await asyncio.sleep(4 * POLL_S)

    def _stop(self, place: _Place) -> None:
        lost = place.state is ReplicaState.LOST
        if place.task is not None:
            place.task.cancel()
        place.become(ReplicaState.DRAINING, self._now)
        place.task = self._group.create_task(self._end(place, drains=not lost), name=f"end {place.id}")

    async def _end(self, place: _Place, *, drains: bool) -> None:
        """Drained, ended, forgotten. While a router cannot be told, it may still send there, and the engine lives."""
        while True:
            try:
                if drains and not await self._routers.drained(place.id, self._drain_s):
                    event(
                        _log, logging.WARNING, "engine still has requests after its time to drain", engine=place.id, drain_s=self._drain_s
                    )
                break
            except RouterUnreachable as error:
                event(_log, logging.WARNING, "an engine cannot be drained yet", engine=place.id, error=str(error))
                await asyncio.sleep(4 * POLL_S)
        await place.engine.close()
        try:
            await self._routers.remove(place.id)
        except RouterUnreachable as error:
            event(_log, logging.WARNING, "a router was not told that an engine is gone", engine=place.id, error=str(error))
        del self._places[place.id]
        event(_log, logging.INFO, "engine is gone", engine=place.id, pool=place.pool)

    async def _tell_again(self) -> None:
        ready = [place for place in self._places.values() if place.state is ReplicaState.READY]
        if not ready:
            return
        try:
            known = await self._routers.engines()
            for place in ready:
                if not all(place.id in engines for engines in known) and place.state is ReplicaState.READY:
                    await self._routers.add(place.engine.spec)
        except RouterUnreachable as error:
            event(_log, logging.WARNING, "a router could not be asked for its engines", error=str(error))
