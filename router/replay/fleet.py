"""What happens when this router meets that traffic? The router's own chooser in front of engines in virtual time.

    arrival ─▶ chooser.decide ─ reserve ─▶ engine ─▶ first token ─▶ chooser.first_token ─▶ … last ─▶ chooser.ended ─ release
                   ▲                          │
                 caches ◀── after a delay ── blocks stored and removed
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, Literal

import msgspec

from discovery.messages import Store
from discovery.signal import LIVE, Signal
from discovery.translate import Change as Told
from discovery.translate import Held
from engines.simulator.cache import Change, Cleared, Removed, Stored
from engines.simulator.scheduler import Prompt, Sequence
from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec, KvSource, Model, Tier
from engines.virtual.engine import VirtualEngine
from engines.virtual.models import EngineModel
from router.caches import Caches
from router.calibration import Calibration
from router.chooser import Choice, Chooser
from router.fleet import Fleet
from router.intake import Asked
from router.load import LoadBook, Reservation
from router.prompts.book import Tokens
from router.replay.agenda import Agenda
from router.replay.measure import Served, Tally
from router.replay.workload import Arrival
from router.routes import INFERENCE
from router.scheduling.scheduler import Scheduler
from router.scheduling.types import Policy, RoutingRequest
from router.sse import Usage

MODEL: Final = "replayed"
ROUTE: Final = INFERENCE[b"/v1/completions"]
KEYS_MADE: Final = Tokens(None, b"", "local")
"""Stands for every prompt's ids: their keys are known."""
OWN_BLOCKS: Final = 1 << 63
"""From here on names are counted up for blocks that nobody else can have: what an answer fills."""


class Speeds(msgspec.Struct, frozen=True):
    """A fleet: how many engines, of what model, how much faster each is than that."""

    model: EngineModel
    factors: tuple[float, ...]
    """One for each engine."""


class Rates(msgspec.Struct, frozen=True):
    """What reaches the router late."""

    event_delay_s: float = 0.005
    """From a step's end to the index."""
    report_period_s: float = 2.0
    """Between two looks at an engine's own counts."""


