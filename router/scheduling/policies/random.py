"""Any of them, evenly: what every other policy has to beat."""

from __future__ import annotations

from collections.abc import Sequence

from router.scheduling.types import Candidate, Context, RoutingRequest


class Random:
    """All cost the same, and ties are broken at random."""

    uses_cache = False

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """0 for each."""
        return [0.0] * len(candidates)
