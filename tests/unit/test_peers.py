"""Routers that hear of each other: what is carried, who relays what, and that silence ends it."""

from __future__ import annotations

import doctest
import functools
import random
from collections.abc import Callable

import msgspec
import pytest

from discovery import peers as module
from discovery.peers import (
    AWAY_S,
    BEAT_S,
    GATHER_S,
    GONE_AFTER_S,
    HELLO_S,
    MAX_PEERS,
    NOTHING,
    PATIENCE_S,
    Carried,
    Change,
    Farewell,
    Hello,
    PeerMessage,
    Peers,
    Presence,
    Take,
    Told,
    Update,
    Yield,
    packed,
)
from discovery.prefixes import marks
from engines.types import Endpoint

E1, E2 = Endpoint("http://a:1"), Endpoint("http://b:1")
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(PeerMessage)


def presence(router: str, *carries: Told, follows: list[str] | None = None, relays: dict[str, int] | None = None) -> Presence:
    return Presence(router, list(carries), follows or [], relays or {}, None)


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted > 3
    assert results.failed == 0


def test_what_others_carry_is_their_sum_and_a_presence_says_all_of_it() -> None:
    peers = Peers("me", 0.0)
    peers.hear(presence("b", Told(E1.engine, 0, 3, 100, 2), Told(E2.engine, 0, 1, 0)), 0.0)
    peers.hear(presence("c", Told(E1.engine, 0, 2, 50, 2)), 0.0)
    assert peers.load(E1) == Carried(5, 150, 4)
    peers.hear(Update("b", [Told(E1.engine, 0, 4, 0)], [], []), 0.1)
    assert peers.load(E1) == Carried(6, 50, 2)
    peers.hear(presence("b", Told(E1.engine, 0, 1, 0)), 0.2)
    assert (peers.load(E1), peers.load(E2)) == (Carried(3, 50, 2), NOTHING)
    peers._check()


def test_our_own_words_come_back_and_are_nothing() -> None:
    peers = Peers("me", 0.0)
    peers.hear(presence("me", Told(E1.engine, 0, 3, 100)), 0.0)
    assert (len(peers), peers.load(E1)) == (0, NOTHING)


@pytest.mark.parametrize("how", ["farewell", "gone", "silence"])
def test_a_router_that_has_ended_carries_nothing(how: str) -> None:
    peers = Peers("me", 0.0)
    peers.hear(presence("b", Told(E1.engine, 0, 3, 100)), 0.0)
    peers.hear(Update("b", [], [packed(E1, marks([1, 2, 3]))], []), 0.0)
    assert peers.load(E1) == Carried(3, 100, blocks=3)
    match how:
        case "farewell":
            peers.hear(Farewell("b"), 0.1)
        case "gone":
            peers.gone("b", 0.1)
        case _:
            tick(peers, 0.0, GONE_AFTER_S)
    assert (len(peers), peers.load(E1), peers.in_flight([1, 2, 3])) == (0, NOTHING, {})


def test_one_who_was_away_itself_judges_nobody_by_that_time() -> None:
    peers = Peers("me", 0.0)
    peers.hear(presence("b", Told(E1.engine, 0, 3, 0)), 0.0)
    peers.tick(0.1)
    assert peers.tick(0.1 + AWAY_S + GONE_AFTER_S) == []
    assert peers.load(E1).requests == 3
    tick(peers, 0.1 + AWAY_S + GONE_AFTER_S, GONE_AFTER_S)
    assert peers.load(E1).requests == 0


def test_while_the_bus_is_away_nothing_is_known_of_others_and_nothing_is_taken_from_them() -> None:
    peers = Peers("me", 0.0)
    peers.follow(E1.engine, 0.0)
    peers.hear(presence("b", Told(E1.engine, 0, 3, 0), follows=[E1.engine], relays={E1.engine: 1}), 0.0)
    peers.lost()
    assert peers.load(E1) == NOTHING
    peers.restart(100.0)
    assert tick(peers, 100.0, GONE_AFTER_S - 2 * BEAT_S) == [], "it is given time to be heard again"


def test_a_router_alone_takes_an_engine_once_nobody_has_answered_its_greeting() -> None:
    peers = Peers("me", 0.0)
    assert peers.follow(E1.engine, 0.0) == []
    assert peers.tick(HELLO_S / 2) == []
    assert peers.tick(HELLO_S) == [Take(E1.engine)]
    assert peers.relays == {E1.engine: 1}


def test_one_started_with_others_waits_for_them_but_not_for_ever() -> None:
    peers = Peers("me", 0.0, expected=3)
    peers.follow(E1.engine, 0.0)
    assert tick(peers, 0.0, GATHER_S - BEAT_S) == []
    assert tick(peers, GATHER_S, BEAT_S) == [Take(E1.engine)]


