"""What is known of each pair of engines that can share a request: does it pay, does it work, is its link what it should be?

It learns from what such requests took, and leaves a pair alone for a while whose transfers fail. Of a stream, the first token tells what
the prompt took; of an answer that comes whole, that is its time less what the engine says the other tokens take. Pure: `now` is an argument.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, cast

import msgspec

from engines.links import parse_link
from engines.metrics import EngineWork
from router.disagg import RELEARN_S, Measured, Mode, Paces, Split, StaticRule, Tried, Why, decide, size_of
from router.handed import Handed

if TYPE_CHECKING:
    from engines.kv_bytes import KvShape
    from engines.types import Endpoint, EngineInfo
    from router.disagg import Facts

LEFT_ALONE_S: Final = (2.0, 60.0)
"""How long a pair is left alone after its first failed transfer; doubles with each further one, up to the second number."""
SLOWER: Final = 4.0
"""A link is slow that takes so many times as long as it should."""
_NOTICED_S: Final = 0.2
_PEERS: Final = 3
_NO_WORK: Final = EngineWork(0, 0)

Pair = tuple["Endpoint", "Endpoint"]
"""Prefill, decode."""


class DisaggRules(msgspec.Struct, frozen=True):
    """What the operator wants."""

    mode: Mode = Mode.MEASURED
    static: StaticRule = StaticRule()
    enforce: bool = False
    """Without a usable prefill engine, decode engines compute no prompts in its place."""


class SlowLink(msgspec.Struct, frozen=True):
    """Transfers that take far longer than they should.

    The commonest fault of such deployments is a transport that silently falls back, from RDMA to TCP.
    """

    carried: float
    """Bytes, on the average of late."""
    seconds: float
    """What they took."""
    expected_s: float
    """What they should have taken."""
    by: str
    """Says who: its `link`, or its peers."""

    def __str__(self) -> str:
        found, wanted = self.carried / self.seconds, self.carried / self.expected_s
        return f"{found / 1e6:,.0f} MB/s, where {self.by} would carry {wanted / 1e6:,.0f} MB/s: has the transport fallen back to TCP?"


class Awaited(msgspec.Struct, frozen=True, eq=False):
    """A handover under way, whose first token will tell when it is through."""

    pair: Pair
    handed: int
    began: float


class _Broken(msgspec.Struct):
    times: int = 0
    until: float = 0.0


class Pairing:
    """What is known of all pairs."""

    def __init__(self, rules: DisaggRules) -> None:
        self.rules = rules
        self.slow: dict[Pair, SlowLink] = {}
        """Pairs whose link is far slower than it should be."""
        self._shapes: dict[str, KvShape] = {}
        self._links: dict[str, float] = {}
        self._prefill, self._link, self._local = Paces(), Paces(), Paces()
        self._awaited: dict[Pair, dict[Awaited, None]] = {}
        self._unsized: set[Pair] = set()
        """Pairs whose link is known by tokens, since nobody knows how many bytes one takes."""
        self._tried: dict[tuple[Endpoint, Endpoint, int], Tried] = {}
        """By pair and size."""
        self._broken: dict[Pair, _Broken] = {}
        self._handed = Handed()
        self._work: dict[Endpoint, EngineWork] = {}
        self._step_s: dict[Endpoint, float] = {}

    def know(self, info: EngineInfo, shape: KvShape | None) -> None:
        """What a token of its models takes, and what link it has, where these are known."""
        if shape is not None:
            self._shapes.update((model.id, shape) for model in info.models)
        if info.spec.link is not None:
            self._links[info.id] = parse_link(info.spec.link).bytes_per_s

    def carried(self, model: str, tokens: int) -> int:
        """Bytes of KV cache of so many tokens; 0 where the model's size is not known."""
        shape = self._shapes.get(model)
        return 0 if shape is None else shape.bytes(tokens)

    def split(self, facts: Facts, pair: Pair, now: float, *, must: bool) -> Split:
        """Where the prompt is computed. `must`: the decode engine cannot compute it, so there is nothing to decide."""
        if must:
            return Split(Why.ALWAYS, facts)
        tried, overdue_s = self._tried.get((*pair, size_of(facts.handed)), Tried()), self._overdue_s(pair, facts.handed, now)
        paces = Measured(self._prefill.of(pair), self._link.of(pair), self._local.of(pair[1]), tried, overdue_s)
        return msgspec.structs.replace(decide(self.rules.mode, self.rules.static, facts, paces, now), partner=pair[0])

    def awaiting(self, decode: Endpoint) -> int:
        """Handovers under way to a decode engine, of streams."""
        return sum(len(awaited) for pair, awaited in self._awaited.items() if pair[1] == decode)

    def awaits(self, pair: Pair, facts: Facts, now: float) -> Awaited:
        """A stream's decode engine has been asked to go on. `came` must follow, whatever becomes of it."""
        awaited = Awaited(pair, facts.handed, now)
        self._awaited.setdefault(pair, {})[awaited] = None
        return awaited

    def came(self, awaited: Awaited) -> None:
        """It is through, or never will be. Harmless when repeated."""
        under_way = self._awaited.get(awaited.pair)
        if under_way is not None and under_way.pop(awaited, 0) is None and not under_way:
            del self._awaited[awaited.pair]

    def usable(self, pair: Pair, now: float) -> bool:
        """Whether the pair is not being left alone."""
        broken = self._broken.get(pair)
        if broken is not None and broken.until > now:
            return False
        fails = pair in self.slow or pair[1] in self.computing_again
        return not (self.rules.mode is Mode.MEASURED and fails and now - self._link.of(pair).latest_at < RELEARN_S)

    def chosen(self, split: Split, decode: Endpoint, now: float) -> None:
        """A request is on its way by this split."""
        if split.partner is None or split.facts is None:
            return
        at = split.partner, decode, size_of(split.facts.handed)
        if split.why is Why.UNMEASURED:
            self._tried[at] = Tried(now)
        elif split.why is Why.SLOWER:
            tried = self._tried.get(at, Tried())
            self._tried[at] = Tried(tried.at, tried.waited_s + split.wait_s)

    def untold(self, pair: Pair, facts: Facts) -> None:
        """Who set out to measure has nothing to tell: another one may set out."""
        self._tried.pop((*pair, size_of(facts.handed)), None)

    def failed(self, pair: Pair, now: float) -> None:
        """A transfer between them has failed."""
        broken = self._broken.setdefault(pair, _Broken())
        least, most = LEFT_ALONE_S
        broken.until = now + min(most, least * 2**broken.times)
        broken.times = min(broken.times + 1, 10)

    def prefilled(self, pair: Pair, tokens: int, seconds: float, now: float, *, rough: bool = False) -> None:
        """A prompt has been computed for the pair, `tokens` having been waited for and computed."""
        self._prefill.took(pair, tokens, seconds, now, rough=rough)

    def transferred(self, pair: Pair, facts: Facts, seconds: float, now: float, *, rough: bool = False) -> SlowLink | None:
        """A prompt has been handed over; the pair's link, when it has just turned out to be slow. A `rough` time tells no such thing."""
        self._broken.pop(pair, None)
        self._link.took(pair, facts.handed, seconds, now, rough=rough)
        if not facts.carried:
            self._unsized.add(pair)
        if pair in self._unsized or self._link.of(pair).rough:
            return None
        before, found = self.slow.pop(pair, None), self._judged(pair)
        if found is not None:
            self.slow[pair] = found
        return found if before is None else None

    def computed(self, decode: Endpoint, tokens: int, seconds: float, now: float, *, rough: bool = False) -> None:
        """A decode engine has computed a prompt itself."""
        self._local.took(decode, tokens, seconds, now, rough=rough)

    def until_first(self, decode: Endpoint, whole_s: float, tokens: int) -> float | None:
        """About how long the first of an answer's tokens took, of one that came whole; None where the engine tells of no pace."""
        step_s = self._step_s.get(decode)
        return None if step_s is None else max(0.0, whole_s - step_s * (tokens - 1))

    @property
    def computing_again(self) -> Mapping[Endpoint, int]:
        """Decode engines that compute what they are handed, and how many tokens of late."""
        return self._handed.again

    def fetched(self, decode: Endpoint) -> int | None:
        """Tokens that a decode engine says it has fetched; for `handed`."""
        return self._handed.fetched(decode)

    def handed(self, decode: Endpoint, tokens: int, before: int | None) -> None:
        """A decode engine answers that was handed so many tokens; `before` it was asked, it had `fetched` so many."""
        self._handed.over(decode, tokens, before)

    def reported(self, decode: Endpoint, work: EngineWork) -> int | None:
        """What a decode engine says it has done; how many tokens it has computed again, when that has just turned out."""
        before, self._work[decode] = self._work.get(decode, _NO_WORK), work
        if work.steps > before.steps:
            self._step_s[decode] = (work.steps_s - before.steps_s) / (work.steps - before.steps)
        return self._handed.reported(decode, work)

    def throughputs(self) -> Iterator[tuple[Pair, float]]:
        """Bytes per second of each pair's transfers of late."""
        for pair, pace in self._link.each().items():
            carried, seconds = pace.mean
            if carried and seconds and pair not in self._unsized:
                yield cast("Pair", pair), carried / seconds

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left."""
        self._broken = {pair: broken for pair, broken in self._broken.items() if endpoint not in pair}
        self.slow = {pair: slow for pair, slow in self.slow.items() if endpoint not in pair}
        self._unsized = {pair for pair in self._unsized if endpoint not in pair}
        self._tried = {at: tried for at, tried in self._tried.items() if endpoint not in at}
        self._links.pop(endpoint.engine, None)
        self._work.pop(endpoint, None)
        self._step_s.pop(endpoint, None)
        self._handed.forget(endpoint)
        for paces in (self._prefill, self._link, self._local):
            paces.forget(lambda key: key == endpoint or (isinstance(key, tuple) and endpoint in key))

    def _overdue_s(self, pair: Pair, handed: int, now: float) -> float:
        """How long the oldest handover has been under way, if it is of no more than this one: what breaks down is seen before it ends."""
        oldest = next(iter(self._awaited.get(pair, ())), None)
        return 0.0 if oldest is None or oldest.handed > 2 * handed else now - oldest.began

    def _judged(self, pair: Pair) -> SlowLink | None:
        """Whether its transfers take several times what they should, by more than a queue at the decode engine explains."""
        carried, seconds = self._link.of(pair).mean
        expected = []
        if given := [self._links[end.engine] for end in pair if end.engine in self._links]:
            expected.append((carried / min(given), "its link"))
        peers = [pace.seconds(carried) for other, pace in self._link.each().items() if other != pair]
        if len(peers) >= _PEERS:
            expected.append((statistics.median(peers), "the median of its peers"))
        for expected_s, by in expected:
            if carried and expected_s and seconds - expected_s > max((SLOWER - 1) * expected_s, _NOTICED_S):
                return SlowLink(carried, seconds, expected_s, by)
        return None
