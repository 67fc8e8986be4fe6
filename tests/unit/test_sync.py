from __future__ import annotations

import functools
import itertools
import operator
import random

import pytest

from discovery.digests import digest_of, digest_of_all, xor_of
from discovery.messages import Batch, Beacon, Clear, Op, Remove, SnapshotChunk, Store
from discovery.sync import (
    AT_ONCE,
    INHERITED_S,
    RETIRED_S,
    RETRY_S,
    Action,
    Apply,
    ClearAll,
    Phase,
    RequestSnapshot,
    StreamSync,
    epoch_parts,
)
from engines.blocks import pack_keys
from engines.types import Tier

A0, A1, B0 = "a.0", "a.1", "b.0"


def store(*keys: int, tier: Tier = Tier.DEVICE) -> Store:
    return Store(tier, pack_keys(keys))


def remove(*keys: int, tier: Tier = Tier.DEVICE) -> Remove:
    return Remove(tier, pack_keys(keys))


def batch(seq: int, *ops: Op, epoch: str = A0) -> Batch:
    return Batch(epoch, seq, list(ops))


def beacon(seq: int, *held: int, epoch: str = A0, blocks: int | None = None) -> Beacon:
    digest = functools.reduce(operator.xor, held, 0)
    return Beacon(epoch, seq, len(held) if blocks is None else blocks, digest, 16, "live", "")


def chunk(seq: int, number: int, of: int, *ops: Op, epoch: str = A0) -> SnapshotChunk:
    return SnapshotChunk(epoch, seq, number, of, list(ops))


def synced_to(*keys: int) -> StreamSync:
    """A copy that has applied batch 0, which stored `keys`."""
    sync = StreamSync()
    assert sync.batch(batch(0, store(*keys)), 0.0) == [Apply([store(*keys)])]
    return sync


def attempt_of(actions: list[Action]) -> int:
    [request] = [action for action in actions if isinstance(action, RequestSnapshot)]
    return request.attempt


def asks(actions: list[Action]) -> bool:
    return [type(action) for action in actions] == [RequestSnapshot]


def test_a_stream_heard_from_its_first_batch_needs_no_snapshot() -> None:
    sync = StreamSync()
    assert sync.batch(batch(0, store(1, 2)), 0.0) == [Apply([store(1, 2)])]
    assert sync.batch(batch(1, remove(2)), 0.0) == [Apply([remove(2)])]
    assert sync.synced
    assert (sync.seq, sync.blocks, sync.digest) == (2, 1, 1)


def test_a_beacon_of_an_empty_stream_is_a_complete_copy_of_nothing() -> None:
    sync = StreamSync()
    assert sync.beacon(beacon(0), 0.0) == []
    assert sync.synced


def test_a_copy_nobody_has_spoken_of_asks_by_itself() -> None:
    sync = StreamSync()
    assert not sync.synced
    assert sync.tick(100.0) == [RequestSnapshot(1)]
    assert sync.tick(100.1) == []


@pytest.mark.parametrize("first", [batch(3, store(9)), beacon(3, 1, 2)])
def test_R34_one_who_joins_late_asks_at_once(first: Batch | Beacon) -> None:
    sync = StreamSync()
    actions = sync.batch(first, 0.0) if isinstance(first, Batch) else sync.beacon(first, 0.0)
    assert asks(actions)
    assert not sync.synced


def test_R34_a_snapshot_and_the_batches_kept_meanwhile_make_a_complete_copy() -> None:
    sync = StreamSync()
    attempt = attempt_of(sync.batch(batch(3, store(9)), 0.0))
    assert sync.batch(batch(4, store(10)), 0.0) == []
    assert sync.batch(batch(5, store(11)), 0.0) == []
    assert sync.chunk(chunk(4, 0, 2, store(1)), attempt, 0.1) == [Apply([store(1)])]
    half = sync.synced
    assert not half, "half a snapshot is not a copy"
    assert sync.chunk(chunk(4, 1, 2, store(9)), attempt, 0.2) == [Apply([store(9)]), Apply([store(10)]), Apply([store(11)])]
    assert sync.synced
    assert (sync.seq, sync.blocks, sync.digest) == (6, 4, 1 ^ 9 ^ 10 ^ 11)


