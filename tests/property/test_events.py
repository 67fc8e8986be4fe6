"""No bytes are fatal, and no shape changes what an event says."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from discovery.translate import Translator
from engines import events as module
from engines.events import BlockHash, KvBatch, KvEvent, Removed, Skipped, Stored, UndecodableBatch, decode
from engines.types import Tier
from tests.frames import recorded

REAL = [
    message.payload
    for name in ("vllm/events_ev0.jsonl", "vllm/events_lora.jsonl", "vllm/events_hybrid_gemma3.jsonl", "sglang/page1.jsonl")
    for message in recorded(name)
]
HASHES: st.SearchStrategy[BlockHash] = st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=32)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8
)
FIELDS = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "cache_salt",
]
KINDS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])


def survive(payload: bytes) -> None:
    """The payload, through everything that would see it: nothing but the one error, and invariants kept."""
    translator = Translator()
    try:
        batch = decode(payload)
    except UndecodableBatch as error:
        assert error.kind == "not_a_batch"  # noqa: PT017 — either way is fine, no other is
        return
    assert isinstance(batch, KvBatch)
    translator.apply(batch.events)
    translator._check()
    for event in batch.events:
        assert not isinstance(event, Skipped) or len(event.kind) <= 64


@given(st.binary(max_size=200))
def test_R31_A9_random_bytes_are_survived(payload: bytes) -> None:
    survive(payload)


@given(st.sampled_from(REAL), st.integers(0, 10_000), st.binary(min_size=1, max_size=3), st.booleans())
def test_R31_A9_damaged_real_frames_are_survived(payload: bytes, at: int, damage: bytes, cut: bool) -> None:
    at %= len(payload)
    survive(payload[:at] + damage + (b"" if cut else payload[at + len(damage) :]))


@given(st.lists(st.tuples(KINDS, st.dictionaries(st.sampled_from(FIELDS), VALUES)), max_size=4), VALUES)
def test_R31_A9_events_with_any_values_in_known_fields_are_survived(events: list[tuple[str, dict[str, object]]], rank: object) -> None:
    maps = [{"type": kind, **fields} for kind, fields in events]
    arrays = [[kind, *fields.values()] for kind, fields in events]
    for shape in (maps, arrays, [*maps, *arrays]):
        payload = msgspec.msgpack.encode([0.5, shape, rank])
        survive(payload)
        kinds = [type(event) for event in decode(payload).events]
        assert len(kinds) == len(shape) or (len(kinds) < len(shape) and Removed in kinds)


@given(
    hashes=st.lists(HASHES, max_size=5),
    parent=st.none() | HASHES,
    size=st.integers(1, 3),
    lora=st.none() | st.text(min_size=1, max_size=5),
    tier=st.sampled_from([(None, Tier.DEVICE), ("GPU", Tier.DEVICE), ("CPU", Tier.HOST), ("STORAGE", Tier.DISK)]),
    group=st.none() | st.integers(0, 5),
    data=st.data(),
)
def test_R31_maps_and_arrays_say_the_same(
    hashes: list[BlockHash],
    parent: BlockHash | None,
    size: int,
    lora: str | None,
    tier: tuple[str | None, Tier],
    group: int | None,
    data: st.DataObject,
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(hashes) * size, max_size=len(hashes) * size))
    medium, expected = tier
    values = [hashes, parent, tokens, size, None, medium, lora, None, group, "full_attention", None, "LOCAL"]
    fields = dict(zip(FIELDS, values, strict=False))
    stored = Stored(hashes, parent, tokens, size, expected, lora, None, group or 0)
    removed = Removed(hashes, expected, group or 0)
    maps = [{"type": "BlockStored", **fields}, {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group}]
    arrays = [["BlockStored", *values], ["BlockRemoved", hashes, medium, group]]
    for shape in (maps, arrays, [*maps, ["Unknown"]][:2], [maps[0], arrays[1]]):
        assert decode(msgspec.msgpack.encode([0.5, shape, 2])) == KvBatch(0.5, 2, [stored, removed])


ALIKE: list[st.SearchStrategy[BlockHash]] = [
    st.integers(2**32, 2**64 - 1),
    st.integers(-(2**63), -(2**31) - 1),
    st.binary(min_size=32, max_size=32),
]
"""Hashes that take as many bytes as each other."""


@st.composite
def evictions(draw: st.DrawFn) -> list[object]:
    """Removals of one block each, as an engine that is full sends them: mostly alike, now and then not."""
    names: list[BlockHash] = draw(st.lists(draw(st.sampled_from(ALIKE)), min_size=3, max_size=40))
    odd = draw(st.lists(st.integers(0, len(names) - 1), max_size=2))
    for place in odd:
        names[place] = draw(HASHES)
    rest: dict[str, object] = draw(
        st.sampled_from([{}, {"medium": "GPU"}, {"medium": "GPU", "group_idx": 0}, {"medium": "TAPE"}, {"medium": "CPU", "new": [1]}])
    )
    elsewhere = draw(st.sets(st.integers(0, len(names) - 1), max_size=2))
    rests = [rest | {"medium": "CPU", "group_idx": 1} if at in elsewhere and "group_idx" in rest else rest for at in range(len(names))]
    if draw(st.booleans()):
        events: list[object] = [{"type": "BlockRemoved", "block_hashes": [name], **rest} for name, rest in zip(names, rests, strict=True)]
    else:
        events = [["BlockRemoved", [name], *rest.values()] for name, rest in zip(names, rests, strict=True)]
    for place in draw(st.lists(st.integers(0, len(events) - 1), max_size=1)):
        events[place] = draw(st.sampled_from([{"type": "AllBlocksCleared"}, {"type": "BlockRemoved", "block_hashes": [1, 2]}, 7]))
    return events


@given(evictions(), st.sampled_from([[], [{"type": "AllBlocksCleared"}], [["AllBlocksCleared"]], [None]]), st.data())
def test_R31_a_stretch_of_removals_reads_as_its_events_one_by_one(leading: list[object], rest: list[object], data: st.DataObject) -> None:
    payload = msgspec.msgpack.encode([0.5, [*leading, *rest], 1])
    assert _read(decode, payload) == _read(module._decode, payload)
    at = data.draw(st.integers(0, len(payload) - 1))
    damaged = payload[:at] + data.draw(st.binary(max_size=2)) + payload[at + data.draw(st.integers(0, 2)) :]
    assert _read(decode, damaged) == _read(module._decode, damaged)


def test_R31_a_stretch_of_removals_is_read_whole_and_not_event_by_event() -> None:
    names: list[BlockHash] = [2**63 + number for number in range(100)]
    payload = msgspec.msgpack.encode([0.5, [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for name in names], 1])
    found = module._leading_removals(payload)
    assert found is not None
    assert found[0] == Removed(names)
    assert decode(found[1]) == KvBatch(0.5, 1, [])


def _read(how: Callable[[bytes], KvBatch], payload: bytes) -> tuple[str, int | None, list[KvEvent]] | None:
    """What a payload says, its floats as text since NaN is not itself; None when it is no batch."""
    try:
        batch = how(payload)
    except UndecodableBatch:
        return None
    return repr(batch.ts), batch.rank, batch.events


def test_the_recorded_frames_used_here_are_there() -> None:
    assert len(REAL) == 31
    with pytest.raises(UndecodableBatch):
        decode(REAL[0][:-1])
