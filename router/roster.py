"""Which engines should there be? What an operator or a source changes while the router runs: added, drained, removed.

add ──▶ followed ──▶ (joins) ──▶ serves ◀──undrain── drained ──▶ nothing new; what it has ends well
                                   └────── remove ─────▶ drained ──▶ nothing left in flight ──▶ followed no more
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Protocol

from discovery.logs import event

if TYPE_CHECKING:
    from engines.types import EngineSpec
    from router.fleet import Fleet
    from router.load import LoadBook

log = logging.getLogger(__name__)


class UnknownEngine(LookupError):
    """No engine of this id is followed."""


class Followed(Protocol):
    """Who follows engines: the monitor."""

    def spec(self, engine_id: str) -> EngineSpec | None:
        """How an engine was named; None when it is not followed."""
        ...

    def add(self, spec: EngineSpec) -> str:
        """Follow it."""
        ...

    def remove(self, engine_id: str) -> None:
        """Follow it no more."""
        ...


class Added(enum.Enum):
    """What adding an engine came to."""

    NEW = "added"
    SAME = "unchanged"
    """It is followed by just these words."""
    REPLACED = "replaced"
    """It was followed by other words, or was being removed."""


class Roster:
    """Changes to the fleet."""

    def __init__(self, followed: Followed, fleet: Fleet, load: LoadBook) -> None:
        self._followed = followed
        self._fleet = fleet
        self._load = load
        self._leaving: dict[str, bool] = {}
        """Engines that will be removed, and whether they were draining before."""
        self._found: set[str] = set()
        """Engines that a source has found: all others are an operator's."""

    def add(self, spec: EngineSpec) -> Added:
        """Follow the engine; what was at its URL before, by other words, is gone everywhere. The URL is normalised already."""
        old = self._followed.spec(spec.url)
        if old == spec and spec.url not in self._leaving:
            self._found.discard(spec.url)
            return Added.SAME
        if old is not None:
            self._forget(spec.url)
        self._followed.add(spec)
        outcome = Added.NEW if old is None else Added.REPLACED
        event(
            log,
            logging.INFO,
            "engine named by an operator",
            engine=spec.url,
            role=spec.role.value if spec.role is not None else "",
            outcome=outcome.value,
        )
        return outcome

    def follow(self, spec: EngineSpec, source: str) -> None:
        """A source has found this engine, its URL normalised. One that an operator has named stays as it was named."""
        old = self._followed.spec(spec.url)
        if old is not None and spec.url not in self._found:
            event(log, logging.INFO, "engine found is named already", engine=spec.url, source=source)
        elif old == spec:
            if not self._leaving.pop(spec.url, True):
                self._fleet.undrain(spec.url)
        else:
            if old is not None:
                self._forget(spec.url)
            self._followed.add(spec)
            self._found.add(spec.url)

    def release(self, engine_id: str) -> None:
        """No source knows this engine any more: if it was one's, it drains and is removed."""
        if engine_id in self._found:
            self.remove(engine_id, now=False)

    def drain(self, engine_id: str) -> None:
        """Nothing new goes there from now on. Raises UnknownEngine."""
        self._must_be_followed(engine_id)
        self._fleet.drain(engine_id)
        event(log, logging.INFO, "engine drains", engine=engine_id, in_flight=self.in_flight(engine_id))

    def undrain(self, engine_id: str) -> None:
        """It takes requests again, and is not removed. Raises UnknownEngine."""
        self._must_be_followed(engine_id)
        self._leaving.pop(engine_id, None)
        self._fleet.undrain(engine_id)
        event(log, logging.INFO, "engine drains no more", engine=engine_id)

    def remove(self, engine_id: str, *, now: bool) -> bool:
        """Follow the engine no more, once it has nothing in flight or `now`; whether it is gone. Raises UnknownEngine.

        What is in flight on an engine that is removed now may still end well.
        """
        self._must_be_followed(engine_id)
        if not now and self.in_flight(engine_id):
            was_draining = self._leaving.get(engine_id, self._fleet.is_draining(engine_id))
            self.drain(engine_id)
            self._leaving[engine_id] = was_draining
            return False
        self._forget(engine_id)
        event(log, logging.INFO, "engine removed", engine=engine_id)
        return True

    def sweep(self) -> None:
        """Let go of those that were to be removed and have nothing in flight any more."""
        for engine_id in [leaving for leaving in self._leaving if not self.in_flight(leaving)]:
            self.remove(engine_id, now=True)

    def is_leaving(self, engine_id: str) -> bool:
        """Whether the engine will be removed once it has nothing in flight."""
        return engine_id in self._leaving

    def in_flight(self, engine_id: str) -> int:
        """Requests of this router that the engine has not ended."""
        member = self._fleet.members.get(engine_id)
        return 0 if member is None else sum(self._load.own(endpoint).requests for endpoint in member.endpoints)

    def _forget(self, engine_id: str) -> None:
        self._followed.remove(engine_id)
        self._fleet.forget(engine_id)
        self._fleet.undrain(engine_id)
        self._leaving.pop(engine_id, None)
        self._found.discard(engine_id)

    def _must_be_followed(self, engine_id: str) -> None:
        if self._followed.spec(engine_id) is None:
            raise UnknownEngine(engine_id)
