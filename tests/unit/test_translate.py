"""What an engine holds, in our keys: counted, told once, and the same on every engine."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from discovery.messages import Clear, Op, Remove, Store
from discovery.translate import Translator
from engines.blocks import block_keys, pack_keys, pack_tokens, root_seed, unpack_keys
from engines.events import Cleared, KvEvent, Removed, Skipped, SkipReason, Stored, decode
from engines.types import Tier
from tests.frames import recorded

TOKENS = list(range(100, 112))
SIZE = 4
KEYS = block_keys(pack_tokens(TOKENS), SIZE, root_seed())


def chain(hashes: list[int | bytes], **changes: object) -> Stored:
    fields = {"hashes": hashes, "parent": None, "tokens": TOKENS[: len(hashes) * SIZE], "block_size": SIZE}
    return msgspec.structs.replace(Stored([], None, [], 1), **(fields | changes))


def keys(op: Op) -> list[int]:
    assert not isinstance(op, Clear)
    return unpack_keys(op.keys)


def held(translator: Translator) -> dict[Tier, set[int]]:
    translator._check()
    return {held.tier: set(held.keys) for held in translator.held()}


def test_a_stored_chain_is_told_under_our_own_keys() -> None:
    translator = Translator()
    assert translator.apply([chain([1, 2, 3])]) == [Store(Tier.DEVICE, pack_keys(KEYS))]
    assert translator.blocks == 3
    assert translator.block_size == SIZE


def test_a_chain_goes_on_from_its_parents_key() -> None:
    translator = Translator()
    translator.apply([chain([1])])
    assert translator.apply([Stored([2, 3], 1, TOKENS[4:], SIZE)]) == [Store(Tier.DEVICE, pack_keys(KEYS[1:]))]


def test_R11_a_block_stored_twice_is_held_until_it_is_removed_twice() -> None:
    translator = Translator()
    translator.apply([chain([1, 2, 3])])
    assert translator.apply([Stored([3], 2, TOKENS[8:], SIZE)]) == []
    assert translator.apply([Removed([3])]) == []
    assert translator.blocks == 3
    assert translator.apply([Removed([3])]) == [Remove(Tier.DEVICE, pack_keys(KEYS[2:]))]
    assert held(translator) == {Tier.DEVICE: set(KEYS[:2])}


def test_R12_groups_that_do_not_hold_whole_prefixes_are_not_indexed_and_counted_as_skipped() -> None:
    translator = Translator()
    window = Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, 0)
    ops = translator.apply([window, chain([1, 2], group=1), Removed([1], group=0)])
    assert ops == [Store(Tier.DEVICE, pack_keys(KEYS[:2]))]
    assert translator.skipped == {SkipReason.NOT_FULL_ATTENTION: 2}
    assert translator.unknown_removals == 0
    assert translator.apply([Removed([1], group=1)]) == [Remove(Tier.DEVICE, pack_keys(KEYS[:1]))]


def test_R12_a_group_that_held_no_whole_prefixes_may_hold_them_in_the_next_life() -> None:
    """An engine started again in place may serve another model: what it removes would else be held for ever."""
    translator = Translator()
    translator.apply([Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, 0), chain([1], group=1)])
    translator.clear()
    translator.apply([chain([1, 2])])
    assert translator.apply([Removed([2])]) == [Remove(Tier.DEVICE, pack_keys(KEYS[1:2]))]
    assert held(translator) == {Tier.DEVICE: set(KEYS[:1])}


def test_R12_a_real_hybrid_model_is_indexed_by_its_full_attention_group_alone() -> None:
    translator = Translator()
    for message in recorded("vllm/events_hybrid_gemma3.jsonl"):
        translator.apply(decode(message.payload).events)
    tokens = [
        event["token_ids"]
        for message in recorded("vllm/events_hybrid_gemma3.jsonl")
        for event in message.decoded[1]
        if event["group_idx"] == 1
    ]
    assert translator.blocks == sum(len(ids) for ids in tokens) // 32 == 14
    assert translator.skipped == {SkipReason.NOT_FULL_ATTENTION: 6}
    assert set(block_keys(pack_tokens(tokens[0]), 32, root_seed())) <= held(translator)[Tier.DEVICE]


def test_R16_engines_that_name_blocks_differently_hold_the_same_keys() -> None:
    def names(secret: bytes, count: int) -> list[bytes]:
        return [hashlib.sha256(secret + bytes([index])).digest() for index in range(count)]

    numbers, digests, others = Translator(), Translator(), Translator()
    numbers.apply([chain([-(2**63), 2**64 - 1, 5])])
    digests.apply([chain(list(names(b"seed-a", 3)))])
    others.apply([chain(list(names(b"seed-b", 3)))])
    assert numbers.held() == digests.held() == others.held()


def test_R1_the_block_size_is_learned_and_a_configured_one_that_disagrees_is_visible() -> None:
    translator = Translator(configured_block_size=16)
    assert (translator.block_size, translator.mismatch) == (None, "")
    translator.apply([Stored([1], None, list(range(2096)), 2096)])
    assert translator.block_size == 2096
    assert translator.blocks == 1
    assert "configured as 16" in translator.mismatch
    assert "2096" in translator.mismatch


def test_a_configured_block_size_that_agrees_is_no_mismatch() -> None:
    translator = Translator(configured_block_size=SIZE)
    translator.apply([chain([1])])
    assert translator.mismatch == ""


def test_a_block_size_that_changes_under_held_blocks_is_skipped_and_visible() -> None:
    translator = Translator()
    assert translator.apply([chain([1, 2, 3]), Stored([9], None, TOKENS[:2], 2)]) == [Store(Tier.DEVICE, pack_keys(KEYS))]
    assert translator.skipped == {SkipReason.BLOCK_SIZE: 1}
    assert translator.block_size == SIZE
    assert "blocks of 2" in translator.mismatch


def test_a_new_life_may_have_another_block_size() -> None:
    translator = Translator()
    translator.apply([chain([1, 2, 3]), Stored([9], None, TOKENS[:2], 2)])
    assert translator.clear() == [Clear()]
    assert translator.mismatch == ""
    translator.apply([Stored([1], None, TOKENS[:2], 2)])
    assert (translator.block_size, translator.blocks, translator.mismatch) == (2, 1, "")


def test_offloaded_blocks_of_another_size_are_skipped_and_teach_nothing() -> None:
    translator = Translator()
    assert translator.apply([Stored([9], None, TOKENS[:8], 8, Tier.HOST)]) == []
    assert translator.block_size is None
    translator.apply([chain([1])])
    assert translator.apply([Stored([9], None, TOKENS[:8], 8, Tier.HOST)]) == []
    assert translator.skipped == {SkipReason.BLOCK_SIZE: 2}
    assert translator.mismatch == ""


def test_tiers_are_held_apart_and_told_apart() -> None:
    translator = Translator()
    ops = translator.apply([chain([1, 2]), chain([1, 2], tier=Tier.HOST), Removed([1, 2])])
    packed = pack_keys(KEYS[:2])
    assert ops == [Store(Tier.DEVICE, packed), Store(Tier.HOST, packed), Remove(Tier.DEVICE, packed)]
    assert held(translator) == {Tier.HOST: set(KEYS[:2])}
    assert translator.apply([Removed([1, 2], Tier.HOST)]) == [Remove(Tier.HOST, packed)]
    assert translator.blocks == 0


def test_a_host_copy_may_have_its_parent_on_the_device_only() -> None:
    translator = Translator()
    translator.apply([chain([1])])
    assert translator.apply([Stored([2], 1, TOKENS[4:8], SIZE, Tier.HOST)]) == [Store(Tier.HOST, pack_keys(KEYS[1:2]))]
    assert translator.orphans == 0


def test_two_names_for_one_key_hold_it_until_both_are_gone() -> None:
    translator = Translator()
    assert translator.apply([chain([1]), chain([2])]) == [Store(Tier.DEVICE, pack_keys(KEYS[:1]))]
    assert translator.apply([Removed([1])]) == []
    assert translator.apply([Removed([2])]) == [Remove(Tier.DEVICE, pack_keys(KEYS[:1]))]


def test_two_groups_hold_a_key_until_both_let_go() -> None:
    translator = Translator()
    translator.apply([chain([1], group=0), chain([1], group=1)])
    assert translator.blocks == 1
    assert translator.apply([Removed([1], group=1)]) == []
    assert translator.apply([Removed([1], group=0)]) == [Remove(Tier.DEVICE, pack_keys(KEYS[:1]))]


def test_neighbouring_changes_are_joined_and_their_order_is_kept() -> None:
    translator = Translator()
    events: list[KvEvent] = [chain([1]), Stored([2], 1, TOKENS[4:8], SIZE), Removed([2]), Removed([1]), chain([1])]
    first, second = pack_keys(KEYS[:2]), pack_keys(KEYS[1::-1])
    assert translator.apply(events) == [
        Store(Tier.DEVICE, first),
        Remove(Tier.DEVICE, second),
        Store(Tier.DEVICE, pack_keys(KEYS[:1])),
    ]


def test_a_clear_forgets_every_tier_and_group_and_is_told_only_when_something_was_held() -> None:
    translator = Translator()
    assert translator.apply([Cleared(), Cleared()]) == []
    translator.apply([chain([1, 2]), chain([1], tier=Tier.HOST, group=2)])
    assert translator.apply([Cleared(), Cleared(), chain([1])]) == [Clear(), Store(Tier.DEVICE, pack_keys(KEYS[:1]))]
    assert held(translator) == {Tier.DEVICE: set(KEYS[:1])}
    assert translator.clear() == [Clear()]
    assert translator.clear() == []
    assert translator.blocks == 0


def test_blocks_under_an_unknown_parent_are_counted_and_not_placed() -> None:
    translator = Translator()
    assert translator.apply([Stored([2, 3], 1, TOKENS[4:], SIZE)]) == []
    assert (translator.orphans, translator.blocks) == (2, 0)
    assert translator.apply([Removed([3])]) == []
    assert translator.unknown_removals == 1
    translator.clear()
    assert (translator.orphans, translator.unknown_removals) == (0, 0)


def test_R14_R15_adapters_and_salts_never_meet_each_other_or_the_plain_prompt() -> None:
    seen: set[int] = set()
    for lora, salt in [(None, None), ("ad1", None), (None, "s1"), ("ad1", "s1"), ("ad2", None)]:
        translator = Translator()
        (op,) = translator.apply([chain([1, 2, 3], lora=lora, salt=salt)])
        assert keys(op) == block_keys(pack_tokens(TOKENS), SIZE, root_seed(lora, salt))
        assert not seen & set(keys(op))
        seen |= set(keys(op))


def test_R15_a_chain_that_sglang_keeps_twice_under_one_name_is_held_until_both_copies_are_gone() -> None:
    """Its `extra_key` parts the cache and is not told: the same hashes are stored once for each, and removed once for each."""
    first, _, extra, _, evicting, *_ = [message for message in recorded("sglang/events_eviction_etc.json") if message.is_kv]
    names = first.decoded[1][0]["block_hashes"]
    assert extra.decoded[1][0]["block_hashes"] == names
    translator = Translator()
    (op,) = translator.apply(decode(first.payload).events)
    assert translator.apply(decode(extra.payload).events) == [], "nothing new is held"
    copies = dict.fromkeys(names, 2)
    removed = [name for event in evicting.decoded[1] if event["type"] == "BlockRemoved" for name in event["block_hashes"] if name in copies]
    assert sorted(removed) == sorted(2 * names)
    for name in removed:
        translator.apply([Removed([name])])
        copies[name] -= 1
        assert held(translator).get(Tier.DEVICE, set()) == {key for key, count in zip(keys(op), copies.values(), strict=True) if count}


def test_placeholders_of_different_images_never_match_nor_does_what_follows_them() -> None:
    ops = []
    for extras in (None, [None, b"cat", None], [None, b"dog", None]):
        ops += Translator().apply([chain([1, 2, 3], extras=extras)])
    plain, cat, dog = map(keys, ops)
    assert plain[0] == cat[0] == dog[0]
    assert len({plain[1], cat[1], dog[1]}) == len({plain[2], cat[2], dog[2]}) == 3


@pytest.mark.parametrize(
    "event",
    [
        chain([1, 2], tokens=TOKENS[:7]),
        chain([1, 2], tokens=TOKENS[:9]),
        chain([1], block_size=0, tokens=[]),
        chain([1], block_size=-4),
        chain([], tokens=TOKENS[:4]),
        chain([1], tokens=[1, 2, 3, -4]),
        chain([1], tokens=[1, 2, 3, 2**32]),
        chain([1, 2], extras=[None]),
    ],
)
def test_a_stored_event_that_does_not_add_up_is_skipped_and_counted(event: Stored) -> None:
    translator = Translator()
    assert translator.apply([event]) == []
    assert translator.skipped == {SkipReason.MALFORMED: 1}
    assert translator.blocks == 0
    translator._check()


def test_an_event_without_blocks_changes_nothing() -> None:
    translator = Translator()
    assert translator.apply([chain([]), Removed([])]) == []
    assert translator.block_size is None
    translator._check()


def test_nonsense_group_numbers_do_not_make_it_grow() -> None:
    translator = Translator()
    translator.apply([Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, group) for group in range(10_000)])
    for group in range(20_000, 21_000):
        translator.apply([chain([1], group=group), Removed([1], group=group)])
    assert len(translator._partial_groups) <= 256
    assert not translator._copies


FINALLY_HELD = [
    ("sglang/dp2_rank1.jsonl", {Tier.DEVICE: 3}, 0, 0),
    ("sglang/dpattn_rank1_dynamofmt.jsonl", {Tier.DEVICE: 4}, 0, 0),
    ("sglang/events_eviction_etc.json", {Tier.DEVICE: 55}, 0, 1),  # recorded from number 2 on: one block was stored before
    ("sglang/events_hicache.json", {}, 0, 2),
    ("sglang/page1.jsonl", {Tier.DEVICE: 9}, 0, 0),
    ("sglang/pd_prefill.jsonl", {Tier.DEVICE: 13}, 0, 0),
    ("sglang/plain_tp1.jsonl", {}, 0, 0),
    ("vllm/events_dp_port5601.jsonl", {Tier.DEVICE: 6}, 0, 0),
    ("vllm/events_ev0.jsonl", {Tier.DEVICE: 6}, 0, 0),
    ("vllm/events_lora.jsonl", {Tier.DEVICE: 6}, 0, 0),
    ("vllm/events_pd_decode_nixl.jsonl", {Tier.DEVICE: 135}, 0, 0),
    ("vllm/events_pd_prefill_nixl.jsonl", {Tier.DEVICE: 265}, 0, 0),
]


@pytest.mark.parametrize(("name", "blocks", "orphans", "unknown"), FINALLY_HELD, ids=[name for name, *_ in FINALLY_HELD])
def test_real_streams_end_with_what_the_engine_held(name: str, blocks: dict[Tier, int], orphans: int, unknown: int) -> None:
    translator = Translator()
    orphans_seen = unknown_seen = 0
    events = [event for message in recorded(name) if message.is_kv for event in decode(message.payload).events]
    for event in [*events, None]:
        if event is None or isinstance(event, Cleared):  # which sets the counters back
            orphans_seen += translator.orphans
            unknown_seen += translator.unknown_removals
        if event is not None:
            translator.apply([event])
    assert {tier: len(found) for tier, found in held(translator).items()} == blocks
    assert (orphans_seen, unknown_seen) == (orphans, unknown)
    assert not translator.skipped


def test_a_real_host_cache_keeps_what_the_device_lost() -> None:
    translator = Translator()
    stages = recorded("sglang/events_hicache.json")
    for message in stages[:3]:
        translator.apply(decode(message.payload).events)
    assert {tier: len(found) for tier, found in held(translator).items()} == {Tier.DEVICE: 50, Tier.HOST: 20}
    first = decode(stages[0].payload).events[0]
    assert isinstance(first, Stored)
    assert held(translator)[Tier.HOST] == set(block_keys(pack_tokens(first.tokens), 16, root_seed()))
