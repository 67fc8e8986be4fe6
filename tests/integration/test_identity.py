"""R14, R15: prompts that are equal in their tokens and differ in adapter or salt share no cache, and the router knows it."""

from __future__ import annotations

import pytest

from engines.types import EngineKind
from tests.rig import Answer, Router, fleet, prompt, routing
from tests.waiting import until

TEXT = prompt("same")


async def overlap(router: Router, **fields: object) -> int:
    """Device blocks of the text's chat believed cached at the one engine."""
    body = {"model": "sim", "messages": [{"role": "user", "content": TEXT}]} | fields
    (candidate,) = (await router.post("/route", body)).json["candidates"]
    return int(candidate["overlap"]["device"])


async def asked_and_heard(router: Router, **fields: str) -> Answer:
    """A chat's answer, once its blocks are known."""
    body = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": TEXT}]} | fields
    answer = await router.post("/v1/chat/completions", body)

    async def known() -> bool:
        return await overlap(router, **fields) > 0

    await until(known, what=f"the blocks of {fields}")
    return answer


def found(answer: Answer) -> bool:
    """Whether there was overlap, for the router and for the engine alike."""
    assert answer.overlap_tokens == answer.cached_tokens
    return answer.cached_tokens > 0


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_R15_a_salt_has_a_cache_of_its_own(kind: EngineKind) -> None:
    async with fleet(1, kind=kind) as engines, routing(engines) as router:
        salts = ("s1", "s1", "s2")
        assert [found(await asked_and_heard(router, cache_salt=salt)) for salt in salts] == [False, True, False]
        assert not found(await asked_and_heard(router)), "nor does a plain prompt match a salted one"
        assert await overlap(router, cache_salt="s3") == 0
        again = [await router.chat(TEXT, **fields) for fields in ({"cache_salt": "s1"}, {"cache_salt": "s2"}, {})]  # type: ignore[arg-type]
        assert all(found(answer) for answer in again)


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_R14_an_adapter_matches_itself_and_never_the_base_model(kind: EngineKind) -> None:
    async with fleet(1, kind=kind) as engines:
        engines[0].adapters.update(ad1="/adapters/1", ad2="/adapters/2")
        async with routing(engines) as router:
            models = ("sim", "ad1", "ad1", "ad2", "sim")
            assert [found(await asked_and_heard(router, model=model)) for model in models] == [False, False, True, False, True]


async def test_R14_R15_an_adapter_with_a_salt_is_neither_the_one_nor_the_other() -> None:
    async with fleet(1) as engines:
        engines[0].adapters["ad1"] = "/adapters/1"
        async with routing(engines) as router:
            asks: list[dict[str, str]] = [{"model": "ad1"}, {"cache_salt": "s1"}, {"model": "ad1", "cache_salt": "s1"}]
            assert not any([found(await asked_and_heard(router, **fields)) for fields in asks])
            assert found(await asked_and_heard(router, model="ad1", cache_salt="s1"))
