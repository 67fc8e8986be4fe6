"""What engines are there, what have they done, and what does the router know of it? A fleet in virtual time.

    join ──(start-up)──▶ ready ──drain──▶ draining ──last request──▶ gone
                          │  ▲
                     fail ▼  │ recover: with an empty cache
                         down

What an engine stores and evicts reaches the index a little later, as events do; its own counts are read now and then, as a router does.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

import msgspec

from discovery.signal import LIVE, UNPUBLISHED, Signal
from discovery.translate import HeldKeys
from engines.blocks import pack_keys, root_seed
from engines.kv_bytes import KvShape
from engines.simulator.cache import Change, Removed, Stored
from engines.simulator.sequences import Sequence
from engines.types import Connector, Endpoint, EngineInfo, EngineKind, EngineSpec, KvSource, Model, Role, Tier
from engines.virtual.engine import Pace, VirtualEngine
from engines.virtual.link import Link
from engines.virtual.models import EngineModel
from router.caches import Caches
from router.fleet import Fleet
from router.load import LoadBook
from router.pairing import Pairing
from router.replay.agenda import Agenda
from router.replay.workload import Arrival

MODEL: Final = "replayed"
SWEEP_ENTRIES: Final = 100_000


class Hardware(msgspec.Struct, frozen=True):
    """What the engines are, and how late the router hears of them."""

    model: EngineModel = EngineModel()
    block_size: int = 512
    kv_events: bool = True
    """Whether they publish any."""
    event_delay_s: float = 0.005
    """From the end of a step to the index."""
    report_period_s: float = 2.0
    """Between two looks at an engine's own counts."""
    kv_bytes_per_token: int = 131_072
    link_bytes_per_s: float = 12.5e9
    """Of what leaves a prefill engine."""

    def holds(self, arrival: Arrival) -> bool:
        """Whether the KV cache has room for this request and nothing else; an engine refuses one that it could never finish."""
        computed = arrival.prompt_tokens + arrival.output_tokens - 1  # nothing comes after the last token
        return computed <= self.model.kv_tokens // self.block_size * self.block_size


