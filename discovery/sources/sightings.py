"""What changes, when sources say which engines there are? Their lists are laid together, and compared with what was made of them last.

docker: a, b     file: b, c     ──▶  a, b, c  ──▶  Follow(c)         (b by the words of the source named first)
docker: a        file: b, c     ──▶  a, b, c  ──▶  nothing
docker fails                    ──▶  what it said last still stands
docker: nothing  file: b, c     ──▶  b, c     ──▶  Release(a)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from discovery.sources.found import Found
from engines.types import EngineSpec


class Follow(msgspec.Struct, frozen=True):
    """This engine is there, by these words: it was not, or by others."""

    spec: EngineSpec
    source: str


class Release(msgspec.Struct, frozen=True):
    """No source knows this engine any more: it is to get nothing new, and to be let go when what it has has ended."""

    engine: str


Change = Follow | Release


class State(msgspec.Struct, frozen=True):
    """What a source has said."""

    engines: tuple[str, ...] = ()
    told: bool = False
    """It has said something since we began."""
    failure: str = ""
    """Why it cannot say anything now; what it said last stands."""
    faults: tuple[str, ...] = ()


class Sightings:
    """What each source said last. Engines that are named (`fixed`) are no source's to change."""

    def __init__(self, sources: Sequence[str], fixed: Collection[str] = ()) -> None:
        self._order = tuple(sources)
        self._fixed = frozenset(fixed)
        self._found: dict[str, Found] = {}
        self._states = {source: State() for source in sources}
        self._followed: dict[str, EngineSpec] = {}

    @property
    def states(self) -> dict[str, State]:
        """By source."""
        return dict(self._states)

    @property
    def complete(self) -> bool:
        """Whether every source has said what there is, or that it cannot."""
        return all(state.told or state.failure for state in self._states.values())

    def found(self, source: str, found: Found) -> list[Change]:
        """The source knows just these engines now. O(engines of all sources)."""
        self._found[source] = found
        self._states[source] = State(tuple(spec.url for spec in found.specs), told=True, faults=found.faults)
        return list(self._changes())

    def failed(self, source: str, reason: str) -> None:
        """The source cannot say which engines there are: nothing changes."""
        self._states[source] = msgspec.structs.replace(self._states[source], failure=reason)

    def _changes(self) -> Iterator[Change]:
        wanted: dict[str, Follow] = {}
        for source in self._order:
            for spec in self._found[source].specs if source in self._found else ():
                if spec.url not in self._fixed:
                    wanted.setdefault(spec.url, Follow(spec, source))
        for engine in self._followed.keys() - wanted.keys():
            yield Release(engine)
        for engine, follow in wanted.items():
            if self._followed.get(engine) != follow.spec:
                yield follow
        self._followed = {engine: follow.spec for engine, follow in wanted.items()}
