"""Real engines that are killed, and clients that leave: proven by what the engines themselves count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.e2e.serving import Served, serve
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME
from tests.waiting import alongside, until

pytestmark = pytest.mark.real_engine

CHAT = "/v1/chat/completions"
LONG = 6000
HEADERS = {"content-type": "application/json", "x-commutator-explain": "1"}


def body(text: str, *, stream: bool, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    return msgspec.json.encode({"model": MODEL_NAME, "messages": messages, "stream": stream, "max_tokens": max_tokens, "ignore_eos": True})


class Load:
    """What became of requests that clients sent one after the other."""

    def __init__(self, router: Served) -> None:
        self.router = router
        self.whole: list[str] = []
        """Engines that answered completely."""
        self.broken = 0
        """Streams that broke off after they had begun."""
        self.failed: list[str] = []
        """Anything else."""

    async def ask(self, name: str, *, stream: bool) -> None:
        number = 0
        while True:
            number += 1
            data = body(f"{name} asks {number}", stream=stream, max_tokens=24)
            begun = False
            try:
                async with self.router.session.post(self.router.url + CHAT, data=data, headers=HEADERS) as response:
                    begun = stream and response.status == 200
                    answer = await response.read()
            except aiohttp.ClientError as error:
                if begun:
                    self.broken += 1
                else:
                    self.failed.append(repr(error))
                continue
            if response.status == 200 and (not stream or answer.endswith(b"data: [DONE]\n\n")):
                self.whole.append(response.headers["x-commutator-engine"])
            else:
                self.failed.append(f"{response.status} {answer[-300:]!r}")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ten clients ask within the block, half of them for streams."""
        async with contextlib.AsyncExitStack() as stack:
            for number in range(10):
                await stack.enter_async_context(alongside(self.ask(f"client {number}", stream=number % 2 == 0)))
            yield


@pytest.fixture
def stays_and_goes(request: pytest.FixtureRequest) -> tuple[RealEngine, RealEngine]:
    """Two engines of one model; the second is killed."""
    if request.param == "real_vllm_pair":
        first, second = request.getfixturevalue("real_vllm_pair")
        return first, second
    return request.getfixturevalue("real_vllm"), request.getfixturevalue("real_sglang")


@pytest.mark.parametrize("stays_and_goes", ["real_vllm_pair", "real_sglang"], indirect=True)
async def test_H2_a_killed_engine_costs_only_answers_that_had_begun(stays_and_goes: tuple[RealEngine, RealEngine], tmp_path: Path) -> None:
    stays, goes = stays_and_goes
    async with serve(stays_and_goes, tmp_path / "router.log", "--policy", "round-robin") as router:
        load = Load(router)
        try:
            async with load.running():
                await until(
                    lambda: load.failed or {stays.url, goes.url} <= set(load.whole[-20:]), what="both engines answer", deadline_s=60
                )
                assert load.failed == []
                await asyncio.to_thread(goes.kill)
                killed_at = len(load.whole)
                await until(lambda: len(load.whole) >= killed_at + 40, what="the load goes on", deadline_s=120)
            assert load.failed == []
            assert load.broken <= 5, "more than there were streams"
            assert set(load.whole[-20:]) == {stays.url}
            assert await router.serving() == 1
            assert await router.metric("router_broken_answers_total") == load.broken
            await until(lambda: stays.unfinished() == 0, what="the engine is idle", deadline_s=30)
            assert await router.metric("router_active_requests") == 0
        finally:
            await asyncio.to_thread(goes.restart)

        async def both() -> bool:
            return await router.serving() == 2

        await until(both, what="the engine is back", deadline_s=30)
        answers = [await router.ask(f"after the kill {number}") for number in range(4)]
        assert {answer.engine for answer in answers} == {stays.url, goes.url}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine", ["real_vllm", "real_sglang"])
async def test_S1_S2_a_client_that_leaves_frees_the_engine(
    engine: str,
    stream: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    real: RealEngine = request.getfixturevalue(engine)
    async with serve([real], tmp_path / "router.log") as router, asyncio.TaskGroup() as group:

        async def ask() -> None:
            data = body("a long answer", stream=stream, max_tokens=LONG)
            async with router.session.post(router.url + CHAT, data=data, headers=HEADERS) as response:
                await response.read()

        client = group.create_task(ask())
        before = sum(real.metrics(f"{real.kind}:generation_tokens_total"))
        await until(lambda: sum(real.metrics(real.program.running)) == 1.0, what="the engine computes it", deadline_s=30)
        client.cancel()
        await until(lambda: real.unfinished() == 0, what="the engine's own gauge falls", deadline_s=60)
        assert sum(real.metrics(f"{real.kind}:generation_tokens_total")) - before < LONG, "it fell because all was computed"

        async def none() -> bool:
            return await router.metric("router_active_requests") == 0

        await until(none, what="the place is given back")
        assert await router.metric("router_requests_total", status="499") == 1
        assert (await router.ask("the next one")).status == 200
