"""Every shape an engine ever sent is read or skipped by name; nothing it sends is fatal."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest

from engines.events import Cleared, KvBatch, KvEvent, Removed, Skipped, SkipReason, Stored, UndecodableBatch, decode
from engines.types import Tier
from tests.frames import recorded

MISSING = msgspec.UNSET


def encode(*events: object, rank: object = MISSING, more: tuple[object, ...] = ()) -> bytes:
    return msgspec.msgpack.encode([1.5, events, *([] if rank is MISSING else [rank]), *more])


def one(event: object) -> KvEvent:
    (decoded,) = decode(encode(event)).events
    return decoded


def stored(**changes: object) -> dict[str, object]:
    event: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
    }
    event |= {"lora_id": None, "medium": "GPU", "lora_name": None}
    event |= changes
    return {key: value for key, value in event.items() if value is not MISSING}


PLAIN = Stored([7, 8], None, [1, 2, 3, 4], 2)


# ---------------------------------------------------------------------------------------------------------------- real frames


class Told(NamedTuple):
    batches: int
    stored: int
    stored_blocks: int
    removed_blocks: int
    cleared: int
    skipped: int


RECORDED = [
    ("sglang/dp2_rank0.jsonl", Told(1, 1, 2, 0, 0, 0), 16, 0),
    ("sglang/dp2_rank1.jsonl", Told(2, 2, 3, 0, 0, 0), 16, 1),
    ("sglang/dpattn_rank0_dynamofmt.jsonl", Told(1, 1, 2, 0, 0, 0), 16, 0),
    ("sglang/dpattn_rank1_dynamofmt.jsonl", Told(2, 2, 4, 0, 0, 0), 16, 1),
    ("sglang/events_eviction_etc.json", Told(22, 32, 243, 134, 1, 0), 16, 0),
    ("sglang/events_hicache.json", Told(20, 19, 800, 562, 1, 0), 16, 0),
    ("sglang/page1.jsonl", Told(2, 2, 9, 0, 0, 0), 1, 0),
    ("sglang/pd_prefill.jsonl", Told(4, 4, 13, 0, 0, 0), 16, 0),
    ("sglang/plain_tp1.jsonl", Told(5, 4, 8, 0, 1, 0), 16, 0),
    ("vllm/events_dp_port5601.jsonl", Told(3, 3, 6, 0, 0, 0), 32, 0),
    ("vllm/events_dp_port5602.jsonl", Told(3, 3, 6, 0, 0, 0), 32, 1),
    ("vllm/events_ev0.jsonl", Told(19, 18, 38, 18, 4, 0), 32, 0),
    ("vllm/events_hybrid_gemma3.jsonl", Told(6, 6, 14, 0, 0, 6), 32, 0),
    ("vllm/events_lora.jsonl", Told(4, 4, 8, 0, 0, 0), 32, 0),
    ("vllm/events_pd_decode_nixl.jsonl", Told(15, 15, 135, 0, 0, 0), 32, 0),
    ("vllm/events_pd_prefill_nixl.jsonl", Told(25, 25, 265, 0, 0, 0), 32, 0),
]


@pytest.mark.parametrize(("name", "told", "block_size", "rank"), RECORDED)
def test_R31_real_frames_decode_to_what_they_say(name: str, told: Told, block_size: int, rank: int) -> None:
    batches = [decode(message.payload) for message in recorded(name) if message.is_kv]
    events = [event for batch in batches for event in batch.events]
    stores = [event for event in events if isinstance(event, Stored)]
    removals = [event for event in events if isinstance(event, Removed)]
    assert told == Told(
        len(batches),
        len(stores),
        sum(len(event.hashes) for event in stores),
        sum(len(event.hashes) for event in removals),
        sum(isinstance(event, Cleared) for event in events),
        sum(isinstance(event, Skipped) for event in events),
    )
    assert {batch.rank for batch in batches} == {rank}
    assert {event.block_size for event in stores} == {block_size}


@pytest.mark.parametrize("name", [name for name, *_ in RECORDED])
def test_R31_real_frames_decode_to_what_the_recorder_read(name: str) -> None:
    tiers = {"GPU": Tier.DEVICE, "CPU_PINNED": Tier.HOST}
    for message in recorded(name):
        if not message.is_kv:
            continue
        ts, events, _rank = message.decoded
        batch = decode(message.payload)
        assert batch.ts == pytest.approx(ts)
        for event, wire in zip(batch.events, _joined(events), strict=True):
            match event:
                case Stored():
                    assert event.hashes == wire["block_hashes"]
                    assert event.parent == wire["parent_block_hash"]
                    assert event.tokens == wire["token_ids"]
                    assert event.tier is tiers[wire["medium"]]
                    assert event.lora == wire.get("lora_name")
                    assert event.group == wire.get("group_idx", 0)
                    assert event.extras is None
                case Removed():
                    assert event.hashes == wire["block_hashes"]
                    assert event.tier is tiers[wire["medium"]]
                    assert event.group == wire.get("group_idx", 0)
                case Cleared():
                    assert wire == {"type": "AllBlocksCleared"}
                case Skipped():
                    assert event == Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, wire["group_idx"])
                    assert wire["kv_cache_spec_kind"] == "sliding_window"


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring removals from one place as one."""
    joined: list[dict[str, Any]] = []
    for wire in events:
        rest = {name: value for name, value in wire.items() if name != "block_hashes"}
        if joined and wire["type"] == "BlockRemoved" and joined[-1] == rest | {"block_hashes": joined[-1].get("block_hashes")}:
            joined[-1] = rest | {"block_hashes": [*joined[-1]["block_hashes"], *wire["block_hashes"]]}
        else:
            joined.append(wire)
    return joined


