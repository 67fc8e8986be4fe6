"""What is known of each engine? Everything the router goes by, in one place and in words, for whoever runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from engines.types import Tier
from router.roster import UnknownEngine

if TYPE_CHECKING:
    from discovery.mirror import Mirror
    from discovery.monitor import Monitor
    from engines.types import Endpoint
    from router.caches import Caches
    from router.fleet import Fleet
    from router.load import LoadBook
    from router.pairing import Pairing
    from router.roster import Roster


class Census:
    """Looks at the rooms; keeps nothing. No secret is among what it shows."""

    def __init__(  # noqa: PLR0913  it reads every room that knows something of an engine
        self,
        *,
        monitor: Monitor,
        fleet: Fleet,
        roster: Roster,
        caches: Caches,
        load: LoadBook,
        mirror: Mirror,
        pairing: Pairing,
        clock: Callable[[], float],
    ) -> None:
        self._monitor = monitor
        self._fleet = fleet
        self._roster = roster
        self._caches = caches
        self._load = load
        self._mirror = mirror
        self._pairing = pairing
        self._clock = clock

    def ids(self) -> list[str]:
        """Of every engine that is followed."""
        return list(self._monitor.watched)

    def engines(self) -> list[dict[str, Any]]:
        """Every engine that is followed."""
        return [self.engine(engine_id) for engine_id in self._monitor.watched]

    def engine(self, engine_id: str) -> dict[str, Any]:
        """One of them. Raises UnknownEngine when it is not followed."""
        spec = self._monitor.spec(engine_id)
        if spec is None:
            raise UnknownEngine(engine_id)
        member = self._fleet.members.get(engine_id)
        known: dict[str, Any] = {
            "id": engine_id,
            "role": member.info.role if member is not None else spec.role,
            "state": self.state(engine_id),
            "draining": self._fleet.is_draining(engine_id),
            "leaving": self._roster.is_leaving(engine_id),
            "in_flight": self._roster.in_flight(engine_id),
        }
        if member is None:
            return known | {"waiting_for": self._monitor.waiting_for(engine_id)}
        info = member.info
        return known | {
            "kind": info.kind,
            "version": info.version,
            "models": [{"id": model.id, "parent": model.parent, "max_model_len": model.max_model_len} for model in info.models],
            "tokenizer": member.tokenizer_line,
            "endpoints": [self._endpoint(endpoint, info.block_size) for endpoint in info.endpoints],
        }

    def state(self, engine_id: str) -> str:
        """In one word: waiting (not there yet), joining, serving; or why it takes nothing: draining, asleep, ejected, cooling."""
        member = self._fleet.members.get(engine_id)
        if member is None:
            return "waiting"
        rejection = member.rejection(self._clock())
        return rejection.value if rejection is not None else "serving" if member.serving else "joining"

    def _endpoint(self, endpoint: Endpoint, block_size: int | None) -> dict[str, Any]:
        now, own = self._clock(), self._load.own(endpoint)
        return {
            "rank": endpoint.rank,
            "block_size": self._mirror.block_size(endpoint) or block_size,
            "signal": self._mirror.signal(endpoint, now),
            "load": msgspec.structs.replace(
                self._load.load(endpoint, now),
                active_requests=own.requests,
                active_prefill_tokens=own.prefill_tokens,
                active_blocks=own.blocks,
            ),
            "cached_blocks": {tier.name.lower(): self._caches.size(endpoint, tier) for tier in Tier},
            "predicted_blocks": self._caches.predicted_size(endpoint),
            "computed_again_tokens": self._pairing.computing_again.get(endpoint, 0),
        }
