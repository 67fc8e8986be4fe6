from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Iterable, Sequence

import pytest

from discovery.digests import digest_of
from discovery.feed import MOST_WAITING_BLOCKS, PIECE_BYTES, Feed, pieces
from discovery.messages import Batch, Beacon, Clear, Op, Remove, Store, StreamMessage
from discovery.signal import LIVE, SignalState
from engines.blocks import block_keys, pack_keys, pack_tokens, root_seed, unpack_keys
from engines.events import Cleared, KvBatch, KvEvent, Removed, Skipped, SkipReason, Stored
from engines.types import Endpoint, Tier


class Sent:
    """A feed and everything it sent."""

    def __init__(self, block_size: int | None = None, *, caught_up: bool = True) -> None:
        numbers = itertools.count()
        self.messages: list[StreamMessage] = []
        self.feed = Feed(Endpoint("http://e:1"), block_size, lambda: f"life.{next(numbers)}", self.messages.append)
        if caught_up:
            self.feed.caught_up()
            self.messages.clear()

    def take(self) -> list[StreamMessage]:
        taken = list(self.messages)
        self.messages.clear()
        return taken

    def batch(self, *events: KvEvent) -> list[StreamMessage]:
        self.feed.batch(KvBatch(0.0, 0, list(events)))
        return self.take()


def stored(name: int, *tokens: int, parent: int | None = None) -> Stored:
    return Stored([name], parent, list(tokens), len(tokens))


def key(*tokens: int) -> int:
    return block_keys(pack_tokens(tokens), len(tokens), root_seed())[0]


def test_batches_are_numbered_within_their_epoch_and_only_those_that_change_something() -> None:
    sent = Sent()
    first = sent.batch(stored(100, 1, 2))
    assert [(message.epoch, message.seq) for message in first] == [("life.0", 0), ("life.0", 1)]
    assert first[0] == Batch("life.0", 0, [Store(Tier.DEVICE, pack_keys([key(1, 2)]))])
    assert isinstance(first[1], Beacon), "the block size is learned, so it is told at once"
    assert sent.batch(stored(100, 1, 2)) == []
    sent.feed.beacon()
    [beacon] = sent.take()
    assert isinstance(beacon, Beacon)
    assert (beacon.seq, beacon.blocks, beacon.digest, beacon.block_size, beacon.quiet) == (1, 1, key(1, 2), 2, 1)


def test_the_first_life_begins_once() -> None:
    sent = Sent()
    sent.feed.restarted("joined")
    assert [message.epoch for message in sent.take()] == ["life.0"]


def test_R34_nothing_is_said_before_what_was_published_before_is_known() -> None:
    sent = Sent(caught_up=False)
    sent.feed.restarted("joined")
    assert sent.batch(stored(100, 1, 2), stored(101, 3, 4)) == sent.batch(Removed([100])) == []
    sent.feed.beacon()
    assert (sent.take(), sent.feed.complete) == ([], False)
    sent.feed.caught_up()
    [beacon] = sent.take()
    assert isinstance(beacon, Beacon)
    assert (beacon.seq, beacon.blocks, beacon.digest, beacon.quiet) == (0, 1, key(3, 4), 2), (
        "an epoch that nobody has from its first batch on"
    )
    assert [(chunk.seq, chunk.ops) for chunk in sent.feed.snapshot()] == [(0, [Store(Tier.DEVICE, pack_keys([key(3, 4)]))])]
    [batch] = sent.batch(Removed([101]))
    assert batch == Batch("life.0", 0, [Remove(Tier.DEVICE, pack_keys([key(3, 4)]))])
    sent.feed.caught_up()
    assert sent.take() == []


def test_a_publisher_that_cannot_be_reached_makes_the_signal_stale_and_takes_nothing_away() -> None:
    sent = Sent(caught_up=False)
    for reason in ("refused", "refused", "no such host"):
        sent.feed.unreachable(reason)
    assert [message.reason for message in sent.take() if isinstance(message, Beacon)] == ["refused", "no such host"]
    sent.feed.caught_up()
    sent.batch(stored(100, 1, 2))
    sent.feed.unreachable("refused")
    [beacon] = sent.take()
    assert isinstance(beacon, Beacon)
    assert (beacon.signal, beacon.blocks) == (SignalState.STALE, 1)
    sent.feed.caught_up()
    assert sent.feed.signal == LIVE


