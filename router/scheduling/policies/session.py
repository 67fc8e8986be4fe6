"""The same session to the same endpoint, without remembering any: every endpoint draws a number from (session, endpoint).

Rendezvous hashing (Thaler and Ravishankar, 1998): the lowest number wins. An endpoint that leaves takes only its own sessions with
it, one that joins takes an even part from all the others, and every router agrees without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.scheduling.policies.least_loaded import load_cost
from router.scheduling.types import Candidate, Context, RoutingRequest


class Session:
    """Sticky by session; a request without one goes to the least loaded endpoint."""

    uses_cache = False

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """A number in [0, 1) per endpoint, the same for every request of the session."""
        if request.session is None:
            return [load_cost(candidate) for candidate in candidates]
        seed = xxh3_64_intdigest(request.session.encode("utf-8", "surrogatepass"))
        return [xxh3_64_intdigest(str(candidate.endpoint).encode(), seed) / 2**64 for candidate in candidates]
