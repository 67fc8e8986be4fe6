"""A toy engine that only publishes KV events, an index that only remembers, and the parts between them, started together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, Self

import msgspec
import zmq.asyncio

from discovery.broker import Broker
from discovery.bus import Bus, BusOptions
from discovery.mirror import Mirror
from discovery.relay import Relay
from engines.blocks import block_keys, pack_tokens, root_seed, unpack_keys
from engines.simulator.publisher import Publisher
from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec, KvSource, Tier

BLOCK = 4
NAMESPACE = "test"
BEACON_S = 0.2
BLIND_S = 0.5


@contextlib.asynccontextmanager
async def running(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While inside, these run; one that ends by itself or fails, fails the test."""

    async def never_ends(part: Coroutine[Any, Any, None]) -> None:
        await part
        raise AssertionError(f"{part} ended by itself")

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(never_ends(part)) for part in parts]
        await asyncio.sleep(0)  # each has begun, so that cancelling it runs its `finally`
        try:
            yield
        finally:
            for task in started:
                task.cancel()


@contextlib.asynccontextmanager
async def connected(url: str, name: str) -> AsyncIterator[Bus]:
    bus = Bus()
    await bus.connect(url, name=name)
    try:
        yield bus
    finally:
        await bus.close()


class Index:
    """Holds what it is told, and refuses what an exact copy is never told."""

    def __init__(self) -> None:
        self.held: defaultdict[Endpoint, set[tuple[Tier, int]]] = defaultdict(set)

    def store(self, endpoint: Endpoint, tier: Tier, chains: Iterable[bytes]) -> None:
        pairs = {(tier, key) for keys in chains for key in unpack_keys(keys)}
        assert not pairs & self.held[endpoint], "stored twice"
        self.held[endpoint] |= pairs

    def remove(self, endpoint: Endpoint, tier: Tier, keys: bytes) -> None:
        pairs = {(tier, key) for key in unpack_keys(keys)}
        assert pairs <= self.held[endpoint], "removed and not held"
        self.held[endpoint] -= pairs

    def clear(self, endpoint: Endpoint) -> None:
        self.held.pop(endpoint, None)

    def keys(self, endpoint: Endpoint) -> set[int]:
        return {key for _, key in self.held[endpoint]}


class ToyEngine:
    """One rank's cache, its own names for blocks, and its event feed."""

    def __init__(self, url: str = "http://127.0.0.1:8000", *, replays: bool = True, keep: int = 10_000, block: int = BLOCK) -> None:
        self.endpoint = Endpoint(url)
        self.publisher = Publisher("127.0.0.1", "kv-events", keep)
        self.held: set[int] = set()
        self._replays = replays
        self._block = block
        self._replaying: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        await self.publisher.start()
        self._replaying = asyncio.get_running_loop().create_task(self.publisher.run())

    async def stop(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.wait([self._replaying])
        self.publisher.stop()
        self.held.clear()

    async def restart(self) -> None:
        """In place: the same addresses, sequence from 0, an empty cache."""
        await self.stop()
        await self.start()

    def info(self, *, configured: int | None = None, boot: float | None = None, publishes: bool = True) -> EngineInfo:
        source = KvSource(0, f"tcp://127.0.0.1:{self.publisher.port}", self.publisher.replay if self._replays else None, "kv-events")
        return EngineInfo(
            id=self.endpoint.engine,
            spec=EngineSpec(self.endpoint.engine, block_size=configured),
            kind=EngineKind.VLLM,
            version="0.32.0",
            models=(),
            kv_sources=(source,) if publishes else (),
            boot=boot,
        )

    def serve(self, *prompts: Sequence[int]) -> None:
        """Cache each prompt's full blocks; one batch, as one step of the scheduler."""
        self._publish([event for prompt in prompts for event in self._stored(prompt)])

    def evict(self, prompt: Sequence[int], keep: int = 0) -> None:
        """Drop all but the first `keep` blocks, the last one first."""
        keys = [key for key in self.keys_of(prompt)[keep:] if key in self.held]
        self.held.difference_update(keys)
        self._publish([{"type": "BlockRemoved", "block_hashes": [_name(key)], "medium": "GPU"} for key in reversed(keys)])

    def publish_nothing_new(self) -> None:
        """A batch of a group that is not indexed."""
        event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 7}
        self._publish([event])

    def keys_of(self, prompt: Sequence[int]) -> list[int]:
        return block_keys(pack_tokens(prompt), self._block, root_seed())

    def _stored(self, prompt: Sequence[int]) -> list[dict[str, Any]]:
        keys = self.keys_of(prompt)
        first = next((index for index, key in enumerate(keys) if key not in self.held), len(keys))
        if first == len(keys):
            return []
        self.held.update(keys[first:])
        return [
            {
                "type": "BlockStored",
                "block_hashes": [_name(key) for key in keys[first:]],
                "parent_block_hash": _name(keys[first - 1]) if first else None,
                "token_ids": list(prompt[first * self._block : len(keys) * self._block]),
                "block_size": self._block,
                "medium": "GPU",
            }
        ]

    def _publish(self, events: list[dict[str, Any]]) -> None:
        if events:
            self.publisher.publish(msgspec.msgpack.encode([0.0, events, 0]))


def _name(key: int) -> int:
    """What the engine itself calls a block: nothing that we could mistake for our key."""
    return key ^ 0x5A5A_5A5A_5A5A_5A5A


def prompt(number: int, blocks: int, block: int = BLOCK) -> list[int]:
    """Token ids that share their first block with no other number's."""
    return [number * 1_000_003 + position for position in range(blocks * block)]


class Fleet:
    """A broker, a bus for the relay, and as many mirrors as a test makes."""

    def __init__(self, broker: Broker, url: str, bus: Bus, context: zmq.asyncio.Context) -> None:
        self.broker = broker
        self.url = url
        self.bus = bus
        self.context = context
        self.relay = self.new_relay(bus)

    def new_relay(self, bus: Bus, local: Mirror | None = None, *, alone: bool = False) -> Relay:
        return Relay(bus, NAMESPACE, self.context, local=local, alone=alone, beacon_period_s=BEACON_S)

    @contextlib.asynccontextmanager
    async def router(self, *, alone: bool = False) -> AsyncIterator[tuple[Relay, Mirror, Index]]:
        """One more router's part that reads engines itself: relay and mirror on one connection, the one telling the other directly."""
        index = Index()
        bus = Bus(BusOptions(echo=False))
        await bus.connect(self.url, name="router")
        mirror = Mirror(bus, NAMESPACE, index, blind_after_s=BLIND_S, beacon_period_s=BEACON_S)
        relay = self.new_relay(bus, mirror, alone=alone)
        try:
            async with running(mirror.run(), relay.run()):
                yield relay, mirror, index
        finally:
            await bus.close()

    @contextlib.asynccontextmanager
    async def mirror(self, *infos: EngineInfo) -> AsyncIterator[tuple[Mirror, Index]]:
        """One more router's part: its own connection, its own index."""
        index = Index()
        async with connected(self.url, "mirror") as bus:
            mirror = Mirror(bus, NAMESPACE, index, blind_after_s=BLIND_S, beacon_period_s=BEACON_S)
            for info in infos:
                mirror.expect(info)
            async with running(mirror.run()):
                yield mirror, index


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    broker = Broker()
    url = await broker.start()
    context = zmq.asyncio.Context()
    try:
        async with connected(url, "relay") as bus:
            made = Fleet(broker, url, bus, context)
            async with running(broker.run(), made.relay.run()):
                yield made
    finally:
        await broker.stop()
        context.destroy(linger=0)
