"""The router in front of real engines: who holds what is known, forgotten when it is gone, and said when it cannot be known."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.serving import Served, serve
from tests.engines import prefixes
from tests.engines.launch import RealEngine
from tests.waiting import until

pytestmark = pytest.mark.real_engine


async def believed(router: Served, engine: RealEngine, text: str) -> None:
    async def cached() -> bool:
        return await router.overlap_tokens(engine.url, text) > 0

    await until(cached, what=f"the router has heard that {engine.url} holds the prompt")


async def test_a_router_that_starts_late_knows_what_the_engines_hold(real_vllm_pair: Sequence[RealEngine], tmp_path: Path) -> None:
    text = prefixes.prefix("late", 0)
    async with serve(real_vllm_pair, tmp_path / "first.log") as router:
        home = (await router.ask(text)).engine
    async with serve(real_vllm_pair, tmp_path / "second.log") as router:
        await believed(router, next(engine for engine in real_vllm_pair if engine.url == home), text)
        again = await router.ask(text)
    assert (again.engine, again.reason) == (home, "kv")
    assert again.cached_tokens == again.overlap_tokens > 0.9 * prefixes.tokens_of(text)


async def test_a_prompt_warm_on_sglang_goes_back_to_sglang(real_vllm: RealEngine, real_sglang: RealEngine, tmp_path: Path) -> None:
    """One model on both kinds of engine, whose blocks differ in size and name."""
    assert real_vllm.block_size != real_sglang.block_size
    async with serve([real_vllm, real_sglang], tmp_path / "router.log") as router:
        texts = [prefixes.prefix("both kinds", number) for number in range(8)]
        homes = [(await router.ask(text)).engine for text in texts]
        assert set(homes) == {real_vllm.url, real_sglang.url}
        for text, home in zip(texts, homes, strict=True):
            engine = next(engine for engine in (real_vllm, real_sglang) if engine.url == home)
            await believed(router, engine, text)
            before = engine.counters()
            again = await router.ask(text)
            assert (again.engine, again.reason, again.signal) == (home, "kv", "live")
            assert (engine.counters() - before).hits == again.overlap_tokens > 0.9 * prefixes.tokens_of(text)


async def test_R3_an_engine_without_events_is_named_blind_and_still_gets_its_share(
    real_vllm: RealEngine, real_silent_vllm: RealEngine, tmp_path: Path
) -> None:
    async with serve([real_vllm, real_silent_vllm], tmp_path / "router.log") as router:
        assert await router.metric("router_signal_state", engine=real_silent_vllm.url, state="blind") == 1
        assert await router.metric("router_signal_state", engine=real_vllm.url, state="live") == 1
        (line,) = router.logged(endpoint=f"{real_silent_vllm.url}#0", signal="blind")
        assert line["level"] == "warning"

        texts = [prefixes.prefix("blind", number) for number in range(12)]
        first = [await router.ask(text) for text in texts]
        share = Counter(answer.engine for answer in first)
        assert min(share[real_vllm.url], share[real_silent_vllm.url]) >= 3, share
        assert {answer.signal for answer in first if answer.engine == real_silent_vllm.url} == {"blind"}

        to_silent = [(text, answer) for text, answer in zip(texts, first, strict=True) if answer.engine == real_silent_vllm.url]
        before = real_silent_vllm.counters()
        again = [await router.ask(text) for text, _ in to_silent]
        assert {(answer.engine, answer.reason, answer.signal) for answer in again} == {(real_silent_vllm.url, "predicted", "blind")}
        counted = real_silent_vllm.counters() - before
        assert counted.hits > 0.9 * counted.queries


async def test_R7_an_engine_that_restarts_in_place_is_forgotten(real_vllm_pair: Sequence[RealEngine], tmp_path: Path) -> None:
    async with serve(real_vllm_pair, tmp_path / "router.log") as router:
        texts = [prefixes.prefix("restart", number) for number in range(4)]
        homes = [(await router.ask(text)).engine for text in texts]
        engine = next(engine for engine in real_vllm_pair if engine.url == homes[0])
        for text, home in zip(texts, homes, strict=True):
            await believed(router, next(e for e in real_vllm_pair if e.url == home), text)

        await asyncio.to_thread(engine.restart)

        async def serves_again() -> bool:
            return await router.serving() == 2

        await until(serves_again, deadline_s=30, what="the restarted engine serves")
        assert engine.counters().queries == 0
        for text in texts:
            assert await router.overlap_tokens(engine.url, text) == 0
        answers = [await router.ask(text) for text in texts]
        gone = [answer for answer, home in zip(answers, homes, strict=True) if home == engine.url]
        kept = [answer for answer, home in zip(answers, homes, strict=True) if home != engine.url]
        assert all(answer.overlap_tokens == answer.cached_tokens == 0 for answer in gone)
        assert all(answer.reason == "kv" and answer.cached_tokens == answer.overlap_tokens > 0 for answer in kept)

        # its new life is followed like its old one
        fresh = ""
        for number in range(100, 120):
            fresh = prefixes.prefix("restart", number)
            if (await router.ask(fresh)).engine == engine.url:
                break
        await believed(router, engine, fresh)