class _Signals:
    """Every endpoint's events are all there."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def signal(self, endpoint: Endpoint, now: float) -> Signal:  # noqa: ARG002
        return LIVE

    def block_size(self, endpoint: Endpoint) -> int | None:  # noqa: ARG002
        return self._block_size

    def served(self, endpoint: Endpoint, now: float, new_blocks: int, *, sent_at: float | None = None) -> None:
        pass

    def hit(self, endpoint: Endpoint, blocks: int, *, known: int, new: int, sent_at: float) -> None:
        pass


class _Trip(msgspec.Struct, eq=False):
    """A request under way."""

    served: Served
    choice: Choice
    reservation: Reservation
    sent_at: float


class _Engine:
    """One engine, and what of it the router has been told."""

    def __init__(self, number: int, info: EngineInfo, virtual: VirtualEngine) -> None:
        self.number = number
        self.info = info
        self.endpoint = info.endpoints[0]
        self.virtual = virtual
        self.held = Held()
        self.planned = float("inf")
        """When the agenda looks at it next."""


class Replay:
    """One run."""

    def __init__(self, speeds: Speeds, block_size: int, policy: Policy, name: str, *, seed: int = 0, rates: Rates = Rates(), temperature: float = 0.0) -> None:
        self.tally = Tally()
        self._agenda = Agenda()
        self._block_size = block_size
        self._rates = rates
        self._caches, self._load, self._fleet = Caches(), LoadBook(), Fleet()
        scheduler = Scheduler(policy, name, temperature, random.Random(seed))
        self._chooser = Chooser(
            self._fleet, self._caches, self._load, scheduler, _Signals(block_size), Calibration(), clock=lambda: self._agenda.now
        )
        self._trips: dict[Sequence, _Trip] = {}
        self._names = itertools.count(OWN_BLOCKS)
        self._engines = {
            engine.info.id: engine for engine in (self._join(number, speeds.model, factor) for number, factor in enumerate(speeds.factors))
        }
        self._tokens = dict.fromkeys(self._engines, KEYS_MADE)
        self._left = 0
        self._over = False

    def run(self, arrivals: Iterator[tuple[float, Arrival]]) -> None:
        """Serve them all, to the last token."""
        for engine in self._engines.values():
            self._agenda.at(self._rates.report_period_s * engine.number / len(self._engines), partial(self._report, engine))
        self._next(arrivals)
        self._agenda.run(until=lambda: self._over and not self._trips)
        self.tally.busy_s = [engine.virtual.busy_s for engine in self._engines.values()]

    def _join(self, number: int, model: EngineModel, factor: float) -> _Engine:
        url = f"http://engine-{number}:8000"
        cache = model.cache(self._block_size)
        info = EngineInfo(
            url,
            EngineSpec(url),
            EngineKind.VLLM,
            "virtual",
            (Model(MODEL),),
            block_size=self._block_size,
            total_blocks=cache.capacity,
            kv_sources=(KvSource(0, "virtual"),),
            max_num_batched_tokens=model.max_num_batched_tokens,
        )
        virtual = VirtualEngine(model.timing(factor), model.limits, cache, paced=self.tally.paced)
        self._fleet.add(info)
        self._fleet.serve(url)
        self._caches.add(info.endpoints[0], cache.capacity)
        return _Engine(number, info, virtual)

    def _next(self, arrivals: Iterator[tuple[float, Arrival]]) -> None:
        following = next(arrivals, None)
        if following is None:
            self._over = True
            return
        moment, arrival = following
        self._agenda.at(moment, lambda: self._arrive(arrival, arrivals))

    def _arrive(self, arrival: Arrival, arrivals: Iterator[tuple[float, Arrival]]) -> None:
        now, size = self._agenda.now, self._block_size
        served = Served(now, arrival.prompt_tokens, arrival.output_tokens)
        self.tally.served.append(served)
        keys = list(arrival.keys[: arrival.prompt_tokens // size])
        request = RoutingRequest(MODEL, arrival.prompt_tokens, session=arrival.session)
        asked = Asked(ROUTE, b"", request, self._tokens, 0, made={(id(KEYS_MADE), size): keys})
        choice = self._chooser.decide(asked, set())
        reservation = self._chooser.reserve(choice)
        engine = self._engines[choice.endpoint.engine]
        served.engine = engine.number
        names = list(arrival.keys)
        missing = (arrival.prompt_tokens + arrival.output_tokens) // size - len(names)
        names += itertools.islice(self._names, max(0, missing))
        sequence = Sequence(Prompt([], arrival.output_tokens), arrival.prompt_tokens, names)
        self._trips[sequence] = _Trip(served, choice, reservation, now)
        engine.virtual.submit(sequence, now)
        self._watch(engine)
        self._next(arrivals)

    def _watch(self, engine: _Engine) -> None:
        due = engine.virtual.due
        if due != engine.planned:
            engine.planned = due
            if due < float("inf"):
                self._agenda.at(due, partial(self._advance, engine, due))

    def _advance(self, engine: _Engine, due: float) -> None:
        if engine.planned != due:
            return
        for sequence, _ in engine.virtual.advance():
            if sequence.generated == 1:
                self._first_token(sequence)
            if sequence.done:
                self._end(sequence)
        if changes := engine.virtual.take_changes():
            self._agenda.at(self._agenda.now + self._rates.event_delay_s, partial(self._tell, engine, changes))
        self._watch(engine)

    def _first_token(self, sequence: Sequence) -> None:
        trip, now = self._trips[sequence], self._agenda.now
        trip.served.ttft_s = now - trip.served.at_s
        trip.served.cached_tokens = sequence.cached
        self._chooser.first_token(trip.choice, trip.reservation, trip.sent_at)

    def _end(self, sequence: Sequence) -> None:
        trip = self._trips.pop(sequence)
        trip.served.e2e_s = self._agenda.now - trip.served.at_s
        self._chooser.ended(trip.choice, Usage(trip.served.prompt_tokens, sequence.generated, sequence.cached), trip.sent_at)
        trip.reservation.release()

    def _tell(self, engine: _Engine, changes: list[Change]) -> None:
        """Events reach the index."""
        held, endpoint, caches = engine.held, engine.endpoint, self._caches
        for kind, alike in itertools.groupby(changes, type):
            if kind is Removed:
                if gone := held.take([change.name for change in alike if isinstance(change, Removed)]):
                    caches.remove(endpoint, Tier.DEVICE, gone)
            elif kind is Stored:
                names = itertools.chain.from_iterable(change.names for change in alike if isinstance(change, Stored))
                if new := [name for name in names if held.add(name)]:
                    caches.store(endpoint, Tier.DEVICE, new)
            else:
                held.clear()
                caches.clear(endpoint)

    def _report(self, engine: _Engine) -> None:
        """What the engine says of itself."""
        scheduler, now = engine.virtual.scheduler, self._agenda.now
        engine.virtual.settle(now)
        usage = scheduler.cache.used / scheduler.cache.capacity
        self._load.report(engine.endpoint, len(scheduler.running), scheduler.queued, usage, now)
        self._caches.expire(now)
        if not (self._over and not self._trips):
            self._agenda.at(now + self._rates.report_period_s, partial(self._report, engine))
