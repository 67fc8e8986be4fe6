"""What goes wrong meanwhile? One thing after the other, drawn by chance: connections, engines, the bus, a router that comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer, Break, End
from tests.integration.commands import Process, is_ready
from tests.integration.nats_servers import NatsServer, nats_server
from tests.soak.traffic import Traffic
from tests.tcp_relay import TcpRelay

FAULTS = (
    Answer(status=503),
    Answer(status=429, headers=(("retry-after", "1"),)),
    Answer(status=500),
    Break(after_chunks=0),
    Break(after_chunks=3),
    Break(after_chunks=2, end=End.CLOSE, bytes_more=9),
)


class Chaos:
    """Everything that can be broken, and how often it has been."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        ways: Sequence[TcpRelay],
        traffic: Traffic,
        join: Callable[[Path], contextlib.AbstractAsyncContextManager[Process]],
        folder: Path,
        seed: int,
    ) -> None:
        """`ways` lead to the engines; `join` starts one more router, with its log in the file given."""
        self.done: Counter[str] = Counter()
        self._engines = engines
        self._ways = ways
        self._traffic = traffic
        self._join = join
        self._folder = folder
        self._random = random.Random(seed)
        self._nats: NatsServer | None = None
        self._stack = contextlib.AsyncExitStack()

    async def run(self, period_s: float) -> None:
        """One thing every `period_s` on the mean, until cancelled; each mends what it broke before the next, or before this ends."""
        things: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (4, self.reset_connections),
            (3, self.stall_a_way),
            (2, self.refuse_connections),
            (4, self.fault_answers),
            (2, self.restart_an_engine),
            (1, self.restart_the_bus),
            (2, self.a_router_comes_and_goes),
        ]
        weights, calls = [weight for weight, _ in things], [call for _, call in things]
        first = list(calls)  # each at least once, where there is time
        self._random.shuffle(first)
        while True:
            await asyncio.sleep(self._random.random() * 2 * period_s)
            call = first.pop() if first else self._random.choices(calls, weights)[0]
            doing = asyncio.ensure_future(call())  # noqa: TID251  awaited here, whatever comes
            try:
                await asyncio.shield(doing)
            finally:
                await doing  # what was begun is mended, even when the storm ends
            self.done[call.__name__.replace("_", " ")] += 1

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[str]:
        """The URL of a NATS server that is restarted meanwhile."""
        async with self._stack:
            self._nats = await self._stack.enter_async_context(nats_server(self._folder))
            yield self._nats.url

    async def reset_connections(self) -> None:
        self._random.choice(self._ways).reset()

    async def stall_a_way(self) -> None:
        way = self._random.choice(self._ways)
        way.stalled = True
        await asyncio.sleep(self._random.random())
        way.stalled = False

    async def refuse_connections(self) -> None:
        way = self._random.choice(self._ways)
        await way.refuse()
        await asyncio.sleep(self._random.random())
        await way.accept()

    async def fault_answers(self) -> None:
        self._random.choice(self._engines).faults.add(self._random.choice(FAULTS), times=self._random.randrange(1, 4))

    async def restart_an_engine(self) -> None:
        engine = self._random.choice(self._engines)
        await engine.die()
        await asyncio.sleep(self._random.random())
        await engine.restart()

    async def restart_the_bus(self) -> None:
        if self._nats is None:
            return
        port = self._nats.port
        await self._nats.kill()
        await asyncio.sleep(self._random.random() * 3)
        self._nats = await self._stack.enter_async_context(nats_server(self._folder, port=port, name="again"))

    async def a_router_comes_and_goes(self) -> None:
        """Half of the time it is told to end, else killed; clients of its own use it meanwhile."""
        async with self._join(self._folder / "third.log") as router, asyncio.TaskGroup() as clients:
            await is_ready(router)
            for _ in range(3):
                clients.create_task(self._traffic.client(router.url, 0.05))
            await asyncio.sleep(1 + self._random.random() * 3)
            if self._random.random() < 0.5:
                await router.kill()
            else:
                router.process.terminate()
                await router.process.wait()
