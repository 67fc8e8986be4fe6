"""Which other routers serve the same engines, what do they carry, and which of us relays which engine's KV events?

Routers that share a bus tell each other who they are and what they have in flight; nobody is asked, and nobody leads. Every router
keeps the same table, and from equal tables all come to equal answers:

    Presence(a: carries 3 on e1, relays e1) ──┐
    Presence(b: carries 5 on e1)            ──┼──▶ Peers of c ──▶ loads {e1: 8}      Take(e2): nobody relays it, and it is c's turn
    Farewell(b), or silence                 ──┘

An engine is relayed by one router, since a stream on the bus has one writer. A relay is a *claim* with a number, one higher than any
heard of before. Of two claims the higher counts, of equal ones that of the higher name; the other router yields, and the one that
stays begins its stream anew, for mirrors may have turned to the one that yielded.

A process that only relays (`commutator relay`) comes first: what it follows, it takes, also from a router; among several such it is as
among routers. Routers take what no such process follows.

All of it is ended by our own clock. A router that was itself away (its loop stalled, its machine slept) judges nobody by that time.
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from discovery.prefixes import Mark, Prefixes
from engines.blocks import KEY_BYTES, pack_keys, unpack_keys
from engines.types import Endpoint

BEAT_S: Final = 0.5
"""How often a router says that it is there, and everything it carries."""
GONE_AFTER_S: Final = 3.0
"""A router not heard for so long carries nothing and relays nothing."""
AWAY_S: Final = 1.5
"""Between two of our own ticks: then it was us who were away, and all others get their time again."""
HELLO_S: Final = 0.25
"""For others to answer our greeting, before anything is claimed."""
GATHER_S: Final = 3.0
"""For the processes that were started with us to come up."""
SETTLE_S: Final = 0.2
"""Without news of who is there and what they follow: all then go by the same, and come to the same."""
PATIENCE_S: Final = 1.0
"""For the others to find an engine that we have found; and, three times over, for the one whose turn it is to take it."""
MAX_PEERS: Final = 256
MAX_NAMED: Final = 10_000
"""Engines or endpoints in one message: more is no message of ours."""
MAX_KEYS: Final = 1 << 16
"""Marks of one endpoint in one message: half of NATS' own limit."""

MAX_AMOUNT: Final = 1 << 48
Amount = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Url = Annotated[str, Meta(max_length=2048)]


class Carried(NamedTuple):
    """What is in flight on an endpoint; of others' blocks, those that we have not in flight there as well."""

    requests: int = 0
    prefill_tokens: int = 0
    computing: int = 0
    """Of the requests, those whose prompts are not computed."""
    blocks: int = 0


NOTHING: Final = Carried()
Counts = tuple[int, int, int]
"""Requests, prefill tokens, requests whose prompts are not computed."""
NO_LOAD: Final[Counts] = (0, 0, 0)


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What a router has in flight on an endpoint, as it travels."""

    engine: Url
    rank: Annotated[int, Meta(ge=0, le=1 << 16)]
    requests: Amount
    prefill_tokens: Amount
    computing: Amount = 0


class Marks(msgspec.Struct, frozen=True, array_like=True):
    """Marks of prompts in flight on an endpoint (see `discovery.prefixes`), as they travel."""

    engine: Url
    rank: Annotated[int, Meta(ge=0, le=1 << 16)]
    keys: Annotated[bytes, Meta(max_length=MAX_KEYS * KEY_BYTES)]
    weights: Annotated[bytes, Meta(max_length=MAX_KEYS)]
    """How many blocks each stands for; empty where it ends."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A router begins to listen: who else is there?"""

    router: Name


class Presence(msgspec.Struct, frozen=True, array_like=True, tag="presence"):
    """A router is there. What it does not name it does not carry, follow or relay."""

    router: Name
    carries: Annotated[list[Told], Meta(max_length=MAX_NAMED)]
    follows: Annotated[list[Url], Meta(max_length=MAX_NAMED)]
    """Engines that it could relay."""
    relays: Annotated[dict[Url, Amount], Meta(max_length=MAX_NAMED)]
    """Engine → the number of its claim."""
    marks: Annotated[list[Marks], Meta(max_length=MAX_NAMED)] | None
    """None: as before."""
    only_relays: bool = False
    """It serves no client, and is there to relay."""


