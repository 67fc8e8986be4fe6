"""When has a transfer arrived? A link carries so many bytes per second, shared equally by what is under way.

each transfer has been given `each` bytes since the link came to be; one that began at `each = e` and is of size s ends at e + s
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

T = TypeVar("T")
_ROUNDING_BYTES = 1e-3


class Link(Generic[T]):
    """What leaves one engine.

    >>> link = Link[str](100.0)
    >>> link.begin("a", 100, now=0.0)
    >>> link.begin("b", 100, now=0.5)
    >>> link.due
    1.5
    >>> link.arrived(now=1.5), link.due
    (['a'], 2.0)
    """

    def __init__(self, bytes_per_s: float) -> None:
        """Infinite for a link that takes no time."""
        self._bytes_per_s = bytes_per_s
        self._each = 0.0
        self._at = 0.0
        self._goals: list[tuple[float, int, T]] = []
        self._count = 0

    @property
    def due(self) -> float:
        """When the next one arrives; infinite while there is none."""
        if not self._goals:
            return math.inf
        return self._at + max(0.0, self._goals[0][0] - self._each) * len(self._goals) / self._bytes_per_s

    def begin(self, what: T, size: float, now: float) -> None:
        """So many bytes are on their way from `now` on."""
        self._advance(now)
        self._count += 1
        heapq.heappush(self._goals, (self._each + size, self._count, what))

    def arrived(self, now: float) -> list[T]:
        """What has arrived by `now`, which is not later than `due`."""
        self._advance(now)
        found = []
        while self._goals and (math.isinf(self._bytes_per_s) or self._goals[0][0] <= self._each + _ROUNDING_BYTES):
            found.append(heapq.heappop(self._goals)[2])
        return found

    def _advance(self, now: float) -> None:
        if self._goals and not math.isinf(self._bytes_per_s):
            self._each += (now - self._at) * self._bytes_per_s / len(self._goals)
        self._at = now
