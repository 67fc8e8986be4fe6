"""Adapters that come and go while an engine runs."""

from __future__ import annotations

from typing import Any

import pytest

from engines.simulator.engine import SimulatedEngine
from engines.types import EngineKind
from tests.rig import Router, asked, fleet, prompt, routing
from tests.waiting import until


async def tell(router: Router, engine: SimulatedEngine, action: str, name: str) -> None:
    """As an operator does it, at the engine itself."""
    body = {"lora_name": name, "lora_path": f"/adapters/{name}"}
    async with router.session.post(f"{engine.url}/v1/{action}_lora_adapter", json=body) as response:
        assert response.status == 200


async def listed(router: Router) -> dict[str, Any]:
    return {card["id"]: card for card in (await router.get("/v1/models")).json["data"]}


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_C4_an_adapter_is_routable_where_it_is_loaded_and_gone_when_it_is_unloaded(kind: EngineKind) -> None:
    async with fleet(2, kind=kind) as (bare, adapted), routing([bare, adapted]) as router:
        assert (await router.chat("x", model="ad1")).status == 404
        await tell(router, adapted, "load", "ad1")

        async def offered() -> bool:
            return "ad1" in await listed(router)

        await until(offered, what="a refresh has found the adapter")
        assert (await listed(router))["ad1"]["parent"] == "sim"
        assert (await router.get("/ready")).json["models"] == {"sim": 2, "ad1": 1}
        answers = [await router.chat(f"ask {number}", model="ad1") for number in range(8)]
        assert {(answer.status, answer.engine) for answer in answers} == {(200, adapted.url)}
        assert {answer.json["model"] for answer in answers} == {"ad1"}
        assert {(await router.chat(f"base {number}")).engine for number in range(8)} == {bare.url, adapted.url}
        await tell(router, adapted, "unload", "ad1")

        async def gone() -> bool:
            return "ad1" not in await listed(router)

        await until(gone, what="a refresh has missed the adapter")
        at_bare, at_adapted = len(asked(bare)), len(asked(adapted))
        assert (await router.chat("x", model="ad1")).status == 404
        assert (len(asked(bare)), len(asked(adapted))) == (at_bare, at_adapted)
        assert (await router.chat("x")).status == 200


async def test_C4_an_adapter_has_a_cache_of_its_own_from_its_first_prompt_on() -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        await router.chat(prompt("a"))

        async def cached(model: str) -> int:
            return await router.overlap_at(engine.url, prompt("a"), model=model)

        await until(lambda: cached("sim"), what="the base model's prompt is cached")
        await tell(router, engine, "load", "ad1")

        async def offered() -> bool:
            return "ad1" in await listed(router)

        await until(offered, what="a refresh has found the adapter")
        assert await cached("ad1") == 0
        first = await router.chat(prompt("a"), model="ad1")
        assert (first.overlap_tokens, first.cached_tokens) == (0, 0)
        await until(lambda: cached("ad1"), what="the adapter's prompt is cached")
        again = await router.chat(prompt("a"), model="ad1")
        assert again.cached_tokens == again.overlap_tokens > 0


async def test_C4_loading_an_adapter_loses_nothing_that_is_known_of_the_engine() -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        await router.chat(prompt("a"))

        async def cached() -> int:
            return await router.overlap_at(engine.url, prompt("a"))

        await until(cached, what="the prompt is cached")
        before = await cached()
        for name in ("ad1", "ad2"):
            await tell(router, engine, "load", name)

        async def both() -> bool:
            return {"ad1", "ad2"} <= (await listed(router)).keys()

        await until(both, what="a refresh has found both adapters")
        assert await cached() == before
        assert (await router.chat(prompt("a"))).reason == "kv"
