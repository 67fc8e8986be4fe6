"""Whatever is lost, repeated, overtaken or late between engine, relay and router: once it stops, the index is what the engines hold.

CHAOS_S=60 CHAOS_SEEDS=1,2,3 .venv/bin/python -m pytest -s tests/integration/test_anti_entropy.py        the long way; seeds are printed
"""

# ruff: noqa: T201 - seeds, and what came of them, are to be shown

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from array import array
from collections.abc import Sequence

import aiohttp
import pytest
import zmq.asyncio

from discovery.broker import Broker
from discovery.messages import Beacon
from discovery.mirror import Mirror
from discovery.relay import Relay
from engines.blocks import block_keys, pack_tokens, root_seed
from engines.simulator.engine import SimulatedEngine
from engines.simulator.hashes import BlockNamer
from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec, KvSource
from tests.integration.kv_fleet import BLIND_S, NAMESPACE, Index, connected, running
from tests.integration.lossy import LossyEvents, Weather, lossy_bus
from tests.rig import settings_of
from tests.waiting import alongside, until

CHAOS_S = float(os.environ.get("CHAOS_S", "2"))
SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "1,2,3").split(",")]
BEACON_S = 2.0


class Traffic:
    """Prompts that share prefixes, against a cache that holds few of them; and what each block is called here and there."""

    def __init__(self, engine: SimulatedEngine, seed: int) -> None:
        self.engine = engine
        self.prompts = 0
        self._random = random.Random(seed)
        self._key_of: dict[int, int] = {}
        """The engine's own name of a block → ours."""

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                await self._ask(session, self._prompt())
                await asyncio.sleep(self._random.random() * 0.02)

    @property
    def truth(self) -> set[int]:
        """What the engine holds, asked of itself."""
        return {self._key_of[name] for name in self.engine.cache.names}

    def _prompt(self) -> list[int]:
        """Full blocks only, so that the one token generated fills none."""
        pick, size = self._random.randrange, self.engine.block_size
        branch, tokens = 0, list[int]()
        for depth in range(pick(1, 8)):
            branch = branch * 3 + pick(3)
            tokens += [(branch * 31 + depth * 7 + at) % 900 + 50 for at in range(size)]
        return tokens

    async def _ask(self, session: aiohttp.ClientSession, tokens: Sequence[int]) -> None:
        settings = self.engine.settings
        chain = BlockNamer(settings.kind, settings.block_size, settings.hash_seed).chain()
        chain.extend(array("I", tokens))
        self._key_of |= zip(chain.names, block_keys(pack_tokens(tokens), settings.block_size, root_seed()), strict=True)
        body = {"model": "sim", "prompt": tokens, "max_tokens": 1}
        async with session.post(self.engine.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
        self.prompts += 1


class Beacons:
    """A mirror that says how many beacons it has heard of each endpoint."""

    def __init__(self, mirror: Mirror) -> None:
        self.heard: dict[Endpoint, int] = {}
        note = mirror._note

        def counting(copy: object, message: object, now: float) -> None:
            if isinstance(message, Beacon):
                endpoint = copy.endpoint  # type: ignore[attr-defined]
                self.heard[endpoint] = self.heard.get(endpoint, 0) + 1
            note(copy, message, now)  # type: ignore[arg-type]

        mirror._note = counting  # type: ignore[method-assign]


def info_of(engine: SimulatedEngine, source: KvSource) -> EngineInfo:
    return EngineInfo(engine.url, EngineSpec(engine.url), engine.kind, "0", (), kv_sources=(source,))


@pytest.mark.parametrize("strength", [1.0, 0.1], ids=["storm", "breeze"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(120 + 2 * CHAOS_S)
async def test_after_a_storm_between_engine_relay_and_router_the_index_is_what_the_engines_hold(seed: int, strength: float) -> None:
    zmq_weather, nats_weather = Weather(seed, strength), Weather(seed + 1)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        engines = [
            await enter(SimulatedEngine(settings_of(kind=kind, kv_blocks=120, hash_seed=number))) for number, kind in enumerate(EngineKind)
        ]
        brokers = [Broker(), Broker()]
        urls = [await broker.start() for broker in brokers]
        for broker in brokers:
            stack.push_async_callback(broker.stop)
        await enter(lossy_bus(urls[0], urls[1], NAMESPACE, nats_weather))
        sources = []
        for engine in engines:
            assert engine.kv_events is not None
            events = LossyEvents(KvSource(0, engine.kv_events, engine.kv_replay), zmq_weather)
            sources.append(await enter(events.running()))
        context = stack.enter_context(zmq.asyncio.Context())
        relay = Relay(await enter(connected(urls[0], "relay")), NAMESPACE, context, beacon_period_s=BEACON_S)
        index = Index()
        mirror = Mirror(await enter(connected(urls[1], "router")), NAMESPACE, index, blind_after_s=BLIND_S, beacon_period_s=BEACON_S)
        beacons = Beacons(mirror)
        await enter(running(relay.run(), mirror.run()))
        for engine, source in zip(engines, sources, strict=True):
            relay.follow(info_of(engine, source))
            mirror.expect(info_of(engine, source))
        traffic = [Traffic(engine, seed + number) for number, engine in enumerate(engines)]
        async with alongside(traffic[0].run()), alongside(traffic[1].run()):
            loop = asyncio.get_running_loop()
            ends = loop.time() + CHAOS_S
            await until(lambda: loop.time() >= ends and min(t.prompts for t in traffic) > 50, deadline_s=CHAOS_S + 60)
        zmq_weather.calm = nats_weather.calm = True
        calm_at, before = loop.time(), dict(beacons.heard)

        def equal() -> bool:
            return all(mirror.ready(Endpoint(t.engine.url)) and index.keys(Endpoint(t.engine.url)) == t.truth for t in traffic)

        print(f"\nseed {seed}: {CHAOS_S:g} s, {sum(t.prompts for t in traffic)} prompts; ZMQ: {zmq_weather}; NATS: {nats_weather}")
        try:
            await until(equal, what="each index is what its engine holds")
        finally:
            heard = [count - before.get(endpoint, 0) for endpoint, count in beacons.heard.items()]
            print(f"after {loop.time() - calm_at:.2f} s and {heard} beacons: {mirror.stats()} {relay.stats()}")
        resyncs = [stats.resyncs for stats in mirror.stats().values()]
        assert zmq_weather.lost
        assert nats_weather.lost
        assert sum(map(len, resyncs)) > 0
        assert mirror.stats().keys() == {Endpoint(engine.url) for engine in engines}
