"""What does each endpoint hold, as far as the bus tells, and how far can that be believed?

A mirror copies the streams of the engines it expects into an index, complete and in order (`StreamSync` decides how), and keeps each
endpoint's signal (`SignalTracker` decides what it is). It decides nothing itself: messages in, index operations and requests out.

    bus ── Batch, Beacon ──▶ StreamSync ──▶ store / remove / clear ──▶ index
     └──── SnapshotChunk ──▶     └────────▶ SnapshotRequest ──▶ bus      ▲
                                                                         │
    a relay in this process ── changes, beacons ─────────────────────────┘

What a relay in this process follows, it tells directly (`attach`): nothing can be lost between the two, so there is nothing to judge, and
what the bus says of such an endpoint, be it another relay's word, is not listened to.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from discovery.bus import Bus
from discovery.feed import PIECE_BYTES, Feed
from discovery.logs import event
from discovery.messages import Batch, Beacon, Clear, Op, Remove, SnapshotChunk, SnapshotRequest, Store, StreamMessage
from discovery.signal import Signal, SignalState, SignalTracker
from discovery.subjects import Subjects
from discovery.sync import Action, Apply, ClearAll, RequestSnapshot, StreamSync, SyncCounts
from engines.types import Endpoint, EngineInfo, Tier

TICK_S = 0.1
AT_ONCE = 16
"""Endpoints that are looked at in one pass of the loop."""
CHANGE_BYTES = 256
"""What a change costs beside its keys: with this, many small ones take no longer than a piece of keys."""

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_streams: msgspec.msgpack.Decoder[StreamMessage] = msgspec.msgpack.Decoder(StreamMessage)
_chunks = msgspec.msgpack.Decoder(SnapshotChunk)


_Life = tuple[bool, float | None]
"""Whether the engine publishes, and the start of its process."""


class IndexSink(Protocol):
    """Where what is held is written down."""

    def store(self, endpoint: Endpoint, tier: Tier, chains: Iterable[bytes]) -> None:
        """The blocks of these chains are held there now, and were not: packed keys, each block following the one before it."""
        ...

    def remove(self, endpoint: Endpoint, tier: Tier, keys: bytes) -> None:
        """These blocks are not held there any more."""
        ...

    def clear(self, endpoint: Endpoint) -> None:
        """Nothing is known to be held there."""
        ...


class MirrorCounts(msgspec.Struct):
    """Plain numbers for the metrics page."""

    undecodable: int = 0
    """Messages on our subjects that are none of ours."""
    unexpected: int = 0
    """Messages of endpoints that are not expected, or not any more."""
    unanswered: int = 0
    """Requests for a snapshot that no relay was there to hear."""


class _Copy:
    """One endpoint as the mirror has it."""

    def __init__(self, endpoint: Endpoint, life: _Life, sync: StreamSync, tracker: SignalTracker) -> None:
        self.endpoint = endpoint
        self.life = life
        self.sync = sync
        self.tracker = tracker
        self.local = False
        """Whether a relay in this process tells of it."""
        self.told = False
        """Whether its relay has said, in this epoch, how it sees the signal and the block size: keys alone cannot be believed yet."""
        self.behind: deque[Callable[[], Op]] = deque()
        """What has been told of it in this process and is not in the index yet: what a feed held that was joined when it held much."""
        self.block_size: int | None = None
        self.reported: SignalState | None = None

    @property
    def complete(self) -> bool:
        return self.told and not self.behind and (self.local or self.sync.synced)

    def renewed(self) -> None:
        self.told = False
        self.behind.clear()
        self.tracker.restarted()


class Mirror:
    """Copies while `run` runs. `expect` and `forget` may be called at any time; all methods belong to one loop."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        index: IndexSink,
        *,
        blind_after_s: float = 5.0,
        beacon_period_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = MirrorCounts()
        self._bus = bus
        self._subjects = Subjects(namespace)
        self._index = index
        self._blind_after_s = blind_after_s
        self._beacon_period_s = beacon_period_s
        self._clock = clock
        self._name = secrets.token_hex(8)
        self._copies: dict[Endpoint, _Copy] = {}
        self._by_subject: dict[str, _Copy] = {}
        self._feeds: dict[Endpoint, Feed] = {}
        self._running = False

    def expect(self, info: EngineInfo) -> None:
        """Exactly this engine's endpoints are mirrored from now on. What is known of them is kept unless the engine was started again."""
        publishing = {source.rank for source in info.kv_sources}
        for endpoint in [known for known in self._copies if known.engine == info.id and known not in info.endpoints]:
            self._drop(endpoint)
        for endpoint in info.endpoints:
            life = (endpoint.rank in publishing, info.boot)
            if endpoint in self._copies and self._copies[endpoint].life != life:
                self._drop(endpoint)
            if endpoint not in self._copies:
                copy = self._add(endpoint, life)
                if self._running and self._bus.connected and not copy.local and copy.tracker.publishes:
                    self._perform(copy, copy.sync.tick(self._clock()))

    def forget(self, engine_id: str) -> None:
        """Nothing of this engine is in the index, nor will be: what is still on its way is discarded. Idempotent."""
        for endpoint in [known for known in self._copies if known.engine == engine_id]:
            self._drop(endpoint)

    # discovery.relay.LocalCopy

    def attach(self, feed: Feed) -> None:
        """What the feed's endpoint holds is told by it, from what it holds now on.

        O(blocks it holds), at some 20 ns each; what costs more is done in later passes of the loop.

        A complete copy of another relay's serves until the feed is complete as well.
        """
        self._feeds[feed.endpoint] = feed
        copy = self._copies.get(feed.endpoint)
        if copy is not None and (feed.complete or not copy.complete):
            self._link(copy, feed)

    def detach(self, endpoint: Endpoint) -> None:
        """Its feed has ended: from now on it is copied from the bus. What was known counts on until the bus tells of it. Idempotent."""
        if self._feeds.pop(endpoint, None) is None or endpoint not in self._copies:
            return
        copy, now = self._copies[endpoint], self._clock()
        if not copy.local:
            return
        if not copy.complete:
            self._drop(endpoint)
            self._add(endpoint, copy.life)
            return
        copy.local, copy.sync = False, StreamSync(copy.sync.counts)
        copy.sync.inherit(now)
        if not self._bus.connected:
            copy.tracker.bus_lost(now)

    def changed(self, endpoint: Endpoint, changes: Iterable[Op]) -> None:
        """The next changes of what is held there. O(blocks)."""
        copy = self._copies.get(endpoint)
        if copy is None or not copy.local:
            return
        copy.sync.counts.batches += 1
        copy.tracker.heard(self._clock())
        if copy.behind:
            copy.behind += [functools.partial(_itself, change) for change in changes]
        else:
            self._take(endpoint, changes)

    def renewed(self, endpoint: Endpoint) -> None:
        """A new epoch: nothing of what was known holds any more."""
        copy = self._copies.get(endpoint)
        if copy is not None and copy.local:
            copy.sync.counts.epochs += 1
            copy.renewed()
            self._index.clear(endpoint)

    def told(self, endpoint: Endpoint, beacon: Beacon) -> None:
        """How its feed sees it."""
        copy = self._copies.get(endpoint)
        if copy is not None and copy.local:
            self._note(copy, beacon, self._clock())
        elif copy is not None:
            self._link(copy, self._feeds[endpoint])

    # the router

    def signal(self, endpoint: Endpoint, now: float) -> Signal:
        """How far the index can be believed for this endpoint. O(1)."""
        copy = self._copies.get(endpoint)
        if copy is None:
            return Signal(SignalState.BLIND, "it is not among the engines that are mirrored")
        signal = copy.tracker.state(now)
        if signal.believed and not copy.complete:
            return Signal(SignalState.STALE, f"its index is being copied: {copy.sync.why}")
        return signal

    def served(self, endpoint: Endpoint, now: float, new_blocks: int, *, sent_at: float | None = None) -> None:
        """A prompt with `new_blocks` full blocks not known to be cached, sent at `sent_at`, has got its first token there."""
        copy = self._copies.get(endpoint)
        if copy is not None:
            copy.tracker.served(now, new_blocks, sent_at)

    def hit(self, endpoint: Endpoint, blocks: int, *, known: int, new: int, sent_at: float) -> None:
        """A prompt found `blocks` cached there, by the engine's own count: see `SignalTracker.hit`."""
        copy = self._copies.get(endpoint)
        if copy is not None:
            copy.tracker.hit(blocks, known, new, sent_at)
            self._report(copy, self._clock())

    def ready(self, endpoint: Endpoint) -> bool:
        """Whether its part of the index is complete, or will never come."""
        copy = self._copies.get(endpoint)
        return copy is not None and (copy.complete or not copy.tracker.publishes)

    def block_size(self, endpoint: Endpoint) -> int | None:
        """Tokens per block as its events have it; None before the first."""
        copy = self._copies.get(endpoint)
        return None if copy is None else copy.block_size

    def stats(self) -> dict[Endpoint, SyncCounts]:
        """What happened on each endpoint's stream."""
        return {endpoint: copy.sync.counts for endpoint, copy in self._copies.items()}

    async def run(self) -> None:
        """Ends only by cancellation."""
        subscriptions = [
            self._bus.subscribe(self._subjects.streams, self._on_stream),
            self._bus.subscribe(self._subjects.replies(self._name), self._on_reply),
        ]
        self._bus.watch(self._on_bus_lost, self._on_bus_back)
        self._running = True
        (self._on_bus_back if self._bus.connected else self._on_bus_lost)()
        try:
            while True:
                for number, copy in enumerate(tuple(self._copies.values()), 1):
                    if self._copies.get(copy.endpoint) is copy:
                        self._tick(copy, self._clock())
                    if not number % AT_ONCE:
                        await asyncio.sleep(0)  # others have their turn
                await asyncio.sleep(TICK_S)
        finally:
            self._running = False
            self._bus.unwatch(self._on_bus_lost, self._on_bus_back)
            for subscription in subscriptions:
                subscription.cancel()

    def _add(self, endpoint: Endpoint, life: _Life) -> _Copy:
        now = self._clock()
        publishes = life[0]
        tracker = SignalTracker(publishes=publishes, now=now, blind_after_s=self._blind_after_s, beacon_period_s=self._beacon_period_s)
        copy = self._copies[endpoint] = _Copy(endpoint, life, StreamSync(), tracker)
        if publishes:
            self._by_subject[self._subjects.stream(endpoint)] = copy
        if endpoint in self._feeds:
            self._link(copy, self._feeds[endpoint])
        elif not self._bus.connected:
            tracker.bus_lost(now)
        return copy

    def _link(self, copy: _Copy, feed: Feed) -> None:
        now = self._clock()
        self._index.clear(copy.endpoint)
        copy.renewed()
        copy.sync.counts.epochs += 1
        copy.local = True
        copy.tracker.bus_back(now)
        copy.behind += feed.held()
        self._catch_up(copy)
        feed.beacon()

    def _catch_up(self, copy: _Copy) -> None:
        """Take in a piece of what a feed holds, or as much of what came since, and the next in the next pass of the loop."""
        if self._copies.get(copy.endpoint) is not copy:
            return
        taken = 0
        while copy.behind and taken < PIECE_BYTES:
            change = copy.behind.popleft()()
            self._take(copy.endpoint, [change])
            taken += CHANGE_BYTES + (0 if isinstance(change, Clear) else len(change.keys))
        if copy.behind:
            asyncio.get_running_loop().call_soon(self._catch_up, copy)

    def _take(self, endpoint: Endpoint, changes: Iterable[Op]) -> None:
        for change in changes:
            if isinstance(change, Store):
                self._index.store(endpoint, change.tier, change.chains())
            elif isinstance(change, Remove):
                self._index.remove(endpoint, change.tier, change.keys)
            else:
                self._index.clear(endpoint)

    def _drop(self, endpoint: Endpoint) -> None:
        del self._copies[endpoint]
        self._by_subject.pop(self._subjects.stream(endpoint), None)
        self._index.clear(endpoint)

    def _on_stream(self, subject: str, payload: bytes, reply: str) -> None:
        del reply
        copy = self._by_subject.get(subject)
        if copy is None:
            self.counts.unexpected += 1
            return
        if copy.local:
            return
        try:
            message = _streams.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.counts.undecodable += 1
            return
        if isinstance(message, Batch) and not all(op.whole for op in message.ops):
            self.counts.undecodable += 1
            return
        now, epoch = self._clock(), copy.sync.epoch
        actions = copy.sync.batch(message, now) if isinstance(message, Batch) else copy.sync.beacon(message, now)
        if copy.sync.epoch != epoch:
            copy.renewed()
        if message.epoch == copy.sync.epoch:
            self._note(copy, message, now)
        self._perform(copy, actions)

    def _note(self, copy: _Copy, message: StreamMessage, now: float) -> None:
        match message:
            case Batch():
                copy.tracker.heard(now)
            case Beacon(signal=state, reason=reason):
                copy.tracker.beacon(_signal(state, reason), now, quiet=message.quiet, published=message.seq + message.quiet > 0)
                copy.block_size = message.block_size or copy.block_size
                copy.told = True

    def _on_reply(self, subject: str, payload: bytes, reply: str) -> None:
        del reply
        if not payload:
            self.counts.unanswered += 1  # NATS says so when nobody listens: the relay is not up yet, and its first beacon will tell
            return
        answered = self._subjects.answered(subject)
        try:
            chunk = _chunks.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            chunk = None
        if answered is None or chunk is None or not all(op.whole for op in chunk.ops):
            self.counts.undecodable += 1
            return
        endpoint, attempt = answered
        copy = self._copies.get(endpoint)
        if copy is None or copy.local:
            self.counts.unexpected += 1
            return
        epoch = copy.sync.epoch
        actions = copy.sync.chunk(chunk, attempt, self._clock())
        if copy.sync.epoch != epoch:
            copy.renewed()
        self._perform(copy, actions)

    def _perform(self, copy: _Copy, actions: Iterable[Action]) -> None:
        endpoint = copy.endpoint
        for action in actions:
            match action:
                case Apply(ops):
                    self._take(endpoint, ops)
                case ClearAll():
                    self._index.clear(endpoint)
                case RequestSnapshot(attempt):
                    event(_log, logging.INFO, "asking for a snapshot", endpoint=str(endpoint), reason=copy.sync.why, attempt=attempt)
                    reply = self._subjects.reply(self._name, endpoint, attempt)
                    self._bus.publish(self._subjects.snapshot(endpoint), _encode(SnapshotRequest(endpoint)), reply)

    def _tick(self, copy: _Copy, now: float) -> None:
        if copy.tracker.publishes and self._bus.connected and not copy.local:
            self._perform(copy, copy.sync.tick(now))
        self._report(copy, now)

    def _report(self, copy: _Copy, now: float) -> None:
        """One log line per change of state; the first one only when it is bad news, and not while the first copy is being made."""
        signal = self.signal(copy.endpoint, now)
        if signal.state is copy.reported or (copy.reported is None and not self.ready(copy.endpoint) and copy.tracker.state(now).believed):
            return
        if copy.reported is not None or signal.state is not SignalState.LIVE:
            level = logging.INFO if signal.believed else logging.WARNING
            event(_log, level, "KV signal changed", endpoint=str(copy.endpoint), signal=signal.state.value, reason=signal.reason)
        copy.reported = signal.state

    def _on_bus_lost(self) -> None:
        now = self._clock()
        for copy in self._copies.values():
            if not copy.local:
                copy.tracker.bus_lost(now)
                copy.sync.doubt()

    def _on_bus_back(self) -> None:
        now = self._clock()
        for copy in self._copies.values():
            if not copy.local:
                copy.tracker.bus_back(now)
                self._perform(copy, copy.sync.tick(now) if copy.tracker.publishes else ())


def _itself(op: Op) -> Op:
    return op


def _signal(state: str, reason: str) -> Signal:
    """As a relay says it; a state of a later version is not believed, and says so."""
    try:
        return Signal(SignalState(state), reason)
    except ValueError:
        return Signal(SignalState.STALE, f"its relay calls it {state[:40]!r}: {reason[:200]}")
