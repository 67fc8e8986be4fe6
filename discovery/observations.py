"""What do routers tell planners? What clients asked for and how they were served, and what every engine carries: shapes and sums only.

Counts are those since the router began, never those of an interval: whoever listens takes the difference of two reports by the router's
own clock, so a report that is lost costs precision and no request. A router that has begun again has another id.

    report at 10 s: 40 arrivals ─┐
    (lost)                       ├─▶  66 arrivals in 10 s
    report at 20 s: 106 arrivals ┘
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from engines.types import Role

PER_OCTAVE: Final = 4
BOUNDS: Final[tuple[float, ...]] = tuple(2.0 ** (step / PER_OCTAVE) for step in range(20 * PER_OCTAVE + 1))
"""Upper ends of the buckets of every distribution, in its unit (milliseconds or tokens): 1 to a million, 19 % apart. One more has no end."""
OBSERVE_S: Final = 1.0
"""Between two reports of a router."""


class Histogram(msgspec.Struct, array_like=True):
    """A distribution over `BOUNDS`: how many values fell into each bucket, and their exact sum.

    >>> lengths = Histogram()
    >>> for tokens in (100, 100, 100, 4000):
    ...     lengths.add(tokens)
    >>> lengths.count, lengths.mean
    (4, 1075.0)
    >>> 90 < lengths.percentile(0.5) < 110, 3500 < lengths.percentile(0.95) < 4100
    (True, True)
    """

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        """Count a value. Runtime complexity: O(log buckets)."""
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean; 0 where there is none."""
        return self.total / count if (count := self.count) else 0.0

    @property
    def mean_square(self) -> float:
        """The mean of their squares, as far as buckets tell it, and never less than the square of the mean."""
        count = self.count
        if not count:
            return 0.0
        return max(
            self.mean * self.mean,
            sum(number * _middle(bucket) * _middle(bucket) for bucket, number in enumerate(self.counts) if number) / count,
        )

    def percentile(self, share: float) -> float:
        """The value below which `share` (0..1) of them lie, within the width of a bucket; 0 where there is none."""
        count = self.count
        if not count:
            return 0.0
        wanted = share * count
        reached = 0
        for bucket, (number, so_far) in enumerate(zip(self.counts, accumulate(self.counts), strict=True)):
            if number and so_far >= wanted:
                lower, upper = _ends(bucket)
                return lower * math.pow(upper / lower, (wanted - reached) / number)
            reached = so_far
        return BOUNDS[-1]

    def share_within(self, bound: float) -> float:
        """The share of values up to `bound`, within the width of a bucket; 1 where there is none."""
        count = self.count
        if not count:
            return 1.0
        bucket = bisect_left(BOUNDS, bound)
        lower, upper = _ends(bucket)
        part = min(1.0, max(0.0, math.log(bound / lower) / math.log(upper / lower))) if bound > 0 else 0.0
        return (sum(self.counts[:bucket]) + part * self.counts[bucket]) / count

    def plus(self, other: Histogram) -> Histogram:
        """Both together."""
        return Histogram([ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)], self.total + other.total)

    def minus(self, earlier: Histogram) -> Histogram:
        """What has come since."""
        return Histogram([ours - theirs for ours, theirs in zip(self.counts, earlier.counts, strict=True)], self.total - earlier.total)

    def copy(self) -> Histogram:
        """One that is counted on by itself."""
        return Histogram(self.counts.copy(), self.total)


def histogram_of(values: Iterable[float]) -> Histogram:
    """A distribution of these."""
    made = Histogram()
    for value in values:
        made.add(value)
    return made


class TrafficReport(msgspec.Struct, array_like=True):
    """What a router has seen of one model's requests since it began."""

    model: str
    arrived: int = 0
    """Requests that were read, whatever became of them."""
    finished: int = 0
    """Of them, those whose clients have the whole answer of an engine."""
    shed: int = 0
    """Of them, those turned away for want of room or of an engine."""
    isl: Histogram = msgspec.field(default_factory=Histogram)
    """Prompt tokens of those that arrived, where prompts are read."""
    osl: Histogram = msgspec.field(default_factory=Histogram)
    """Generated tokens of those that finished, where engines told."""
    ttft_ms: Histogram = msgspec.field(default_factory=Histogram)
    """From the request's last byte to the first token of a streamed answer: queue and retries included, as its client saw it."""
    itl_ms: Histogram = msgspec.field(default_factory=Histogram)
    """Of each streamed answer, the mean time between its tokens."""
    wait_ms: Histogram = msgspec.field(default_factory=Histogram)
    """In the router's queue; those let in at once have waited 0."""
    prompt_tokens: int = 0
    overlap_tokens: int = 0
    """Of them, those believed to be in the cache of the engine chosen."""
    waiting: int = 0
    """Requests in the router's queue now."""