def test_a_duplicate_is_dropped() -> None:
    sync = synced_to(1)
    assert sync.batch(batch(0, store(1)), 0.0) == []
    assert (sync.counts.duplicates, sync.blocks, sync.synced) == (1, 1, True)


def test_a_gap_stops_the_copy_until_a_snapshot_has_replaced_it() -> None:
    sync = synced_to(1)
    attempt = attempt_of(sync.batch(batch(2, store(3)), 1.0))
    assert "batches 1 to 1" in sync.why
    assert sync.chunk(chunk(3, 0, 1, store(1, 2, 3)), attempt, 1.1) == [ClearAll(), Apply([store(1, 2, 3)])]
    assert sync.synced
    assert sync.counts.gaps == 1


def test_a_loss_at_the_end_is_shown_by_the_next_beacon() -> None:
    sync = synced_to(1)
    assert asks(sync.beacon(beacon(2, 1, 2), 1.0))


def test_a_digest_that_differs_is_a_resync() -> None:
    sync = synced_to(1)
    assert sync.beacon(beacon(1, 1), 1.0) == []
    assert sync.synced
    assert asks(sync.beacon(beacon(1, 2), 2.0))
    assert sync.counts.mismatches == 1
    assert "digest" in sync.why


def test_a_block_count_that_differs_is_one_too_since_equal_keys_cancel_out() -> None:
    sync = synced_to(1)
    assert asks(sync.beacon(beacon(1, 1, blocks=3), 2.0))


def test_a_beacon_from_before_batches_already_applied_says_nothing() -> None:
    sync = synced_to(1)
    sync.batch(batch(1, store(2)), 0.0)
    assert sync.beacon(beacon(1, 1), 1.0) == []
    assert sync.synced


def test_the_digest_tells_tiers_apart() -> None:
    sync = StreamSync()
    sync.batch(batch(0, store(1), store(2, 3, tier=Tier.HOST)), 0.0)
    assert sync.digest == 1 ^ digest_of(2, Tier.HOST) ^ digest_of(3, Tier.HOST)
    sync.batch(batch(1, Clear()), 0.0)
    assert (sync.digest, sync.blocks) == (0, 0)


def test_R7_a_new_epoch_drops_everything_at_once() -> None:
    sync = synced_to(1)
    assert sync.batch(batch(0, store(7), epoch=A1), 1.0) == [ClearAll(), Apply([store(7)])]
    assert sync.synced
    assert sync.digest == 7


def test_R7_a_new_epoch_is_known_from_its_beacon_alone() -> None:
    sync = synced_to(1)
    assert sync.beacon(beacon(0, epoch=A1), 1.0) == [ClearAll()]
    assert sync.synced


def test_R7_late_messages_of_a_dead_epoch_are_discarded() -> None:
    sync = synced_to(1)
    sync.beacon(beacon(0, epoch=A1), 1.0)
    assert sync.batch(batch(1, store(2), epoch=A0), 1.1) == []
    assert sync.beacon(beacon(9, 1, epoch=A0), 1.1) == []
    assert (sync.epoch, sync.blocks, sync.synced, sync.counts.late) == (A1, 0, True, 2)


def test_late_messages_of_a_replaced_relay_are_discarded_while_they_may_still_come() -> None:
    sync = synced_to(1)
    assert sync.beacon(beacon(0, epoch=B0), 1.0) == [ClearAll()]
    assert sync.batch(batch(0, store(5), epoch=B0), 1.0) == [Apply([store(5)])]
    assert sync.batch(batch(1, store(2), epoch=A0), 1.1) == []
    assert sync.epoch == B0
    assert sync.beacon(beacon(0, epoch=A1), 1.0 + RETIRED_S) == [ClearAll()], "by then it is alive"


