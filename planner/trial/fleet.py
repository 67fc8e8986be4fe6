"""How does a fleet do whose size somebody decides? Requests in virtual time, through pools of replicas that start, serve and drain.

Every few seconds the one who decides (a `Scaler`: the planner's policy, or a rule to hold it against) is shown what a planner is shown,
and says how many replicas each pool is to have. Nothing here looks at a clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from discovery.observations import Histogram
from engines.types import Role
from planner.limits import victims
from planner.trial.replica import Engine, Request, Speed
from planner.types import Observation, Pool, Replica, ReplicaState, Slo, Traffic

MS = 1e3


class Scaler(Protocol):
    """Decides how many replicas there are to be."""

    def tick(self, seen: Observation) -> Mapping[str, int]:
        """By pool."""
        ...


class Setting(msgspec.Struct, frozen=True):
    """What a trial is of."""

    pools: tuple[Pool, ...]
    speed: Speed
    slo: Slo
    begin: Mapping[str, int]
    """Replicas at the start, ready."""
    tick_s: float = 5.0
    transfer_s: float = 0.02
    """Of a prompt's KV, from prefill to decode."""
    max_active: int = 1 << 30
    """Requests of a replica; further ones wait in the router (`admission.max_active_requests`)."""
    blind: tuple[tuple[float, float], ...] = ()
    """Times without a metrics source, from and to."""
    never_ready: frozenset[str] = frozenset()
    """Replicas, by id, that start and never are."""


class Point(msgspec.Struct, frozen=True):
    """One tick."""

    at: float
    replicas: Mapping[str, int]
    """By pool: ready and starting."""
    ready: Mapping[str, int]
    target: Mapping[str, int]
    rate: float
    attained: float | None
    """Share of the requests that got their first token since the last tick which got it in time."""


class Outcome(msgspec.Struct, frozen=True):
    """How it went."""

    requests: int
    attained: int
    """Within both targets."""
    aborted: int
    gpu_s: float
    points: tuple[Point, ...]

    @property
    def attainment(self) -> float:
        """Share of requests within both targets."""
        return self.attained / self.requests if self.requests else 1.0

    @property
    def gpu_hours(self) -> float:
        """Of all replicas that were there: starting, ready or draining."""
        return self.gpu_s / 3600

    def changes(self, pool: str) -> list[int]:
        """Each step of its target, in order."""
        targets = [point.target[pool] for point in self.points]
        return [after - before for before, after in itertools.pairwise(targets) if after != before]


class _Replica:
    def __init__(self, name: str, pool: Pool, engine: Engine, state: ReplicaState, since: float) -> None:
        self.name, self.pool, self.engine, self.state, self.since = name, pool, engine, state, since
        self.ready_at: float | None = None


class _Seen:
    """What has been seen since the last tick."""

    def __init__(self) -> None:
        self.arrived = 0
        self.isl, self.osl, self.ttft_ms, self.itl_ms, self.wait_ms = (Histogram() for _ in range(5))
        self.first_tokens = self.in_time = 0


