"""Who holds how much of this prompt's prefix? A radix tree, flattened into one hash table.

A key is the hash of a whole prefix, so parent edges are implied and the tree is a table: key → bitmask of the slots that hold that
block. Neighbouring blocks of a chain nearly always have the same holders, so a stretch that was stored together is kept as one
*run*: its keys all point to one object with one mask, and a match crosses it with one lookup and one comparison of bytes:

    stored by slot 0: a b c d e f        table   a ─┐
    stored by slot 1: a b c d                    b  ├─▶ Run(mask=0b11, keys=[a b c d])
                                                 c  │
    match([a b c x]) = {0: 3, 1: 3}              d ─┘
                                                 e ───▶ 0b01      stretches shorter than `_RUN_MIN` are plain masks
                                                 f ───▶ 0b01

The answers are exact whatever the order of stores and removals: nothing assumes that who holds a block also holds all blocks
before it (engines evict tails first, nearly always), nor that one call's keys form one chain. Order only decides the speed.

Nothing here may stop the process for long, however many millions of keys there are. A dict that grows is copied whole (125 ms at 2.8
million keys), so the table is 256 dicts, by a key's lowest byte. The garbage collector looks at all that a container points to, so there
is none: keys, masks and runs are objects it does not follow, and dicts that hold only such are none of its business.
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from itertools import compress, count

import msgspec

from engines.blocks import KEY_BYTES, pack_keys, unpack_keys

_RUN_MIN = 4
_RUN_MAX = 128
"""Bounds what cutting a run costs (its keys are pointed elsewhere) and the search for a key inside one."""
_SHARDS = 256
_SPARSE_BYTES = 128
"""An entry takes 30 bytes in a dict as full as it gets, 60 in one that has just grown: beyond this it has lost most of what it had."""
_MANY = 8
"""Slots, from which on a mask is read as a whole."""
_TO_BITS = bytes.maketrans(b"01", b"\0\1")

ALL = -1
"""A mask with every slot in it."""


class _Run(msgspec.Struct, gc=False, weakref=False, eq=False):
    """A stretch of keys, in the order in which they were stored, that are held by exactly the same slots."""

    mask: int
    keys: bytes
    """Packed."""


_Entry = int | _Run
"""Who holds a key: a mask, or the run it is in."""
_Shard = dict[int, _Entry]


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
        self._shards: list[_Shard] = [{} for _ in range(_SHARDS)]
        """By a key's lowest byte, which is the first of the packed key."""
        self._blocks = 0
        self._sizes: dict[int, int] = {}
        self._live = 0
        self._free: list[int] = []
        self._bits: list[int] = []
        """Slot → its bit: one object for all masks that are nothing else."""
        self._dropped: list[int] = []
        self._sweeping: list[int] = []
        self._swept_shards = 0
        self._unswept: list[int] = []
        """Of the shard behind those."""

    def __len__(self) -> int:
        """Distinct keys in the table, those of dropped slots included until they are swept. Runtime complexity: O(1).

        >>> index = PrefixIndex()
        >>> index.store(index.add_slot(), [1, 2])
        2
        >>> len(index)
        2
        """
        return self._blocks

    def __repr__(self) -> str:
        return f"PrefixIndex({self._blocks} blocks, {len(self._sizes)} slots)"

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
            slot = len(self._bits)
            self._bits.append(1 << slot)
        self._live |= self._bits[slot]
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
        self._live &= ~self._bits[slot]
        self._dropped.append(slot)

    def sweep(self, limit: int) -> int:
        """Look at up to `limit` entries for what dropped slots left behind; how many: less than `limit` when all is clean.

        Call it now and then with a limit that the loop can bear (0.2 µs an entry). Tables that became sparse are made anew on the way, so
        the memory is given back as well. Runtime complexity: O(limit), and O(entries / 256) once for every 256th part of the table.

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
                self._swept_shards = 0
                self._unswept = list(self._shards[0])
            visited += self._clean(limit - visited)
            if not self._unswept:
                visited += self._end_shard()
        return min(visited, limit)

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
        keys, data, bit, shards = _as_list(keys), pack_keys(keys), self._bits[slot], self._shards
        added, at, end = 0, 0, len(data)
        while at < end:
            entry = shards[data[at]].get(keys[at // KEY_BYTES])
            if entry is None:
                admitted = self._admit(keys, data, at, bit)
                added += admitted
                self.refused += not admitted
                length = max(admitted, 1) * KEY_BYTES
            elif isinstance(entry, _Run):
                begin = _find(entry.keys, data, at)
                length = _common(entry.keys, begin, data, at)
                if not entry.mask & bit:
                    added += length // KEY_BYTES
                    self._cut(entry, begin, length, entry.mask | bit)
            else:
                length = KEY_BYTES
                while at + length < end and shards[data[at + length]].get(keys[(at + length) // KEY_BYTES]) == entry:
                    length += KEY_BYTES
                if not entry & bit:
                    alike = list(dict.fromkeys(keys[at // KEY_BYTES : (at + length) // KEY_BYTES]))
                    added += len(alike)
                    self._place(alike, entry | bit)
            at += length
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
        keys, data, bit, shards = _as_list(keys), pack_keys(keys), self._bits[slot], self._shards
        backwards = b""
        removed, at, end = 0, 0, len(data)
        while at < end:
            key, length = keys[at // KEY_BYTES], KEY_BYTES
            shard = shards[data[at]]
            entry = shard.get(key)
            if isinstance(entry, _Run):
                if entry.mask & bit:
                    if entry.keys.endswith(data[at : at + KEY_BYTES]):
                        backwards = backwards or pack_keys(keys[::-1])
                        length = _common_end(entry.keys, backwards, end - at)
                        begin = len(entry.keys) - length
                    else:
                        begin = _find(entry.keys, data, at)
                        length = _common(entry.keys, begin, data, at)
                    self._cut(entry, begin, length, entry.mask ^ bit)
                    removed += length // KEY_BYTES
            elif entry is not None and entry & bit:
                removed += 1
                if entry == bit:
                    del shard[key]
                    self._blocks -= 1
                else:
                    shard[key] = entry ^ bit
            at += length
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
        depths: dict[int, int] = {}
        shards = self._shards
        if not keys or keys[0] not in shards[keys[0] % _SHARDS]:
            return depths
        keys, data = _as_list(keys), pack_keys(keys)
        held = self._live & within
        at, end = 0, len(data)
        while at < end:
            entry = shards[data[at]].get(keys[at // KEY_BYTES])
            if entry is None:
                break
            mask = entry.mask if isinstance(entry, _Run) else entry
            if held & mask != held:
                if at:
                    _note(depths, held & ~mask, at // KEY_BYTES)
                held &= mask
                if not held:
                    return depths
            at += _common(entry.keys, _find(entry.keys, data, at), data, at) if isinstance(entry, _Run) else KEY_BYTES
        if at:
            _note(depths, held, at // KEY_BYTES)
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
        keys, data, shards = _as_list(keys), pack_keys(keys), self._shards
        bit = self._bits[slot] & self._live
        begin = at = start * KEY_BYTES
        while at < len(data):
            entry = shards[data[at]].get(keys[at // KEY_BYTES])
            if isinstance(entry, _Run):
                if not entry.mask & bit:
                    break
                at += _common(entry.keys, _find(entry.keys, data, at), data, at)
            elif entry is None or not entry & bit:
                break
            else:
                at += KEY_BYTES
        return (at - begin) // KEY_BYTES

    def size(self, slot: int) -> int:
        """How many blocks `slot` holds. Raises KeyError when `slot` is not in use. Runtime complexity: O(1).

        >>> index = PrefixIndex()
        >>> index.size(index.add_slot())
        0
        """
        return self._sizes[slot]

    def memory_bytes(self) -> int:
        """About how much memory the index takes: the tables as they are, and 60 bytes a key for the key, its place in a run, and the run.

        Runtime complexity: O(1).

        >>> PrefixIndex().memory_bytes() < 20_000
        True
        """
        return sum(map(sys.getsizeof, self._shards)) + 60 * self._blocks + sys.getsizeof(self._unswept)

    def _admit(self, keys: list[int], data: bytes, at: int, mask: int) -> int:
        """Give `mask` to keys from `data[at]` on, the first of which is not in the table, up to one that is; how many."""
        room = _RUN_MAX if self.max_blocks is None else min(_RUN_MAX, self.max_blocks - self._blocks)
        if room <= 0:
            return 0
        first = at // KEY_BYTES
        part, packed = keys[first : first + room], data[at : at + room * KEY_BYTES]
        run = _Run(mask, packed) if len(part) >= _RUN_MIN else None
        entry = mask if run is None else run
        shards, admitted = self._shards, 0
        for number, key in zip(packed[::KEY_BYTES], part, strict=True):
            shard = shards[number]
            if key in shard:
                break
            shard[key] = entry
            admitted += 1
        if run is not None and admitted < len(part):
            run.keys = packed[: admitted * KEY_BYTES]
        self._blocks += admitted
        return admitted

    def _place(self, keys: list[int], mask: int) -> None:
        """Point `keys`, distinct and in the table but in no run, to `mask`."""
        shards = self._shards
        for start in range(0, len(keys), _RUN_MAX):
            part = keys[start : start + _RUN_MAX]
            packed = pack_keys(part)
            entry = _Run(mask, packed) if len(part) >= _RUN_MIN else mask
            for number, key in zip(packed[::KEY_BYTES], part, strict=True):
                shards[number][key] = entry

    def _forget(self, packed: bytes) -> None:
        """Nobody holds these keys, all of which are in the table."""
        shards = self._shards
        for number, key in zip(packed[::KEY_BYTES], unpack_keys(packed), strict=True):
            del shards[number][key]
        self._blocks -= len(packed) // KEY_BYTES

    def _cut(self, run: _Run, begin: int, length: int, mask: int) -> None:
        """Take `length` bytes of keys from `begin` on out of `run` and give them `mask`, or forget them when it is 0."""
        keys = run.keys
        if mask and length == len(keys):
            run.mask = mask
            return
        part, rest = keys[begin : begin + length], keys[begin + length :]
        if begin:
            run.keys = keys[:begin]
            self._place(unpack_keys(rest), run.mask)
        else:
            run.keys = rest
        if mask:
            self._place(unpack_keys(part), mask)
        else:
            self._forget(part)

    def _clean(self, limit: int) -> int:
        """Take the bits of dropped slots out of about `limit` entries of the shard being swept, and what is in a run with them; how many."""
        shard, unswept, live = self._shards[self._swept_shards], self._unswept, self._live
        visited = 0
        while unswept and visited < limit:
            key = unswept.pop()
            entry = shard.get(key)
            if entry is None:
                continue
            visited += 1
            if isinstance(entry, _Run):
                entry.mask &= live
                if not entry.mask:
                    visited += len(entry.keys) // KEY_BYTES - 1
                    self._forget(entry.keys)
            elif not entry & live:
                del shard[key]
                self._blocks -= 1
            elif entry & ~live:
                shard[key] = entry & live
        return visited

    def _end_shard(self) -> int:
        """The shard being swept is clean: on to the next, if there is one. What that took, in entries that could have been looked at."""
        shard = self._shards[self._swept_shards]
        took = sys.getsizeof(shard) // 1024
        if sys.getsizeof(shard) > _SPARSE_BYTES * len(shard):
            self._shards[self._swept_shards] = dict(shard)
        self._swept_shards += 1
        if self._swept_shards < _SHARDS:
            self._unswept = list(self._shards[self._swept_shards])
        else:
            self._free += self._sweeping
            self._sweeping = []
        return took

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(everything)."""
        counts = dict.fromkeys(self._sizes, 0)
        leaving = {*self._dropped, *self._sweeping}
        runs: dict[int, _Run] = {}
        table = {key: entry for shard in self._shards for key, entry in shard.items()}
        for key, entry in table.items():
            if isinstance(entry, _Run):
                assert key in unpack_keys(entry.keys)
                runs[id(entry)] = entry
            mask = entry.mask if isinstance(entry, _Run) else entry
            assert mask > 0, "an entry that nobody holds"
            for slot in _slots_of(mask):
                assert slot in counts or slot in leaving, "an entry of a slot that is not in use"
                if slot in counts:
                    counts[slot] += 1
        for run in runs.values():
            keys = unpack_keys(run.keys)
            assert 0 < len(keys) <= _RUN_MAX
            assert len(set(keys)) == len(keys)
            assert all(table[key] is run for key in keys)
        assert counts == self._sizes
        assert self._blocks == len(table)
        assert all(key % _SHARDS == number for number, shard in enumerate(self._shards) for key in shard)
        assert not any(map(gc.is_tracked, self._shards)), "a table that the garbage collector goes through"
        assert self._live == sum(1 << slot for slot in self._sizes)
        assert sorted([*self._sizes, *self._free, *leaving]) == list(range(len(self._bits)))
        assert self.max_blocks is None or len(table) <= self.max_blocks
        if self._sweeping:
            swept = set().union(*self._shards[: self._swept_shards])
            swept |= self._shards[self._swept_shards].keys() - set(self._unswept)
            for key in swept:
                entry = table[key]
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


