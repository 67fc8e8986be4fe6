"""A stream's engine fails: another one goes on, and the client cannot tell; or it is told, where that would not be exact."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer as Scripted
from engines.simulator.faults import Break, End, Fail
from engines.types import EngineKind
from tests.integration.test_failover import FirstByAge, nothing_is_in_flight
from tests.rig import Router, asked, fleet, routing
from tests.waiting import until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOKENS = 6
DONE = b"data: [DONE]\n\n"


class FirstThatLooksAtCaches(FirstByAge):
    uses_cache = True


@contextlib.asynccontextmanager
async def engines(
    count: int = 2, *, kind: EngineKind = EngineKind.VLLM, **settings: object
) -> AsyncIterator[tuple[list[SimulatedEngine], Router]]:
    """Engines that are asked in order while they serve."""
    given: dict[str, Any] = {"resume": 1, "policy": "tests.integration.test_failover:FirstByAge", "probe_period_s": 60.0} | settings
    async with fleet(count, kind=kind) as started, routing(started, **given) as router:
        FirstByAge.order = FirstThatLooksAtCaches.order = [engine.url for engine in started]
        yield started, router
        await nothing_is_in_flight(router)


def body(path: str, text: str = "hello", **fields: object) -> dict[str, object]:
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {"model": "sim", "stream": True, "max_tokens": TOKENS, "stream_options": {"include_usage": True}} | asked | fields


async def stream(router: Router, path: str = CHAT, text: str = "hello", **fields: Any) -> bytes:  # noqa: ANN401  JSON
    """A stream that is whole, without the second it was made in. Equal requests have equal ids."""
    answer = await router.post(path, body(path, text, **fields), {"x-request-id": "0123456789abcdef"})
    assert answer.status == 200
    return re.sub(rb'"created":\d+', b'"created":0', answer.body)


async def broken(router: Router, path: str = CHAT, **fields: Any) -> tuple[bytes, dict[str, object]]:  # noqa: ANN401  JSON
    """A stream that does not end: what came of it before the error event, and the error."""
    got = b""
    async with router.session.post(router.url + path, data=msgspec.json.encode(body(path, **fields))) as response:
        with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012  what came before it is wanted too
            async for piece in response.content.iter_any():
                got += piece
    before, _, told = got.removesuffix(b"\n\n").rpartition(b"\n\n")
    error: dict[str, object] = msgspec.json.decode(told.removeprefix(b"data: "))["error"]
    return before, error


async def would_ask(router: Router, engine: SimulatedEngine) -> bool:
    """Whether an engine that has failed gets requests again."""
    return str((await router.route("hello"))["engine"]) == engine.url


async def outcome(router: Router, name: str) -> float:
    """How many streams ended so; nothing else may have come of any."""
    count = await router.metric("router_resumes_total", outcome=name)
    assert await router.metric("router_resumes_total") == count
    return count


@pytest.mark.parametrize("more", [0, 40], ids=["between events", "within an event"])
@pytest.mark.parametrize(("path", "kind"), [(CHAT, EngineKind.VLLM), (COMPLETION, EngineKind.VLLM), (COMPLETION, EngineKind.SGLANG)])
async def test_a_stream_that_breaks_anywhere_is_the_one_that_does_not(path: str, kind: EngineKind, more: int) -> None:
    async with engines(kind=kind) as ((one, _), router):
        events = TOKENS + (path == CHAT)
        for after in range(1, events + 1):
            await until(lambda: would_ask(router, one), what="the first engine is trusted again")
            text = f"a text of its own {after}"
            one.faults.add(Break(after, bytes_more=more))
            got = await stream(router, path, text, rid="one")
            assert asked(one, path)[-1].chunks == after
            expected = await stream(router, path, text, rid="one")
            if after == events:
                expected = re.sub(rb',"prompt_tokens_details":\{[^}]*}', b"", expected)  # what only the engine knew
            assert got == expected, f"broken after {after}"
            assert got.endswith(DONE)
        assert await router.metric("router_resumes_total", outcome="resumed") == events - 1
        assert await router.metric("router_resumes_total", outcome="completed") == 1, "where only the end was missing"
        assert await router.metric("router_broken_answers_total") == 0


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {"stream_options": None}]
)
async def test_usage_is_told_as_it_was_asked_for(options: dict[str, Any]) -> None:
    async with engines() as ((one, _), router):
        one.faults.add(Break(3))
        assert await stream(router, **options) == await stream(router, **options)
        assert await outcome(router, "resumed") == 1


async def test_an_engine_that_reports_its_own_failure_and_ends_in_order_is_gone_all_the_same() -> None:
    async with engines() as ((one, other), router):
        one.faults.add(Fail(4))
        resumed = await stream(router)
        await until(lambda: _all_serve(router, 2), what="the failed engine has been seen alive")
        assert await stream(router) == resumed
        assert await outcome(router, "resumed") == 1
        assert len(asked(other)) == 1


async def _all_serve(router: Router, count: int) -> bool:
    return await router.serving() == count


async def test_an_engine_that_falls_silent_is_gone_too() -> None:
    async with engines(stream_idle_timeout_s=0.5) as ((one, _), router):
        one.faults.add(Break(3, End.HANG))
        assert await stream(router) == await stream(router)
        await until(lambda: one.running == 0, what="the silent engine is left")


async def test_many_streams_of_a_dying_engine_all_go_on() -> None:
    async with (
        fleet(2, speedup=1, decode_step_ms=30) as (one, other),
        routing([one, other], resume=1, policy="round-robin") as router,
    ):
        texts = [f"stream {number}" for number in range(10)]
        responses = await asyncio.gather(*(router.begin(text, stream=True, max_tokens=60) for text in texts))
        await until(lambda: one.running == other.running == 5, what="all are under way")
        one.core.asleep = True
        begun = [await response.content.readline() for response in responses]
        await one.die()
        got = [first + await response.read() for first, response in zip(begun, responses, strict=True)]
        expected = await asyncio.gather(*(router.chat(text, stream=True, max_tokens=60) for text in texts))
        assert [texts_of(stream) for stream in got] == [texts_of(answer.body) for answer in expected]
        assert await outcome(router, "resumed") == 5
        await nothing_is_in_flight(router)


def texts_of(stream: bytes) -> str:
    chunks = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in stream.split(b"\n\n") if event.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_the_other_engine_is_asked_by_tokens_and_counted_with_what_it_has_of_them() -> None:
    async with engines(policy=f"{__name__}:FirstThatLooksAtCaches") as ((one, other), router):
        text = "word " * 200
        one.faults.add(Break(3))
        await stream(router, CHAT, text)
        (rest,) = asked(other)
        ids = msgspec.json.decode(rest.body)["kv_transfer_params"]["prompt_token_ids"]
        assert len(ids) == (await router.route(text))["prompt_tokens"] + 2
        assert msgspec.json.decode(rest.body)["max_tokens"] == TOKENS - 2

        async def known() -> bool:
            page = (await router.post("/route", {"model": "sim", "prompt": ids})).json
            return all(candidate["overlap"]["device"] for candidate in page["candidates"])

        await until(known, what="both have it")


@pytest.mark.parametrize("dead", ["unreachable", "closes", "full"])
async def test_another_engine_that_does_not_begin_is_no_try(dead: str) -> None:
    async with engines(3) as ((one, other, third), router):
        one.faults.add(Break(3))
        match dead:
            case "unreachable":
                await other.die()
            case "closes":
                other.faults.add(Break(0, End.CLOSE))
            case "full":
                other.faults.add(Scripted(503, b"full", (("Retry-After", "9"),)))
        got = await stream(router)
        assert asked(third)
        assert got == await stream(router)
        assert await outcome(router, "resumed") == 1


@pytest.mark.parametrize("resume", [1, 2])
async def test_it_goes_on_as_often_as_it_may(resume: int) -> None:
    async with engines(3, resume=resume) as ((one, other, _), router):
        one.faults.add(Break(3))
        other.faults.add(Break(3))
        if resume == 2:
            assert await stream(router) == await stream(router)
            assert await outcome(router, "resumed") == 1
        else:
            before, error = await broken(router)
            assert before.count(b"data: ") == 5, "a role and two tokens of one engine, two of another"
            assert error["code"] == "engine_broken"
            assert await outcome(router, "too_often") == 1


async def test_without_another_engine_the_stream_breaks_as_ever() -> None:
    async with engines(1, probe_period_s=0.2) as ((one,), router):
        one.faults.add(Break(3))
        before, error = await broken(router)
        assert before.count(b"data: ") == 3
        assert str(error["message"]).startswith("the answer broke off: the engine's answer broke off")
        assert await outcome(router, "no_engine") == 1
        assert await router.metric("router_broken_answers_total") == 1


@pytest.mark.parametrize("status", [400, 200])
async def test_an_engine_that_refuses_to_go_on_or_answers_otherwise_is_the_end(status: int) -> None:
    async with engines() as ((one, other), router):
        one.faults.add(Break(3))
        other.faults.add(Scripted(status, b'{"error":{"message":"no"}}', (("Content-Type", "application/json"),)))
        before, error = await broken(router)
        assert before.count(b"data: ") == 3
        assert "refused" in str(error["message"])
        assert await outcome(router, "refused") == 1


async def test_an_engine_that_goes_on_from_elsewhere_is_not_heard() -> None:
    """As one does that does not know the field by which it is given the ids."""
    async with engines() as ((one, other), router):
        one.faults.add(Break(3))
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        events = b"data: " + msgspec.json.encode({"id": "x", "choices": [choice], "prompt_token_ids": [1, 2]}) + b"\n\n" + DONE
        other.faults.add(Scripted(200, events, (("Content-Type", "text/event-stream"),)))
        before, error = await broken(router)
        assert before.count(b"data: ") == 3
        assert "take up" in str(error["message"])
        assert await outcome(router, "diverged") == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"seed": 5}, "seed"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 1}, "penalties"),
        ({"stop": "x"}, "stop_strings"),
    ],
)
async def test_what_would_not_be_exact_breaks_as_ever_and_says_why(fields: dict[str, Any], why: str) -> None:
    async with engines() as ((one, other), router):
        one.faults.add(Break(3))
        before, error = await broken(router, **fields)
        assert before.count(b"data: ") == 3
        assert error["code"] == "engine_broken"
        assert await outcome(router, why) == 1
        assert "return_token_ids" not in msgspec.json.decode(asked(one)[-1].body)
        assert not asked(other)


async def test_a_chat_on_sglang_breaks_as_ever() -> None:
    async with engines(kind=EngineKind.SGLANG) as ((one, _), router):
        one.faults.add(Break(3))
        await broken(router)
        assert await outcome(router, "engine") == 1


async def test_nothing_is_asked_for_and_nothing_changes_where_it_is_off() -> None:
    async with engines(resume=0) as ((one, _), router):
        await stream(router)
        assert msgspec.json.decode(asked(one)[-1].body) == body(CHAT)
        one.faults.add(Break(3))
        await broken(router)
        assert await router.metric("router_resumes_total") == 0


async def test_what_is_no_stream_passes_as_it_is() -> None:
    async with engines() as ((one, _), router):
        answer = await router.chat("hello")
        assert answer.status == 200
        assert "return_token_ids" not in msgspec.json.decode(asked(one)[-1].body)
        one.faults.add(Scripted(422, b'{"error":{"message":"mine"}}', (("Content-Type", "application/json"),)))
        answer = await router.chat("hello", stream=True)
        assert (answer.status, answer.body) == (422, b'{"error":{"message":"mine"}}')


async def test_a_client_that_leaves_while_nobody_can_go_on_yet_frees_everything() -> None:
    async with engines(2, probe_period_s=60.0) as ((one, other), router):
        one.faults.add(Break(3))
        other.faults.add(Scripted(503, b"full"), times=None)
        response = await router.begin("hello", stream=True, max_tokens=50)
        await response.content.readline()

        async def waits() -> bool:
            return await router.metric("router_admission_waiting") == 1

        await until(waits, what="it waits for an engine")
        response.close()