def test_a_restart_is_a_new_epoch_that_holds_nothing() -> None:
    sent = Sent()
    sent.batch(stored(100, 1, 2))
    sent.feed.restarted("the number went back")
    [beacon] = sent.take()
    assert isinstance(beacon, Beacon)
    assert (beacon.epoch, beacon.seq, beacon.blocks, beacon.digest, beacon.quiet) == ("life.1", 0, 0, 0, 0)
    assert sent.feed.counts.restarts == 1


def test_a_loss_is_a_new_epoch_and_partial_until_the_cache_is_known_whole_again() -> None:
    sent = Sent()
    sent.batch(stored(100, 1, 2))
    sent.feed.lost(1, 3)
    [beacon] = sent.take()
    assert isinstance(beacon, Beacon)
    assert (beacon.epoch, beacon.signal, beacon.blocks) == ("life.1", "partial", 0)
    sent.batch(stored(101, 3, 4))
    assert sent.feed.signal.state is SignalState.PARTIAL
    assert [type(message) for message in sent.batch(Cleared())] == [Batch, Beacon]
    assert sent.feed.signal == LIVE


def test_R31_what_may_have_removed_anything_and_cannot_be_read_leaves_nothing_held_and_is_no_silent_loss() -> None:
    for kind in ("BlockRemoved", "AllBlocksCleared", None):
        sent = Sent()
        sent.batch(stored(100, 1, 2))
        for _ in range(3):
            if kind is None:
                sent.feed.undecodable("not_a_batch", 1)
            else:
                sent.batch(Skipped(kind, SkipReason.MALFORMED))
        epochs = {message.epoch for message in sent.take() if isinstance(message, Beacon)}
        assert len(epochs) <= 1, "what holds nothing any more is not forgotten again each time"
        sent.feed.beacon()
        [beacon] = sent.take()
        assert isinstance(beacon, Beacon)
        assert (beacon.epoch, beacon.signal, beacon.blocks) == ("life.1", "partial", 0)
        assert beacon.quiet, "the engine is not taken for a silent one"
        sent.batch(stored(101, 3, 4))
        assert (sent.feed.counts.blocks, sent.feed.signal.state) == (1, SignalState.PARTIAL)
        sent.batch(Cleared())
        assert sent.feed.signal == LIVE


def test_R31_what_cannot_be_read_and_removes_nothing_takes_nothing_away() -> None:
    sent = Sent()
    sent.batch(stored(100, 1, 2))
    sent.feed.undecodable("frames")
    sent.batch(Skipped("BlocksPondered", SkipReason.UNKNOWN_KIND), Skipped("BlockStored", SkipReason.MALFORMED))
    assert (sent.feed.counts.blocks, sent.feed.signal) == (1, LIVE)


def partial(turnover: int | None = None, *, replays: bool = True) -> Sent:
    """A feed that has lost batches, or that cannot ask for any."""
    sent = Sent()
    numbers = itertools.count()
    sent.feed = Feed(
        Endpoint("http://e:1"), None, lambda: f"life.{next(numbers)}", sent.messages.append, replays=replays, turnover=turnover
    )
    sent.feed.restarted("joined")
    sent.feed.caught_up()
    if replays:
        sent.batch(stored(100, 1, 2))
        sent.feed.lost(1, 3)
    sent.take()
    return sent


def test_what_is_told_again_while_it_is_partial_is_gone_with_one_removal() -> None:
    sent = partial()
    for _ in range(3):
        sent.batch(stored(101, 3, 4))
    assert sent.feed.counts.blocks == 1
    sent.batch(Removed([101]))
    assert sent.feed.counts.blocks == 0


def test_copies_are_counted_again_once_it_is_whole() -> None:
    sent = partial()
    sent.batch(Cleared())
    for _ in range(2):
        sent.batch(stored(101, 3, 4))
    sent.batch(Removed([101]))
    assert sent.feed.counts.blocks == 1, "the other copy"


def test_it_is_whole_when_as_many_blocks_have_been_learned_as_the_engine_has() -> None:
    sent = partial(turnover=3)
    for name in (101, 101, 102, 101):
        sent.batch(stored(name, name, 4))
        assert sent.feed.signal.state is SignalState.PARTIAL, "those told again are not learned twice"
    sent.batch(Removed([101]))
    assert sent.feed.signal.state is SignalState.PARTIAL
    messages = sent.batch(stored(103, 5, 6))
    assert isinstance(messages[-1], Beacon)
    assert messages[-1].signal == "live"


def test_without_a_way_to_be_told_again_a_turnover_proves_nothing() -> None:
    sent = partial()
    for name in range(200, 300):
        sent.batch(stored(name, name, 4))
    assert sent.feed.signal.state is SignalState.PARTIAL


