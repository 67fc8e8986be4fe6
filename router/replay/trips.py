"""What becomes of each request? The life that the proxy gives it, without its bytes.

arrive ─▶ entrance ─▶ chooser ─▶ engine ──────────────────────────────▶ first token ─▶ last token ─▶ place given back
             ▲                    └─ or prefill engine ─ link ─ decode engine ─┘
             └── elsewhere, where `retry` allows it ◀── the engine has failed
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Final

from engines.errors import EngineBroken, EngineClosed, EngineError, EngineUnreachable
from engines.simulator.handover import Fetch, Keep
from engines.simulator.sequences import Prompt, Sequence
from router.admission import Shed
from router.chooser import Choice, Chooser
from router.disagg import Facts
from router.entrance import TICK_S, Entrance, Place, Visit
from router.intake import Asked
from router.prompts.book import Tokens
from router.replay.agenda import Agenda
from router.replay.engines import MODEL, Engine, Engines, State
from router.replay.measure import Served, Tally
from router.replay.workload import Arrival
from router.retry import Attempt, Next, judge
from router.routes import INFERENCE
from router.scheduling.scheduler import NoCandidate
from router.scheduling.types import RoutingRequest
from router.sse import Usage

ROUTE: Final = INFERENCE[b"/v1/completions"]
KEYS_MADE: Final = Tokens(None, b"", "local")
"""Stands for every prompt's ids: their keys are known."""
OWN_BLOCKS: Final = 1 << 63
"""From here on names are counted up for blocks that nobody else can have: what an answer fills."""
NO_ENGINE: Final = "no_engine"
TOO_LONG: Final = "too_long"


class _Promise:
    """Where a request waits for its turn."""

    __slots__ = ("_agenda", "_told", "_trip", "_trips")

    def __init__(self, trips: Trips, trip: Trip, agenda: Agenda) -> None:
        self._trips = trips
        self._trip = trip
        self._agenda = agenda
        self._told = False

    def done(self) -> bool:
        return self._told

    def set_result(self, place: Place) -> None:
        self._told = True
        self._agenda.at(self._agenda.now, partial(self._trips.let_in, self._trip, place))

    def set_exception(self, error: BaseException) -> None:
        self._told = True
        self._agenda.at(self._agenda.now, partial(self._trips.turned_away, self._trip, error))


class Trip:
    """One request under way."""

    __slots__ = ("asked", "began", "engine", "kept", "names", "place", "queued", "repeats", "sequence", "served", "tried", "visit")

    def __init__(self, served: Served, asked: Asked, names: list[int], visit: Visit) -> None:
        self.served = served
        self.asked = asked
        self.names = names
        """Of all its blocks."""
        self.visit = visit
        self.tried: set[str] = set()
        self.repeats = 0
        self.queued: object = None
        self.place: Place | None = None
        self.sequence: Sequence | None = None
        self.engine: Engine | None = None
        self.kept: tuple[Engine, Sequence] | None = None
        """Its prompt at the engine that has computed it, until that has been fetched."""
        self.began = 0.0
        """When what is under way now was sent."""


