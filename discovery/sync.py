"""When is a copy of a stream complete and in order, and what mends it when it is not?

A mirror holds one `StreamSync` per endpoint. It is fed everything that arrives and answers with what to do:

              Batch 0 of a new epoch, or a beacon that says "empty"
    unknown ────────────────────────────────────────────────────▶ synced ◀── last chunk, then the batches kept meanwhile
       │  anything else                                              │
       └───────────────▶ syncing ◀───────────────────────────────────┘ gap · new epoch · digest that differs
                         (asks for a snapshot, keeps live batches)

The one idea: nothing is ever assumed to have arrived. Numbers show a loss at the next message, the beacon shows a loss at the
end and one that numbers cannot see, and every mend is the same: clear, snapshot, go on.

An epoch is `<relay life>.<n>`, `n` growing within one life: so a late message of a dead epoch is known as late. Of two lives,
the one heard later is the newer, and the other is not listened to again for `RETIRED_S`. Nothing said in a false name lasts: what
answers a request made since is believed over it, and so is an older epoch once the one we follow has been silent for `RETIRED_S`.

A snapshot is applied chunk by chunk as it comes, so that a large one neither lies in memory twice nor stalls the loop; the
endpoint is not `synced` until the last of it is in.

Another relay's life is not another life of the engine's cache: who takes over an engine tells of it once it has read all that the engine
published. A copy that was complete is therefore *inherited*: it counts on until the new relay's snapshot is there (a large one: until it
begins), and where the new relay's digest is the same, no snapshot is needed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from discovery.digests import digest_of_all
from discovery.messages import Batch, Beacon, Clear, Op, Remove, SnapshotChunk, Store
from engines.blocks import KEY_BYTES

RETIRED_S = 10.0
"""How long the messages of a dead epoch may still be on their way; several times the beacons' period."""
RETRY_S = 2.0
MAX_RETRY_S = 32.0
"""How long without a chunk before a snapshot counts as lost; doubles each time, since the line before it may only be long."""
MOST_BEHIND = 2
"""One beacon that is behind us may have been overtaken on its way; not so several in a row."""
MIN_RESYNC_S = 0.05
MAX_RESYNC_S = 1.0
"""Bounds of the wait between two snapshots of one stream; doubles until a beacon agrees."""
AT_ONCE = 4
"""So many chunks at most take the place of an inherited copy as a whole, some 4 ms each; of more, each counts as it comes."""
INHERITED_S = 5.0
"""How long a copy from another relay counts while the new one does not answer."""
MAX_KEPT_BYTES = 16 * 1024 * 1024
"""Keys of live batches kept while a snapshot is on its way; the oldest go first, and a gap then asks again."""


class Apply(msgspec.Struct, frozen=True):
    """These are the next operations."""

    ops: Sequence[Op]


class ClearAll(msgspec.Struct, frozen=True):
    """Nothing of this endpoint is known any more."""


class RequestSnapshot(msgspec.Struct, frozen=True):
    """Ask the relay; its chunks count only when handed back with this `attempt`."""

    attempt: int


Action = Apply | ClearAll | RequestSnapshot


class Phase(enum.StrEnum):
    """See the module's text."""

    UNKNOWN = "unknown"
    SYNCING = "syncing"
    SYNCED = "synced"


class SyncCounts(msgspec.Struct):
    """How often each fault was seen; plain numbers for the metrics page."""

    batches: int = 0
    """Applied, whether live or kept."""
    gaps: int = 0
    duplicates: int = 0
    late: int = 0
    """Messages of a dead epoch or of a snapshot no longer wanted."""
    mismatches: int = 0
    """Times that a beacon contradicted what we hold: its digest, or a position that stays behind ours."""
    epochs: int = 0
    snapshots: int = 0
    """Applied to the end."""
    requests: int = 0
    resyncs: dict[str, int] = msgspec.field(default_factory=dict)
    """Times that the copy had to be made anew, by why: a word of `Why`."""


class Why(enum.StrEnum):
    """What began a resync."""

    JOINED = "joined"
    """Nothing was known yet, or only the middle of an epoch was heard."""
    RELAY = "relay"
    """Another relay has taken over, and what it has differs."""
    GAP = "gap"
    DIGEST = "digest"
    BEHIND = "behind"
    """The relay stays behind what we hold."""
    UNANSWERED = "unanswered"
    """The snapshot asked for did not come, or not whole."""


