"""A relay publishes, the bus between loses, repeats, delays and reorders, and the copy must still end up equal, and know when it is not."""

from __future__ import annotations

import functools
import operator
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from discovery.digests import digest_of
from discovery.messages import Batch, Beacon, Clear, Op, Remove, SnapshotChunk, Store
from discovery.sync import Action, Apply, ClearAll, RequestSnapshot, StreamSync
from engines.blocks import pack_keys, unpack_keys
from engines.types import Tier

Held = frozenset[tuple[Tier, int]]
Message = Batch | Beacon | tuple[int, SnapshotChunk]

TIERS = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
KEYS = st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True)


class Source:
    """What a relay does, without translating: the truth, and what it says about it."""

    def __init__(self, life: str) -> None:
        self.life = life
        self.number = -1
        self.history: dict[tuple[str, int], Held] = {}
        self.renew()

    def renew(self) -> None:
        self.number += 1
        self.seq = 0
        self.held: Held = frozenset()
        self._remember()

    def replace(self, life: str, *, knows: bool) -> None:
        """Another relay, which has read all that the engine published, or begins with nothing."""
        held, self.life, self.number = self.held, life, -1
        self.renew()
        if knows:
            self.held = held
            self._remember()

    @property
    def epoch(self) -> str:
        return f"{self.life}.{self.number}"

    def store(self, tier: Tier, keys: list[int]) -> Batch | None:
        new = [key for key in keys if (tier, key) not in self.held]
        return self._publish(self.held | {(tier, key) for key in new}, [Store(tier, pack_keys(new))] if new else [])

    def remove(self, tier: Tier, keys: list[int]) -> Batch | None:
        gone = [key for key in keys if (tier, key) in self.held]
        return self._publish(self.held - {(tier, key) for key in gone}, [Remove(tier, pack_keys(gone))] if gone else [])

    def clear(self) -> Batch | None:
        return self._publish(frozenset(), [Clear()] if self.held else [])

    def beacon(self) -> Beacon:
        digest = functools.reduce(operator.xor, (digest_of(key, tier) for tier, key in self.held), 0)
        return Beacon(self.epoch, self.seq, len(self.held), digest, 16, "live", "")

    def snapshot(self) -> list[SnapshotChunk]:
        """As many chunks as there are blocks, so that their order and completeness matter."""
        ops: list[list[Op]] = [[Store(tier, pack_keys([key]))] for tier, key in sorted(self.held)] or [[]]
        return [SnapshotChunk(self.epoch, self.seq, number, len(ops), part) for number, part in enumerate(ops)]

    def _publish(self, held: Held, ops: list[Op]) -> Batch | None:
        if not ops:
            return None
        made = Batch(self.epoch, self.seq, ops)
        self.seq += 1
        self.held = held
        self._remember()
        return made

    def _remember(self) -> None:
        self.history[self.epoch, self.seq] = self.held


class Copy:
    """An index of one endpoint too simple to be wrong, which refuses what an exact copy would never be told."""

    def __init__(self, *, judges: bool = True) -> None:
        self.held: set[tuple[Tier, int]] = set()
        self.judges = judges

    def perform(self, actions: list[Action]) -> list[int]:
        asked = []
        for action in actions:
            match action:
                case Apply(ops):
                    for op in ops:
                        self._apply(op)
                case ClearAll():
                    self.held.clear()
                case RequestSnapshot(attempt):
                    asked.append(attempt)
        return asked

    def _apply(self, op: Op) -> None:
        match op:
            case Store(tier, keys):
                pairs = {(tier, key) for key in unpack_keys(keys)}
                assert not (self.judges and pairs & self.held), "a block that is held is stored again"
                self.held |= pairs
            case Remove(tier, keys):
                pairs = {(tier, key) for key in unpack_keys(keys)}
                assert pairs <= self.held or not self.judges, "a block that is not held is removed"
                self.held -= pairs
            case Clear():
                self.held.clear()