class Trips:
    """All requests."""

    def __init__(self, agenda: Agenda, engines: Engines, entrance: Entrance, chooser: Chooser, tally: Tally) -> None:
        self.under_way: dict[Sequence, Trip] = {}
        self.waiting = 0
        """Requests that wait for an engine with room."""
        self._agenda = agenda
        self._engines = engines
        self._entrance = entrance
        self._chooser = chooser
        self._tally = tally
        self._names = itertools.count(OWN_BLOCKS)
        self._ticking = False
        engines.gained, engines.fetches, engines.carried = self._gained, self._fetch, self._carried

    @property
    def over(self) -> bool:
        """Whether all have ended that have come."""
        return not self.under_way and not self.waiting

    def arrive(self, arrival: Arrival, block_size: int) -> None:
        """A request comes now."""
        served = Served(self._agenda.now, arrival.prompt_tokens, arrival.output_tokens)
        self._tally.served.append(served)
        if not self._engines.hardware.holds(arrival):
            served.failed = TOO_LONG
            return
        request = RoutingRequest(MODEL, arrival.prompt_tokens, session=arrival.session)
        keys = list(arrival.keys[: arrival.prompt_tokens // block_size])
        tokens = dict.fromkeys(self._engines.all, KEYS_MADE)
        asked = Asked(ROUTE, b"", request, tokens, 0, made={(id(KEYS_MADE), block_size): keys}, read={})
        blocks = (arrival.prompt_tokens + arrival.output_tokens) // block_size
        names = [*arrival.keys, *itertools.islice(self._names, max(0, blocks - len(arrival.keys)))]
        self._enter(Trip(served, asked, names, Visit([], "", self._agenda.now)))

    def let_in(self, trip: Trip, place: Place) -> None:
        """It has waited for its turn, and has a place now."""
        self._end_wait(trip)
        self._entrance.let_in(trip.queued, trip.visit)  # type: ignore[arg-type]
        self._send(trip, place)

    def turned_away(self, trip: Trip, error: BaseException) -> None:
        """It has waited in vain."""
        self._end_wait(trip)
        _refuse(trip.served, error)

    def lost(self, engine: Engine) -> None:
        """The engine has been killed: what it was doing is tried elsewhere, where nothing has been answered yet."""
        for trip in [
            trip for trip in self.under_way.values() if trip.engine is engine or (trip.kept is not None and trip.kept[0] is engine)
        ]:
            begun = trip.served.ttft_s is not None
            self._set_back(trip, EngineBroken("it was killed") if begun else EngineClosed("it was killed"), engine)

    # inside

    def _enter(self, trip: Trip) -> None:
        try:
            place = self._entrance.at_once(trip.asked, trip.tried, trip.visit)
            if place is None:
                promise = _Promise(self, trip, self._agenda)
                trip.queued = self._entrance.queue(trip.asked, trip.tried, trip.visit, promise)
                self.waiting += 1
                self._tick_later()
        except (NoCandidate, Shed) as nowhere:
            _refuse(trip.served, nowhere)
            return
        if place is not None:
            self._send(trip, place)

    def _end_wait(self, trip: Trip) -> None:
        self.waiting -= 1
        self._entrance.leave(trip.queued)  # type: ignore[arg-type]

    def _tick_later(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._agenda.at(self._agenda.now + TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._entrance.pump()
        if self._entrance.somebody_waits:
            self._tick_later()

    def _send(self, trip: Trip, place: Place) -> None:
        trip.place, trip.began = place, self._agenda.now
        prefill = place.choice.prefill
        if prefill is None:
            self._submit(trip, place.choice, Prompt([], trip.served.output_tokens))
        else:
            self._submit(trip, prefill, Prompt([], 1, handover=Keep("")))

    def _submit(self, trip: Trip, choice: Choice, prompt: Prompt) -> None:
        engine = trip.engine = self._engines.all[choice.endpoint.engine]
        trip.served.engine = engine.number
        sequence = trip.sequence = Sequence(prompt, trip.served.prompt_tokens, trip.names)
        self.under_way[sequence] = trip
        if engine.state in (State.DOWN, State.GONE):
            self._set_back(trip, EngineUnreachable("connection refused"), engine)
            return
        engine.virtual.submit(sequence, self._agenda.now)
        self._engines.watch(engine)

    def _gained(self, engine: Engine, gained: list[tuple[Sequence, int]]) -> None:
        for sequence, _ in gained:
            if sequence.done and sequence.prompt.handover is not None and isinstance(sequence.prompt.handover, Keep):
                self._prefilled(self.under_way.pop(sequence), engine, sequence)
                continue
            trip = self.under_way[sequence]
            if sequence.generated == 1:
                self._first_token(trip, sequence)
            if sequence.done:
                self._end(trip, sequence)

    def _first_token(self, trip: Trip, sequence: Sequence) -> None:
        now, place = self._agenda.now, _place_of(trip)
        trip.served.ttft_s = now - trip.served.at_s
        if place.choice.prefill is None:
            trip.served.cached_tokens = sequence.cached
        else:
            facts, pair = _facts(place.choice), (place.choice.prefill.endpoint, place.choice.endpoint)
            self._chooser.pairing.transferred(pair, facts, now - trip.began, now)
        self._chooser.first_token(place.choice, place.reservation, trip.began)

    def _end(self, trip: Trip, sequence: Sequence) -> None:
        place = _place_of(trip)
        del self.under_way[sequence]
        trip.served.e2e_s = self._agenda.now - trip.served.at_s
        usage = Usage(trip.served.prompt_tokens, sequence.generated, trip.served.cached_tokens)
        self._chooser.ended(place.choice, usage, trip.began)
        self._chooser.answered(place.reservation, sequence.generated)
        self._give_back(trip)

    def _give_back(self, trip: Trip) -> None:
        place, trip.place = _place_of(trip), None
        with place:
            pass
        for choice in (place.choice, place.choice.prefill):
            if choice is not None:
                self._engines.let_go(self._engines.all[choice.endpoint.engine])

    # prefill and decode on two engines

    def _prefilled(self, trip: Trip, engine: Engine, sequence: Sequence) -> None:
        """The prompt has been computed, and waits to be fetched."""
        now, place = self._agenda.now, _place_of(trip)
        prefill, reservation = place.choice.prefill, place.reservation.prefill
        if prefill is None or reservation is None:
            raise AssertionError
        trip.kept, trip.served.cached_tokens = (engine, sequence), sequence.cached
        self._chooser.first_token(prefill, reservation, trip.began)
        reservation.release()
        facts = _facts(place.choice)
        self._chooser.pairing.prefilled(
            (prefill.endpoint, place.choice.endpoint), facts.queued_at_prefill + facts.new_at_prefill, now - trip.began, now
        )
        trip.began = now
        self._submit(trip, place.choice, Prompt([], trip.served.output_tokens, handover=Fetch("", "")))

    def _fetch(self, engine: Engine, sequence: Sequence) -> None:
        trip = self.under_way[sequence]
        if trip.kept is None:
            raise AssertionError
        self._engines.carry(trip.kept[0], sequence, engine.virtual.scheduler.missing(sequence))

    def _carried(self, sequence: Sequence) -> None:
        """The KV has come."""
        trip, now = self.under_way.get(sequence), self._agenda.now
        if trip is None or trip.kept is None or trip.engine is None:
            return
        there, kept = trip.kept
        trip.kept = None
        for engine in (there, trip.engine):
            engine.virtual.settle(now)
        trip.engine.virtual.scheduler.fetched(sequence, (), kept.cached)
        there.virtual.scheduler.forget(kept)
        for engine in (there, trip.engine):
            engine.virtual.nudge(now)
            self._engines.watch(engine)
        self._engines.let_go(there)

    # failures

    def _set_back(self, trip: Trip, failure: EngineError, engine: Engine) -> None:
        """An attempt has failed: by the router's own table, it is tried elsewhere or has ended."""
        sequence, place = trip.sequence, _place_of(trip)
        if sequence is not None:
            self.under_way.pop(sequence, None)
            if trip.engine is not None and trip.engine is not engine:
                trip.engine.virtual.abort(sequence, self._agenda.now)
                self._engines.watch(trip.engine)
        verdict = judge(Attempt(failure, client_bytes=int(trip.served.ttft_s is not None), repeats=trip.repeats))
        if verdict.blames_engine:
            choice = place.choice if place.choice.endpoint == engine.endpoint else place.choice.prefill
            if choice is not None:
                choice.member.suspected = True
        self._forget_kept(trip, engine)
        trip.repeats += verdict.repeats
        trip.tried.add(engine.info.id)
        self._give_back(trip)
        if verdict.next is Next.STOP:
            trip.served.failed = verdict.code
        else:
            self._enter(trip)

    def _forget_kept(self, trip: Trip, lost: Engine) -> None:
        kept, trip.kept = trip.kept, None
        if kept is not None and kept[0] is not lost:
            kept[0].virtual.settle(self._agenda.now)
            kept[0].virtual.scheduler.forget(kept[1])
            kept[0].virtual.nudge(self._agenda.now)
            self._engines.watch(kept[0])


def _refuse(served: Served, why: BaseException) -> None:
    """It gets no answer: there was no room, or no engine."""
    if isinstance(why, Shed):
        served.shed = why.reason.value
    else:
        served.failed = NO_ENGINE


def _place_of(trip: Trip) -> Place:
    if trip.place is None:
        raise AssertionError
    return trip.place


def _facts(choice: Choice) -> Facts:
    if choice.split is None or choice.split.facts is None:
        raise AssertionError
    return choice.split.facts
