"""How far each engine's events can be believed, from the engine to the decision, the gauge, the log and what is asked of the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec
import pytest

from discovery.signal import AGREEMENTS
from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer as Answers
from engines.types import EngineKind
from tests.rig import Router, asked, fleet, prompt, routing
from tests.waiting import until

CHAT = "/v1/chat/completions"


async def send_directly(router: Router, engine: SimulatedEngine, *names: str) -> None:
    """Let an engine compute prompts without the router choosing it."""
    for name in names:
        body = {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": prompt(name)}]}
        async with router.session.post(engine.url + CHAT, json=body) as response:
            assert response.status == 200


async def becomes(router: Router, state: str) -> None:
    async def is_so() -> bool:
        return await router.metric("router_signal_state", state=state) == 1

    await until(is_so, what=f"the signal is {state}")
    assert await router.metric("router_signal_state") == 1, "an endpoint is in one state"


async def learned(router: Router, engine: SimulatedEngine, name: str) -> None:
    async def holds() -> bool:
        return await router.overlap_at(engine.url, prompt(name)) > 0 and await predicted(router, name) is False

    await until(holds, what=f"the index holds {name}")


async def predicted(router: Router, name: str) -> bool:
    (candidate,) = (await router.route(prompt(name)))["candidates"]
    return bool(candidate["overlap"]["predicted"])


def told_to_tell(engine: SimulatedEngine) -> list[bool]:
    """Of each chat that reached the engine, whether it was asked to tell what it finds cached."""
    bodies = (msgspec.json.decode(request.body) for request in asked(engine, CHAT))
    return [body.get("vllm_xargs") == {"kv_cache_report_mode": "full"} for body in bodies]


def changes(log: Iterable[logging.LogRecord]) -> list[tuple[str, bool]]:
    """Each change of a signal that was logged, and whether it said why."""
    fields = [record.__dict__["fields"] for record in log if record.getMessage() == "KV signal changed"]
    return [(str(line["signal"]), bool(line["reason"])) for line in fields]


async def test_what_cannot_be_replayed_is_learned_from_use_and_live_again_when_hits_agree(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with fleet(1, kv_replay_batches=1) as (engine,):
        async with routing([engine]) as before:
            await send_directly(before, engine, "a", "b", "c")
        caplog.clear()
        async with routing([engine]) as router:
            await becomes(router, "partial")
            assert await router.overlap_at(engine.url, prompt("a")) == 0
            first = await router.chat(prompt("a"))
            assert (first.signal, first.overlap_tokens) == ("partial", 0)
            assert first.cached_tokens > 0
            await learned(router, engine, "a")
            again = await router.chat(prompt("a"))
            assert (again.reason, again.signal, again.cached_tokens) == ("kv", "partial", again.overlap_tokens)
            assert again.cached_tokens == first.cached_tokens
            assert told_to_tell(engine)[3:] == [True, False], "of the second, nothing was unknown"

            for _ in range(AGREEMENTS):
                await router.chat(prompt("a"))
            await becomes(router, "live")
            last = await router.chat(prompt("a"))
            assert (last.reason, last.signal) == ("kv", "live")
            assert told_to_tell(engine)[-1] is False

            surprise = await router.chat(prompt("b"))
            assert surprise.cached_tokens > surprise.overlap_tokens == 0
            await becomes(router, "partial")
            assert (await router.chat(prompt("b"))).signal == "partial"
            await learned(router, engine, "b")
        assert changes(caplog.records) == [("partial", True), ("live", False), ("partial", True)]


async def test_R3_an_engine_that_says_where_its_events_are_and_never_sends_one_is_named_blind_within_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    loop = asyncio.get_running_loop()
    async with fleet(1) as (live,), fleet(1) as (silent,):
        silent.faults.kv.muted = True
        async with routing([live, silent]) as router:
            began = loop.time()

            async def blind() -> bool:
                await router.chat(prompt(f"{loop.time()}"))
                return await router.metric("router_signal_state", engine=silent.url, state="blind") == 1

            await until(blind, what="the silence is noticed")
            assert loop.time() - began < 10
            sent = [len(asked(engine, CHAT)) for engine in (live, silent)]
            answers = [await router.chat(prompt(f"p{number}-")) for number in range(30)]
            gained = [len(asked(engine, CHAT)) - before for engine, before in zip((live, silent), sent, strict=True)]
            assert min(gained) >= 10, "neither starved nor flooded"
            number = max(number for number, answer in enumerate(answers) if answer.engine == silent.url)
            again = await router.chat(prompt(f"p{number}-"))
            assert (again.engine, again.reason, again.signal) == (silent.url, "predicted", "blind")
            assert again.cached_tokens == again.overlap_tokens > 0
    assert changes(caplog.records) == [("blind", True)]


async def test_told_again_is_not_stored_again() -> None:
    async with fleet(1, kv_replay_batches=1, kv_blocks=128) as (engine,):
        async with routing([engine]) as before:
            await send_directly(before, engine, "a", "b")
        async with routing([engine]) as router:
            await becomes(router, "partial")
            for number in range(4):
                await router.chat(f"{prompt('a')} {prompt(str(number), 20)}")
            await learned(router, engine, "a")
            assert told_to_tell(engine).count(True) == 4
            await send_directly(router, engine, "c", "d", "e", "f", "g", "h")

            async def true() -> bool:
                return await router.metric("router_cached_blocks") == len(engine.cache.names)

            await until(true, what="what was told five times is gone with one removal")
            assert await router.overlap_at(engine.url, prompt("a")) == 0


async def test_a_client_s_own_arguments_are_left_alone() -> None:
    async with fleet(1, kv_replay_batches=1) as (engine,):
        async with routing([engine]) as before:
            await send_directly(before, engine, "a", "b")
        async with routing([engine]) as router:
            await becomes(router, "partial")
            message = {"role": "user", "content": prompt("a")}
            for own in ({"mine": 1}, {}, None):
                body = msgspec.json.encode({"model": "sim", "max_tokens": 1, "messages": [message], "vllm_xargs": own})
                assert (await router.post(CHAT, body)).status == 200
                assert asked(engine, CHAT)[-1].body == body
            body = b'{"model": "sim", "max_tokens": 1, "big": 123456789012345678901234567890, "prompt": "x"}\n '
            assert (await router.post("/v1/completions", body)).status == 200
            assert asked(engine, "/v1/completions")[-1].body == (
                b'{"model": "sim", "max_tokens": 1, "big": 123456789012345678901234567890, "prompt": "x"'
                b',"vllm_xargs":{"kv_cache_report_mode":"full"}}'
            )


async def test_a_cache_that_has_been_turned_over_is_known_whole() -> None:
    async with fleet(1, kv_replay_batches=1, kv_blocks=128) as (engine,):
        async with routing([engine]) as before:
            await send_directly(before, engine, "a", "b")
        async with routing([engine]) as router:
            await becomes(router, "partial")
            for number in range(8):
                await router.chat(prompt(f"turn{number}-"))
            await becomes(router, "live")
            held = await router.metric("router_cached_blocks")
            assert held == len(engine.cache.names)


async def test_a_cleared_cache_is_known_whole() -> None:
    async with fleet(1, kind=EngineKind.SGLANG, kv_replay_batches=1) as (engine,):
        async with routing([engine]) as before:
            await send_directly(before, engine, "a", "b")
        async with routing([engine]) as router:
            await becomes(router, "partial")
            async with router.session.post(engine.url + "/flush_cache") as response:
                assert response.status == 200
            await becomes(router, "live")


async def test_sglang_tells_nothing_again_and_its_hits_are_known_from_use() -> None:
    async with fleet(1, kind=EngineKind.SGLANG, kv_replay_batches=1) as (engine,), routing([engine]) as before:
        await send_directly(before, engine, "a", "b")
        async with routing([engine]) as router:
            await becomes(router, "partial")
            first = await router.chat(prompt("a"))
            assert (first.overlap_tokens, first.signal) == (0, "partial")
            assert first.cached_tokens > 0
            again = await router.chat(prompt("a"))
            assert (again.reason, again.signal, again.cached_tokens) == ("predicted", "partial", again.overlap_tokens)
            assert told_to_tell(engine)[2:] == [False, False]

            for number in range(AGREEMENTS):
                fresh = f"fresh{number // 4}-"
                await router.chat(prompt(fresh))
                await learned(router, engine, fresh)
            assert (await router.chat(prompt("fresh0-"))).reason == "kv"


async def compared(router: Router, by: str) -> dict[str, float]:
    """What the calibration says so far."""
    sources = {source: await router.metric("router_cached_tokens_total", by=by, source=source) for source in ("predicted", "reported")}
    return sources | {kind: await router.metric("router_cached_tokens_error_total", by=by, kind=kind) for kind in ("missing", "unforeseen")}


async def test_what_was_believed_is_compared_with_what_the_engine_reports() -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        await router.chat(prompt("a"))
        await learned(router, engine, "a")
        again = await router.chat(prompt("a"))
        assert await compared(router, "kv") == {
            "predicted": again.cached_tokens, "reported": again.cached_tokens, "missing": 0, "unforeseen": 0
        }  # fmt: skip
        assert await router.metric("router_cached_tokens_total", by="predicted") == 0


async def test_R32_predictions_for_a_cache_ten_times_what_the_engine_says_are_within_a_tenth_of_its_reports() -> None:
    """The engine says that it has 64 blocks, and keeps 704: as one does with a tier of host memory that its metrics page is silent about."""
    names = [f"{number}-" for number in range(16)]
    async with fleet(1, kv_events=False, kv_blocks=704) as (engine,):
        page = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="64"} 1.0\n'
        engine.faults.add(Answers(200, page, (("Content-Type", "text/plain; version=0.0.4"),)), path="/metrics", times=None)
        async with routing([engine]) as router:
            for _ in range(8):
                for name in names:
                    await router.chat(prompt(name, 40))
            before = await compared(router, "predicted")
            for name in names:
                answer = await router.chat(prompt(name, 40))
                assert (answer.reason, answer.signal) == ("predicted", "blind")
            after = await compared(router, "predicted")
    gained = {key: after[key] - before[key] for key in after}
    assert gained["reported"] > 16 * 64
    assert gained["missing"] + gained["unforeseen"] < 0.1 * gained["reported"], gained


async def test_an_engine_that_finds_nothing_of_what_it_has_just_computed_is_predicted_nothing() -> None:
    async with fleet(1, kv_events=False) as (engine,), routing([engine]) as router:
        await router.chat(prompt("a"))
        await router.chat(prompt("b"))
        engine.cache.clear()
        lost = await router.chat(prompt("b"))
        assert lost.overlap_tokens > lost.cached_tokens == 0
        assert await router.metric("router_predicted_blocks") == 0
        assert (await router.chat(prompt("b"))).overlap_tokens == 0
