"""Numbers alone decide what is next, missing, repeated, or the work of another process."""

from __future__ import annotations

import pytest

from engines.stream import Accept, Duplicate, Gap, Restart, SequenceTracker, Verdict

A, D = Accept(), Duplicate()


@pytest.mark.parametrize(
    ("numbers", "verdicts"),
    [
        ([0, 1, 2], [A, A, A]),
        ([0, 0], [A, D]),
        ([3], [Gap(0, 2)]),
        ([0, 1, 5], [A, A, Gap(2, 4)]),
        ([0, 1, 5, 5], [A, A, Gap(2, 4), Gap(2, 4)]),
        ([0, 1, 2, 0], [A, A, A, Restart(3, 0)]),
        ([0, 1, 2, 1], [A, A, A, Restart(3, 1)]),
        ([0, 2**64 - 2], [A, Gap(1, 2**64 - 3)]),
    ],
)
def test_live_numbers_are_judged(numbers: list[int], verdicts: list[Verdict]) -> None:
    tracker = SequenceTracker()
    assert [tracker.feed(number) for number in numbers] == verdicts


def test_a_repeated_number_with_another_payload_is_a_restart() -> None:
    tracker = SequenceTracker()
    assert tracker.feed(0, fingerprint=11) == A
    assert tracker.feed(0, fingerprint=11) == D
    assert tracker.feed(0, fingerprint=12) == Restart(1, 0)


def test_a_message_behind_a_gap_is_accepted_once_the_gap_is_filled() -> None:
    tracker = SequenceTracker()
    tracker.feed(0)
    assert tracker.feed(3) == Gap(1, 2)
    assert [tracker.feed_replayed(number) for number in (1, 2)] == [A, A]
    assert tracker.feed(3) == A
    assert tracker.expected == 4


def test_a_replay_that_runs_ahead_makes_waiting_live_messages_duplicates_and_not_a_restart() -> None:
    tracker = SequenceTracker()
    tracker.feed(0)
    assert [tracker.feed_replayed(number) for number in range(6)] == [D, A, A, A, A, A]
    assert [tracker.feed(number) for number in (3, 4, 5, 6)] == [D, D, D, A]


def test_a_replay_that_begins_too_late_is_a_gap_until_the_rest_is_given_up() -> None:
    tracker = SequenceTracker()
    assert tracker.feed_replayed(4) == Gap(0, 3)
    tracker.skip_to(4)
    assert tracker.feed_replayed(4) == A
    assert tracker.feed(5) == A


def test_giving_up_never_goes_back() -> None:
    tracker = SequenceTracker()
    tracker.feed(0)
    tracker.skip_to(0)
    assert tracker.expected == 1


def test_a_restart_begins_a_new_epoch_at_zero() -> None:
    tracker = SequenceTracker()
    tracker.feed(0)
    tracker.feed(1, fingerprint=5)
    assert tracker.last == (1, 5)
    assert tracker.epoch == 0
    tracker.restart()
    assert [tracker.epoch, tracker.expected, tracker.last] == [1, 0, None]
    assert tracker.feed(2) == Gap(0, 1)


def test_what_was_given_up_is_not_remembered_as_seen() -> None:
    tracker = SequenceTracker()
    tracker.feed(0, fingerprint=5)
    tracker.skip_to(7)
    assert tracker.last == (0, 5)
