"""By what rules is a fleet planned? What the settings say, as the policy reads it."""

from __future__ import annotations

import msgspec

from planner.types import Loop, Slo, Target


class Thresholds(msgspec.Struct, frozen=True):
    """When a replica has too much, and when too little: a pool grows when one has too much, and shrinks when all have too little."""

    prefill_up: float
    """Prompt tokens waiting to be computed, as a share of the longest request's."""
    prefill_down: float
    decode_up: float
    """KV cache in use, that of waiting requests included; beyond 1 there are some that do not fit."""
    decode_down: float


THRESHOLDS = {
    Target.THROUGHPUT: Thresholds(1.0, 0.1, 1.0, 0.6),
    Target.LATENCY: Thresholds(0.1, 0.0, 0.4, 0.1),
}
"""Dynamo's, of its targets of these names."""


class Rules(msgspec.Struct, frozen=True):
    """How plans are made."""

    target: Target = Target.SLA
    loops: frozenset[Loop] = frozenset({Loop.THROUGHPUT, Loop.LOAD})
    slo: Slo = Slo()
    thresholds: Thresholds | None = None
    """Of the target `load`."""
    throughput_interval_s: float = 180.0
    bin_s: float = 60.0
    """What the predictive loop counts arrivals by."""
    fill: float = 0.85
    """How much of what a replica carries within its targets is planned for: the rest is for what comes by chance."""
    down_load: float = 0.8
    """How much of that survivors may have after a step down."""
    stabilise_s: float = 60.0
    """A pool shrinks to what was needed at the busiest moment of so long."""
    drain_queue_s: float = 60.0
    """Within how long requests that wait are to be worked off, beside those that come."""
    max_step: int = 8
    """Replicas added or taken away in one step."""
    gpu_budget: int | None = None
    """Of all pools together."""
    zero_after_s: float = 300.0
    """How long nobody must have asked before a pool whose minimum is 0 is emptied."""

    @property
    def levels(self) -> Thresholds:
        """The thresholds in force; without meaning for the target `sla`."""
        return self.thresholds or THRESHOLDS.get(self.target, THRESHOLDS[Target.THROUGHPUT])
