"""How do an engine's KV events leave it? A PUB socket that counts its batches from 0, and a ROUTER socket that sends them again.

    live     topic | seq, 8 bytes big-endian | payload
    replay   asked:  "" | first seq      answered:  "" | topic | seq | payload, ..., then  "" | "" | ff x 8 | ""

Faults hook in here: a batch can be lost live, or for good; the feed can fall silent; replies can take the older shape without a topic.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec
import zmq
import zmq.asyncio

END = b"\xff" * 8
_BIND_DEADLINE_S = 5.0


class PublisherFaults(msgspec.Struct):
    """What goes wrong on the way out; everything off at first."""

    muted: bool = False
    """Batches are neither sent nor kept nor numbered: the publisher is dead."""
    lost_live: set[int] = msgspec.field(default_factory=set)
    """Sequence numbers not sent live, though a replay has them."""
    lost: set[int] = msgspec.field(default_factory=set)
    """Sequence numbers neither sent nor kept."""
    old_replay: bool = False
    """Replies without a topic frame, as vLLM before 0.26 wrote them."""


class Publisher:
    """The event feed of one KV cache."""

    def __init__(self, host: str, topic: str, keep: int) -> None:
        self.faults = PublisherFaults()
        self.next_seq = 0
        self.port = 0
        self.replay_port = 0
        self._host = host
        self._topic = topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None

    @property
    def events(self) -> str:
        """Where to subscribe."""
        return f"tcp://{self._host}:{self.port}"

    @property
    def replay(self) -> str:
        """Where to ask for batches again."""
        return f"tcp://{self._host}:{self.replay_port}"

    async def start(self) -> None:
        """Bind both sockets: to the ports of the last time, else to ports the kernel chooses."""
        self._context = context = zmq.Context()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(0)
        self._replay = zmq.asyncio.Socket(context, zmq.ROUTER)
        self._replay.set_hwm(0)
        for socket in (self._pub, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
        self.port = await self._bind(self._pub, self.port)
        self.replay_port = await self._bind(self._replay, self.replay_port)

    def stop(self) -> None:
        """Close both sockets; the buffer and the count go too, as with the process. `run` has been cancelled before."""
        for socket in (self._replay, self._pub):
            if socket is not None:
                socket.close(linger=0)
        if self._context is not None:
            self._context.term()
        self._context = self._pub = self._replay = None
        self._buffer.clear()
        self.next_seq = 0

    def publish(self, payload: bytes) -> None:
        """Number a batch, keep it, send it; never waits."""
        if self.faults.muted:
            return
        seq = self.next_seq
        self.next_seq += 1
        if seq in self.faults.lost:
            return
        self._buffer.append((seq, payload))
        if seq not in self.faults.lost_live:
            self.send(seq, payload)

    def send(self, seq: int, payload: bytes) -> None:
        """Send one message live with a number of the caller's choice, keeping nothing."""
        if self._pub is not None:
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    async def _bind(self, socket: zmq.Socket[bytes] | zmq.asyncio.Socket, port: int) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _BIND_DEADLINE_S
        while True:
            try:
                socket.bind(f"tcp://{self._host}:{port or '*'}")
            except zmq.ZMQError as error:
                # ZMQ closes sockets in its own thread: the port we had a moment ago may still be taken.
                if error.errno != zmq.EADDRINUSE or not port or loop.time() > deadline:
                    raise OSError(error.errno, error.strerror or "cannot bind", f"tcp://{self._host}:{port or '*'}") from error
                await asyncio.sleep(0.01)
            else:
                return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def run(self) -> None:
        """Answer replay requests until cancelled."""
        socket = self._replay
        while socket is not None:
            client, *request = await socket.recv_multipart()
            if len(request) != 2 or len(request[1]) != 8:
                continue  # neither an empty frame and a number: ignored, as vLLM does
            first = int.from_bytes(request[1], "big")
            head = (client, b"") if self.faults.old_replay else (client, b"", self._topic)
            for seq, payload in tuple(self._buffer):
                if seq >= first:
                    await socket.send_multipart((*head, seq.to_bytes(8, "big"), payload))
            end = (END, b"") if self.faults.old_replay else (b"", END, b"")
            await socket.send_multipart((client, b"", *end))
