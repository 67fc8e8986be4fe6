"""What does this process know that people want to see? Looks at the rooms when it is asked; keeps nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from router.answers import candidates_of
from router.roster import UnknownEngine
from router.ui.parts import Index, Link, Part

if TYPE_CHECKING:
    from discovery.bus import Bus
    from discovery.peers import Peers
    from router.caches import Caches
    from router.census import Census
    from router.fleet import Fleet
    from router.gate import Gate
    from router.metrics import Metrics
    from router.pairing import Pairing
    from router.server import Server
    from router.ui.plans import Plans
    from router.ui.recent import Ended, Recent


AT_ONCE: Final = 20
"""Engines that are looked at before others have their turn: a millisecond."""


class View:
    """Reads every room that has something to show."""

    def __init__(  # noqa: PLR0913  it reads every room once
        self,
        *,
        recent: Recent,
        plans: Plans,
        census: Census,
        fleet: Fleet,
        caches: Caches,
        pairing: Pairing,
        metrics: Metrics,
        bus: Bus,
        server: Server,
        gate: Gate,
        peers: Peers | None,
        policy: str,
        clock: Callable[[], float],
    ) -> None:
        self._recent = recent
        self._plans = plans
        self._census = census
        self._fleet = fleet
        self._caches = caches
        self._pairing = pairing
        self._metrics = metrics
        self._bus = bus
        self._server = server
        self._gate = gate
        self._peers = peers
        self._policy = policy
        self._clock = clock

    async def part(self) -> Part:
        """All of it, as it stands now; others have the loop between engines. O(engines + decisions kept)."""
        engines = await self._engines()
        now, pairing, caches = self._clock(), self._pairing, self._caches
        models = {model: self._fleet.takers(model) for model in self._fleet.model_ids} | dict.fromkeys(self._fleet.lost_models(), 0)
        return Part(
            now=now,
            policy=self._policy,
            engines=engines,
            slots=self._recent.slots(now),
            decisions=[msgspec.to_builtins(_told(request)) for request in self._recent.decided()],
            index=Index(caches.indexed, caches.memory_bytes(), caches.refused),
            in_progress=self._server.in_progress,
            connections=len(self._server.connections),
            waiting=dict(self._gate.waiting()),
            models=models,
            bus="" if self._bus.connected else self._bus.servers,
            peers=0 if self._peers is None else len(self._peers),
            links=[
                Link(str(pair[0]), str(pair[1]), rate, str(pairing.slow[pair]) if pair in pairing.slow else "")
                for pair, rate in pairing.throughputs()
            ],
            transfers=self._metrics.transfers,
            disagg=pairing.rules.mode.value if self._fleet.splits else "",
            plans=self._plans.told(now),
        )

    async def _engines(self) -> list[dict[str, Any]]:
        engines = []
        for place, engine_id in enumerate(self._census.ids(), 1):
            with contextlib.suppress(UnknownEngine):  # it has left meanwhile
                engines.append(msgspec.to_builtins(self._census.engine(engine_id)))
            if place % AT_ONCE == 0:
                await asyncio.sleep(0)
        return engines


def _told(request: Ended) -> dict[str, Any]:
    """A request that went somewhere, without a word of what it said."""
    decision, split, prefill = request.decision, request.split, request.prefill
    if decision is None:
        raise AssertionError
    told: dict[str, Any] = {
        "at": request.at,
        "path": request.path,
        "model": request.model,
        "status": request.status,
        "engine": decision.chosen.endpoint.engine,
        "rank": decision.chosen.endpoint.rank,
        "policy": decision.policy,
        "reason": decision.reason,
        "cost": decision.cost,
        "prompt_tokens": request.prompt_tokens,
        "overlap_tokens": request.overlap_tokens,
        "cached_tokens": request.cached_tokens,
        "completion_tokens": request.completion_tokens,
        "ttft_s": request.ttft_s,
        "duration_s": request.duration_s,
        "tries": request.tries,
        "failure": request.failure,
        "candidates": candidates_of(decision),
        "rejected": [{"engine": e.engine, "rank": e.rank, "reason": reason} for e, reason in decision.rejected],
    }
    if split is not None:
        told["prefill"] = {"remote": split.remote, "reason": split.why, "remote_s": split.remote_s, "local_s": split.local_s}
        if prefill is not None:
            chosen = prefill.chosen.endpoint
            told["prefill"] |= {"engine": chosen.engine, "rank": chosen.rank, "candidates": candidates_of(prefill)}
    return told
