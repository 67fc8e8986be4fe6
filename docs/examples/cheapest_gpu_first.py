"""Cards that cost less first; the next dearer ones only where those before have their fill."""

from collections.abc import Sequence
from fnmatch import fnmatch

from router.scheduling.types import Candidate, Context, RoutingRequest

PRICES = {"*l4*": 1.0, "*a100*": 3.0, "*h100*": 6.0}
"""Per hour, by what is in the engine's URL."""
FULL = 8
"""Requests in flight from which on an engine has its fill."""


class CheapestGpuFirst:
    """Least price; of equal ones, the least loaded."""

    uses_cache = False

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        return [
            self._price(candidate.endpoint.engine) * (1 + candidate.load.active_requests // FULL) + self._load(candidate)
            for candidate in candidates
        ]

    def _price(self, url: str) -> float:
        return next((price for pattern, price in PRICES.items() if fnmatch(url, pattern)), max(PRICES.values()))

    def _load(self, candidate: Candidate) -> float:
        return candidate.load.active_requests / 1e6