class FaultyBus(RuleBasedStateMachine):
    """Everything published lies on the wire; each step delivers, loses, or repeats some of it, in order or not."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.source = Source("r0")
        self.sync = StreamSync()
        self.copy = Copy()
        self.wire: list[Message] = []
        self.lives = 0
        self.complete: Held = frozenset()
        """The copy when it was last equal to a source."""

    def publish(self, message: Message | None) -> None:
        if message is not None:
            self.wire.append(message)

    def perform(self, actions: list[Action]) -> None:
        for attempt in self.copy.perform(actions):
            self.wire.extend((attempt, chunk) for chunk in self.source.snapshot())

    def take(self, message: Message) -> None:
        match message:
            case Batch():
                self.perform(self.sync.batch(message, self.now))
            case Beacon():
                self.perform(self.sync.beacon(message, self.now))
            case (attempt, chunk):
                self.perform(self.sync.chunk(chunk, attempt, self.now))

    @rule(tier=TIERS, keys=KEYS)
    def the_engine_stores(self, tier: Tier, keys: list[int]) -> None:
        self.publish(self.source.store(tier, keys))

    @rule(tier=TIERS, keys=KEYS)
    def the_engine_removes(self, tier: Tier, keys: list[int]) -> None:
        self.publish(self.source.remove(tier, keys))

    @rule()
    def the_engine_clears(self) -> None:
        self.publish(self.source.clear())

    @rule()
    def the_engine_is_started_again(self) -> None:
        self.source.renew()
        self.publish(self.source.beacon())

    @precondition(lambda self: not self.wire)
    @rule(later=st.floats(0.0, 30.0), knows=st.booleans(), missed=KEYS)
    def another_relay_takes_over(self, later: float, knows: bool, missed: list[int]) -> None:
        self.now += later
        self.lives += 1
        if later > 15.0:
            self.source.store(Tier.DEVICE, missed)  # while nobody relayed
        self.source.replace(f"r{self.lives}", knows=knows)
        self.publish(self.source.beacon())

    @rule()
    def a_beacon_is_due(self) -> None:
        self.publish(self.source.beacon())

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), fault=st.sampled_from(["none", "none", "none", "lose", "repeat", "delay"]))
    def the_wire_moves(self, data: st.DataObject, fault: str) -> None:
        index = data.draw(st.integers(0, len(self.wire) - 1)) if fault == "delay" else 0
        message = self.wire[index] if fault == "repeat" else self.wire.pop(index)
        if fault != "lose":
            self.take(message)

    @rule(later=st.floats(0.0, 5.0))
    def time_passes(self, later: float) -> None:
        self.now += later
        self.perform(self.sync.tick(self.now))

    @rule()
    def the_bus_goes_away_and_comes_back(self) -> None:
        self.wire.clear()
        self.sync.doubt()

    @invariant()
    def a_copy_that_says_it_is_complete_is_what_the_source_held_there(self) -> None:
        if self.sync.inherited:
            assert self.copy.held == self.complete, "of the relay before"
        elif self.sync.synced:
            assert self.copy.held == self.source.history[self.sync.epoch or "", self.sync.seq]
            self.complete = frozenset(self.copy.held)

    @invariant()
    def the_digest_is_that_of_the_copy(self) -> None:
        assert self.sync.digest == functools.reduce(operator.xor, (digest_of(key, tier) for tier, key in self.copy.held), 0)
        assert self.sync.blocks == len(self.copy.held)

    def teardown(self) -> None:
        """Once nothing is lost any more, a beacon and a tick or two make the copy equal."""
        self.wire.clear()
        self.now += 60.0
        for _ in range(4):
            self.now += 2.0
            self.publish(self.source.beacon())
            self.perform(self.sync.tick(self.now))
            while self.wire:
                self.take(self.wire.pop(0))
        assert self.sync.synced
        assert (self.sync.epoch, self.sync.seq) == (self.source.epoch, self.source.seq)
        assert self.copy.held == self.source.held


FaultyBus.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestFaultyBus: Any = FaultyBus.TestCase


_EPOCHS = st.sampled_from(["r0.0", "r0.7", "a.0", "a.1", "b.0", "a.-1", "", ".", "a", "b.99999999999999999999"])
_NUMBERS = st.integers(-2, 6) | st.integers(-(2**63), 2**63 - 1)
_OPS: st.SearchStrategy[list[Op]] = st.lists(
    st.one_of(
        st.builds(Store, st.sampled_from(Tier), KEYS.map(pack_keys)),
        st.builds(Remove, st.sampled_from(Tier), KEYS.map(pack_keys)),
        st.builds(Clear),
    ),
    max_size=3,
)
_ANYTHING = st.one_of(
    st.builds(Batch, _EPOCHS, _NUMBERS, _OPS),
    st.builds(Beacon, _EPOCHS, _NUMBERS, _NUMBERS, st.integers(0, 2**64 - 1), st.none() | st.integers(), st.text(), st.text()),
    st.tuples(st.integers(0, 4), st.builds(SnapshotChunk, _EPOCHS, _NUMBERS, _NUMBERS, _NUMBERS, _OPS)),
)


class Forgers(RuleBasedStateMachine):
    """A9: well-formed messages that no relay would send."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = FaultyBus()
        self.machine.copy = Copy(judges=False)

    @rule(message=_ANYTHING, later=st.floats(0.0, 1.0))
    def somebody_publishes_anything(self, message: Message, later: float) -> None:
        self.machine.now += later
        self.machine.take(message)
        self.machine.copy.perform(self.machine.sync.tick(self.machine.now))

    def teardown(self) -> None:
        """The honest relay is believed again, whatever was said in its name."""
        machine = self.machine
        machine.source.store(Tier.DEVICE, [1, 2, 3])
        machine.teardown()


Forgers.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, report_multiple_bugs=False)
TestForgers: Any = Forgers.TestCase
