"""How does one rank's KV event stream reach us complete, in order, and without mixing two lives of the engine?

    open SUB ──handshake──▶ same life as before? ──▶ replay what was missed ──▶ live messages ──disconnected──▶ close SUB, open again
                                   └─ no: restarted

The ideas. Live messages wait in the SUB socket's own queue while a replay is being applied, so order needs no buffer of ours. Each
connection gets a fresh socket, so nothing a dead process left in a queue can be taken for the next one's. And since a publisher does
not say who it is, a reconnect asks the replay for the latest message seen: only the same process still has that payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engines.events import KvBatch, UndecodableBatch, decode
from engines.replay import Message, read_frames, replay
from engines.stream import Accept, Duplicate, Gap, Restart, SequenceTracker
from engines.types import KvSource

_LOG = logging.getLogger(__name__)

_WATCHED = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_QUEUED_MESSAGES = 100_000
"""What the SUB socket holds back at most; vLLM's own bound on the other side. What is dropped beyond it is a gap, and replayed."""
_MAX_MESSAGE_BYTES = 64 << 20
_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_MOST_VERDICTS = 5
"""Gap, restart, gap, accept: no honest message needs more judgements than that."""


class KvSink(Protocol):
    """Who is told. Its methods are called in the order things happened, never from two tasks, and must not block."""

    def restarted(self, reason: str) -> None:
        """A new life of the engine's cache begins: nothing known of it holds any more. Called once at the very start, with "joined"."""
        ...

    def batch(self, batch: KvBatch) -> None:
        """The next batch of this life; none before it is missing that `lost` did not name."""
        ...

    def lost(self, first: int, last: int) -> None:
        """Batches `first` … `last` cannot be had any more: what is known is no longer complete."""
        ...

    def undecodable(self, kind: str) -> None:
        """A message came that could not be read, and was passed over; `kind` is one of a few fixed words."""
        ...


