"""What could come? Courses of demand, and requests drawn by them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import msgspec

from planner.trial.replica import Request

DAY_S = 86_400.0


class Shape(msgspec.Struct, frozen=True):
    """What requests are like: lengths are log-normal around these medians."""

    isl: int = 1024
    osl: int = 200
    spread: float = 0.5
    """Of the logarithm."""
    longest: int = 30_000


def drawn(rate: Callable[[float], float], until: float, shape: Shape, draw: random.Random, most: float) -> Iterator[Request]:
    """Requests that come by chance, at a rate that changes and is never over `most`."""
    at = 0.0
    while True:
        at += draw.expovariate(most)
        if at >= until:
            return
        if draw.random() * most < rate(at):
            yield Request(at, _length(shape.isl, shape, draw), _length(shape.osl, shape, draw))


def steady(rate: float) -> Callable[[float], float]:
    """Always the same."""
    return lambda at: rate  # noqa: ARG005  whenever


def burst(base: float, factor: float, begin: float, end: float) -> Callable[[float], float]:
    """`factor` times as much, from one moment to another."""
    return lambda at: base * factor if begin <= at < end else base


def ramps(low: float, high: float, period_s: float) -> Callable[[float], float]:
    """Up and down in straight lines."""
    return lambda at: low + (high - low) * (1 - abs(2 * (at % period_s) / period_s - 1))


def day(low: float, high: float, length_s: float = DAY_S) -> Callable[[float], float]:
    """Least at its beginning, most at its middle."""
    return lambda at: low + (high - low) * (1 - math.cos(2 * math.pi * at / length_s)) / 2


def _length(median: int, shape: Shape, draw: random.Random) -> int:
    return max(1, min(shape.longest, round(median * math.exp(draw.gauss(0, shape.spread)))))
