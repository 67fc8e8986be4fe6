"""Whatever is lost, repeated or replayed in part, what is applied is the published stream, in order, less what was named lost."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from engines.stream import Accept, Duplicate, Gap, Restart, SequenceTracker


class Reader:
    """Reads as the subscriber does, from a publisher that is a list."""

    def __init__(self) -> None:
        self.tracker = SequenceTracker()
        self.applied: list[tuple[int, int]] = []
        """(life, number)"""
        self.lost: set[tuple[int, int]] = set()
        self.life = 0

    def live(self, life: int, seq: int, replayable: list[int]) -> None:
        while True:
            match self.tracker.feed(seq, fingerprint=life):
                case Accept():
                    self.applied.append((life, seq))
                    return
                case Duplicate():
                    return
                case Gap(first=first, last=last):
                    assert first == self.tracker.expected
                    assert last == seq - 1
                    self.replayed(life, [number for number in replayable if number >= first])
                    self.give_up(seq)
                case Restart():
                    self.restart(life)

    def replayed(self, life: int, numbers: list[int]) -> None:
        for number in numbers:
            verdict = self.tracker.feed_replayed(number, fingerprint=life)
            if isinstance(verdict, Gap):
                self.give_up(number)
                verdict = self.tracker.feed_replayed(number, fingerprint=life)
            if isinstance(verdict, Accept):
                self.applied.append((life, number))

    def give_up(self, upto: int) -> None:
        self.lost |= {(self.life, number) for number in range(self.tracker.expected, upto)}
        self.tracker.skip_to(upto)

    def restart(self, life: int) -> None:
        self.tracker.restart()
        self.life = life
        assert self.tracker.epoch == life


@given(
    lives=st.lists(
        st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=12),
        min_size=1,
        max_size=3,
    ),
    ahead=st.integers(0, 3),
)
def test_every_message_is_applied_once_in_order_or_named_lost(lives: list[list[tuple[bool, bool, bool]]], ahead: int) -> None:
    reader = Reader()
    for life, messages in enumerate(lives):
        if life:
            reader.restart(life)  # as after a reconnect that found another process
        remembered = [seq for seq, (_, replayable, _) in enumerate(messages) if replayable]
        for seq, (arrives, _, twice) in enumerate(messages):
            for _ in range(arrives + (arrives and twice)):
                # A replay is asked a little later than the message came, so it may run ahead of it.
                reader.live(life, seq, [number for number in remembered if number <= seq + ahead])
        mine = [seq for owner, seq in reader.applied if owner == life]
        named = {seq for owner, seq in reader.lost if owner == life}
        assert mine == sorted(set(mine))
        assert not set(mine) & named
        assert set(mine) | named == set(range(reader.tracker.expected))
        assert named <= {seq for seq, (_, replayable, _) in enumerate(messages) if not replayable}
        last_live = max((seq for seq, (arrives, _, _) in enumerate(messages) if arrives), default=-1)
        assert reader.tracker.expected > last_live


@given(numbers=st.lists(st.integers(0, 6), max_size=30))
def test_a_live_number_that_goes_back_is_always_a_restart_and_any_order_is_survived(numbers: list[int]) -> None:
    tracker = SequenceTracker()
    highest = -1
    for number in numbers:
        verdict = tracker.feed(number)
        assert isinstance(verdict, Restart) == (number < highest)
        match verdict:
            case Restart():
                tracker.restart()
                tracker.skip_to(number)
                assert tracker.feed(number) == Accept()
                highest = number
            case Gap():
                tracker.skip_to(number)
                assert tracker.feed(number) == Accept()
                highest = number
            case Accept() | Duplicate():
                highest = number
        assert tracker.expected == highest + 1
