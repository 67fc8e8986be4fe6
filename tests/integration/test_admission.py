"""Overload: who waits, who goes first, who is turned away and what they are told, in front of simulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec
import pytest

from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer as Refuses
from router.settings import AdmissionSettings
from tests.rig import Answer, Router, fleet, routing
from tests.waiting import until

CHAT = "/v1/chat/completions"
NO_RETRY_AFTER = Refuses(503, b'{"error": {"message": "busy"}}', (("Content-Type", "application/json"),))


def refuses(retry_after: int, status: int = 503) -> Refuses:
    return Refuses(status, b'{"error": {"message": "busy"}}', (("Content-Type", "application/json"), ("Retry-After", str(retry_after))))


@contextlib.asynccontextmanager
async def full(router: Router, *engines: SimulatedEngine, model: str = "sim") -> AsyncIterator[None]:
    """Every engine has one long stream within the block, which is all that it may have."""
    responses: list[aiohttp.ClientResponse] = []
    for _ in engines:
        responses.append(await router.begin("occupant", model=model, stream=True, max_tokens=15_000))
        assert responses[-1].status == 200
    await until(lambda: [engine.running for engine in engines] == [1] * len(engines), what="every engine is full")
    try:
        yield
    finally:
        for response in responses:
            response.close()


@contextlib.asynccontextmanager
async def narrow(*, engines: int = 1, **admission: object) -> AsyncIterator[tuple[Sequence[SimulatedEngine], Router]]:
    """Engines that may have one request each."""
    settings = msgspec.structs.replace(AdmissionSettings(max_active_requests=1, max_wait_s=30.0), **admission)
    async with (
        fleet(engines, speedup=1, decode_step_ms=2, decode_sequence_ms=0) as simulated,
        routing(simulated, admission=settings) as router,
    ):
        yield simulated, router
        await until(lambda: not any(engine.running for engine in simulated), what="the engines are idle")
        assert await router.metric("router_active_requests") == 0
        assert await router.metric("router_admission_waiting") == 0


def asked(engine: SimulatedEngine) -> list[str]:
    """What chats an engine has been asked, in order, without what filled it."""
    texts = [msgspec.json.decode(request.body)["messages"][0]["content"] for request in engine.requests if request.path == CHAT]
    return [text for text in texts if text != "occupant"]


async def waiting(router: Router, count: int) -> None:
    async def so_many_wait() -> bool:
        return await router.metric("router_admission_waiting") == count

    await until(so_many_wait, what=f"{count} requests wait")


async def queued(
    group: asyncio.TaskGroup, router: Router, *texts: str, headers: dict[str, str] | None = None, **fields: object
) -> list[asyncio.Task[Answer]]:
    """Chats that wait, in this order."""
    already = await router.metric("router_admission_waiting")
    tasks = []
    for number, text in enumerate(texts, 1):
        body = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": text}]} | fields
        tasks.append(group.create_task(router.post(CHAT, body, headers)))
        await waiting(router, int(already) + number)
    return tasks


async def test_nobody_waits_while_there_is_room() -> None:
    async with fleet(2) as engines, routing(engines) as router:
        answers = await asyncio.gather(*(router.chat(str(number)) for number in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert await router.metric("router_admission_admitted_total", how="at_once") == 20
        assert await router.metric("router_admission_admitted_total", how="after_waiting") == 0
        assert await router.metric("router_admission_shed_total") == 0


async def test_H20_who_finds_the_queue_full_is_told_at_once_when_to_come_back(caplog: pytest.LogCaptureFixture) -> None:
    async with narrow(max_waiting=10) as ((engine,), router), asyncio.TaskGroup() as group:
        async with full(router, engine):
            caplog.set_level(logging.INFO, "router.proxy")
            tasks = [group.create_task(router.chat(f"chat {number}")) for number in range(30)]
            await until(lambda: sum(task.done() for task in tasks) == 20, what="20 are turned away")
            refused = [task.result() for task in tasks if task.done()]
            for answer in refused:
                assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
                assert answer.json["error"]["type"] == "rate_limit_error"
                assert 1 <= int(answer.headers["retry-after"]) <= 30
            lines = [getattr(record, "fields", {}) for record in caplog.records]
            took = sorted(line["duration_s"] for line in lines if line.get("status") == 429)
            assert len(took) == 20
            assert took[10] < 0.05, "half of them took longer"
            assert await router.metric("router_admission_waiting", model="sim") == 10
            assert await router.metric("router_admission_shed_total", reason="queue_full") == 20
            assert await router.metric("router_requests_total", status="429") == 20
        answers = [await task for task in tasks]
        assert sorted(answer.status for answer in answers) == [200] * 10 + [429] * 20
        assert await router.metric("router_admission_admitted_total", how="after_waiting") == 10
        assert await router.metric("router_admission_wait_seconds_count") == 10
        assert len(asked(engine)) == 10


async def test_S3_a_client_that_leaves_while_it_waits_is_never_dispatched() -> None:
    async with narrow() as ((engine,), router), asyncio.TaskGroup() as group:
        async with full(router, engine):
            leaving, staying = await queued(group, router, "leaves", "stays")
            leaving.cancel()
            await waiting(router, 1)
            assert await router.metric("router_admission_shed_total", reason="client_left") == 1
        assert (await staying).status == 200
        assert asked(engine) == ["stays"]
        assert await router.metric("router_requests_total", status="499") == 2  # it, and the occupant


async def test_a_tenant_that_floods_delays_another_by_one_turn_only() -> None:
    async with narrow(tenant_header="X-Tenant") as ((engine,), router), asyncio.TaskGroup() as group:
        async with full(router, engine):
            await queued(group, router, *(f"flood {number}" for number in range(12)), headers={"x-tenant": "loud"})
            await queued(group, router, "quiet 0", "quiet 1", headers={"x-tenant": "quiet"})
        await until(lambda: len(asked(engine)) == 14, what="all are served")
        assert sorted(asked(engine)[:4]) == ["flood 0", "flood 1", "quiet 0", "quiet 1"]


async def test_without_a_tenant_header_clients_are_told_apart_by_their_keys() -> None:
    async with narrow() as ((engine,), router), asyncio.TaskGroup() as group:
        async with full(router, engine):
            await queued(group, router, "a0", "a1", "a2", headers={"authorization": "Bearer a", "x-tenant": "1"})
            await queued(group, router, "b0", headers={"authorization": "Bearer b", "x-tenant": "1"})
            await queued(group, router, "c0", headers={"x-api-key": "c"})
        await until(lambda: len(asked(engine)) == 5, what="all are served")
        assert asked(engine) == ["a0", "b0", "c0", "a1", "a2"]


async def test_a_queue_that_one_tenant_has_filled_is_open_to_another() -> None:
    async with narrow(max_waiting=5, tenant_header="x-tenant") as ((engine,), router), asyncio.TaskGroup() as group:
        async with full(router, engine):
            loud = await queued(group, router, *(f"flood {number}" for number in range(5)), headers={"x-tenant": "loud"})
            assert (await router.chat("flood 5", headers={"x-tenant": "loud"})).status == 429
            quiet = group.create_task(router.chat("quiet", headers={"x-tenant": "quiet"}))
            displaced = await loud[4]
            assert (displaced.status, displaced.json["error"]["code"]) == (429, "displaced")
            assert int(displaced.headers["retry-after"]) >= 1
            assert not quiet.done()
        assert (await quiet).status == 200
        assert asked(engine)[:2] == ["flood 0", "quiet"]
        assert await router.metric("router_admission_shed_total", reason="displaced") == 1


async def test_the_urgent_go_first_by_the_bodys_priority_or_the_header() -> None:
    async with narrow() as ((engine,), router), asyncio.TaskGroup() as group:
        async with full(router, engine):
            await queued(group, router, "late", priority=9)
            await queued(group, router, "usual")
            await queued(group, router, "odd", headers={"x-vllm-priority": "soon"})
            await queued(group, router, "urgent", priority=-5)
            await queued(group, router, "most urgent", headers={"x-vllm-priority": "-6"}, priority=20)
        await until(lambda: len(asked(engine)) == 5, what="all are served")
        assert asked(engine) == ["most urgent", "urgent", "usual", "odd", "late"]


async def test_waiting_ends_at_the_clients_deadline_or_at_ours() -> None:
    async with narrow(max_wait_s=0.6, deadline_header="X-Within") as ((engine,), router):
        async with full(router, engine):
            began = asyncio.get_running_loop().time()
            soon, ours, longer = await asyncio.gather(
                router.chat("soon", headers={"x-within": "0.1"}), router.chat("ours"), router.chat("longer", headers={"x-within": "60"})
            )
            assert asyncio.get_running_loop().time() - began >= 0.6
            assert (soon.status, soon.json["error"]["code"]) == (429, "deadline")
            assert [(answer.status, answer.json["error"]["code"]) for answer in (ours, longer)] == [(429, "waited")] * 2
            assert "0.6 s" in ours.json["error"]["message"]
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in (soon, ours, longer))
        assert asked(engine) == []


async def test_an_engine_that_joins_takes_those_who_wait() -> None:
    async with fleet(2, speedup=1, decode_step_ms=2) as (busy, late):
        await late.refuse()
        settings = AdmissionSettings(max_active_requests=1, max_wait_s=30.0)
        async with routing([busy, late], wait_for=1, admission=settings) as router, asyncio.TaskGroup() as group, full(router, busy):
            (task,) = await queued(group, router, "patient")
            await late.accept()
            assert (await task).engine == late.url


async def test_when_the_last_engine_leaves_those_who_wait_go_on_waiting_for_its_return() -> None:
    async with narrow(max_wait_s=20.0) as ((engine,), router), asyncio.TaskGroup() as group, full(router, engine):
        (task,) = await queued(group, router, "patient")
        await engine.die()

        async def gone() -> bool:
            return not (await router.get("/ready")).json["models"].get("sim")

        await until(gone, what="the engine has left")
        await waiting(router, 1)
        await engine.restart()
        assert (await task).status == 200


async def test_when_no_engine_comes_back_the_answer_is_503() -> None:
    async with fleet(1, speedup=1, decode_step_ms=2) as (engine,):
        settings = AdmissionSettings(max_active_requests=1, max_wait_s=1.5)
        async with routing([engine], admission=settings) as router, asyncio.TaskGroup() as group, full(router, engine):
            (task,) = await queued(group, router, "patient")
            await engine.die()
            answer = await task
        assert (answer.status, answer.json["error"]["code"]) == (503, "no_engine")


async def test_models_of_one_engine_take_turns() -> None:
    async with fleet(1, speedup=1, decode_step_ms=2, served_model_name="a,b") as (engine,):
        settings = AdmissionSettings(max_active_requests=1, max_wait_s=30.0)
        async with routing([engine], admission=settings) as router, asyncio.TaskGroup() as group:
            async with full(router, engine, model="a"):
                await queued(group, router, "a0", "a1", "a2", model="a")
                await queued(group, router, "b0", "b1", "b2", model="b")
            await until(lambda: len(asked(engine)) == 6, what="all are served")
            assert {text[0] for text in asked(engine)[:2]} == {"a", "b"}
            assert {text[0] for text in asked(engine)[2:4]} == {"a", "b"}


async def test_as_many_requests_are_let_in_as_all_engines_have_room_for() -> None:
    async with narrow(engines=3) as (engines, router), full(router, *engines):
        answer = await router.chat("x", headers={"x-admission-deadline-s": "0"})
        assert (answer.status, answer.json["error"]["code"]) == (429, "deadline")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_that_does_not_say_how_long_is_waited_out_once(status: int) -> None:
    async with narrow(max_active_requests=100) as ((engine,), router):
        engine.faults.add(Refuses(status, b"{}"))
        answer = await router.chat("x")
        assert answer.status == 200
        engine.faults.add(Refuses(status, b'{"error": "busy"}', (("X-Own", "1"),)), times=2)
        answer = await router.chat("y")
        assert (answer.status, answer.body, answer.headers["x-own"]) == (status, b'{"error": "busy"}', "1")
        assert asked(engine) == ["x", "x", "y", "y"]
        assert await router.metric("router_engine_state", engine=engine.url, state="cooling") == 1


async def test_a_refusal_that_says_how_long_is_the_clients_to_hear() -> None:
    async with narrow(max_active_requests=100, max_wait_s=2.0) as ((engine,), router):
        engine.faults.add(refuses(60))
        answer = await router.chat("x")
        assert (answer.status, answer.headers["retry-after"], answer.json["error"]["message"]) == (503, "60", "busy")
        again = await router.chat("y")
        assert (again.status, again.json["error"]["code"]) == (429, "cooling")
        assert 40 <= int(again.headers["retry-after"]) <= 60
        assert asked(engine) == ["x"], "it is left alone"


async def test_who_comes_while_every_engine_is_left_alone_waits_until_one_may_be_asked() -> None:
    async with narrow(max_active_requests=100) as ((engine,), router), asyncio.TaskGroup() as group:
        engine.faults.add(refuses(3))
        assert (await router.chat("x")).status == 503
        tasks = await queued(group, router, "y", "z")
        assert [(await task).status for task in tasks] == [200, 200]
        assert await router.metric("router_admission_admitted_total", how="after_waiting") == 2


async def test_a_refused_request_goes_where_there_is_room_before_it_waits() -> None:
    async with narrow(engines=2, max_active_requests=100) as ((one, other), router):
        one.faults.add(NO_RETRY_AFTER, times=None)
        answers = [await router.chat(f"chat {number}") for number in range(10)]
        assert {(answer.status, answer.engine) for answer in answers} == {(200, other.url)}
        assert await router.metric("router_admission_admitted_total", how="after_waiting") == 0
