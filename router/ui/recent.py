"""What has happened in the last minutes? Requests by slots of time, and the latest decisions whole; older ones are forgotten.

    now ─▶ [slot n] [slot n−1] … [slot n−59]        each: counts, tokens by endpoint, TTFT and ITL by bins of rising width
           [decision] [decision] …                  the latest, with every candidate's score

Written once a request, at its end; nothing is done for a piece of an answer. Memory is bounded by the slots, the bins, and the fleet.
Slots are numbered by a clock that all processes of a machine share, and their bins are the same everywhere: so slots can be added.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import msgspec

from router.disagg import Split
from router.scheduling.types import Decision

SLOT_S: Final = 10.0
SLOTS: Final = 60
MAX_DECISIONS: Final = 50
MAX_CANDIDATES: Final = 2_000
"""Of all decisions together; with many engines fewer decisions are kept, the latest always."""
MAX_FAILURE_CHARS: Final = 300

Key = TypeVar("Key", int, str)

_LEAST_S: Final = 1e-4
_WIDTH: Final = 1.15
_PER_BIN: Final = 1 / math.log(_WIDTH)
_LAST_BIN: Final = 120
"""Beyond half an hour, all is one."""


def bin_of(seconds: float) -> int:
    """The bin that a time falls into; each is 15 % wider than the one before.

    >>> bin_of(0.0), bin_of(0.0001), bin_of(0.05) == bin_of(0.052), bin_of(1e9)
    (0, 0, True, 120)
    """
    return 0 if seconds <= _LEAST_S else min(_LAST_BIN, math.ceil(math.log(seconds / _LEAST_S) * _PER_BIN))


def quantile(bins: dict[int, int], part: float) -> float | None:
    """The time below which `part` of those counted are, to 7 %; None when there are none. O(bins).

    >>> round(quantile({bin_of(0.010): 98, bin_of(1.0): 2}, 0.5), 3), round(quantile({bin_of(1.0): 1}, 0.99), 2)
    (0.009, 0.95)
    """
    total = sum(bins.values())
    if not total:
        return None
    wanted = part * total
    for number in sorted(bins):
        wanted -= bins[number]
        if wanted <= 0:
            break
    return float(_LEAST_S * _WIDTH ** (number - 0.5))


class Tally(msgspec.Struct):
    """What went to one endpoint, or to all."""

    requests: int = 0
    prompt_tokens: int = 0
    overlap_tokens: int = 0
    """Of those, believed cached there when it was chosen."""
    told_tokens: int = 0
    """Prompt tokens of answers that told how many were cached."""
    cached_tokens: int = 0
    """Of those, by the engine's own count."""

    def add(self, other: Tally) -> None:
        """Count all of another one too."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.overlap_tokens += other.overlap_tokens
        self.told_tokens += other.told_tokens
        self.cached_tokens += other.cached_tokens


class Slot(msgspec.Struct):
    """Ten seconds."""

    number: int
    ended: int = 0
    failed: int = 0
    """Answered 5xx, or broken off."""
    shed: int = 0
    """Answered 429."""
    left: int = 0
    """Whose client left."""
    output_tokens: int = 0
    ttft: dict[int, int] = {}
    """Bin → how many first tokens of streams took so long."""
    itl: dict[int, int] = {}
    """Bin → how many streams had so long between two tokens, on their average."""
    reasons: dict[str, int] = {}
    splits: dict[str, int] = {}
    """Why prompts of decode engines were computed where they were → how many."""
    endpoints: dict[str, Tally] = {}
    """By `ENGINE#RANK`."""


class Ended(msgspec.Struct, frozen=True):
    """A request that is over."""

    at: float
    """Monotonic seconds."""
    path: str
    status: int
    duration_s: float
    model: str = ""
    prompt_tokens: int = 0
    overlap_tokens: int = 0
    decision: Decision | None = None
    split: Split | None = None
    prefill: Decision | None = None
    """Who computed the prompt, where that was another engine."""
    ttft_s: float | None = None
    """Of a streamed answer."""
    itl_s: float | None = None
    """Between two of its tokens, on the mean; None where it had only one, or did not end well."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    tries: int = 0
    failure: str = ""