class EngineReport(msgspec.Struct, frozen=True, array_like=True):
    """What a router knows of one engine now."""

    engine: str
    role: Role
    state: str
    """serving, joining, draining, asleep, ejected, cooling."""
    models: tuple[str, ...]
    in_flight: int
    """Requests that this router has there."""
    prefill_tokens: int
    """Of theirs, prompt tokens that are still to be computed."""
    running: int | None = None
    """As the engine itself reports, over all its ranks; None: it does not."""
    waiting: int | None = None
    kv_usage: float | None = None
    """0..1, of its fullest rank."""
    context: int | None = None
    """Tokens of the longest request that it takes."""


class RouterReport(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """All that one router has to tell."""

    router: str
    up_s: float
    """For how long it has counted, by its own clock."""
    traffic: tuple[TrafficReport, ...]
    engines: tuple[EngineReport, ...]


class PlanPool(msgspec.Struct, frozen=True, array_like=True):
    """What one pool is to be."""

    pool: str
    role: Role
    replicas: int
    """How many there are to be."""
    was: int
    """How many there were, those that are starting included."""
    victims: tuple[str, ...] = ()
    """Engines to drain and stop, where some are to go."""
    reasons: tuple[str, ...] = ()


class PlanMessage(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """What a planner wants; told again while it stands, so that a late listener hears it too."""

    planner: str
    number: int
    """Grows by one with each plan that differs from the one before."""
    at: float
    """Seconds since the epoch."""
    model: str
    pools: tuple[PlanPool, ...]
    comes_within_s: float = 0.0
    """How long a request for `model` may wait for an engine where there is none: the planner will start one. 0: it will not."""


class Acknowledgement(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Whoever carries plans out says that one is what is."""

    planner: str
    number: int
    error: str = ""
    """Why it could not be done; empty when it was."""


def summed(reports: Sequence[TrafficReport]) -> TrafficReport:
    """Several routers' traffic of one model, as one."""
    whole = TrafficReport(reports[0].model if reports else "")
    for report in reports:
        whole = _combined(whole, report, 1)
    return whole


def since(now: TrafficReport, earlier: TrafficReport) -> TrafficReport:
    """What has come between two reports of one router; `waiting` as it is now."""
    difference = _combined(now, earlier, -1)
    difference.waiting = now.waiting
    return difference


def _combined(one: TrafficReport, other: TrafficReport, sign: int) -> TrafficReport:
    def both(ours: Histogram, theirs: Histogram) -> Histogram:
        return ours.plus(theirs) if sign > 0 else ours.minus(theirs)

    return TrafficReport(
        one.model,
        one.arrived + sign * other.arrived,
        one.finished + sign * other.finished,
        one.shed + sign * other.shed,
        both(one.isl, other.isl),
        both(one.osl, other.osl),
        both(one.ttft_ms, other.ttft_ms),
        both(one.itl_ms, other.itl_ms),
        both(one.wait_ms, other.wait_ms),
        one.prompt_tokens + sign * other.prompt_tokens,
        one.overlap_tokens + sign * other.overlap_tokens,
        one.waiting + sign * other.waiting,
    )


def _ends(bucket: int) -> tuple[float, float]:
    """Between which values a bucket lies; the first begins an octave below its end, and the last ends at its beginning."""
    upper = BOUNDS[min(bucket, len(BOUNDS) - 1)]
    if bucket >= len(BOUNDS):
        return upper, upper
    return (BOUNDS[bucket - 1] if bucket else upper / 2), upper


def _middle(bucket: int) -> float:
    lower, upper = _ends(bucket)
    return math.sqrt(lower * upper)
