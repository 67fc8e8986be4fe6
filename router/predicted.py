"""What does an endpoint hold, going by what was sent there? The stand-in for events that do not come.

Every prompt that was computed at an endpoint is remembered as if the engine kept it: for `ttl_s` after it was last used, and at
most as many blocks as the engine has, the longest unused going first and the tail of a prompt before its head, as engines do.

    sent a b c d, then a b x       table   a ─▶ [a b]     order of use, the longest unused first:  [c d]  [x]  [a b]
                                           c ─▶ [c d]
                                           x ─▶ [x]

A key names a whole prefix, so prompts that part are a tree, and where one goes on is found by its next key. What was always used together
is one stretch, which makes a fresh prompt one entry however long it is. A prompt's use renews what leads to it as well, so the longest
unused stretch never has another behind it: what is held is whole prefixes at all times.

Engines that report cached tokens correct it (`found`). They give up the longest unused first too, so where one lacks what was predicted, it
lacks all that was used before that, and its *reach*, the blocks used since, is what it keeps: none, where it caches nothing. Where it has
more than was remembered, as with a tier of host memory that it says nothing of, the reach doubles.
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from router.index import ALL

TTL_S = 120.0
ASSUMED_BLOCKS = 8192
"""For an engine that does not say how many blocks it has."""
MOST_GROWTH = 16
"""An engine is believed to keep at most so many times the blocks that it says it has."""

Trail = tuple[tuple[int, float], ...]
"""Where each remembered stretch of a prompt ends, in blocks from the root, and when it would have been given up."""


class _Stretch:
    """Keys that follow each other, with no branch between them, and when they are given up."""

    __slots__ = ("expiry", "keys")

    def __init__(self, keys: list[int], expiry: float) -> None:
        self.keys = keys
        self.expiry = expiry


class _Memory:
    """What is remembered of one endpoint."""

    __slots__ = ("blocks", "capacity", "filled", "order", "table", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.capacity = total
        """Its reach: what is remembered at most."""
        self.filled = False
        """Whether something was given up because there was no room."""
        self.blocks = 0
        self.table: dict[int, _Stretch] = {}
        """By first key."""
        self.order: OrderedDict[_Stretch, None] = OrderedDict()
        """The longest unused first."""

    def sent(self, keys: list[int], expiry: float) -> None:
        """These were used, and are from now on until `expiry`."""
        table, order = self.table, self.order
        used: list[_Stretch] = []
        depth, end = 0, len(keys)
        while depth < end:
            stretch = table.get(keys[depth])
            if stretch is None:
                stretch = table[keys[depth]] = _Stretch(keys[depth:], expiry)
                self.blocks += end - depth
            length = _common_length(stretch.keys, 0, keys, depth)
            if length < len(stretch.keys):
                stretch = self._part(stretch, length)
            used.append(stretch)
            depth += length
        for stretch in reversed(used):
            stretch.expiry = expiry
            order[stretch] = None
            order.move_to_end(stretch)
        self.shrink()

    def shrink(self) -> None:
        """Give up what there is no room for."""
        while self.blocks > self.capacity:
            self.filled = True
            self.give_up(self.blocks - self.capacity)

    def give_up(self, most: int) -> int:
        """Take away the end of the longest unused stretch, or all of it; how many blocks."""
        stretch = next(iter(self.order))
        keys = stretch.keys
        gone = min(most, len(keys))
        if gone == len(keys):
            del self.table[keys[0]], self.order[stretch]
        else:
            del keys[-gone:]
        self.blocks -= gone
        return gone

    def held(self, keys: list[int]) -> int:
        """How many leading keys are remembered."""
        depth = 0
        for depth, _ in self.trail(keys):  # noqa: B007  the last one counts
            pass
        return depth

    def trail(self, keys: list[int]) -> Iterator[tuple[int, float]]:
        """The stretches that the leading keys are in, as in `Trail`."""
        table = self.table
        depth, end = 0, len(keys)
        while depth < end:
            stretch = table.get(keys[depth])
            if stretch is None:
                return
            length = _common_length(stretch.keys, 0, keys, depth)
            depth += length
            yield depth, stretch.expiry
            if length < len(stretch.keys):
                return

    def lacked(self, keys: list[int], blocks: int, expiry: float) -> None:
        """Of these keys, only the first `blocks` were still there when they were used anew, and nothing used until then."""
        while self.order and next(iter(self.order)).expiry <= expiry:
            self.give_up(self.blocks)
        self.capacity = min(self.capacity, self.blocks - self.held(keys) + blocks)
        self.shrink()

    def grow(self, blocks: int) -> None:
        """It keeps more than it was believed to: `blocks` at least, if that was for want of room here."""
        if self.filled or self.capacity < self.total:
            self.capacity = min(MOST_GROWTH * self.total, max(2 * self.capacity, blocks))
            self.filled = False

    def _part(self, stretch: _Stretch, length: int) -> _Stretch:
        """The first `length` keys as a stretch of their own, whose place in the order is the caller's to give."""
        head = _Stretch(stretch.keys[:length], stretch.expiry)
        del stretch.keys[:length]
        self.table[head.keys[0]] = head
        self.table[stretch.keys[0]] = stretch
        return head


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
        self._memories: dict[int, _Memory] = {}

    def __len__(self) -> int:
        """Blocks remembered, over all slots. Runtime complexity: O(slots)."""
        return sum(memory.blocks for memory in self._memories.values())

    def add_slot(self, total_blocks: int | None = None) -> int:
        """A slot that holds nothing, and never more than `total_blocks`. Runtime complexity: O(slots)."""
        slot = next(number for number in range(len(self._memories) + 1) if number not in self._memories)
        self._memories[slot] = _Memory(ASSUMED_BLOCKS if total_blocks is None else total_blocks)
        return slot

    def drop_slot(self, slot: int) -> None:
        """Nothing is known of `slot` any more. Runtime complexity: O(blocks it held), to free them."""
        del self._memories[slot]

    def sent(self, slot: int, keys: Sequence[int], now: float) -> None:
        """A prompt with the full blocks `keys`, a chain from the root, was computed at `slot`.

        Runtime complexity: O(stretches crossed or given up), plus one comparison per key.

        >>> predicted = PredictedBlocks()
        >>> slot = predicted.add_slot(total_blocks=2)
        >>> predicted.sent(slot, [1], now=0.0)
        >>> predicted.sent(slot, [2, 3, 4], now=1.0)
        >>> predicted.match([1]), predicted.match([2, 3, 4])
        ({}, {0: 2})
        """
        memory = self._memories[slot]
        memory.sent(list(keys[: memory.capacity]), now + self.ttl_s)

    def trail(self, slot: int, keys: Sequence[int]) -> Trail:
        """What `slot` should hold of `keys`, to be given to `found` when the engine has told. As `match`, for one slot."""
        return tuple(self._memories[slot].trail(list(keys)))

    def found(self, slot: int, keys: Sequence[int], trail: Trail, blocks: int) -> None:
        """The engine has found `blocks` of `keys` cached; `trail` is what it should have had, from before the prompt was `sent`.

        Runtime complexity: O(blocks given up + stretches crossed), plus one comparison per key.

        >>> predicted = PredictedBlocks()
        >>> slot = predicted.add_slot(total_blocks=100)
        >>> for prompt in ([1], [2, 3], [4]):
        ...     predicted.sent(slot, prompt, now=float(prompt[0]))
        >>> trail = predicted.trail(slot, [2, 3])
        >>> predicted.sent(slot, [2, 3], now=5.0)
        >>> predicted.found(slot, [2, 3], trail, 0)
        >>> predicted.match([1]), predicted.match([4]), predicted.match([2, 3])
        ({}, {}, {0: 1})
        """
        memory = self._memories[slot]
        expiry = next((expiry for depth, expiry in trail if depth > blocks), None)
        if expiry is not None:
            memory.lacked(list(keys), blocks, expiry)
        elif blocks > (trail[-1][0] if trail else 0):
            memory.grow(blocks)

    def clear(self, slot: int) -> None:
        """The cache of `slot` is known to be empty. Runtime complexity: O(blocks it held), to free them."""
        self._memories[slot] = _Memory(self._memories[slot].total)

    def expire(self, now: float, limit: int | None = None) -> int:
        """Give up what was last used `ttl_s` or longer ago, `limit` blocks at most; how many were given up.

        Until it is called, nothing expires. Runtime complexity: O(slots + blocks given up).
        """
        given_up = 0
        for memory in self._memories.values():
            while memory.order and (limit is None or given_up < limit) and next(iter(memory.order)).expiry <= now:
                given_up += memory.give_up(memory.blocks if limit is None else limit - given_up)
        return given_up

    def match(self, keys: Sequence[int], within: int = ALL) -> dict[int, int]:
        """Slot → how many leading `keys` should be cached there, for the slots of the mask `within` where it is at least one.

        Runtime complexity: O(slots · stretches crossed), plus one comparison per key and slot.
        """
        keys = keys if isinstance(keys, list) else list(keys)
        found = {slot: memory.held(keys) for slot, memory in self._memories.items() if within >> slot & 1}
        return {slot: depth for slot, depth in found.items() if depth}

    def extent(self, slot: int, keys: Sequence[int], start: int) -> int:
        """How many keys from `keys[start]` on should be cached at `slot`, `keys` being a chain from the root. As `match`."""
        return max(0, self._memories[slot].held(list(keys)) - start)

    def size(self, slot: int) -> int:
        """How many blocks are remembered for `slot`. Runtime complexity: O(1)."""
        return self._memories[slot].blocks

    def memory_bytes(self) -> int:
        """About how much memory this takes: 40 bytes a block for its key, 350 for a stretch and its places."""
        stretches = sum(len(memory.table) for memory in self._memories.values())
        return 40 * len(self) + 350 * stretches

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(everything)."""
        for memory in self._memories.values():
            assert memory.capacity <= MOST_GROWTH * memory.total
            assert memory.blocks == sum(len(stretch.keys) for stretch in memory.order) <= memory.capacity
            assert set(memory.table.values()) == set(memory.order)
            assert all(stretch.keys and memory.table[stretch.keys[0]] is stretch for stretch in memory.order)
            keys = [key for stretch in memory.order for key in stretch.keys]
            assert len(set(keys)) == len(keys)
            expiries = [stretch.expiry for stretch in memory.order]
            assert expiries == sorted(expiries)


def _common_length(run: list[int], offset: int, keys: list[int], start: int) -> int:
    """How many keys from `run[offset]` and from `keys[start]` on are the same; at least 1, which the caller knows."""
    length = min(len(run) - offset, len(keys) - start)
    if run[offset : offset + length] == keys[start : start + length]:
        return length
    low = 1
    high = length - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if run[offset + low : offset + middle] == keys[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low
