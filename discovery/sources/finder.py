"""Who asks the sources? A task for each; what they say is made into changes of who is followed.

source ──▶ found ──▶ sightings ──▶ Follow, Release ──▶ target (a router's roster; a relay's monitor)
       ──▶ SourceFailed: a line in the log, a pause, again; nobody is let go for it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from discovery.logs import event
from discovery.sources.found import Found, SourceFailed
from discovery.sources.sightings import Follow, Release, Sightings, State
from discovery.sources.source import Source

if TYPE_CHECKING:
    from discovery.readings import Reading
    from engines.types import EngineSpec

PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0

_log = logging.getLogger(__name__)


class Target(Protocol):
    """Who follows engines on behalf of sources."""

    def follow(self, spec: EngineSpec, source: str) -> None:
        """The engine is there, by these words. It may be followed already, or be about to be let go."""
        ...

    def release(self, engine_id: str) -> None:
        """The engine gets nothing new, and is let go when what it has has ended. Unknown ids are ignored."""
        ...


class Finder:
    """All sources of one process."""

    def __init__(self, sources: Sequence[Source], target: Target, fixed: Collection[str] = ()) -> None:
        self.failures = dict.fromkeys((source.name for source in sources), 0)
        self._sources = tuple(sources)
        self._target = target
        self._sightings = Sightings([source.name for source in sources], fixed)

    @property
    def complete(self) -> bool:
        """Whether every source has been heard, or has failed to say anything."""
        return self._sightings.complete

    @property
    def states(self) -> dict[str, State]:
        """What each source has said."""
        return self._sightings.states

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._follow(source), name=f"source {source.name}")
            await asyncio.Event().wait()

    async def _follow(self, source: Source) -> None:
        pause_s = PAUSE_MIN_S

        def tell(found: Found) -> None:
            nonlocal pause_s
            pause_s = PAUSE_MIN_S
            self._found(source, found)

        while True:
            try:
                await source.run(tell)
                reason = "it ended"
            except SourceFailed as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  a library's own, or an answer that nobody foresaw: no reason to stop routing
                _log.exception("source failed in a way nobody foresaw")
                reason = f"{type(error).__name__}: {error}"
            self._failed(source, reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _found(self, source: Source, found: Found) -> None:
        before = self._sightings.states[source.name]
        changes = self._sightings.found(source.name, found)
        if before.failure:
            event(_log, logging.INFO, "source answers again", source=source.name, engines=len(found.specs))
        for fault in found.faults:
            if fault not in before.faults:
                event(_log, logging.ERROR, "engine cannot be followed", source=source.name, reason=fault)
        for change in changes:
            match change:
                case Follow():
                    event(_log, logging.INFO, "engine found", engine=change.spec.url, source=change.source)
                    self._target.follow(change.spec, change.source)
                case Release():
                    event(_log, logging.INFO, "engine is no source's any more", engine=change.engine, source=source.name)
                    self._target.release(change.engine)

    def _failed(self, source: Source, reason: str) -> None:
        before = self._sightings.states[source.name]
        self.failures[source.name] += 1
        self._sightings.failed(source.name, reason)
        if before.failure != reason:
            event(
                _log,
                logging.ERROR,
                "source failed; what it said last stands",
                source=source.name,
                reason=reason,
                engines=len(before.engines),
            )


def of_finder(finder: Finder) -> Iterator[Reading]:
    """What sources say, for the metrics page."""
    states, label = finder.states, ("source",)
    yield (
        "discovery_source_up",
        "Whether the source can say which engines there are.",
        label,
        [((name,), float(state.told and not state.failure)) for name, state in states.items()],
    )
    yield (
        "discovery_source_engines",
        "Engines that the source knows, as it said last.",
        label,
        [((name,), float(len(state.engines))) for name, state in states.items()],
    )
    yield (
        "discovery_source_faults",
        "Engines there that cannot be followed; the log says why.",
        label,
        [((name,), float(len(state.faults))) for name, state in states.items()],
    )
    yield (
        "discovery_source_failures_total",
        "Times that the source could not say which engines there are.",
        label,
        [((name,), float(count)) for name, count in finder.failures.items()],
    )