def test_what_another_relays_is_left_alone_until_it_ends() -> None:
    peers = Peers("me", 0.0, expected=2)
    peers.hear(presence("b", follows=[E1.engine], relays={E1.engine: 4}), 0.0)
    assert peers.follow(E1.engine, 0.0) == []
    for beat in range(20):
        assert peers.hear(presence("b", follows=[E1.engine], relays={E1.engine: 4}), beat * BEAT_S) == []
        assert peers.tick(beat * BEAT_S) == []
    assert peers.gone("b", 10.0) == [Take(E1.engine)]
    assert peers.relays == {E1.engine: 5}, "a higher number than any before: who was only asleep yields"


def test_an_engine_that_only_we_have_found_is_left_to_the_others_for_a_while() -> None:
    peers = Peers("me", 0.0, expected=2)
    peers.hear(presence("b"), 0.0)
    assert peers.follow(E1.engine, 1.0) == []
    assert peers.hear(presence("b"), 1.0 + PATIENCE_S / 2) == []
    assert peers.hear(presence("b"), 1.0 + PATIENCE_S) == [Take(E1.engine)]


def test_one_whose_turn_it_is_and_who_does_not_take_it_is_waited_for_only_so_long() -> None:
    peers = Peers("me", 0.0, expected=2)
    peers.follow(E1.engine, 0.0)
    beats = [beat * BEAT_S for beat in range(1, 8)]
    taken = [now for now in beats if peers.hear(presence("b", follows=[E1.engine]), now)]
    assert taken == [3 * PATIENCE_S], "b comes before me by name"


@pytest.mark.parametrize(("router", "number", "yields"), [("a", 2, True), ("z", 1, True), ("a", 1, False), ("z", 0, False)])
def test_of_two_who_relay_one_engine_the_higher_claim_stays(router: str, number: int, yields: bool) -> None:
    peers = Peers("me", 0.0)
    peers.follow(E1.engine, 0.0)
    peers.tick(HELLO_S)
    changes = peers.hear(presence(router, follows=[E1.engine], relays={E1.engine: number}), 1.0)
    if yields:
        assert changes == [Yield(E1.engine)]
        assert peers.relays == {}
    else:
        assert changes == [Take(E1.engine)], "mirrors may have turned to the other: the stream begins anew"
        assert peers.hear(presence(router, follows=[E1.engine], relays={E1.engine: number}), 1.1) == [], "once for each claim"
    peers._check()


