"""The less loaded of two drawn at random: nearly as even as asking all, and many routers that know little do not herd.

Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001): the fullest of n has about log log n more than the
mean, against log n / log log n when one is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.scheduling.policies.least_loaded import load_cost
from router.scheduling.types import Candidate, Context, RoutingRequest


class PowerOfTwo:
    """Draws two candidates; the others cost infinitely much."""

    uses_cache = False

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """The load of the two drawn: see `least_loaded.load_cost`."""
        drawn = context.rng.sample(range(len(candidates)), min(2, len(candidates)))
        costs = [math.inf] * len(candidates)
        for position in drawn:
            costs[position] = load_cost(candidates[position])
        return costs