def test_R34_what_another_relay_told_counts_until_the_one_that_takes_over_has_told_all() -> None:
    sync = synced_to(1, 2)
    [request] = sync.beacon(beacon(0, 1, 3, epoch=B0), 5.0)
    assert isinstance(request, RequestSnapshot)
    assert (sync.synced, sync.inherited, sync.blocks) == (True, True, 2)
    assert sync.batch(batch(0, remove(3), epoch=B0), 5.0) == [], "kept until the snapshot is there"
    assert sync.chunk(chunk(0, 0, 2, store(1), epoch=B0), request.attempt, 5.1) == []
    assert (sync.synced, sync.inherited, sync.blocks) == (True, True, 2)
    whole = sync.chunk(chunk(0, 1, 2, store(3), epoch=B0), request.attempt, 5.1)
    assert whole == [ClearAll(), Apply([store(1)]), Apply([store(3)]), Apply([remove(3)])]
    assert (sync.synced, sync.inherited, sync.blocks, sync.counts.resyncs) == (True, False, 1, {"relay": 1})


def test_a_large_snapshot_takes_the_place_of_an_inherited_copy_as_it_comes() -> None:
    sync, of = synced_to(1, 2), AT_ONCE + 1
    [request] = sync.beacon(beacon(0, 1, 3, epoch=B0), 5.0)
    assert isinstance(request, RequestSnapshot)
    assert sync.chunk(chunk(0, 0, of, store(1), epoch=B0), request.attempt, 5.1) == [ClearAll(), Apply([store(1)])]
    assert not sync.synced
    for number in range(1, of):
        assert sync.chunk(chunk(0, number, of, store(2 + number), epoch=B0), request.attempt, 5.1) == [Apply([store(2 + number)])]
    assert (sync.synced, sync.blocks) == (True, of)


def test_of_a_snapshot_that_breaks_off_nothing_takes_the_place_of_an_inherited_copy() -> None:
    sync = synced_to(1, 2)
    [request] = sync.beacon(beacon(0, 1, 3, epoch=B0), 5.0)
    assert isinstance(request, RequestSnapshot)
    assert sync.chunk(chunk(0, 0, 3, store(1), epoch=B0), request.attempt, 5.1) == []
    assert sync.chunk(chunk(0, 2, 3, store(3), epoch=B0), request.attempt, 5.1) == []
    attempt = attempt_of(sync.tick(5.1 + RETRY_S))
    assert (sync.synced, sync.inherited, sync.blocks) == (True, True, 2)
    assert sync.chunk(chunk(0, 0, 1, store(3), epoch=B0), attempt, 7.2) == [ClearAll(), Apply([store(3)])]
    assert (sync.synced, sync.inherited, sync.blocks) == (True, False, 1)


def test_R34_who_takes_over_and_has_the_same_needs_to_say_no_more() -> None:
    sync = synced_to(1, 2)
    assert sync.beacon(beacon(0, 2, 1, epoch=B0), 5.0) == []
    assert (sync.synced, sync.inherited, sync.epoch) == (True, False, B0)
    assert sync.batch(batch(0, store(3), epoch=B0), 5.1) == [Apply([store(3)])]
    assert sync.counts.resyncs == {}


def test_a_batch_of_another_relay_alone_does_not_say_what_it_has() -> None:
    sync = synced_to(1, 2)
    assert asks(sync.batch(batch(0, store(3), epoch=B0), 5.0))
    assert (sync.inherited, sync.blocks) == (True, 2)


def test_what_another_relay_told_does_not_count_for_ever() -> None:
    sync = synced_to(1, 2)
    sync.beacon(beacon(0, 1, 3, epoch=B0), 5.0)
    assert ClearAll() not in sync.tick(5.0 + INHERITED_S - 0.1)
    assert ClearAll() in sync.tick(5.0 + INHERITED_S)
    assert not sync.synced


def test_a_copy_that_was_told_in_another_way_is_inherited_by_the_bus() -> None:
    sync = StreamSync()
    sync.inherit(0.0)
    assert sync.synced
    [request] = sync.beacon(beacon(4, 1, epoch=A0), 0.1)
    assert isinstance(request, RequestSnapshot)
    assert sync.chunk(chunk(4, 0, 1, store(1)), request.attempt, 0.2) == [ClearAll(), Apply([store(1)])]
    assert (sync.synced, sync.inherited, sync.blocks) == (True, False, 1)


