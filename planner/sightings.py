"""What have routers told of late? Their reports, made into what happened since the last look.

    hear(report) … hear(report) … look(now) ──▶ traffic since the look before, and what each engine carries

A router that falls silent is no longer counted on; when none is left there is no traffic to speak of, and that is not the same as none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from discovery.observations import EngineReport, RouterReport, TrafficReport, since, summed
from planner.types import Pool, Replica, ReplicaState, Traffic

SILENT_S: Final = 10.0
FRESH_S: Final = 60.0
"""All that a router has counted is of now, if it began so shortly ago."""
GONE: Final = frozenset({"ejected", "waiting"})


class _Router(msgspec.Struct):
    report: RouterReport
    heard_at: float
    told: RouterReport | None = None
    """What it had told at the last look."""


class Look(msgspec.Struct, frozen=True):
    """What there is to see."""

    traffic: Traffic | None
    engines: dict[str, EngineReport]
    """Each engine, with what all routers have there."""
    nothing_new: bool = False
    """Routers are there, and none has told anything since the last look: there is nothing to decide by yet."""


class Sightings:
    """Reports of all routers of a fleet, for one model or all."""

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self._routers: dict[str, _Router] = {}

    def hear(self, report: RouterReport, now: float) -> None:
        """A report has come."""
        known = self._routers.get(report.router)
        if known is None:
            self._routers[report.router] = _Router(report, now)
        elif report.up_s >= known.report.up_s:
            known.report, known.heard_at = report, now

    def look(self, now: float) -> Look:
        """What has happened since the last look, and what is."""
        for name in [name for name, router in self._routers.items() if now - router.heard_at > SILENT_S]:
            del self._routers[name]
        nothing_new = bool(self._routers) and all(router.told is router.report for router in self._routers.values())
        return Look(self._traffic(), self._engines(), nothing_new)

    @property
    def routers(self) -> int:
        """How many are heard."""
        return len(self._routers)

    def _traffic(self) -> Traffic | None:
        parts, windows = [], []
        for router in self._routers.values():
            before, router.told = router.told, router.report
            if before is None and router.report.up_s > FRESH_S:
                continue  # what it has counted in hours is nothing of now: the next look has a difference
            window_s = router.report.up_s - (0.0 if before is None else before.up_s)
            if window_s > 0:
                windows.append(window_s)
                parts.append(self._since(router.report, before))
        return traffic_of(windows, parts)

    def _since(self, report: RouterReport, before: RouterReport | None) -> TrafficReport:
        earlier = {} if before is None else {traffic.model: traffic for traffic in before.traffic}
        nothing = TrafficReport("")
        return summed([since(traffic, earlier.get(traffic.model, nothing)) for traffic in self._of_model(report.traffic)])

    def _of_model(self, found: Iterable[TrafficReport]) -> Iterator[TrafficReport]:
        return (traffic for traffic in found if self._model in (None, traffic.model))

    def _engines(self) -> dict[str, EngineReport]:
        told = (engine for router in self._routers.values() for engine in router.report.engines)
        return together(engine for engine in told if self._model is None or self._model in engine.models)


def traffic_of(windows: Sequence[float], parts: Sequence[TrafficReport]) -> Traffic | None:
    """What several routers have seen, each within its window of so many seconds; None where none of them tells."""
    if not windows:
        return None
    whole = summed(parts)
    return Traffic(
        window_s=sum(windows) / len(windows),
        arrived=whole.arrived,
        isl=whole.isl,
        osl=whole.osl,
        ttft_ms=whole.ttft_ms,
        itl_ms=whole.itl_ms,
        wait_ms=whole.wait_ms,
        shed=whole.shed,
        hit_rate=min(1.0, whole.overlap_tokens / whole.prompt_tokens) if whole.prompt_tokens else None,
        waiting=whole.waiting,
    )


def together(told: Iterable[EngineReport]) -> dict[str, EngineReport]:
    """Each engine, with what all routers have there."""
    found: dict[str, EngineReport] = {}
    for engine in told:
        found[engine.engine] = engine if engine.engine not in found else _both(found[engine.engine], engine)
    return found


def replicas_of(
    pools: Iterable[Pool], engines: Iterable[EngineReport], since_: dict[str, tuple[str, float]], now: float
) -> dict[str, tuple[Replica, ...]]:
    """Pools as routers see them, for actuators that know no better. `since_` is kept between calls: each engine's state, and since when."""
    found: dict[str, list[Replica]] = {pool.name: [] for pool in pools}
    by_role = {pool.role: pool.name for pool in pools}
    seen = {}
    for engine in engines:
        if engine.role not in by_role or engine.state in GONE:
            continue
        state = _STATES.get(engine.state, ReplicaState.READY)
        known = since_.get(engine.engine)
        seen[engine.engine] = known if known is not None and known[0] == state.value else (state.value, now)
        found[by_role[engine.role]].append(laden(Replica(engine.engine, state, seen[engine.engine][1]), engine))
    since_.clear()
    since_.update(seen)
    return {name: tuple(replicas) for name, replicas in found.items()}


def laden(replica: Replica, engine: EngineReport | None) -> Replica:
    """A replica with what routers know of its load."""
    if engine is None:
        return replica
    return msgspec.structs.replace(
        replica,
        in_flight=engine.in_flight,
        prefill_tokens=engine.prefill_tokens,
        running=engine.running,
        waiting=engine.waiting,
        kv_usage=engine.kv_usage,
        context=engine.context,
    )


_STATES: Final = {"joining": ReplicaState.STARTING, "draining": ReplicaState.DRAINING}


def _both(one: EngineReport, other: EngineReport) -> EngineReport:
    """Two routers' words on one engine: what each has there adds up; of what it reports itself, the greater is the later."""
    state = other.state if one.state == "joining" or other.state == "draining" else one.state
    return EngineReport(
        engine=one.engine,
        role=one.role,
        state=state,
        models=one.models,
        in_flight=one.in_flight + other.in_flight,
        prefill_tokens=one.prefill_tokens + other.prefill_tokens,
        running=_most(one.running, other.running),
        waiting=_most(one.waiting, other.waiting),
        kv_usage=max((usage for usage in (one.kv_usage, other.kv_usage) if usage is not None), default=None),
        context=_most(one.context, other.context),
    )


def _most(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)
