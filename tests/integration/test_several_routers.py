"""Routers that share a bus: who comes late is ready only when it knows, and whatever of the bus ends, no request fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from discovery.bus import Bus
from discovery.messages import Beacon
from discovery.peers import BEAT_S, Presence
from discovery.subjects import Subjects
from engines import subscriber
from engines.simulator.engine import SimulatedEngine
from engines.subscriber import FollowTimes
from engines.types import Endpoint, EngineSpec
from tests.integration.commands import Process, command, is_ready
from tests.integration.nats_servers import cluster, nats_server
from tests.rig import Router, fleet, prompt, routing
from tests.tcp_relay import TcpRelay
from tests.waiting import alongside, until

STOPPED_S = 10.0


Known = dict[str, int]
"""Blocks of a prompt on the device, by engine."""


async def overlaps(router: Router, texts: Sequence[str]) -> list[Known]:
    """How much of each prompt the router believes cached where, by events."""
    return [
        {candidate["engine"]: int(candidate["overlap"]["device"]) for candidate in (await router.route(text))["candidates"]}
        for text in texts
    ]


def longest(known: Sequence[Known]) -> list[int]:
    return [max(blocks.values()) for blocks in known]


async def holds_the_truth(routers: Sequence[Router], engines: Sequence[SimulatedEngine]) -> None:
    """Until each router has as many blocks of each engine as the engine itself."""

    async def equal() -> bool:
        counts = [
            await router.metric("router_cached_blocks", engine=engine.url) == len(engine.cache.names)
            for router in routers
            for engine in engines
        ]
        return all(counts)

    await until(equal, what="every index is what the engines hold")


class Load:
    """Chats through several routers at once, from `begin` to `end`, and what became of them."""

    def __init__(self, routers: Sequence[Router], texts: Sequence[str]) -> None:
        self.routers = routers
        self.texts = texts
        self.statuses: list[int] = []
        self._stopped = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, router in enumerate(self.routers):
                group.create_task(self._ask(router, number))

    async def _ask(self, router: Router, number: int) -> None:
        while True:
            self.statuses.append((await router.chat(self.texts[number % len(self.texts)])).status)
            number += 1

    async def goes_on(self, requests: int, seconds: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        served, ends = len(self.statuses) + requests, loop.time() + seconds
        await until(lambda: len(self.statuses) >= served and loop.time() >= ends, deadline_s=30.0 + seconds, what="more requests")

    def nothing_failed(self) -> bool:
        return set(self.statuses) == {200}


async def test_R34_a_second_router_is_ready_only_when_it_knows_what_the_first_knows_and_goes_on_alone(tmp_path: Path) -> None:
    texts = [prompt(f"t{number}", 400) for number in range(30)]
    async with nats_server(tmp_path) as nats, fleet(2, kv_blocks=4096) as engines:
        flags = [part for engine in engines for part in ("--engine", engine.url)] + ["--nats", nats.url]
        async with command("serve", *flags, log=tmp_path / "first") as first:
            await is_ready(first)
            for text in texts:
                await first.chat(text)
            assert sum(len(engine.cache.names) for engine in engines) > 1000
            await holds_the_truth([first], engines)
            known = await overlaps(first, texts)
            assert min(longest(known)) > 0
            async with command("serve", *flags, log=tmp_path / "second") as second:
                assert await known_when_ready(second, texts) == known
                await holds_the_truth([second], engines)
                assert await followed(first) + await followed(second) == 2, "each engine's events are read once"
                await first.kill()
                for text in texts:
                    answer = await second.chat(text)
                    assert (answer.overlap_tokens > 0, answer.cached_tokens > 0) == (True, True)

                async def reads_all() -> bool:
                    return await followed(second) == 2

                await until(reads_all, what="it reads the events itself")
                assert await overlaps(second, texts) == known
                fresh = prompt("fresh", 400)
                await second.chat(fresh)
                await until(lambda: knows(second, fresh), what="what is new is learned")
                assert await overlaps(second, texts) == known


async def known_when_ready(router: Process, texts: Sequence[str]) -> list[Known]:
    """What it knows in the moment that it says it is ready."""
    await is_ready(router)
    return await overlaps(router, texts)


async def followed(router: Router) -> int:
    return (await router.get("/metrics")).body.decode().count("relay_blocks{")


async def knows(router: Router, text: str) -> bool:
    return longest(await overlaps(router, [text])) > [0]


@contextlib.asynccontextmanager
async def replayed_through(engine: SimulatedEngine) -> AsyncIterator[tuple[TcpRelay, EngineSpec]]:
    """A way to the engine's replay socket that can be held up."""
    port = int((engine.kv_replay or "").rpartition(":")[2])
    async with TcpRelay(port) as way:
        yield way, EngineSpec(engine.url, kv_events=engine.kv_events, kv_replay=f"tcp://127.0.0.1:{way.port}")


async def test_R34_a_router_is_not_ready_before_the_replay_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given up on here, so that only the replay's end can make the engine serve; another engine shows that all else is done."""
    monkeypatch.setattr(subscriber, "FollowTimes", lambda: msgspec.structs.replace(FollowTimes(), replay_silence_s=60.0))
    monkeypatch.setattr("discovery.relay.SILENT_S", 60.0)
    monkeypatch.setattr("router.membership.CACHE_KNOWN_WITHIN_S", 60.0)
    text = prompt("a")
    async with fleet(2) as (engine, other):
        async with routing([engine]) as before:
            await before.chat(text)
        async with replayed_through(engine) as (way, spec):
            way.stalled = True
            async with routing([spec, other], wait_for=1) as router:
                await until(lambda: way.accepted, what="the replay is asked")
                assert await router.metric("router_engine_state", engine=other.url, state="serving") == 1
                assert await router.metric("router_engine_state", engine=engine.url, state="joining") == 1
                assert (await router.get("/ready")).status == 503
                way.stalled = False

                async def serves() -> bool:
                    return await router.serving() == 2

                await until(serves)
                assert (await router.get("/ready")).status == 200
                assert await knows(router, text), "what was there before is known as soon as it serves"


