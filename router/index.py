"""Who holds how much of this prompt's prefix? A radix tree, flattened into one hash table.

A key is the hash of a whole prefix, so parent edges are implied and the tree is a dict: key → bitmask of the slots that hold that
block. Neighbouring blocks of a chain nearly always have the same holders, so a stretch that was stored together is kept as one
*run*: its keys all point to one object with one mask, and a match crosses it with one lookup and one comparison of lists:

    stored by slot 0: a b c d e f        table   a ─┐
    stored by slot 1: a b c d                    b  ├─▶ Run(mask=0b11, keys=[a b c d])
                                                 c  │
    match([a b c x]) = {0: 3, 1: 3}              d ─┘
                                                 e ───▶ 0b01      stretches shorter than `_RUN_MIN` are plain masks
                                                 f ───▶ 0b01

The answers are exact whatever the order of stores and removals: nothing assumes that who holds a block also holds all blocks
before it (engines evict tails first, nearly always), nor that one call's keys form one chain. Order only decides the speed.
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat

_RUN_MIN = 4
_RUN_MAX = 128
"""Bounds what cutting a run costs (its keys are pointed elsewhere) and the search for a key inside one."""

ALL = -1
"""A mask with every slot in it."""


class _Run:
    """A stretch of keys, in the order in which they were stored, that are held by exactly the same slots."""

    __slots__ = ("keys", "mask")

    def __init__(self, mask: int, keys: list[int]) -> None:
        self.mask = mask
        self.keys = keys

    def offset(self, key: int) -> int:
        """Where `key` is; the first and the last are found at once."""
        keys = self.keys
        if keys[0] == key:
            return 0
        if keys[-1] == key:
            return len(keys) - 1
        return keys.index(key)


class PrefixIndex:
    """Which slots hold which blocks.

    A slot is a small number that stands for one KV cache: one tier of one endpoint.

    >>> index = PrefixIndex()
    >>> warm, cold = index.add_slot(), index.add_slot()
    >>> index.store(warm, [11, 12, 13])
    3
    >>> index.match([11, 12, 99])
    {0: 2}
    """

    def __init__(self, max_blocks: int | None = None) -> None:
        """Hold at most `max_blocks` distinct keys: new keys beyond that are refused, and counted in `refused`.

        A refused block looks uncached, which costs a missed hit and never a wrong one.
        """
        self.max_blocks = max_blocks
        self.refused = 0
        self._table: dict[int, int | _Run] = {}
        self._sizes: dict[int, int] = {}
        self._live = 0
        self._free: list[int] = []
        self._slots = 0
        self._dropped: list[int] = []
        self._sweeping: list[int] = []
        self._unswept: list[int] = []

    def __len__(self) -> int:
        """Distinct keys in the table, those of dropped slots included until they are swept. Runtime complexity: O(1).

        >>> index = PrefixIndex()
        >>> index.store(index.add_slot(), [1, 2])
        2
        >>> len(index)
        2
        """
        return len(self._table)

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self._table)} blocks, {len(self._sizes)} slots)"

    def add_slot(self) -> int:
        """The smallest number that is not in use, now in use and holding nothing. Runtime complexity: O(free numbers).

        >>> index = PrefixIndex()
        >>> index.add_slot(), index.add_slot()
        (0, 1)
        """
        if self._free:
            slot = min(self._free)
            self._free.remove(slot)
        else:
            slot = self._slots
            self._slots += 1
        self._live |= 1 << slot
        self._sizes[slot] = 0
        return slot

    def drop_slot(self, slot: int) -> None:
        """From now on `slot` is in no answer; `sweep` gives back its memory, and after that its number. Runtime complexity: O(1).

        >>> index = PrefixIndex()
        >>> index.store(index.add_slot(), [1, 2])
        2
        >>> index.drop_slot(0)
        >>> index.match([1, 2])
        {}
        """
        del self._sizes[slot]
        self._live &= ~(1 << slot)
        self._dropped.append(slot)

    def sweep(self, limit: int) -> int:
        """Visit up to `limit` entries for what dropped slots left behind; the number visited: less than `limit` when all is clean.

        Call it now and then with a limit that the loop can bear (about 0.1 µs an entry). The one step that cannot be cut into
        slices is listing the keys when a pass begins: 7 ms for 400,000 entries. Runtime complexity: O(limit).

        >>> index = PrefixIndex()
        >>> index.store(index.add_slot(), [1, 2])
        2
        >>> index.drop_slot(0)
        >>> index.sweep(limit=100), len(index), index.add_slot()
        (2, 0, 0)
        """
        visited = 0
        while visited < limit:
            if not self._sweeping:
                if not self._dropped:
                    break
                self._sweeping, self._dropped = self._dropped, []
                self._unswept = list(self._table)
            part = self._unswept[visited - limit :]
            del self._unswept[visited - limit :]
            visited += len(part)
            self._clean(part)
            if not self._unswept:
                self._free += self._sweeping
                self._sweeping = []
        return visited

    @property
    def swept(self) -> bool:
        """Whether no entry is left of a dropped slot. Runtime complexity: O(1)."""
        return not self._dropped and not self._sweeping

    def store(self, slot: int, keys: Sequence[int]) -> int:
        """`slot` now holds `keys`, given in chain order for speed; how many of them it did not hold before.

        Raises KeyError when `slot` is not in use. Runtime complexity: O(len(keys)); keys already known as a run cost a
        comparison each, new keys a table entry each.

        >>> index = PrefixIndex()
        >>> slot = index.add_slot()
        >>> index.store(slot, [1, 2]), index.store(slot, [1, 2, 3])
        (2, 1)
        """
        held = self._sizes[slot]
        keys = _as_list(keys)
        bit = 1 << slot
        table = self._table
        added = 0
        limit = sys.maxsize if self.max_blocks is None else self.max_blocks
        start, end = 0, len(keys)
        while start < end:
            entry = table.get(keys[start])
            stop = start + 1
            if entry is None:
                room = limit - len(table)
                if room > 0:
                    part = keys[start : start + min(room, _RUN_MAX)]
                    admitted = self._admit(part, bit)
                    added += admitted
                    if admitted == len(part):
                        stop = start + admitted
                else:
                    self.refused += 1
            elif isinstance(entry, _Run):
                offset = entry.offset(keys[start])
                length = common_length(entry.keys, offset, keys, start)
                stop = start + length
                if not entry.mask & bit:
                    added += length
                    self._cut(entry, offset, length, entry.mask | bit)
            else:
                while stop < end and table.get(keys[stop]) == entry:
                    stop += 1
                if not entry & bit:
                    added += self._place(keys[start:stop], entry | bit)
            start = stop
        self._sizes[slot] = held + added
        return added

    def remove(self, slot: int, keys: Sequence[int]) -> int:
        """`slot` no longer holds `keys`; how many of them it did hold. Unknown keys are ignored.

        Raises KeyError when `slot` is not in use. Runtime complexity: O(len(keys)), fastest in chain order or, as engines evict, from the
        tail: whole stretches at once; a key out of the middle of a run splits it, O(`_RUN_MAX`).

        >>> index = PrefixIndex()
        >>> slot = index.add_slot()
        >>> index.store(slot, [1, 2, 3])
        3
        >>> index.remove(slot, [3, 4]), index.match([1, 2, 3])
        (1, {0: 2})
        """
        held = self._sizes[slot]
        keys = _as_list(keys)
        bit = 1 << slot
        table = self._table
        removed = 0
        start, end = 0, len(keys)
        while start < end:
            key = keys[start]
            entry = table.get(key)
            mask = entry.mask if isinstance(entry, _Run) else entry or 0
            length = 1
            if mask & bit:
                rest = mask ^ bit
                if not isinstance(entry, _Run):
                    if rest:
                        table[key] = rest
                    else:
                        del table[key]
                elif entry.keys[-1] != key:
                    offset = entry.offset(key)
                    length = common_length(entry.keys, offset, keys, start)
                    self._cut(entry, offset, length, rest)
                else:
                    length = common_length(entry.keys[: start - end - 1 : -1], 0, keys, start)
                    self._cut(entry, len(entry.keys) - length, length, rest)
                removed += length
            start += length
        self._sizes[slot] = held - removed
        return removed

    def match(self, keys: Sequence[int], within: int = ALL) -> dict[int, int]:
        """Slot → how many leading keys it holds, for the slots of the mask `within` that hold at least the first.

        Runtime complexity: O(runs crossed + slots that match), plus one comparison per key; O(len(keys)) table look-ups where
        blocks have been evicted out of runs.

        >>> index = PrefixIndex()
        >>> a, b = index.add_slot(), index.add_slot()
        >>> index.store(a, [1, 2, 3]), index.store(b, [1])
        (3, 1)
        >>> index.match([1, 2, 3, 4]) == {a: 3, b: 1}
        True
        >>> index.match([1, 2, 3, 4], within=1 << b) == {b: 1}
        True
        """
        keys = _as_list(keys)
        table = self._table
        held = self._live & within
        depth, end = 0, len(keys)
        depths: dict[int, int] = {}
        while depth < end:
            entry = table.get(keys[depth])
            if entry is None:
                break
            mask = entry.mask if isinstance(entry, _Run) else entry
            if held & mask != held:
                if depth:
                    _note(depths, held & ~mask, depth)
                held &= mask
                if not held:
                    return depths
            if isinstance(entry, _Run):
                depth += common_length(entry.keys, entry.offset(keys[depth]), keys, depth)
            else:
                depth += 1
        if depth:
            _note(depths, held, depth)
        return depths

    def extent(self, slot: int, keys: Sequence[int], start: int) -> int:
        """How many keys, from `keys[start]` on and without a gap, `slot` holds. Runtime complexity: as `match`.

        >>> index = PrefixIndex()
        >>> slot = index.add_slot()
        >>> index.store(slot, [3, 4])
        2
        >>> index.extent(slot, [1, 2, 3, 4, 5], 2)
        2
        """
        keys = _as_list(keys)
        bit = 1 << slot & self._live
        table = self._table
        depth, end = start, len(keys)
        while depth < end:
            entry = table.get(keys[depth])
            if isinstance(entry, _Run):
                if not entry.mask & bit:
                    break
                depth += common_length(entry.keys, entry.offset(keys[depth]), keys, depth)
            elif entry is None or not entry & bit:
                break
            else:
                depth += 1
        return depth - start

    def size(self, slot: int) -> int:
        """How many blocks `slot` holds. Raises KeyError when `slot` is not in use. Runtime complexity: O(1).

        >>> index = PrefixIndex()
        >>> index.size(index.add_slot())
        0
        """
        return self._sizes[slot]

    def memory_bytes(self) -> int:
        """About how much memory the index takes: the table as it is, and 40 bytes a key for the key and its place in a run.

        Runtime complexity: O(1).

        >>> PrefixIndex().memory_bytes() < 1000
        True
        """
        per_key = 32 + 8
        return sys.getsizeof(self._table) + per_key * len(self._table) + sys.getsizeof(self._unswept)

    def _admit(self, keys: list[int], mask: int) -> int:
        """Give `mask` to those of `keys` that are not in the table, as one run; how many there were. The list becomes the index's own."""
        table = self._table
        before = len(table)
        if len(keys) < _RUN_MIN:
            for key in keys:
                table.setdefault(key, mask)
            return len(table) - before
        run = _Run(mask, keys)
        deque(map(table.setdefault, keys, repeat(run)), maxlen=0)
        admitted = len(table) - before
        if admitted < len(keys):
            run.keys = list(dict.fromkeys(key for key in keys if table[key] is run))
        return admitted

    def _place(self, keys: list[int], mask: int) -> int:
        """Point `keys`, which no run holds any more, to `mask`; how many distinct ones there are. The list becomes the index's own."""
        if len(keys) > _RUN_MAX:
            return sum(self._place(keys[start : start + _RUN_MAX], mask) for start in range(0, len(keys), _RUN_MAX))
        if len(keys) < _RUN_MIN:
            for key in keys:
                self._table[key] = mask
            return len(set(keys))
        run = _Run(mask, keys)
        entries: dict[int, int | _Run] = dict.fromkeys(keys, run)
        if len(entries) < len(keys):
            run.keys = list(entries)
        self._table.update(entries)
        return len(entries)

    def _cut(self, run: _Run, offset: int, length: int, mask: int) -> None:
        """Take `length` keys from `offset` on out of `run` and give them `mask`, or forget them when it is 0."""
        keys = run.keys
        if mask and length == len(keys):
            run.mask = mask
            return
        part = keys[offset : offset + length]
        if offset == 0:
            del keys[:length]
        else:
            rest = keys[offset + length :]
            del keys[offset:]
            if rest:
                self._place(rest, run.mask)
        if mask:
            self._place(part, mask)
        else:
            deque(map(self._table.__delitem__, part), maxlen=0)

    def _clean(self, keys: list[int]) -> None:
        """Take the bits of dropped slots out of the entries of `keys`."""
        table, live = self._table, self._live
        for key in keys:
            entry = table.get(key)
            if entry is None:
                continue
            if isinstance(entry, _Run):
                entry.mask &= live
                if not entry.mask:
                    for gone in entry.keys:
                        del table[gone]
            elif not entry & live:
                del table[key]
            elif entry & ~live:
                table[key] = entry & live

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(everything)."""
        counts = dict.fromkeys(self._sizes, 0)
        leaving = {*self._dropped, *self._sweeping}
        runs: dict[int, _Run] = {}
        for key, entry in self._table.items():
            if isinstance(entry, _Run):
                assert key in entry.keys
                runs[id(entry)] = entry
            mask = entry.mask if isinstance(entry, _Run) else entry
            assert mask > 0, "an entry that nobody holds"
            for slot in _slots_of(mask):
                assert slot in counts or slot in leaving, "an entry of a slot that is not in use"
                if slot in counts:
                    counts[slot] += 1
        for run in runs.values():
            assert 0 < len(run.keys) <= _RUN_MAX
            assert len(set(run.keys)) == len(run.keys)
            assert all(self._table[key] is run for key in run.keys)
        assert counts == self._sizes
        assert self._live == sum(1 << slot for slot in self._sizes)
        assert sorted([*self._sizes, *self._free, *leaving]) == list(range(self._slots))
        assert self.max_blocks is None or len(self._table) <= self.max_blocks
        swept = set(self._table).difference(self._unswept) if self._sweeping else set()
        for key in swept:
            entry = self._table[key]
            mask = entry.mask if isinstance(entry, _Run) else entry
            assert not any(mask >> slot & 1 for slot in self._sweeping), "a swept entry with a dropped slot in it"


def _as_list(keys: Sequence[int]) -> list[int]:
    return keys if isinstance(keys, list) else list(keys)


def common_length(run: list[int], offset: int, keys: list[int], start: int) -> int:
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


def _note(depths: dict[int, int], mask: int, depth: int) -> None:
    """Write `depth` for every slot in `mask`."""
    while mask:
        lowest = mask & -mask
        depths[lowest.bit_length() - 1] = depth
        mask ^= lowest


def _slots_of(mask: int) -> Iterable[int]:
    """The slots in `mask`, smallest first."""
    depths: dict[int, int] = {}
    _note(depths, mask, 0)
    return depths
