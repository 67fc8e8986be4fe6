"""How is traffic written down? As Mooncake's traces are, or as a table of one's own requests.

    .jsonl   {"timestamp": ms, "input_length": …, "output_length": …, "hash_ids": [one for every 512 tokens]}
    .csv     arrival_s,prompt_tokens,output_tokens[,session][,prefix,prefix_tokens]

The last hash id of a prompt stands for what does not fill a block, and so is nothing that could be found again. Clocks begin wherever they
like: times count from the first request. In a table, prompts that name
the same `prefix` begin with the same `prefix_tokens` tokens, and a prompt of a `session` goes on from the one before it and its answer, if
it is as long as both.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from discovery.config import ConfigError
from router.replay.texts import Text
from router.replay.workload import Arrival, Workload

TOKENS_PER_ID = 512
MOST_TOKENS = 10_000_000
"""In one prompt or answer; a number beyond it is no count of tokens."""
LONGEST_S = 366 * 86_400.0
"""A trace of more than a year has its times in another unit."""
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class BadTrace(ConfigError):
    """The trace cannot be read; the message names the line."""


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    prefix: str = ""
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


def read_mooncake(lines: Iterable[bytes], name: str, block_size: int = TOKENS_PER_ID) -> Workload:
    """The workload in these lines, in blocks of `block_size` tokens, which divides 512. Raises BadTrace."""
    decode = msgspec.json.Decoder(_Line).decode
    arrivals = []
    for number, line in enumerate(lines, 1):
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not text.strip():
            continue
        try:
            read = decode(text)
        except msgspec.MsgspecError as error:
            raise BadTrace(f"{name}, line {number}: {error}") from error
        _check(read.timestamp, read.input_length, read.output_length, f"{name}, line {number}")
        keys = tuple(_keys(read.hash_ids, block_size))[: read.input_length // block_size]
        arrivals.append(Arrival(read.timestamp / 1000, read.input_length, read.output_length, keys))
    return _workload(arrivals, name, block_size)


def read_table(lines: Iterable[str], name: str, block_size: int) -> Workload:
    """The workload in these lines, the first of which names the columns. Raises BadTrace."""
    rows = csv.reader(lines, skipinitialspace=True)
    columns = [column.strip() for column in next(rows, [])]
    read = []
    for cells in rows:
        where = f"{name}, line {rows.line_num}"
        if len(cells) > len(columns):
            raise BadTrace(f"{where}: it has {len(cells)} cells, for {len(columns)} columns")
        given = {column: cell.strip() for column, cell in zip(columns, cells, strict=False) if cell.strip()}
        if not given:
            continue
        try:
            row = msgspec.convert(given, _Row, strict=False)
        except msgspec.ValidationError as error:
            raise BadTrace(f"{where}: {error}") from error
        _check(row.arrival_s, row.prompt_tokens, row.output_tokens, where)
        read.append(row)
    read.sort(key=lambda row: row.arrival_s)
    pieces, sessions = itertools.count(), dict[str, Text]()
    return _workload([_arrival(row, sessions, pieces, block_size) for row in read], name, block_size)


def bin_of(times: list[float]) -> float:
    """How coarse these times are, in seconds: the commonest step between two that differ."""
    steps = Counter(round(after - before, 1) for before, after in itertools.pairwise(times) if after > before)
    return steps.most_common(1)[0][0] if steps else 0.0


def _workload(arrivals: list[Arrival], name: str, block_size: int) -> Workload:
    if not arrivals:
        raise BadTrace(f"{name}: there is no request in it")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s
    if arrivals[-1].at_s - first_s > LONGEST_S:
        raise BadTrace(
            f"{name}: its last request comes more than a year after its first; `arrival_s` is in seconds, `timestamp` in milliseconds"
        )
    arrivals = [msgspec.structs.replace(arrival, at_s=arrival.at_s - first_s) for arrival in arrivals]
    return Workload(name, block_size, tuple(arrivals), bin_of([arrival.at_s for arrival in arrivals]))


def _check(at: float, prompt_tokens: int, output_tokens: int, where: str) -> None:
    if not math.isfinite(at):
        raise BadTrace(f"{where}: a request comes at a time, not at {at}")
    if prompt_tokens < 1 or output_tokens < 1:
        raise BadTrace(f"{where}: a request has a prompt and an answer of at least one token each")
    if max(prompt_tokens, output_tokens) > MOST_TOKENS:
        raise BadTrace(f"{where}: no prompt or answer has {max(prompt_tokens, output_tokens)} tokens")


def _keys(ids: tuple[int, ...], block_size: int) -> Iterator[int]:
    parts = TOKENS_PER_ID // block_size
    for number in ids:
        for part in range(parts):
            yield ((number * parts + part + 1) * _SPREAD) & _MASK  # spread: the index sorts keys into shards by their last byte


def _arrival(row: _Row, sessions: dict[str, Text], pieces: Iterator[int], block_size: int) -> Arrival:
    text = sessions.get(row.session) if row.session else None
    if text is None or text.tokens > row.prompt_tokens:
        text = Text(block_size)
        if row.prefix and row.prefix_tokens:
            text.add(_prefix(row.prefix), min(row.prefix_tokens, row.prompt_tokens))
    text.add(next(pieces), row.prompt_tokens - text.tokens).add(next(pieces), row.output_tokens)
    if row.session:
        sessions[row.session] = text
    return Arrival(row.arrival_s, row.prompt_tokens, row.output_tokens, tuple(text.keys), row.session or None)


def _prefix(name: str) -> int:
    """A piece for a name: no number that is counted up to."""
    return -1 - int.from_bytes(name.encode(), "big")
