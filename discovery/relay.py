"""How do KV events get from the engines onto the bus?

One relay follows any number of engines; each (engine, rank) that publishes is a `Feed` with a `KvSubscriber` that tells it. The
relay gives them life: it says on the bus what they hold every few seconds, and answers mirrors that ask for all of it.

    follow(info) ──▶ Feed ◀── KvSubscriber ◀── ZMQ            bus ── SnapshotRequest ──▶ Feed.snapshot ── chunks ──▶ bus
                       ├── batches, beacons ──▶ bus
                       └── changes ──▶ the mirror of the same process, if there is one: what it has itself, it does not ask of the bus

Nothing is said of an endpoint before the engine's replay has been read, nor is anybody answered. An engine that answers nothing is waited
for no longer than `SILENT_S`; then its signal says that nothing came.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq.asyncio

from discovery.bus import Bus, Subscription
from discovery.feed import Feed, FeedCopy, FeedCounts
from discovery.logs import event
from discovery.messages import SnapshotRequest, StreamMessage
from discovery.remains import Remains
from discovery.subjects import Subjects
from engines.subscriber import KvSubscriber, SubscriberCounts
from engines.turns import Turns
from engines.types import Endpoint, EngineInfo, KvSource
from engines.vllm import tells_again

RETRY_S = 1.0
SILENT_S = 3.0
"""How long an engine may bring nothing before what is known of it is told all the same; more than a replay has to answer."""
LOOK_S = 0.25
AT_ONCE = 16
"""Feeds whose beacons are sent in one pass of the loop."""
PASS_BLOCKS = 4096
"""Changes that are sent in one pass of the loop."""
TOGETHER_S = 0.01
"""After a batch of any engine has been sent, the next ones wait so long for each other: what others hear is never later by more."""
MAX_REQUESTS = 4096
"""Snapshots in line; beyond, a request is dropped and its mirror asks again."""

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(SnapshotRequest)


class LocalCopy(FeedCopy, Protocol):
    """A copy in this process, which also wants to know what is followed here."""

    def attach(self, feed: Feed) -> None:
        """This feed tells you from now on."""
        ...

    def detach(self, endpoint: Endpoint) -> None:
        """Nothing tells you of this endpoint any more."""
        ...


class _Followed:
    """A feed and what keeps it going."""

    def __init__(self, feed: Feed, source: KvSource, life: object, requests: Subscription) -> None:
        self.feed = feed
        self.source = source
        self.life = life
        self.requests = requests
        self.counts = SubscriberCounts()
        self.task: asyncio.Task[None] | None = None
        self.brought = (0, 0, 0)
        """What has come of it so far, and when that was last more than before: for as long as it is not complete."""
        self.brought_at = 0.0


class Relay:
    """Follows engines from `follow` to `unfollow` while `run` runs; both may be called before it."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        context: zmq.asyncio.Context,
        *,
        local: LocalCopy | None = None,
        alone: bool = False,
        beacon_period_s: float = 2.0,
    ) -> None:
        """`local` is told directly of all that is followed here, besides the bus.

        `alone`: nobody else can be on the bus, so nothing is said there.
        """
        self.rejected = 0
        """Requests for a snapshot that could not be read or were too many."""
        self._bus = bus
        self._subjects = Subjects(namespace)
        self._context = context
        self._local = local
        self._alone = alone
        self._turns = Turns()
        self._beacon_period_s = beacon_period_s
        self._followed: dict[Endpoint, _Followed] = {}
        self._ended: list[asyncio.Task[None]] = []
        self._wanted: dict[str, tuple[Endpoint, str]] = {}
        """Who asks for what → whose snapshot goes where. Who asks again keeps its place in line, and only its last question is answered."""
        self._changed = asyncio.Event()
        self._asked = asyncio.Event()
        self._waiting: dict[Feed, None] = {}
        """Those with something to send, in the order in which they came to have it."""
        self._flush_at: asyncio.Handle | None = None
        self._remains = Remains()

    def follow(self, info: EngineInfo) -> None:
        """Exactly this engine's sources are followed from now on; those followed already go on, unless the engine was started again."""
        sources = {Endpoint(info.id, source.rank): source for source in info.kv_sources}
        life = (info.boot, info.spec.block_size)
        for endpoint in [known for known in self._followed if known.engine == info.id]:
            before = self._followed[endpoint]
            if sources.get(endpoint) != before.source or before.life != life:
                self._drop(endpoint)
        for endpoint, source in sources.items():
            if endpoint not in self._followed:
                self._add(endpoint, source, life, info.total_blocks if tells_again(info) else None)

    def unfollow(self, engine_id: str) -> None:
        """Nothing of this engine is read or told any more. Idempotent."""
        for endpoint in [known for known in self._followed if known.engine == engine_id]:
            self._drop(endpoint)

    def complete(self, engine_id: str) -> bool:
        """Whether all that this engine has published is known, as far as it can be had."""
        return all(followed.feed.complete for endpoint, followed in self._followed.items() if endpoint.engine == engine_id)

    def stats(self) -> dict[Endpoint, FeedCounts]:
        """What happened on each endpoint followed now."""
        return {
            endpoint: msgspec.structs.replace(followed.feed.counts, **msgspec.structs.asdict(followed.counts))
            for endpoint, followed in self._followed.items()
        }

    async def run(self) -> None:
        """Ends only by cancellation; then nothing is followed by tasks any more."""
        self._bus.watch(_nothing, self._beacons)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat(), name="relay beacons")
                tasks.create_task(self._answer(), name="relay snapshots")
                tasks.create_task(self._look(), name="relay joins")
                while True:
                    self._begin_and_end(tasks)
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            self._bus.unwatch(_nothing, self._beacons)
            if self._flush_at is not None:
                self._flush_at.cancel()
                self._flush_at = None

    def _add(self, endpoint: Endpoint, source: KvSource, life: tuple[float | None, int | None], turnover: int | None) -> None:
        subject = self._subjects.stream(endpoint)

        def send(message: StreamMessage) -> None:
            self._bus.publish(subject, _encode(message))

        feed = Feed(
            endpoint,
            life[1],
            _epochs(),
            None if self._alone else send,
            waits=self._flush_soon,
            give_up=self._remains.add,
            copy=self._local,
            replays=source.replay is not None,
            turnover=turnover,
        )
        requests = self._bus.subscribe(self._subjects.snapshot(endpoint), self._on_request)
        self._followed[endpoint] = _Followed(feed, source, life, requests)
        self._changed.set()
        if self._local is not None:
            self._local.attach(feed)
        feed.beacon()
        event(_log, logging.INFO, "following KV events", endpoint=str(endpoint), events=source.events, replay=source.replay)

    def _drop(self, endpoint: Endpoint) -> None:
        followed = self._followed.pop(endpoint)
        followed.requests.cancel()
        followed.feed.end()
        if self._local is not None:
            self._local.detach(endpoint)
        if followed.task is not None:
            self._ended.append(followed.task)
            followed.task = None  # which knows, by how it ended, all that it was about: a cycle, and the memory of a whole cache in it
        self._changed.set()

    def _begin_and_end(self, tasks: asyncio.TaskGroup) -> None:
        for ended in self._ended:
            ended.cancel()
        self._ended.clear()
        for endpoint, followed in self._followed.items():
            if followed.task is None:
                followed.task = tasks.create_task(self._pull(followed), name=f"kv events {endpoint}")

    def _flush_soon(self, feed: Feed) -> None:
        """At once when nothing was sent just now, else together with what comes until then."""
        self._waiting[feed] = None
        if self._flush_at is None:
            self._flush()

    def _flush(self) -> None:
        """Send what waits, and what is too much for one pass of the loop in the next."""
        self._flush_at = None
        sent = 0
        while self._waiting and sent < PASS_BLOCKS:
            feed = next(iter(self._waiting))
            del self._waiting[feed]
            sent += feed.flush()
        loop = asyncio.get_running_loop()
        if self._waiting:
            self._flush_at = loop.call_soon(self._flush)
        elif sent:
            self._flush_at = loop.call_later(TOGETHER_S, self._flush)

    async def _pull(self, followed: _Followed) -> None:
        """One rank's whole life here. Nothing an engine publishes may end the relay, nor another engine's feed."""
        followed.brought_at = time.monotonic()
        while True:
            try:
                await KvSubscriber(self._context, followed.source, followed.feed, counts=followed.counts, turns=self._turns).run()
            except Exception:  # noqa: BLE001  see above; it is logged whole, shown in the signal, and counted
                _log.exception("following KV events failed", extra={"fields": {"endpoint": str(followed.feed.endpoint)}})
                followed.feed.crashed("reading its events failed; the relay's log says how")
            await asyncio.sleep(RETRY_S)

    async def _beat(self) -> None:
        while True:
            started = time.monotonic()
            await self._beat_once()  # by itself: between two beats nothing is held of an engine that left
            await asyncio.sleep(max(0.0, self._beacon_period_s - (time.monotonic() - started)))

    async def _beat_once(self) -> None:
        for number, followed in enumerate(tuple(self._followed.values()), 1):
            followed.feed.beacon()  # which says nothing when it was dropped meanwhile
            if not number % AT_ONCE:
                await asyncio.sleep(0)

    async def _look(self) -> None:
        """Wait for no engine that brings nothing: one that never connects to us, or a network that swallows what we send."""
        while True:
            self._look_once(time.monotonic())
            await asyncio.sleep(LOOK_S)

    def _look_once(self, now: float) -> None:
        for followed in self._followed.values():
            brought = (followed.counts.connects, followed.counts.replays, followed.feed.batches)
            if followed.task is None or followed.feed.complete:
                continue
            if brought != followed.brought:
                followed.brought, followed.brought_at = brought, now
            elif now - followed.brought_at >= SILENT_S:
                followed.feed.unreachable(f"nothing has come from {followed.source.events}")

    def _beacons(self) -> None:
        for followed in self._followed.values():
            followed.feed.beacon()

    def _on_request(self, subject: str, payload: bytes, reply: str) -> None:
        del subject
        try:
            endpoint = _requests.decode(payload).endpoint
        except msgspec.MsgspecError:
            self.rejected += 1
            return
        asker = reply.rpartition(".")[0]  # the rest is the number of its question
        if not reply or (asker not in self._wanted and len(self._wanted) >= MAX_REQUESTS):
            self.rejected += 1
            return
        self._wanted[asker] = endpoint, reply
        self._asked.set()

    async def _answer(self) -> None:
        """Snapshots go out one after the other, each as the bus has room: what is live never waits behind more than a little of them."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            while self._wanted:
                await self._send_snapshot(*self._wanted.pop(next(iter(self._wanted))))

    async def _send_snapshot(self, endpoint: Endpoint, reply: str) -> None:
        followed = self._followed.get(endpoint)
        if followed is None or not followed.feed.complete:
            return  # whoever asked hears of it when it is
        followed.feed.beacon()  # whoever asks has not heard the last one
        for chunk in followed.feed.snapshot():
            await self._bus.room()
            self._bus.publish(reply, _encode(chunk))
            await asyncio.sleep(0)  # while there is room, nothing above waits


def _epochs() -> Callable[[], str]:
    """Names for the epochs of one feed's life. A life of its own for each: mirrors that have turned to another relay turn back to it."""
    life, numbers = secrets.token_hex(8), itertools.count()
    return lambda: f"{life}.{next(numbers)}"


def _nothing() -> None:
    """The bus is lost: what is published meanwhile is dropped there, and mirrors ask for it when they are back."""
