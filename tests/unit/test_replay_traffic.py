"""Traffic that is read or made up: what a trace says, what a table says, and what generators promise."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from router.replay.generators import GENERATORS, generate
from router.replay.texts import Text
from router.replay.traces import BadTrace, bin_of, read_mooncake, read_table


def line(**fields: object) -> bytes:
    return json.dumps({"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [7, 8, 9]} | fields).encode()


def test_a_mooncake_line_has_a_key_for_every_full_block() -> None:
    lines = [line(timestamp=3000), line(timestamp=6000, hash_ids=[7, 8, 11]), b"\n", line(timestamp=0, input_length=512, hash_ids=[7])]
    read = read_mooncake(lines, "t")
    first, second, third = read.arrivals
    assert [one.at_s for one in read.arrivals] == [0.0, 3.0, 6.0]
    assert [len(one.keys) for one in read.arrivals] == [1, 2, 2]
    assert first.keys == second.keys[:1] == third.keys[:1]
    assert second.keys == third.keys
    assert (read.block_size, read.bin_s, second.prompt_tokens, second.output_tokens) == (512, 3.0, 1300, 5)
    assert [len(one.keys) for one in read.first(2).arrivals] == [1, 2]


def test_smaller_blocks_share_as_much_of_a_mooncake_line() -> None:
    one, other = read_mooncake([line(), line(hash_ids=[7, 8, 10])], "t", 16).arrivals
    assert len(one.keys) == len(other.keys) == 81
    assert sum(a == b for a, b in zip(one.keys, other.keys, strict=True)) == 64
    assert len(set(one.keys)) == 81


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([line(), b"{}"], "t, line 2: Object missing required field `timestamp`"),
        ([b"nonsense"], "t, line 1: JSON is malformed"),
        ([line(input_length=0)], "t, line 1: a request has a prompt and an answer of at least one token each"),
        ([line(input_length="x")], "line 1: Expected `int`"),
        ([line(output_length=10**13)], "t, line 1: no prompt or answer has 10000000000000 tokens"),
        ([line(), line(timestamp=1e308)], "t: its last request comes more than a year after its first"),
        ([], "t: there is no request in it"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(lines: list[bytes], wrong: str) -> None:
    with pytest.raises(BadTrace, match=wrong.replace("(", r"\(")):
        read_mooncake(lines, "t")


TABLE = """arrival_s,prompt_tokens,output_tokens,session,prefix,prefix_tokens
0.5,100,20,s1,system,64
0.0,80,20,,system,64
9.0,200,10,s1,,
12.0,50,10,s1,,
""".splitlines()


def test_a_table_has_sessions_and_prefixes() -> None:
    read = read_table(TABLE, "t", 16)
    alone, first, second, shorter = (one.keys for one in read.arrivals)
    assert [one.at_s for one in read.arrivals] == [0.0, 0.5, 9.0, 12.0]
    assert alone[:4] == first[:4]
    assert alone[4] != first[4]
    assert second[:7] == first[:7], "a turn goes on from the one before it and its answer"
    assert shorter[0] != second[0], "a shorter prompt cannot"
    assert [one.session for one in read.arrivals] == [None, "s1", "s1", "s1"]


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("1,x,3", "t, line 2: Expected `int`"),
        ("1,0,3", "t, line 2: a request has a prompt"),
        ("1,,3", "t, line 2: Object missing required field `prompt_tokens`"),
        ("1,2", "t, line 2: Object missing required field `output_tokens`"),
        ("1,2,3,4", "t, line 2: it has 4 cells, for 3 columns"),
        ("nan,2,3", "t, line 2: a request comes at a time, not at nan"),
        ("inf,2,3", "t, line 2: a request comes at a time, not at inf"),
        ("1,99999999999999,3", "t, line 2: no prompt or answer has 99999999999999 tokens"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(row: str, wrong: str) -> None:
    with pytest.raises(BadTrace, match=wrong):
        read_table(["arrival_s,prompt_tokens,output_tokens", row], "t", 16)


def test_a_prefix_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(BadTrace, match="prefix_tokens"):
        read_table(["arrival_s,prompt_tokens,output_tokens,prefix,prefix_tokens", "1,2,3,p,-4"], "t", 16)


def test_a_table_is_read_as_programs_write_it() -> None:
    """Quoted, padded, with Windows' line ends, columns in any order and empty lines in between."""
    lines = ['"output_tokens", arrival_s ,prompt_tokens\r\n', "\r\n", '"5", 0.5 ,100\r\n', ",,\r\n"]
    (one,) = read_table(lines, "t", 16).arrivals
    assert (one.at_s, one.prompt_tokens, one.output_tokens) == (0.0, 100, 5)


