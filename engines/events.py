"""What does an engine say about its KV cache? Wire shapes in, our own few event types out.

A payload is a msgpack array `[ts, events, rank, …]`. Each event is a map tagged by `type` (vLLM since 0.24, SGLang) or an array
tagged by its first element (before), with fields added at the end over the years. Three attempts, the likeliest first:

    whole batch as maps ──fails──▶ whole batch as arrays ──fails──▶ event by event: what can be read is, the rest is Skipped

So one odd event costs its batch the fast path, never its neighbours. Shapes by version: vLLM 0.9 – 0.32, SGLang 0.5.

vLLM writes one event for each block that it evicts, all of a step's first: the same bytes but for the hash. Such a stretch is read as
columns, without an object per event, and the rest of the batch as above.
"""

from __future__ import annotations

import array
import enum
import re
import struct
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from engines.types import Tier

BlockHash = int | bytes
"""An engine's own name for a block: opaque, u64, i64 or a digest's bytes."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A chain of full-attention blocks is now held: `hashes[i]` covers tokens `i·block_size … (i+1)·block_size`."""

    hashes: list[BlockHash]
    parent: BlockHash | None
    """The block before the first of these; None at the start of a prompt."""
    tokens: list[int]
    block_size: int
    tier: Tier = Tier.DEVICE
    lora: str | None = None
    salt: str | None = None
    """The cache salt; only told with the first block of a prompt by some engines, so of use only where `parent` is None."""
    group: int = 0
    extras: list[bytes | None] | None = None
    """Per block, what else it stands for (images behind placeholder tokens, embeddings); None when all are plain."""


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One copy of each of these blocks is no longer held. Neighbouring events of one tier and group are one of these."""

    hashes: list[BlockHash]
    tier: Tier = Tier.DEVICE
    group: int = 0


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Nothing is held any more by this rank, in any tier or group."""


class SkipReason(enum.StrEnum):
    """Why an event was not used. A closed list: it is counted by this, and an engine cannot make it grow."""

    UNKNOWN_KIND = "unknown_kind"
    NOT_FULL_ATTENTION = "not_full_attention"
    """Sliding-window, mamba and other groups do not hold whole prefixes."""
    UNKNOWN_MEDIUM = "unknown_medium"
    REMOTE = "remote"
    """Held by somebody else than the engine that says so."""
    MALFORMED = "malformed"
    BLOCK_SIZE = "block_size"
    """Its blocks are of another size than this cache's."""


class Skipped(msgspec.Struct, frozen=True, gc=False):
    """An event that was read, or at least passed over, and is not used."""

    kind: str
    """The engine's own word for it, at most 64 characters; "" when there was none."""
    reason: SkipReason
    group: int | None = None


KvEvent = Stored | Removed | Cleared | Skipped


class KvBatch(msgspec.Struct, frozen=True, gc=False):
    """What one step of the engine's scheduler changed."""

    ts: float
    rank: int | None
    events: list[KvEvent]


class UndecodableBatch(Exception):
    """The whole payload is not a batch; `kind` is one of a few fixed words."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def decode(payload: bytes) -> KvBatch:
    """The batch in `payload`, its events in order; those that cannot be used are there as `Skipped`.

    Raises UndecodableBatch only when the payload as a whole is not `[ts, events, …]`. O(size); measured at 0.3 µs per stored block of
    16 tokens, and 0.1 µs per removed one, in the shape current engines send.
    """
    evicted = _leading_removals(payload)
    if evicted is None:
        return _decode(payload)
    first, rest = evicted
    batch = _decode(rest)
    return KvBatch(batch.ts, batch.rank, _joined([first, *batch.events]))


def _decode(payload: bytes) -> KvBatch:
    for decoder in (_MAPS, _ARRAYS):
        try:
            batch = decoder.decode(payload)
        except _UNREADABLE:
            continue
        return KvBatch(batch.ts, batch.rank, _joined([_convert(event) for event in batch.events]))
    return _decode_piecewise(payload)


_UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for bytes it cannot read: bad shape, bad UTF-8, dates out of range, nesting too deep."""

_TIERS = {
    None: Tier.DEVICE,  # engines before 0.10.2 did not say
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
}
_HOLDS_WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_KIND_CHARS = 64


class _StoredFields(msgspec.Struct, gc=False):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class _RemovedFields(msgspec.Struct, gc=False):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _StoredMap(_StoredFields, tag_field="type", tag="BlockStored", gc=False):
    cache_salt: str | None = None


class _RemovedMap(_RemovedFields, tag_field="type", tag="BlockRemoved", gc=False):
    pass


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(_StoredFields, array_like=True, tag="BlockStored", gc=False):
    cache_salt: None = None


