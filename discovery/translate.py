"""Which of our block keys does one rank's cache hold, told by its events in the engine's own names?

    Stored(hashes [a b c], parent p)  ──▶  keys chained from p's key  ──▶  those newly held:        Store(tier, k1 k2 k3)
    Removed(hashes [b])               ──▶  b's key, one copy fewer    ──▶  those no longer held:    Remove(tier, k2)

The one idea: an engine's hash is an opaque name, and what is held is *counted* twice over. An engine stores one hash several times
(per tier, group and physical copy), and several hashes can stand for one key. Only a key's first and last holder are worth telling.
"""

# ruff: noqa: S101 — `_check` asserts; only tests call it

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable

from discovery.messages import Clear, Op, Remove, Store
from engines.blocks import TOKEN_BYTES, block_key, block_keys, pack_keys, pack_tokens, root_seed
from engines.events import BlockHash, Cleared, KvEvent, Removed, Skipped, SkipReason, Stored
from engines.types import Tier

_MASK = (1 << 64) - 1
_MOST_GROUPS = 256
"""No engine has more KV cache groups; a stream of nonsense must not make us remember more."""
_ODD = {Tier.DEVICE: 1, Tier.HOST: 0x9E3779B97F4A7C15, Tier.DISK: 0xC2B2AE3D27D4EB4F}


def digest_of(key: int, tier: Tier) -> int:
    """What one held (key, tier) pair contributes to a digest, which is the XOR of them all; 64 bits.

    A key is a hash already, so the device tier needs no mixing; the others are multiplied by an odd constant, which XOR does not
    commute with, so that a block that changed tiers, or two that swapped, show.
    """
    return key * _ODD[tier] & _MASK


