"""Simulated engines hand KV to each other as the real ones do, and answer wrongly where those would: what the router must prevent, and choose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import pytest

from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import Connector, LoadFailurePolicy
from engines.types import Connector as Way
from engines.types import EngineKind, EngineSpec, Role
from router.disagg import Mode
from tests.integration.test_admin import TOKEN, Operator
from tests.integration.test_failover import nothing_is_in_flight
from tests.raw import port_of, request, talking
from tests.rig import Router, asked, prompt, routing, settings_of
from tests.waiting import until

WAYS = ["nixl", "mooncake", "rooms"]


class Pair(NamedTuple):
    prefill: SimulatedEngine
    decode: SimulatedEngine
    router: Router


def settings_for(way: str, role: Role, **changed: object) -> Any:  # noqa: ANN401  settings
    if way == "rooms":
        return settings_of(kind=EngineKind.SGLANG, role=role, **changed)
    return settings_of(kind=EngineKind.VLLM, connector=Connector(way), role=role, **changed)


def spec_of(way: str, engine: SimulatedEngine) -> EngineSpec:
    if way == "rooms":
        return EngineSpec(engine.url)
    if way == "mooncake":
        bootstrap = engine.bootstrap if engine.role is Role.PREFILL else None
        return EngineSpec(engine.url, role=engine.role, connector=Way.MOONCAKE, bootstrap=bootstrap)
    return EngineSpec(engine.url, role=engine.role)


@contextlib.asynccontextmanager
async def pair(
    way: str,
    *,
    at_prefill: dict[str, Any] | None = None,
    at_decode: dict[str, Any] | None = None,
    **changed: Any,  # noqa: ANN401  settings
) -> AsyncIterator[Pair]:
    async with (
        SimulatedEngine(settings_for(way, Role.PREFILL, **(at_prefill or {}))) as there,
        SimulatedEngine(settings_for(way, Role.DECODE, **(at_decode or {}))) as here,
        routing([spec_of(way, there), spec_of(way, here)], **{"disagg": Mode.ALWAYS, **changed}) as router,
    ):
        yield Pair(there, here, router)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "text", "ids"])
async def test_the_answer_is_that_of_one_engine(way: str, stream: bool, api: str) -> None:
    """A simulated engine that is handed another prompt's KV says something else."""
    kind = EngineKind.SGLANG if way == "rooms" else EngineKind.VLLM
    async with SimulatedEngine(settings_of(kind=kind)) as alone, routing([alone]) as router, pair(way) as (there, _, paired):
        for words in (1, 30, 300):
            text = prompt(f"{way} {api}", words)
            answers = [
                await (
                    one.chat(text, stream=stream, max_tokens=9)
                    if api == "chat"
                    else one.complete(text if api == "text" else [5, 6, 7] * words, stream=stream, max_tokens=9)
                )
                for one in (router, paired)
            ]
            assert [answer.status for answer in answers] == [200, 200]
            first, second = (
                [choice for event in events_of(answer.body, stream=stream) for choice in event["choices"]] for answer in answers
            )
            assert second == first
            assert answers[1].headers["x-commutator-prefill-engine"] == there.url


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("more", [{"truncate_prompt_tokens": 9}, {"suffix": "the end"}], ids=str)
async def test_P13_a_prompt_that_is_more_than_its_ids_goes_to_both_as_it_was_asked(way: str, more: dict[str, Any]) -> None:
    """Decode would shorten the ids by itself, and be handed the cache of others."""
    async with pair(way) as (there, here, router):
        text = prompt(f"more {way}", 30)
        await router.complete(text, **more)
        bodies = [json.loads(request.body) for one in (there, here) for request in asked(one, "/v1/completions")]
        assert [body["prompt"] for body in bodies] == [text] * 2
        assert all(more.items() <= body.items() for body in bodies)


