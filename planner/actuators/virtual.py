"""Who carries out a plan that is only told? Whoever listens: on the bus, or behind a webhook, and says so when it is done.

    plan ──bus / POST──▶ executor ── drains, starts, stops ──▶ Acknowledgement(planner, number)

What is there is what routers see. Replicas that an acknowledged plan has promised and routers do not see yet count as starting, so that
the same deficit is not told as another plan.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from discovery.logs import event
from discovery.observations import Acknowledgement, EngineReport
from discovery.subjects import Subjects
from planner.actuators.types import ActuatorError
from planner.sightings import replicas_of
from planner.types import Decision, Pool, Replica, ReplicaState

if TYPE_CHECKING:
    from discovery.bus import Bus, Subscription

TIMEOUT_S: Final = 30.0

_log = logging.getLogger(__name__)
_acknowledgements: msgspec.msgpack.Decoder[Acknowledgement] = msgspec.msgpack.Decoder(Acknowledgement)


class DryRun:
    """Nothing is done: the decisions are what is wanted."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools
        self._since: dict[str, tuple[str, float]] = {}

    async def replicas(self, engines: Mapping[str, EngineReport], now: float) -> Mapping[str, tuple[Replica, ...]]:
        """See `Actuator`: as routers see them."""
        return replicas_of(self._pools, engines.values(), self._since, now)

    async def carry_out(self, decision: Decision) -> None:
        """See `Actuator`."""

    async def close(self) -> None:
        """See `Actuator`."""


class Virtual:
    """Tells plans. On the bus they are told by the loop with every tick; here acknowledgements are heard, and the webhook is called."""

    def __init__(
        self,
        pools: Sequence[Pool],
        planner: str,
        bus: Bus,
        namespace: str,
        *,
        webhook: str | None = None,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self.acknowledged = 0
        """The plan that was last said to be carried out."""
        self._pools = pools
        self._planner = planner
        self._webhook = webhook
        self._session = session
        self._since: dict[str, tuple[str, float]] = {}
        self._told: dict[int, dict[str, int]] = {}
        self._promised: dict[str, tuple[int, float]] = {}
        """By pool: how many there are to be, and since when that is certain."""
        self._now = 0.0
        self._subscription: Subscription = bus.subscribe(Subjects(namespace).acknowledgements, self._on_acknowledgement)

    async def replicas(self, engines: Mapping[str, EngineReport], now: float) -> Mapping[str, tuple[Replica, ...]]:
        """See `Actuator`."""
        self._now = now
        seen = replicas_of(self._pools, engines.values(), self._since, now)
        return {name: (*found, *self._promised_of(name, found)) for name, found in seen.items()}

    async def carry_out(self, decision: Decision) -> None:
        """See `Actuator`."""
        if decision.number in self._told:
            return
        self._told = {number: told for number, told in self._told.items() if number > decision.number - 10}
        self._told[decision.number] = {decided.pool: decided.target for decided in decision.pools}
        if self._webhook is None or self._session is None:
            return
        try:
            await self._call(decision, self._webhook, self._session)
        except ActuatorError:  # the next tick tries again
            del self._told[decision.number]
            raise
        self._done(decision.number)

    async def close(self) -> None:
        """See `Actuator`."""
        self._subscription.cancel()

    async def _call(self, decision: Decision, url: str, session: aiohttp.ClientSession) -> None:
        body = {"planner": self._planner, **msgspec.to_builtins(decision)}
        try:
            async with session.post(
                url,
                data=msgspec.json.encode(body),
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                allow_redirects=False,
            ) as response:
                if response.status >= 300:
                    said = (await response.read())[:200].decode("utf-8", "replace")
                    raise ActuatorError(f"the webhook answers {response.status}: {said}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ActuatorError(f"the webhook could not be called: {error or type(error).__name__}") from error

    def _on_acknowledgement(self, subject: str, payload: bytes, reply: str) -> None:
        del subject, reply
        try:
            done = _acknowledgements.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return
        if done.planner != self._planner:
            return
        if done.error:
            event(_log, logging.WARNING, "a plan could not be carried out", number=done.number, error=done.error[:300])
            return
        self._done(done.number)

    def _done(self, number: int) -> None:
        told = self._told.get(number)
        if told is None or number < self.acknowledged:
            return
        self.acknowledged = number
        for name, count in told.items():
            self._promised[name] = (count, self._now)

    def _promised_of(self, name: str, found: Sequence[Replica]) -> list[Replica]:
        count, since = self._promised.get(name, (0, 0.0))
        missing = count - sum(one.state in (ReplicaState.READY, ReplicaState.STARTING) for one in found)
        return [Replica(f"{name}-promised-{number}", ReplicaState.STARTING, since) for number in range(missing)]
