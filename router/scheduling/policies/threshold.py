"""Where enough of the prompt is cached, to the longest prefix; else to the least loaded. What sglang-router calls `cache_aware`.

Balance comes first: when the most loaded has over 64 requests more than the least, and over 1.5 times as many, the least loaded is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.scheduling.types import Candidate, Context, RoutingRequest

MATCH: Final = 0.3
"""A prefix of this share of the prompt is worth following."""
GAP: Final = 64
RATIO: Final = 1.5


class Threshold:
    """Longest prefix if long enough, while the load is even."""

    uses_cache = True

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """Requests in flight, or minus the tokens that are cached."""
        loads = [float(candidate.load.active_requests) for candidate in candidates]
        if max(loads) - min(loads) > GAP and max(loads) > RATIO * min(loads):
            return loads
        cached = [candidate.overlap.device * candidate.block_size for candidate in candidates]
        if request.prompt_tokens and max(cached) >= MATCH * request.prompt_tokens:
            return [-float(tokens) for tokens in cached]
        return loads
