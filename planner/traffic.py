"""What are requests like, and how many come? Windows of traffic, made steady enough to plan by.

Arrivals are counted things: in a window of five seconds ten of them mean anything from four to nineteen. So a rate is smoothed as long as
what comes could be chance, and follows at once when it could not.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from discovery.observations import Histogram
from planner.types import Mix, Slo, Traffic

SMOOTH_S: Final = 30.0
CHANCE: Final = 3.0
"""Standard deviations of a Poisson count."""
ENOUGH: Final = 30
"""Answers that make a percentile worth reading."""
PATIENCE_S: Final = 60.0
"""After so long, as many as there are must do."""
LEAST: Final = 5
MS: Final = 1e3


class Rate(msgspec.Struct):
    """Requests a second.

    >>> rate = Rate()
    >>> [round(rate.observe(count, 5.0), 1) for count in (10, 12, 8, 100, 104)]
    [2.0, 2.1, 2.0, 20.0, 20.1]
    >>> [round(rate.observe(count, 5.0), 1) for count in (85, 86, 84, 83, 85)]
    [19.6, 19.3, 18.9, 18.5, 18.3]
    """

    level: float | None = None
    run: int = 0
    """Requests of the windows of late that were all over the level, or all under it,"""
    expected: float = 0.0
    """how many there should have been of them,"""
    run_s: float = 0.0
    """and how long those took."""

    def observe(self, count: int, window_s: float) -> float:
        """The rate, as it is taken to be now."""
        if self.level is None:
            self.level = count / window_s
            return self.level
        due = self.level * window_s
        if (count > due) is not (self.run > self.expected):
            self.run, self.expected, self.run_s = 0, 0.0, 0.0
        self.run, self.expected, self.run_s = self.run + count, self.expected + due, self.run_s + window_s
        if _unlikely(count, due):
            self._begin_at(count / window_s)
        elif _unlikely(self.run, self.expected):
            self._begin_at(self.run / self.run_s)
        else:
            self.level += (1 - math.exp(-window_s / SMOOTH_S)) * (count / window_s - self.level)
        return self.level

    def _begin_at(self, level: float) -> None:
        self.level, self.run, self.expected, self.run_s = level, 0, 0.0, 0.0


def _unlikely(count: float, expected: float) -> bool:
    return abs(count - expected) > CHANCE * math.sqrt(max(1.0, expected))


class Gathered(msgspec.Struct):
    """Windows put together until there is enough in them to learn from."""

    window_s: float = 0.0
    arrived: int = 0
    isl: Histogram = msgspec.field(default_factory=Histogram)
    osl: Histogram = msgspec.field(default_factory=Histogram)
    ttft_ms: Histogram = msgspec.field(default_factory=Histogram)
    itl_ms: Histogram = msgspec.field(default_factory=Histogram)
    in_flight_s: dict[str, float] = {}
    """By pool: requests in flight of one replica, times seconds."""
    kv_s: dict[str, float] = {}
    settled: bool = True

    def add(self, traffic: Traffic) -> None:
        """One more window."""
        self.window_s += traffic.window_s
        self.arrived += traffic.arrived
        self.isl = self.isl.plus(traffic.isl)
        self.osl = self.osl.plus(traffic.osl)
        self.ttft_ms = self.ttft_ms.plus(traffic.ttft_ms)
        self.itl_ms = self.itl_ms.plus(traffic.itl_ms)

    @property
    def enough(self) -> bool:
        """Whether to learn from it now."""
        return min(self.ttft_ms.count, self.isl.count) >= ENOUGH or self.window_s >= PATIENCE_S


class Usual(msgspec.Struct):
    """What requests have been like of late: kept while nobody asks."""

    isl: Histogram = msgspec.field(default_factory=Histogram)
    osl: Histogram = msgspec.field(default_factory=Histogram)
    hit_rate: float | None = None

    def observe(self, traffic: Traffic) -> None:
        """Take in a window; older ones fade as newer requests come."""
        self.isl = _faded(self.isl, traffic.isl)
        self.osl = _faded(self.osl, traffic.osl)
        if traffic.hit_rate is not None:
            known = self.hit_rate
            self.hit_rate = traffic.hit_rate if known is None else known + 0.1 * (traffic.hit_rate - known)

    def mix(self, slo: Slo) -> Mix:
        """Of the requests to come."""
        uncached = 1 - min(0.95, self.hit_rate or 0.0)
        return mix_of(self.isl, self.osl, uncached, slo)


def mix_of(isl: Histogram, osl: Histogram, uncached: float, slo: Slo) -> Mix:
    """What requests with prompts and answers of these lengths are like. `uncached`: the share of a prompt that is to be computed."""
    return Mix(
        isl=isl.mean * uncached,
        isl_square=isl.mean_square * uncached**2,
        isl_at=isl.percentile(slo.percentile) * uncached,
        osl=osl.mean if any(osl.counts) else None,
        at=slo.percentile,
    )


def seconds_of(times_ms: Histogram, slo: Slo) -> tuple[float | None, float | None]:
    """Mean and percentile; None where there are too few."""
    if times_ms.count < LEAST:
        return None, None
    return times_ms.mean / MS, times_ms.percentile(slo.percentile) / MS


def _faded(kept: Histogram, new: Histogram, most: int = 500) -> Histogram:
    """Both together, the older ones at half weight once they are many."""
    if not any(new.counts):
        return kept
    if kept.count > most:
        kept = Histogram([count // 2 for count in kept.counts], kept.total)
        kept.total = kept.total * 0.5  # near enough: rounding takes a little from rare lengths
    return kept.plus(new)
