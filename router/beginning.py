"""Does a router that has just begun know its engines? Until it does it is not ready: requests would miss what engines have cached.

Known is an engine that serves, its cache with it, and one that was asked in vain. What takes longer than that is not waited for: an engine
that says nothing at all, or whose cache takes too long to learn. Once over, it is over: engines that join later join a router that is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from discovery.monitor import Monitor
    from discovery.sources.finder import Finder
    from router.fleet import Fleet

SILENT_S: Final = 2.0
"""For engines that neither answer nor refuse."""
TOLD_WITHIN_S: Final = 10.0
"""For sources that are to say which engines there are."""
LEARNED_WITHIN_S: Final = 20.0
"""For those that have answered: their tokenizers are checked and their caches learned."""


class Beginning:
    """From when it is made until the engines are known."""

    def __init__(self, monitor: Monitor, fleet: Fleet, finder: Finder, *, clock: Callable[[], float]) -> None:
        self._monitor = monitor
        self._finder = finder
        self._fleet = fleet
        self._clock = clock
        self._began = clock()
        self._over = False

    @property
    def over(self) -> bool:
        """Whether the engines are known, or have had their time. O(engines) until they are."""
        if not self._over:
            waited_s = self._clock() - self._began
            told = self._finder.complete or waited_s >= TOLD_WITHIN_S
            self._over = told and all(self._known(engine, waited_s) for engine in self._monitor.watched)
        return self._over

    def _known(self, engine: str, waited_s: float) -> bool:
        member = self._fleet.members.get(engine)
        if member is None:
            return bool(self._monitor.waiting_for(engine)) or waited_s >= SILENT_S
        return member.serving or waited_s >= LEARNED_WITHIN_S