def events_of(body: bytes, *, stream: bool) -> list[Any]:
    if not stream:
        return [json.loads(body)]
    return [json.loads(part.removeprefix(b"data: ")) for part in body.split(b"\n\n") if part and part != b"data: [DONE]"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", WAYS)
async def test_P4_long_prefills_that_nobody_waits_for_are_in_nobodys_way(way: str, stream: bool) -> None:
    slow = {"speedup": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_tokens_per_s": 3000.0, "kv_blocks": 8192}
    async with pair(way, at_prefill=slow, at_decode={"kv_blocks": 8192}) as (there, here, router):
        async with contextlib.AsyncExitStack() as clients:
            for number in range(10):
                client = await clients.enter_async_context(talking(port_of(router.url)))
                body = json.dumps({"model": "sim", "prompt": [number + 5] * 12_000, "stream": stream, "max_tokens": 9})
                await client.send(request("/v1/completions", body.encode()))
            await until(lambda: len(asked(there, "/v1/completions")) == 10, what="ten prompts are to be computed")
        await until(lambda: there.running == here.running == 0, what="none is any more")
        assert there.counters.aborted == 10
        assert here.counters.aborted == (0 if way == "nixl" else 10)
        assert (await router.complete([4, 5, 6], stream=stream)).status == 200
        assert there.counters.generated == 1, "of the long ones, none was computed to its end"
        await nothing_is_in_flight(router)


async def test_P5_what_was_computed_for_clients_that_left_between_the_legs_is_held_no_longer_than_the_lease() -> None:
    async with pair("nixl", at_prefill={"kv_lease_s": 1.0, "kv_blocks": 8192}, probe_period_s=600.0) as (there, here, router):
        await here.refuse()
        with deaf(port_of(here.url)):
            async with contextlib.AsyncExitStack() as clients:
                for number in range(20):
                    client = await clients.enter_async_context(talking(port_of(router.url)))
                    await client.send(
                        request("/v1/completions", b'{"model":"sim","stream":true,"prompt":%s}' % str([number + 5] * 100).encode())
                    )

                async def between() -> bool:
                    waiting = [await router.metric("router_active_requests", engine=one.url) for one in (there, here)]
                    return there.counters.generated == 20 and waiting == [0, 20]

                await until(between, what="all prompts are computed, and decode is to be reached")
            await nothing_is_in_flight(router)
            assert not asked(here, "/v1/completions")
            assert await router.metric("router_kv_transfers_total", outcome="stranded") == 20
            await until(lambda: not there.exchange.kept, what="the leases have ended")
        await here.accept()


@contextlib.contextmanager
def deaf(port: int) -> Iterator[None]:
    """Connections to this port are neither accepted nor refused: its queue is full."""
    with socket.socket() as listening, contextlib.ExitStack() as queue:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        for _ in range(3):
            queued = queue.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(("127.0.0.1", port))
        yield


@pytest.mark.parametrize("way", WAYS)
async def test_a_prefill_engine_that_dies_costs_no_request_where_decode_can_compute(way: str) -> None:
    async with pair(way, at_decode={"kv_load_failure_policy": LoadFailurePolicy.FAIL}, kv_transfer_timeout_s=2.0) as (there, _, router):
        assert (await router.chat(prompt("before"))).status == 200
        await there.die()
        answers = [await router.chat(prompt(f"after {number}")) for number in range(5)]
        statuses = {answer.status for answer in answers}
        assert statuses <= ({502, 503} if way == "rooms" else {200}), [answer.body for answer in answers]


async def test_nothing_is_learned_of_a_pair_that_has_left() -> None:
    """Nobody would forget it: a series of /metrics for ever, for each engine that leaves while it is busy."""
    slow = {"speedup": 1, "prefill_tokens_per_s": 500.0}
    async with pair("nixl", at_prefill=slow, admin_token=TOKEN) as (there, here, router), asyncio.TaskGroup() as group:
        operator = Operator(router)
        answer = group.create_task(router.chat(prompt("leaving", 50), stream=True))
        await until(lambda: there.running, what="the prompt is being computed")
        assert [(await operator.engine(one.url, method="DELETE", query="?now=1")).status for one in (there, here)] == [200, 200]
        assert (await answer).headers["x-commutator-prefill-engine"] == there.url
        page = (await router.get("/metrics")).body.decode().splitlines()
        assert [line for line in page if there.url in line or here.url in line] == []


async def test_an_sglang_decode_engine_is_not_asked_for_what_hangs_it() -> None:
    async with pair("rooms") as (there, here, router):
        answer = await router.chat(prompt("several"), n=2)
        assert answer.status == 501  # a client would try a 503 again, for ever
        assert "cannot be shared" in answer.json["error"]["message"]
        assert here.running == there.running == 0


@pytest.mark.parametrize(("link", "wanted"), [(2e6, "local"), (1e10, "remote")])
async def test_measured_takes_the_faster_way(link: float, wanted: str) -> None:
    """A link that takes 0.6 s for a prompt that is computed in 0.02 s; one that takes next to nothing, beside streams that a prefill would delay."""
    bytes_per_token = 1000
    speeds = {
        "speedup": 1,
        "prefill_tokens_per_s": 60_000.0,
        "kv_bytes_per_token": bytes_per_token,
        "link_bytes_per_s": link,
        "kv_blocks": 8192,
    }
    slow = speeds | {"prefill_tokens_per_s": 1_000.0} if wanted == "remote" else speeds
    async with pair("nixl", at_prefill=speeds, at_decode=slow, disagg=Mode.MEASURED) as (_, _, router):
        for number in range(6):
            assert (await router.chat(prompt(f"measured {number}", 300), stream=True)).status == 200
        before = {where: await router.metric("router_prefills_total", where=where) for where in ("local", "remote")}
        for number in range(6, 16):
            assert (await router.chat(prompt(f"measured {number}", 300), stream=True)).status == 200
        after = {where: await router.metric("router_prefills_total", where=where) for where in ("local", "remote")}
        assert after[wanted] - before[wanted] >= 9
        estimated, actual = [await router.metric("router_remote_prefill_seconds_total", kind=kind) for kind in ("estimated", "actual")]
        assert (estimated > 0) is (wanted == "remote")
        assert (actual > 0) is (wanted == "remote")


@pytest.mark.parametrize("way", ["nixl"])
async def test_a_slow_link_is_named(way: str) -> None:
    slow = {"speedup": 1, "kv_bytes_per_token": 10_000, "link_bytes_per_s": 2e7, "kv_blocks": 8192}
    async with (
        SimulatedEngine(settings_for(way, Role.PREFILL, **slow)) as there,
        SimulatedEngine(settings_for(way, Role.DECODE, **slow)) as here,
        routing(
            [EngineSpec(there.url, role=Role.PREFILL, link="100GbE"), EngineSpec(here.url, role=Role.DECODE)], disagg=Mode.ALWAYS
        ) as router,
    ):
        assert (await router.chat(prompt("slow", 400), stream=True)).status == 200
        assert await router.metric("router_kv_link_slow") == 1
        assert 0 < await router.metric("router_kv_link_bytes_per_second") < 1e8


@pytest.mark.parametrize("way", WAYS)
async def test_many_at_once_each_get_their_own(way: str) -> None:
    async with pair(way, at_prefill={"kv_blocks": 8192}, at_decode={"kv_blocks": 8192}) as (_, _, router):
        texts = [prompt(f"own {number}", 20 + number) for number in range(40)]
        together = await asyncio.gather(*(router.chat(text, max_tokens=6) for text in texts))
        assert {answer.status for answer in together} == {200}
        again = [await router.chat(text, max_tokens=6) for text in texts]
        for one, other in zip(together, again, strict=True):
            assert one.json["choices"] == other.json["choices"]
        assert await router.metric("router_kv_transfers_total", outcome="failed") == 0
