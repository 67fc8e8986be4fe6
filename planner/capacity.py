"""How many requests a second does one replica carry within its targets?

A step of an engine takes `a + b·streams + c·prompt tokens` seconds. From that follows, with the rate of requests `λ`, prompts of `isl`
uncached tokens and answers of `osl`:

    busy   u    = λ·(c·isl + b·osl)                      the share of time that grows with what is asked
    ITL         = a / (1 − u)                            a step, when λ·osl·ITL streams share it
    TTFT        = e + ITL + c·isl + W                    W: those that came before (Pollaczek-Khinchine, with the spread of prompt lengths)

`a`, `b`, `c` and `e` are fitted to what clients and routers see, window after window: two straight lines. What such a model leaves out (batching
by luck, a noisy neighbour) goes into one factor for each target: how far the percentile that counts has been from what was computed.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from engines.types import Role
from planner.types import Mix, Slo

KEEP: Final = 0.98
"""How much a window still counts when the next has come: some fifty of them matter."""
PRIOR: Final = 0.3
"""How firmly a slope is believed before the load has varied; in squares of the mean load."""
FREE_STREAMS: Final = 64.0
"""Until something else has been seen, so many streams are taken to double a decode step."""
BUSIEST: Final = 0.95
"""No replica is planned to be busier: what is beyond is waiting."""
FULL_KV: Final = 0.9
TAIL_SHARE: Final = 0.1
TAIL_LEAST, TAIL_MOST = 0.5, 4.0
LEAST_SLOPE: Final = 1e-7
HALVINGS: Final = 20


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine did when nobody else used it: measured by `commutator plan --profile URL`, or written by hand."""

    prefill: tuple[tuple[float, float], ...] = ()
    """Prompt tokens, and seconds to the first token."""
    decode: tuple[tuple[float, float], ...] = ()
    """Streams at once, and seconds between tokens of each."""
    kv_tokens: int | None = None
    """Tokens that its KV cache holds."""


class Window(msgspec.Struct, frozen=True):
    """What was seen of one pool in a while: loads are those of one replica."""

    rate: float
    """Requests a second."""
    streams: float
    """Requests in flight."""
    mix: Mix
    ttft_s: float | None = None
    """Mean; None where too few were seen."""
    ttft_at_s: float | None = None
    """At the percentile that counts."""
    itl_s: float | None = None
    itl_at_s: float | None = None
    kv_usage: float | None = None
    settled: bool = True
    """Nobody waits, and no replica has just come or gone: times to first token are those of this load."""


class Estimate(msgspec.Struct, frozen=True):
    """What one replica does at a rate."""

    busy: float
    ttft_s: float | None
    """At the percentile that counts; None where nothing is known of prompts."""
    itl_s: float | None
    streams: float
    """Requests in flight."""


class Line(msgspec.Struct):
    """A straight line through points that fade; its slope is held to a first guess until points are apart.

    >>> line = Line(guess=0.0)
    >>> for x in (1.0, 2.0, 3.0, 4.0):
    ...     line.add(x, 5.0 + 2.0 * x)
    >>> [round(part, 1) for part in line.fit()]
    [6.4, 1.4]
    >>> line.add(40.0, 85.0)
    >>> [round(part, 1) for part in line.fit()]
    [5.5, 1.9]
    """

    guess: float
    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    fixed: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """The same sums of points that never fade: a profile's."""

    def add(self, x: float, y: float, keep: float = KEEP) -> None:
        """A point."""
        self.w, self.x, self.y = self.w * keep + 1, self.x * keep + x, self.y * keep + y
        self.xx, self.xy = self.xx * keep + x * x, self.xy * keep + x * y

    def fix(self, points: tuple[tuple[float, float], ...]) -> None:
        """Points that stay."""
        self.fixed = (
            float(len(points)),
            sum(x for x, _ in points),
            sum(y for _, y in points),
            sum(x * x for x, _ in points),
            sum(x * y for x, y in points),
        )

    def fit(self) -> tuple[float, float]:
        """Intercept and slope, neither of them negative."""
        w, x, y, xx, xy = (ours + theirs for ours, theirs in zip((self.w, self.x, self.y, self.xx, self.xy), self.fixed, strict=True))
        if not w:
            return 0.0, self.guess
        mean_x, mean_y = x / w, y / w
        prior = PRIOR * mean_x**2
        spread = max(0.0, xx - w * mean_x**2) + prior
        slope = (xy - w * mean_x * mean_y + prior * self.guess) / spread if spread else self.guess
        slope = max(LEAST_SLOPE, slope)
        intercept = mean_y - slope * mean_x
        if intercept < 0:
            return 0.0, max(LEAST_SLOPE, mean_y / mean_x if mean_x else slope)
        return intercept, slope


