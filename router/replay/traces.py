"""How is a trace written? As Mooncake's are, one JSON object to a line: `timestamp` in ms, lengths in tokens, and an id for every 512 tokens.

The last id of a prompt stands for what does not fill a block, and so is nothing that could be found again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from router.replay.workload import Arrival, Workload

TOKENS_PER_ID = 512
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class BadTrace(Exception):
    """The trace cannot be read; the message names the line."""


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_mooncake(lines: Iterable[bytes], name: str, block_size: int = TOKENS_PER_ID) -> Workload:
    """The workload in these lines, in blocks of `block_size` tokens, which divides 512. Raises BadTrace."""
    decode = msgspec.json.Decoder(_Line).decode
    arrivals = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read = decode(line)
        except msgspec.MsgspecError as error:
            raise BadTrace(f"{name}, line {number}: {error}") from error
        keys = tuple(_keys(read.hash_ids, block_size))[: read.input_length // block_size]
        arrivals.append(Arrival(read.timestamp / 1000, read.input_length, max(1, read.output_length), keys))
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return Workload(name, block_size, tuple(arrivals), bin_of([arrival.at_s for arrival in arrivals]))


def bin_of(times: list[float]) -> float:
    """How coarse these times are, in seconds: the commonest step between two that differ."""
    steps = Counter(round(after - before, 1) for before, after in zip(times, times[1:], strict=False) if after > before)
    return steps.most_common(1)[0][0] if steps else 0.0


def _keys(ids: tuple[int, ...], block_size: int) -> Iterator[int]:
    parts = TOKENS_PER_ID // block_size
    for number in ids:
        for part in range(parts):
            yield ((number * parts + part + 1) * _SPREAD) & _MASK  # spread: the index sorts keys into shards by their last byte