def test_neighbouring_removals_are_one_event_unless_they_are_of_different_places() -> None:
    def removed(*hashes: object, **changes: object) -> dict[str, object]:
        return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | changes

    events = [removed(1), removed(2, 3), removed(4, medium="CPU"), removed(5, group_idx=1), removed(6, group_idx=1), stored(), removed(7)]
    assert decode(encode(*events)).events == [
        Removed([1, 2, 3]),
        Removed([4], Tier.HOST),
        Removed([5, 6], group=1),
        PLAIN,
        Removed([7]),
    ]


def test_real_salts_are_found_in_vllms_extra_keys_and_in_sglangs_own_field() -> None:
    def salts(name: str) -> set[tuple[str | None, str | None]]:
        events = [event for message in recorded(name) if message.is_kv for event in decode(message.payload).events]
        return {(event.lora, event.salt) for event in events if isinstance(event, Stored)}

    assert salts("vllm/events_lora.jsonl") == {(None, None), ("ad1", None), ("ad1", "s1")}
    assert salts("vllm/events_ev0.jsonl") == {(None, None), (None, "tenant-a")}
    assert salts("sglang/events_eviction_etc.json") == {(None, None), (None, "tenantA")}


def test_sglangs_load_feed_is_no_batch() -> None:
    loads = [message for message in recorded("sglang/plain_tp1.jsonl") if not message.is_kv]
    assert loads
    for message in loads:
        with pytest.raises(UndecodableBatch):
            decode(message.payload)


# ------------------------------------------------------------------------------------------------------- shapes by version