class Update(msgspec.Struct, frozen=True, array_like=True, tag="update"):
    """What has changed of what a router carries since it last told."""

    router: Name
    carries: Annotated[list[Told], Meta(max_length=MAX_NAMED)]
    began: Annotated[list[Marks], Meta(max_length=MAX_NAMED)]
    ended: Annotated[list[Marks], Meta(max_length=MAX_NAMED)]


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """A router is going."""

    router: Name


PeerMessage = Hello | Presence | Update | Farewell


class Take(msgspec.Struct, frozen=True):
    """Relay this engine from now on; when it is relayed already, begin its stream anew."""

    engine: str


class Yield(msgspec.Struct, frozen=True):
    """Relay this engine no more: another router does."""

    engine: str


Change = Take | Yield


class Others(Protocol):
    """Other routers in front of the same engines: `Peers`."""

    def load(self, endpoint: Endpoint) -> Carried:
        """What they have in flight there."""
        ...

    def in_flight(self, keys: Sequence[int]) -> dict[Endpoint, int]:
        """Where they have how many leading `keys` in flight; at least one."""
        ...

    def step(self, endpoint: Endpoint, keys: Sequence[int], by: int) -> None:
        """A request of ours with these keys has begun (1) or ended (-1) there."""
        ...


class _Peer:
    __slots__ = ("carries", "follows", "heard_at", "only_relays", "relays")

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.carries: dict[Endpoint, Counts] = {}
        self.follows: frozenset[str] = frozenset()
        self.relays: dict[str, int] = {}
        self.only_relays = False