def test_each_resync_is_counted_once_by_its_reason() -> None:
    sync = StreamSync()
    sync.tick(0.0)
    attempt = attempt_of(sync.beacon(beacon(1, 1), 0.1))
    sync.chunk(chunk(1, 0, 1, store(1)), attempt, 1.0)
    sync.batch(batch(3, store(9)), 2.0)
    assert sync.counts.resyncs == {"joined": 1, "gap": 1}
    sync.tick(2.5)
    attempt = attempt_of(sync.tick(2.0 + RETRY_S))
    assert sync.counts.resyncs == {"joined": 1, "gap": 1, "unanswered": 1}
    sync.chunk(chunk(4, 0, 1, store(1, 9)), attempt, 4.0)
    sync.beacon(beacon(4, 1), 5.0)
    assert sync.counts.resyncs == {"joined": 1, "gap": 1, "unanswered": 1, "digest": 1}


def test_a_relay_taken_for_dead_is_believed_when_it_answers_what_was_asked_since() -> None:
    sync = synced_to(1)
    attempt = attempt_of(sync.beacon(beacon(4, 1, 2, epoch="forged"), 1.0))
    assert sync.chunk(chunk(1, 0, 1, store(1)), attempt, 1.1) == [ClearAll(), Apply([store(1)])]
    assert (sync.epoch, sync.synced) == (A0, True)


def test_an_epoch_in_a_false_name_that_nothing_follows_ends_when_it_has_been_silent_long_enough() -> None:
    sync = synced_to(1)
    assert sync.beacon(beacon(0, epoch="a.9"), 1.0) == [ClearAll()]
    assert sync.beacon(beacon(1, 1), 1.0 + RETIRED_S - 0.1) == []
    assert asks(sync.beacon(beacon(1, 1), 1.0 + RETIRED_S))
    assert sync.epoch == A0


def test_batches_kept_for_a_dead_epoch_are_dropped_with_it() -> None:
    sync = StreamSync()
    sync.batch(batch(3, store(9)), 0.0)
    attempt = attempt_of(sync.beacon(beacon(2, 5, 6, epoch=A1), 1.0))
    assert sync.chunk(chunk(2, 0, 1, store(5, 6), epoch=A1), attempt, 1.1) == [Apply([store(5, 6)])]
    assert (sync.blocks, sync.synced) == (2, True)


def test_a_new_epoch_in_the_middle_of_a_snapshot_drops_what_came_of_it() -> None:
    sync = StreamSync()
    attempt = attempt_of(sync.beacon(beacon(3, 1, 2), 0.0))
    sync.chunk(chunk(3, 0, 2, store(1)), attempt, 0.1)
    assert sync.batch(batch(0, store(8), epoch=A1), 0.2) == [ClearAll(), Apply([store(8)])]
    assert sync.chunk(chunk(3, 1, 2, store(2)), attempt, 0.3) == []
    assert (sync.digest, sync.synced) == (8, True)


def test_a_snapshot_of_a_newer_epoch_than_any_batch_heard_is_taken() -> None:
    sync = StreamSync()
    attempt = attempt_of(sync.batch(batch(3, store(9)), 0.0))
    assert sync.chunk(chunk(0, 0, 1, epoch=A1), attempt, 0.1) == []
    assert (sync.epoch, sync.synced, sync.blocks) == (A1, True, 0)


@pytest.mark.parametrize(
    "broken",
    [
        chunk(3, 2, 3, store(3)),
        chunk(3, 0, 3, store(3)),
        chunk(4, 1, 3, store(3)),
        chunk(3, 1, 2, store(3)),
        chunk(3, 1, 3, store(3), epoch=A1),
        chunk(3, 5, 3, store(3)),
        chunk(3, -1, 3, store(3)),
    ],
)
def test_chunks_that_do_not_belong_together_are_not_put_together(broken: SnapshotChunk) -> None:
    sync = StreamSync()
    attempt = attempt_of(sync.beacon(beacon(3, 1, 2, 3), 0.0))
    assert sync.chunk(chunk(3, 0, 3, store(1)), attempt, 0.1) == [Apply([store(1)])]
    assert sync.chunk(broken, attempt, 0.2) == []
    assert sync.chunk(chunk(3, 1, 3, store(2)), attempt, 0.3) == []
    assert not sync.synced
    again = attempt_of(sync.tick(0.1 + RETRY_S))
    assert again > attempt
    assert sync.chunk(chunk(3, 0, 1, store(1, 2, 3)), again, 5.0) == [ClearAll(), Apply([store(1, 2, 3)])]
    assert sync.synced


