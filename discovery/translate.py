"""Which of our block keys does one rank's cache hold, told by its events in the engine's own names?

    Stored(hashes [a b c], parent p)  ──▶  keys chained from p's key  ──▶  those newly held:        Store(tier, k1 k2 k3)
    Removed(hashes [b])               ──▶  b's key, one copy fewer    ──▶  those no longer held:    Remove(tier, k2)

The one idea: an engine's hash is an opaque name, and what is held is *counted* twice over. An engine stores one hash several times
(per tier, group and physical copy), and several hashes can stand for one key. Only a key's first and last holder are worth telling.

Nearly always there is one copy of a hash and one hash for a key. So counts are kept of the others only, and events that touch none of
those are dealt with whole, by dicts and sets, not block by block.
"""

# ruff: noqa: S101 — `_check` asserts; only tests call it

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import compress, count, pairwise, repeat
from typing import Any, NamedTuple

from discovery.messages import Clear, Op, Remove, Store
from engines.blocks import TOKEN_BYTES, block_key, block_keys, pack_keys, pack_tokens, root_seed
from engines.events import BlockHash, Cleared, KvEvent, Removed, Skipped, SkipReason, Stored
from engines.types import Tier

_MOST_GROUPS = 256
"""No engine has more KV cache groups; a stream of nonsense must not make us remember more."""


class Held(NamedTuple):
    """What is held in one tier at some moment, in the order in which it came to be."""

    tier: Tier
    keys: list[int]
    parents: list[int]

    def stored(self, begin: int, end: int) -> Store:
        """A part of it, as it travels. O(blocks in it)."""
        keys, parents = self.keys[begin:end], self.parents[begin + 1 : end]
        ends = [*compress(count(1), map(operator.ne, keys, parents)), len(keys)]
        return Store(self.tier, pack_keys(keys), _lengths(ends))


class _Change(NamedTuple):
    """What will be told: keys that are not packed yet, and where chains of them end."""

    kind: type[Op]
    tier: Tier
    keys: list[int]
    ends: list[int]

    def op(self) -> Op:
        if self.kind is Store:
            return Store(self.tier, pack_keys(self.keys), _lengths(self.ends))
        return Clear() if self.kind is Clear else Remove(self.tier, pack_keys(self.keys))


def _lengths(ends: list[int]) -> list[int]:
    return [end - begin for begin, end in pairwise((0, *ends))] if len(ends) > 1 else []


class HeldKeys:
    """The keys held in one tier, and how many (hash, group) pairs hold each."""

    __slots__ = ("again", "keys")

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}
        """Key → its parent's, in the order in which they came to be held. Nothing that the collector goes through, as a set would be."""
        self.again: dict[int, int] = {}
        """Holders beyond the first; absent when there is one."""

    def add(self, key: int, parent: int) -> bool:
        """One more holder; whether it is the first."""
        if key in self.keys:
            self.again[key] = self.again.get(key, 0) + 1
            return False
        self.keys[key] = parent
        return True

    def take(self, keys: list[int]) -> list[int]:
        """One holder fewer of each, all of which are held; those that have none left."""
        again = self.again
        if again and not again.keys().isdisjoint(keys):
            gone = []
            for key in keys:
                more = again.get(key)
                if more is None:
                    gone.append(key)
                    del self.keys[key]
                elif more == 1:
                    del again[key]
                else:
                    again[key] = more - 1
            return gone
        deque(map(self.keys.pop, keys), maxlen=0)
        return keys

    def clear(self) -> dict[int, int]:
        """Nothing is held; what was."""
        keys, self.keys = self.keys, {}
        self.again.clear()
        return keys


