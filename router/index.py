"""Who holds how much of this prompt's prefix? A radix tree, flattened into one hash table of where runs begin.

A key is the hash of a whole prefix, so it has one parent, and edges are implied. Blocks that follow each other nearly always have the same
holders, because they were stored together: such a stretch is one *run*, with one mask of the slots that hold it, and only its first key is
in the table. A match crosses it with one look-up and one comparison of bytes:

    stored by slot 0: a b c d e f        starts   a ──▶ Run(mask=0b11, keys=[a b c d])
    stored by slot 1: a b c d                     e ──▶ 0b01       stretches shorter than `_RUN_MIN` are plain masks
    match([a b c x]) = {0: 3, 1: 3}               f ──▶ 0b01
                                         ends     d ──▶ the run, for engines evict tails first

Why looking at first keys is enough: who holds a block and the one before it holds both in one run, or a run or a mask begins between them. A
slot holds a key in one place only, so a run with both would be a second place for the first. What begins at one key is one entry: where two
runs come to begin alike, they are parted where they differ and their masks joined. Otherwise runs of different slots may overlap.

The answers are exact whatever the order of stores and removals: nothing assumes that who holds a block also holds all blocks
before it (engines evict tails first, nearly always). Order only decides the speed: a key in the middle of a run is looked for in all runs of
its slot, which then has plain masks in that run's place.

Nothing here may stop the process for long, however many millions of keys there are. A dict that grows is copied whole (125 ms at 2.8
million keys), so a table is 256 dicts, by a key's lowest byte. The garbage collector looks at all that a container points to, so there
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
"""Bounds what parting a run costs, and how far back `extent` looks for the run that it begins in."""
_SHARDS = 256
_SPARSE_BYTES = 128
"""An entry takes 30 bytes in a dict as full as it gets, 60 in one that has just grown: beyond this it has lost most of what it had."""
_RUN_BYTES = 250
"""Of a run besides its keys: the two objects, its places in three tables, and the numbers that it is found by."""
_FEW = 8
"""Keys, up to which looking for each in the bytes of a run is faster than unpacking it."""
_MANY = 8
"""Slots, from which on a mask is read as a whole."""
_ALIKE_MAX = 64
"""Beginnings that are common to many slots, for which that has been read."""
_TO_BITS = bytes.maketrans(b"01", b"\0\1")

ALL = -1
"""A mask with every slot in it."""


class _Run(msgspec.Struct, gc=False, weakref=False, eq=False):
    """A stretch of a chain, held by exactly these slots."""

    mask: int
    keys: bytes
    """Packed."""


_Entry = int | _Run
"""Who holds a key: a mask, or the run that begins with it."""
_Shard = dict[int, _Entry]


class PrefixIndex:
    """Which slots hold which blocks.

    A slot is a small number that stands for one KV cache: one tier of one endpoint. What is stored and removed are packed keys.

    >>> index = PrefixIndex()
    >>> warm, cold = index.add_slot(), index.add_slot()
    >>> index.store(warm, pack_keys([11, 12, 13]))
    3
    >>> index.match([11, 12, 99])
    {0: 2}
    """

    def __init__(self, max_blocks: int | None = None) -> None:
        """Hold at most `max_blocks` keys: new keys beyond that are refused, and counted in `refused`.

        A refused block looks uncached, which costs a missed hit and never a wrong one.
        """
        self.max_blocks = max_blocks
        self.refused = 0
        self._starts: list[_Shard] = [{} for _ in range(_SHARDS)]
        """First key of a run → the run; key that is in no run → its mask. By a key's lowest byte, which is the first of the packed key."""
        self._ends: list[dict[int, _Run]] = [{} for _ in range(_SHARDS)]
        """Last key of a run → that run. Of several that end alike it knows one or none: the others' ends are found as their middles are."""
        self._runs: dict[int, dict[int, None]] = {}
        """Slot → first keys of the runs that it is in."""
        self._alike: dict[tuple[int, int], dict[int, int]] = {}
        """Mask and depth → slot → that depth."""
        self._run_count = 0
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
        """Keys kept, those of dropped slots included until they are swept. Runtime complexity: O(1).

        One for each distinct key, where whoever holds a block holds all before it; else a key may be kept twice, for different slots.

        >>> index = PrefixIndex()
        >>> index.store(index.add_slot(), pack_keys([1, 2]))
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
        self._runs[slot] = {}
        return slot

    def drop_slot(self, slot: int) -> None:
        """From now on `slot` is in no answer; `sweep` gives back its memory, and after that its number. Runtime complexity: O(its runs).

        >>> index = PrefixIndex()
        >>> index.store(index.add_slot(), pack_keys([1, 2]))
        2
        >>> index.drop_slot(0)
        >>> index.match([1, 2])
        {}
        """
        del self._sizes[slot], self._runs[slot]
        self._live &= ~self._bits[slot]
        self._dropped.append(slot)

    def sweep(self, limit: int) -> int:
        """Look at up to `limit` entries for what dropped slots left behind; how many: less than `limit` when all is clean.

        Call it now and then with a limit that the loop can bear (0.2 µs an entry). Tables that became sparse are made anew on the way, so
        the memory is given back as well. Runtime complexity: O(limit), and O(entries / 256) once for every 256th part of the table.

        >>> index = PrefixIndex()
        >>> index.store(index.add_slot(), pack_keys([1, 2]))
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
                self._unswept = list(self._starts[0])
            visited += self._clean(limit - visited)
            if not self._unswept:
                visited += self._end_shard()
        return min(visited, limit)

    @property
    def swept(self) -> bool:
        """Whether no entry is left of a dropped slot. Runtime complexity: O(1)."""
        return not self._dropped and not self._sweeping

    def store(self, slot: int, chain: bytes) -> int:
        """`slot` now holds these blocks, none of which it held and each of which follows the one before it; how many are held now.

        Known to be held already are only blocks behind which, from the first one on, there is none that is not: whoever tells of blocks
        in another way has them held twice. Raises KeyError when `slot` is not in use. Runtime complexity: O(runs crossed), plus one
        comparison per key; O(keys) in chains shorter than `_RUN_MIN`.

        >>> index = PrefixIndex()
        >>> slot = index.add_slot()
        >>> index.store(slot, pack_keys([1, 2])), index.store(slot, pack_keys([1, 2, 3]))
        (2, 1)
        """
        held = self._sizes[slot]
        added = self._hold(chain, self._bits[slot], bounded=self.max_blocks is not None)
        self._sizes[slot] = held + added
        return added

    def remove(self, slot: int, keys: bytes) -> int:
        """`slot` no longer holds these blocks, of any chains; how many of them it did hold. Unknown ones are ignored.

        Raises KeyError when `slot` is not in use. Runtime complexity: O(keys), fastest in chain order or, as engines evict, from the
        tail: whole stretches at once; O(runs of the slot) when a key is in the middle of a run or unknown.

        >>> index = PrefixIndex()
        >>> slot = index.add_slot()
        >>> index.store(slot, pack_keys([1, 2, 3]))
        3
        >>> index.remove(slot, pack_keys([3, 4])), index.match([1, 2, 3])
        (1, {0: 2})
        """
        held = self._sizes[slot]
        bit, starts, ends = self._bits[slot], self._starts, self._ends
        numbers = unpack_keys(keys)
        backwards = b""
        missed: list[int] = []
        removed, at, end = 0, 0, len(keys)
        while at < end:
            key, length = numbers[at // KEY_BYTES], KEY_BYTES
            shard = starts[keys[at]]
            entry = shard.get(key)
            if entry.__class__ is int and entry & bit:
                removed += KEY_BYTES
                self._take_alone(shard, key, entry ^ bit)
            elif (run := ends[keys[at]].get(key)) is not None and run.mask & bit:
                backwards = backwards or pack_keys(numbers[::-1])
                length = _common_end(run.keys, backwards, end - at)
                before = _before(missed, at) if length == KEY_BYTES and missed else 0
                if before:  # in chain order: those before it were missed, being inside the run
                    taken = min(_common_end(run.keys, keys, at + KEY_BYTES), before + KEY_BYTES)
                    del missed[len(missed) - taken // KEY_BYTES + 1 :]
                else:
                    taken = length
                self._take(run, len(run.keys) - taken, taken, bit)
                removed += taken
            elif isinstance(entry, _Run) and entry.mask & bit:
                length = _common(entry.keys, keys, at)
                self._take(entry, 0, length, bit)
                removed += length
            else:
                missed.append(at)
            at += length
        if missed:
            removed += self._take_inside(slot, [numbers[at // KEY_BYTES] for at in missed])
        self._sizes[slot] = held - removed // KEY_BYTES
        return removed // KEY_BYTES

    def match(self, keys: Sequence[int], within: int = ALL) -> dict[int, int]:
        """Slot → how many leading keys of a prompt it holds, for the slots of the mask `within` that hold at least the first.

        Runtime complexity: O(runs crossed + slots that match), plus one comparison per key; O(keys) table look-ups where
        blocks were stored one by one, or evicted out of runs.

        >>> index = PrefixIndex()
        >>> a, b = index.add_slot(), index.add_slot()
        >>> index.store(a, pack_keys([1, 2, 3])), index.store(b, pack_keys([1]))
        (3, 1)
        >>> index.match([1, 2, 3, 4]) == {a: 3, b: 1}
        True
        >>> index.match([1, 2, 3, 4], within=1 << b) == {b: 1}
        True
        """
        starts = self._starts
        if not keys or keys[0] not in starts[keys[0] % _SHARDS]:
            return {}
        data = pack_keys(keys)
        depths: dict[int, int] | None = None
        held = self._live & within
        at, end = 0, len(data)
        while at < end:
            entry = starts[data[at]].get(keys[at // KEY_BYTES])
            if entry is None:
                break
            mask = entry.mask if isinstance(entry, _Run) else entry
            if held & mask != held:
                if at:  # those that are in `mask` are noted again, further on: all that had a beginning in common are known already
                    depths = self._noted(depths, held, at // KEY_BYTES)
                held &= mask
                if not held:
                    return depths or {}
            at += _common(entry.keys, data, at) if isinstance(entry, _Run) else KEY_BYTES
        return self._noted(depths, held, at // KEY_BYTES)

    def extent(self, slot: int, keys: Sequence[int], start: int) -> int:
        """How many keys of a prompt, from `keys[start]` on and without a gap, `slot` holds. Runtime complexity: as `match`.

        >>> index = PrefixIndex()
        >>> slot = index.add_slot()
        >>> index.store(slot, pack_keys([2, 3, 4]))
        3
        >>> index.extent(slot, [1, 2, 3, 4, 5], 2)
        2
        """
        bit = self._bits[slot] & self._live
        if not bit or start >= len(keys):
            return 0
        data, starts = pack_keys(keys), self._starts
        begin = start * KEY_BYTES
        at = self._reach(bit, keys, data, start)
        while begin <= at < len(data):
            entry = starts[data[at]].get(keys[at // KEY_BYTES])
            if isinstance(entry, _Run):
                if not entry.mask & bit:
                    break
                at += _common(entry.keys, data, at)
            elif entry is None or not entry & bit:
                break
            else:
                at += KEY_BYTES
        return max(0, at - begin) // KEY_BYTES

    def size(self, slot: int) -> int:
        """How many blocks `slot` holds. Raises KeyError when `slot` is not in use. Runtime complexity: O(1).

        >>> index = PrefixIndex()
        >>> index.size(index.add_slot())
        0
        """
        return self._sizes[slot]

    def memory_bytes(self) -> int:
        """About how much memory the index takes: the tables as they are, 8 bytes a key in a run, what a run is besides, 32 a key in none.

        Runtime complexity: O(1).

        >>> PrefixIndex().memory_bytes() < 40_000
        True
        """
        tables = sum(map(sys.getsizeof, self._starts)) + sum(map(sys.getsizeof, self._ends))
        alone = sum(map(len, self._starts)) - self._run_count
        return tables + KEY_BYTES * self._blocks + _RUN_BYTES * self._run_count + 24 * alone + sys.getsizeof(self._unswept)

    def _noted(self, depths: dict[int, int] | None, mask: int, depth: int) -> dict[int, int]:
        """The same, with `depth` for every slot in `mask`."""
        if mask.bit_count() >= _MANY:
            known = self._alike.get((mask, depth))
            if known is None:
                if len(self._alike) >= _ALIKE_MAX:
                    self._alike.clear()
                known = self._alike[mask, depth] = dict.fromkeys(_slots_of(mask), depth)
            if depths is None:
                return known.copy()
            depths.update(known)
            return depths
        depths = {} if depths is None else depths
        while mask:
            lowest = mask & -mask
            depths[lowest.bit_length() - 1] = depth
            mask ^= lowest
        return depths

    def _hold(self, chain: bytes, mask: int, *, bounded: bool = False) -> int:
        """Whoever is in `mask` holds these blocks too; how many keys that was new for. `bounded`: there may be no room for new ones.

        Dropped slots hold nothing any more: where a sweep has been already, nothing may come to be theirs.
        """
        starts, mask = self._starts, mask & self._live
        added, at, end = 0, 0, len(chain) if mask else 0
        while at < end:
            first = _key(chain, at)
            shard = starts[chain[at]]
            entry = shard.get(first)
            if entry is None:
                length = min(_RUN_MAX * KEY_BYTES, end - at)
                if bounded and (room := (self.max_blocks or 0) - self._blocks) * KEY_BYTES < length:
                    if room <= 0:
                        self.refused += 1
                        at += KEY_BYTES  # what comes then may be known
                        continue
                    length = room * KEY_BYTES
                if length < _RUN_MIN * KEY_BYTES:
                    length = KEY_BYTES
                    shard[first] = mask
                else:
                    self._begin(shard, first, _Run(mask, chain[at : at + length]))
                self._blocks += length // KEY_BYTES
                added += length
            elif isinstance(entry, _Run):
                length = _common(entry.keys, chain, at)
                if mask & ~entry.mask:
                    added += length
                    self._join(first, entry, length, mask)
            else:
                length = KEY_BYTES
                if mask & ~entry:
                    added += length
                    shard[first] = entry | mask
            at += length
        return added // KEY_BYTES

    def _join(self, first: int, run: _Run, length: int, mask: int) -> None:
        """Whoever is in `mask` holds so many bytes of the keys of `run` too."""
        keys, before = run.keys, run.mask
        if length < _RUN_MIN * KEY_BYTES and length < len(keys):
            self._forget(run)
            self._hold(keys[:length], before | mask)
        else:
            if length < len(keys):
                self._shorten(run, length)
            self._note_run(first, mask & ~before)
            run.mask |= mask
        if length < len(keys):
            self._hold(keys[length:], before)

    def _begin(self, shard: _Shard, first: int, run: _Run) -> None:
        """There is one more run."""
        shard[first] = run
        self._ends[run.keys[-KEY_BYTES]][_key(run.keys, len(run.keys) - KEY_BYTES)] = run
        self._run_count += 1
        self._note_run(first, run.mask)

    def _note_run(self, first: int, mask: int) -> None:
        """Who is in `mask` is now in the run that begins so."""
        for slot in _slots_of(mask & self._live):
            self._runs[slot][first] = None

    def _part_run(self, first: int, mask: int) -> None:
        """Who is in `mask` is in it no more."""
        for slot in _slots_of(mask & self._live):
            del self._runs[slot][first]

    def _shorten(self, run: _Run, length: int) -> None:
        """`run` ends after so many bytes of keys, and what was behind is nowhere."""
        self._unend(run)
        self._blocks -= (len(run.keys) - length) // KEY_BYTES
        run.keys = keys = run.keys[:length]
        self._ends[keys[-KEY_BYTES]][_key(keys, length - KEY_BYTES)] = run

    def _unend(self, run: _Run) -> None:
        at = len(run.keys) - KEY_BYTES
        ends, last = self._ends[run.keys[at]], _key(run.keys, at)
        if ends.get(last) is run:
            del ends[last]

    def _forget(self, run: _Run) -> None:
        """`run` is nowhere any more."""
        first = _key(run.keys, 0)
        del self._starts[run.keys[0]][first]
        self._unend(run)
        self._part_run(first, run.mask)
        self._run_count -= 1
        self._blocks -= len(run.keys) // KEY_BYTES

    def _take_alone(self, shard: _Shard, key: int, left: int) -> None:
        """Leave a key that is in no run to the slots of the mask `left`."""
        if left:
            shard[key] = left
        else:
            del shard[key]
            self._blocks -= 1

    def _take(self, run: _Run, begin: int, length: int, bit: int) -> None:
        """Take `bit` from `length` bytes of keys of `run`, from `begin` on."""
        keys, mask, end = run.keys, run.mask, begin + length
        left = mask ^ bit
        if left and length == len(keys):
            self._part_run(_key(keys, 0), bit)
            run.mask = left
            return
        if begin >= _RUN_MIN * KEY_BYTES:
            self._shorten(run, begin)
        else:
            self._forget(run)
            self._hold(keys[:begin], mask)
        if left:
            self._hold(keys[begin:end], left)
        self._hold(keys[end:], mask)

    def _take_inside(self, slot: int, keys: list[int]) -> int:
        """Take out of the runs of `slot` these keys, which were in the middle of one; how many bytes of them there were.

        A run that one was taken out of becomes plain masks: whoever evicts in no order finds the next one at once. What is left of a run
        that others were taken out of meanwhile may be some already. Where that meets runs of other slots, runs of this one that are still to
        be looked at may be parted too: whoever was not found is looked for again, once something has changed.
        """
        bit, wanted = self._bits[slot], set(keys)
        taken = 0
        for key in keys:
            shard = self._starts[key % _SHARDS]
            if isinstance(entry := shard.get(key), int) and entry & bit:
                self._take_alone(shard, key, entry ^ bit)
                taken += KEY_BYTES
                wanted.discard(key)
        few = [pack_keys([key]) for key in wanted] if len(wanted) <= _FEW else None
        for first in tuple(self._runs[slot]):
            run = self._starts[first % _SHARDS].get(first)
            if not isinstance(run, _Run) or not run.mask & bit:
                continue
            if few is not None and not any(key in run.keys for key in few):
                continue
            numbers = unpack_keys(run.keys)
            found = wanted.intersection(numbers)
            if not found:
                continue
            packed, mask = run.keys, run.mask
            self._forget(run)
            for place, number in enumerate(numbers):
                if left := mask ^ bit if number in found else mask:
                    self._hold(packed[place * KEY_BYTES : (place + 1) * KEY_BYTES], left)
            taken += len(found) * KEY_BYTES
            wanted -= found
            if not wanted:
                return taken
        return taken + self._take_inside(slot, list(wanted)) if taken else 0

    def _reach(self, bit: int, keys: Sequence[int], data: bytes, start: int) -> int:
        """Where in `data` the run or mask ends that has `keys[start]` for the slot of `bit`; before it, if there is none."""
        for place in range(start, max(-1, start - _RUN_MAX), -1):
            entry = self._starts[data[place * KEY_BYTES]].get(keys[place])
            if isinstance(entry, _Run):
                if entry.mask & bit:
                    return place * KEY_BYTES + _common(entry.keys, data, place * KEY_BYTES)
            elif entry is not None and entry & bit:
                return (place + 1) * KEY_BYTES
        return -1

    def _clean(self, limit: int) -> int:
        """Take the bits of dropped slots out of about `limit` entries of the shard being swept, and what is in a run with them; how many."""
        shard, unswept, live = self._starts[self._swept_shards], self._unswept, self._live
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
                    self._forget(entry)
            elif not entry & live:
                del shard[key]
                self._blocks -= 1
            elif entry & ~live:
                shard[key] = entry & live
        return visited

    def _end_shard(self) -> int:
        """The shard being swept is clean: on to the next, if there is one. What that took, in entries that could have been looked at."""
        number = self._swept_shards
        starts, ends = self._starts[number], self._ends[number]
        took = (sys.getsizeof(starts) + sys.getsizeof(ends)) // 1024
        if sys.getsizeof(starts) > _SPARSE_BYTES * len(starts):
            self._starts[number] = dict(starts)
        if sys.getsizeof(ends) > _SPARSE_BYTES * len(ends):
            self._ends[number] = dict(ends)
        self._swept_shards += 1
        if self._swept_shards < _SHARDS:
            self._unswept = list(self._starts[self._swept_shards])
        else:
            self._free += self._sweeping
            self._sweeping = []
        return took

    def _holds(self, slot: int, key: int) -> bool:
        """Whether `slot` holds it, for tests. Runtime complexity: O(its runs)."""
        entry, bit, packed = self._starts[key % _SHARDS].get(key, 0), self._bits[slot], pack_keys([key])
        if bool(entry.mask & bit if isinstance(entry, _Run) else entry & bit):
            return True
        runs = [self._starts[first % _SHARDS][first] for first in self._runs[slot]]
        return any(packed in run.keys and key in unpack_keys(run.keys) for run in runs if isinstance(run, _Run))

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(everything)."""
        leaving = {*self._dropped, *self._sweeping}
        held: dict[int, set[int]] = {slot: set() for slot in (*self._sizes, *leaving)}
        runs: dict[int, set[int]] = {slot: set() for slot in self._sizes}
        ends = {key: run for shard in self._ends for key, run in shard.items()}
        blocks = run_count = 0
        for number, shard in enumerate(self._starts):
            for key, entry in shard.items():
                mask, keys = (entry.mask, unpack_keys(entry.keys)) if isinstance(entry, _Run) else (entry, [key])
                assert key % _SHARDS == number
                assert keys[0] == key
                assert 0 < len(keys) <= _RUN_MAX
                assert len(set(keys)) == len(keys)
                assert mask > 0, "an entry that nobody holds"
                blocks += len(keys)
                run_count += isinstance(entry, _Run)
                for slot in _slots_of(mask):
                    assert slot in held, "an entry of a slot that is not in use"
                    assert held[slot].isdisjoint(keys), "a key in two places"
                    held[slot].update(keys)
                    if isinstance(entry, _Run) and slot in runs:
                        runs[slot].add(key)
        assert {slot: len(held[slot]) for slot in self._sizes} == self._sizes
        assert {slot: set(firsts) for slot, firsts in self._runs.items()} == runs
        for last, run in ends.items():
            assert last in self._ends[last % _SHARDS]
            assert run.keys.endswith(pack_keys([last]))
            assert self._starts[run.keys[0]][_key(run.keys, 0)] is run, "the end of a run that is not there"
        assert (self._blocks, self._run_count) == (blocks, run_count)
        assert not any(map(gc.is_tracked, [*self._starts, *self._ends])), "a table that the garbage collector goes through"
        assert self._live == sum(1 << slot for slot in self._sizes)
        assert sorted([*self._sizes, *self._free, *leaving]) == list(range(len(self._bits)))
        assert self.max_blocks is None or blocks <= self.max_blocks
        if self._sweeping:
            swept = [entry for shard in self._starts[: self._swept_shards] for entry in shard.values()]
            shard = self._starts[self._swept_shards]
            swept += [shard[key] for key in shard.keys() - set(self._unswept)]
            for entry in swept:
                mask = entry.mask if isinstance(entry, _Run) else entry
                assert not any(mask >> slot & 1 for slot in self._sweeping), "a swept entry with a dropped slot in it"


def _key(packed: bytes, at: int) -> int:
    """The key that is there."""
    return int.from_bytes(packed[at : at + KEY_BYTES], "little")


def _before(missed: list[int], at: int) -> int:
    """Of how many bytes the keys are that were missed one after the other, up to `at`."""
    begin = at
    for place in reversed(missed):
        if place != begin - KEY_BYTES:
            break
        begin = place
    return at - begin


def _common(run: bytes, data: bytes, at: int) -> int:
    """Bytes of the keys that are the same from the beginning of `run` and from `data[at]` on."""
    theirs = data[at : at + len(run)]
    if run == theirs:
        return len(run)
    ours = run[: len(theirs)]
    differing = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
    if not differing:
        return len(ours)
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


def _slots_of(mask: int) -> Iterable[int]:
    """The slots in `mask`, smallest first."""
    if not mask & (mask - 1):
        return (mask.bit_length() - 1,) if mask else ()
    return compress(count(), format(mask, "b").encode().translate(_TO_BITS)[::-1])
