"""Who else could decide, and would it be better? The planner's policy, and what it is held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from planner.limits import COUNTED, bounded
from planner.policy import Policy
from planner.types import Observation, Pool, ReplicaState

HPA_SYNC_S: Final = 15.0
HPA_TOLERANCE: Final = 0.1
HPA_STABILISE_S: Final = 300.0


class Planned:
    """The policy, as `commutator plan` runs it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def tick(self, seen: Observation) -> Mapping[str, int]:
        """See `Scaler`."""
        return {decided.pool: decided.target for decided in self.policy.tick(seen).pools}


class Fixed:
    """Always as many."""

    def __init__(self, replicas: Mapping[str, int]) -> None:
        self._replicas = replicas

    def tick(self, seen: Observation) -> Mapping[str, int]:  # noqa: ARG002  it looks at nothing
        """See `Scaler`."""
        return self._replicas


class Hpa:
    """Kubernetes' HorizontalPodAutoscaler with its defaults, over requests in flight of a replica.

    Every 15 s: `replicas × in flight ÷ target`, unless within 10 % of it; up by no more than double or four; down to the highest of the
    last five minutes. `target`: what one replica carries within its targets, times the utilisation aimed at.
    """

    def __init__(self, pools: Mapping[str, Pool], target: Mapping[str, float]) -> None:
        self._pools = pools
        self._target = target
        self._next_at = 0.0
        self._wanted: dict[str, list[tuple[float, int]]] = {name: [] for name in pools}
        self._last: dict[str, int] = {}

    def tick(self, seen: Observation) -> Mapping[str, int]:
        """See `Scaler`."""
        if seen.at < self._next_at and self._last:
            return self._last
        self._next_at = seen.at + HPA_SYNC_S
        self._last = {name: self._of(name, pool, seen) for name, pool in self._pools.items()}
        return self._last

    def _of(self, name: str, pool: Pool, seen: Observation) -> int:
        replicas = seen.replicas.get(name, ())
        current = sum(replica.state in COUNTED for replica in replicas)
        ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
        if seen.traffic is None or not ready:
            return max(current, pool.min)
        load = sum(replica.in_flight for replica in ready) + seen.traffic.waiting
        ratio = load / len(ready) / self._target[name]
        wanted = current if abs(ratio - 1) <= HPA_TOLERANCE else math.ceil(len(ready) * ratio)
        recent = [(at, number) for at, number in self._wanted[name] if seen.at - at < HPA_STABILISE_S]
        recent.append((seen.at, wanted))
        self._wanted[name] = recent
        stable = max(number for _, number in recent) if wanted < current else wanted
        return bounded(pool, current, min(stable, max(2 * current, current + 4)), pool.max).target


class Clairvoyant:
    """Knows what will come, and what a replica carries: as good as can be with replicas that take a time to start."""

    def __init__(self, pools: Mapping[str, Pool], rate: Callable[[float], float], one: Mapping[str, float], ahead_s: float = 10.0) -> None:
        """`rate` at a time; `one`: requests a second of one replica; `ahead_s`: beyond what a start takes."""
        self._pools = pools
        self._rate = rate
        self._one = one
        self._ahead_s = ahead_s

    def tick(self, seen: Observation) -> Mapping[str, int]:
        """See `Scaler`."""
        return {name: self._of(pool, seen.at) for name, pool in self._pools.items()}

    def _of(self, pool: Pool, at: float) -> int:
        until = pool.startup_s + self._ahead_s
        most = max(self._rate(at + part * until / 20) for part in range(21))
        return min(pool.max, max(pool.min, math.ceil(most / self._one[pool.name])))
