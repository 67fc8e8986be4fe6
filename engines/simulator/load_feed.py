"""How does a simulated SGLang push its load? A PUB socket: what has changed is sent within a few milliseconds, all else every second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from engines.simulator.scheduler import Scheduler

TOPIC = b"load"
HEARTBEAT_S = 1.0
_LOOK_S = 0.005


def report(scheduler: Scheduler, most_sequences: int) -> bytes:
    """What SGLang 0.5.23 sends of one rank."""
    cache = scheduler.cache
    used, uncached = cache.used * cache.block_size, sum(sequence.length for sequence in scheduler.waiting)
    running, waiting = len(scheduler.running), len(scheduler.waiting)
    total = cache.capacity * cache.block_size
    return msgspec.msgpack.encode(["LoadStat", running, waiting, used, total, 0, uncached, used + uncached, most_sequences, 0, 0])


class LoadPublisher:
    """The load feed of one engine."""

    def __init__(self, host: str) -> None:
        self.port = 0
        self._host = host
        self._next = 0
        self._socket: zmq.Socket[bytes] | None = None

    def start(self, port: int = 0) -> None:
        """Bind to this port; 0: to one of the kernel's choice, another one after each restart."""
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://{self._host}:{port or '*'}")
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def stop(self) -> None:
        """Close; numbers begin anew with the next start."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket, self._next = None, 0

    def send(self, payload: bytes) -> None:
        """Send one message, a test's own included."""
        if self._socket is not None:
            self._socket.send_multipart((TOPIC, self._next.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self._next += 1

    async def run(self, read: Callable[[], bytes]) -> None:
        """Send what `read` says until cancelled."""
        loop = asyncio.get_running_loop()
        last, at = b"", 0.0
        while True:
            payload = read()
            if payload != last or loop.time() - at >= HEARTBEAT_S:
                last, at = payload, loop.time()
                self.send(payload)
            await asyncio.sleep(_LOOK_S)
