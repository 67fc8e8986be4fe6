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

from collections import Counter, deque
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from discovery.messages import Clear, Op, Remove, Store
from engines.blocks import TOKEN_BYTES, block_key, block_keys, pack_keys, pack_tokens, root_seed
from engines.events import BlockHash, Cleared, KvEvent, Removed, Skipped, SkipReason, Stored
from engines.types import Tier

_MOST_GROUPS = 256
"""No engine has more KV cache groups; a stream of nonsense must not make us remember more."""


class Change(NamedTuple):
    """What is held has changed: a `Store`, `Remove` or `Clear` whose keys are not packed yet. Nobody changes the list any more."""

    kind: type[Op]
    tier: Tier
    keys: list[int]

    def op(self) -> Op:
        """As it travels."""
        return Clear() if self.kind is Clear else self.kind(self.tier, pack_keys(self.keys))


class _Held:
    """The keys held in one tier, and how many (hash, group) pairs hold each."""

    __slots__ = ("again", "keys")

    def __init__(self) -> None:
        self.keys: dict[int, None] = {}
        """In the order in which they came to be held. A set has no order, takes up to thrice as much, and is gone through by the collector."""
        self.again: dict[int, int] = {}
        """Holders beyond the first; absent when there is one."""

    def add(self, key: int) -> bool:
        """One more holder; whether it is the first."""
        if key in self.keys:
            self.again[key] = self.again.get(key, 0) + 1
            return False
        self.keys[key] = None
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

    def clear(self) -> None:
        """Nothing is held."""
        self.keys.clear()
        self.again.clear()


class _Copies:
    """The engine's names held in one (tier, group), with their keys and how often each was stored."""

    __slots__ = ("again", "keys")

    def __init__(self) -> None:
        self.keys: dict[BlockHash, int] = {}
        self.again: dict[BlockHash, int] = {}
        """Copies beyond the first; absent when there is one, as there nearly always is."""

    def add(self, hashes: list[BlockHash], keys: list[int], held: _Held, *, again: bool = False) -> list[int]:
        """One more copy of each (`again`: unless it has one); the keys among `keys` that were not held before."""
        names, count = self.keys, len(hashes)
        if held.keys.keys().isdisjoint(keys):
            named, holding = len(names), len(held.keys)
            deque(map(names.setdefault, hashes, keys), maxlen=0)
            deque(map(held.keys.setdefault, keys), maxlen=0)
            if len(names) - named == len(held.keys) - holding == count:
                return keys
            # A name came twice, or was known for another key: as if nothing had been done, and then one by one.
            fresh = set(keys)
            for name in hashes:
                if names.get(name) in fresh:  # those known before stand for keys that are held
                    del names[name]
            for key in fresh:
                del held.keys[key]
        new = []
        for name, key in zip(hashes, keys, strict=True):
            if name in names:
                if not again:
                    self.again[name] = self.again.get(name, 0) + 1
                continue
            names[name] = key
            if held.add(key):
                new.append(key)
        return new

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
        self._held = {tier: _Held() for tier in Tier}
        self._partial_groups: set[int] = set()
        """Groups that do not hold whole prefixes; their removals carry nothing but the number."""
        self._orphans = 0
        self._unknown_removals = 0
        self.told_again = False
        """Whether the engine is being asked to tell what it holds: a block stored again is then taken for one told again, not for a further
        copy. What lies in two copies may so be given up with the first; counted, what was told twice would be held for ever."""
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

    def apply(self, events: Iterable[KvEvent]) -> list[Change]:
        """Take in what happened, in order. Returns what changed: changes of one kind and tier are joined. O(tokens + hashes)."""
        changes: list[Change] = []
        for event in events:
            match event:
                case Stored():
                    self._store(event, changes)
                case Removed():
                    self._remove(event, changes)
                case Cleared():
                    changes += self.clear()
                case Skipped():
                    self._skip(event)
        return changes

    def clear(self) -> list[Change]:
        """Forget what is held, as at the start of a new life of the engine's cache. Its block size may then change."""
        held = self.blocks > 0
        self._copies.clear()
        for tier in self._held.values():
            tier.clear()
        self._orphans = self._unknown_removals = 0
        self._odd_size = None
        return [Change(Clear, Tier.DEVICE, [])] if held else []

    def held(self) -> list[Change]:
        """Changes that make an empty copy equal to this: one Store per tier that holds anything, in the order in which it came.

        O(blocks), at some 10 ns each.
        """
        return [Change(Store, tier, list(held.keys)) for tier, held in self._held.items() if held.keys]

    def _store(self, event: Stored, changes: list[Change]) -> None:
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
        self._changed(Store, event.tier, copies.add(event.hashes, keys, self._held[event.tier], again=self.told_again), changes)

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

    def _remove(self, event: Removed, changes: list[Change]) -> None:
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
        self._changed(Remove, tier, self._held[tier].take(keys), changes)

    def _skip(self, event: Skipped) -> None:
        self.skipped[event.reason] += 1
        if event.reason is SkipReason.NOT_FULL_ATTENTION and event.group is not None and len(self._partial_groups) < _MOST_GROUPS:
            self._partial_groups.add(event.group)

    def _changed(self, kind: type[Store | Remove], tier: Tier, keys: list[int], changes: list[Change]) -> None:
        if not keys:
            return
        if changes and changes[-1].kind is kind and changes[-1].tier is tier:
            changes[-1].keys.extend(keys)
        else:
            changes.append(Change(kind, tier, keys))

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