def test_an_engine_without_replay_is_partial_until_its_first_batch_is_heard_to_be_the_first() -> None:
    sent = partial(replays=False)
    assert sent.feed.signal.state is SignalState.PARTIAL
    assert "no replay endpoint" in sent.feed.signal.reason
    assert sent.feed.counts.restarts == 0
    sent.batch(stored(100, 1, 2))
    assert sent.feed.signal == LIVE

    late = partial(replays=False)
    late.feed.lost(0, 41)
    late.batch(stored(100, 1, 2))
    assert late.feed.signal.state is SignalState.PARTIAL
    assert "0 to 41" in late.feed.signal.reason


def test_a_mismatch_is_told_with_the_batch_that_shows_it() -> None:
    sent = Sent(block_size=16)
    messages = sent.batch(stored(100, 1, 2))
    assert isinstance(messages[-1], Beacon)
    assert messages[-1].signal == "mismatch"


def test_a_feed_that_failed_is_stale_until_it_is_read_again() -> None:
    sent = Sent()
    sent.batch(stored(100, 1, 2))
    sent.feed.crashed("a bug")
    [beacon] = sent.take()
    assert isinstance(beacon, Beacon)
    assert (beacon.epoch, beacon.signal, beacon.blocks) == ("life.1", "stale", 0)
    sent.feed.restarted("joined")
    assert sent.feed.signal == LIVE


def test_a_snapshot_is_of_the_moment_it_was_asked_for() -> None:
    sent = Sent()
    sent.batch(stored(100, 1, 2))
    snapshot = sent.feed.snapshot()
    sent.batch(stored(101, 3, 4), Removed([100]))
    [chunk] = list(snapshot)
    assert (chunk.epoch, chunk.seq, chunk.chunk, chunk.chunks) == ("life.0", 1, 0, 1)
    assert chunk.ops == [Store(Tier.DEVICE, pack_keys([key(1, 2)]))]


def test_a_snapshot_of_nothing_is_one_empty_chunk() -> None:
    assert [(chunk.chunks, chunk.ops) for chunk in Sent().feed.snapshot()] == [(1, [])]


def test_a_feed_that_was_ended_sends_nothing() -> None:
    sent = Sent()
    sent.feed.end()
    sent.feed.beacon()
    assert sent.batch(stored(100, 1, 2)) == []


@pytest.mark.parametrize("limit", [8, 16, 24, 1000])
def test_pieces_hold_the_same_operations_in_the_same_order(limit: int) -> None:
    ops: list[Op] = [
        Store(Tier.DEVICE, pack_keys(range(7)), [3, 1, 3]),
        Clear(),
        Remove(Tier.HOST, pack_keys(range(3))),
        Store(Tier.HOST, b""),
        Store(Tier.DISK, pack_keys([9])),
    ]
    made = list(pieces(ops, limit))
    assert all(sum(len(op.keys) for op in piece if not isinstance(op, Clear)) <= limit for piece in made)
    assert all(piece for piece in made)
    assert _flat(op for piece in made for op in piece) == _flat(ops)


def test_pieces_are_as_few_as_can_be() -> None:
    whole = Store(Tier.DEVICE, bytes(PIECE_BYTES))
    assert list(pieces([whole])) == [[whole]]
    assert len(list(pieces([whole, whole]))) == 2
    assert list(pieces([])) == []


def _flat(ops: Iterable[Op]) -> list[object]:
    """One entry per key, and one per clear."""
    flat: list[object] = []
    for op in ops:
        match op:
            case Store(tier, keys) | Remove(tier, keys):
                flat.extend((type(op), tier, keys[at : at + 8]) for at in range(0, len(keys), 8))
            case Clear():
                flat.append(Clear)
    return flat


class Waiting(Sent):
    """A feed whose batches wait to be sent."""

    def __init__(self) -> None:
        super().__init__()
        numbers, self.asked = itertools.count(), 0
        self.feed = Feed(Endpoint("http://e:1"), None, lambda: f"life.{next(numbers)}", self.messages.append, waits=self.ask)
        self.feed.caught_up()
        self.batch(stored(100, 1, 2))  # after the first one, the block size is known and told
        self.take()

    def ask(self, feed: Feed) -> None:
        assert feed is self.feed
        self.asked += 1


def test_batches_that_wait_are_sent_as_one() -> None:
    sent = Waiting()
    assert sent.batch(stored(101, 3, 4)) == sent.batch(Removed([100])) == sent.batch(stored(102, 5, 6)) == []
    assert sent.asked == 4
    assert sent.feed.flush()
    keys = [pack_keys([key(*tokens)]) for tokens in ((3, 4), (1, 2), (5, 6))]
    assert sent.take() == [Batch("life.0", 1, [Store(Tier.DEVICE, keys[0]), Remove(Tier.DEVICE, keys[1]), Store(Tier.DEVICE, keys[2])])]
    assert not sent.feed.flush()
    assert sent.take() == []


