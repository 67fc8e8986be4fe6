"""What is known of each pair of engines that can share a request: does it pay, does it work, is its link what it should be?

It learns from what such requests took, and leaves a pair alone for a while whose transfers fail. Pure: `now` is an argument.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, cast

import msgspec

from engines.links import parse_link
from router.disagg import RELEARN_S, Measured, Mode, Paces, Split, StaticRule, Why, decide

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

Pair = tuple["Endpoint", "Endpoint"]
"""Prefill, decode."""


class DisaggRules(msgspec.Struct, frozen=True):
    """What the operator wants."""

    mode: Mode = Mode.ALWAYS
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
        self._broken: dict[Pair, _Broken] = {}

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
        paces = Measured(self._prefill.of(pair), self._link.of(pair), self._local.of(pair[1]))
        return decide(self.rules.mode, self.rules.static, facts, paces, now)

    def usable(self, pair: Pair, now: float) -> bool:
        """Whether the pair is not being left alone."""
        broken = self._broken.get(pair)
        if broken is not None and broken.until > now:
            return False
        return not (self.rules.mode is Mode.MEASURED and pair in self.slow and now - self._link.of(pair).latest_at < RELEARN_S)

    def failed(self, pair: Pair, now: float) -> None:
        """A transfer between them has failed."""
        broken = self._broken.setdefault(pair, _Broken())
        least, most = LEFT_ALONE_S
        broken.until = now + min(most, least * 2**broken.times)
        broken.times = min(broken.times + 1, 10)

    def prefilled(self, pair: Pair, tokens: int, seconds: float, now: float) -> None:
        """A prompt has been computed for the pair, `tokens` having been waited for and computed."""
        self._prefill.took(pair, tokens, seconds, now)

    def transferred(self, pair: Pair, count: int, seconds: float, now: float) -> SlowLink | None:
        """So many bytes have been handed over; the pair's link, when it has just turned out to be slow."""
        self._broken.pop(pair, None)
        self._link.took(pair, count, seconds, now)
        before, found = self.slow.pop(pair, None), self._judged(pair)
        if found is not None:
            self.slow[pair] = found
        return found if before is None else None

    def computed(self, decode: Endpoint, tokens: int, seconds: float, now: float) -> None:
        """A decode engine has computed a prompt itself."""
        self._local.took(decode, tokens, seconds, now)

    def throughputs(self) -> Iterator[tuple[Pair, float]]:
        """Bytes per second of each pair's transfers of late."""
        for pair, pace in self._link.each().items():
            carried, seconds = pace.mean
            if carried and seconds:
                yield cast("Pair", pair), carried / seconds

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left."""
        self._broken = {pair: broken for pair, broken in self._broken.items() if endpoint not in pair}
        self.slow = {pair: slow for pair, slow in self.slow.items() if endpoint not in pair}
        self._links.pop(endpoint.engine, None)
        for paces in (self._prefill, self._link, self._local):
            paces.forget(lambda key: key == endpoint or (isinstance(key, tuple) and endpoint in key))

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