@pytest.mark.parametrize("first", [chunk(3, 1, 2, store(1)), chunk(3, 0, 0), chunk(-1, 0, 1)])
def test_a_snapshot_that_does_not_begin_at_its_beginning_is_not_begun(first: SnapshotChunk) -> None:
    sync = synced_to(1)
    attempt = attempt_of(sync.batch(batch(2, store(3)), 1.0))
    assert sync.chunk(first, attempt, 1.1) == []
    assert sync.seq == 1


def test_a_snapshot_asked_for_in_an_epoch_that_has_ended_is_not_taken() -> None:
    sync = StreamSync()
    attempt = attempt_of(sync.beacon(beacon(3, 1, 2, epoch=A0), 0.0))
    assert sync.beacon(beacon(3, 1, 2, epoch=A1), 0.01) == [], "the next request has to wait a moment"
    assert sync.chunk(chunk(7, 0, 1, store(1), epoch=A0), attempt, 0.02) == []
    assert sync.epoch == A1
    assert attempt_of(sync.tick(1.0)) > attempt
    assert not sync.synced


def test_a_snapshot_that_misses_batches_before_those_kept_is_followed_by_another() -> None:
    sync = synced_to(1)
    attempt = attempt_of(sync.batch(batch(2, store(3)), 1.0))
    sync.batch(batch(5, store(6)), 1.5)
    actions = sync.chunk(chunk(4, 0, 1, store(1, 2, 3, 4)), attempt, 2.0)
    assert actions == [ClearAll(), Apply([store(1, 2, 3, 4)]), RequestSnapshot(attempt + 1)]
    assert not sync.synced
    sync.batch(batch(6, store(7)), 2.5)
    actions = sync.chunk(chunk(6, 0, 1, store(1, 2, 3, 4, 5, 6)), attempt + 1, 3.0)
    assert actions == [ClearAll(), Apply([store(1, 2, 3, 4, 5, 6)]), Apply([store(7)])]
    assert sync.synced


def test_chunks_of_an_attempt_given_up_are_not_taken_for_the_next_one_s() -> None:
    sync = StreamSync()
    first = attempt_of(sync.beacon(beacon(3, 1, 2), 0.0))
    second = attempt_of(sync.tick(RETRY_S))
    assert sync.chunk(chunk(3, 0, 1, store(1, 2)), first, RETRY_S + 0.1) == []
    assert sync.chunk(chunk(3, 0, 1, store(1, 2)), second, RETRY_S + 0.1) == [Apply([store(1, 2)])]
    assert sync.chunk(chunk(3, 0, 1, store(1, 2)), second, RETRY_S + 0.2) == [], "asked for once, taken once"


def test_a_snapshot_that_is_lost_is_asked_for_again_but_not_while_it_is_coming() -> None:
    sync = StreamSync()
    attempt = attempt_of(sync.beacon(beacon(3, 1, 2), 0.0))
    sync.chunk(chunk(3, 0, 9, store(1)), attempt, RETRY_S - 0.1)
    assert sync.tick(RETRY_S) == []
    assert sync.tick(2 * RETRY_S) == [RequestSnapshot(attempt + 1)]


def test_a_stream_that_never_agrees_is_not_copied_more_than_once_a_second() -> None:
    sync = synced_to(1)
    now, requests = 0.0, 0
    while now < 60.0:
        actions = sync.beacon(beacon(sync.seq, 99), now) + sync.tick(now)
        for action in actions:
            if isinstance(action, RequestSnapshot):
                requests += 1
                sync.chunk(chunk(1, 0, 1, store(1)), action.attempt, now)
        now += 0.01
    assert 20 < requests < 70


def test_batches_kept_for_a_snapshot_that_never_comes_are_bounded() -> None:
    sync = StreamSync()
    big = Store(Tier.DEVICE, bytes(1024 * 1024))
    attempt = attempt_of(sync.batch(batch(1, big), 0.0))
    for seq in range(2, 100):
        sync.batch(batch(seq, big), 0.1)
    assert sync._kept_bytes <= 16 * 1024 * 1024
    assert sync.chunk(chunk(50, 0, 1), attempt, 1.0) == [RequestSnapshot(attempt + 1)], "what was let go is a gap, and found"
    assert sync._kept_bytes == 0


