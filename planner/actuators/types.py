"""What is an actuator? Whoever can say what replicas there are, and make them more or fewer.

    replicas(engines, now) ─▶ what is: the count that plans start from, whoever made it so
    carry_out(decision)    ─▶ begins to make it so, and returns; the next `replicas` shows how far it is

An actuator drains before it stops anything, through the routers (`planner.routers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from discovery.observations import EngineReport
from planner.types import Decision, Replica


class ActuatorError(Exception):
    """A plan could not be carried out, or what is could not be seen; the message says why. The next tick tries again."""


class Actuator(Protocol):
    """One way of running engines."""

    async def replicas(self, engines: Mapping[str, EngineReport], now: float) -> Mapping[str, tuple[Replica, ...]]:
        """What there is, by pool, with the load that routers know of. Raises ActuatorError."""
        ...

    async def carry_out(self, decision: Decision) -> None:
        """Begin to make it so. Raises ActuatorError."""
        ...

    async def close(self) -> None:
        """Let go: what is of this process ends with it."""
        ...