def test_a_trace_begins_with_its_first_request_whatever_its_clock_says() -> None:
    """By the clock of Unix it would be replayed from 1970 on."""
    for first in (1.7e12, -9000.0):
        read = read_mooncake([line(timestamp=first + 6000), line(timestamp=first)], "t")
        assert [one.at_s for one in read.arrivals] == [0.0, 6.0]
    table = ["arrival_s,prompt_tokens,output_tokens", "1700000003,1,1", "1700000001,1,1"]
    assert [one.at_s for one in read_table(table, "t", 16).arrivals] == [0.0, 2.0]


def test_a_mark_of_the_byte_order_is_no_part_of_a_trace() -> None:
    assert len(read_mooncake([b"\xef\xbb\xbf" + line(), line()], "t").arrivals) == 2


def test_a_column_that_is_not_known_is_named() -> None:
    with pytest.raises(BadTrace, match="tokens_out"):
        read_table(["arrival_s,prompt_tokens,output_tokens,tokens_out", "1,2,3,4"], "t", 16)


def test_a_clock_is_as_coarse_as_its_commonest_step() -> None:
    assert bin_of([0.0, 0.0, 3.0, 5.999, 9.0, 9.0, 15.0]) == 3.0
    assert bin_of([1.0]) == 0.0


def test_texts_share_what_they_begin_with() -> None:
    system = Text(16).add(1, 50)
    one, other = system.copy().add(2, 30), system.copy().add(3, 30)
    assert (len(system.keys), system.tokens, len(one.keys), one.tokens) == (3, 50, 5, 80)
    assert one.keys[:3] == other.keys[:3] == system.keys
    assert not set(one.keys[3:]) & set(other.keys[3:])
    assert Text(16).add(1, 20).add(1, 44).keys != Text(16).add(1, 64).keys, "a piece begun twice is another text"
    assert Text(16).add(1, 10).add(2, 22).keys == Text(16).add(1, 10).add(2, 22).keys


@pytest.mark.parametrize("kind", GENERATORS)
def test_generated_traffic_is_the_same_for_the_same_seed_and_in_order(kind: str) -> None:
    traffic = generate(kind, 200, seed=1)
    assert traffic == generate(kind, 200, seed=1)
    assert traffic != generate(kind, 200, seed=2)
    times = [one.at_s for one in traffic.arrivals]
    assert len(times) == 200
    assert times == sorted(times)
    assert all(len(one.keys) == (one.prompt_tokens + one.output_tokens) // 64 for one in traffic.arrivals)
    assert all(len(set(one.keys)) == len(one.keys) for one in traffic.arrivals)


def prompts(kind: str) -> list[tuple[int, ...]]:
    return [one.keys[: one.prompt_tokens // 64] for one in generate(kind, 400, seed=3).arrivals]


def findable(kind: str) -> float:
    """The part of all prompts' blocks that an earlier prompt or answer had."""
    seen, found, asked = set[int](), 0, 0
    for one in generate(kind, 400, seed=3).arrivals:
        prompt = one.keys[: one.prompt_tokens // 64]
        found += sum(1 for _ in itertools.takewhile(seen.__contains__, prompt))
        asked += len(prompt)
        seen.update(one.keys)
    return found / asked


def test_generators_share_what_they_say() -> None:
    shares = {kind: findable(kind) for kind in GENERATORS}
    assert shares["unshared"] == 0
    assert all(shares[kind] > 0.4 for kind in ("shared", "chat", "agents", "bursts")), shares
    bursts = Counter(prompts("bursts"))
    assert set(bursts.values()) <= set(range(1, 17))
    assert max(bursts.values()) == 16
    assert len({prompt[0] for prompt in prompts("agents")}) <= 6
