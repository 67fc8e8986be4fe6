"""Does it pay to compute this prompt on another engine than the one that goes on from it?

    remote    queue and prefill over there  +  bytes ÷ the link's throughput
    local     queue and prefill right here  +  what that delays the streams decoding here

`always` and `never` need no numbers, `static` is Dynamo's rule with its parameters, `measured` compares the two in seconds, by what
such requests have taken before. Pure: numbers in, a `Split` out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

RELEARN_S: Final = 30.0
"""A way that looks slower is taken once more when it has not been for so long: links recover."""
_FORGETTING: Final = 0.95
"""Weight that every older observation keeps with each newer one: some twenty count."""


class Mode(enum.StrEnum):
    """`--disagg`: when a prompt is computed by a prefill engine."""

    ALWAYS = "always"
    NEVER = "never"
    STATIC = "static"
    MEASURED = "measured"


class Why(enum.StrEnum):
    """Why a prompt is computed where it is. A closed list: metrics rely on it."""

    ALWAYS = "always"
    LONG = "long"
    FASTER = "remote_is_faster"
    UNMEASURED = "not_measured_yet"
    """Remote, to have something to compare with."""

    NEVER = "never"
    ROUTE = "route"
    """This path's requests are not split."""
    SEQUENCES = "several_sequences"
    """A handover serves one sequence; this request asks for more."""
    PROMPT_ASKED = "prompt_in_answer"
    """The answer tells of the prompt (echo, its logprobs), so whoever answers has to compute it."""
    UNTOKENIZED = "untokenized"
    NO_PARTNER = "no_prefill_engine"
    """None of its group is usable now, or sees the prompt as the same tokens."""
    SHORT = "short"
    SLOWER = "local_is_faster"

    @property
    def remote(self) -> bool:
        """Whether another engine computes the prompt."""
        return self in _REMOTE


_REMOTE: Final = frozenset({Why.ALWAYS, Why.LONG, Why.FASTER, Why.UNMEASURED})


class StaticRule(msgspec.Struct, frozen=True):
    """Dynamo's `isl_bounding`: a prompt stays where it decodes if little of it is to be computed, by number and by share."""

    eff_isl_threshold: int = 2048
    """Tokens."""
    eff_isl_ratio_threshold: float = 0.7

    def remote(self, facts: Facts) -> bool:
        """Whether the part that decode has not cached is long enough."""
        new = facts.new_at_decode
        return new >= self.eff_isl_threshold or new >= self.eff_isl_ratio_threshold * max(facts.prompt_tokens, 1)


class Facts(msgspec.Struct, frozen=True):
    """One request, with the engines that would share it. In tokens, where nothing else is said."""

    prompt_tokens: int
    cached_at_decode: int = 0
    cached_at_prefill: int = 0
    queued_at_decode: int = 0
    """Prompt tokens waiting to be computed there before this prompt."""
    queued_at_prefill: int = 0
    decoding: int = 0
    """Streams that are being generated on the decode engine."""
    carried: int = 0
    """Bytes of KV cache to hand over."""

    @property
    def new_at_decode(self) -> int:
        """What is to be computed or handed over."""
        return max(0, self.prompt_tokens - self.cached_at_decode)

    @property
    def new_at_prefill(self) -> int:
        """What the prefill engine has to compute."""
        return max(0, self.prompt_tokens - self.cached_at_prefill)


class Split(msgspec.Struct, frozen=True):
    """Where a prompt is computed, why, and what each way is expected to take, where that was compared."""

    why: Why
    facts: Facts | None = None
    remote_s: float | None = None
    local_s: float | None = None

    @property
    def remote(self) -> bool:
        """Whether another engine computes the prompt."""
        return self.why.remote


