"""How is what an engine held given up without a pause? Freeing a dict of millions of blocks is one step of tens of milliseconds.

a life of a cache ends ──▶ its dicts, out of everybody's sight ──▶ a slice of entries freed in each pass of the loop
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

SLICE = 4096
"""Entries freed in one pass: about a millisecond of cold memory."""


class Remains:
    """Dicts that nobody needs any more, and that nobody else has."""

    def __init__(self) -> None:
        self._dicts: deque[dict[Any, Any]] = deque()

    def __len__(self) -> int:
        """Entries that are still to be freed. O(dicts)."""
        return sum(map(len, self._dicts))

    def add(self, dicts: Iterable[dict[Any, Any]]) -> None:
        """Free these as well, the large ones little by little."""
        idle = not self._dicts
        self._dicts += [given_up for given_up in dicts if len(given_up) > SLICE]
        if idle and self._dicts:
            self._free_soon()

    def _free_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._free)

    def _free(self) -> None:
        first = self._dicts[0]
        for _ in range(min(SLICE, len(first))):
            first.popitem()
        if not first:
            self._dicts.popleft()
        if self._dicts:
            self._free_soon()
