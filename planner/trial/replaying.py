"""How would the planner do in front of the router's own code? As the one who says how many engines a replay has.

A replay shows what is there and what its clients have seen; this makes of it what a planner is shown, and of the plan how many engines of
each role there are to be. Shapes are told as protocols: the room that replays is not one of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from discovery.observations import histogram_of
from engines.types import Role
from planner.policy import Policy
from planner.rules import Rules
from planner.trial.fleet import Scaler
from planner.trial.scalers import Planned
from planner.types import Observation, Pool, Replica, ReplicaState, Slo, Traffic

MS: Final = 1e3
PERIOD_S: Final = 5.0


class ServedRequest(Protocol):
    """A request as far as it is."""

    @property
    def prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def output_tokens(self) -> int: ...  # noqa: D102
    @property
    def ttft_s(self) -> float | None: ...  # noqa: D102
    @property
    def e2e_s(self) -> float | None: ...  # noqa: D102


class ReplayedEngine(Protocol):
    """An engine, as it is now."""

    @property
    def id(self) -> str: ...  # noqa: D102
    @property
    def role(self) -> Role: ...  # noqa: D102
    @property
    def state(self) -> str: ...  # noqa: D102
    @property
    def since_s(self) -> float: ...  # noqa: D102
    @property
    def in_flight(self) -> int: ...  # noqa: D102
    @property
    def prefill_tokens(self) -> int: ...  # noqa: D102
    @property
    def running(self) -> int: ...  # noqa: D102
    @property
    def waiting(self) -> int: ...  # noqa: D102
    @property
    def kv_usage(self) -> float: ...  # noqa: D102


class ReplaySeen(Protocol):
    """What is, and what clients have seen since the last look."""

    @property
    def at_s(self) -> float: ...  # noqa: D102
    @property
    def window_s(self) -> float: ...  # noqa: D102
    @property
    def arrived(self) -> Sequence[ServedRequest]: ...  # noqa: D102
    @property
    def first_tokens(self) -> Sequence[ServedRequest]: ...  # noqa: D102
    @property
    def ended(self) -> Sequence[ServedRequest]: ...  # noqa: D102
    @property
    def shed(self) -> int: ...  # noqa: D102
    @property
    def waiting(self) -> int: ...  # noqa: D102
    @property
    def replicas(self) -> Sequence[ReplayedEngine]: ...  # noqa: D102


class Replaying:
    """Decides for a replay: the planner's policy, or what it is held against."""

    def __init__(self, pools: Sequence[Pool], scaler: Scaler, *, period_s: float, startup_s: float) -> None:
        self.period_s = period_s
        self.startup_s = startup_s
        self.engine_s = 0.0
        """Engines that were there, draining ones included, times seconds."""
        self.least = self.most = 0
        self._pools = tuple(pools)
        self._scaler = scaler

    def replicas(self, seen: ReplaySeen) -> Mapping[Role, int]:
        """How many of each role there are to be."""
        there = sum(one.state in _STATES for one in seen.replicas)
        self.engine_s += there * seen.window_s
        self.least = there if not self.most else min(self.least, there)
        self.most = max(self.most, there)
        targets = self._scaler.tick(observed(seen, self._pools))
        return {pool.role: targets[pool.name] for pool in self._pools if pool.name in targets}


def planned(engines: int, prefill_engines: int, ttft_s: float, itl_ms: float, startup_s: float) -> Replaying:
    """The planner's policy with its defaults, for a fleet that begins with so many engines and may have four times as many."""
    counts = {Role.AGGREGATED: engines} if not prefill_engines else {Role.PREFILL: prefill_engines, Role.DECODE: engines - prefill_engines}
    pools = tuple(Pool(role.value, role, max=4 * count, startup_s=startup_s) for role, count in counts.items())
    policy = Policy(pools, Rules(slo=Slo(ttft_s, itl_ms / MS)))
    return Replaying(pools, Planned(policy), period_s=PERIOD_S, startup_s=startup_s)


def observed(seen: ReplaySeen, pools: Sequence[Pool]) -> Observation:
    """What a planner would have been shown."""
    traffic = Traffic(
        window_s=seen.window_s,
        arrived=len(seen.arrived),
        isl=histogram_of([one.prompt_tokens for one in seen.arrived]),
        osl=histogram_of([one.output_tokens for one in seen.ended]),
        ttft_ms=histogram_of([one.ttft_s * MS for one in seen.first_tokens if one.ttft_s is not None]),
        itl_ms=histogram_of([itl_s * MS for one in seen.ended if (itl_s := _itl_s(one)) is not None]),
        wait_ms=histogram_of([]),
        shed=seen.shed,
        waiting=seen.waiting,
    )
    return Observation(
        seen.at_s,
        traffic,
        {pool.name: tuple(_replica(one) for one in seen.replicas if one.role is pool.role and one.state in _STATES) for pool in pools},
    )


def _itl_s(one: ServedRequest) -> float | None:
    if one.ttft_s is None or one.e2e_s is None or one.output_tokens < 2:
        return None
    return (one.e2e_s - one.ttft_s) / (one.output_tokens - 1)


def _replica(engine: ReplayedEngine) -> Replica:
    return Replica(
        engine.id,
        _STATES[engine.state],
        engine.since_s,
        in_flight=engine.in_flight,
        prefill_tokens=engine.prefill_tokens,
        running=engine.running,
        waiting=engine.waiting,
        kv_usage=engine.kv_usage,
    )


_STATES: Final = {"ready": ReplicaState.READY, "starting": ReplicaState.STARTING, "draining": ReplicaState.DRAINING}
