"""What travels on the bus: shapes only.

A relay turns one rank's KV events into a numbered stream of small operations on *keys* (design: a key is the hash of a whole
prefix). `epoch` names one life of the engine's cache as seen by one life of the relay: `<relay life>.<n>`, `n` growing; `seq` starts at 0 in
each epoch and grows by one per batch. Keys travel packed, 8 bytes each, little-endian, and blocks that are stored in chains: each block of
one follows the block before it.

    subject kv.<engine>.<rank>:  Batch 0 · Batch 1 · Beacon(seq=2) · Batch 2 · …          (`seq` of a beacon: the next batch's)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from engines.blocks import KEY_BYTES
from engines.types import Endpoint, Tier


class Store(msgspec.Struct, frozen=True, array_like=True, tag="chains"):
    """These blocks are now held in this tier, which were not."""

    tier: Tier
    keys: bytes
    lengths: list[int] = []
    """Blocks of each of the chains that `keys` consists of; empty when it is one."""

    @property
    def whole(self) -> bool:
        """Whether it can be read: what comes from elsewhere may be anything."""
        blocks, rest = divmod(len(self.keys), KEY_BYTES)
        return not rest and (not self.lengths or (min(self.lengths) > 0 and sum(self.lengths) == blocks))

    def chains(self) -> Iterable[bytes]:
        """Its chains, packed."""
        return [self.keys[begin:end] for begin, end in self._bounds()] if self.lengths else (self.keys,)

    def part(self, begin: int, end: int) -> Store:
        """The same of the keys from one place to another, in bytes."""
        if not self.lengths:
            return Store(self.tier, self.keys[begin:end])
        spans = [min(end, behind) - max(begin, start) for start, behind in self._bounds()]
        lengths = [span // KEY_BYTES for span in spans if span > 0]
        return Store(self.tier, self.keys[begin:end], lengths if len(lengths) > 1 else [])

    def _bounds(self) -> Iterator[tuple[int, int]]:
        begin = 0
        for length in self.lengths:
            end = begin + length * KEY_BYTES
            yield begin, end
            begin = end


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """These blocks are no longer held in this tier."""

    tier: Tier
    keys: bytes

    @property
    def whole(self) -> bool:
        """Whether it can be read."""
        return not len(self.keys) % KEY_BYTES

    def part(self, begin: int, end: int) -> Remove:
        """The same of the keys from one place to another, in bytes."""
        return Remove(self.tier, self.keys[begin:end])


class Clear(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Nothing is held any more, in any tier."""

    @property
    def whole(self) -> bool:
        """It can always be read."""
        return True


Op = Store | Remove | Clear


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """What changed in one or several steps of the engine's scheduler."""

    epoch: str
    seq: int
    ops: list[Op]


class Beacon(msgspec.Struct, frozen=True, array_like=True, tag="beacon"):
    """Published every few seconds and on every change of epoch or signal: what a complete copy of the stream must hold by now."""

    epoch: str
    seq: int
    """The number the next batch will carry."""
    blocks: int
    digest: int
    """XOR of `discovery.digests.digest_of` over all (key, tier) pairs held."""
    block_size: int | None
    signal: str
    """A `Signal` state as the relay sees it."""
    reason: str
    """Why, in words; empty when live."""
    quiet: int = 0
    """Batches of events in this epoch that were not sent on, since they changed nothing held or were read before the first beacon: an
    engine that publishes those is not silent."""


StreamMessage = Batch | Beacon


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True):
    """A mirror asks the relay that owns a stream for everything it holds."""

    endpoint: Endpoint


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True):
    """One of `chunks` pieces of a snapshot taken just before batch `seq` of `epoch`."""

    epoch: str
    seq: int
    chunk: int
    chunks: int
    ops: list[Op]
