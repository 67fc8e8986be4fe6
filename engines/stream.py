"""Which message may be applied next? A publisher numbers its messages from 0 and says nothing else about lost ones or restarts.

    live 0 1 2 · · 5        5 is early: Gap(3, 4). The reader asks the replay, applies 3 and 4, and only then 5.
    live … 7 8 · 0          the number went back: Restart. Another process publishes now; all that was known is void.

A number alone cannot tell a repetition from a restart that happens to have got just as far, so each message also brings a
fingerprint, and the latest one's is remembered. An *epoch* is one life of the publisher; numbers are compared within one epoch only.
"""

from __future__ import annotations

import msgspec


class Accept(msgspec.Struct, frozen=True):
    """The next message in order: apply it."""


class Duplicate(msgspec.Struct, frozen=True):
    """Already applied (or given up as lost): drop it."""


class Gap(msgspec.Struct, frozen=True):
    """Messages `first` … `last` are missing and come before this one, which stays unapplied: feed it again when they are in."""

    first: int
    last: int


class Restart(msgspec.Struct, frozen=True):
    """The publisher began again: forget everything, call `restart()`, then feed this message again."""

    expected: int
    got: int


Verdict = Accept | Duplicate | Gap | Restart
_ACCEPT, _DUPLICATE = Accept(), Duplicate()


class SequenceTracker:
    """The position in one publisher's stream, read from two sides: live messages, and replayed ones that fill gaps between them."""

    __slots__ = ("_fingerprint", "_last", "_live", "_next", "epoch")

    def __init__(self) -> None:
        self.epoch = 0
        """Grows with each `restart()`."""
        self._next = 0
        self._live = -1
        self._last = -1
        self._fingerprint = 0

    @property
    def expected(self) -> int:
        """The number of the next message in order: all before it are applied or lost."""
        return self._next

    @property
    def last(self) -> tuple[int, int] | None:
        """The latest message applied in this epoch, as (number, fingerprint): what a publisher must still know if it is the same."""
        return None if self._last < 0 else (self._last, self._fingerprint)

    def feed(self, seq: int, fingerprint: int = 0) -> Verdict:
        """Judge a live message. Live numbers only grow within an epoch, so one that does not is a restart or a repetition."""
        if seq < self._live or self._is_other(seq, fingerprint):
            return Restart(self._next, seq)
        verdict = self._judge(seq, fingerprint)
        if not isinstance(verdict, Gap):
            self._live = seq
        return verdict

    def feed_replayed(self, seq: int, fingerprint: int = 0) -> Accept | Duplicate | Gap:
        """Judge a message from the replay, which may repeat much of what was applied and holds no order against live ones.

        A Gap says that the replay begins too late, or lost something itself.
        """
        return self._judge(seq, fingerprint)

    def skip_to(self, seq: int) -> None:
        """Give up every message before `seq` that is still missing: `seq` is next. Does nothing when that is behind."""
        self._next = max(self._next, seq)

    def restart(self) -> None:
        """Begin a new epoch: number 0 is next."""
        self.epoch += 1
        self._next = 0
        self._live = self._last = -1
        self._fingerprint = 0

    def _judge(self, seq: int, fingerprint: int) -> Accept | Duplicate | Gap:
        if seq > self._next:
            return Gap(self._next, seq - 1)
        if seq < self._next:
            return _DUPLICATE
        self._next = seq + 1
        self._last, self._fingerprint = seq, fingerprint
        return _ACCEPT

    def _is_other(self, seq: int, fingerprint: int) -> bool:
        return seq == self._last and fingerprint != self._fingerprint