ARRAYS = {
    "0.9": (["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None], PLAIN),
    "0.9 adapter": (["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, 3], Stored([7, 8], None, [1, 2, 3, 4], 2, lora="#3")),
    "0.10.2": (["BlockStored", [7, 8], 6, [1, 2, 3, 4], 2, None, "CPU"], Stored([7, 8], 6, [1, 2, 3, 4], 2, Tier.HOST)),
    "0.10.2 bytes": (
        ["BlockStored", [b"7", b"8"], b"6", [1, 2, 3, 4], 2, None, "GPU"],
        Stored([b"7", b"8"], b"6", [1, 2, 3, 4], 2),
    ),
    "0.14": (["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, 1, "GPU", "ad"], Stored([7, 8], None, [1, 2, 3, 4], 2, lora="ad")),
    "0.17": (
        ["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, 1, "GPU", "ad", [["ad", "s"], ["ad"]]],
        Stored([7, 8], None, [1, 2, 3, 4], 2, lora="ad", salt="s"),
    ),
    "0.20": (["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 1], Stored([7, 8], None, [1, 2, 3, 4], 2, group=1)),
    "0.22": (
        ["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, "GPU", None, [None, None], 0, "sliding_window", 64],
        Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, 0),
    ),
    "later": (
        ["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0, "full_attention", None, "LOCAL", None, "x", 1],
        PLAIN,
    ),
    "removed 0.9": (["BlockRemoved", [7]], Removed([7])),
    "removed 0.10.2": (["BlockRemoved", [7], "STORAGE"], Removed([7], Tier.DISK)),
    "removed 0.20": (["BlockRemoved", [7], "GPU", 1], Removed([7], group=1)),
    "cleared": (["AllBlocksCleared"], Cleared()),
}


@pytest.mark.parametrize(("wire", "event"), ARRAYS.values(), ids=ARRAYS)
def test_R31_tagged_arrays_of_every_length_are_read(wire: list[Any], event: KvEvent) -> None:
    assert one(wire) == event


MAPS = {
    "now": (stored(), PLAIN),
    "only what must be there": (stored(lora_id=MISSING, medium=MISSING, lora_name=MISSING), PLAIN),
    "unknown keys": (stored(colour={"deep": [1, {}]}, session_id="x", ownership=None), PLAIN),
    "largest hash": (stored(block_hashes=[2**64 - 1, 2**63]), Stored([2**64 - 1, 2**63], None, [1, 2, 3, 4], 2)),
    "signed hash": (stored(block_hashes=[-(2**63), -1]), Stored([-(2**63), -1], None, [1, 2, 3, 4], 2)),
    "hashes of both kinds": (stored(block_hashes=[7, b"8"], parent_block_hash=b"x"), Stored([7, b"8"], b"x", [1, 2, 3, 4], 2)),
    "an adapter without a name": (stored(lora_id=2), Stored([7, 8], None, [1, 2, 3, 4], 2, lora="#2")),
    "sglang salt": (stored(cache_salt="s"), Stored([7, 8], None, [1, 2, 3, 4], 2, salt="s")),
    "mla": (stored(kv_cache_spec_kind="mla_attention", group_idx=3), Stored([7, 8], None, [1, 2, 3, 4], 2, group=3)),
    "full attention with a window": (stored(kv_cache_spec_kind="full_attention", kv_cache_spec_sliding_window=64), PLAIN),
    "local": (stored(locality="LOCAL"), PLAIN),
    "removed, nothing else": ({"type": "BlockRemoved", "block_hashes": [7, b"8"]}, Removed([7, b"8"])),
    "removed": ({"type": "BlockRemoved", "block_hashes": [], "medium": "CPU_PINNED", "group_idx": 2}, Removed([], Tier.HOST, 2)),
    "cleared, with keys to come": ({"type": "AllBlocksCleared", "medium": "GPU"}, Cleared()),
}


@pytest.mark.parametrize(("wire", "event"), MAPS.values(), ids=MAPS)
def test_R31_maps_with_more_and_fewer_fields_are_read(wire: dict[str, Any], event: KvEvent) -> None:
    assert one(wire) == event


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("CPU", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("STORAGE", Tier.DISK),
        ("DISK", Tier.DISK),
    ],
)
def test_each_medium_has_its_tier(medium: str | None, tier: Tier) -> None:
    assert one(stored(medium=medium)) == Stored([7, 8], None, [1, 2, 3, 4], 2, tier)
    assert one({"type": "BlockRemoved", "block_hashes": [7], "medium": medium}) == Removed([7], tier)


SKIPPED = {
    "unknown kind": ({"type": "BlockMigrated", "x": 1}, Skipped("BlockMigrated", SkipReason.UNKNOWN_KIND)),
    "unknown kind as array": (["BlockMigrated", 1], Skipped("BlockMigrated", SkipReason.UNKNOWN_KIND)),
    "a very long kind": ({"type": "x" * 10_000}, Skipped("x" * 64, SkipReason.UNKNOWN_KIND)),
    "mamba": (stored(kv_cache_spec_kind="mamba", group_idx=1), Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, 1)),
    "a kind nobody knows yet": (stored(kv_cache_spec_kind="quantum"), Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, 0)),
    "window, no kind": (stored(kv_cache_spec_sliding_window=64), Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, 0)),
    "unknown medium": (stored(medium="TAPE"), Skipped("BlockStored", SkipReason.UNKNOWN_MEDIUM, 0)),
    "removed from an unknown medium": (
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"},
        Skipped("BlockRemoved", SkipReason.UNKNOWN_MEDIUM),
    ),
    "remote": (stored(locality="REMOTE"), Skipped("BlockStored", SkipReason.REMOTE, 0)),
    "hashes as text": (stored(block_hashes=["7", "8"]), Skipped("BlockStored", SkipReason.MALFORMED)),
    "a required field missing": (stored(token_ids=MISSING), Skipped("BlockStored", SkipReason.MALFORMED)),
    "extra keys of another length": (stored(extra_keys=[["s"]]), Skipped("BlockStored", SkipReason.MALFORMED, 0)),
    "extra keys that are no list": (stored(extra_keys=3), Skipped("BlockStored", SkipReason.MALFORMED, 0)),
    "extra keys of numbers": (stored(extra_keys=[1, 2]), Skipped("BlockStored", SkipReason.MALFORMED, 0)),
    "short array": (["BlockStored", [7]], Skipped("BlockStored", SkipReason.MALFORMED)),
    "tag that is no text": ([1, 2], Skipped("", SkipReason.MALFORMED)),
    "empty array": ([], Skipped("", SkipReason.MALFORMED)),
    "empty map": ({}, Skipped("", SkipReason.MALFORMED)),
    "nothing": (None, Skipped("", SkipReason.MALFORMED)),
    "a number": (7, Skipped("", SkipReason.MALFORMED)),
}


@pytest.mark.parametrize(("wire", "event"), SKIPPED.values(), ids=SKIPPED)
def test_R31_what_cannot_be_used_is_skipped_with_its_reason(wire: object, event: Skipped) -> None:
    assert one(wire) == event


@pytest.mark.parametrize("wire", [wire for wire, _ in SKIPPED.values()], ids=SKIPPED)
def test_R31_an_odd_event_costs_its_neighbours_nothing(wire: object) -> None:
    before, _odd, after, array = decode(encode(stored(), wire, {"type": "AllBlocksCleared"}, ["BlockRemoved", [7]])).events
    assert (before, after, array) == (PLAIN, Cleared(), Removed([7]))


@pytest.mark.parametrize(
    ("payload", "rank"),
    [
        (encode(stored()), None),
        (encode(stored(), rank=None), None),
        (encode(stored(), rank=3), 3),
        (encode(stored(), rank=3, more=("future", {"x": 1})), 3),
        (encode(stored(), rank="odd"), None),
    ],
)
def test_R31_batches_of_two_three_and_more_elements_are_read(payload: bytes, rank: int | None) -> None:
    assert decode(payload) == KvBatch(1.5, rank, [PLAIN])


def test_an_empty_batch_is_a_batch() -> None:
    assert decode(encode()) == KvBatch(1.5, None, [])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"garbage",
        encode(stored())[:-3],
        encode(stored()) + b"x",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode({"ts": 1.0, "events": []}),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode([1.5, "events"]),
        msgspec.msgpack.encode(["ts", []]),
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x92\x01\x91" + b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_a_payload_that_is_no_batch_says_so(payload: bytes) -> None:
    with pytest.raises(UndecodableBatch) as caught:
        decode(payload)
    assert caught.value.kind == "not_a_batch"


@pytest.mark.parametrize("event", [b"\xa1\xff", b"\xc7\x0c\xff" + b"\xff" * 12, b"\x81\xa4type\xa1\xff"])
def test_an_event_that_msgpack_itself_stumbles_on_is_skipped(event: bytes) -> None:
    assert decode(b"\x92\x01\x91" + event).events == [Skipped("", SkipReason.MALFORMED)]


# ----------------------------------------------------------------------------------------------------------- extra identity


def test_images_of_a_block_become_part_of_what_it_stands_for() -> None:
    event = one(stored(extra_keys=[[["img-1", 0]], None]))
    other = one(stored(extra_keys=[[["img-1", -2]], None]))
    assert isinstance(event, Stored)
    assert isinstance(other, Stored)
    assert event.extras is not None
    assert other.extras is not None
    assert event.extras[0] != other.extras[0]
    assert event.extras[1] is None
    assert event.salt is None


def test_adapter_images_salt_and_embeddings_are_told_apart_by_their_order() -> None:
    event = one(stored(lora_name="ad", extra_keys=[["ad", ["img", 0], "salt", b"digest"], ["ad", ["img", -2]]]))
    assert isinstance(event, Stored)
    assert (event.lora, event.salt) == ("ad", "salt")
    assert event.extras == [msgspec.msgpack.encode([["img", 0], b"digest"]), msgspec.msgpack.encode([["img", -2]])]


def test_a_salt_that_reads_like_the_adapters_name_is_still_a_salt() -> None:
    assert one(stored(lora_name="ad", extra_keys=[["ad", "ad"], ["ad"]])) == Stored([7, 8], None, [1, 2, 3, 4], 2, lora="ad", salt="ad")


def test_text_in_a_later_block_is_no_salt() -> None:
    event = one(stored(parent_block_hash=6, extra_keys=[["img"], None]))
    assert isinstance(event, Stored)
    assert event.salt is None
    assert event.extras == [msgspec.msgpack.encode(["img"]), None]


# ---------------------------------------------------------------------------------------------------------------- bigrams


@pytest.mark.parametrize(
    "wire",
    [stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]), ["BlockStored", [7, 8], None, [[1, 2], [2, 3], [3, 4], [4, 5]], 2, None, "GPU"]],
)
def test_the_bigrams_of_speculative_decoding_are_read_as_their_first_tokens(wire: object) -> None:
    assert one(wire) == PLAIN


@pytest.mark.parametrize("tokens", [[[1, 2], 3], [[1, 2], []], [[1, 2], ["a", 1]]])
def test_broken_bigrams_are_malformed(tokens: list[Any]) -> None:
    assert one(stored(token_ids=tokens)) == Skipped("BlockStored", SkipReason.MALFORMED)
