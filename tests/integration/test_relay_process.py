"""`commutator relay`: engines' events reach routers that do not read them, from one owner at a time, whoever ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from engines.simulator.engine import SimulatedEngine
from engines.types import EngineKind
from tests.integration.commands import Process, command, fails, is_ready
from tests.integration.nats_servers import NatsServer, nats_server
from tests.rig import Router, fleet, prompt, routing
from tests.waiting import alongside, until


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with nats_server(tmp_path) as server:
        yield server


@contextlib.asynccontextmanager
async def relay(engines: Sequence[SimulatedEngine], nats: str, log: Path, *flags: str) -> AsyncIterator[Process]:
    named = [part for engine in engines for part in ("--engine", engine.url)]
    async with command("relay", *named, "--nats", nats, *flags, log=log) as process:
        yield process


async def owned(process: Router, engine: SimulatedEngine) -> bool:
    """Whether it reads this engine's events itself."""
    page = (await process.get("/metrics")).body.decode()
    return f'relay_batches_total{{engine="{engine.url}"' in page


async def hits(router: Router, text: str) -> bool:
    return int((await router.route(text))["overlap_tokens"]) > 0


async def known(router: Router, *texts: str) -> None:
    async def all_hit() -> bool:
        return all([await hits(router, text) for text in texts])

    await until(all_hit, what="the router knows where these prompts are")


class Traffic:
    """Prompts that the engines have, asked again and again: each must be a hit, in the router's view and in the engine's own count."""

    def __init__(self, routers: Sequence[Router], texts: Sequence[str]) -> None:
        self.routers = routers
        self.texts = texts
        self.asked = 0
        self.missed: list[str] = []

    async def run(self) -> None:
        while True:
            for router in self.routers:
                text = self.texts[self.asked % len(self.texts)]
                answer = await router.chat(text)
                self.asked += 1
                known_elsewhere = answer.reason == "load_outweighed"  # what the other router has in flight weighed more, which is no miss
                if answer.status != 200 or not (known_elsewhere or (answer.overlap_tokens and answer.cached_tokens)):
                    self.missed.append(f"{answer.status} {answer.signal} {answer.reason} {answer.overlap_tokens} {answer.cached_tokens}")

    async def goes_on(self, rounds: int) -> None:
        until_ = self.asked + rounds
        await until(lambda: self.asked >= until_, what="more requests")


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_routers_take_from_the_bus_what_a_relay_of_its_own_reads(kind: EngineKind, nats: NatsServer, tmp_path: Path) -> None:
    async with fleet(1, kind=kind) as (engine,), relay([engine], nats.url, tmp_path / "relay") as process:
        await is_ready(process)
        async with routing([engine], nats=nats.url) as first, routing([engine], nats=nats.url) as second:
            assert (await first.chat(prompt("a"))).cached_tokens == 0
            for router in (first, second):
                await known(router, prompt("a"))
                answer = await router.chat(prompt("a"))
                assert (answer.signal, answer.reason) == ("live", "kv")
                assert answer.overlap_tokens > 0
                assert not await owned(router, engine)
            assert await owned(process, engine)
            assert await process.metric("relay_blocks", engine=engine.url) == len(engine.cache.names)
            assert await process.metric("relay_engine_state", engine=engine.url, state="relayed") == 1
            assert await process.metric("relay_bus_connected") == 1
            assert await process.metric("relay_peers") == 2
            assert process.lines("following KV events")


