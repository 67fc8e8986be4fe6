"""Any of them, evenly: what every other policy has to beat."""

from __future__ import annotations

from collections.abc import Sequence

from router.scheduling.types import Candidate, Context, RoutingRequest


class Random:
    """Costs are drawn: equal ones would be taken in turns."""

    uses_cache = False

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """A number between 0 and 1 for each."""
        return [context.rng.random() for _ in candidates]
