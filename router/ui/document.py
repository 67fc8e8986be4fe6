"""What is on the page? One JSON document, made of what each process told: pure, so that `commutator top` and tests see the same.

    {"troubles": […], "engines": […], "latency": {"ttft": …, "itl": …}, "decisions": […], "index": …, "disagg": …, "plans": […]}

Times are ages in seconds, never points in time: whoever reads it has a clock of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from router.processes import merging
from router.ui.parts import Part
from router.ui.recent import MAX_CANDIDATES, MAX_DECISIONS, SLOT_S, SLOTS, Slot, Tally, added, quantile
from router.ui.troubles import troubles

QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
SLOTS_OF_LATE: Final = 6
"""What is said of the present is of the last minute."""


def document(parts: Mapping[int, Part | None], version: str) -> dict[str, Any]:
    """The page's content; None: the process did not answer in time. Runtime complexity: O(processes × (engines + slots))."""
    told = {index: part for index, part in parts.items() if part is not None}
    silent = [index for index, part in parts.items() if part is None]
    now = max((part.now for part in told.values()), default=0.0)
    last = int(now // SLOT_S)
    slots = [slot for slot in added(slot for part in told.values() for slot in part.slots) if last - SLOTS < slot.number <= last]
    first = next(iter(told.values()), None)
    state: dict[str, Any] = {
        "version": version,
        "policy": first.policy if first is not None else "",
        "processes": {"up": len(told), "silent": silent},
        "peers": max((part.peers for part in told.values()), default=0),
        "bus_away": next((part.bus for part in told.values() if part.bus), ""),
        "in_progress": sum(part.in_progress for part in told.values()),
        "connections": sum(part.connections for part in told.values()),
        "waiting": _sum(part.waiting for part in told.values()),
        "models": merged_models([part.models for part in told.values()]),
        "index": {
            "blocks": max((part.index.blocks for part in told.values()), default=0),
            "bytes": sum(part.index.bytes for part in told.values()),
            "refused": sum(part.index.refused for part in told.values()),
        },
        "engines": _engines(told, slots),
        "late": _late(slots, last),
        "latency": _latency(slots, last),
        "decisions": _decisions(told, now),
        "disagg": _disagg(told, slots),
        "plans": _plans(told, now),
    }
    return {"troubles": troubles(state), **state}


def merged_models(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """A model has as many engines as in the process that knows fewest.

    >>> merged_models([{"m": 2}, {"m": 1, "n": 1}])
    {'m': 1, 'n': 0}
    """
    names = sorted({model for models in parts for model in models})
    return {model: min(models.get(model, 0) for models in parts) for model in names}


def _engines(told: Mapping[int, Part], slots: Sequence[Slot]) -> list[dict[str, Any]]:
    """Every engine as all processes see it, with what went there of late."""
    ids = dict.fromkeys(engine["id"] for part in told.values() for engine in part.engines)
    by_id = {index: {engine["id"]: engine for engine in part.engines} for index, part in told.items()}
    tallies: dict[str, Tally] = {}
    for slot in slots:
        for endpoint, tally in slot.endpoints.items():
            tallies.setdefault(endpoint, Tally()).add(tally)
    engines = []
    for id_ in ids:
        engine = merging.engine({index: engines_[id_] for index, engines_ in by_id.items() if id_ in engines_})
        engine["endpoints"] = [endpoint | _hits(tallies.get(f"{id_}#{endpoint['rank']}")) for endpoint in engine.get("endpoints", [])]
        engines.append(engine)
    return engines


def _hits(tally: Tally | None) -> dict[str, Any]:
    tally = tally or Tally()
    return {
        "recent_requests": tally.requests,
        "recent_prompt_tokens": tally.prompt_tokens,
        "expected_hit_rate": tally.overlap_tokens / tally.prompt_tokens if tally.prompt_tokens else None,
        "hit_rate": tally.cached_tokens / tally.told_tokens if tally.told_tokens else None,
    }


def _late(slots: Sequence[Slot], last: int) -> dict[str, Any]:
    """The last minute in numbers."""
    late = [slot for slot in slots if slot.number > last - SLOTS_OF_LATE]
    tally = Tally()
    for slot in late:
        for one in slot.endpoints.values():
            tally.add(one)
    seconds = SLOTS_OF_LATE * SLOT_S
    ended = sum(slot.ended for slot in late)
    return {
        "seconds": seconds,
        "requests": ended,
        "requests_per_s": ended / seconds,
        "failed": sum(slot.failed for slot in late),
        "shed": sum(slot.shed for slot in late),
        "left": sum(slot.left for slot in late),
        "prompt_tokens": tally.prompt_tokens,
        "output_tokens_per_s": sum(slot.output_tokens for slot in late) / seconds,
        "expected_hit_rate": tally.overlap_tokens / tally.prompt_tokens if tally.prompt_tokens else None,
        "hit_rate": tally.cached_tokens / tally.told_tokens if tally.told_tokens else None,
        "reasons": _sum(slot.reasons for slot in late),
        "ttft": _quantiles(_sum(slot.ttft for slot in late)),
        "itl": _quantiles(_sum(slot.itl for slot in late)),
    }


def _latency(slots: Sequence[Slot], last: int) -> dict[str, Any]:
    """Ten minutes of it, slot by slot, the oldest first; None where nothing ended."""
    by_number = {slot.number: slot for slot in slots}
    series = [by_number.get(number) for number in range(last - SLOTS + 1, last + 1)]
    told: dict[str, Any] = {"slot_s": SLOT_S, "requests": [slot.ended if slot is not None else 0 for slot in series]}
    for name in ("ttft", "itl"):
        found = [_quantiles(getattr(slot, name)) if slot is not None else _quantiles({}) for slot in series]
        told[name] = {which: [one[which] for one in found] for which in QUANTILES}
    return told


def _quantiles(bins: dict[int, int]) -> dict[str, float | None]:
    return {name: quantile(bins, part) for name, part in QUANTILES.items()}


def _decisions(told: Mapping[int, Part], now: float) -> list[dict[str, Any]]:
    """The latest of all processes, as many as one process keeps."""
    several = len(told) > 1
    found = [
        {"id": f"{index}.{one['at']:.6f}", "age_s": max(0.0, now - one["at"]), **({"process": index} if several else {}), **one}
        for index, part in told.items()
        for one in part.decisions
    ]
    found.sort(key=lambda one: one["age_s"])
    sizes = itertools.accumulate(len(one["candidates"]) + len(one["rejected"]) for one in found[:MAX_DECISIONS])
    kept = [one for place, (one, size) in enumerate(zip(found, sizes, strict=False)) if not place or size <= MAX_CANDIDATES]
    for one in kept:
        del one["at"]
    return kept


def _disagg(told: Mapping[int, Part], slots: Sequence[Slot]) -> dict[str, Any] | None:
    """How prompts of decode engines were computed; None where no engine has a role."""
    mode = next((part.disagg for part in told.values() if part.disagg), "")
    if not mode:
        return None
    links: dict[tuple[str, str], dict[str, Any]] = {}
    for part in told.values():
        for link in part.links:  # each process measures its own transfers: the fastest that was seen, and slow only if all say so
            one = links.setdefault(
                (link.prefill, link.decode), {"prefill": link.prefill, "decode": link.decode, "bytes_per_s": 0.0, "slow": link.slow}
            )
            one["bytes_per_s"] = max(one["bytes_per_s"], link.bytes_per_s)
            one["slow"] = one["slow"] and link.slow
    return {
        "mode": mode,
        "recent": _sum(slot.splits for slot in slots),
        "transfers": _sum(part.transfers for part in told.values()),
        "links": list(links.values()),
    }


def _plans(told: Mapping[int, Part], now: float) -> list[dict[str, Any]]:
    """The latest of each planner: every process hears the same ones."""
    latest: dict[str, dict[str, Any]] = {}
    for part in told.values():
        for plan in part.plans:
            if plan["planner"] not in latest or latest[plan["planner"]]["at"] < plan["at"]:
                latest[plan["planner"]] = plan
    return [{"age_s": max(0.0, now - plan["at"])} | {key: value for key, value in plan.items() if key != "at"} for plan in latest.values()]


def _sum(counts: Any) -> dict[Any, int]:  # noqa: ANN401  dicts of counts, by name or by bin
    total: dict[Any, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total
