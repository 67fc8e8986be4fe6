"""What happens when this router meets that traffic? Everything put together: one run of one policy, in virtual time.

The fleet list, the load book, the caches, the entrance, the chooser and what it knows of pairs are the router's own; nothing of what they
decide is decided here again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import msgspec

from engines.types import Role
from router.admission import QueueLimits
from router.caches import Caches
from router.calibration import Calibration
from router.chooser import Chooser
from router.entrance import Entrance, HeaderNames
from router.fleet import NO_LIMIT, Fleet
from router.load import LoadBook
from router.pairing import DisaggRules, Pairing
from router.replay.agenda import Agenda
from router.replay.engines import Engine, Engines, Hardware, Signals
from router.replay.measure import Tally
from router.replay.scaling import Scaler, Scaling
from router.replay.trips import Trips
from router.replay.workload import Arrival
from router.scheduling.scheduler import Scheduler
from router.scheduling.types import Policy

_A_SLICE: Final = 100
"""Arrivals between two times that whoever drives it may do something else."""
_NAMES: Final = HeaderNames(None, b"", b"")


class Member(msgspec.Struct, frozen=True):
    """An engine of the fleet that a run begins with."""

    role: Role = Role.AGGREGATED
    speed: float = 1.0
    """Times that of the model."""


class Failure(msgspec.Struct, frozen=True):
    """An engine is killed, and perhaps comes back."""

    at_s: float
    engine: int
    back_after_s: float | None = None


class Setting(msgspec.Struct, frozen=True):
    """What a run is of, besides its policy and its traffic."""

    hardware: Hardware
    members: tuple[Member, ...]
    failures: tuple[Failure, ...] = ()
    max_active_requests: int = NO_LIMIT
    limits: QueueLimits = QueueLimits()
    disagg: DisaggRules = DisaggRules()
    temperature: float = 0.0


class Replay:
    """One run."""

    def __init__(self, setting: Setting, policy: Policy, name: str, *, seed: int = 0, scaler: Scaler | None = None) -> None:
        """`name` is the policy's; `seed` is for what it draws."""
        self.tally = Tally()
        self._setting = setting
        agenda = self._agenda = Agenda()

        def clock() -> float:
            return agenda.now

        caches, load, fleet = Caches(), LoadBook(), Fleet(setting.max_active_requests)
        pairing, hardware = Pairing(setting.disagg), setting.hardware
        scheduler = Scheduler(policy, name, setting.temperature, random.Random(seed))
        chooser = Chooser(fleet, caches, load, scheduler, Signals(hardware), Calibration(), pairing=pairing, clock=clock)
        entrance = Entrance(chooser, setting.limits, _NAMES, waited=lambda _: None, clock=clock)
        self._engines = Engines(hardware, agenda, fleet, caches, load, pairing, paced=self.tally.paced)
        self._trips = Trips(agenda, self._engines, entrance, chooser, self.tally)
        self._scaling = (
            None if scaler is None else Scaling(scaler, agenda, self._engines, load, self.tally, waiting=lambda: self._trips.waiting)
        )
        self._all_came = False

    def run(self, arrivals: Iterator[tuple[float, Arrival]]) -> Iterator[int]:
        """Serve all of it, to the last token; says now and then how many have come."""
        agenda = self._agenda
        began = [self._engines.join(member.role, speed=member.speed) for member in self._setting.members]
        for failure in self._setting.failures:
            self._plan(failure, began[failure.engine])
        self._next(arrivals)
        if self._scaling is not None:
            self._scaling.look()
        told = 0
        while not (self._all_came and self._trips.over) and agenda.step():
            if len(self.tally.served) >= told + _A_SLICE:
                told = len(self.tally.served)
                yield told
        self.tally.ended(
            agenda.now, [(engine.joined_at, min(agenda.now, engine.left_at), engine.busy_s) for engine in self._engines.all.values()]
        )
        yield len(self.tally.served)

    def _next(self, arrivals: Iterator[tuple[float, Arrival]]) -> None:
        following = next(arrivals, None)
        if following is None:
            self._all_came = True
            return
        moment, arrival = following
        self._agenda.at(moment, lambda: self._arrive(arrival, arrivals))

    def _arrive(self, arrival: Arrival, arrivals: Iterator[tuple[float, Arrival]]) -> None:
        self._trips.arrive(arrival, self._setting.hardware.block_size)
        self._next(arrivals)

    def _plan(self, failure: Failure, engine: Engine) -> None:
        def fail() -> None:
            self._engines.fail(engine)
            self._trips.lost(engine)

        self._agenda.at(failure.at_s, fail)
        if failure.back_after_s is not None:
            self._agenda.at(failure.at_s + failure.back_after_s, lambda: self._engines.recover(engine))