_Lines = tuple[float, float, float, float]
"""`a`, `b`, `e`, `c`."""


class Capacity(msgspec.Struct):
    """What is known of a replica of one role. Its fields are all there is to know, so that it can be kept."""

    role: Role
    prefill: Line | None = None
    """Seconds against prompt tokens."""
    decode: Line | None = None
    """Seconds of a step against streams."""
    kv_per_stream: float | None = None
    """Share of the KV cache that a request takes."""
    tail_ttft: float = 1.0
    tail_itl: float = 1.0
    kv_tokens: int | None = None

    @classmethod
    def of(cls, role: Role, profile: Profile | None = None) -> Capacity:
        """Nothing known but a profile's points."""
        made = cls(role)
        if profile is None:
            return made
        if profile.decode and role is not Role.PREFILL:
            lightest = min(profile.decode)
            made.decode = Line(lightest[1] / FREE_STREAMS)
            made.decode.fix(profile.decode)
        if profile.prefill and role is not Role.DECODE:
            step = min(profile.decode)[1] if profile.decode and role is Role.AGGREGATED else 0.0
            points = tuple((tokens, max(0.0, seconds - step)) for tokens, seconds in profile.prefill)
            longest = max(points)
            made.prefill = Line(longest[1] / max(1.0, longest[0]))
            made.prefill.fix(points)
        made.kv_tokens = profile.kv_tokens
        return made

    def begin_with(self, fresh: Capacity) -> None:
        """Take a profile's points from one that knows nothing else; where it has none, stay."""
        self.prefill, self.decode = _with_points(self.prefill, fresh.prefill), _with_points(self.decode, fresh.decode)
        self.kv_tokens = self.kv_tokens if fresh.kv_tokens is None else fresh.kv_tokens

    @property
    def known(self) -> bool:
        """Whether anything can be computed."""
        return (self.prefill is not None or self.role is Role.DECODE) and (self.decode is not None or self.role is Role.PREFILL)

    def learn(self, window: Window) -> None:
        """Take in what was seen."""
        if window.kv_usage is not None and window.streams >= 1 and window.kv_usage > 0:
            share = window.kv_usage / window.streams
            self.kv_per_stream = share if self.kv_per_stream is None else self.kv_per_stream + TAIL_SHARE * (share - self.kv_per_stream)
        self._learn_decode(window)
        self._learn_prefill(window)
        if window.settled and self.known:
            found = self._plain(window.rate, window.mix, self._lines(), window.streams)
            self.tail_ttft = _tail(self.tail_ttft, window.ttft_at_s, found.ttft_s)
            self.tail_itl = _tail(self.tail_itl, window.itl_at_s, found.itl_s)

    def estimate(self, rate: float, mix: Mix) -> Estimate:
        """What one replica does at a rate, as clients see it."""
        return self._as_seen(self._plain(rate, mix, self._lines()))

    def rate(self, mix: Mix, slo: Slo) -> float:
        """The most requests a second that one replica carries within the targets; 0 where even an empty one is too slow.

        Runtime complexity: O(1), some thirty estimates.
        """
        lines = self._lines()
        low, high = 0.0, 1.0
        while self._holds(high, mix, slo, lines) and high < 1e6:
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._holds(middle, mix, slo, lines) else (low, middle)
        return low

    def streams(self, mix: Mix, slo: Slo) -> float | None:
        """The most requests in flight within the targets; None where answers' lengths are not known."""
        return None if mix.osl is None or self.decode is None else max(1.0, self.estimate(self.rate(mix, slo), mix).streams)

    # inside

    def _holds(self, rate: float, mix: Mix, slo: Slo, lines: _Lines) -> bool:
        found = self._as_seen(self._plain(rate, mix, lines))
        if found.busy > BUSIEST or (slo.ttft_s is not None and found.ttft_s is not None and found.ttft_s > slo.ttft_s):
            return False
        if slo.itl_s is not None and found.itl_s is not None and found.itl_s > slo.itl_s:
            return False
        return found.streams * self._kv_share(mix) <= FULL_KV

    def _kv_share(self, mix: Mix) -> float:
        """Of the KV cache, for a request: as seen, else by its size where that is known. A prefill engine keeps none for long."""
        if self.role is Role.PREFILL:
            return 0.0
        if self.kv_per_stream is not None:
            return self.kv_per_stream
        return (mix.isl + (mix.osl or 0.0) / 2) / self.kv_tokens if self.kv_tokens else 0.0

    def _lines(self) -> _Lines:
        decode = self.decode.fit() if self.decode is not None else (0.0, 0.0)
        prefill = self.prefill.fit() if self.prefill is not None else (0.0, 0.0)
        return (*decode, *prefill)

    def _as_seen(self, plain: Estimate) -> Estimate:
        """With what the lines leave out."""
        return msgspec.structs.replace(
            plain,
            ttft_s=None if plain.ttft_s is None else plain.ttft_s * self.tail_ttft,
            itl_s=None if plain.itl_s is None else plain.itl_s * self.tail_itl,
        )

    def _plain(self, rate: float, mix: Mix, lines: _Lines, streams: float | None = None) -> Estimate:
        """By the lines alone. `streams`: as many as were seen, where they were."""
        a, b, e, c = lines
        prefilling, decoding = rate * c * mix.isl, rate * b * (mix.osl or 0.0)
        busy = prefilling + decoding
        if busy >= 1:
            return Estimate(busy, math.inf if self.prefill is not None else None, math.inf if self.decode is not None else None, math.inf)
        itl = a / (1 - busy) if streams is None else (a + b * streams) / (1 - min(prefilling, BUSIEST))
        ttft = None
        if self.prefill is not None:
            ttft = e + itl + c * mix.isl_at + _wait_at(c, mix, prefilling, busy)
        found = rate * (mix.osl or 0.0) * itl + rate * (ttft or 0.0)
        return Estimate(busy, ttft, itl if self.decode is not None else None, found if streams is None else streams)

    def _learn_decode(self, window: Window) -> None:
        if window.itl_s is None or self.role is Role.PREFILL or window.streams <= 0:
            return
        _, c = self.prefill.fit() if self.prefill is not None else (0.0, 0.0)
        step = window.itl_s * (1 - min(0.8, c * window.mix.isl * window.rate))
        if self.decode is None:
            self.decode = Line(step / (1 + window.streams / FREE_STREAMS) / FREE_STREAMS)
        self.decode.add(window.streams, step)

    def _learn_prefill(self, window: Window) -> None:
        if window.ttft_s is None or self.role is Role.DECODE or not window.settled or window.mix.isl <= 0:
            return
        mix, itl = window.mix, (window.itl_s or 0.0) if self.role is Role.AGGREGATED else 0.0
        if self.prefill is None:
            self.prefill = Line(max(LEAST_SLOPE, 0.8 * (window.ttft_s - itl) / mix.isl))
        _, c = self.prefill.fit()
        _, b = self.decode.fit() if self.decode is not None else (0.0, 0.0)
        prefilling = min(0.8, window.rate * c * mix.isl)
        busy = min(0.9, prefilling + window.rate * b * (mix.osl or 0.0))
        waits = c * mix.isl_square / (2 * mix.isl) * prefilling / (1 - busy)
        seconds = min(max(0.0, window.ttft_s - itl - waits), BUSIEST * mix.isl / (window.rate * mix.isl) if window.rate else math.inf)
        self.prefill.add(mix.isl, seconds)


def _wait_at(c: float, mix: Mix, prefilling: float, busy: float) -> float:
    """How long, at the percentile that counts, prompts wait for those that came before: the mean of M/G/1, with an exponential tail."""
    if prefilling <= 0 or mix.isl <= 0:
        return 0.0
    mean = c * mix.isl_square / (2 * mix.isl) * prefilling / (1 - busy)
    return mean / prefilling * max(0.0, math.log(prefilling / (1 - mix.at)))


def _with_points(kept: Line | None, fresh: Line | None) -> Line | None:
    if kept is None or fresh is None:
        return fresh if kept is None else kept
    kept.fixed = fresh.fixed
    return kept


def _tail(factor: float, seen: float | None, computed: float | None) -> float:
    if seen is None or computed is None or not 0 < computed < math.inf or seen <= 0:
        return factor
    return min(TAIL_MOST, max(TAIL_LEAST, factor * math.pow(seen / computed / factor, TAIL_SHARE)))
