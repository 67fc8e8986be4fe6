"""The part of a router that the bench is about: a mirror with its index, and a relay where it reads engines itself."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterable, Sequence

import zmq.asyncio

from discovery.bus import Bus, BusOptions
from discovery.mirror import Mirror
from discovery.relay import Relay
from engines.blocks import KEY_BYTES
from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec, KvSource, Tier
from router.app import GC_THRESHOLD, SWEEP_ENTRIES
from router.caches import Caches
from tests.bench.index.watch import Watch

NAMESPACE = "bench"
logging.getLogger("discovery").setLevel(logging.ERROR)  # 256 engines that join, fall behind and leave: the numbers say it shorter
LOOK_S = 0.02


def infos(ports: Sequence[int], blocks: int) -> list[EngineInfo]:
    """The engines that publish there, as a probe would have them."""
    made = []
    for number, port in enumerate(ports):
        url = f"http://e{number}:8000"
        source = KvSource(0, f"tcp://127.0.0.1:{port}")
        made.append(EngineInfo(url, EngineSpec(url), EngineKind.VLLM, "0.32.0", (), total_blocks=blocks, kv_sources=(source,)))
    return made


class Applied:
    """An index, and how many blocks have been stored in it or removed: the end of the chain."""

    def __init__(self, caches: Caches) -> None:
        self.blocks = 0
        self._caches = caches

    def store(self, endpoint: Endpoint, tier: Tier, chains: Iterable[bytes]) -> None:
        self._caches.store(endpoint, tier, chains)
        self.blocks += sum(map(len, chains)) // KEY_BYTES

    def remove(self, endpoint: Endpoint, tier: Tier, keys: bytes) -> None:
        self._caches.remove(endpoint, tier, keys)
        self.blocks += len(keys) // KEY_BYTES

    def clear(self, endpoint: Endpoint) -> None:
        self._caches.clear(endpoint)


class Router:
    """A copy of what engines hold, from the bus or told directly."""

    def __init__(self, engines: list[EngineInfo]) -> None:
        self.engines = engines
        self.endpoints = [Endpoint(info.id) for info in engines]
        self.caches = Caches()
        self.applied = Applied(self.caches)
        self.index = self.caches._device
        self.watch = Watch(self.index.match)
        self.relay: Relay | None = None
        self.buses: list[Bus] = []
        self._context: zmq.asyncio.Context | None = None

    async def start(self, tasks: asyncio.TaskGroup, url: str, *, relays: bool, direct: bool = False) -> list[asyncio.Task[None]]:
        """Begin; the tasks that it consists of. `relays`: it reads the engines; `direct`: what it reads it tells itself without the bus."""
        for endpoint in self.endpoints:
            self.caches.add(endpoint)
        bus = await self._bus(url)
        self.mirror = Mirror(bus, NAMESPACE, self.applied)
        parts = [self.mirror.run(), self.watch.run()]
        if relays:
            self._context = zmq.asyncio.Context()
            local = self.mirror if direct else None
            self.relay = Relay(bus if direct else await self._bus(url), NAMESPACE, self._context, local=local, alone=direct)
            parts.append(self.relay.run())
        for info in self.engines:
            self.mirror.expect(info)
            if self.relay is not None:
                self.relay.follow(info)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)
        return [tasks.create_task(part) for part in parts]

    async def ready(self) -> None:
        """Returns when the copy is complete."""
        while not all(self.mirror.ready(endpoint) for endpoint in self.endpoints):  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(LOOK_S)

    def blocks(self) -> int:
        """Held by all engines together."""
        return sum(map(self.caches.size, self.endpoints))

    def wrong(self, samples: list[tuple[int, list[int], int]]) -> int:
        """How many of these chains the index has otherwise than their engines."""
        return sum(self.caches.overlaps(keys, [self.endpoints[of]])[self.endpoints[of]].device != held for of, keys, held in samples)

    def faults(self) -> dict[str, int]:
        """How often something was lost on the way, and mended."""
        copies, buses = self.mirror.stats().values(), [bus.counts for bus in self.buses]
        feeds = [] if self.relay is None else self.relay.stats().values()
        return {
            "losses": sum(feed.losses for feed in feeds),
            "gaps": sum(copy.gaps for copy in copies),
            "mismatches": sum(copy.mismatches for copy in copies),
            "snapshots": sum(copy.snapshots for copy in copies),
            "unsent": sum(bus.unsent for bus in buses),
            "overflowed": sum(bus.overflowed for bus in buses),
            "reconnects": sum(bus.reconnects for bus in buses),
        }

    async def part(self) -> None:
        """Every engine leaves, and its memory is given back as a router does it."""
        for info, endpoint in zip(self.engines, self.endpoints, strict=True):
            if self.relay is not None:
                self.relay.unfollow(info.id)
            self.mirror.forget(info.id)
            self.caches.discard(endpoint)
            await asyncio.sleep(0)
        while self.caches.sweep(SWEEP_ENTRIES) == SWEEP_ENTRIES:  # noqa: ASYNC110  others have a turn, nothing is waited for
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Everything is given back."""
        for bus in self.buses:
            await bus.close()
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _bus(self, url: str) -> Bus:
        bus = Bus(BusOptions(echo=False))
        await bus.connect(url, name="bench")
        self.buses.append(bus)
        return bus
