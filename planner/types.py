"""What does a planner speak of? The nouns of all its modules.

    Observation ──▶ forecast, capacity ──▶ Decision ──▶ actuator
      what clients asked and saw             how many replicas each
      what each replica carries              pool is to have, and why

`None` is never zero: no traffic is an observation, and no data is none.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from discovery.observations import Histogram
from engines.types import Role


class Target(enum.StrEnum):
    """What a plan is held against."""

    THROUGHPUT = "throughput"
    """Few engines, full ones: a queue of one longest prompt, and all of the KV cache."""
    LATENCY = "latency"
    """No queue to speak of, and KV caches that are mostly empty."""
    LOAD = "load"
    """Thresholds of the user's own."""
    SLA = "sla"
    """Times to first token and between tokens, at a percentile."""


class Loop(enum.StrEnum):
    """When a plan is made, and of what."""

    THROUGHPUT = "throughput"
    """Predictive: of what is expected to come, every few minutes."""
    LOAD = "load"
    """Reactive: of what is, every few seconds."""


class Slo(msgspec.Struct, frozen=True):
    """What clients are to see. None: it does not matter."""

    ttft_s: float | None = None
    itl_s: float | None = None
    percentile: float = 0.95
    """The share of requests (0..1) that are to be within both."""


class Pool(msgspec.Struct, frozen=True):
    """Replicas that are alike, and counted together."""

    name: str
    role: Role = Role.AGGREGATED
    min: int = 1
    """0: the pool may be emptied when nobody asks, and the next request waits for a start."""
    max: int = 8
    gpus: int = 1
    """Of one replica."""
    startup_s: float = 60.0
    """How long a replica takes to be ready: so far is looked ahead."""
    startup_deadline_s: float = 600.0
    """How long it may take before it counts as lost."""


class ReplicaState(enum.StrEnum):
    """How far a replica has come."""

    STARTING = "starting"
    """It counts as capacity: the load that it was started for is not there twice."""
    READY = "ready"
    DRAINING = "draining"
    """It takes nothing new, and does not count."""
    LOST = "lost"
    """It never became ready, or has failed, and does not count."""


class Replica(msgspec.Struct, frozen=True):
    """One engine of a pool, and what it carries."""

    id: str
    state: ReplicaState
    since: float
    """Since when it has been in that state; seconds since the epoch."""
    in_flight: int = 0
    """Requests of all routers."""
    prefill_tokens: int = 0
    """Prompt tokens of theirs that are still to be computed."""
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    context: int | None = None


class Traffic(msgspec.Struct, frozen=True):
    """What clients asked for and saw, of all routers, within a window of time."""

    window_s: float
    arrived: int
    isl: Histogram
    osl: Histogram
    ttft_ms: Histogram
    itl_ms: Histogram
    wait_ms: Histogram
    shed: int = 0
    hit_rate: float | None = None
    """Share of prompt tokens found in caches; None where no prompt was read."""
    waiting: int = 0
    """Requests in routers' queues now."""

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.arrived / self.window_s


class Observation(msgspec.Struct, frozen=True):
    """What is, at one moment."""

    at: float
    """Seconds since the epoch."""
    traffic: Traffic | None
    """None: nobody told."""
    replicas: Mapping[str, tuple[Replica, ...]]
    """By pool."""


class Mix(msgspec.Struct, frozen=True):
    """What the requests of a time are like."""

    isl: float
    """Prompt tokens that must be computed, on average: cached ones are not among them."""
    isl_square: float
    """The mean of their squares: a few long prompts make everybody wait."""
    isl_at: float
    """The same at the percentile that counts."""
    osl: float | None
    """None: engines' answers do not tell."""
    at: float = 0.95
    """The percentile that counts, as a share."""


class PoolDecision(msgspec.Struct, frozen=True):
    """What one pool is to be, and why."""

    pool: str
    role: Role
    current: int
    """Replicas that are ready or starting."""
    target: int
    victims: tuple[str, ...] = ()
    """Who is to go, the least loaded first; lost ones among them."""
    reasons: tuple[str, ...] = ()
    inputs: Mapping[str, float] = {}
    """The numbers that led there."""


class Decision(msgspec.Struct, frozen=True):
    """One tick's outcome."""

    at: float
    pools: tuple[PoolDecision, ...]
    held: str = ""
    """Why nothing was decided; empty when something was, if only to stay."""
    number: int = 0
    """Of the plan, as it is told: it grows with each one that differs from the one before. 0 until it is told."""

    def of(self, pool: str) -> PoolDecision:
        """One pool's."""
        return next(decided for decided in self.pools if decided.pool == pool)

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return any(decided.target != decided.current or decided.victims for decided in self.pools)