def epoch_parts(epoch: str) -> tuple[str, int]:
    """An epoch's relay life and its number within it; an epoch of another form is a life of its own."""
    life, _, number = epoch.rpartition(".")
    return (life, int(number)) if life and number.isascii() and number.isdigit() and len(number) < 16 else (epoch, 0)


class StreamSync:
    """One endpoint's copy. Every method takes `now` in monotonic seconds and returns the actions to take, in order."""

    def __init__(self, counts: SyncCounts | None = None) -> None:
        self.phase = Phase.UNKNOWN
        self.epoch: str | None = None
        self.seq = 0
        """The number of the batch wanted next."""
        self.blocks = 0
        self.digest = 0
        self.counts = SyncCounts() if counts is None else counts
        self.why = "nothing was heard of it yet"
        """Why it is not synced, in words."""
        self._doubted = False
        self._dirty = False
        self._inherited_until: float | None = None
        """Until when what is held counts, though it is of another relay; None: it is not."""
        self._behind = 0
        self._kept: deque[Batch] = deque()
        self._kept_bytes = 0
        self._retired: dict[str, float] = {}
        self._attempt = 0
        self._asked = False
        """Whether a snapshot has been asked for since the copy was last found wanting."""
        self._chunk: SnapshotChunk | None = None
        self._gathered: list[list[Op]] | None = None
        """What has come of a snapshot that is to be applied as a whole."""
        self._due = 0.0
        self._wait_s = MIN_RESYNC_S
        self._patience_s = RETRY_S
        self._asked_at = float("-inf")
        self._spoken_at = float("-inf")

    @property
    def synced(self) -> bool:
        """Whether the copy is complete as far as anything heard so far can tell."""
        return (self.phase is Phase.SYNCED or self._inherited_until is not None) and not self._doubted

    @property
    def inherited(self) -> bool:
        """Whether what counts now is of another relay than the one that is followed."""
        return self._inherited_until is not None

    def inherit(self, now: float) -> None:
        """What was told of this endpoint in another way, and is complete, counts until the bus tells of it."""
        self._dirty = True
        self._inherited_until = now + INHERITED_S

    def batch(self, batch: Batch, now: float) -> list[Action]:
        """One live batch arrived. O(keys in it)."""
        actions: list[Action] = []
        if batch.epoch == self.epoch:
            self._spoken_at = now
        else:
            if self._is_late(batch.epoch, now):
                self.counts.late += 1
                return []
            inherited = self._inherits(batch.epoch)
            self._begin(batch.epoch, now, actions, keeps=inherited)
            if inherited:
                self._resync(Why.RELAY, "another relay tells of it", now, actions)
                return actions
            if batch.seq:
                self._resync(Why.JOINED, "it was joined in the middle of an epoch", now, actions)
                return actions
            self.phase = Phase.SYNCED
        if self.phase is not Phase.SYNCED:
            self._keep(batch)
        elif batch.seq == self.seq:
            self._doubted = False
            self._apply(batch, actions)
        elif batch.seq < self.seq:
            self.counts.duplicates += 1
        else:
            self.counts.gaps += 1
            self._resync(Why.GAP, f"batches {self.seq} to {batch.seq - 1} were lost", now, actions)
        return actions

    def beacon(self, beacon: Beacon, now: float) -> list[Action]:
        """The relay says what a complete copy holds by now. O(1)."""
        actions: list[Action] = []
        if beacon.epoch == self.epoch:
            self._spoken_at = now
        elif self._is_late(beacon.epoch, now):
            self.counts.late += 1
            return []
        else:
            self._begin_with(beacon, now, actions)
        if self.phase is Phase.SYNCED and beacon.seq > self.seq:
            self.counts.gaps += 1
            self._resync(Why.GAP, f"batches {self.seq} to {beacon.seq - 1} were lost", now, actions)
        elif self.phase is Phase.SYNCED and beacon.seq == self.seq:
            if (beacon.blocks, beacon.digest) == (self.blocks, self.digest):
                self._doubted = False
                self._behind = 0
                self._wait_s = MIN_RESYNC_S
            else:
                self.counts.mismatches += 1
                self._resync(Why.DIGEST, f"its digest differs at batch {self.seq}", now, actions)
        elif self.phase is Phase.SYNCED:
            self._behind += 1
            if self._behind == MOST_BEHIND:
                self.counts.mismatches += 1
                reason = f"its relay has got to batch {beacon.seq} only, and batches to {self.seq - 1} were heard"
                self._resync(Why.BEHIND, reason, now, actions)
        return actions

    def chunk(self, chunk: SnapshotChunk, attempt: int, now: float) -> list[Action]:
        """A piece of the snapshot asked for by `attempt` arrived. O(keys in it)."""
        actions: list[Action] = []
        if self.phase is not Phase.SYNCING or attempt != self._attempt:
            self.counts.late += 1
            return actions
        if not self._follows(chunk):
            self._attempt += 1  # what else comes of it is late; a new one is asked for when this one counts as lost
            self._chunk = None
            return actions
        if chunk.chunk == 0:
            if chunk.epoch != self.epoch:
                self._begin(chunk.epoch, now, actions)
                self._attempt = attempt
            self._gathered = [] if self.inherited and chunk.chunks <= AT_ONCE else None
            if self._gathered is None:
                self._replace(actions)
        self._due = now + self._patience_s
        self._chunk = chunk
        last = chunk.chunk == chunk.chunks - 1
        if self._gathered is None:
            self._take(chunk.ops, actions)
        else:
            self._gathered.append(chunk.ops)
            if last:
                self._replace(actions)
                for ops in self._gathered:
                    self._take(ops, actions)
                self._gathered = None
        if last:
            self._complete(chunk.seq, now, actions)
        return actions

    def tick(self, now: float) -> list[Action]:
        """To be called about ten times a second: asks for a snapshot when one is due, again when one got lost."""
        actions: list[Action] = []
        if self._inherited_until is not None and now >= self._inherited_until:
            self._inherited_until = None
            self._clear(actions)
        if self.phase is not Phase.SYNCED and now >= self._due:
            if self._asked and self._asked_at + RETRY_S <= now:
                self._count(Why.UNANSWERED)
                self._patience_s = min(2 * self._patience_s, MAX_RETRY_S)
            elif self.phase is Phase.UNKNOWN:
                self._count(Why.JOINED)
            self._request(now, actions)
        return actions

    def doubt(self) -> None:
        """The bus was lost: what we hold may be old until a beacon or the next batch agrees with it."""
        self._doubted = True
        self._due = 0.0

    def _is_late(self, epoch: str, now: float) -> bool:
        if self.epoch is None:
            return False
        life, number = epoch_parts(epoch)
        current, current_number = epoch_parts(self.epoch)
        if life == current:
            return number < current_number and now - self._spoken_at < RETIRED_S
        return now < self._retired.get(life, now)

    def _begin_with(self, beacon: Beacon, now: float, actions: list[Action]) -> None:
        """The first that is heard of an epoch is what a complete copy of it holds."""
        empty = beacon.seq == beacon.blocks == 0
        inherited = not empty and self._inherits(beacon.epoch)
        same = inherited and self.phase is Phase.SYNCED and (beacon.blocks, beacon.digest) == (self.blocks, self.digest)
        self._begin(beacon.epoch, now, actions, keeps=inherited)
        if same:
            self.phase, self.seq, self._inherited_until = Phase.SYNCED, beacon.seq, None
        elif inherited:
            self._resync(Why.RELAY, "another relay tells of it, and has something else", now, actions)
        elif empty:
            self.phase = Phase.SYNCED
        else:
            self._resync(Why.JOINED, "it was joined in the middle of an epoch", now, actions)

    def _inherits(self, epoch: str) -> bool:
        """Whether what is held is complete, and of this engine's cache as another relay than this epoch's saw it."""
        return self.synced and (self.epoch is None or epoch_parts(self.epoch)[0] != epoch_parts(epoch)[0])

    def _begin(self, epoch: str, now: float, actions: list[Action], *, keeps: bool = False) -> None:
        """Forget the epoch before: whatever was known of it is dropped at once, or, if it `keeps` that, once there is better."""
        if self.epoch is not None:
            life, old = epoch_parts(epoch)[0], epoch_parts(self.epoch)[0]
            self._retired = {name: until for name, until in self._retired.items() if now < until and name != life}
            if old != life:
                self._retired[old] = now + RETIRED_S
        self.counts.epochs += 1
        self.epoch = epoch
        self._spoken_at = now
        self._attempt += 1  # a snapshot asked for in another epoch is of another epoch
        self._kept.clear()
        self._kept_bytes = 0
        self._chunk = None
        self._doubted = False
        self.seq = 0
        if keeps:
            self._inherited_until = now + INHERITED_S
        else:
            self._inherited_until = None
            self._clear(actions)

    def _count(self, why: Why) -> None:
        self.counts.resyncs[why.value] = self.counts.resyncs.get(why.value, 0) + 1

    def _resync(self, kind: Why, why: str, now: float, actions: list[Action]) -> None:
        if kind is not Why.JOINED or self.phase is not Phase.SYNCING:
            self._count(kind)
        self.phase = Phase.SYNCING
        self._asked = False
        self.why = why
        self._behind = 0
        self._chunk = None
        self._due = self._asked_at + self._wait_s
        if now >= self._due:
            self._request(now, actions)

    def _request(self, now: float, actions: list[Action]) -> None:
        self.phase = Phase.SYNCING
        self._asked = True
        self._chunk = None
        self._attempt += 1
        self._kept.clear()  # what was heard before the request is in its answer
        self._kept_bytes = 0
        self._asked_at = now
        self._due = now + self._patience_s
        self._wait_s = min(2 * self._wait_s, MAX_RESYNC_S)
        self.counts.requests += 1
        actions.append(RequestSnapshot(self._attempt))

    def _replace(self, actions: list[Action]) -> None:
        """What is held makes place for the snapshot."""
        self._inherited_until = None
        self._clear(actions)

    def _follows(self, chunk: SnapshotChunk) -> bool:
        before = self._chunk
        if not 0 <= chunk.chunk < chunk.chunks or chunk.seq < 0:
            return False
        if before is None:
            return chunk.chunk == 0
        return (chunk.epoch, chunk.seq, chunk.chunks, chunk.chunk) == (before.epoch, before.seq, before.chunks, before.chunk + 1)

    def _complete(self, seq: int, now: float, actions: list[Action]) -> None:
        self.counts.snapshots += 1
        self._patience_s = RETRY_S
        self.phase = Phase.SYNCED
        self._doubted = False
        self._chunk = None
        self.seq = seq
        kept, self._kept, self._kept_bytes = self._kept, deque(), 0
        while kept and kept[0].seq <= self.seq:
            batch = kept.popleft()
            if batch.seq == self.seq:
                self._apply(batch, actions)
        if kept:
            self.counts.gaps += 1
            self._resync(Why.GAP, f"batches {self.seq} to {kept[0].seq - 1} were lost", now, actions)

    def _keep(self, batch: Batch) -> None:
        if self._kept and batch.seq <= self._kept[-1].seq:
            self.counts.duplicates += 1
            return
        self._kept.append(batch)
        self._kept_bytes += _size(batch)
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= _size(self._kept.popleft())

    def _apply(self, batch: Batch, actions: list[Action]) -> None:
        self.seq += 1
        self.counts.batches += 1
        self._take(batch.ops, actions)

    def _take(self, ops: Iterable[Op], actions: list[Action]) -> None:
        taken = list(ops)
        for op in taken:
            match op:
                case Store(tier, keys):
                    self.digest ^= digest_of_all(tier, keys)
                    self.blocks += len(keys) // KEY_BYTES
                case Remove(tier, keys):
                    self.digest ^= digest_of_all(tier, keys)
                    self.blocks -= len(keys) // KEY_BYTES
                case Clear():
                    self.digest = self.blocks = 0
        if taken:
            self._dirty = True
            actions.append(Apply(taken))

    def _clear(self, actions: list[Action]) -> None:
        self.digest = self.blocks = 0
        if self._dirty:
            self._dirty = False
            actions.append(ClearAll())


def _size(batch: Batch) -> int:
    """About what a batch costs to keep."""
    return 256 + sum(64 + len(op.keys) for op in batch.ops if not isinstance(op, Clear))
