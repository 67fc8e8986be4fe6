"""What a router remembers is bounded by what it is told to keep, however many prompts come."""

from __future__ import annotations

import gc
import os
from itertools import pairwise
from pathlib import Path

from engines.blocks import pack_keys
from engines.types import Tier
from router.caches import Caches
from router.load import LoadBook
from tests.choosing import endpoint

CAP = 20_000
PROMPTS = 1_000_000
ENGINES = 4
CACHE = 2_000
ROUTED = 21
"""One in so many was sent by this router; the others the engines tell of."""
BYTES_PER_BLOCK = 160
SLACK_BYTES = 4_000_000
"""Of a quarter of a million prompts that were kept, each would be some 200 bytes."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_M1_after_a_million_unique_prompts_memory_has_levelled_off_under_the_cap() -> None:
    caches, book = Caches(max_blocks=CAP), LoadBook()
    engines = [endpoint(f"e{number}") for number in range(ENGINES)]
    for engine in engines:
        caches.add(engine, total_blocks=CACHE)
    gc.collect()
    resident = [resident_bytes()]
    for number in range(PROMPTS):
        engine = engines[number % ENGINES]
        keys = [(number << 20) | 1, (number << 20) | 2]  # as unlike as hashes are where it counts: in no other prompt
        caches.store(engine, Tier.DEVICE, [pack_keys(keys)])  # and never evicted: what would grow without the cap
        if number % ROUTED == 0:
            with book.reserve(engine, keys, 32):
                caches.sent(engine, keys, 0.0)
        if number % (PROMPTS // 4) == PROMPTS // 4 - 1:
            resident.append(resident_bytes())
    assert len(caches) == CAP + ENGINES * CACHE
    assert caches.refused == 2 * PROMPTS - CAP
    assert len(book) == 0
    assert caches.memory_bytes() < BYTES_PER_BLOCK * (CAP + ENGINES * CACHE) + SLACK_BYTES
    quarters = [after - before for before, after in pairwise(resident)]
    assert sum(quarters[1:]) < SLACK_BYTES, quarters
    caches._check()
