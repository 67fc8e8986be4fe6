"""Several processes in front of the same pairs: each hands over by itself, what one has computed is known to all, and their pages are one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from engines.simulator.engine import SimulatedEngine
from engines.types import EngineKind, Role
from tests.integration.processes import Group, group
from tests.integration.test_pairs_simulated import settings_for
from tests.integration.test_processes import everywhere
from tests.rig import prompt, routing, settings_of
from tests.waiting import until

PROCESSES = 2


class Fleet(NamedTuple):
    prefill: SimulatedEngine
    decode: list[SimulatedEngine]
    router: Group


def line(way: str, engine: SimulatedEngine) -> str:
    """An engine as an operator names it."""
    if way == "rooms":
        return engine.url
    return f"{engine.url},role={engine.role}"


@contextlib.asynccontextmanager
async def behind(way: str, log: Path, *flags: str) -> AsyncIterator[Fleet]:
    room = {"kv_blocks": 8192}
    async with (
        SimulatedEngine(settings_for(way, Role.PREFILL, **room)) as there,
        SimulatedEngine(settings_for(way, Role.DECODE, **room)) as one,
        SimulatedEngine(settings_for(way, Role.DECODE, **room)) as other,
        group([line(way, engine) for engine in (there, one, other)], log, *flags, processes=PROCESSES) as router,
    ):
        yield Fleet(there, [one, other], router)


@pytest.mark.parametrize("way", ["nixl", "rooms"])
async def test_every_process_hands_over_and_what_one_had_computed_is_a_hit_through_the_others(way: str, tmp_path: Path) -> None:
    kind = EngineKind.SGLANG if way == "rooms" else EngineKind.VLLM
    async with (
        SimulatedEngine(settings_of(kind=kind)) as alone,
        behind(way, tmp_path / "log", "--disagg", "always") as (there, here, router),
    ):
        texts = [prompt(f"{way} {number}", 20) for number in range(20)]
        answers = await asyncio.gather(*(router.chat(text, max_tokens=6, stream=False) for text in texts))
        assert {answer.status for answer in answers} == {200}
        assert {answer.headers["x-commutator-prefill-engine"] for answer in answers} == {there.url}
        assert all(engine.counters.fetched for engine in here)
        await until(lambda: len(router.served()) == PROCESSES, what="every process has logged what it served")
        async with routing([alone]) as reference:
            wanted = [await reference.chat(text, max_tokens=6) for text in texts[:5]]
        assert [one.json["choices"] for one in answers[:5]] == [one.json["choices"] for one in wanted]

        async def counted() -> bool:
            handed = await router.metric("router_kv_transfers_total", outcome="done")
            return handed == await router.metric("router_prefills_total", where="remote") == len(texts)

        await until(counted, what="the page is that of all processes")
        assert await router.metric("router_kv_transfers_total", outcome="failed") == 0

        async def known() -> bool:
            told = await router.route(texts[0])
            return bool(told["prefill"]["overlap_tokens"])

        await until(lambda: everywhere(known), what="every process knows what the prefill engine holds")

        async def free() -> bool:
            return await router.metric("router_active_requests") == 0

        await until(free, what="nothing is counted any more")
