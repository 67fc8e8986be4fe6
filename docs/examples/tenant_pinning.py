"""Each tenant's requests go to two engines of its own, the less busy of the two first; any other engine only when both are gone."""

from collections.abc import Sequence
from hashlib import sha256

from router.scheduling.types import Candidate, Context, RoutingRequest


class TenantPinning:
    """The session header is `tenant/whatever`; a request without one is the tenant `""`."""

    uses_cache = False

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        tenant = (request.session or "").partition("/")[0]
        ranks = [sha256(f"{tenant} {candidate.endpoint}".encode()).digest() for candidate in candidates]
        own = sorted(ranks)[:2]
        return [
            candidate.load.active_requests + (0 if rank in own else 1_000_000) for candidate, rank in zip(candidates, ranks, strict=True)
        ]
