"""Why did this endpoint win? One reason out of a closed list, from what the candidates had and what was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from router.scheduling.types import Candidate, Overlap, Reason, RoutingRequest


def reused_blocks(overlap: Overlap) -> int:
    """Leading blocks that need not be computed again, or are being computed already.

    >>> reused_blocks(Overlap(device=3, host=2, in_flight=4))
    5
    """
    return max(overlap.in_flight, overlap.device + overlap.host + overlap.disk)


def reason_for(request: RoutingRequest, candidates: Sequence[Candidate], costs: Sequence[float], position: int) -> Reason:
    """Why a policy that looks at the cache took the candidate at `position`. Runtime complexity: O(len(candidates)).

    Prefixes of endpoints with different block sizes are compared in tokens.
    """
    if request.untokenizable:
        return Reason.UNTOKENIZABLE
    chosen = candidates[position]
    reused = _reused_tokens(chosen)
    if any(_reused_tokens(other) > reused for other in candidates):
        return Reason.SAMPLED if costs[position] > min(costs) else Reason.OUTWEIGHED
    if reused:
        return _source(chosen.overlap)
    if not chosen.prompt_blocks:
        return Reason.SHORT
    if not chosen.signal.believed:
        return Reason.BLIND
    return Reason.NO_OVERLAP


def regret(candidates: Sequence[Candidate], position: int) -> int:
    """Tokens of the longest prefix there was to reuse beyond those of the candidate at `position`. Runtime complexity: O(len(candidates))."""
    return max(map(_reused_tokens, candidates)) - _reused_tokens(candidates[position])


def _reused_tokens(candidate: Candidate) -> int:
    return reused_blocks(candidate.overlap) * candidate.block_size


def _source(overlap: Overlap) -> Reason:
    """What a prefix that decided is known from."""
    if overlap.in_flight > overlap.device + overlap.host + overlap.disk:
        return Reason.IN_FLIGHT
    return Reason.PREDICTED if overlap.predicted else Reason.KV