class Trial:
    """One run: `run` once."""

    def __init__(self, setting: Setting, scaler: Scaler) -> None:
        self._setting = setting
        self._scaler = scaler
        self._pools = {pool.name: pool for pool in setting.pools}
        self._first = next(pool.name for pool in setting.pools if pool.role is not Role.DECODE)
        self._decode = next((pool.name for pool in setting.pools if pool.role is Role.DECODE), None)
        self._replicas: dict[str, list[_Replica]] = {name: [] for name in self._pools}
        self._queues: dict[str, deque[Request]] = {name: deque() for name in self._pools}
        self._events: list[tuple[float, int, object]] = []
        self._number = itertools.count()
        self._names = itertools.count()
        self._seen = _Seen()
        self._requests: list[Request] = []
        self._points: list[Point] = []
        self._gpu_s = 0.0
        self._now = 0.0
        for name, count in setting.begin.items():
            for _ in range(count):
                self._start(name, ready=True)

    def run(self, requests: Iterable[Request], until: float) -> Outcome:
        """Play the requests (in the order of their times), with ticks until `until`; streams are then let end."""
        arrivals = iter(requests)
        arrival = next(arrivals, None)
        tick_at = self._setting.tick_s
        while True:
            at = min(
                self._events[0][0] if self._events else float("inf"),
                arrival.at if arrival is not None else float("inf"),
                tick_at if tick_at <= until else float("inf"),
            )
            if at == float("inf"):
                break
            self._pass_time(at)
            if arrival is not None and arrival.at == at:
                self._arrive(arrival)
                arrival = next(arrivals, None)
            elif tick_at == at and tick_at <= until:
                self._tick()
                tick_at += self._setting.tick_s
            else:
                self._happen()
        slo = self._setting.slo
        attained = sum(_within(request, slo) for request in self._requests)
        aborted = sum(request.ended_at is None for request in self._requests)
        return Outcome(len(self._requests), attained, aborted, self._gpu_s, tuple(self._points))

    # what happens

    def _pass_time(self, at: float) -> None:
        there = sum(len(replicas) * self._pools[name].gpus for name, replicas in self._replicas.items())
        self._gpu_s += there * (at - self._now)
        self._now = at

    def _happen(self) -> None:
        _, _, what = heapq.heappop(self._events)
        match what:
            case (_Replica() as replica, int(version)):
                if version == replica.engine.version:
                    self._after(replica, *replica.engine.happen(self._now))
            case _Replica() as replica if replica.state is ReplicaState.STARTING:
                replica.state, replica.since = ReplicaState.READY, self._now
                self._pump(replica.pool.name)
            case Request() as request if self._decode is not None:
                self._enter(self._decode, request)
            case _:
                pass  # it was ended before it was ready

    def _arrive(self, request: Request) -> None:
        self._requests.append(request)
        self._seen.arrived += 1
        self._seen.isl.add(request.isl)
        self._enter(self._first, request)

    def _enter(self, pool: str, request: Request) -> None:
        self._queues[pool].append(request)
        self._pump(pool)

    def _pump(self, pool: str) -> None:
        """Give those that wait to the least loaded replicas that are ready."""
        ready = [replica for replica in self._replicas[pool] if replica.state is ReplicaState.READY]
        queue = self._queues[pool]
        while queue and ready:
            replica = min(ready, key=lambda replica: replica.engine.in_flight)
            if replica.engine.in_flight >= self._setting.max_active:
                return
            request = queue.popleft()
            if pool == self._first:
                self._seen.wait_ms.add((self._now - request.at) * MS)
            self._after(replica, replica.engine.take(request, self._now), [])

    def _after(self, replica: _Replica, computed: Sequence[Request], ended: Sequence[Request]) -> None:
        """First tokens and ends are seen; a prefilled prompt goes on; the replica's next event is noted."""
        for request in computed:
            if replica.pool.role is Role.PREFILL:
                self._later(self._now + self._setting.transfer_s, request)
                continue
            self._seen.ttft_ms.add(request.ttft_s * MS)
            self._seen.first_tokens += 1
            self._seen.in_time += self._setting.slo.ttft_s is None or request.ttft_s <= self._setting.slo.ttft_s
        for request in ended:
            self._seen.osl.add(request.osl)
            self._seen.itl_ms.add(request.itl_s * MS)
        if replica.state is ReplicaState.DRAINING and not replica.engine.in_flight:
            self._replicas[replica.pool.name].remove(replica)
            return
        if ended and self._queues[replica.pool.name]:
            self._pump(replica.pool.name)
        at = replica.engine.next_at()
        if at < float("inf"):
            self._later(at, (replica, replica.engine.version))

    # what is decided

    def _tick(self) -> None:
        seen = self._observe()
        targets = self._scaler.tick(seen)
        for name, target in targets.items():
            self._scale(name, target)
        counted = {name: [r for r in replicas if r.state is not ReplicaState.DRAINING] for name, replicas in self._replicas.items()}
        window, self._seen = self._seen, _Seen()
        self._points.append(
            Point(
                self._now,
                {name: len(found) for name, found in counted.items()},
                {name: sum(replica.state is ReplicaState.READY for replica in found) for name, found in counted.items()},
                dict(targets),
                window.arrived / self._setting.tick_s,
                window.in_time / window.first_tokens if window.first_tokens else None,
            )
        )

    def _observe(self) -> Observation:
        seen = self._seen
        traffic = Traffic(
            window_s=self._setting.tick_s,
            arrived=seen.arrived,
            isl=seen.isl,
            osl=seen.osl,
            ttft_ms=seen.ttft_ms,
            itl_ms=seen.itl_ms,
            wait_ms=seen.wait_ms,
            hit_rate=0.0,
            waiting=sum(map(len, self._queues.values())),
        )
        blind = any(begin <= self._now < end for begin, end in self._setting.blind)
        replicas = {name: tuple(map(_shown, replicas)) for name, replicas in self._replicas.items()}
        return Observation(self._now, None if blind else traffic, replicas)

    def _scale(self, name: str, target: int) -> None:
        counted = [replica for replica in self._replicas[name] if replica.state is not ReplicaState.DRAINING]
        for _ in range(target - len(counted)):
            self._start(name)
        gone = set(victims(tuple(map(_shown, counted)), len(counted) - target))
        for replica in counted:
            if replica.name in gone:
                self._stop(replica)

    def _start(self, name: str, *, ready: bool = False) -> None:
        pool = self._pools[name]
        state = ReplicaState.READY if ready else ReplicaState.STARTING
        made = _Replica(f"{name}-{next(self._names)}", pool, Engine(pool.role, self._setting.speed, self._now), state, self._now)
        self._replicas[name].append(made)
        if not ready and made.name not in self._setting.never_ready:
            self._later(self._now + pool.startup_s, made)

    def _stop(self, replica: _Replica) -> None:
        if replica.state is ReplicaState.READY and replica.engine.in_flight:
            replica.state, replica.since = ReplicaState.DRAINING, self._now
        else:
            replica.state = ReplicaState.DRAINING
            self._replicas[replica.pool.name].remove(replica)

    def _later(self, at: float, what: object) -> None:
        heapq.heappush(self._events, (at, next(self._number), what))


def _shown(replica: _Replica) -> Replica:
    engine = replica.engine
    return Replica(
        replica.name,
        replica.state,
        replica.since,
        in_flight=engine.in_flight,
        prefill_tokens=engine.prefill_tokens,
        running=engine.streams,
        waiting=len(engine.waiting),
        kv_usage=engine.kv_usage,
        context=32_768,
    )


def _within(request: Request, slo: Slo) -> bool:
    if slo.ttft_s is not None and request.ttft_s > slo.ttft_s:
        return False
    return slo.itl_s is None or request.itl_s <= slo.itl_s
