"""A session stays where it is cached, until that engine is half a second of prompts behind the least busy one; new ones go there."""

from collections.abc import Sequence

from router.scheduling.types import Candidate, Context, RoutingRequest

PATIENCE_S = 0.5
ASSUMED_S_PER_TOKEN = 1e-4


class StickySessions:
    """Longest prefix among those that are not behind."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        waits = [self._wait(candidate) for candidate in candidates]
        least = min(waits)
        costs = []
        for candidate, wait in zip(candidates, waits, strict=True):
            cached = candidate.overlap.in_flight * candidate.block_size
            costs.append(wait if wait > least + PATIENCE_S else wait / 1e3 - cached)
        return costs

    def _wait(self, candidate: Candidate) -> float:
        load = candidate.load
        return (load.active_prefill_tokens - load.prefill_done) * (load.s_per_token or ASSUMED_S_PER_TOKEN)