async def test_R34_a_replay_that_never_answers_holds_readiness_up_for_a_moment_only() -> None:
    async with fleet(1) as (engine,), replayed_through(engine) as (way, spec):
        way.stalled = True
        async with routing([spec]) as router:
            assert (await router.chat(prompt("a"))).status == 200
            await until(lambda: knows(router, prompt("a")), what="live events are believed")


async def test_an_address_that_events_cannot_be_read_from_is_named_and_served_from_what_was_sent() -> None:
    async with fleet(1) as (engine,):
        spec = EngineSpec(engine.url, kv_events="tcp://127.0.0.1:1")
        async with routing([spec]) as router:
            await router.chat(prompt("a"))
            answer = await router.chat(prompt("a"))
            assert (answer.signal, answer.cached_tokens > 0) == ("stale", True)
            assert answer.overlap_tokens > 0


async def test_H15_a_bus_that_knows_an_engine_that_no_longer_exists_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another router still claims engines that are gone, and goes on telling of them. Whoever waited for it would wait for minutes here."""
    for patience in ("discovery.peers.GONE_AFTER_S", "router.membership.CACHE_KNOWN_WITHIN_S", "router.beginning.LEARNED_WITHIN_S"):
        monkeypatch.setattr(patience, 600.0)
    async with nats_server(tmp_path) as nats, fleet(3) as (here, gone, claimed):
        await gone.die()
        bus, subjects = Bus(), Subjects("commutator")
        await bus.connect(nats.url, name="a ghost")
        follows = [gone.url, claimed.url, "http://nowhere:1"]

        async def haunt() -> None:
            while True:
                bus.publish(subjects.routers, msgspec.msgpack.encode(Presence("ghost", [], follows, {gone.url: 7}, None)))
                for url in (gone.url, "http://nowhere:1"):
                    told = Beacon("ghost.0", 5, 3, 12345, 16, "live", "")
                    bus.publish(subjects.stream(Endpoint(url)), msgspec.msgpack.encode(told))
                await asyncio.sleep(BEAT_S)

        async with alongside(haunt()), routing([gone, here, claimed], wait_for=2, nats=nats.url) as router:
            assert (await router.get("/ready")).status == 200
            assert (await router.chat("x")).status == 200

            async def haunted() -> bool:
                return await router.metric("router_peers") == 1

            await until(haunted, what="the router hears of what is no more")
            monkeypatch.setattr("router.membership.CACHE_KNOWN_WITHIN_S", 1.0)
            await gone.restart()

            async def all_serve() -> bool:
                return await router.serving() == 3

            await until(all_serve, what="and when it is back, it is served, whoever says that he relays it")
        await bus.close()


async def test_H14_while_nats_is_stopped_under_load_no_request_fails_and_the_index_is_right_afterwards(tmp_path: Path) -> None:
    texts = [prompt(f"t{number}", 60) for number in range(40)]
    async with contextlib.AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_server(tmp_path))
        engines = await stack.enter_async_context(fleet(2, kv_blocks=200))
        routers = [await stack.enter_async_context(routing(engines, nats=nats.url)) for _ in range(2)]
        load = Load(routers, texts)
        async with alongside(load.run()):
            await load.goes_on(40)
            await nats.kill()
            await load.goes_on(40, STOPPED_S)

            async def away() -> bool:
                return sum([await router.metric("router_bus_connected") for router in routers]) == 0

            await until(away)
            await stack.enter_async_context(nats_server(tmp_path, port=nats.port, name="again"))

            async def back() -> bool:
                return sum([await router.metric("router_bus_connected") for router in routers]) == 2

            await until(back)
            await load.goes_on(40)
        assert load.nothing_failed()
        await holds_the_truth(routers, engines)
        assert await overlaps(routers[0], texts) == await overlaps(routers[1], texts)


async def test_one_server_of_a_cluster_killed_under_load_fails_no_request_and_the_index_is_right_afterwards(tmp_path: Path) -> None:
    texts = [prompt(f"t{number}", 60) for number in range(40)]
    async with cluster(tmp_path) as servers, fleet(2, kv_blocks=200) as engines, contextlib.AsyncExitStack() as stack:
        urls = ",".join(server.url for server in servers)
        routers = [await stack.enter_async_context(routing(engines, nats=servers[0].url))]
        routers.append(await stack.enter_async_context(routing(engines, nats=urls)))
        load = Load(routers, texts)
        async with alongside(load.run()):
            await load.goes_on(40)
            await servers[0].kill()

            async def moved() -> bool:
                return await routers[0].metric("router_bus_reconnects_total") > 0 and all(
                    [await router.metric("router_bus_connected") for router in routers]
                )

            await until(moved, what="both are on servers that live")
            await load.goes_on(40)
        assert load.nothing_failed()
        await holds_the_truth(routers, engines)
        assert await overlaps(routers[0], texts) == await overlaps(routers[1], texts)
        assert await followed(routers[0]) + await followed(routers[1]) == 2
