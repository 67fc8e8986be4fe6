"""Engines that are put to sleep and woken."""

from __future__ import annotations

from tests.rig import Router, asked, fleet, prompt, routing
from tests.waiting import until


async def seen(router: Router, *, asleep: int) -> None:
    async def counted() -> bool:
        return await router.metric("router_engine_state", state="asleep") == asleep

    await until(counted, what=f"{asleep} engines are seen asleep")


async def test_C6_an_engine_asleep_gets_nothing_and_takes_part_again_when_it_wakes() -> None:
    async with fleet(2) as (one, other), routing([one, other]) as router:
        one.sleep()
        await seen(router, asleep=1)
        before = len(asked(one))
        assert {(await router.chat(f"asleep {number}")).engine for number in range(12)} == {other.url}
        assert len(asked(one)) == before
        rejected = (await router.route("x"))["rejected"]
        assert rejected == [{"engine": one.url, "rank": 0, "reason": "asleep"}]
        assert (await router.get("/ready")).json["models"] == {"sim": 1}
        one.wake()
        await seen(router, asleep=0)
        assert {(await router.chat(f"awake {number}")).engine for number in range(16)} == {one.url, other.url}


async def test_C6_a_model_whose_engines_all_sleep_is_not_offered_and_is_restored() -> None:
    async with fleet(1, served_model_name="sleepy") as (sleepy,), fleet(1) as (awake,), routing([sleepy, awake]) as router:

        async def models() -> list[str]:
            return sorted(card["id"] for card in (await router.get("/v1/models")).json["data"])

        assert await models() == ["sim", "sleepy"]
        sleepy.sleep()
        await seen(router, asleep=1)
        assert await models() == ["sim"]
        assert (await router.get("/ready?model=sleepy")).status == 503
        assert (await router.get("/ready?model=sim")).status == 200
        refused = await router.chat("x", model="sleepy")
        assert refused.status in (429, 503), "it is there, and cannot serve now: not 404"
        assert not asked(sleepy)
        sleepy.wake()
        await seen(router, asleep=0)
        assert await models() == ["sim", "sleepy"]
        assert (await router.get("/ready?model=sleepy")).status == 200
        assert (await router.chat("x", model="sleepy")).status == 200


async def test_C6_what_was_cached_before_the_sleep_is_not_counted_on_for_long_after_it() -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        await router.chat(prompt("a"))

        async def cached() -> int:
            return await router.overlap_at(engine.url, prompt("a"))

        await until(cached, what="the prompt is cached")
        engine.sleep()
        await seen(router, asleep=1)
        engine.wake()
        await seen(router, asleep=0)
        await router.chat(prompt("b"))  # vLLM tells that its cache is empty with its first step after waking

        async def forgotten() -> bool:
            return await cached() == 0

        await until(forgotten, what="what was cached before is forgotten")


async def test_C6_an_engine_that_sleeps_when_the_router_starts_serves_once_it_wakes() -> None:
    async with fleet(1) as (engine,):
        engine.sleep()
        async with routing([engine], wait_for=0) as router:
            await seen(router, asleep=1)
            assert (await router.get("/ready")).status == 503
            engine.wake()

            async def serves() -> bool:
                return await router.serving() == 1

            await until(serves, what="it serves")
            assert (await router.chat("x")).status == 200
