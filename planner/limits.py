"""What of a plan is allowed, and who is to go? Minimum, maximum, step, and the GPUs that all pools share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from planner.types import Pool, Replica, ReplicaState

COUNTED = (ReplicaState.READY, ReplicaState.STARTING)


class Bounded(msgspec.Struct, frozen=True):
    """A number of replicas, and what it had to give way to."""

    target: int
    reason: str = ""


def bounded(pool: Pool, current: int, wanted: int, max_step: int) -> Bounded:
    """`wanted`, within the pool's own limits. Its minimum and maximum are reached at once, whatever the step."""
    target = min(max(wanted, pool.min), pool.max)
    reason = f"{wanted} wanted, {target} allowed" if target != wanted else ""
    low, high = min(current - max_step, pool.max), max(current + max_step, pool.min)
    if not low <= target <= high:
        reason = f"{target} wanted, {max_step} at a time"
        target = min(max(target, low), high)
    return Bounded(target, reason)


def within_budget(pools: Mapping[str, Pool], current: Mapping[str, int], wanted: Mapping[str, int], budget: int | None) -> dict[str, int]:
    """Fewer, where together they would take more GPUs than there are: first of what is to be added, then of the largest, never below a minimum.

    >>> pools = {"prefill": Pool("prefill", gpus=2), "decode": Pool("decode", gpus=4)}
    >>> within_budget(pools, {"prefill": 1, "decode": 1}, {"prefill": 3, "decode": 2}, budget=10)
    {'prefill': 1, 'decode': 2}
    """
    given = dict(wanted)
    while budget is not None and sum(given[name] * pools[name].gpus for name in given) > budget:
        able = [name for name in given if given[name] > pools[name].min]
        if not able:
            break
        growing = [name for name in able if given[name] > current[name]]
        # The one that has most of what it wants gives way: pools grow in step, since one waits for the other.
        most = max(growing or able, key=lambda name: ((given[name] - current[name]) / max(1, wanted[name] - current[name]), given[name]))
        given[most] -= 1
    return given


def victims(replicas: Sequence[Replica], surplus: int) -> tuple[str, ...]:
    """Who is to go: all that are lost; then, of the others, `surplus`: those that are still starting, then the least loaded."""
    lost = [replica.id for replica in replicas if replica.state is ReplicaState.LOST]
    others = sorted((replica for replica in replicas if replica.state in COUNTED), key=_order)
    return (*lost, *(replica.id for replica in others[: max(0, surplus)]))


def _order(replica: Replica) -> tuple[bool, float, float]:
    starting = replica.state is ReplicaState.STARTING
    load = replica.in_flight + (replica.waiting or 0)
    return not starting, load if not starting else -replica.since, replica.kv_usage or 0.0