class KvSubscriber:
    """Follows one source for ever and tells one sink."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KvSource,
        sink: KvSink,
        *,
        replay_silence_s: float = 2.0,
        quiet_s: float = 5.0,
    ) -> None:
        """Follow `source` on sockets of `context`; nothing happens before `run`.

        `replay_silence_s`: how long a replay may say nothing. `quiet_s`: once after so long without a live message, the replay is
        asked whether one was lost, since a loss otherwise shows only when the next one comes.
        """
        self._context = context
        self._source = source
        self._sink = sink
        self._replay_silence_s = replay_silence_s
        self._quiet_s = quiet_s
        self._tracker = SequenceTracker()

    async def run(self) -> None:
        """Never returns; cancellation closes every socket."""
        self._sink.restarted("joined")
        pause_s, complaint = _SHORTEST_PAUSE_S, ""
        while True:
            connected = False
            try:
                with self._open() as (sub, monitor):
                    connected = await self._connected(monitor)
                    if connected:
                        await self._check_life()
                        await self._follow(sub, monitor)
            except zmq.ZMQError as error:
                # An address still in use after a reconnect, or one that is wrong: either way nothing but time can mend it from here.
                if str(error) != complaint:
                    complaint = str(error)
                    _LOG.warning("kv events: socket failed", extra={"events": self._source.events, "error": complaint})
            pause_s = _SHORTEST_PAUSE_S if connected else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
        with self._context.socket(zmq.SUB, socket_class=zmq.asyncio.Socket) as sub:
            sub.linger = 0
            sub.ipv6 = True
            sub.rcvhwm = _QUEUED_MESSAGES
            sub.maxmsgsize = _MAX_MESSAGE_BYTES
            sub.reconnect_ivl = round(_SHORTEST_PAUSE_S * 1000)
            sub.reconnect_ivl_max = round(_LONGEST_PAUSE_S * 1000)
            sub.heartbeat_ivl = 5000  # a host that vanishes sends no FIN
            sub.heartbeat_timeout = 15000
            sub.subscribe(self._source.topic)
            with sub.get_monitor_socket(_WATCHED) as monitor:
                try:
                    if self._source.bind:
                        sub.bind(self._source.events)
                    else:
                        sub.connect(self._source.events)
                    yield sub, monitor
                finally:
                    sub.disable_monitor()

    async def _connected(self, monitor: zmq.asyncio.Socket) -> bool:
        event = await recv_monitor_message(monitor)
        return event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED

    async def _check_life(self) -> None:
        """Called on every connection: afterwards this life's known batches have been delivered, of whichever life it now is."""
        if self._tracker.expected:
            if self._source.replay is None:
                self._restart("reconnected, and no replay socket to tell whether it is the same process")
            elif not await self._is_same_life(self._source.replay):
                self._restart("reconnected, and the replay does not know the latest batch")
        await self._catch_up()

    async def _is_same_life(self, endpoint: str) -> bool:
        last = self._tracker.last
        if last is None:
            return False
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with contextlib.aclosing(self._ask(endpoint, last[0])) as messages:
                    async for message in messages:
                        return (message.seq, message.fingerprint) == last
                return False
        return False

    async def _follow(self, sub: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        """Returns when the connection ends."""
        poller = zmq.asyncio.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(sub, zmq.POLLIN)
        quiet_ms: int | None = round(self._quiet_s * 1000)
        while True:
            ready = dict(await poller.poll(quiet_ms))
            if monitor in ready:  # before any message: it may be the new process's
                if not await self._connected(monitor):
                    return
                await self._check_life()  # a second publisher: an engine that came back before its old connection was found dead
            elif sub in ready:
                await self._drain(zmq.Socket.shadow(sub), monitor)
                quiet_ms = round(self._quiet_s * 1000)
            else:
                quiet_ms = None
                await self._catch_up()

    async def _drain(self, queue: zmq.Socket[bytes], monitor: zmq.asyncio.Socket) -> None:
        """Take all that is queued, until something happens to the connection: what comes after that may be another process's.

        Past asyncio, since a poll and two futures per message cost ten times what reading one does.
        """
        while not int(monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            try:
                frames = queue.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            await self._take(frames)
            await asyncio.sleep(0)  # a full queue is read without ever suspending otherwise

    async def _take(self, frames: list[bytes]) -> None:
        message = read_frames(frames)
        if message is None:
            self._sink.undecodable("frames")
            return
        for _ in range(_MOST_VERDICTS):
            match self._tracker.feed(message.seq, message.fingerprint):
                case Accept():
                    self._deliver(message)
                    return
                case Duplicate():
                    return
                case Gap(last=last):
                    await self._catch_up()
                    self._give_up(last + 1)
                case Restart(expected=expected, got=got):
                    self._restart(f"the next number was to be {expected} and is {got}")
        self._sink.undecodable("sequence")

    async def _catch_up(self) -> None:
        """Deliver what the replay has from the next batch on. Without one, or when it says nothing, nothing changes."""
        if self._source.replay is not None:
            while await self._catch_up_once(self._source.replay):
                pass

    async def _catch_up_once(self, endpoint: str) -> bool:
        """Ask once. True when the answer brought something but broke off, so that asking again from there may bring the rest."""
        moved = False
        try:
            async with contextlib.aclosing(self._ask(endpoint, self._tracker.expected)) as messages:
                async for message in messages:
                    verdict = self._tracker.feed_replayed(message.seq, message.fingerprint)
                    if isinstance(verdict, Gap):
                        if moved:
                            return True
                        self._give_up(message.seq)
                        verdict = self._tracker.feed_replayed(message.seq, message.fingerprint)
                    if isinstance(verdict, Accept):
                        moved = True
                        self._deliver(message)
                    await asyncio.sleep(0)
        except TimeoutError:
            return moved
        return False

    def _give_up(self, upto: int) -> None:
        first = self._tracker.expected
        if first < upto:
            self._tracker.skip_to(upto)
            self._sink.lost(first, upto - 1)

    def _deliver(self, message: Message) -> None:
        try:
            batch = decode(message.payload)
        except UndecodableBatch as error:
            self._sink.undecodable(error.kind)
        else:
            self._sink.batch(batch)

    def _restart(self, reason: str) -> None:
        self._tracker.restart()
        self._sink.restarted(reason)

    def _ask(self, endpoint: str, first: int) -> AsyncGenerator[Message, None]:
        return replay(self._context, endpoint, first, silence_s=self._replay_silence_s)
