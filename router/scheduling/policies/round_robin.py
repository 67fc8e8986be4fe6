"""Each in turn: whoever has waited longest for a request gets it. Keeps no state, so joins and leaves need no care."""

from __future__ import annotations

from collections.abc import Sequence

from router.scheduling.types import Candidate, Context, RoutingRequest


class RoundRobin:
    """The longest unassigned first; those that never had a request before all others."""

    uses_cache = False

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """How many assignments (to any endpoint) later than the longest unassigned each one had its last."""
        assigned = [candidate.load.last_assigned for candidate in candidates]
        first = min(assigned)
        return [float(last - first) for last in assigned]