@pytest.mark.parametrize("routers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(10))
def test_routers_share_engines_out_and_each_is_relayed_by_exactly_one(routers: int, seed: int) -> None:
    """Whatever the order in which they start, find engines, hear each other, and die."""
    rng = random.Random(seed)
    world = World(rng, routers)
    engines = [f"http://e{number}:1" for number in range(8)]
    for router in world.routers:
        for engine in rng.sample(engines, len(engines)):
            world.later(rng.uniform(0, 2), follower(world, router, engine))
    world.run(GATHER_S + 4 * PATIENCE_S + 2)
    world.each_is_relayed_once(engines)
    counts = [len(peers.relays) for peers in world.routers.values()]
    assert max(counts) - min(counts) <= len(engines) // 2, "no router has nearly all"
    if routers > 1:
        del world.routers[rng.choice(sorted(world.routers))]
        world.run(GONE_AFTER_S + 4 * PATIENCE_S)
        world.each_is_relayed_once(engines)


class World:
    """Routers on one bus, in virtual time; messages take up to 50 ms each, in order per sender."""

    def __init__(self, rng: random.Random, routers: int) -> None:
        self.now = 0.0
        self.rng = rng
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.routers = {f"r{number}": Peers(f"r{number}", 0.0, expected=routers) for number in range(routers)}
        self.arrives: dict[tuple[str, str], float] = {}
        for name in self.routers:
            self.later(rng.uniform(0, BEAT_S), functools.partial(self.beat, name))

    def later(self, delay: float, what: Callable[[], None]) -> None:
        self.count += 1
        self.events.append((self.now + delay, self.count, what))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.events and min(self.events)[0] <= end:
            event = min(self.events)
            self.events.remove(event)
            self.now = event[0]
            event[2]()
        self.now = end

    def beat(self, name: str) -> None:
        if name in self.routers:
            self.routers[name].tick(self.now)
            self.present(name)
            self.later(BEAT_S, functools.partial(self.beat, name))

    def present(self, name: str) -> None:
        ours = self.routers[name]
        message = presence(name, follows=ours.follows, relays=ours.relays)
        for other in self.routers:
            at = max(self.now + self.rng.uniform(0, 0.05), self.arrives.get((name, other), 0.0))
            self.arrives[name, other] = at
            self.later(at - self.now, functools.partial(self.hear, other, message))

    def hear(self, name: str, message: Presence) -> None:
        if name in self.routers:
            changes: list[Change] = self.routers[name].hear(message, self.now)
            self.routers[name]._check()
            if changes:
                self.present(name)

    def each_is_relayed_once(self, engines: list[str]) -> None:
        owners = {engine: [name for name, peers in self.routers.items() if engine in peers.relays] for engine in engines}
        assert all(len(names) == 1 for names in owners.values()), owners


def follower(world: World, router: str, engine: str) -> Callable[[], None]:
    def follow() -> None:
        if world.routers[router].follow(engine, world.now):
            world.present(router)

    return follow


def only_relays(name: str, follows: list[str], relays: dict[str, int] | None = None) -> Presence:
    return msgspec.structs.replace(presence(name, follows=follows, relays=relays), only_relays=True)


def test_one_who_only_relays_takes_an_engine_from_a_router_which_yields() -> None:
    relay, router = Peers("relay", 0.0, only_relays=True), Peers("z", 0.0)
    router.follow(E1.engine, 0.0)
    assert tick(router, 0.0, BEAT_S) == [Take(E1.engine)]
    relay.follow(E1.engine, 0.0)
    relay.hear(presence("z", follows=[E1.engine], relays=router.relays), 0.1)
    assert tick(relay, 0.1, 1.0) == [Take(E1.engine)]
    assert relay.relays == {E1.engine: 2}
    assert router.hear(only_relays("relay", relay.follows, relay.relays), 1.2) == [Yield(E1.engine)]
    assert tick(router, 1.2, 60.0, lambda now: router.hear(only_relays("relay", relay.follows, relay.relays), now)) == []
    assert router.relayed(E1.engine)
    assert not relay.relayed(E1.engine)


def test_what_one_who_only_relays_could_relay_a_router_leaves_to_it_but_not_for_ever() -> None:
    router = Peers("a", 0.0)
    router.hear(only_relays("relay", [E1.engine]), 0.0)
    router.follow(E1.engine, 0.0)
    router.follow(E2.engine, 0.0)

    def heard(now: float) -> list[Change]:
        return router.hear(only_relays("relay", [E1.engine]), now)

    assert tick(router, 0.0, 2 * PATIENCE_S, heard) == [Take(E2.engine)], "which the relay does not follow"
    assert tick(router, 2 * PATIENCE_S, 2 * PATIENCE_S, heard) == [Take(E1.engine)], "which it does not take"


def test_of_two_who_only_relay_one_does_and_the_other_goes_on_when_it_is_gone() -> None:
    a, b = Peers("a", 0.0, only_relays=True), Peers("b", 0.0, only_relays=True)
    for peers in (a, b):
        peers.follow(E1.engine, 0.0)
    taken: list[Change] = []
    for step in range(8):
        now = step * BEAT_S
        for one, other in ((a, b), (b, a)):
            taken += one.hear(only_relays(other.router, other.follows, other.relays), now) + one.tick(now)
    assert taken == [Take(E1.engine)]
    assert (a.relays, b.relays) == ({E1.engine: 1}, {})
    assert tick(b, 8 * BEAT_S, GONE_AFTER_S + 1.0) == [Take(E1.engine)]
    assert b.relays == {E1.engine: 2}


def test_A9_messages_of_strangers_do_not_grow_the_table_without_end() -> None:
    peers = Peers("me", 0.0)
    for number in range(10_000):
        peers.hear(Hello(f"r{number}"), 0.0)
    assert len(peers) == MAX_PEERS
    assert peers.ignored == 10_000 - MAX_PEERS


def test_A9_nothing_that_can_be_decoded_breaks_it() -> None:
    rng = random.Random(7)
    peers = Peers("me", 0.0)
    good = [
        encode(presence("b", Told(E1.engine, 0, 3, 100), follows=[E1.engine], relays={E1.engine: 1})),
        encode(Update("b", [Told(E1.engine, 0, 1, 1)], [packed(E1, marks(list(range(50))))], [packed(E1, marks([1, 2]))])),
        encode(Hello("b")),
        encode(Farewell("b")),
    ]
    understood = 0
    for _ in range(10_000):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            message = decode.decode(bytes(data))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        peers.hear(message, 0.0)
        understood += 1
    assert understood > 1000
    peers._check()


def tick(peers: Peers, since: float, for_s: float, meanwhile: Callable[[float], list[Change]] = lambda now: []) -> list[Change]:
    """Everything that comes of beats, the last one at the end included; `meanwhile` happens before each."""
    changes: list[Change] = []
    beats = round(for_s / BEAT_S)
    for beat in range(1, beats + 1):
        changes += meanwhile(since + beat * BEAT_S)
        changes += peers.tick(since + beat * BEAT_S)
    return changes
