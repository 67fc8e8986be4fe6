"""A router that starts after the engine's replay has forgotten: what the engine holds is learned again from the requests that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from discovery.signal import AGREEMENTS
from tests.e2e.serving import Served, serve
from tests.engines import prefixes, programs
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME, SGLANG, VLLM
from tests.waiting import until

pytestmark = pytest.mark.real_engine

REPLAY_BATCHES = 4


@pytest.fixture(scope="module")
def forgetful_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """A vLLM engine whose replay goes back a few steps only."""
    with RealEngine(programs.vllm(VLLM._replace(replay_batches=REPLAY_BATCHES)), tmp_path_factory.mktemp("forgetful")) as engine:
        yield engine


@pytest.fixture(scope="module")
def forgetful_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """An SGLang engine of the same kind."""
    with RealEngine(programs.sglang(SGLANG._replace(replay_batches=REPLAY_BATCHES)), tmp_path_factory.mktemp("forgetful")) as engine:
        yield engine


def warm(engine: RealEngine, name: str, count: int) -> list[str]:
    """Prompts that the engine holds, though its replay does not tell of them any more."""
    texts = [prefixes.prefix(name, number) for number in range(count)]
    for text in (*texts, *(f"filler {number} " * 20 for number in range(2 * REPLAY_BATCHES))):
        engine.post("/v1/chat/completions", {"model": MODEL_NAME, "max_tokens": 1, "messages": [{"role": "user", "content": text}]})
    return texts


async def becomes(router: Served, state: str) -> None:
    async def is_so() -> bool:
        return await router.metric("router_signal_state", state=state) == 1

    await until(is_so, what=f"the signal is {state}")


async def test_a_prefix_used_once_is_in_the_index_again_and_its_repeat_is_a_hit(forgetful_vllm: RealEngine, tmp_path: Path) -> None:
    engine = forgetful_vllm
    texts = warm(engine, "forgotten", 2)
    async with serve([engine], tmp_path / "router.log") as router:
        await becomes(router, "partial")
        for text in texts:
            assert await router.overlap_tokens(engine.url, text) == 0
            before = engine.counters()
            first = await router.ask(text)
            assert (first.signal, first.overlap_tokens) == ("partial", 0)
            found = (engine.counters() - before).hits
            assert found == first.cached_tokens > 0.9 * prefixes.tokens_of(text), "the engine did have it"

            async def in_the_index(text: str = text, found: float = found) -> bool:
                return await router.overlap_tokens(engine.url, text) == found

            await until(in_the_index, what="the index holds what the engine found")
            before = engine.counters()
            again = await router.ask(text)
            assert (again.reason, again.signal) == ("kv", "partial")
            assert (engine.counters() - before).hits == again.overlap_tokens == found

        for number in range(AGREEMENTS):
            await router.ask(texts[number % 2])
        await becomes(router, "live")

        def told() -> list[dict[str, Any]]:
            return [line for line in router.logged(endpoint=f"{engine.url}#0") if "signal" in line]

        await until(lambda: len(told()) == 2, what="the log, which is written a little later, has both")
        lines = told()
        assert [line["signal"] for line in lines] == ["partial", "live"]
        assert "could not be replayed" in lines[0]["reason"]


async def test_sglang_is_known_from_use_until_its_cache_is_cleared(forgetful_sglang: RealEngine, tmp_path: Path) -> None:
    engine = forgetful_sglang
    (text,) = warm(engine, "forgotten", 1)
    async with serve([engine], tmp_path / "router.log") as router:
        await becomes(router, "partial")
        first = await router.ask(text)
        assert (first.signal, first.overlap_tokens) == ("partial", 0)
        assert first.cached_tokens > 0.9 * prefixes.tokens_of(text)
        before = engine.counters()
        again = await router.ask(text)
        assert (again.reason, again.signal) == ("predicted", "partial")
        assert (engine.counters() - before).hits == again.overlap_tokens == again.cached_tokens > 0
        engine.post("/flush_cache", {})
        await becomes(router, "live")
