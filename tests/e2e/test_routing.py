"""The router in front of real engines: who holds what is known, forgotten when it is gone, and said when it cannot be known."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.serving import Served, serve
from tests.engines import prefixes
from tests.engines.fixtures import HALF_SILENT, PAIRS
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME
from tests.waiting import until

pytestmark = pytest.mark.real_engine


async def believed(router: Served, engine: RealEngine, text: str) -> None:
    async def cached() -> bool:
        return await router.overlap_tokens(engine.url, text) > 0

    await until(cached, what=f"the router has heard that {engine.url} holds the prompt")


def kinds(engines: Sequence[RealEngine]) -> str:
    """For names of prompts that no other fleet has had."""
    return " ".join(engine.kind for engine in engines)


@pytest.mark.parametrize("engines", PAIRS, indirect=True)
async def test_a_router_that_starts_late_knows_what_the_engines_hold(engines: Sequence[RealEngine], tmp_path: Path) -> None:
    texts = [prefixes.prefix(f"late {kinds(engines)}", number) for number in range(2)]
    async with serve(engines, tmp_path / "first.log") as router:
        homes = [(await router.ask(text)).engine for text in texts]
    assert set(homes) == {engine.url for engine in engines}
    async with serve(engines, tmp_path / "second.log") as router:
        for text, home in zip(texts, homes, strict=True):
            await believed(router, next(engine for engine in engines if engine.url == home), text)
            again = await router.ask(text)
            assert (again.engine, again.reason) == (home, "kv")
            assert again.cached_tokens == again.overlap_tokens > 0.9 * prefixes.tokens_of(text)


@pytest.mark.parametrize("engines", ["real_mixed_pair"], indirect=True)
async def test_R2_a_prompt_warm_on_sglang_goes_back_to_sglang(engines: Sequence[RealEngine], tmp_path: Path) -> None:
    """One model on both kinds of engine, whose blocks differ in size and name."""
    assert len({engine.block_size for engine in engines}) == 2
    async with serve(engines, tmp_path / "router.log") as router:
        texts = [prefixes.prefix("both kinds", number) for number in range(8)]
        homes = [(await router.ask(text)).engine for text in texts]
        assert set(homes) == {engine.url for engine in engines}
        for text, home in zip(texts, homes, strict=True):
            engine = next(engine for engine in engines if engine.url == home)
            await believed(router, engine, text)
            before = engine.counters()
            again = await router.ask(text)
            assert (again.engine, again.reason, again.signal) == (home, "kv", "live")
            assert (engine.counters() - before).hits == again.overlap_tokens > 0.9 * prefixes.tokens_of(text)


@pytest.mark.parametrize("engines", ["real_vllm", "real_sglang"], indirect=True)
async def test_R15_a_salt_has_a_cache_of_its_own(engines: Sequence[RealEngine], tmp_path: Path) -> None:
    text = prefixes.prefix("salted", 0)
    async with serve(engines, tmp_path / "router.log") as router:

        async def ask(salt: str) -> int:
            """Overlap, on which router and engine agree; the prompt's blocks are known afterwards."""
            body = {"model": MODEL_NAME, "max_tokens": 2, "messages": [{"role": "user", "content": text}], "cache_salt": salt}
            answer = await router.post("/v1/chat/completions", body)
            assert answer.status == 200, answer.body

            async def known() -> bool:
                (candidate,) = (await router.post("/route", body)).json["candidates"]
                return int(candidate["overlap"]["device"]) > 0

            await until(known, what="the router has heard of the blocks")
            assert answer.overlap_tokens == answer.cached_tokens
            return answer.overlap_tokens

        first, again, other = [await ask(salt) for salt in ("s1", "s1", "s2")]
        assert first == other == 0
        assert again > 0.9 * prefixes.tokens_of(text)


@pytest.mark.parametrize("engines", HALF_SILENT, indirect=True)
async def test_R3_an_engine_without_events_is_named_blind_and_still_gets_its_share(engines: Sequence[RealEngine], tmp_path: Path) -> None:
    heard, silent = engines
    async with serve(engines, tmp_path / "router.log") as router:
        assert await router.metric("router_signal_state", engine=silent.url, state="blind") == 1
        assert await router.metric("router_signal_state", engine=heard.url, state="live") == 1
        (line,) = router.logged(endpoint=f"{silent.url}#0", signal="blind")
        assert line["level"] == "warning"

        texts = [prefixes.prefix(f"blind {kinds(engines)}", number) for number in range(12)]
        first = [await router.ask(text) for text in texts]
        share = Counter(answer.engine for answer in first)
        assert min(share[heard.url], share[silent.url]) >= 3, share
        assert {answer.signal for answer in first if answer.engine == silent.url} == {"blind"}

        to_silent = [(text, answer) for text, answer in zip(texts, first, strict=True) if answer.engine == silent.url]
        before = silent.counters()
        again = [await router.ask(text) for text, _ in to_silent]
        assert {(answer.engine, answer.reason, answer.signal) for answer in again} == {(silent.url, "predicted", "blind")}
        counted = silent.counters() - before
        assert counted.hits > 0.9 * counted.queries


@pytest.mark.parametrize("engines", PAIRS, indirect=True)
async def test_R7_an_engine_that_restarts_in_place_is_forgotten(engines: Sequence[RealEngine], tmp_path: Path) -> None:
    name = f"restart {kinds(engines)}"
    async with serve(engines, tmp_path / "router.log") as router:
        texts = [prefixes.prefix(name, number) for number in range(4)]
        homes = [(await router.ask(text)).engine for text in texts]
        engine = next(engine for engine in engines if engine.url == homes[0])
        for text, home in zip(texts, homes, strict=True):
            await believed(router, next(e for e in engines if e.url == home), text)

        await asyncio.to_thread(engine.restart)

        async def serves_again() -> bool:
            return await router.serving() == 2

        await until(serves_again, deadline_s=30, what="the restarted engine serves")
        assert engine.counters().queries < prefixes.tokens_of(texts[0]), "it has had no prompt but its own first one"
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
            fresh = prefixes.prefix(name, number)
            if (await router.ask(fresh)).engine == engine.url:
                break
        await believed(router, engine, fresh)
