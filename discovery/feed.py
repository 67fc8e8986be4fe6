"""How does one rank's KV event stream become a numbered stream on the bus?

A `Feed` is what `KvSubscriber` tells (its sink), and what the relay publishes from. It has no task and no socket: each event changes
its state and is sent on in the same call, so that a snapshot taken between two calls is exact at the next batch's number.

    restarted ─▶ new epoch, beacon          batch ─▶ translate ─▶ Batch seq, seq+1, …         lost ─▶ clear, new epoch, `partial`
                                                         └──▶ a copy in this process, at once and without numbers

It is `partial` until nothing can be left of what the engine held unknown to us: its cache was cleared, or, where the engine can be had to
tell again what it finds cached, as many blocks have been learned as it has, for it gives up the longest unused first.

What goes on the bus may wait a moment for more, so that a busy engine costs a message for several of its own. Whatever tells the position
(a beacon, a snapshot) sends what waits first, so what was sent and what is held are always the same there.

Until what the engine published before has been read, nothing is said: a copy of half of it is no copy, and where another relay has told of
the engine so far, copies keep what they have from it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from discovery.digests import digest_of_all
from discovery.logs import event
from discovery.messages import Batch, Beacon, Clear, Op, Remove, SnapshotChunk, Store, StreamMessage
from discovery.signal import LIVE, Signal, SignalState
from discovery.translate import Translator
from engines.blocks import KEY_BYTES
from engines.events import Cleared, KvBatch, KvEvent, Skipped, SkipReason
from engines.types import Endpoint, Tier

MOST_WAITING_BLOCKS = 4096
"""Changes of so many blocks do not wait for more."""
PIECE_BYTES = 64 * 1024
"""Keys in one message: a sixteenth of NATS' own limit, and what a mirror applies in about 4 ms without letting anything else run."""

UNHEARD = "what it published before cannot be asked for (it has no replay endpoint); what it holds is learned as it is used"
UNREAD = "an event that may have removed blocks could not be read; what the engine holds is learned again as it is used"

_log = logging.getLogger(__name__)


class FeedCounts(msgspec.Struct):
    """Plain numbers for the metrics page; but for the last two, they never go back."""

    batches: int = 0
    """Of events, as the engine published them."""
    gaps: int = 0
    """Times that a batch was not the next."""
    replays: int = 0
    """Questions to the engine's replay socket."""
    unanswered: int = 0
    """Of them, those that were not answered, or not to the end."""
    replayed: int = 0
    """Batches that came from there."""
    connects: int = 0
    """Connections to the engine's publisher."""
    stored: int = 0
    removed: int = 0
    restarts: int = 0
    losses: int = 0
    """Times that batches could not be had again."""
    lost: int = 0
    """Batches that could not."""
    crashes: int = 0
    """Times that following it failed in a way nobody foresaw."""
    undecodable: dict[str, int] = msgspec.field(default_factory=dict)
    skipped: dict[str, int] = msgspec.field(default_factory=dict)
    orphans: int = 0
    """Blocks stored under a parent not known, since all was last cleared."""
    blocks: int = 0
    """Held now."""
    lag_s: float = 0.0
    """From the latest batch's being made to its being read, by the clocks of both; 0 before the first one that is no replay."""


class FeedCopy(Protocol):
    """A copy in this process of what feeds tell. Its methods are called in the order things happen, and must not block."""

    def changed(self, endpoint: Endpoint, changes: Sequence[Op]) -> None:
        """These are the next changes of what is held there."""
        ...

    def renewed(self, endpoint: Endpoint) -> None:
        """Nothing is known to be held there any more."""
        ...

    def told(self, endpoint: Endpoint, beacon: Beacon) -> None:
        """What the bus is told as well."""
        ...