class State(enum.StrEnum):
    """How far an engine has come."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"
    GONE = "gone"


class Engine:
    """One engine, and what of it the router has been told."""

    def __init__(self, number: int, info: EngineInfo, virtual: VirtualEngine, speed: float, now: float) -> None:
        self.number = number
        self.info = info
        self.endpoint = info.endpoints[0]
        self.virtual = virtual
        self.speed = speed
        self.state = State.STARTING
        self.joined_at = now
        self.left_at = math.inf
        self.life = 0
        """One more after every failure."""
        self.held = HeldKeys()
        self.watched = math.inf
        """When the agenda looks at it next."""
        self.link: Link[Sequence] = Link(math.inf)
        self.link_watched = math.inf
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """How long it has computed, in all its lives."""
        return self._busy_s + self.virtual.busy_s

    def renew(self, virtual: VirtualEngine) -> None:
        """Begin another life."""
        self._busy_s, self.virtual, self.held = self.busy_s, virtual, HeldKeys()
        self.life += 1


class Signals:
    """How far events are to be believed: all of them, or there are none."""

    def __init__(self, hardware: Hardware) -> None:
        self._signal = LIVE if hardware.kv_events else UNPUBLISHED
        self._block_size = hardware.block_size

    def signal(self, endpoint: Endpoint, now: float) -> Signal:  # noqa: ARG002 - see `router.chooser.Signals`
        """The same of every endpoint."""
        return self._signal

    def block_size(self, endpoint: Endpoint) -> int | None:  # noqa: ARG002
        """The same of every endpoint."""
        return self._block_size

    def served(self, endpoint: Endpoint, now: float, new_blocks: int, *, sent_at: float | None = None) -> None:
        """Nothing is to be learned."""

    def hit(self, endpoint: Endpoint, blocks: int, *, known: int, new: int, sent_at: float) -> None:
        """Nothing is to be learned."""


class Engines:
    """All of them."""

    def __init__(  # noqa: PLR0913  what the router knows of engines is in all of these
        self,
        hardware: Hardware,
        agenda: Agenda,
        fleet: Fleet,
        caches: Caches,
        load: LoadBook,
        pairing: Pairing,
        *,
        paced: Callable[[Pace], None],
    ) -> None:
        self.all: dict[str, Engine] = {}
        """By id, those that have left included."""
        self.gained: Callable[[Engine, list[tuple[Sequence, int]]], None] = lambda _engine, _gained: None
        """Is told which sequences have a token more."""
        self.fetches: Callable[[Engine, Sequence], None] = lambda _engine, _sequence: None
        """Is told of a sequence that has been given room for KV from another engine."""
        self.carried: Callable[[Sequence], None] = lambda _sequence: None
        """Is told that this KV has come."""
        self.hardware = hardware
        self._agenda = agenda
        self._fleet = fleet
        self._caches = caches
        self._load = load
        self._pairing = pairing
        self._paced = paced

    def join(self, role: Role = Role.AGGREGATED, *, speed: float = 1.0, ready_in: float = 0.0) -> Engine:
        """Another engine, `speed` times as fast as the model, that takes requests after so many seconds."""
        number, hardware = len(self.all), self.hardware
        url = f"http://engine-{number}:8000"
        split = role is not Role.AGGREGATED
        info = EngineInfo(
            url,
            EngineSpec(url),
            EngineKind.VLLM,
            "virtual",
            (Model(MODEL),),
            block_size=hardware.block_size,
            total_blocks=hardware.model.kv_tokens // hardware.block_size,
            kv_sources=(KvSource(0, "virtual"),) if hardware.kv_events else (),
            max_num_batched_tokens=hardware.model.max_num_batched_tokens,
            role=role,
            connector=Connector.NIXL if split else None,
        )
        engine = self.all[url] = Engine(number, info, self._virtual(speed), speed, self._agenda.now)
        engine.link = Link(hardware.link_bytes_per_s)
        self._fleet.add(info)
        self._caches.add(engine.endpoint, info.total_blocks)
        self._pairing.know(info, KvShape(hardware.kv_bytes_per_token))
        if ready_in > 0:
            self._agenda.at(self._agenda.now + ready_in, partial(self._ready, engine))
        else:
            self._ready(engine)
        return engine

    def fail(self, engine: Engine) -> None:
        """It is killed: what it had is lost. The router finds out by itself."""
        if engine.state in (State.READY, State.DRAINING):
            engine.state = State.DOWN
            engine.watched = engine.link_watched = math.inf

    def recover(self, engine: Engine) -> None:
        """It has been started again, and the router has seen that."""
        if engine.state is not State.DOWN:
            return
        engine.renew(self._virtual(engine.speed))
        engine.link = Link(self.hardware.link_bytes_per_s)
        engine.state = State.READY
        self._caches.restart(engine.endpoint)
        self._fleet.members[engine.info.id].suspected = False

    def drain(self, engine: Engine) -> None:
        """It takes nothing new, and goes when it has nothing left to do; at once, where it has not even started."""
        if engine.state is State.STARTING:
            self._leave(engine)
        elif engine.state is State.READY:
            engine.state = State.DRAINING
            self._fleet.drain(engine.info.id)
            self.let_go(engine)

    def let_go(self, engine: Engine) -> None:
        """Have it leave if it is draining, and has nothing to do any more."""
        if engine.state is State.DRAINING and not self._load.own(engine.endpoint).requests and not engine.virtual.scheduler.kept:
            self._leave(engine)

    def watch(self, engine: Engine) -> None:
        """Look at it when something will have happened; to be called after everything that it is told."""
        for sequence in engine.virtual.scheduler.take_to_fetch():
            self.fetches(engine, sequence)
        due = engine.virtual.due
        if due != engine.watched:
            engine.watched = due
            if due < math.inf:
                self._agenda.at(due, partial(self._advance, engine, due))

    def carry(self, engine: Engine, sequence: Sequence, blocks: int) -> None:
        """Send so many blocks of KV from a prefill engine."""
        hardware = self.hardware
        engine.link.begin(sequence, blocks * hardware.block_size * hardware.kv_bytes_per_token, self._agenda.now)
        self._watch_link(engine)

    def report(self, engine: Engine) -> None:
        """Look at what it says of itself, from now on in every period; and keep house."""
        if engine.state is State.GONE:
            return
        now = self._agenda.now
        if engine.state in (State.READY, State.DRAINING):
            engine.virtual.settle(now)
            scheduler = engine.virtual.scheduler
            usage = scheduler.cache.used / scheduler.cache.capacity
            self._load.report(engine.endpoint, len(scheduler.running), scheduler.queued, usage, now)
        self._caches.expire(now)
        self._caches.sweep(SWEEP_ENTRIES)
        self._load.sweep(SWEEP_ENTRIES)
        self._agenda.at(now + self.hardware.report_period_s, partial(self.report, engine))

    def present(self) -> Iterable[Engine]:
        """Those that have not left."""
        return (engine for engine in self.all.values() if engine.state is not State.GONE)

    def _virtual(self, speed: float) -> VirtualEngine:
        model = self.hardware.model
        return VirtualEngine(model.timing(speed), model.limits, model.cache(self.hardware.block_size), paced=self._paced)

    def _ready(self, engine: Engine) -> None:
        if engine.state is State.STARTING:
            engine.state = State.READY
            self._fleet.serve(engine.info.id)
            self._agenda.at(self._agenda.now + self.hardware.report_period_s * (engine.number % 8) / 8, partial(self.report, engine))

    def _leave(self, engine: Engine) -> None:
        engine.state, engine.left_at = State.GONE, self._agenda.now
        self._fleet.remove(engine.info.id)
        self._fleet.forget(engine.info.id)
        self._fleet.undrain(engine.info.id)
        self._caches.discard(engine.endpoint)
        self._load.forget(engine.endpoint)
        self._pairing.forget(engine.endpoint)

    def _advance(self, engine: Engine, due: float) -> None:
        if engine.watched != due:
            return
        gained = engine.virtual.advance()
        if (changes := engine.virtual.take_changes()) and self.hardware.kv_events:
            self._agenda.at(self._agenda.now + self.hardware.event_delay_s, partial(self._tell, engine, engine.life, changes))
        self.gained(engine, gained)
        self.watch(engine)

    def _watch_link(self, engine: Engine) -> None:
        due = engine.link.due
        if due != engine.link_watched:
            engine.link_watched = due
            if due < math.inf:
                self._agenda.at(due, partial(self._arrive, engine, due))

    def _arrive(self, engine: Engine, due: float) -> None:
        if engine.link_watched != due:
            return
        for sequence in engine.link.arrived(self._agenda.now):
            self.carried(sequence)
        engine.link_watched = math.inf
        self._watch_link(engine)

    def _tell(self, engine: Engine, life: int, changes: list[Change]) -> None:
        """Events reach the index, if the engine is still who sent them."""
        if life != engine.life or engine.state is State.GONE:
            return
        held, endpoint, caches = engine.held, engine.endpoint, self._caches
        for kind, alike in itertools.groupby(changes, type):
            if kind is Removed:
                if gone := held.take([change.name for change in alike if isinstance(change, Removed)]):
                    caches.remove(endpoint, Tier.DEVICE, pack_keys(gone))
            elif kind is Stored:
                chains = itertools.chain.from_iterable(_new(change, held) for change in alike if isinstance(change, Stored))
                caches.store(endpoint, Tier.DEVICE, map(pack_keys, chains))
            else:
                held.clear()
                caches.clear(endpoint)


def _new(stored: Stored, held: HeldKeys) -> Iterator[list[int]]:
    """What of a run was not held before, in pieces without a gap."""
    piece: list[int] = []
    parent = root_seed() if stored.parent is None else stored.parent
    for name in stored.names:
        if held.add(name, parent):
            piece.append(name)
        elif piece:
            yield piece
            piece = []
        parent = name
    if piece:
        yield piece
