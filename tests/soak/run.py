"""How is it run? Routers as an operator starts them, simulated engines behind ways that can be broken, clients, chaos; then calm, and a look."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from engines.simulator.engine import SimulatedEngine
from engines.types import EngineKind
from tests.integration.commands import Process, command, is_ready
from tests.rig import settings_of
from tests.soak.chaos import Chaos
from tests.soak.report import Report
from tests.soak.traffic import Traffic, held
from tests.tcp_relay import TcpRelay
from tests.waiting import alongside, until

CLIENTS = 6
"""Of each router that stays."""
SAMPLES = 240
STARTED_WITHIN_S = 300.0
"""A router, on a machine that has much else to do for an hour."""
CALM_WITHIN_S = 60.0
COUNTERS = (
    "router_in_progress",
    "router_active_requests",
    "router_active_prefill_tokens",
    "router_active_blocks",
    "router_admission_waiting",
)


async def soak(seconds: float, seed: int, folder: Path, *, pause_s: float) -> Report:
    """A storm of so many seconds, and what is left when it is over. `pause_s`: between two requests of a client, on the mean."""
    async with contextlib.AsyncExitStack() as stack:
        kinds = (EngineKind.VLLM, EngineKind.VLLM, EngineKind.SGLANG, EngineKind.VLLM)
        engines = [
            await stack.enter_async_context(SimulatedEngine(settings_of(kind=kind, kv_blocks=600, hash_seed=number, speedup=1.0), record=1))
            for number, kind in enumerate(kinds)
        ]
        ways = [await stack.enter_async_context(TcpRelay(int(engine.url.rpartition(":")[2]))) for engine in engines]
        specs = [f"{way.url},kv-events={engine.kv_events},kv-replay={engine.kv_replay}" for engine, way in zip(engines, ways, strict=True)]
        traffic = Traffic(seed)

        @contextlib.asynccontextmanager
        async def router(log: Path) -> AsyncIterator[Process]:
            flags = [part for spec in specs for part in ("--engine", spec)]
            async with command("serve", *flags, "--nats", nats, "--log-level", "warning", log=log, within_s=STARTED_WITHIN_S) as process:
                await is_ready(process)
                yield process

        chaos = Chaos(engines, ways, traffic, router, folder, seed)
        nats = await stack.enter_async_context(chaos.bus())
        routers = [await stack.enter_async_context(router(folder / f"router{number}.log")) for number in range(2)]
        memory = Memory(routers)
        async with alongside(memory.run(seconds / SAMPLES)):
            async with asyncio.TaskGroup() as storm:
                tasks = [storm.create_task(chaos.run(period_s=min(3.0, seconds / 15)))]
                tasks += [storm.create_task(traffic.client(one.url, pause_s)) for one in routers for _ in range(CLIENTS)]
                await asyncio.sleep(seconds)
                tasks[0].cancel()
                await asyncio.gather(tasks[0], return_exceptions=True)
                await asyncio.sleep(1)
                for task in tasks[1:]:
                    task.cancel()
            await until(lambda: traffic.in_progress == 0, what="every request has ended")
        left_over = await settled(routers, engines)
        checked, wrong = await compared(routers, engines, ways, list(traffic.prompts))
        return Report(seconds, seed, traffic.outcomes, traffic.statuses, chaos.done, left_over, wrong, checked, memory.samples)


class Memory:
    """What each router takes, as it goes."""

    def __init__(self, routers: Sequence[Process]) -> None:
        self.samples: dict[str, list[tuple[float, float]]] = {f"router {number}": [] for number in range(len(routers))}
        self._routers = routers

    async def run(self, period_s: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            for name, router in zip(self.samples, self._routers, strict=True):
                self.samples[name].append((loop.time() - began, own_memory_kb(router.process.pid)))
            await asyncio.sleep(period_s)


def own_memory_kb(pid: int) -> float:
    """Private pages of a process: what would be free without it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return float(sum(int(line.split()[1]) for line in lines if line.startswith("Private_")))


async def settled(routers: Sequence[Process], engines: Sequence[SimulatedEngine]) -> list[str]:
    """Counters that do not come down to zero, once they have had their time."""

    async def not_zero() -> list[str]:
        found = [
            f"{name} of router {n}: {value:g}" for n, one in enumerate(routers) for name in COUNTERS if (value := await rest(one, name))
        ]
        found += [
            f"running or waiting in engine {number}: {busy}"
            for number, engine in enumerate(engines)
            if (busy := engine.running + engine.waiting)
        ]
        return found

    with contextlib.suppress(AssertionError):

        async def all_zero() -> bool:
            return not await not_zero()

        await until(all_zero, deadline_s=CALM_WITHIN_S)
    return await not_zero()


async def rest(router: Process, name: str) -> float:
    """What is left of a gauge; the look itself is a request in progress."""
    return await router.metric(name) - (name == "router_in_progress")


async def compared(
    routers: Sequence[Process], engines: Sequence[SimulatedEngine], ways: Sequence[TcpRelay], prompts: Sequence[list[int]]
) -> tuple[int, list[str]]:
    """How many overlaps were compared, and those that are wrong once they have had their time."""
    truth = {way.url: [held(engine, prompt) for prompt in prompts] for engine, way in zip(engines, ways, strict=True)}

    async def wrong() -> list[str]:
        found = []
        for index, router in enumerate(routers):
            for number, prompt in enumerate(prompts):
                answer = await router.post("/route", {"model": "sim", "prompt": prompt})
                told = {one["engine"]: one for one in answer.json["candidates"]} if answer.status == 200 else {}
                for place, (url, known) in enumerate(truth.items()):
                    believed = told[url]["overlap"]["device"] if url in told else None
                    if believed != known[number]:
                        signal = told[url]["signal"] if url in told else "no candidate"
                        found.append(f"router {index} believes {believed} blocks at engine {place}, which holds {known[number]} ({signal})")
        return found

    async def right() -> bool:
        return not await wrong()

    with contextlib.suppress(AssertionError):
        await until(right, deadline_s=CALM_WITHIN_S)
    return len(routers) * len(engines) * len(prompts), await wrong()
