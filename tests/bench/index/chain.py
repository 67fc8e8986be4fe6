"""What does it cost to follow a fleet, end to end? Engines' sockets → relay → NATS → mirror → index, in one process, on one core.

`direct` leaves NATS out, as a router does that reads its engines itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable

import msgspec
import uvloop

from discovery.broker import Broker
from tests.bench.index.child import Child, child
from tests.bench.index.router import LOOK_S, Router, infos
from tests.bench.index.watch import process_s, resident_bytes
from tests.bench.index.workload import HEAD, HEADS, OWN, PROMPT, fresh_keys
from tests.bench.processes import BenchError, cpu_s

STEP = 32
"""Blocks that a message evicts, and stores."""
SAMPLES = 400
SETTLE_S = 0.5
STILL_S = 30.0
"""Without progress for so long, something is lost."""

Found = dict[str, dict[str, float]]


class Size(msgspec.Struct, frozen=True):
    """How much of everything."""

    engines: int
    blocks: int
    """That each holds."""
    per_s: float
    """Messages at a pace."""
    seconds: float
    burst: int
    """Messages as fast as they come."""

    @property
    def held(self) -> int:
        """Blocks of one engine in whole chains."""
        return HEADS * HEAD + (self.blocks - HEADS * HEAD) // OWN * OWN


class Chain:
    """One run."""

    def __init__(self, size: Size, router: Router, engines: Child, broker: Broker, tasks: asyncio.TaskGroup) -> None:
        self.size = size
        self.found: Found = {}
        self._router = router
        self._engines = engines
        self._broker = broker
        self._tasks = tasks

    async def fill(self) -> None:
        """From nothing to full caches."""
        before = resident_bytes()
        await self._engines.ask("prepare_filling")
        wanted = self.size.engines * self.size.held
        self.found["fill"] = await self._published(1e9, wanted)
        self.found["fill"]["before_bytes"] = before
        self.found["fill"]["bytes"] = (resident_bytes() - before) / wanted
        self.found["fill"]["index_bytes"] = self._router.caches.memory_bytes() / len(self._router.index)

    async def steps(self, what: str, count: int, per_s: float) -> None:
        """Full caches change, and prompts are matched meanwhile."""
        await self._engines.ask("prepare_steps", count=count, blocks=STEP)
        rng = random.Random(1)
        samples = await self._engines.ask("samples", count=SAMPLES)
        self._router.watch.prompts = [keys[:PROMPT] + fresh_keys(rng, PROMPT - len(keys)) for _, keys, _ in samples]
        self.found[what] = await self._published(per_s, 2 * STEP * count)

    async def join(self, joiner: Child) -> None:
        """Another router joins while events come."""
        await self._engines.ask("prepare_steps", count=int(self.size.per_s * self.size.seconds / 4), blocks=STEP)
        self._router.watch.take()
        streaming = self._tasks.create_task(self._engines.ask("publish", per_s=self.size.per_s / 4))
        self.found["join"] = await joiner.ask("join")
        await streaming
        self.found["join"] |= {
            f"answering_{name}": value for name, value in self._router.watch.take().items() if name in {"turn_ms", "late_ms"}
        }

    async def check(self, joiner: Child | None) -> None:
        """Raise BenchError unless what is known comes to be what the engines hold. What is on its way does not change how much that is."""
        samples = await self._engines.ask("samples", count=SAMPLES)
        wanted = {"blocks": self.size.engines * self.size.held, "wrong": 0}
        deadline = time.monotonic() + STILL_S
        while True:
            known = {"who was there": {"blocks": self._router.blocks(), "wrong": self._router.wrong(samples)}}
            if joiner is not None:
                known["who joined late"] = await joiner.ask("state", samples=samples)
            if all(state == wanted for state in known.values()):
                return
            if time.monotonic() > deadline:
                raise BenchError(f"of {wanted['blocks']} blocks and {SAMPLES} chains: {known}; {self._router.faults()}")
            await asyncio.sleep(SETTLE_S)

    async def part(self) -> None:
        """All engines leave."""
        self._router.watch.prompts = []
        self._router.watch.take()
        spent = process_s()
        await self._router.part()
        seen = self._router.watch.take()
        self.found["leave"] = {"cpu_s": process_s() - spent, **seen, "rss_bytes": resident_bytes(), "entries": len(self._router.caches)}

    async def _published(self, per_s: float, blocks: int) -> dict[str, float]:
        """Have what was prepared published; what it cost until the last of `blocks` changes is in the index."""
        await asyncio.sleep(SETTLE_S)
        applied = self._router.applied
        wanted = applied.blocks + blocks
        self._router.watch.take()
        spent, servers, started = process_s(), self._server_s(), time.monotonic()
        publishing = self._tasks.create_task(self._engines.ask("publish", per_s=per_s))
        await self._until(lambda: applied.blocks >= wanted)
        took = time.monotonic() - started
        spent, servers = process_s() - spent, self._server_s() - servers
        await publishing
        return {
            "blocks": blocks,
            "s": took,
            "blocks_per_s": blocks / took,
            "blocks_per_cpu_s": blocks / spent,
            "cpu_us": spent / blocks * 1e6,
            "server_us": servers / blocks * 1e6,
            **self._router.watch.take(),
        }

    async def _until(self, done: Callable[[], bool]) -> None:
        """Returns when it is. Raises BenchError when nothing happens any more."""
        moved, moved_at = -1, 0.0
        while not done():
            if (blocks := self._router.applied.blocks) != moved:
                moved, moved_at = blocks, time.monotonic()
            elif time.monotonic() > moved_at + STILL_S:
                raise BenchError(f"events were lost: {blocks} blocks were applied in all, {self._router.faults()}")
            await asyncio.sleep(LOOK_S)

    def _server_s(self) -> float:
        return cpu_s(self._broker.pid) if self._broker.pid else 0.0


async def measure(size: Size, *, direct: bool) -> Found:
    """One run of everything; who joins late only where there is a bus to join."""
    broker = Broker()
    url = await broker.start()
    try:
        async with child(sys.executable, "tests.bench.index.engines", size.engines, size.held) as engines:
            ports = await engines.ask("ports")
            router = Router(infos(ports, size.held))
            async with asyncio.TaskGroup() as tasks:
                chain = Chain(size, router, engines, broker, tasks)
                running = await router.start(tasks, url, relays=True, direct=direct)
                await engines.ask("joined")
                await router.ready()
                await chain.fill()
                await chain.steps("steady", int(size.per_s * size.seconds), size.per_s)
                if direct:
                    await chain.steps("burst", size.burst, 1e9)
                    await chain.check(None)
                else:
                    async with child(sys.executable, "tests.bench.index.joiner", url, json.dumps(ports), size.held) as joiner:
                        await chain.join(joiner)
                        await chain.check(joiner)
                        await chain.steps("burst", size.burst, 1e9)
                        await chain.check(joiner)
                chain.found["faults"] = {name: float(count) for name, count in router.faults().items()}
                await chain.part()
                for task in running:
                    task.cancel()
            await router.close()
    finally:
        await broker.stop()
    return chain.found


async def serve(size: Size, *, direct: bool) -> None:
    """Measure, and say what was found."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        found = await measure(size, direct=direct)
    except* BenchError as group:
        sys.exit(f"bench-index: {group.exceptions[0]}")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.argv[2], type=Size), direct=sys.argv[1] == "direct"))