async def test_R34_of_two_relays_one_has_each_engine_and_its_death_costs_no_hit(nats: NatsServer, tmp_path: Path) -> None:
    texts = [prompt(str(number)) for number in range(6)]
    async with (
        fleet(2) as engines,
        relay(engines, nats.url, tmp_path / "one") as one,
        relay(engines, nats.url, tmp_path / "two") as two,
    ):
        for process in (one, two):
            await is_ready(process)
        owners = {engine.url: [process for process in (one, two) if await owned(process, engine)] for engine in engines}
        assert [len(found) for found in owners.values()] == [1, 1], "each engine has one owner"
        async with routing(engines, nats=nats.url) as first, routing(engines, nats=nats.url) as second:
            for text in texts:
                await first.chat(text)
            for router in (first, second):
                await known(router, *texts)
            traffic = Traffic([first, second], texts)
            async with alongside(traffic.run()):
                await traffic.goes_on(20)
                await owners[engines[0].url][0].kill()
                other = two if owners[engines[0].url][0] is one else one

                async def taken_over() -> bool:
                    return all([await owned(other, engine) for engine in engines])

                await until(taken_over, what="the other has taken over")
                await is_ready(other)
                await traffic.goes_on(20)
                for router in (first, second):
                    fresh = prompt(f"after{router.url}", 60)
                    await router.chat(fresh)
                    await known(first, fresh)
                    await known(second, fresh)
                await traffic.goes_on(20)
            assert traffic.missed == []
            assert await owned(other, engines[0])
            assert not await owned(first, engines[0])
            assert not await owned(second, engines[0])


async def test_a_relay_that_comes_later_takes_over_from_a_router_and_no_hit_is_lost(nats: NatsServer, tmp_path: Path) -> None:
    text = prompt("a")
    async with fleet(1) as (engine,), routing([engine], nats=nats.url) as first, routing([engine], nats=nats.url) as second:
        assert [await owned(router, engine) for router in (first, second)].count(True) == 1
        await first.chat(text)
        for router in (first, second):
            await known(router, text)
        traffic = Traffic([first, second], [text])
        async with alongside(traffic.run()):
            await traffic.goes_on(4)
            async with relay([engine], nats.url, tmp_path / "relay") as process:
                await is_ready(process)
                assert await owned(process, engine)

                async def yielded() -> bool:
                    return not (await owned(first, engine) or await owned(second, engine))

                await until(yielded, what="the routers leave the engine to it")
                await traffic.goes_on(20)
                fresh = prompt("b")
                await second.chat(fresh)
                await known(first, fresh)
                await traffic.goes_on(4)

            async def back() -> bool:
                return await owned(first, engine) or await owned(second, engine)

            await until(back, what="a router takes it when the relay is gone")
            await traffic.goes_on(20)
        assert traffic.missed == []


async def test_an_engine_that_is_not_there_makes_nobody_wait_and_is_named(nats: NatsServer, tmp_path: Path) -> None:
    async with fleet(2) as (here, gone):
        await gone.die()
        async with relay([here, gone], nats.url, tmp_path / "relay") as process:
            await is_ready(process)
            told = (await process.ready()).json
            assert told["engines"][here.url] == "relayed"
            assert told["engines"][gone.url].startswith("waiting: ")
            assert (await process.get("/health")).status == 200
            await gone.restart()

            async def joined() -> bool:
                return bool((await process.ready()).json["engines"][gone.url] == "relayed")

            await until(joined)
            await nats.kill()

            async def not_ready() -> bool:
                return (await process.ready()).status == 503

            await until(not_ready, what="without a bus it is not ready")


async def test_what_a_relay_cannot_do_without_is_named() -> None:
    code, said = await fails("relay", "--engine", "http://127.0.0.1:1")
    assert (code, said) == (
        2,
        "commutator relay: error: nats: a relay needs the NATS server that its routers use: --nats nats://HOST:4222\n",
    )
    code, said = await fails(
        "relay", "--engine", "http://127.0.0.1:1", "--nats", "nats://127.0.0.1:1", COMMUTATOR_NATS_TOKEN="canary-7f3a9"
    )
    assert code == 1
    assert said.startswith("commutator relay: error: no NATS at nats://127.0.0.1:1: ")
    assert "canary" not in said


async def test_it_ends_well_and_says_so_to_the_others(nats: NatsServer, tmp_path: Path) -> None:
    async with fleet(1) as (engine,), routing([engine], nats=nats.url) as router:
        async with relay([engine], nats.url, tmp_path / "relay") as process:
            await is_ready(process)
            await until(lambda: _is(router, "router_peers", 1))
            process.process.terminate()
            assert await asyncio.wait_for(process.process.wait(), 30) == 0
        await until(lambda: _is(router, "router_peers", 0), what="it said farewell")


async def _is(router: Router, metric: str, value: float) -> bool:
    return await router.metric(metric) == value