class Recent:
    """The last ten minutes of one process."""

    def __init__(self) -> None:
        self._slots: deque[Slot] = deque(maxlen=SLOTS)
        self._decided: deque[Ended] = deque()
        self._candidates = 0

    def ended(self, request: Ended) -> None:
        """Count a request that is over. Runtime complexity: O(1)."""
        slot = self._slot(request.at)
        slot.ended += 1
        if request.status == 429:
            slot.shed += 1
        elif request.status == 499:
            slot.left += 1
        elif request.status >= 500 or (request.failure and request.status < 400):
            slot.failed += 1
        if request.completion_tokens:
            slot.output_tokens += request.completion_tokens
        if request.ttft_s is not None:
            _count(slot.ttft, bin_of(request.ttft_s))
        if request.itl_s is not None:
            _count(slot.itl, bin_of(request.itl_s))
        if request.decision is not None:
            self._sent(slot, request, request.decision)

    def slots(self, now: float) -> list[Slot]:
        """Those of the last ten minutes in which anything ended, the oldest first."""
        oldest = _number(now) - SLOTS
        return [slot for slot in self._slots if slot.number > oldest]

    def decided(self) -> Iterator[Ended]:
        """The latest requests that were sent somewhere, the latest first."""
        return reversed(self._decided)

    def _sent(self, slot: Slot, request: Ended, decision: Decision) -> None:
        _count(slot.reasons, decision.reason.value)
        if request.split is not None:
            _count(slot.splits, request.split.why.value)
        endpoint = str(decision.chosen.endpoint)
        tally = slot.endpoints.get(endpoint)
        if tally is None:
            tally = slot.endpoints[endpoint] = Tally()
        tally.requests += 1
        tally.prompt_tokens += request.prompt_tokens
        tally.overlap_tokens += request.overlap_tokens
        if request.cached_tokens is not None and request.prompt_tokens:
            tally.told_tokens += request.prompt_tokens
            tally.cached_tokens += min(request.cached_tokens, request.prompt_tokens)
        self._decided.append(request)
        self._candidates += _size(request)
        while len(self._decided) > 1 and (len(self._decided) > MAX_DECISIONS or self._candidates > MAX_CANDIDATES):
            self._candidates -= _size(self._decided.popleft())

    def _slot(self, at: float) -> Slot:
        number = _number(at)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(Slot(number))
        return self._slots[-1]


def added(slots: Iterable[Slot]) -> list[Slot]:
    """Slots of several processes, added up by number, in order.

    >>> added([Slot(1, ended=2), Slot(2), Slot(1, ended=3)])[0].ended
    5
    """
    sums: dict[int, Slot] = {}
    for slot in slots:
        total = sums.setdefault(slot.number, Slot(slot.number))
        total.ended += slot.ended
        total.failed += slot.failed
        total.shed += slot.shed
        total.left += slot.left
        total.output_tokens += slot.output_tokens
        for mine, theirs in ((total.ttft, slot.ttft), (total.itl, slot.itl)):
            for number, count in theirs.items():
                _count(mine, number, count)
        for names, others in ((total.reasons, slot.reasons), (total.splits, slot.splits)):
            for name, count in others.items():
                _count(names, name, count)
        for endpoint, tally in slot.endpoints.items():
            total.endpoints.setdefault(endpoint, Tally()).add(tally)
    return [sums[number] for number in sorted(sums)]


def _number(at: float) -> int:
    return int(at // SLOT_S)


def _size(request: Ended) -> int:
    return sum(
        len(decision.candidates) + len(decision.rejected) for decision in (request.decision, request.prefill) if decision is not None
    )


def _count(counts: dict[Key, int], key: Key, more: int = 1) -> None:
    counts[key] = counts.get(key, 0) + more