class Pace:
    """Learns how long an amount takes: seconds ≈ `fixed_s` + amount × `s_per_unit`, by least squares that forgets.

    >>> pace = Pace()
    >>> for tokens in (1000, 2000, 3000):
    ...     pace.took(tokens, 0.1 + tokens * 0.001, now=0.0)
    >>> round(pace.seconds(5000), 3)
    5.1
    """

    __slots__ = ("_count", "_x", "_xx", "_xy", "_y", "latest_at")

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0
        self.latest_at = float("-inf")

    @property
    def known(self) -> bool:
        """Whether anything has been learned."""
        return self._count > 0

    @property
    def mean(self) -> tuple[float, float]:
        """Amount and seconds, of late. Only of a pace that is known."""
        return self._x / self._count, self._y / self._count

    def took(self, amount: float, seconds: float, now: float) -> None:
        """So much has taken so long."""
        self.latest_at = now
        keep = _FORGETTING
        self._count = keep * self._count + 1
        self._x = keep * self._x + amount
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + amount * amount
        self._xy = keep * self._xy + amount * seconds

    def line(self) -> tuple[float, float]:
        """`(fixed_s, s_per_unit)`; neither is negative. Amounts that were all alike tell no fixed part: then all counts per unit."""
        if not self._count:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._count, self._y / self._count
        spread = self._xx / self._count - mean_x * mean_x
        if spread <= 1e-3 * mean_x * mean_x:
            return (0.0, mean_y / mean_x) if mean_x else (mean_y, 0.0)
        slope = (self._xy / self._count - mean_x * mean_y) / spread
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope

    def seconds(self, amount: float) -> float:
        """How long so much is expected to take."""
        fixed, per_unit = self.line()
        return fixed + per_unit * amount


class Paces:
    """A pace for each key, and one of all together, which stands in for those not known."""

    def __init__(self) -> None:
        self._each: dict[object, Pace] = {}
        self._all = Pace()

    def took(self, key: object, amount: float, seconds: float, now: float) -> None:
        """So much has taken so long there."""
        self._each.setdefault(key, Pace()).took(amount, seconds, now)
        self._all.took(amount, seconds, now)

    def of(self, key: object) -> Pace:
        """What is known there, or else on the whole."""
        return self._each.get(key, self._all)

    def each(self) -> Mapping[object, Pace]:
        """All that is known, by key."""
        return self._each

    def forget(self, gone: Callable[[object], bool]) -> None:
        """Nothing is known any more for keys that are `gone`."""
        self._each = {key: pace for key, pace in self._each.items() if not gone(key)}


def decide(mode: Mode, rule: StaticRule, facts: Facts, paces: Measured, now: float) -> Split:
    """Remote or local, for a request that could be either."""
    match mode:
        case Mode.ALWAYS:
            return Split(Why.ALWAYS, facts)
        case Mode.NEVER:
            return Split(Why.NEVER, facts)
        case Mode.STATIC:
            return Split(Why.LONG if rule.remote(facts) else Why.SHORT, facts)
        case Mode.MEASURED:
            return paces.split(facts, now)


class Measured(msgspec.Struct, frozen=True):
    """The paces that count for one pair of engines."""

    prefill: Pace
    """Seconds by tokens queued before and computed for a prompt, at the prefill engine."""
    link: Pace
    """Seconds by bytes handed over."""
    local: Pace
    """Seconds by tokens, at the decode engine."""

    def split(self, facts: Facts, now: float) -> Split:
        """The faster way; the remote one where it has not been tried, or not for long."""
        if not (self.prefill.known and self.link.known):
            return Split(Why.UNMEASURED, facts)
        local = self.local if self.local.known else self.prefill
        remote_s = self.prefill.seconds(facts.queued_at_prefill + facts.new_at_prefill)
        remote_s += self.link.seconds(facts.carried)
        local_s = local.seconds(facts.queued_at_decode + facts.new_at_decode)
        local_s += facts.decoding * local.line()[1] * facts.new_at_decode
        if remote_s < local_s:
            return Split(Why.FASTER, facts, remote_s, local_s)
        stale = now - self.link.latest_at > RELEARN_S
        return Split(Why.UNMEASURED if stale else Why.SLOWER, facts, remote_s, local_s)