class _Copies:
    """The engine's names held in one (tier, group), with their keys and how often each was stored."""

    __slots__ = ("again", "keys")

    def __init__(self) -> None:
        self.keys: dict[BlockHash, int] = {}
        self.again: dict[BlockHash, int] = {}
        """Copies beyond the first; absent when there is one, as there nearly always is."""

    def add(
        self, hashes: list[BlockHash], keys: list[int], parent: int, held: HeldKeys, *, again: bool = False
    ) -> tuple[list[int], list[int]]:
        """One more copy of each of a chain behind `parent` (`again`: unless it has one).

        Those of `keys` that were not held before, and where chains of them end.
        """
        names, count, parents = self.keys, len(hashes), [parent, *keys]
        if held.keys.keys().isdisjoint(keys):
            named, holding = len(names), len(held.keys)
            deque(map(names.setdefault, hashes, keys), maxlen=0)
            deque(map(held.keys.setdefault, keys, parents), maxlen=0)
            if len(names) - named == len(held.keys) - holding == count:
                return keys, [count]
            # A name came twice, or was known for another key: as if nothing had been done, and then one by one.
            fresh = set(keys)
            for name in hashes:
                if names.get(name) in fresh:  # those known before stand for keys that are held
                    del names[name]
            for key in fresh:
                del held.keys[key]
        return self._add_each(hashes, keys, parents, held, again=again)

    def _add_each(
        self, hashes: list[BlockHash], keys: list[int], parents: list[int], held: HeldKeys, *, again: bool
    ) -> tuple[list[int], list[int]]:
        """As `add`, one by one."""
        names = self.keys
        new: list[int] = []
        ends: list[int] = []
        for name, key, before in zip(hashes, keys, parents, strict=False):
            if name in names:
                if not again:
                    self.again[name] = self.again.get(name, 0) + 1
                continue
            names[name] = key
            if held.add(key, before):
                if new and new[-1] != before:
                    ends.append(len(new))
                new.append(key)
        return new, [*ends, len(new)]

    def take(self, hashes: list[BlockHash]) -> tuple[list[int], int]:
        """One copy fewer of each: the keys of those that have none left, and how many were not known to have any."""
        again = self.again
        if again and not again.keys().isdisjoint(hashes):
            hashes = [name for name in hashes if not self._drop_one(name)]
        names = self.keys
        before = len(names)
        keys = list(map(names.pop, hashes, repeat(None)))
        if before - len(names) == len(hashes):
            return keys, 0  # type: ignore[return-value]  # as many as were asked for: none of them is None
        known = [key for key in keys if key is not None]
        return known, len(hashes) - len(known)

    def _drop_one(self, name: BlockHash) -> bool:
        """Take one copy away, unless it is the last; whether it was not."""
        more = self.again.get(name)
        if more is None:
            return False
        if more == 1:
            del self.again[name]
        else:
            self.again[name] = more - 1
        return True


