"""Which engines exist now? One `Watch` per engine, in one task group; what they find goes to the registry and the listener.

specs ──▶ Monitor ──┬── Watch(http://a:8000) ──▶ registry ──▶ listener.joined / changed / left / load
                    └── Watch(http://b:8000) ──▶    ┆
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp

from discovery.registry import Registry
from discovery.sources.static import static_specs
from discovery.watch import Listener, Watch, WatchTimes
from engines.types import EngineSpec

__all__ = ["Listener", "Monitor", "WatchTimes"]


class Monitor:
    """Follows every engine it is told of. All methods but `run` are plain functions and may be called before it."""

    def __init__(
        self,
        specs: Iterable[EngineSpec],
        registry: Registry,
        session: aiohttp.ClientSession,
        listener: Listener,
        *,
        probe_period_s: float = WatchTimes().probe_period_s,
        probe_timeout_s: float = WatchTimes().probe_timeout_s,
    ) -> None:
        self._registry = registry
        self._session = session
        self._listener = listener
        self._times = WatchTimes(probe_period_s=probe_period_s, probe_timeout_s=probe_timeout_s)
        self._watches: dict[str, Watch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        for spec in static_specs(specs):
            self.add(spec)

    @property
    def watched(self) -> tuple[str, ...]:
        """The ids of all engines followed, joined or not."""
        return tuple(self._watches)

    def spec(self, engine_id: str) -> EngineSpec | None:
        """How a followed engine was named, its URL normalised; None when it is not followed."""
        watch = self._watches.get(engine_id)
        return None if watch is None else watch.spec

    def waiting_for(self, engine_id: str) -> str:
        """Why an engine that is followed has not joined, in words; empty when it has, or when nothing is known yet."""
        watch = self._watches.get(engine_id)
        return "" if watch is None else watch.waiting_for

    def load_reports(self) -> dict[str, tuple[int, int]]:
        """By engine, of those that have pushed any: load reports read, and messages there that were none."""
        return {engine_id: watch.load_reports for engine_id, watch in self._watches.items() if any(watch.load_reports)}

    async def run(self) -> None:
        """Follow the engines until cancelled; members stay members then, since nothing is known against them."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for engine_id in self._watches:
                    self._start(engine_id)
                await asyncio.Event().wait()
        finally:
            self._group = None
            self._tasks.clear()

    def add(self, spec: EngineSpec) -> str:
        """Follow one more engine, from now on; its id. Raises ValueError when it is followed already."""
        (spec,) = static_specs([spec])
        if spec.url in self._watches:
            raise ValueError(f"engine {spec.url} is given twice")
        self._watches[spec.url] = Watch(spec, self._registry, self._session, self._listener, self._times)
        self._start(spec.url)
        return spec.url

    def remove(self, engine_id: str) -> None:
        """Follow it no more: it leaves at once, and is not asked again. Unknown ids are ignored."""
        watch = self._watches.pop(engine_id, None)
        task = self._tasks.pop(engine_id, None)
        if task is not None:
            task.cancel()
        if watch is not None:
            watch.leave("removed")

    def suspect(self, engine_id: str) -> None:
        """Somebody could not reach this engine: check it now."""
        watch = self._watches.get(engine_id)
        if watch is not None:
            watch.suspect()

    def _start(self, engine_id: str) -> None:
        if self._group is not None:
            self._tasks[engine_id] = self._group.create_task(self._watches[engine_id].run(), name=f"watch {engine_id}")
