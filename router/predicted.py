"""What does an endpoint hold, going by what was sent there? The stand-in for events that do not come.

Every prompt that was computed at an endpoint is remembered as if the engine kept it: for `ttl_s` after it was last used, and at
most as many blocks as the engine has, the longest unused going first and the tail of a prompt before its head, as engines do.
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from router.index import PrefixIndex

TTL_S = 120.0
ASSUMED_BLOCKS = 8192
"""For an engine that does not say how many blocks it has."""


class _Memory(NamedTuple):
    capacity: int
    expiries: OrderedDict[int, float]
    """Key → when it is given up; the longest unused first."""


class PredictedBlocks:
    """Per slot, the blocks that should be cached there.

    >>> predicted = PredictedBlocks(ttl_s=120.0)
    >>> slot = predicted.add_slot(total_blocks=100)
    >>> predicted.sent(slot, [11, 12], now=0.0)
    >>> predicted.match([11, 12, 13])
    {0: 2}
    >>> predicted.expire(now=120.0), predicted.match([11, 12, 13])
    (2, {})
    """

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self.ttl_s = ttl_s
        self._index = PrefixIndex()
        self._memories: dict[int, _Memory] = {}

    def __len__(self) -> int:
        """Distinct blocks remembered. Runtime complexity: O(1)."""
        return len(self._index)

    def add_slot(self, total_blocks: int | None = None) -> int:
        """A slot that holds nothing, and never more than `total_blocks`. Runtime complexity: O(1)."""
        slot = self._index.add_slot()
        self._memories[slot] = _Memory(ASSUMED_BLOCKS if total_blocks is None else total_blocks, OrderedDict())
        return slot

    def drop_slot(self, slot: int) -> None:
        """Nothing is known of `slot` any more: see `PrefixIndex.drop_slot`. Runtime complexity: O(blocks it held)."""
        self._index.drop_slot(slot)
        del self._memories[slot]

    def sent(self, slot: int, keys: Sequence[int], now: float) -> None:
        """A prompt with the full blocks `keys`, from the root, was computed at `slot`. Runtime complexity: O(len(keys)).

        >>> predicted = PredictedBlocks()
        >>> slot = predicted.add_slot(total_blocks=2)
        >>> predicted.sent(slot, [1], now=0.0)
        >>> predicted.sent(slot, [2, 3, 4], now=1.0)
        >>> predicted.match([1]), predicted.match([2, 3, 4])
        ({}, {0: 2})
        """
        capacity, expiries = self._memories[slot]
        kept = list(keys[:capacity])
        expiry = now + self.ttl_s
        known = len(expiries)
        touch = expiries.move_to_end
        for key in reversed(kept):
            expiries[key] = expiry
            touch(key)
        if len(expiries) == known:
            return
        over = len(expiries) - capacity
        if over > 0:
            self._drop(slot, [expiries.popitem(last=False)[0] for _ in range(over)])
        self._index.store(slot, kept)

    def clear(self, slot: int) -> None:
        """The cache of `slot` is known to be empty. Runtime complexity: O(blocks it held)."""
        expiries = self._memories[slot].expiries
        self._index.remove(slot, list(expiries))
        expiries.clear()

    def expire(self, now: float, limit: int | None = None) -> int:
        """Give up what was last used `ttl_s` or longer ago, `limit` blocks at most; how many were given up.

        Until it is called, nothing expires. Runtime complexity: O(slots + blocks given up).
        """
        given_up = 0
        for slot, (_, expiries) in self._memories.items():
            gone = []
            while expiries and (limit is None or given_up < limit) and next(iter(expiries.values())) <= now:
                gone.append(expiries.popitem(last=False)[0])
                given_up += 1
            if gone:
                self._drop(slot, gone)
        return given_up

    def match(self, keys: Sequence[int], within: int = -1) -> dict[int, int]:
        """Slot → how many leading `keys` should be cached there: see `PrefixIndex.match`."""
        return self._index.match(keys, within)

    def extent(self, slot: int, keys: Sequence[int], start: int) -> int:
        """How many keys from `keys[start]` on should be cached at `slot`: see `PrefixIndex.extent`."""
        return self._index.extent(slot, keys, start)

    def size(self, slot: int) -> int:
        """How many blocks are remembered for `slot`. Runtime complexity: O(1)."""
        return self._index.size(slot)

    def sweep(self, limit: int) -> int:
        """Give back the memory of dropped slots, `limit` entries at most: see `PrefixIndex.sweep`."""
        return self._index.sweep(limit)

    def memory_bytes(self) -> int:
        """About how much memory this takes: the index, and 150 bytes a block for its place in the order of use."""
        return self._index.memory_bytes() + 150 * sum(len(memory.expiries) for memory in self._memories.values())

    def _drop(self, slot: int, keys: list[int]) -> None:
        """Take keys that are in order of use, tails before heads, out of the index: fastest in the order of their chains."""
        keys.reverse()
        self._index.remove(slot, keys)

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(everything)."""
        self._index._check()  # noqa: SLF001 - invariants of a part are invariants of the whole
        for slot, (capacity, expiries) in self._memories.items():
            assert len(expiries) <= capacity
            assert self._index.size(slot) == len(expiries)
            assert all(self._index.extent(slot, [key], 0) for key in expiries)
            assert list(expiries.values()) == sorted(expiries.values())
