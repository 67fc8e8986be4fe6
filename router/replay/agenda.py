"""What happens next in virtual time? A heap of moments, each with something to call; equal ones in the order in which they were put down."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """Moments to come.

    >>> agenda, seen = Agenda(), []
    >>> agenda.at(2.0, lambda: seen.append(agenda.now))
    >>> agenda.at(1.0, lambda: agenda.at(1.5, lambda: seen.append(agenda.now)))
    >>> while agenda.step():
    ...     pass
    >>> seen
    [1.5, 2.0]
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Call it at `moment`, or now where that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(moment, self.now), self._count, call))

    def step(self) -> bool:
        """Call what is next; False where there is nothing."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        call()
        return True
