"""Routers of one namespace on one NATS server: one relays each engine, each knows what all carry, and none is missed for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from discovery.broker import Broker
from discovery.bus import Bus
from discovery.peers import GONE_AFTER_S, Peers, Presence
from discovery.sharing import Sharing
from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec
from router.load import LoadBook
from tests.rig import Router, fleet, prompt, routing
from tests.waiting import alongside, until


@pytest.fixture
async def nats() -> AsyncIterator[str]:
    broker = Broker()
    try:
        yield await broker.start()
    finally:
        await broker.stop()


async def relays(router: Router) -> float:
    """How many endpoints' events the router itself reads."""
    page = (await router.get("/metrics")).body.decode()
    return page.count("relay_blocks{")


async def test_R34_of_two_routers_one_relays_and_the_other_goes_on_when_it_ends(nats: str) -> None:
    async with fleet(1) as engines, contextlib.AsyncExitStack() as stays:
        async with routing(engines, nats=nats) as first:
            assert await relays(first) == 1
            second = await stays.enter_async_context(routing(engines, nats=nats))
            assert await relays(second) == 0
            await first.chat(prompt("a"))
            await until(lambda: hit(second), what="the other router knows what the first one's request has left")
        await until(lambda: second.metric("relay_blocks"), what="the other router has taken over, and learned again what was there")
        await until(lambda: hit(second), what="and its index has it")
        answer = await second.chat(prompt("a"))
        assert (answer.signal, answer.reason) == ("live", "kv")
        assert answer.cached_tokens > 0


async def hit(router: Router) -> bool:
    return int((await router.route(prompt("a")))["overlap_tokens"]) > 0


async def test_what_one_router_carries_the_other_counts_and_not_a_moment_longer(nats: str) -> None:
    async with (
        fleet(1, speedup=1, decode_step_ms=50) as engines,
        routing(engines, nats=nats) as first,
        routing(engines, nats=nats) as second,
    ):
        stream = await first.begin(prompt("a"), stream=True, max_tokens=1000)

        async def loads(router: Router) -> tuple[int, int]:
            load = (await router.route("x"))["candidates"][0]["load"]
            return load["active_requests"], load["active_blocks"]

        own = await loads(first)
        assert own[0] == 1

        async def told() -> bool:
            return await loads(second) == own

        await until(told, what="the other counts it too, with its blocks")
        assert await second.metric("router_active_requests") == 0, "but not as its own"
        shared = await second.begin(prompt("a"), stream=True, max_tokens=1000)
        assert await loads(second) == (2, own[1]), "blocks that both have in flight are counted once"
        shared.close()
        stream.close()

        async def nothing() -> bool:
            return await loads(second) == (0, 0) and await loads(first) == (0, 0)

        await until(nothing, what="and gives both back")


class Toy:
    """A router's part in this, and nothing else of it."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.relayed: list[str] = []
        self.begun = 0
        """Streams."""
        self.book = LoadBook()
        self.peers = Peers(name, asyncio.get_running_loop().time())
        self.sharing = Sharing(bus, "test", self.peers, self.book, self, clock=asyncio.get_running_loop().time)

    def follow(self, info: EngineInfo) -> None:
        assert info.id not in self.relayed, "its stream would not begin anew"
        self.relayed.append(info.id)
        self.begun += 1

    def unfollow(self, engine_id: str) -> None:
        self.relayed = [other for other in self.relayed if other != engine_id]


def info(url: str) -> EngineInfo:
    return EngineInfo(url, EngineSpec(url), EngineKind.VLLM, "1", ())


@contextlib.asynccontextmanager
async def toy(url: str, name: str) -> AsyncIterator[tuple[Toy, asyncio.Task[None]]]:
    bus = Bus()
    await bus.connect(url, name=name)
    try:
        one = Toy(bus, name)
        async with alongside(one.sharing.run()) as running:
            yield one, running
    finally:
        await bus.close()


async def test_what_a_router_that_vanished_carried_and_relayed_is_given_up(nats: str) -> None:
    async with toy(nats, "a") as (a, _), toy(nats, "b") as (b, _):
        endpoint = Endpoint("http://e:1")
        a.sharing.follow(info(endpoint.engine))
        await until(lambda: a.relayed == [endpoint.engine], what="the first takes the engine")
        b.sharing.follow(info(endpoint.engine))
        with a.book.reserve(endpoint, [1, 2, 3], uncached_tokens=48):
            await until(lambda: b.book.load(endpoint, 0.0).active_blocks == 3, what="the other is told")
            await a.sharing._bus._drop_client()  # the connection is gone as if the process were; what it would say is not said
            a.sharing._bus._closing = True
            assert b.relayed == []
            await until(lambda: b.relayed == [endpoint.engine], deadline_s=3 * GONE_AFTER_S, what="the other takes over")
            assert b.book.load(endpoint, 0.0).active_requests == 0


async def test_of_two_relays_one_yields_and_the_other_begins_its_stream_anew(nats: str) -> None:
    async with toy(nats, "a") as (a, _):
        a.sharing.follow(info("http://e:1"))
        await until(lambda: a.begun == 1, what="it takes the engine")
        lower = msgspec.msgpack.encode(Presence("Z", [], ["http://e:1"], {"http://e:1": 1}, None))
        a.sharing._bus.publish("test.routers", lower)
        await until(lambda: a.begun == 2, what="the other's claim is lower: mirrors that have turned to it must turn back")
        higher = msgspec.msgpack.encode(Presence("b", [], ["http://e:1"], {"http://e:1": 1}, None))
        a.sharing._bus.publish("test.routers", higher)
        await until(lambda: a.relayed == [], what="the other's claim is higher")


async def test_while_the_bus_is_away_each_counts_its_own_and_afterwards_all_again() -> None:
    broker = Broker()
    async with contextlib.AsyncExitStack() as stack:
        url = await broker.start()
        stack.push_async_callback(broker.stop)
        a, _ = await stack.enter_async_context(toy(url, "a"))
        b, _ = await stack.enter_async_context(toy(url, "b"))
        endpoint = Endpoint("http://e:1")
        stack.enter_context(a.book.reserve(endpoint, [1], uncached_tokens=16))
        await until(lambda: b.book.load(endpoint, 0.0).active_requests == 1, what="the other is told")
        known: list[int] = []
        b.sharing._bus.watch(lambda: known.append(b.book.load(endpoint, 0.0).active_requests), lambda: None)
        assert broker.pid is not None
        async with alongside(broker.run()):
            killed = broker.pid
            broker._process.kill()  # type: ignore[union-attr]  # it runs
            await until(lambda: known, what="the bus is lost")
            assert known == [0]
            await until(
                lambda: broker.pid != killed and b.book.load(endpoint, 0.0).active_requests == 1,
                what="the bus is back, and the other is told",
            )
