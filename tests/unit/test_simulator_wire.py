"""Names and events on the wire: SGLang's documented digests, and the very keys that recorded engines send."""

from __future__ import annotations

import hashlib
from array import array

import msgspec
import pytest

from engines.events import Removed as ReadRemoved
from engines.events import Stored as ReadStored
from engines.events import decode
from engines.simulator import events
from engines.simulator.cache import Change, Cleared, Removed, Stored
from engines.simulator.hashes import BlockNamer
from engines.types import EngineKind
from tests.frames import recorded


def names(kind: EngineKind, tokens: list[int], *, seed: int = 0, salt: str | None = None, adapter: str | None = None) -> list[int]:
    chain = BlockNamer(kind, 4, seed).chain(salt, adapter)
    chain.extend(array("I", tokens))
    return chain.names


def test_sglangs_names_are_the_first_bytes_of_its_documented_digests() -> None:
    tokens = list(range(8))
    first = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in tokens[:4])).digest()
    second = hashlib.sha256(first + b"".join(token.to_bytes(4, "little") for token in tokens[4:])).digest()
    expected = [int.from_bytes(digest[:8], "big", signed=True) for digest in (first, second)]
    assert names(EngineKind.SGLANG, tokens) == expected


def test_sglangs_names_equal_those_of_recorded_engines() -> None:
    stored = [
        event
        for message in recorded("sglang/plain_tp1.jsonl")
        if message.is_kv
        for event in message.decoded[1]
        if event["type"] == "BlockStored"
    ]
    roots = [event for event in stored if event["parent_block_hash"] is None and "cache_salt" not in event]
    assert roots
    for event in roots:
        chain = BlockNamer(EngineKind.SGLANG, event["block_size"]).chain()
        chain.extend(array("I", event["token_ids"]))
        assert chain.names == event["block_hashes"]


def test_sglangs_salted_names_equal_those_of_recorded_engines() -> None:
    messages = recorded("sglang/events_eviction_etc.json")
    stored = [event for message in messages if message.is_kv for event in message.decoded[1] if event["type"] == "BlockStored"]
    salted = [event for event in stored if event["parent_block_hash"] is None and "cache_salt" in event]
    assert salted
    for event in salted:
        chain = BlockNamer(EngineKind.SGLANG, event["block_size"]).chain(event["cache_salt"])
        chain.extend(array("I", event["token_ids"]))
        assert chain.names == event["block_hashes"]


def test_vllms_names_depend_on_the_seed_and_sglangs_do_not() -> None:
    tokens = list(range(8))
    assert set(names(EngineKind.VLLM, tokens, seed=0)).isdisjoint(names(EngineKind.VLLM, tokens, seed=1))
    assert names(EngineKind.SGLANG, tokens, seed=0) == names(EngineKind.SGLANG, tokens, seed=1)


@pytest.mark.parametrize("kind", list(EngineKind))
def test_salts_and_adapters_share_no_name(kind: EngineKind) -> None:
    variants = [names(kind, list(range(8)), salt=salt, adapter=adapter) for salt in (None, "s1", "s2") for adapter in (None, "ad1")]
    assert len({name for variant in variants for name in variant}) == 2 * len(variants)


def test_vllms_names_are_unsigned_and_sglangs_signed() -> None:
    many = list(range(400))
    assert all(0 <= name < 2**64 for name in names(EngineKind.VLLM, many))
    assert max(names(EngineKind.VLLM, many)) >= 2**63
    assert all(-(2**63) <= name < 2**63 for name in names(EngineKind.SGLANG, many))
    assert min(names(EngineKind.SGLANG, many)) < 0


def test_a_chain_grown_in_pieces_equals_one_made_at_once() -> None:
    tokens = array("I", range(19))
    chain = BlockNamer(EngineKind.VLLM, 4).chain()
    for length in range(len(tokens) + 1):
        chain.extend(tokens[:length])
        assert len(chain.names) == length // 4
    assert chain.names == names(EngineKind.VLLM, tokens.tolist())


CHANGES: list[Change] = [Removed(9), Removed(8), Stored((1, 2), None, (5, 6, 7, 8)), Stored((3,), 2, (9, 10)), Cleared()]


def raw(changes: list[Change], kind: EngineKind) -> list[object]:
    batch: list[object] = msgspec.msgpack.decode(events.encode(changes, kind, 2, ts=12.5))
    return batch


def test_a_vllm_batch_has_one_event_for_each_removed_block() -> None:
    ts, told, rank = raw(CHANGES, EngineKind.VLLM)
    assert (ts, rank) == (12.5, 0)
    assert isinstance(told, list)
    assert told[:2] == [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0} for name in (9, 8)]
    assert told[2]["block_hashes"] == [1, 2]
    assert told[2]["token_ids"] == [5, 6, 7, 8]
    assert told[4] == {"type": "AllBlocksCleared"}


def test_an_sglang_batch_coalesces_removals() -> None:
    _, told, _ = raw(CHANGES, EngineKind.SGLANG)
    assert isinstance(told, list)
    assert told[0] == {"type": "BlockRemoved", "block_hashes": [9, 8], "medium": "GPU"}
    assert [event["type"] for event in told] == ["BlockRemoved", "BlockStored", "BlockStored", "AllBlocksCleared"]


@pytest.mark.parametrize(
    ("kind", "file"), [(EngineKind.VLLM, "vllm/events_ev0.jsonl"), (EngineKind.SGLANG, "sglang/plain_tp1.jsonl")], ids=["vllm", "sglang"]
)
def test_events_have_the_keys_of_recorded_ones_in_their_order(kind: EngineKind, file: str) -> None:
    real = [event for message in recorded(file) if message.is_kv for event in message.decoded[1]]
    _, told, _ = raw(CHANGES, kind)
    assert isinstance(told, list)
    for mine in told:
        assert list(mine) in [list(theirs) for theirs in real if theirs["type"] == mine["type"]] or kind is EngineKind.SGLANG
    stored = next(list(theirs) for theirs in real if theirs["type"] == "BlockStored")
    assert stored == next(list(mine) for mine in told if mine["type"] == "BlockStored")


def test_salt_and_adapter_are_told_as_vllm_tells_them() -> None:
    _, told, _ = raw([Stored((1, 2), None, (1, 2, 3, 4), "s1", "ad1"), Stored((3,), 2, (5, 6), "s1", "ad1")], EngineKind.VLLM)
    assert isinstance(told, list)
    assert [event["extra_keys"] for event in told] == [[["ad1", "s1"], ["ad1"]], [["ad1"]]]
    assert [event["lora_name"] for event in told] == ["ad1", "ad1"]


@pytest.mark.parametrize("kind", list(EngineKind))
def test_our_own_reader_understands_what_is_sent(kind: EngineKind) -> None:
    sent: list[Change] = [Removed(9), Stored((1, 2), None, (5, 6, 7, 8), "s1", "ad1", "session")]
    removed, stored = decode(events.encode(sent, kind, 2, ts=1.0)).events
    assert isinstance(removed, ReadRemoved)
    assert isinstance(stored, ReadStored)
    assert (stored.hashes, stored.parent, stored.tokens, stored.block_size) == ([1, 2], None, [5, 6, 7, 8], 2)
    assert (stored.lora, stored.salt) == ("ad1", "s1")