class Feed:
    """One endpoint's stream in this relay's life."""

    def __init__(  # noqa: PLR0913  what is known of the engine, and who is told
        self,
        endpoint: Endpoint,
        block_size: int | None,
        next_epoch: Callable[[], str],
        send: Callable[[StreamMessage], None] | None,
        *,
        waits: Callable[[Feed], None] | None = None,
        give_up: Callable[[Iterable[dict[Any, Any]]], None] | None = None,
        copy: FeedCopy | None = None,
        replays: bool = True,
        turnover: int | None = None,
        wall: Callable[[], float] = time.time,  # noqa: TID251  what an engine stamps its batches with
    ) -> None:
        """`block_size` is the configured one, if any. Nothing is sent before the first call, and nothing ever without a `send`.

        `replays`: what was published before can be asked for. `turnover`: after so many blocks, the engine has none left that it stored
        before and has not told since; None where it may keep one for ever without a word.

        `waits` is called when there is something to send, and `flush` has to follow soon; without it, all is sent at once. `give_up` frees
        what was held and is not any more.
        """
        self.endpoint = endpoint
        self._translator = Translator(block_size)
        self._next_epoch = next_epoch
        self._send = send
        self._waits = waits
        self._give_up = give_up
        self._copy = copy
        self._digest = 0
        """Of what has been sent in this epoch."""
        self._waiting: list[Op] = []
        self._waiting_blocks = 0
        self._epoch = next_epoch()
        self._seq = 0
        self._heard = self._quiet = 0
        self._caught_up = False
        self._wall = wall
        self._replays = replays
        self._turnover = turnover
        self._learned = 0
        """Blocks on the device that became known since it is partial."""
        self._partial = ""
        self._unheard = False
        """It is partial only because nobody knows what was published before the first batch."""
        self._down = ""
        self._shown: tuple[Signal, int | None] = (LIVE, None)
        self._counts = FeedCounts()
        self._undecodable: Counter[str] = Counter()

    @property
    def batches(self) -> int:
        """Of events, so far."""
        return self._counts.batches

    @property
    def complete(self) -> bool:
        """Whether what was published before we listened has been read, as far as it can be had: nothing is said before."""
        return self._caught_up

    @property
    def signal(self) -> Signal:
        """How far its events can be believed, as seen from here."""
        if self._down:
            return Signal(SignalState.STALE, self._down)
        if mismatch := self._translator.mismatch:
            return Signal(SignalState.MISMATCH, mismatch)
        if self._partial:
            return Signal(SignalState.PARTIAL, self._partial)
        return LIVE

    @property
    def counts(self) -> FeedCounts:
        """What happened so far."""
        return msgspec.structs.replace(
            self._counts,
            undecodable=dict(self._undecodable),
            skipped=dict(self._translator.skipped),
            orphans=self._translator.orphans,
            blocks=self._translator.blocks,
        )

    def restarted(self, reason: str) -> None:
        """Another life of the engine's cache: nothing known of it holds any more."""
        self._down = ""
        if self._heard or (self._partial and not self._unheard):
            event(
                _log, logging.INFO, "KV cache began anew", endpoint=str(self.endpoint), reason=reason, blocks_before=self._translator.blocks
            )
            self._counts.restarts += 1
            self._renew()
        self._become_partial("" if self._replays else UNHEARD)
        self._unheard = not self._replays
        self.beacon()

    def batch(self, batch: KvBatch) -> None:
        """Events in order; sent on when they change what is held."""
        if self._unheard:  # nothing before it was said to be lost: it is the first there ever was
            self._become_partial("")
        self._heard += 1
        self._counts.batches += 1
        if self._caught_up:
            self._counts.lag_s = self._wall() - batch.ts
        changes = self._translator.apply(batch.events)
        self._tidy()
        if changes:
            self._changed(changes)
        else:
            self._quiet += 1
        if self._partial:
            cleared = any(isinstance(happened, Cleared) for happened in batch.events)
            if cleared or (self._turnover is not None and self._learned >= self._turnover):
                self._become_partial("")  # what we did not know of is gone as well
        if any(map(_may_have_removed, batch.events)):
            self._distrust()
        if (self.signal, self._translator.block_size) != self._shown:
            self.beacon()

    def lost(self, first: int, last: int) -> None:
        """Batches that cannot be had any more: what is known may be wrong, so none of it is kept."""
        event(_log, logging.WARNING, "KV events lost; endpoint cleared", endpoint=str(self.endpoint), first=first, last=last)
        self._counts.losses += 1
        self._counts.lost += last - first + 1
        self._become_partial(
            f"batches {first} to {last} could not be replayed; what the engine stored before is learned again as it is used"
        )
        self._renew()
        self.beacon()

    def undecodable(self, kind: str, seq: int | None = None) -> None:
        """A message that could not be read; with a `seq`, it was a batch, and may have removed anything."""
        self._undecodable[kind] += 1
        if seq is not None:
            self._heard += 1
            self._quiet += 1
            self._distrust()

    def caught_up(self) -> None:
        """What the engine published before has been read, or is not to be had: from now on, all is told."""
        self._counts.lag_s = 0.0  # what a replay brought is old, and no sign of a slow path
        if self._caught_up and not self._down:
            return
        self._begin_to_tell()
        self._down = ""
        self.beacon()

    def unreachable(self, reason: str) -> None:
        """There is nobody to listen to; what is held is kept, for the engine may be there again as it was."""
        if self._caught_up and self._down == reason:
            return
        self._begin_to_tell()
        self._down = reason
        self.beacon()

    def crashed(self, reason: str) -> None:
        """Following it failed; it is tried again, and begins with `restarted`."""
        self._counts.crashes += 1
        self._begin_to_tell()
        self._down = reason
        self._renew()
        self.beacon()

    def beacon(self) -> None:
        """Say what a complete copy holds by now; before it is complete, nothing."""
        self.flush()
        if not self._caught_up:
            return
        translator, signal = self._translator, self.signal
        self._shown = (signal, translator.block_size)
        beacon = Beacon(
            epoch=self._epoch,
            seq=self._seq,
            blocks=translator.blocks,
            digest=self._digest,
            block_size=translator.block_size,
            signal=signal.state.value,
            reason=signal.reason,
            quiet=self._quiet,
        )
        if self._send is not None:
            self._send(beacon)
        if self._copy is not None:
            self._copy.told(self.endpoint, beacon)

    def flush(self) -> int:
        """What waits to be sent is sent, and before all is told left out: a snapshot will have it. How many blocks were sent."""
        if self._send is None or not self._waiting:
            return 0
        ops, self._waiting, blocks, self._waiting_blocks = self._waiting, [], self._waiting_blocks, 0
        for op in ops:
            self._digest = 0 if isinstance(op, Clear) else self._digest ^ digest_of_all(op.tier, op.keys)
        if not self._caught_up:
            return 0
        for piece in pieces(ops):
            self._send(Batch(self._epoch, self._seq, piece))
            self._seq += 1
        return max(1, blocks)

    def end(self) -> None:
        """Nothing is sent or told any more, whatever its subscriber still has in hand."""
        self._send = None
        self._copy = None
        self._translator.clear()
        self._tidy()

    def held(self) -> list[Callable[[], Store]]:
        """What makes an empty copy equal to what is held at this moment, in pieces to be made one after the other, however late.

        O(blocks) now, at some 20 ns each, then O(1) a piece.
        """
        step = PIECE_BYTES // KEY_BYTES
        return [
            functools.partial(held.stored, start, start + step)
            for held in self._translator.held()
            for start in range(0, len(held.keys), step)
        ]

    def snapshot(self) -> Iterator[SnapshotChunk]:
        """Everything held at this moment, however late the iterator is run. As `held`."""
        self.flush()
        epoch, seq, pieces = self._epoch, self._seq, self.held()
        if not pieces:
            return iter([SnapshotChunk(epoch, seq, 0, 1, [])])
        return (SnapshotChunk(epoch, seq, number, len(pieces), [piece()]) for number, piece in enumerate(pieces))

    def _changed(self, changes: list[Op]) -> None:
        blocks = 0
        for change in changes:
            if isinstance(change, Clear):
                continue
            count = len(change.keys) // KEY_BYTES
            blocks += count
            if isinstance(change, Remove):
                self._counts.removed += count
            else:
                self._counts.stored += count
                self._learned += count if change.tier is Tier.DEVICE else 0
        if self._copy is not None:
            self._copy.changed(self.endpoint, changes)
        if self._send is None:
            return
        self._waiting += changes
        self._waiting_blocks += blocks
        if self._waits is None or self._waiting_blocks > MOST_WAITING_BLOCKS:
            self.flush()
        else:
            self._waits(self)

    def _tidy(self) -> None:
        if self._translator.remains:
            if self._give_up is not None:
                self._give_up(self._translator.remains)
            self._translator.remains = []

    def _begin_to_tell(self) -> None:
        if not self._caught_up:
            self.flush()  # what of it still waits is left out like the rest
            self._caught_up, self._quiet = True, self._heard

    def _distrust(self) -> None:
        """The engine removed what it could not be understood to remove: nothing is certain to be held any more."""
        if self._partial != UNREAD:
            event(_log, logging.WARNING, "KV events could not be read; endpoint cleared", endpoint=str(self.endpoint), reason=UNREAD)
        self._become_partial(UNREAD)
        if self._translator.blocks:
            self._renew()
            self._heard = self._quiet = 1  # an engine that is not understood is not silent
            self.beacon()

    def _become_partial(self, why: str) -> None:
        """Or, with an empty `why`, whole."""
        self._partial = why
        self._unheard = False
        self._learned = 0
        self._translator.told_again = bool(why)

    def _renew(self) -> None:
        self._translator.clear()
        self._tidy()
        self._waiting.clear()
        self._waiting_blocks = 0
        self._epoch = self._next_epoch()
        self._seq = self._digest = 0
        self._heard = self._quiet = 0
        if self._copy is not None:
            self._copy.renewed(self.endpoint)


def _may_have_removed(event: KvEvent) -> bool:
    """Whether it was about blocks that are held no more, without our knowing which."""
    return isinstance(event, Skipped) and event.reason is SkipReason.MALFORMED and event.kind in ("BlockRemoved", "AllBlocksCleared")


def pieces(ops: Iterable[Op], limit: int = PIECE_BYTES) -> Iterator[list[Op]]:
    """The same operations in the same order, in lists of at most `limit` bytes of keys; none when there are none."""
    piece: list[Op] = []
    size = 0
    for op in ops:
        if isinstance(op, Clear):
            piece.append(op)
            continue
        start = 0
        while start < len(op.keys):
            if size >= limit:
                yield piece
                piece, size = [], 0
            end = min(len(op.keys), start + limit - size)
            piece.append(op if end - start == len(op.keys) else op.part(start, end))
            size += end - start
            start = end
    if piece:
        yield piece
