"""Ways between engine, relay and router on which messages are lost, repeated, overtaken and late, as chance has it, until they are calm."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence

import zmq
import zmq.asyncio

from discovery.bus import Bus, BusOptions
from engines.types import KvSource

LOST, TWICE, LATE = 0.08, 0.08, 0.2
LATEST_S = 0.3


class Weather:
    """What becomes of each message, while it is not calm."""

    def __init__(self, seed: int, strength: float = 1.0) -> None:
        self.strength = strength
        self.calm = False
        self.lost = self.twice = self.late = self.passed = 0
        self._random = random.Random(seed)

    def carry(self, send: Callable[[], object]) -> None:
        """Send it now, or later, or twice, or not."""
        draw = self._random.random
        self.passed += 1
        if self.calm:
            send()
            return
        if draw() < LOST * self.strength:
            self.lost += 1
            return
        copies = 1 + (draw() < TWICE * self.strength)
        self.twice += copies - 1
        for _ in range(copies):
            if draw() < LATE * self.strength:
                self.late += 1
                asyncio.get_running_loop().call_later(draw() * LATEST_S, send)
            else:
                send()

    def __str__(self) -> str:
        return f"{self.passed} messages, of which {self.lost} lost, {self.twice} twice, {self.late} late"


class LossyEvents:
    """Stands where an engine's two ZMQ sockets are: what it publishes, and what it answers to replays, passes through the weather."""

    def __init__(self, source: KvSource, weather: Weather) -> None:
        self._source = source
        self._weather = weather
        self.source = source

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[KvSource]:
        """While inside, the engine is read at the source given."""
        with zmq.asyncio.Context() as context:
            sub, pub, router = (context.socket(kind) for kind in (zmq.SUB, zmq.PUB, zmq.ROUTER))
            for sock in (sub, pub, router):
                sock.linger = 0
                sock.set_hwm(0)
            sub.subscribe(b"")
            sub.connect(self._source.events)
            for sock in (pub, router):
                sock.bind("tcp://127.0.0.1:*")
            events, replay = (sock.getsockopt_string(zmq.LAST_ENDPOINT) for sock in (pub, router))
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._live(sub, pub)), group.create_task(self._replays(context, router, group))]
                    try:
                        yield KvSource(self._source.rank, events, replay, self._source.topic)
                    finally:
                        for task in tasks:
                            task.cancel()
            finally:
                context.destroy(linger=0)

    async def _live(self, sub: zmq.asyncio.Socket, pub: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sub.recv_multipart()
            self._weather.carry(lambda frames=frames: _send(pub, frames))  # type: ignore[misc]  # bound now

    async def _replays(self, context: zmq.asyncio.Context, router: zmq.asyncio.Socket, group: asyncio.TaskGroup) -> None:
        while True:
            client, *request = await router.recv_multipart()
            group.create_task(self._answer(context, router, client, request))

    async def _answer(self, context: zmq.asyncio.Context, router: zmq.asyncio.Socket, client: bytes, request: Sequence[bytes]) -> None:
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.set_hwm(0)
            dealer.connect(self._source.replay or "")
            await dealer.send_multipart(request)
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(5):
                        frames = await dealer.recv_multipart()
                    self._weather.carry(lambda frames=frames: _send(router, [client, *frames]))  # type: ignore[misc]  # bound now
                    if frames[-2] == b"\xff" * 8:
                        return


def _send(sock: zmq.asyncio.Socket, frames: Sequence[bytes]) -> None:
    if not sock.closed:
        zmq.Socket.shadow(sock.underlying).send_multipart(frames, zmq.NOBLOCK)


@contextlib.asynccontextmanager
async def lossy_bus(relays: str, routers: str, namespace: str, weather: Weather) -> AsyncIterator[None]:
    """Two NATS servers as one for what relays tell and routers ask, through the weather in both directions."""
    ours, theirs = Bus(BusOptions(echo=False)), Bus(BusOptions(echo=False))
    await ours.connect(relays, name="lossy")
    await theirs.connect(routers, name="lossy")

    def passing(to: Bus) -> Callable[[str, bytes, str], None]:
        return lambda subject, payload, reply: weather.carry(lambda: to.publish(subject, payload, reply))

    for subject in (f"{namespace}.kv.>", f"{namespace}.reply.>"):
        ours.subscribe(subject, passing(theirs))
    theirs.subscribe(f"{namespace}.snapshot.>", passing(ours))
    await ours.flush()
    await theirs.flush()
    try:
        yield
    finally:
        await ours.close()
        await theirs.close()