class _Copies:
    """The engine's names held in one (tier, group), with their keys and how often each was stored."""

    __slots__ = ("again", "keys")

    def __init__(self) -> None:
        self.keys: dict[BlockHash, int] = {}
        self.again: dict[BlockHash, int] = {}
        """Copies beyond the first; absent when there is one, as there nearly always is."""

    def drop_one(self, name: BlockHash) -> bool:
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
    """The state of one (engine, rank); methods that change it return the operations that tell others of the change.

    Memory is bounded by what the engine says it holds: one dict entry per held (hash, tier, group), one per held (key, tier).
    """

    def __init__(self, configured_block_size: int | None = None) -> None:
        self._configured = configured_block_size
        self._learned: int | None = None
        self._odd_size: int | None = None
        """A block size that device events had although blocks of another size are held."""
        self._copies: dict[tuple[Tier, int], _Copies] = {}
        self._holders: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        """How many (hash, group) pairs hold each key."""
        self._partial_groups: set[int] = set()
        """Groups that do not hold whole prefixes; their removals carry nothing but the number."""
        self._digest = 0
        self._orphans = 0
        self._unknown_removals = 0
        self.skipped: Counter[str] = Counter()
        """Events not used, by `SkipReason`; never reset."""

    @property
    def blocks(self) -> int:
        """Distinct (key, tier) pairs held. O(1)."""
        return sum(map(len, self._holders.values()))

    @property
    def digest(self) -> int:
        """XOR of `digest_of` over the pairs held; 0 when none is. O(1)."""
        return self._digest

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
        """Take in what happened, in order. Returns what changed: runs of one kind and tier are joined. O(tokens + hashes)."""
        runs: list[_Run] = []
        removed: list[Removed] = []
        for event in events:
            if removed and not (isinstance(event, Removed) and event.tier is removed[0].tier and event.group == removed[0].group):
                self._remove(removed, runs)
                removed = []
            match event:
                case Stored():
                    self._store(event, runs)
                case Removed():
                    removed.append(event)  # vLLM sends one event per block: neighbours are dealt with at once
                case Cleared():
                    if self._forget():
                        runs.append(_Run(None, Tier.DEVICE))
                case Skipped():
                    self._skip(event)
        if removed:
            self._remove(removed, runs)
        return [run.op() for run in runs]

    def clear(self) -> list[Op]:
        """Forget what is held, as at the start of a new life of the engine's cache. Its block size may then change."""
        return [Clear()] if self._forget() else []

    def snapshot(self) -> list[Op]:
        """Operations that make an empty copy equal to this: one Store per tier that holds anything, oldest key first. O(blocks)."""
        return [Store(tier, pack_keys(keys)) for tier, keys in self._holders.items() if keys]

    def _store(self, event: Stored, runs: list[_Run]) -> None:
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
        copies = self._copies.setdefault((event.tier, event.group), _Copies())
        names, holders, new = copies.keys, self._holders[event.tier], []
        for name, key in zip(event.hashes, keys, strict=True):
            if name in names:
                copies.again[name] = copies.again.get(name, 0) + 1
                continue
            names[name] = key
            count = holders.get(key, 0)
            holders[key] = count + 1
            if not count:
                new.append(key)
        self._changed(Store, event.tier, new, runs)

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

    def _remove(self, events: list[Removed], runs: list[_Run]) -> None:
        """Take out blocks of one tier and group."""
        tier, group = events[0].tier, events[0].group
        if group in self._partial_groups:
            self.skipped[SkipReason.NOT_FULL_ATTENTION] += len(events)
            return
        hashes = [name for event in events for name in event.hashes]
        copies = self._copies.get((tier, group))
        if copies is None:
            self._unknown_removals += len(hashes)
            return
        names, holders, gone = copies.keys, self._holders[tier], []
        if copies.again:
            hashes = [name for name in hashes if not copies.drop_one(name)]
        for name in hashes:
            key = names.pop(name, None)
            if key is None:
                self._unknown_removals += 1
                continue
            count = holders.pop(key)
            if count == 1:
                gone.append(key)
            else:
                holders[key] = count - 1
        if not names:
            del self._copies[tier, group]
        self._changed(Remove, tier, gone, runs)

    def _skip(self, event: Skipped) -> None:
        self.skipped[event.reason] += 1
        if event.reason is SkipReason.NOT_FULL_ATTENTION and event.group is not None and len(self._partial_groups) < _MOST_GROUPS:
            self._partial_groups.add(event.group)

    def _forget(self) -> bool:
        held = self.blocks > 0
        self._copies.clear()
        for keys in self._holders.values():
            keys.clear()
        self._digest = self._orphans = self._unknown_removals = 0
        self._odd_size = None
        return held

    def _changed(self, kind: type[Store | Remove], tier: Tier, keys: list[int], runs: list[_Run]) -> None:
        if not keys:
            return
        mixed = keys if tier is Tier.DEVICE else [digest_of(key, tier) for key in keys]
        self._digest = functools.reduce(operator.xor, mixed, self._digest)
        if runs and runs[-1].kind is kind and runs[-1].tier is tier:
            runs[-1].keys.extend(keys)
        else:
            runs.append(_Run(kind, tier, keys))

    def _check(self) -> None:
        """Assert every invariant; for tests. O(blocks)."""
        holders: dict[Tier, Counter[int]] = {tier: Counter() for tier in Tier}
        for (tier, _group), copies in self._copies.items():
            assert copies.keys
            assert copies.again.keys() <= copies.keys.keys()
            assert all(count > 0 for count in copies.again.values())
            holders[tier].update(copies.keys.values())
        assert holders == self._holders
        pairs = [digest_of(key, tier) for tier, keys in self._holders.items() for key in keys]
        assert self._digest == functools.reduce(operator.xor, pairs, 0)
        assert self.blocks == len(pairs)


class _Run:
    """Neighbouring changes of one kind and tier; `kind` None is a clear."""

    __slots__ = ("keys", "kind", "tier")

    def __init__(self, kind: type[Store | Remove] | None, tier: Tier, keys: list[int] | None = None) -> None:
        self.kind = kind
        self.tier = tier
        self.keys = keys or []

    def op(self) -> Op:
        return self.kind(self.tier, pack_keys(self.keys)) if self.kind else Clear()


def _keys(event: Stored, parent: int) -> list[int]:
    packed = pack_tokens(event.tokens)
    if event.extras is None:
        return block_keys(packed, event.block_size, parent)
    width, keys = event.block_size * TOKEN_BYTES, []
    for index, extra in enumerate(event.extras):
        parent = block_key(packed[index * width : (index + 1) * width], parent, extra or b"")
        keys.append(parent)
    return keys