def test_a_beacon_and_a_snapshot_come_after_what_they_count() -> None:
    sent = Waiting()
    sent.batch(stored(101, 3, 4))
    sent.feed.beacon()
    batch, beacon = sent.take()
    assert isinstance(batch, Batch)
    assert isinstance(beacon, Beacon)
    assert (batch.seq, beacon.seq, beacon.blocks, beacon.digest) == (1, 2, 2, key(1, 2) ^ key(3, 4))
    sent.batch(stored(102, 5, 6))
    [chunk] = sent.feed.snapshot()
    [batch] = sent.take()
    assert isinstance(batch, Batch)
    assert (batch.seq, chunk.seq) == (2, 3)
    assert chunk.ops == [Store(Tier.DEVICE, pack_keys([key(1, 2), key(3, 4), key(5, 6)]), [1, 1, 1])]


def test_what_waits_when_a_new_epoch_begins_is_never_sent() -> None:
    sent = Waiting()
    sent.batch(stored(101, 3, 4))
    sent.feed.restarted("another process")
    [beacon] = sent.take()
    assert isinstance(beacon, Beacon)
    assert (beacon.epoch, beacon.seq, beacon.blocks, beacon.digest) == ("life.1", 0, 0, 0)
    assert not sent.feed.flush()


def test_much_does_not_wait() -> None:
    sent = Waiting()
    blocks = MOST_WAITING_BLOCKS + 1
    [batch] = sent.batch(Stored(list(range(1000, 1000 + blocks)), None, list(range(2 * blocks)), 2))
    assert isinstance(batch, Batch)
    assert not sent.feed.flush()


def test_a_copy_in_this_process_is_told_at_once_and_of_the_rest_as_the_bus_is() -> None:
    told: list[object] = []

    class Told:
        def changed(self, endpoint: Endpoint, changes: Sequence[Op]) -> None:
            told.extend(changes)

        def renewed(self, endpoint: Endpoint) -> None:
            told.append("renewed")

        def told(self, endpoint: Endpoint, beacon: Beacon) -> None:
            told.append(beacon.seq)

    feed = Feed(Endpoint("http://e:1"), None, lambda: "life.0", None, copy=Told())
    feed.caught_up()
    assert told.pop() == 0
    feed.batch(KvBatch(0.0, 0, [stored(100, 1, 2), stored(101, 3, 4)]))
    feed.batch(KvBatch(0.0, 0, [Removed([100])]))
    feed.lost(2, 3)
    feed.end()
    feed.batch(KvBatch(0.0, 0, [stored(100, 1, 2)]))
    assert told == [
        Store(Tier.DEVICE, pack_keys([key(1, 2), key(3, 4)]), [1, 1]),
        0,
        Remove(Tier.DEVICE, pack_keys([key(1, 2)])),
        "renewed",
        0,
    ]


def test_the_digest_of_a_beacon_is_that_of_all_that_is_held() -> None:
    sent, rng = Sent(), random.Random(5)
    for step in range(300):
        tier, name = rng.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST]), rng.randrange(40)
        event: KvEvent = Stored([name], None, [name, name], 2, tier) if rng.random() < 0.6 else Removed([name], tier)
        sent.batch(Cleared() if step == 150 else event)
        sent.feed.beacon()
        beacon = sent.take()[-1]
        assert isinstance(beacon, Beacon)
        pairs = [digest_of(key, store.tier) for piece in sent.feed.held() for store in [piece()] for key in unpack_keys(store.keys)]
        assert (beacon.blocks, beacon.digest) == (len(pairs), functools.reduce(operator.xor, pairs, 0))


def test_how_late_events_are_is_told_of_those_that_come_live_and_not_of_a_replay() -> None:
    feed = Feed(Endpoint("http://e:1"), None, lambda: "life.0", None, wall=lambda: 1000.0)
    feed.batch(KvBatch(10.0, 0, [stored(100, 1, 2)]))
    assert feed.counts.lag_s == 0.0
    feed.caught_up()
    feed.batch(KvBatch(999.5, 0, [stored(101, 3, 4)]))
    assert feed.counts.lag_s == 0.5
    feed.batch(KvBatch(20.0, 0, [stored(102, 5, 6)]))
    feed.caught_up()
    assert feed.counts.lag_s == 0.0, "what came on a new connection before it had caught up was a replay's"