def test_a_relay_that_stays_behind_what_was_heard_in_its_name_is_believed() -> None:
    sync = synced_to(1)
    sync.batch(batch(1, store(2)), 0.0)
    assert sync.beacon(beacon(1, 1), 1.0) == [], "it may have been overtaken"
    assert asks(sync.beacon(beacon(1, 1), 3.0))


def test_H14_a_copy_is_doubted_while_the_bus_is_away_and_believed_when_the_next_message_agrees() -> None:
    for agree in (batch(1, store(2)), beacon(1, 1)):
        sync = synced_to(1)
        sync.doubt()
        assert not sync.synced
        actions = sync.batch(agree, 1.0) if isinstance(agree, Batch) else sync.beacon(agree, 1.0)
        assert not any(isinstance(action, RequestSnapshot) for action in actions)
        assert sync.synced


def test_H14_a_copy_that_missed_something_meanwhile_is_made_again() -> None:
    sync = synced_to(1)
    sync.doubt()
    attempt = attempt_of(sync.beacon(beacon(4, 1, 2), 1.0))
    assert sync.chunk(chunk(4, 0, 1, store(1, 2)), attempt, 1.1) == [ClearAll(), Apply([store(1, 2)])]
    assert sync.synced


@pytest.mark.parametrize(
    ("epoch", "parts"), [("ab.12", ("ab", 12)), ("ab", ("ab", 0)), (".3", (".3", 0)), ("a.b", ("a.b", 0)), ("a.1.2", ("a.1", 2))]
)
def test_an_epoch_s_parts(epoch: str, parts: tuple[str, int]) -> None:
    assert epoch_parts(epoch) == parts


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 31, 1000])
@pytest.mark.parametrize("tier", list(Tier))
def test_the_xor_of_packed_keys_is_that_of_the_keys(count: int, tier: Tier) -> None:
    rng = random.Random(count)
    keys = [rng.getrandbits(64) for _ in range(count)]
    assert xor_of(pack_keys(keys)) == functools.reduce(operator.xor, keys, 0)
    assert digest_of_all(tier, pack_keys(keys)) == functools.reduce(operator.xor, (digest_of(key, tier) for key in keys), 0)


def test_phases_are_named_as_documented() -> None:
    sync = StreamSync()
    seen = [sync.phase]
    attempt = attempt_of(sync.beacon(beacon(3, 1), 0.0))
    seen.append(sync.phase)
    sync.chunk(chunk(3, 0, 1, store(1)), attempt, 0.0)
    seen.append(sync.phase)
    assert seen == [Phase.UNKNOWN, Phase.SYNCING, Phase.SYNCED]


def test_digests_tell_tiers_apart_even_when_two_blocks_swap_them() -> None:
    one = digest_of(7, Tier.DEVICE) ^ digest_of(8, Tier.HOST)
    other = digest_of(8, Tier.DEVICE) ^ digest_of(7, Tier.HOST)
    assert one != other
    assert len({digest_of(7, tier) for tier in Tier}) == 3
    assert all(0 <= digest_of(2**64 - 1, tier) < 2**64 for tier in Tier)


def test_who_is_not_answered_waits_twice_as_long_each_time_so_that_a_long_line_comes_to_its_end() -> None:
    sync = StreamSync()
    attempt_of(sync.beacon(beacon(3, 1, 2), 0.0))
    asked, now = [0.0], 0.0
    while now < 100.0:
        now += 0.5
        if sync.tick(now):
            asked.append(now)
    waits = [after - before for before, after in itertools.pairwise(asked)]
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 32.0]


def test_a_snapshot_that_came_makes_the_next_loss_a_short_one() -> None:
    sync = StreamSync()
    sync.beacon(beacon(3, 1, 2), 0.0)
    attempt = attempt_of(sync.tick(RETRY_S))
    sync.chunk(chunk(3, 0, 1, store(1, 2)), attempt, RETRY_S)
    assert sync.synced
    attempt_of(sync.beacon(beacon(5, 1, 2), 10.0))
    assert sync.tick(10.0 + RETRY_S - 0.1) == []
    assert sync.tick(10.0 + RETRY_S) != []
