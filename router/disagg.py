"""Does it pay to compute this prompt on another engine than the one that goes on from it?

    remote    queue and prefill over there  +  bytes ÷ the link's throughput
    local     queue and prefill right here  +  what that delays the streams decoding here

`always` and `never` need no numbers, `static` is Dynamo's rule with its parameters, `measured` compares the two in seconds, by what
such requests have taken before. Pure: numbers in, a `Split` out.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from engines.types import Endpoint

RELEARN_S: Final = 30.0
"""A way that looks slower is taken once more, by one request, when it has not been for so long: links recover."""
RELEARN_SHARE: Final = 0.05
"""And only so often that what it costs is no more than this part of the waiting that there is anyway."""
_NEWS: Final = 0.2
"""Weight of each new observation in a mean: some ten count, and of a link that has broken down the first tells enough."""


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
    """Remote, to have something to compare with: one request at a time."""

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
    BEING_MEASURED = "being_measured"
    """Another request has set out to see how long the remote way takes."""
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
    """Bytes of KV cache to hand over; 0 where the size of a token is not known."""

    @property
    def new_at_decode(self) -> int:
        """What is to be computed or handed over."""
        return max(0, self.prompt_tokens - self.cached_at_decode)

    @property
    def handed(self) -> int:
        """How much is handed over: bytes, or tokens where their size is not known."""
        return self.carried or self.new_at_decode

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
    """With what it delays others."""
    wait_s: float = 0.0
    """The local way's time to the first token alone."""
    partner: Endpoint | None = None
    """Who computes the prompt in the remote way, taken or not."""

    @property
    def remote(self) -> bool:
        """Whether another engine computes the prompt."""
        return self.why.remote


class Pace:
    """Learns how long an amount takes, from what amounts like it took: means by size, each size twice the one before, a line from one to the next.

    So what is rare is not forgotten over what is frequent: among a thousand short prompts, the last long one still tells of the next. Beyond
    the least and the greatest size, the line goes on; where there is only one, all counts per unit.

    What was last seen long ago counts no more once there is something newer. Some observations are only rough: they count while there are no
    others.

    >>> pace = Pace()
    >>> for tokens in (1000, 2000, 3000):
    ...     pace.took(tokens, 0.1 + tokens * 0.001, now=0.0)
    >>> round(pace.seconds(5000), 3)
    5.1
    """

    __slots__ = ("_means", "_seen_at", "_sizes", "latest_at", "mean", "rough")

    def __init__(self) -> None:
        self.latest_at = -math.inf
        self.mean = (0.0, 0.0)
        """Amount and seconds, of late, whatever the size."""
        self.rough = False
        """Whether it goes by rough observations."""
        self._sizes: dict[int, tuple[float, float]] = {}
        """Binary logarithm → mean amount and seconds."""
        self._seen_at: dict[int, float] = {}
        self._means: list[tuple[float, float]] = []
        """The same in order."""

    @property
    def known(self) -> bool:
        """Whether anything has been learned."""
        return bool(self._means)

    def knows(self, amount: float) -> bool:
        """Whether an amount so great has been seen, or half of it."""
        return bool(self._means) and amount <= 2 * self._means[-1][0]

    def took(self, amount: float, seconds: float, now: float, *, rough: bool = False) -> None:
        """So much has taken so long; `rough`: about so long."""
        if rough and not self.rough and now - self.latest_at < RELEARN_S:
            return
        if rough is not self.rough:
            self._sizes.clear()
        size, seen = size_of(amount), (amount, seconds)
        anew = now - self._seen_at.get(size, -math.inf) > RELEARN_S
        self.mean = _towards(self.mean if self._sizes else None, seen)
        self._sizes[size] = _towards(None if anew else self._sizes.get(size), seen)
        self.latest_at = self._seen_at[size] = now
        self.rough = rough
        self._means = [self._sizes[size] for size in sorted(self._sizes)]

    def seconds(self, amount: float) -> float:
        """How long that much is expected to take; never less than nothing. 0 when nothing is known. O(sizes seen)."""
        means = self._means
        if len(means) < 2:
            return means[0][1] * amount / max(means[0][0], 1.0) if means else 0.0
        above = next((place for place, (x, _) in enumerate(means) if x >= amount), len(means) - 1)
        (x, y), (further, later) = means[max(above - 1, 0)], means[max(above, 1)]
        return max(0.0, y + (amount - x) * max(0.0, later - y) / (further - x))

    def rise(self, amount: float) -> float:
        """Of that, what grows with the amount."""
        return max(0.0, self.seconds(amount) - self.seconds(0.0))

    def seen_at(self, amount: float) -> float:
        """When an amount of that size was seen last."""
        return self._seen_at.get(size_of(amount), -math.inf)


class Paces:
    """A pace for each key, and one of all together, which stands in for those not known."""

    def __init__(self) -> None:
        self._each: dict[object, Pace] = {}
        self._all = Pace()

    def took(self, key: object, amount: float, seconds: float, now: float, *, rough: bool = False) -> None:
        """So much has taken so long there; `rough`: about so long."""
        self._each.setdefault(key, Pace()).took(amount, seconds, now, rough=rough)
        self._all.took(amount, seconds, now, rough=rough)

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


class Tried(msgspec.Struct, frozen=True):
    """When somebody set out last to see what the remote way takes for prompts of one size, and may still be under way."""

    at: float = -math.inf
    waited_s: float = 0.0
    """How long others have waited since, in the faster way."""


def size_of(amount: float) -> int:
    """The class of amounts that it is one of; each is of amounts twice as great as those of the one before."""
    return int(amount).bit_length()


def _towards(mean: tuple[float, float] | None, seen: tuple[float, float]) -> tuple[float, float]:
    if mean is None:
        return seen
    return mean[0] + _NEWS * (seen[0] - mean[0]), mean[1] + _NEWS * (seen[1] - mean[1])


class Measured(msgspec.Struct, frozen=True):
    """The paces that count for one pair of engines."""

    prefill: Pace
    """Seconds by tokens queued before and computed for a prompt, at the prefill engine."""
    link: Pace
    """Seconds by bytes handed over."""
    local: Pace
    """Seconds by tokens, at the decode engine."""
    tried: Tried = Tried()
    """The last look at a remote way that is not known, or slower."""
    overdue_s: float = 0.0
    """How long a handover like this one has been under way that is not through yet."""

    def split(self, facts: Facts, now: float) -> Split:
        """The faster way; the remote one where it has not been tried, or where it is time to try it again."""
        there, here = facts.queued_at_prefill + facts.new_at_prefill, facts.queued_at_decode + facts.new_at_decode
        seen_at = self.link.seen_at(facts.handed)
        under_way = now - self.tried.at < RELEARN_S and self.tried.at > seen_at
        if not (self.prefill.known and self.link.known):
            return Split(Why.BEING_MEASURED if under_way else Why.UNMEASURED, facts)
        local = self.local if self.local.knows(here) else self.prefill
        remote_s = max(self.prefill.seconds(there) + self.link.seconds(facts.handed), self.overdue_s)
        wait_s = local.seconds(here)
        local_s = wait_s + facts.decoding * local.rise(facts.new_at_decode)
        if remote_s < local_s:
            return Split(Why.FASTER, facts, remote_s, local_s, wait_s)
        due = now - max(seen_at, self.tried.at) > RELEARN_S and self.tried.waited_s * RELEARN_SHARE >= remote_s - wait_s
        if due or not (self.link.knows(facts.handed) or under_way):
            return Split(Why.UNMEASURED, facts, remote_s, local_s, wait_s)
        return Split(Why.SLOWER, facts, remote_s, local_s, wait_s)
