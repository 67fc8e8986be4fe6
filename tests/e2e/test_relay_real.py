"""Relays as processes of their own, in front of real vLLM: the events reach routers that never read them, and outlive the relay that did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.serving import Served, serve
from tests.engines import prefixes
from tests.engines.launch import RealEngine
from tests.integration.commands import Process, command, is_ready
from tests.integration.nats_servers import nats_server
from tests.waiting import until

pytestmark = pytest.mark.real_engine


async def reads(process: Process | Served, engine: RealEngine) -> bool:
    return f'relay_batches_total{{engine="{engine.url}"' in (await process.get("/metrics")).body.decode()


async def believed(router: Served, engine: RealEngine, text: str) -> None:
    async def cached() -> bool:
        return await router.overlap_tokens(engine.url, text) > 0

    await until(cached, what="the router has heard of the prompt")


async def test_R34_a_relay_in_front_of_real_vllm_and_its_heir_cost_no_hit(real_vllm: RealEngine, tmp_path: Path) -> None:
    texts = [prefixes.prefix("relayed", number) for number in range(3)]
    async with nats_server(tmp_path) as nats:
        flags = ("--engine", real_vllm.url, "--nats", nats.url)
        async with command("relay", *flags, log=tmp_path / "one") as one, command("relay", *flags, log=tmp_path / "two") as two:
            for process in (one, two):
                await is_ready(process)
            owners = [process for process in (one, two) if await reads(process, real_vllm)]
            assert len(owners) == 1
            heir = two if owners == [one] else one
            async with serve([real_vllm], tmp_path / "router", "--nats", nats.url) as router:
                for text in texts:
                    await router.ask(text)
                    await believed(router, real_vllm, text)
                await owners[0].kill()
                before, asked = real_vllm.counters(), 0

                async def taken_over() -> bool:
                    nonlocal asked
                    answer = await router.ask(texts[asked % len(texts)])
                    asked += 1
                    assert answer.cached_tokens == answer.overlap_tokens > 0.9 * prefixes.tokens_of(texts[0]), answer.headers
                    return await reads(heir, real_vllm)

                await until(taken_over, what="the other relay has taken over")
                await is_ready(heir)
                for text in texts:
                    again = await router.ask(text)
                    assert (again.reason, again.signal) == ("kv", "live")
                    assert again.cached_tokens == again.overlap_tokens > 0.9 * prefixes.tokens_of(text)
                counted = real_vllm.counters() - before
                assert counted.hits > 0.9 * counted.queries
                fresh = prefixes.prefix("relayed", 10)
                await router.ask(fresh)
                await believed(router, real_vllm, fresh)
                assert not await reads(router, real_vllm)
