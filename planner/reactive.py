"""How many replicas does what is now need? The load loop: by thresholds, or by what one replica carries within its targets.

    need ─ so many must be there                    current < need: grow
    keep ─ so many may not be gone below            current > keep, for a while: shrink to it

What clients wait for counts, not only what engines work on: requests in a queue are work that is due within seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from engines.types import Role
from planner.capacity import Capacity
from planner.rules import Rules
from planner.types import Mix, Pool, Replica, ReplicaState

ASSUMED_CONTEXT: Final = 131_072
FULL_KV: Final = 0.9
TOLERANCE: Final = 1e-6
"""Rounding of what is computed must not cost a replica."""


class Want(msgspec.Struct, frozen=True):
    """What a pool should be, before limits."""

    need: int
    keep: int
    reasons: tuple[str, ...] = ()
    inputs: dict[str, float] = {}


class Demand(msgspec.Struct, frozen=True):
    """What is asked of the whole fleet now."""

    rate: float
    """Requests a second."""
    mix: Mix
    waiting: int
    """In routers' queues."""
    late_ttft: float | None = None
    """By how much the percentile of TTFT is over its target; None where it is not, or nobody knows."""
    late_itl: float | None = None
    decode_full: bool = False
    """Decode engines' KV caches are full: what waits there waits for room, whoever computed the prompt."""


def by_thresholds(pool: Pool, replicas: Sequence[Replica], demand: Demand, rules: Rules) -> Want:
    """For the targets throughput, latency and load."""
    levels, current = rules.levels, len(replicas)
    ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
    if not ready:
        return Want(current, current, ("no replica is ready yet",) if current else ())
    needs, keeps, reasons, inputs = [0], [0], list[str](), dict[str, float]()
    if pool.role is not Role.DECODE:
        queued = demand.waiting * demand.mix.isl / len(ready)  # in routers' queues, on everybody's account
        shares = [(replica.prefill_tokens + queued) / (replica.context or ASSUMED_CONTEXT) for replica in ready]
        _compare(
            "prompt tokens queued, of the longest request's", shares, (levels.prefill_up, levels.prefill_down), rules, needs, keeps, reasons
        )
        inputs["prefill_load"] = max(shares)
    if pool.role is not Role.PREFILL:
        told = [_kv(replica) for replica in ready if replica.kv_usage is not None]
        if told:
            _compare("KV cache in use or waited for", told, (levels.decode_up, levels.decode_down), rules, needs, keeps, reasons)
            inputs["kv_load"] = max(told)
        else:
            keeps.append(current)
            reasons.append("no engine tells its KV usage: not shrunk")
    # Those that are starting take their part as soon as they are there.
    starting = current - len(ready)
    need = max(needs)
    return Want(need, max(need, starting, *keeps), tuple(reasons), inputs)


def by_sla(pool: Pool, replicas: Sequence[Replica], demand: Demand, capacity: Capacity, rules: Rules) -> Want:
    """For the target sla."""
    current = len(replicas)
    carried = sum(replica.in_flight for replica in replicas)
    queued = demand.waiting + sum(replica.waiting or 0 for replica in replicas)
    if not capacity.known:
        return _by_what_is_seen(pool, replicas, demand, queued)
    one = capacity.rate(demand.mix, rules.slo) * rules.fill
    inputs = {"rate": demand.rate, "queued": float(queued), "in_flight": float(carried), "capacity": one}
    if one <= 0:
        return Want(current, current, ("even an idle replica is slower than the targets: more of them are no help",), inputs)
    due = demand.rate + queued / rules.drain_queue_s
    load = due / one
    streams = capacity.streams(demand.mix, rules.slo)
    survivors = max(load, carried / (streams * rules.fill) if streams else 0.0)
    if demand.mix.osl is None and pool.role is not Role.PREFILL:
        load = survivors
    inputs["load"] = load
    need = math.ceil(load - TOLERANCE)
    keep = max(need, math.ceil(survivors / rules.down_load - TOLERANCE))
    why = f"{demand.rate:.3g} requests/s" + (f" and {queued} waiting" if queued else "") + f", {one:.3g}/s planned for a replica"
    return _unless_late(pool, Want(need, keep, (why,), inputs), current, demand, math.ceil(survivors - TOLERANCE))


def _unless_late(pool: Pool, want: Want, current: int, demand: Demand, carrying: int = 0) -> Want:
    """Clients see more than the targets though those that come could be carried: one more, where it helps, or as many as carry what is there.

    `carrying`: replicas for the requests in flight. Clients that wait for their answers before they ask again come more rarely the slower
    they are served.
    """
    late = demand.late_itl if pool.role is Role.DECODE else demand.late_ttft
    if pool.role is Role.AGGREGATED:
        late = max((by for by in (demand.late_ttft, demand.late_itl) if by is not None), default=None)
    if pool.role is Role.PREFILL and demand.late_ttft is not None and demand.decode_full:
        reason = "time to first token is over its target because decode engines' KV caches are full: more prefill would not help"
        return Want(want.need, want.keep, (*want.reasons, reason), want.inputs)
    if pool.role is Role.DECODE and demand.decode_full:
        reason = "KV caches are full, and requests wait for room in them"
        return Want(max(want.need, current + 1), max(want.keep, current + 1), (*want.reasons, reason), want.inputs)
    if late is None or want.need > current:
        return want
    reason = f"clients see {late:.0%} of the target, and nothing that is starting will change that"
    need = max(want.need, current + 1, carrying)
    return Want(need, max(want.keep, need), (*want.reasons, reason), want.inputs)


def _by_what_is_seen(pool: Pool, replicas: Sequence[Replica], demand: Demand, queued: int) -> Want:
    """Nothing is known yet of what a replica carries."""
    current = len(replicas)
    if demand.rate <= 0 and not queued and not any(replica.in_flight for replica in replicas):
        return Want(0, 0, ("nobody asks",), {"rate": 0.0})
    want = Want(
        min(1, max(pool.max, 0)), current, ("what a replica carries is not known yet",), {"rate": demand.rate, "queued": float(queued)}
    )
    if queued > current:
        return Want(current + 1, current + 1, (*want.reasons, f"{queued} requests wait"), want.inputs)
    return _unless_late(pool, want, current, demand)


def _compare(  # noqa: PLR0913, PLR0917  two sums and what they are added to
    what: str,
    loads: Sequence[float],
    levels: tuple[float, float],
    rules: Rules,
    needs: list[int],
    keeps: list[int],
    reasons: list[str],
) -> None:
    """One signal against its thresholds: what it needs and what it lets go."""
    up, down = levels
    whole, count = sum(loads), len(loads)
    if max(loads) >= up:
        needs.append(max(count + 1, math.ceil(whole / up - TOLERANCE)))
        reasons.append(f"{what}: {max(loads):.3g}, at or over {up:g}")
    elif max(loads) <= down:
        keeps.append(math.ceil(whole / (up * rules.down_load) - TOLERANCE))
        reasons.append(f"{what}: {max(loads):.3g}, at or under {down:g}")
    else:
        needs.append(count)
        reasons.append(f"{what}: {max(loads):.3g}, between {down:g} and {up:g}")


def _kv(replica: Replica) -> float:
    """KV cache in use, with that of requests that wait for it: they are taken to be like those that run."""
    used = replica.kv_usage or 0.0
    if not replica.waiting:
        return used
    return used * (1 + replica.waiting / replica.running) if replica.running else max(1.0, used)
