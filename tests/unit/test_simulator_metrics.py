"""The metrics page says what our own reader looks for, and nothing it would take for something else."""

from __future__ import annotations

import pytest

from engines.metrics import CacheConfig, EngineLoad, read_boot, read_cache_config, read_load
from engines.simulator.cache import BlockCache
from engines.simulator.hashes import BlockNamer
from engines.simulator.metrics import page
from engines.simulator.scheduler import Limits, Scheduler
from engines.simulator.sequences import Prompt, Spoken
from engines.simulator.timing import Timing
from engines.simulator.words import Words
from engines.types import EngineKind


def busy(kind: EngineKind) -> Scheduler:
    """One sequence running on 2 of 8 blocks, one waiting."""
    scheduler = Scheduler(BlockCache(8, 4), Timing(1.0, 1.0, 1.0, 1.0), Limits(1, 64))
    for _ in range(2):
        scheduler.submit(Spoken(Prompt(list(range(6)), 5), BlockNamer(kind, 4).chain(), Words({9: " a"})))
    scheduler.plan()
    return scheduler


@pytest.mark.parametrize("kind", list(EngineKind))
def test_our_reader_finds_the_load(kind: EngineKind) -> None:
    text = page(busy(kind), kind, "sim", started=12.5, asleep=False)
    asleep = False if kind is EngineKind.VLLM else None
    assert read_load(kind, text) == {0: EngineLoad(running=1, waiting=1, kv_usage=0.25, asleep=asleep)}


def test_a_vllm_page_tells_the_cache_and_the_boot_and_an_sglang_page_neither() -> None:
    vllm, sglang = (page(busy(kind), kind, "sim", started=12.5, asleep=False) for kind in EngineKind)
    assert read_cache_config(vllm) == {0: CacheConfig(block_size=4, total_blocks=8)}
    assert (read_boot(vllm), read_boot(sglang)) == (12.5, None)


def test_sleep_is_told() -> None:
    told = [page(busy(EngineKind.VLLM), EngineKind.VLLM, "sim", started=0.0, asleep=asleep) for asleep in (False, True)]
    assert ['sleep_state="awake"} 1.0' in text for text in told] == [True, False]
