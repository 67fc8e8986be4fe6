"""What policies are shown in tests: a fleet that is loaded as told, seen as routers tell it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from discovery.observations import Histogram, histogram_of
from engines.types import Role
from planner.capacity import Profile
from planner.policy import Policy
from planner.rules import Rules
from planner.types import Decision, Loop, Observation, Pool, Replica, ReplicaState, Slo, Traffic

TICK_S = 5.0
ISL, OSL = 1000, 200
PROFILE = Profile(prefill=((1.0, 0.01), (4000.0, 0.41)), decode=((1.0, 0.0104), (50.0, 0.03)))
"""A token of a prompt takes 0.1 ms; a step 10 ms, and 0.4 ms for each stream."""
SLO = Slo(2.0, 0.05)
POOL = Pool("pool", max=20)
REACTIVE = Rules(slo=SLO, loops=frozenset({Loop.LOAD}))


def policy(*pools: Pool, rules: Rules = REACTIVE, profile: Profile | None = PROFILE) -> Policy:
    return Policy(pools or (POOL,), rules, profile=profile)


def replica(number: int = 0, state: ReplicaState = ReplicaState.READY, since: float = 0.0, **carries: Any) -> Replica:  # noqa: ANN401
    return Replica(f"engine-{number}", state, since, **carries)


def replicas(ready: int, starting: int = 0, since: float = 0.0, **carries: Any) -> tuple[Replica, ...]:  # noqa: ANN401
    return tuple(
        replica(number, ReplicaState.READY if number < ready else ReplicaState.STARTING, since, **(carries if number < ready else {}))
        for number in range(ready + starting)
    )


def traffic(
    rate: float,
    *,
    window_s: float = TICK_S,
    waiting: int = 0,
    ttft_s: float = 0.2,
    itl_s: float = 0.02,
    isl: int = ISL,
    osl: int = OSL,
    waited_s: float = 0.0,
) -> Traffic:
    """Requests that are all alike."""
    count = round(rate * window_s)
    return Traffic(
        window_s=window_s,
        arrived=count,
        isl=histogram_of([isl] * count),
        osl=histogram_of([osl] * count) if osl else Histogram(),
        ttft_ms=histogram_of([ttft_s * 1e3] * count),
        itl_ms=histogram_of([itl_s * 1e3] * count) if osl else Histogram(),
        wait_ms=histogram_of([waited_s * 1e3] * count),
        hit_rate=0.0,
        waiting=waiting,
    )


def seen(at: float, found: Traffic | None, pools: Mapping[str, Sequence[Replica]]) -> Observation:
    return Observation(at, found, {name: tuple(there) for name, there in pools.items()})


class Fleet:
    """Replicas of one pool that come and go as the policy says, at once unless a start takes time."""

    def __init__(self, planner: Policy, count: int, *, startup_s: float = 0.0) -> None:
        self.policy = planner
        self.pool = next(iter(planner.pools))
        self.at = 0.0
        self.replicas = list(replicas(count))
        self.starts = 0
        self._startup_s = startup_s
        self.never: set[str] = set()
        """Replicas that start and never are ready."""

    def tick(self, found: Traffic | None, in_flight: int = 0) -> Decision:
        self.at += TICK_S
        ready = sum(replica.state is ReplicaState.READY for replica in self.replicas)
        shown = [
            Replica(one.id, one.state, one.since, in_flight=in_flight // ready) if one.state is ReplicaState.READY else one
            for one in map(self._aged, self.replicas)
        ]
        self.replicas = [Replica(one.id, one.state, one.since) for one in shown]
        decision = self.policy.tick(seen(self.at, found, {self.pool: shown}))
        decided = decision.of(self.pool)
        self.replicas = [one for one in self.replicas if one.id not in decided.victims]
        while len(self.replicas) < decided.target:
            self.starts += 1
            state = ReplicaState.STARTING if self._startup_s else ReplicaState.READY
            self.replicas.append(Replica(f"new-{self.starts}", state, self.at))
        return decision

    def run(self, ticks: int, rate: float, *, noise: float = 0.0, in_flight: int = 0, **told: Any) -> list[int]:  # noqa: ANN401
        """The target after each of so many ticks at a rate."""
        by_chance = random.Random(3)
        return [
            self.tick(traffic(rate * (1 + noise * by_chance.uniform(-1, 1)), **told), in_flight).of(self.pool).target for _ in range(ticks)
        ]

    def _aged(self, one: Replica) -> Replica:
        due = one.state is ReplicaState.STARTING and self.at - one.since >= self._startup_s and one.id not in self.never
        return Replica(one.id, ReplicaState.READY, self.at) if due else one


def one_carries(planner: Policy, role: Role = Role.AGGREGATED) -> float:
    """Requests a second that the policy plans for a replica, before any were seen."""
    planner.memory.usual.observe(traffic(10))
    capacity = next(capacity for capacity in planner.memory.capacities.values() if capacity.role is role)
    return capacity.rate(planner.memory.usual.mix(SLO), SLO) * planner.rules.fill
