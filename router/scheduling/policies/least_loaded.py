"""Whoever has the fewest requests of ours in flight. Decides by the router's own counts: an engine's gauge may be stuck."""

from __future__ import annotations

from collections.abc import Sequence

from router.scheduling.types import Candidate, Context, RoutingRequest


def load_cost(candidate: Candidate) -> float:
    """Requests in flight, plus a fraction below 1 that grows with their blocks, those still to be computed counting twice.

    >>> from engines.types import Endpoint
    >>> from router.scheduling.types import Load
    >>> busy = Load(active_requests=2, active_prefill_tokens=32, active_blocks=3)
    >>> load_cost(Candidate(Endpoint("http://a:8000"), block_size=16, prompt_blocks=1, new_blocks=1, load=busy))
    2.8333333333333335
    """
    load = candidate.load
    blocks = load.active_blocks + load.active_prefill_tokens / candidate.block_size
    return load.active_requests + blocks / (blocks + 1)


class LeastLoaded:
    """Fewest requests in flight; among equals, fewest blocks."""

    uses_cache = False

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """See `load_cost`."""
        return [load_cost(candidate) for candidate in candidates]
