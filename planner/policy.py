"""How many engines should there be? One tick: what was observed becomes a decision, with its reasons.

    Observation ─▶ learn (capacity, rate, what requests are like)
                ─▶ load loop: need, keep          ─┐
                ─▶ throughput loop: a floor        ├─▶ at least `need`; down to what `keep` was at the busiest of late
                ─▶ limits, GPUs, victims          ─┘

All that a next decision rests on is in `Memory`: a planner that starts again with it decides as if it had never stopped.
No data is no reason to change anything; no traffic is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from engines.types import Role
from planner.capacity import Capacity, Profile, Window
from planner.forecast import AnyForecaster, Predictor, alike, forecaster
from planner.limits import COUNTED, bounded, victims, within_budget
from planner.reactive import TOLERANCE, Demand, Want, by_sla, by_thresholds
from planner.rules import Rules
from planner.traffic import LEAST, Gathered, Rate, Usual, seconds_of
from planner.types import Decision, Loop, Observation, Pool, PoolDecision, Replica, ReplicaState, Target, Traffic

LATE_TICKS: Final = 2
"""So many windows in a row must be over a target before one more replica is added for that alone."""
FULL_KV: Final = 0.9


class Floor(msgspec.Struct):
    """What the throughput loop said last."""

    replicas: int = 0
    keep: int = 0
    reason: str = ""
    rate: float = 0.0


class Memory(msgspec.Struct):
    """All that is known between two ticks."""

    capacities: dict[str, Capacity]
    arrivals: AnyForecaster
    rate: Rate = msgspec.field(default_factory=Rate)
    usual: Usual = msgspec.field(default_factory=Usual)
    gathered: Gathered = msgspec.field(default_factory=Gathered)
    keeps: dict[str, list[tuple[float, int]]] = {}
    """By pool: what would have been kept at each moment of late."""
    floors: dict[str, Floor] = {}
    bin_from: float | None = None
    bin_arrived: int = 0
    planned_at: float | None = None
    idle_since: float | None = None
    watching_since: float | None = None
    """A pool may shrink once it has been watched for a while."""
    counts: dict[str, tuple[int, int]] = {}
    """By pool: replicas that were ready, and that were starting."""
    changed_at: float = 0.0
    late_ttft: int = 0
    late_itl: int = 0
    """Windows in a row over the target."""


class Policy:
    """Decides. Plain values in and out; `memory` is its state, to be kept and given back."""

    def __init__(self, pools: Sequence[Pool], rules: Rules, *, predictor: Predictor = "holt", profile: Profile | None = None) -> None:
        """Raises PredictorMissing."""
        self.pools = {pool.name: pool for pool in pools}
        self.rules = rules
        self.memory = Memory({pool.name: Capacity.of(pool.role, profile) for pool in pools}, forecaster(predictor))

    def resume(self, memory: Memory) -> None:
        """Go on with what another one knew, and with the predictor and the profile that this one was made with."""
        fresh, self.memory = self.memory, memory
        if not alike(fresh.arrivals, memory.arrivals):
            memory.arrivals = fresh.arrivals
        for name, capacity in memory.capacities.items():
            capacity.begin_with(fresh.capacities[name])

    def tick(self, seen: Observation) -> Decision:
        """What the pools are to be now."""
        replicas = {name: _judged(pool, seen.replicas.get(name, ()), seen.at) for name, pool in self.pools.items()}
        current = {name: sum(replica.state in COUNTED for replica in replicas[name]) for name in self.pools}
        if seen.traffic is None:
            return self._hold(seen.at, replicas, current, "nobody tells what clients ask for: held")
        self._learn(seen.at, seen.traffic, replicas)
        demand = self._demand(seen.at, seen.traffic, replicas)
        idle = self._idle(seen.at, seen.traffic, replicas)
        if Loop.THROUGHPUT in self.rules.loops:
            self._look_ahead(seen.at)
        wants = {name: self._want(name, replicas[name], demand, idle_s=idle) for name in self.pools}
        return self._decide(seen.at, replicas, current, wants)

    # what is known

    def _learn(self, at: float, traffic: Traffic, replicas: Mapping[str, Sequence[Replica]]) -> None:
        memory, rules = self.memory, self.rules
        memory.watching_since = at if memory.watching_since is None else memory.watching_since
        self._count(at, traffic)
        memory.usual.observe(traffic)
        counts = {name: (_number(found, ReplicaState.READY), _number(found, ReplicaState.STARTING)) for name, found in replicas.items()}
        if counts != memory.counts:
            memory.counts, memory.changed_at = counts, at
        gathered = memory.gathered
        gathered.add(traffic)
        waits = traffic.waiting or any((replica.waiting or 0) > 1 for found in replicas.values() for replica in found)
        gathered.settled = gathered.settled and not waits and at - memory.changed_at > 2 * traffic.window_s
        for name, found in replicas.items():
            ready = [replica for replica in found if replica.state is ReplicaState.READY]
            usages = [replica.kv_usage for replica in ready if replica.kv_usage is not None]
            if ready:
                carried = sum(replica.in_flight for replica in ready) / len(ready)
                gathered.in_flight_s[name] = gathered.in_flight_s.get(name, 0.0) + carried * traffic.window_s
            if usages:
                gathered.kv_s[name] = gathered.kv_s.get(name, 0.0) + sum(usages) / len(usages) * traffic.window_s
        if gathered.enough:
            memory.gathered = Gathered()
            if gathered.arrived and rules.target is Target.SLA:
                self._learn_capacity(gathered, counts)

    def _learn_capacity(self, gathered: Gathered, counts: Mapping[str, tuple[int, int]]) -> None:
        mix = self.memory.usual.mix(self.rules.slo)
        ttft_s, ttft_at_s = seconds_of(gathered.ttft_ms, self.rules.slo)
        itl_s, itl_at_s = seconds_of(gathered.itl_ms, self.rules.slo)
        for name, capacity in self.memory.capacities.items():
            ready, _ = counts[name]
            if ready:
                window = Window(
                    rate=gathered.arrived / gathered.window_s / ready,
                    streams=gathered.in_flight_s.get(name, 0.0) / gathered.window_s,
                    mix=mix,
                    ttft_s=ttft_s,
                    ttft_at_s=ttft_at_s,
                    itl_s=itl_s,
                    itl_at_s=itl_at_s,
                    kv_usage=gathered.kv_s[name] / gathered.window_s if name in gathered.kv_s else None,
                    settled=gathered.settled,
                )
                capacity.learn(window)

    def _demand(self, at: float, traffic: Traffic, replicas: Mapping[str, Sequence[Replica]]) -> Demand:
        memory, slo = self.memory, self.rules.slo
        rate = memory.rate.observe(traffic.arrived, traffic.window_s)
        _, ttft_s = seconds_of(traffic.ttft_ms, slo) if traffic.ttft_ms.count >= LEAST else (None, None)
        _, itl_s = seconds_of(traffic.itl_ms, slo)
        late_ttft, late_itl = _over(ttft_s, slo.ttft_s), _over(itl_s, slo.itl_s)
        memory.late_ttft = memory.late_ttft + 1 if late_ttft is not None else 0
        memory.late_itl = memory.late_itl + 1 if late_itl is not None else 0
        # What has just been changed must show first, and so must those that are starting.
        starting = any(starting for _, starting in memory.counts.values())
        ripe = not starting and at - memory.changed_at > (LATE_TICKS + 1) * traffic.window_s
        decode = [replica for name, pool in self.pools.items() if pool.role is Role.DECODE for replica in replicas[name]]
        ready = [replica for replica in decode if replica.state is ReplicaState.READY]
        full = ready and all((replica.kv_usage or 0.0) >= FULL_KV and replica.waiting for replica in ready)
        return Demand(
            rate=rate,
            mix=memory.usual.mix(slo),
            waiting=traffic.waiting,
            late_ttft=late_ttft if ripe and memory.late_ttft >= LATE_TICKS else None,
            late_itl=late_itl if ripe and memory.late_itl >= LATE_TICKS else None,
            decode_full=bool(full) and not any(replica.state is ReplicaState.STARTING for replica in decode),
        )

    def _idle(self, at: float, traffic: Traffic, replicas: Mapping[str, Sequence[Replica]]) -> float:
        """For how long nobody has asked for anything, and nothing is under way; 0 while there is something."""
        memory = self.memory
        busy = traffic.arrived or traffic.waiting or any(replica.in_flight for found in replicas.values() for replica in found)
        memory.idle_since = None if busy else at if memory.idle_since is None else memory.idle_since
        return 0.0 if memory.idle_since is None else at - memory.idle_since + traffic.window_s

    # what is to come

    def _count(self, at: float, traffic: Traffic) -> None:
        """Fill the bin; a whole one is told to the forecaster."""
        memory = self.memory
        memory.bin_from = at - traffic.window_s if memory.bin_from is None else memory.bin_from
        memory.bin_arrived += traffic.arrived
        length = at - memory.bin_from
        if length >= self.rules.bin_s - TOLERANCE:
            memory.arrivals.observe(at - length / 2, memory.bin_arrived / length)
            memory.bin_from, memory.bin_arrived = at, 0

    def _look_ahead(self, at: float) -> None:
        """What each pool must have when replicas that are started now are ready, and until the next look."""
        memory, rules = self.memory, self.rules
        if memory.planned_at is not None and at - memory.planned_at < rules.throughput_interval_s - TOLERANCE:
            return
        if not all(capacity.known for capacity in memory.capacities.values()):
            return
        memory.planned_at = at
        mix = memory.usual.mix(rules.slo)
        for name, pool in self.pools.items():
            capacity = memory.capacities[name]
            until = pool.startup_s + rules.throughput_interval_s
            steps = max(1, math.ceil(until / rules.bin_s))
            expected = max(memory.arrivals.predict(at + rules.bin_s * step) for step in range(steps + 1))
            one = capacity.rate(mix, rules.slo) * rules.fill
            if one <= 0:
                memory.floors.pop(name, None)
                continue
            nobody = expected * until < 0.5  # not even one request is to be expected
            floor = 0 if nobody else math.ceil(expected / one - TOLERANCE)
            keep = 0 if nobody else math.ceil(expected / one / rules.down_load - TOLERANCE)
            reason = f"{expected:.3g} requests/s expected within {until:.0f} s, {one:.3g}/s planned for a replica"
            memory.floors[name] = Floor(floor, keep, reason, expected)

    # what follows

    def _want(self, name: str, replicas: Sequence[Replica], demand: Demand, *, idle_s: float) -> Want:
        pool, rules = self.pools[name], self.rules
        counted = [replica for replica in replicas if replica.state in COUNTED]
        floor = self.memory.floors.get(name)
        if Loop.LOAD in rules.loops:
            if rules.target is Target.SLA:
                want = by_sla(pool, counted, demand, self.memory.capacities[name], rules)
            else:
                want = by_thresholds(pool, counted, demand, rules)
            if floor is not None and floor.replicas > want.need:
                reasons = (*want.reasons, floor.reason)
                want = msgspec.structs.replace(want, need=floor.replicas, keep=max(want.keep, floor.replicas), reasons=reasons)
        elif floor is not None:
            want = Want(floor.replicas, floor.keep, (floor.reason,), {"rate": demand.rate, "expected": floor.rate})
        else:
            want = Want(0, len(counted), ("what a replica carries is not known yet",), {"rate": demand.rate})
        if idle_s < rules.zero_after_s and (idle_s == 0 or len(counted) > 0):
            # Somebody asks, or did a moment ago: one at least is there.
            want = msgspec.structs.replace(want, need=max(want.need, int(idle_s == 0)), keep=max(want.keep, 1))
        return want

    def _decide(
        self, at: float, replicas: Mapping[str, Sequence[Replica]], current: Mapping[str, int], wants: Mapping[str, Want]
    ) -> Decision:
        rules, memory = self.rules, self.memory
        targets, reasons = dict[str, int](), dict[str, list[str]]()
        for name, want in wants.items():
            keeps = [(when, keep) for when, keep in memory.keeps.get(name, []) if at - when < rules.stabilise_s]
            keeps.append((at, want.keep))
            memory.keeps[name] = keeps
            busiest = max(keep for _, keep in keeps)
            watched = memory.watching_since is not None and at - memory.watching_since >= rules.stabilise_s - TOLERANCE
            wanted, told = current[name], list(want.reasons)
            if want.need > current[name]:
                wanted = want.need
            elif busiest < current[name] and watched:
                wanted = max(busiest, want.need)
                told.append(f"{wanted} carry what {rules.stabilise_s:g} s have asked for")
            found = bounded(self.pools[name], current[name], wanted, rules.max_step)
            targets[name], reasons[name] = found.target, [*told, *([found.reason] if found.reason else [])]
        given = within_budget(self.pools, current, targets, rules.gpu_budget)
        for name, target in given.items():
            if target != targets[name]:
                reasons[name].append(f"{targets[name]} wanted, {target} fit into {rules.gpu_budget} GPUs")
        return Decision(
            at,
            tuple(
                self._of_pool(name, replicas[name], current[name], target, tuple(reasons[name]), wants[name].inputs)
                for name, target in given.items()
            ),
        )

    def _hold(self, at: float, replicas: Mapping[str, Sequence[Replica]], current: Mapping[str, int], why: str) -> Decision:
        """As it is, though not below a minimum."""
        return Decision(
            at,
            tuple(
                self._of_pool(name, replicas[name], current[name], max(current[name], pool.min), (why,), {})
                for name, pool in self.pools.items()
            ),
            held=why,
        )

    def _of_pool(
        self,
        name: str,
        replicas: Sequence[Replica],
        current: int,
        target: int,
        reasons: tuple[str, ...],
        inputs: Mapping[str, float],
    ) -> PoolDecision:
        gone = victims(replicas, current - target)
        lost = [replica.id for replica in replicas if replica.state is ReplicaState.LOST]
        if lost:
            reasons = (*reasons, f"{len(lost)} lost: not ready within {self.pools[name].startup_deadline_s:g} s, or failed")
        return PoolDecision(name, self.pools[name].role, current, target, gone, reasons, inputs)


def _judged(pool: Pool, replicas: Sequence[Replica], at: float) -> tuple[Replica, ...]:
    """One that has been starting for too long is lost."""
    return tuple(
        msgspec.structs.replace(replica, state=ReplicaState.LOST)
        if replica.state is ReplicaState.STARTING and at - replica.since >= pool.startup_deadline_s
        else replica
        for replica in replicas
    )


def _number(replicas: Sequence[Replica], state: ReplicaState) -> int:
    return sum(replica.state is state for replica in replicas)


def _over(seen: float | None, target: float | None) -> float | None:
    return seen / target if seen is not None and target is not None and seen > target else None
