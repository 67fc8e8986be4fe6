"""What does a planner do? Every few seconds: look, decide, say so, and have it done.

    look ─▶ replicas ─▶ policy ─▶ log line, bus, page, metrics ─▶ carry out ─▶ keep what is known

Whatever fails, the next tick comes; a tick that could not see what there is changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from discovery.logs import event
from discovery.observations import PlanMessage, PlanPool
from discovery.subjects import Subjects
from planner.actuators.types import ActuatorError
from planner.types import Decision, Observation, PoolDecision

if TYPE_CHECKING:
    from discovery.bus import Bus
    from planner.actuators.types import Actuator
    from planner.observer import Observer
    from planner.policy import Policy
    from planner.record import Record
    from planner.sightings import Look

SLACK: Final = 1.5
"""Requests wait for a model's first engine for so many times as long as one takes to start."""

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class Told(msgspec.Struct, frozen=True):
    """The plan told last."""

    number: int = 0
    replicas: dict[str, int] = {}
    """By pool."""


class Keeper(Protocol):
    """Where what a planner knows is kept between two lives of it."""

    async def keep(self, policy: Policy, told: Told) -> None:
        """Called after every tick."""
        ...


class Loop:
    """Runs a policy."""

    def __init__(  # noqa: PLR0913  the steps of a tick
        self,
        policy: Policy,
        observer: Observer,
        actuator: Actuator,
        record: Record,
        *,
        bus: Bus | None,
        namespace: str,
        planner: str,
        model: str,
        interval_s: float,
        clock: Callable[[], float],
        keeper: Keeper | None = None,
        told: Told | None = None,
    ) -> None:
        """`clock` tells seconds since the epoch. `told`: by the planner that this one goes on for."""
        self._policy = policy
        self._observer = observer
        self._actuator = actuator
        self._record = record
        self._bus = bus
        self._subjects = Subjects(namespace)
        self._planner = planner
        self._model = model
        self._interval_s = interval_s
        self._clock = clock
        self._keeper = keeper
        self._told = told or Told()

    async def run(self) -> None:
        """Ends only by cancellation."""
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self.tick()
            except Exception as error:  # noqa: BLE001  a fault of ours in one tick must not be the end of planning
                self._record.failed(error)
                _log.exception("a tick failed")
            await asyncio.sleep(max(0.0, self._interval_s - (asyncio.get_running_loop().time() - began)))

    async def tick(self) -> Decision | None:
        """One round; None when what there is could not be seen, or nobody has told anything new."""
        look = await self._observer.look()
        if look.nothing_new:
            return None
        now = self._clock()
        try:
            replicas = await self._actuator.replicas(look.engines, now)
        except ActuatorError as error:
            self._record.failed(error)
            event(_log, logging.WARNING, "what there is cannot be seen: nothing is changed", error=str(error))
            return None
        seen = Observation(now, look.traffic, replicas)
        decision = self._say(seen, self._policy.tick(seen), look)
        if decision.changes:
            try:
                await self._actuator.carry_out(decision)
            except ActuatorError as error:
                self._record.failed(error)
                event(_log, logging.ERROR, "a plan could not be carried out", error=str(error))
        if self._keeper is not None:
            await self._keeper.keep(self._policy, self._told)
        return decision

    def _say(self, seen: Observation, decision: Decision, look: Look) -> Decision:
        """Tell it to all who may want to know; the decision with its number."""
        self._record.decided(seen, decision)
        self._model = self._model or next((model for engine in look.engines.values() for model in engine.models), "")
        pools = tuple(map(_as_told, decision.pools))
        replicas = {pool.pool: pool.replicas for pool in pools}
        if replicas != self._told.replicas:
            self._told = Told(self._told.number + 1, replicas)
            for decided in decision.pools:
                event(
                    _log,
                    logging.INFO,
                    "plan",
                    number=self._told.number,
                    pool=decided.pool,
                    replicas=decided.target,
                    was=decided.current,
                    reason="; ".join(decided.reasons),
                    **{name: round(value, 4) for name, value in decided.inputs.items()},
                )
        if self._bus is not None and self._bus.connected:
            empties = any(pool.min == 0 for pool in self._policy.pools.values())
            within_s = SLACK * max(pool.startup_s for pool in self._policy.pools.values()) if empties else 0.0
            message = PlanMessage(self._planner, self._told.number, decision.at, self._model, pools, within_s if self._model else 0.0)
            self._bus.publish(self._subjects.plans, _encode(message))
        return msgspec.structs.replace(decision, number=self._told.number)


def _as_told(decided: PoolDecision) -> PlanPool:
    return PlanPool(decided.pool, decided.role, decided.target, decided.current, decided.victims, decided.reasons)
