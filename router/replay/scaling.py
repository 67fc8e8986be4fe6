"""How many engines should there be? Somebody else's question: a `Scaler` is shown what is, and says how many of each role there are to be.

    every period_s:   Seen ──▶ scaler.replicas ──▶ {role: count} ──▶ engines start (and take their time), or drain and go

The planner is one such; the router does not know it. Whoever has both puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from engines.types import Role
from router.load import LoadBook
from router.replay.agenda import Agenda
from router.replay.engines import Engine, Engines, State
from router.replay.measure import Served, Tally


class Replica(msgspec.Struct, frozen=True):
    """One engine, as it is now."""

    id: str
    role: Role
    state: State
    since_s: float
    """When it joined."""
    in_flight: int
    prefill_tokens: int
    running: int
    waiting: int
    kv_usage: float


class Seen(msgspec.Struct, frozen=True):
    """What is, and what clients have seen since the last look."""

    at_s: float
    window_s: float
    arrived: tuple[Served, ...]
    first_tokens: tuple[Served, ...]
    """Requests whose first token has come."""
    ended: tuple[Served, ...]
    shed: int
    waiting: int
    """Requests that wait in the router now."""
    replicas: tuple[Replica, ...]


class Scaler(Protocol):
    """Decides how many replicas there are to be."""

    period_s: float
    startup_s: float
    """How long an engine takes to start."""

    def replicas(self, seen: Seen) -> Mapping[Role, int]:
        """Replicas of each role, those that are starting included and those that drain not; a role that is not named stays as it is."""
        ...


class Scaling:
    """Has a scaler's wishes come true."""

    def __init__(
        self, scaler: Scaler, agenda: Agenda, engines: Engines, load: LoadBook, tally: Tally, *, waiting: Callable[[], int]
    ) -> None:
        self._scaler = scaler
        self._agenda = agenda
        self._engines = engines
        self._load = load
        self._tally = tally
        self._arrived = 0
        self._under_way: list[Served] = []
        self._waiting = waiting

    def look(self) -> None:
        """Ask the scaler, now and from now on in every period."""
        for role, count in self._scaler.replicas(self._seen()).items():
            self._resize(role, count)
        self._agenda.at(self._agenda.now + self._scaler.period_s, self.look)

    def _resize(self, role: Role, count: int) -> None:
        there = [engine for engine in self._engines.present() if engine.info.role is role and engine.state in (State.STARTING, State.READY)]
        for _ in range(count - len(there)):
            self._engines.join(role, ready_in=self._scaler.startup_s)
        victims = sorted(there, key=lambda engine: (engine.state is State.READY, self._load.own(engine.endpoint).requests, -engine.number))
        for engine in victims[: max(0, len(there) - count)]:
            self._engines.drain(engine)

    def _seen(self) -> Seen:
        now, served = self._agenda.now, self._tally.served
        arrived = served[self._arrived :]
        self._arrived = len(served)
        since = now - self._scaler.period_s
        under_way = self._under_way + arrived
        first = [one for one in under_way if one.ttft_s is not None and one.at_s + one.ttft_s > since]
        ended = [one for one in under_way if one.e2e_s is not None]
        shed = sum(bool(one.shed) for one in under_way)
        self._under_way = [one for one in under_way if one.e2e_s is None and not (one.shed or one.failed)]
        return Seen(
            now,
            self._scaler.period_s,
            tuple(arrived),
            tuple(first),
            tuple(ended),
            shed,
            self._waiting(),
            tuple(self._replica(engine) for engine in self._engines.present()),
        )

    def _replica(self, engine: Engine) -> Replica:
        scheduler, own = engine.virtual.scheduler, self._load.own(engine.endpoint)
        return Replica(
            engine.info.id,
            engine.info.role,
            engine.state,
            engine.joined_at,
            own.requests,
            own.prefill_tokens,
            len(scheduler.running),
            scheduler.queued,
            scheduler.cache.used / scheduler.cache.capacity,
        )
