"""A key names a whole prefix, the same everywhere."""

from __future__ import annotations

import pytest
import xxhash

from engines.blocks import block_key, block_keys, pack_keys, pack_tokens, root_seed, unpack_keys

PLAIN = root_seed()


def test_keys_are_pinned_so_that_routers_and_relays_of_two_releases_agree() -> None:
    assert block_keys(pack_tokens(range(32)), 16, PLAIN) == [0x79C2079C74A8EE4D, 0x909F26211E4EF238]


def test_a_key_is_the_hash_of_its_tokens_seeded_with_its_parents_key() -> None:
    first = xxhash.xxh3_64_intdigest(b"\x01\x00\x00\x00\x02\x00\x00\x00", seed=PLAIN)
    second = xxhash.xxh3_64_intdigest(b"\x03\x00\x00\x00\xff\xff\xff\xff", seed=first)
    assert block_keys(pack_tokens([1, 2, 3, 2**32 - 1]), 2, PLAIN) == [first, second]


@pytest.mark.parametrize("tokens", range(9))
def test_only_full_blocks_have_keys(tokens: int) -> None:
    assert len(block_keys(pack_tokens(range(tokens)), 4, PLAIN)) == tokens // 4


def test_a_chain_continues_from_any_of_its_keys() -> None:
    whole = block_keys(pack_tokens(range(100)), 4, PLAIN)
    assert whole[:10] + block_keys(pack_tokens(range(40, 100)), 4, whole[9]) == whole


def test_prompts_share_keys_exactly_as_far_as_they_share_blocks() -> None:
    a = block_keys(pack_tokens(range(40)), 4, PLAIN)
    b = block_keys(pack_tokens([*range(21), 7, *range(22, 40)]), 4, PLAIN)
    assert a[:5] == b[:5]
    assert not set(a[5:]) & set(b[5:])


def test_roots_of_different_adapters_and_salts_all_differ() -> None:
    roots = [
        root_seed(lora, salt) for lora, salt in [(None, None), ("a", None), (None, "a"), ("a", "b"), ("ab", None), (None, "ab"), ("b", "a")]
    ]
    assert len(set(roots)) == len(roots)


def test_no_adapter_and_no_salt_may_be_written_as_empty_strings() -> None:
    assert root_seed("", "") == root_seed("", None) == PLAIN
    assert root_seed("a", "") == root_seed("a")


def test_a_name_that_is_not_valid_unicode_still_has_a_root() -> None:
    assert root_seed("\ud800") != PLAIN


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_that_does_not_fit_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([1, token])


def test_a_block_with_nothing_extra_has_the_plain_key() -> None:
    packed = pack_tokens(range(4))
    assert block_key(packed, PLAIN) == block_keys(packed, 4, PLAIN)[0]
    assert block_key(packed, PLAIN, b"image") != block_key(packed, PLAIN)


def test_keys_travel_as_little_endian_and_come_back_the_same() -> None:
    keys = [0, 1, 2**63, 2**64 - 1]
    assert pack_keys(keys[:2]) == b"\0" * 8 + b"\x01" + b"\0" * 7
    assert unpack_keys(pack_keys(keys)) == keys
    assert unpack_keys(b"") == []


def test_bytes_that_are_no_whole_number_of_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_keys(b"1234567")