class Peers:
    """One router's table of the others.

    >>> a = Peers("a", now=0.0)
    >>> a.hear(Presence("b", [Told("http://e:1", 0, 3, 100)], [], {}, None), now=0.0)
    []
    >>> a.load(Endpoint("http://e:1"))
    Carried(requests=3, prefill_tokens=100, computing=0, blocks=0)
    >>> a.tick(1.0), a.tick(2.0), a.tick(3.0), a.load(Endpoint("http://e:1")).requests
    ([], [], [], 0)
    """

    def __init__(self, router: str, now: float, *, expected: int = 1, only_relays: bool = False) -> None:
        """`router` is our own name; `expected` is how many of us were started together; `only_relays` is what we are."""
        self.router = router
        self.only_relays = only_relays
        self.prefixes = Prefixes()
        self.ignored = 0
        """Messages of more routers than there can be."""
        self._expected = expected
        self._loads: dict[Endpoint, Counts] = {}
        """Of all others together."""
        self._peers: dict[str, _Peer] = {}
        self._began = self._ticked = now
        self._gathered = False
        self._news_at = now
        self._free_since: dict[str, float] = {}
        """Engines followed that nobody relays, and since when."""
        self._follows: set[str] = set()
        self._relays: dict[str, int] = {}
        self._highest: dict[str, int] = {}
        """Engine followed → the highest number of a claim to it."""
        self._disputed: set[tuple[str, str, int]] = set()
        """Claims of others to engines of ours that we have answered."""

    def __len__(self) -> int:
        """Other routers that are there."""
        return len(self._peers)

    @property
    def undecided(self) -> bool:
        """Whether there is an engine that nobody relays: `tick` is then to be called more often than at every beat."""
        return bool(self._free_since)

    @property
    def relays(self) -> dict[str, int]:
        """Engines that we relay, with the numbers of our claims."""
        return dict(self._relays)

    @property
    def follows(self) -> list[str]:
        """Engines that we could relay."""
        return sorted(self._follows)

    def relayed(self, engine: str) -> bool:
        """Whether another one relays it, who comes before us."""
        return any(engine in peer.relays and (peer.only_relays or not self.only_relays) for peer in self._peers.values())

    def load(self, endpoint: Endpoint) -> Carried:
        """What all others together have in flight there. Runtime complexity: O(1)."""
        load = self._loads.get(endpoint)
        return NOTHING if load is None else Carried(*load, self.prefixes.blocks(endpoint))

    def in_flight(self, keys: Sequence[int]) -> dict[Endpoint, int]:
        """Where others have how many leading `keys` in flight: see `Prefixes.in_flight`."""
        return self.prefixes.in_flight(keys)

    def step(self, endpoint: Endpoint, keys: Sequence[int], by: int) -> None:
        """A request of ours has begun or ended: see `Prefixes.step`."""
        self.prefixes.step(endpoint, keys, by)

    def follow(self, engine: str, now: float) -> list[Change]:
        """We could relay this engine."""
        self._follows.add(engine)
        self._news_at = now
        return self._decide(now)

    def unfollow(self, engine: str) -> None:
        """The engine is none of ours any more; whoever calls has stopped relaying it."""
        self._follows.discard(engine)
        self._relays.pop(engine, None)
        self._free_since.pop(engine, None)
        self._highest.pop(engine, None)
        self._disputed = {dispute for dispute in self._disputed if dispute[1] != engine}

    def lost(self) -> None:
        """The bus is away: nothing is known of what others carry. What they relay they still relay, as far as anybody knows."""
        for router, peer in self._peers.items():
            peer.carries.clear()
            self.prefixes.replace(router, {})
        self._loads.clear()

    def restart(self, now: float) -> None:
        """The bus is back: who is there has to be heard again before anything is claimed. What we relay we go on with."""
        self._began = now
        self._gathered = False
        self._news_at = now
        self._free_since.clear()
        for peer in self._peers.values():
            peer.heard_at = now

    def hear(self, message: PeerMessage, now: float) -> list[Change]:
        """A router has spoken; our own words come back too, and are nothing. O(what it names)."""
        if message.router == self.router:
            return []
        if isinstance(message, Farewell):
            return self.gone(message.router, now)
        peer = self._peers.get(message.router)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self.ignored += 1
                return []
            peer = self._peers[message.router] = _Peer(now)
            self._news_at = now
        peer.heard_at = now
        match message:
            case Presence():
                return self._present(message, peer, now)
            case Update():
                self._update(message, peer)
            case Hello():
                pass
        return []

    def gone(self, router: str, now: float) -> list[Change]:
        """A router is known to have ended."""
        peer = self._peers.pop(router, None)
        if peer is None:
            return []
        for endpoint in list(peer.carries):
            self._carry(peer, endpoint, NO_LOAD)
        self.prefixes.replace(router, {})
        self._news_at = now
        self._disputed = {dispute for dispute in self._disputed if dispute[0] != router}
        return self._decide(now)

    def tick(self, now: float) -> list[Change]:
        """To be called at every beat or more often: those who are silent are gone, and engines that nobody relays are taken."""
        if now - self._ticked > AWAY_S:
            for peer in self._peers.values():
                peer.heard_at = now
        self._ticked = now
        changes: list[Change] = []
        for router in [name for name, peer in self._peers.items() if now - peer.heard_at >= GONE_AFTER_S]:
            changes += self.gone(router, now)
        return changes + self._decide(now)

    def _update(self, update: Update, peer: _Peer) -> None:
        for endpoint, load in _entries(update.carries):
            if endpoint in peer.carries or len(peer.carries) < MAX_NAMED:
                self._carry(peer, endpoint, load)
        for marks in update.ended:
            self.prefixes.ended(update.router, *_unpacked_keys(marks))
        for marks in update.began:
            self.prefixes.began(update.router, *_unpacked(marks))

    def _present(self, presence: Presence, peer: _Peer, now: float) -> list[Change]:
        told = dict(_entries(presence.carries))
        for endpoint in [known for known in peer.carries if known not in told]:
            self._carry(peer, endpoint, NO_LOAD)
        for endpoint, load in told.items():
            self._carry(peer, endpoint, load)
        if presence.marks is not None:
            self.prefixes.replace(presence.router, {endpoint: dict(marks) for endpoint, marks in map(_unpacked, presence.marks)})
        if (follows := frozenset(presence.follows)) != peer.follows:
            peer.follows = follows
            self._news_at = now
        if presence.only_relays != peer.only_relays:
            peer.only_relays = presence.only_relays
            self._news_at = now
        peer.relays = presence.relays
        return [*self._settle(presence.router, peer), *self._decide(now)]

    def _carry(self, peer: _Peer, endpoint: Endpoint, load: Counts) -> None:
        before = peer.carries.pop(endpoint, NO_LOAD)
        if load != NO_LOAD:
            peer.carries[endpoint] = load
        others = self._loads.pop(endpoint, NO_LOAD)
        after = (others[0] - before[0] + load[0], others[1] - before[1] + load[1], others[2] - before[2] + load[2])
        if after != NO_LOAD:
            self._loads[endpoint] = after

    def _settle(self, router: str, peer: _Peer) -> Iterator[Change]:
        """Compare a router's claims with ours."""
        for engine in peer.relays.keys() & self._follows:
            number = peer.relays[engine]
            self._highest[engine] = max(self._highest.get(engine, 0), number)
            self._free_since.pop(engine, None)
            ours = self._relays.get(engine)
            if ours is None:
                continue
            if (number, router) > (ours, self.router):
                del self._relays[engine]
                yield Yield(engine)
            elif (router, engine, number) not in self._disputed:
                self._disputed.add((router, engine, number))
                yield Take(engine)

    def _decide(self, now: float) -> list[Change]:
        """Take what is free, in turns: who has the fewest engines is next, of equals the one of the lowest name."""
        rivals = {name: peer for name, peer in self._peers.items() if peer.only_relays or not self.only_relays}
        held = {engine for peer in rivals.values() for engine in peer.relays} | self._relays.keys()
        free = sorted(self._follows - held)
        if not free:
            return []
        for engine in free:
            self._free_since.setdefault(engine, now)
        if not self._all_are_here(now) or (self._peers and now - self._news_at < SETTLE_S):
            return []
        counts = Counter({name: len(peer.relays) for name, peer in rivals.items()} | {self.router: len(self._relays)})
        changes: list[Change] = []
        for engine in free:
            waited_s = now - self._free_since[engine]
            able = [name for name, peer in rivals.items() if engine in peer.follows]
            first = [name for name in able if rivals[name].only_relays]
            if not first and len(able) < len(rivals) and waited_s < PATIENCE_S:
                continue
            next_ = min(first or able, key=lambda name: (counts[name], name), default=self.router)
            if self.only_relays or not first:
                next_ = min(next_, self.router, key=lambda name: (counts[name], name))
            counts[next_] += 1
            if next_ == self.router or waited_s >= 3 * PATIENCE_S:
                self._highest[engine] = self._relays[engine] = min(self._highest.get(engine, 0) + 1, MAX_AMOUNT)
                self._free_since.pop(engine, None)
                changes.append(Take(engine))
        return changes

    def _all_are_here(self, now: float) -> bool:
        """Whether everybody who can be expected has been heard, or has had the time."""
        waited_s = now - self._began
        if not self._gathered:
            here = len(self._peers) + 1 >= self._expected
            self._gathered = waited_s >= GATHER_S or (here and (self._expected > 1 or waited_s >= HELLO_S))
        return self._gathered

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(everything)."""
        loads: dict[Endpoint, Counts] = {}
        for peer in self._peers.values():
            for endpoint, load in peer.carries.items():
                requests, prefill_tokens, computing = loads.get(endpoint, NO_LOAD)
                loads[endpoint] = (requests + load[0], prefill_tokens + load[1], computing + load[2])
        assert loads == self._loads
        self.prefixes._check()  # noqa: SLF001  invariants of a part are invariants of the whole
        assert self._relays.keys() <= self._follows


def _entries(told: Iterable[Told]) -> Iterator[tuple[Endpoint, Counts]]:
    for entry in told:
        yield Endpoint(entry.engine, entry.rank), (entry.requests, entry.prefill_tokens, entry.computing)


def packed(endpoint: Endpoint, marks: Sequence[Mark]) -> Marks:
    """Marks as they travel; what is too much for a message is left out, and is only not known of."""
    sent = marks[:MAX_KEYS]
    return Marks(endpoint.engine, endpoint.rank, pack_keys(key for key, _ in sent), bytes(weight for _, weight in sent))


def _unpacked(marks: Marks) -> tuple[Endpoint, list[Mark]]:
    """What does not fit together is as good as not said."""
    endpoint, keys = _unpacked_keys(marks)
    return endpoint, list(zip(keys, marks.weights, strict=False))


def _unpacked_keys(marks: Marks) -> tuple[Endpoint, list[int]]:
    whole = len(marks.keys) - len(marks.keys) % KEY_BYTES
    return Endpoint(marks.engine, marks.rank), unpack_keys(marks.keys[:whole])