class Translator:
    """The state of one (engine, rank); methods that change it return what others have to be told.

    Memory is bounded by what the engine says it holds: one dict entry per held (hash, tier, group), one per held (key, tier).
    """

    def __init__(self, configured_block_size: int | None = None) -> None:
        self._configured = configured_block_size
        self._learned: int | None = None
        self._odd_size: int | None = None
        """A block size that device events had although blocks of another size are held."""
        self._copies: dict[tuple[Tier, int], _Copies] = {}
        self._held = {tier: HeldKeys() for tier in Tier}
        self._partial_groups: set[int] = set()
        """Groups that do not hold whole prefixes; their removals carry nothing but the number."""
        self._orphans = 0
        self._unknown_removals = 0
        self.told_again = False
        """Whether the engine is being asked to tell what it holds: a block stored again is then taken for one told again, not for a further
        copy. What lies in two copies may so be given up with the first; counted, what was told twice would be held for ever."""
        self.remains: list[dict[Any, Any]] = []
        """What was held before it was last cleared; for whoever asked for that to take away and to free."""
        self.skipped: Counter[str] = Counter()
        """Events not used, by `SkipReason`; never reset."""

    @property
    def blocks(self) -> int:
        """Distinct (key, tier) pairs held. O(1)."""
        return sum(len(held.keys) for held in self._held.values())

    @property
    def block_size(self) -> int | None:
        """Tokens per block as the device tier's events have it; None before the first."""
        return self._learned

    @property
    def mismatch(self) -> str:
        """Why this cache cannot be compared with our keys, in words; "" when it can."""
        if self._configured is not None and self._learned is not None and self._configured != self._learned:
            return f"block size is configured as {self._configured}, events carry blocks of {self._learned}"
        if self._odd_size is not None:
            return f"events carry blocks of {self._odd_size} while blocks of {self._learned} are held"
        return ""

    @property
    def orphans(self) -> int:
        """Blocks, since all was last cleared, that were stored under a parent not known here and so could not be placed."""
        return self._orphans

    @property
    def unknown_removals(self) -> int:
        """Blocks, since all was last cleared, that were removed without being known to be held."""
        return self._unknown_removals

    def apply(self, events: Iterable[KvEvent]) -> list[Op]:
        """Take in what happened, in order. Returns what changed: changes of one kind and tier are joined. O(tokens + hashes)."""
        changes: list[_Change] = []
        for event in events:
            match event:
                case Stored():
                    self._store(event, changes)
                case Removed():
                    self._remove(event, changes)
                case Cleared():
                    changes += [_Change(Clear, Tier.DEVICE, [], [])] * len(self.clear())
                case Skipped():
                    self._skip(event)
        return [change.op() for change in changes]

    def clear(self) -> list[Op]:
        """Forget what is held, as at the start of a new life of the engine's cache. Its block size may then change."""
        held = self.blocks > 0
        self.remains += [copies.keys for copies in self._copies.values()]
        self._copies.clear()
        self.remains += [tier.clear() for tier in self._held.values()]
        self._partial_groups.clear()  # another life may be another model's
        self._orphans = self._unknown_removals = 0
        self._odd_size = None
        return [Clear()] if held else []

    def held(self) -> list[Held]:
        """What makes an empty copy equal to this, for each tier that holds anything. O(blocks), at some 20 ns each."""
        return [Held(tier, list(held.keys), list(held.keys.values())) for tier, held in self._held.items() if held.keys]

    def _store(self, event: Stored, changes: list[_Change]) -> None:
        if reason := self._unusable(event):
            self.skipped[reason] += 1
            return
        if not event.hashes:
            return
        parent = root_seed(event.lora, event.salt) if event.parent is None else self._key_of(event.parent, event.tier, event.group)
        if parent is None:
            self._orphans += len(event.hashes)
            return
        try:
            keys = _keys(event, parent)
        except (OverflowError, TypeError):  # token ids that are no 32-bit numbers
            self.skipped[SkipReason.MALFORMED] += 1
            return
        copies = self._copies.get((event.tier, event.group))
        if copies is None:
            copies = self._copies[event.tier, event.group] = _Copies()
        new, ends = copies.add(event.hashes, keys, parent, self._held[event.tier], again=self.told_again)
        self._changed(Store, event.tier, new, ends, changes)

    def _unusable(self, event: Stored) -> SkipReason | None:
        size, blocks = event.block_size, len(event.hashes)
        if size <= 0 or len(event.tokens) != size * blocks or (event.extras is not None and len(event.extras) != blocks):
            return SkipReason.MALFORMED
        if event.tier is Tier.DEVICE and blocks and size != self._learned:
            if self.blocks:
                self._odd_size = size
            else:
                self._learned, self._odd_size = size, None
        # Offloading may group several device blocks into one of its own: its keys would not be ours.
        return SkipReason.BLOCK_SIZE if size != self._learned else None

    def _key_of(self, name: BlockHash, tier: Tier, group: int) -> int | None:
        """A parent's key. It is nearly always held beside its children; a host copy may have its parent on the device only."""
        beside = self._copies.get((tier, group))
        if beside is not None and (key := beside.keys.get(name)) is not None:
            return key
        return next((copies.keys[name] for copies in self._copies.values() if name in copies.keys), None)

    def _remove(self, event: Removed, changes: list[_Change]) -> None:
        tier, group = event.tier, event.group
        if group in self._partial_groups:
            self.skipped[SkipReason.NOT_FULL_ATTENTION] += len(event.hashes)
            return
        copies = self._copies.get((tier, group))
        if copies is None:
            self._unknown_removals += len(event.hashes)
            return
        keys, unknown = copies.take(event.hashes)
        self._unknown_removals += unknown
        if not copies.keys:
            del self._copies[tier, group]
        self._changed(Remove, tier, self._held[tier].take(keys), (), changes)

    def _skip(self, event: Skipped) -> None:
        self.skipped[event.reason] += 1
        if event.reason is SkipReason.NOT_FULL_ATTENTION and event.group is not None and len(self._partial_groups) < _MOST_GROUPS:
            self._partial_groups.add(event.group)

    def _changed(self, kind: type[Store | Remove], tier: Tier, keys: list[int], ends: Sequence[int], changes: list[_Change]) -> None:
        if not keys:
            return
        last = changes[-1] if changes else None
        if last is not None and last.kind is kind and last.tier is tier:
            before = len(last.keys)
            if ends and self._held[tier].keys.get(keys[0]) == last.keys[-1]:
                last.ends.pop()  # the chain goes on
            last.ends.extend(before + end for end in ends)
            last.keys.extend(keys)
        else:
            changes.append(_Change(kind, tier, keys, list(ends)))

    def _check(self) -> None:
        """Assert every invariant; for tests. O(blocks)."""
        holders: dict[Tier, Counter[int]] = {tier: Counter() for tier in Tier}
        for (tier, _group), copies in self._copies.items():
            assert copies.keys
            assert copies.again.keys() <= copies.keys.keys()
            assert all(count > 0 for count in copies.again.values())
            holders[tier].update(copies.keys.values())
        for tier, held in self._held.items():
            assert held.keys.keys() == holders[tier].keys()
            assert held.again == {key: count - 1 for key, count in holders[tier].items() if count > 1}
        assert self.blocks == sum(map(len, holders.values()))


def _keys(event: Stored, parent: int) -> list[int]:
    packed = pack_tokens(event.tokens)
    if event.extras is None:
        return block_keys(packed, event.block_size, parent)
    width, keys = event.block_size * TOKEN_BYTES, []
    for index, extra in enumerate(event.extras):
        parent = block_key(packed[index * width : (index + 1) * width], parent, extra or b"")
        keys.append(parent)
    return keys