class _RemovedArray(_RemovedFields, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


_WireMap = _StoredMap | _RemovedMap | _ClearedMap
_WireArray = _StoredArray | _RemovedArray | _ClearedArray


class _BatchOfMaps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_WireMap]
    rank: int | None = None


class _BatchOfArrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_WireArray]
    rank: int | None = None


class _BatchOfAnything(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    rank: Any = None


_MAPS = msgspec.msgpack.Decoder(_BatchOfMaps)
_ARRAYS = msgspec.msgpack.Decoder(_BatchOfArrays)
_ANYTHING = msgspec.msgpack.Decoder(_BatchOfAnything)
_ONE_MAP = msgspec.msgpack.Decoder(_WireMap)
_ONE_ARRAY = msgspec.msgpack.Decoder(_WireArray)


_BEGINNING = re.compile(
    rb"(?P<before>[\x92-\x9f]\xcb.{8})(?P<events>[\x90-\x9f]|\xdc..|\xdd....)"
    rb"(?P<opening>(?:[\x82-\x8f]\xa4type\xacBlockRemoved\xacblock_hashes|[\x92-\x9f]\xacBlockRemoved)\x91(?P<kind>[\xcf\xd3]|\xc4\x20))",
    re.DOTALL,
)
"""A batch that begins with a removal of one block, up to the bytes of its hash: u64, i64, or a digest of 32 bytes."""
_HASH_BYTES = {b"\xcf": 8, b"\xd3": 8, b"\xc4\x20": 32}
_FEWEST = 4
"""Below so many events alike, reading them one by one is as fast."""


def _leading_removals(payload: bytes) -> tuple[Removed, bytes] | None:
    """The removals of one block each that the batch begins with, and a batch of what follows; None when there are not many alike.

    Exact whatever the bytes are: the first event is decoded as any other, and what equals it in all bytes but those of the hash, which
    are of a fixed length, decodes as it does.
    """
    found = _BEGINNING.match(payload)
    if found is None:
        return None
    opening, begin, at = found["opening"], found.start("opening"), len(found["opening"])
    size = _HASH_BYTES[found["kind"]]
    width = payload.find(opening, begin + at + size) - begin
    events = _array_length(found["events"])
    count = _alike(payload, opening, begin, width, events)
    if width <= 0 or count < _FEWEST:
        return None
    end = begin + count * width
    first = _decode_one(msgspec.Raw(payload[begin : begin + width]))
    if not isinstance(first, Removed) or len(first.hashes) != 1:
        return None
    rows = bytearray(payload[begin:end])
    columns = [rows[place::width] for place in range(at, at + size)]
    nothing = bytes(count)
    for place in range(at, at + size):
        rows[place::width] = nothing
    if rows != rows[:width] * count:
        return None
    rest = b"%b\xdd%b%b" % (found["before"], (events - count).to_bytes(4, "big"), payload[end:])
    return Removed(_names(found["kind"], columns), first.tier, first.group), rest


def _array_length(header: bytes) -> int:
    """What a msgpack array's header says."""
    return int.from_bytes(header[1:], "big") if len(header) > 1 else header[0] & 0x0F


def _alike(payload: bytes, opening: bytes, begin: int, width: int, most: int) -> int:
    """How many events of `width` bytes seem to begin with `opening`, one behind the other: found by halving, so it has to be checked."""
    low, high = 1, min(most, (len(payload) - begin) // width) if width > 0 else 0
    while low < high:
        middle = (low + high + 1) >> 1
        if payload.startswith(opening, begin + (middle - 1) * width):
            low = middle
        else:
            high = middle - 1
    return low


def _names(kind: bytes, columns: list[bytearray]) -> list[BlockHash]:
    """The hashes of which `columns` are the first, second … bytes."""
    count = len(columns[0])
    joined = bytearray(count * len(columns))
    for place, column in enumerate(columns):
        joined[place :: len(columns)] = column
    if len(columns) != 8:
        return [name for (name,) in struct.iter_unpack(f"{len(columns)}s", joined)]
    words: array.array[Any] = array.array("Q" if kind == b"\xcf" else "q", bytes(joined))
    if sys.byteorder == "little":
        words.byteswap()
    return words.tolist()


def _joined(events: Iterable[KvEvent]) -> list[KvEvent]:
    """The same events, neighbouring removals of one tier and group as one."""
    joined: list[KvEvent] = []
    last: Removed | None = None
    for event in events:
        if not isinstance(event, Removed):
            last = None
        elif last is not None and last.tier is event.tier and last.group == event.group:
            last.hashes.extend(event.hashes)
            continue
        else:
            last = event
        joined.append(event)
    return joined


def _convert(event: _WireMap | _WireArray) -> KvEvent:
    match event:
        case _StoredMap() | _StoredArray():
            return _convert_stored(event)
        case _RemovedMap() | _RemovedArray():
            tier = _TIERS.get(event.medium)
            if reason := _unusable(tier, event.locality):
                return Skipped("BlockRemoved", reason, event.group_idx)
            return Removed(event.block_hashes, tier or Tier.DEVICE, event.group_idx or 0)
        case _ClearedMap() | _ClearedArray():
            return Cleared()


def _convert_stored(event: _StoredMap | _StoredArray) -> Stored | Skipped:
    group = event.group_idx or 0
    kind = event.kv_cache_spec_kind
    if kind not in _HOLDS_WHOLE_PREFIX or (kind is None and event.kv_cache_spec_sliding_window):
        return Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, group)
    tier = _TIERS.get(event.medium)
    if reason := _unusable(tier, event.locality):
        return Skipped("BlockStored", reason, group)
    # Engines before 0.14 number their adapters and do not name them: such blocks match nothing, and never the base model.
    lora = event.lora_name or (f"#{event.lora_id}" if event.lora_id else None)
    salt, extras = event.cache_salt, None
    if event.extra_keys is not None:
        try:
            salt, extras = _identity(event, salt)
        except (TypeError, *_UNREADABLE):
            return Skipped("BlockStored", SkipReason.MALFORMED, group)
    return Stored(
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        tier or Tier.DEVICE,
        lora,
        salt,
        group,
        extras,
    )


def _unusable(tier: Tier | None, locality: str | None) -> SkipReason | None:
    if tier is None:
        return SkipReason.UNKNOWN_MEDIUM
    return SkipReason.REMOTE if locality == "REMOTE" else None


def _identity(event: _StoredMap | _StoredArray, salt: str | None) -> tuple[str | None, list[bytes | None] | None]:
    """The salt and the per-block rest in vLLM's `extra_keys`.

    Each block's entry is null or a tuple, untagged but ordered: adapter name, multimodal items (`[id, offset]`, only an id
    before 0.20), the salt (first block of a prompt only), the embeddings' digest (bytes). Raises when it is not like that.
    """
    keys = event.extra_keys
    if not any(keys):
        return salt, None
    if len(keys) != len(event.block_hashes):
        raise ValueError(len(keys))
    extras: list[bytes | None] = []
    for position, entry in enumerate(keys):
        rest = list(entry or ())
        if rest and event.lora_name and rest[0] == event.lora_name:
            del rest[0]
        if position == 0 and event.parent_block_hash is None:
            words = [index for index, item in enumerate(rest) if isinstance(item, str)]
            if words:
                salt = rest.pop(words[-1])
        extras.append(msgspec.msgpack.encode(rest) if rest else None)
    return salt, extras if any(extras) else None


def _decode_piecewise(payload: bytes) -> KvBatch:
    try:
        batch = _ANYTHING.decode(payload)
    except _UNREADABLE:
        raise UndecodableBatch("not_a_batch") from None
    rank = batch.rank if isinstance(batch.rank, int) else None
    return KvBatch(batch.ts, rank, _joined([_decode_one(event) for event in batch.events]))


def _decode_one(event: msgspec.Raw) -> KvEvent:
    decoder: msgspec.msgpack.Decoder[Any]
    for decoder in (_ONE_MAP, _ONE_ARRAY):
        try:
            return _convert(decoder.decode(event))
        except _UNREADABLE:
            continue
    try:
        value = msgspec.msgpack.decode(event)
    except _UNREADABLE:
        return Skipped("", SkipReason.MALFORMED)
    match value:
        case {"type": str(kind)} | [str(kind), *_]:
            return _salvage(kind, value)
        case _:
            return Skipped("", SkipReason.MALFORMED)


def _salvage(kind: str, value: Any) -> KvEvent:  # noqa: ANN401 — whatever msgpack held
    if kind not in {"BlockStored", "BlockRemoved", "AllBlocksCleared"}:
        return Skipped(kind[:_KIND_CHARS], SkipReason.UNKNOWN_KIND)
    if kind == "BlockStored":
        # SGLang with EAGLE-like speculation publishes bigrams (token, next token): the first of each pair is the prompt's.
        tokens = value.get("token_ids") if isinstance(value, dict) else value[3] if len(value) > 3 else None
        match tokens:
            case [[int(), int()], *_]:
                firsts = [pair[0] if isinstance(pair, list) and pair else None for pair in tokens]
                plain = {**value, "token_ids": firsts} if isinstance(value, dict) else [*value[:3], firsts, *value[4:]]
                try:
                    return _convert(msgspec.convert(plain, _WireMap if isinstance(value, dict) else _WireArray))
                except _UNREADABLE:
                    pass
            case _:
                pass
    return Skipped(kind, SkipReason.MALFORMED)