def _find(run: bytes, data: bytes, at: int) -> int:
    """Where in `run` the key is that is at `data[at]`; the caller knows that it is there."""
    key = data[at : at + KEY_BYTES]
    found = run.find(key)
    while found % KEY_BYTES:
        found = run.find(key, found + 1)
    return found


def _common(run: bytes, begin: int, data: bytes, at: int) -> int:
    """Bytes of the keys that are the same from `run[begin]` and from `data[at]` on."""
    length = min(len(run) - begin, len(data) - at)
    ours, theirs = run[begin : begin + length], data[at : at + length]
    if ours == theirs:
        return length
    differing = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
    same_bits = (differing & -differing).bit_length() - 1
    return same_bits // 8 // KEY_BYTES * KEY_BYTES


def _common_end(run: bytes, data: bytes, end: int) -> int:
    """Bytes of the keys that are the same up to the end of `run` and up to `data[end]`."""
    length = min(len(run), end)
    ours, theirs = run[len(run) - length :], data[end - length : end]
    if ours == theirs:
        return length
    differing = int.from_bytes(ours, "big") ^ int.from_bytes(theirs, "big")
    same_bits = (differing & -differing).bit_length() - 1
    return same_bits // 8 // KEY_BYTES * KEY_BYTES


def _note(depths: dict[int, int], mask: int, depth: int) -> None:
    """Write `depth` for every slot in `mask`."""
    if mask.bit_count() >= _MANY:
        depths.update(dict.fromkeys(_slots_of(mask), depth))
        return
    while mask:
        lowest = mask & -mask
        depths[lowest.bit_length() - 1] = depth
        mask ^= lowest


def _slots_of(mask: int) -> Iterable[int]:
    """The slots in `mask`, smallest first."""
    return compress(count(), format(mask, "b").encode().translate(_TO_BITS)[::-1])
