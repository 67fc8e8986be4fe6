"""R13 on real SGLang with HiCache: what its device has evicted lies in host memory, earns the host credit, and is a host hit there.

The cache is small, so that a few prompts push one out of the device. A second engine, cold and with nothing to do, is the alternative.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import Served, serve
from tests.engines import prefixes, programs
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME, SGLANG
from tests.waiting import until

pytestmark = pytest.mark.real_engine

HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "4"),
    # the others copy with GPU kernels
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
)


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """An SGLang engine with room for three of the prefixes on its device, and for four times as much in host memory."""
    blocks = prefixes.blocks_for(3.5, SGLANG.block_size)
    setup = SGLANG._replace(blocks=blocks, max_model_len=4096, arguments=("--dtype", "float32", *HICACHE))
    with RealEngine(programs.sglang(setup), tmp_path_factory.mktemp("tiers")) as engine:
        yield engine


async def overlap(router: Served, engine: RealEngine, text: str) -> dict[str, int]:
    """Tokens of a completion's prompt that the router believes in each tier of an engine."""
    told = (await router.post("/route", {"model": MODEL_NAME, "prompt": text})).json
    found: dict[str, Any] = next(candidate for candidate in told["candidates"] if candidate["engine"] == engine.url)
    return {tier: found["overlap"][tier] * found["block_size"] for tier in ("device", "host")}


async def test_R13_what_only_the_host_still_has_is_credited_and_found_there(
    tiered: RealEngine, real_sglang: RealEngine, tmp_path: Path
) -> None:
    text = prefixes.prefix("tiers", 0)
    async with serve([tiered, real_sglang], tmp_path / "router.log") as router:
        tiered.post("/v1/completions", {"model": MODEL_NAME, "prompt": text, "max_tokens": 1})

        async def on_device() -> bool:
            return (await overlap(router, tiered, text))["device"] > 0

        async def only_on_host() -> bool:
            known = await overlap(router, tiered, text)
            return known["device"] == 0 < known["host"]

        await until(on_device, what="the prompt is known on the device")
        for number in range(1, 8):
            tiered.post("/v1/completions", {"model": MODEL_NAME, "prompt": prefixes.prefix("tiers", number), "max_tokens": 1})
            if await only_on_host():
                break
        await until(only_on_host, what="the device has evicted the prompt, the host has it")
        known = (await overlap(router, tiered, text))["host"]
        assert known > 0.9 * prefixes.tokens_of(text)

        before = tiered.counters()
        answer = await router.complete(text, model=MODEL_NAME, return_cached_tokens_details=True)
        assert (answer.engine, answer.reason, answer.signal) == (tiered.url, "kv", "live")
        assert answer.overlap_tokens == answer.cached_tokens == (tiered.counters() - before).hits == known
        assert answer.json["sglext"]["cached_tokens_details"]["host"] == known
        await until(on_device, what="it has been loaded back")
