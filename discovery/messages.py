"""What travels on the bus: shapes only.

A relay turns one rank's KV events into a numbered stream of small operations on *keys* (design: a key is the hash of a whole
prefix). `epoch` names one life of the engine's cache as seen by one life of the relay: `<relay life>.<n>`, `n` growing; `seq` starts at 0 in
each epoch and grows by one per batch. Keys travel packed, 8 bytes each, little-endian, in chain order.

    subject kv.<engine>.<rank>:  Batch 0 · Batch 1 · Beacon(seq=2) · Batch 2 · …          (`seq` of a beacon: the next batch's)
"""

from __future__ import annotations

import msgspec

from engines.types import Endpoint, Tier


class Store(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """These blocks are now held in this tier."""

    tier: Tier
    keys: bytes


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """These blocks are no longer held in this tier."""

    tier: Tier
    keys: bytes


class Clear(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Nothing is held any more, in any tier."""


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
