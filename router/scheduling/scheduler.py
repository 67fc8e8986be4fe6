"""Where does this request go? Puts the candidates to the policy, picks, and says why; whatever the policy does, the router lives."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import partial

from engines.types import Endpoint
from router.scheduling.explain import reason_for
from router.scheduling.pick import lowest, sample
from router.scheduling.types import Candidate, Context, Decision, Policy, Reason, Rejection, RoutingRequest


class NoCandidate(Exception):
    """No endpoint is left to choose from; `rejected` says what was wrong with each of those there are."""

    def __init__(self, model: str, rejected: Sequence[tuple[Endpoint, Rejection]]) -> None:
        reasons = {why for _, why in rejected}
        self.model = model
        self.rejected = tuple(rejected)
        self.never = reasons == {Rejection.INDIVISIBLE}
        """Waiting would not help: it is the request that no engine of this model can take."""
        more = next((words for why, words in _IN_WORDS.items() if why in reasons), "")
        super().__init__(f"no endpoint can take a request for model {model!r}{more}")


_IN_WORDS = {
    Rejection.PREFILLS: ": its engines only compute prompts for others (role=prefill), and none goes on from them; add one that does, "
    "--engine 'http://HOST:PORT,role=decode', or one that takes whole requests",
    Rejection.NO_PARTNER: ": there are decode engines, and no usable prefill engine of their group to compute its prompt; add one, "
    "--engine 'http://HOST:PORT,role=prefill' (decode engines of vLLM can compute prompts themselves: --without-prefill fallback)",
    Rejection.INDIVISIBLE: ": its engines share each request with a prefill engine, and this one cannot be shared: it asks for several prompts or "
    "sequences, or for its prompt in the answer, or its path is none that is shared",
}


class PolicyError(Exception):
    """The policy failed; the message names its class and what was wrong."""

    def __init__(self, policy: object, wrong: str) -> None:
        super().__init__(f"policy {type(policy).__module__}:{type(policy).__qualname__} {wrong}")


def uses_cache(policy: Policy) -> bool:
    """Whether the policy looks at overlaps: its attribute `uses_cache`, True where it has none."""
    return bool(getattr(policy, "uses_cache", True))


class Scheduler:
    """One policy, applied to one request after another."""

    def __init__(self, policy: Policy, name: str, temperature: float, rng: random.Random) -> None:
        """Choose by `policy`, called `name` in decisions; a `temperature` above 0 samples, in the units of the policy's costs."""
        self.policy = policy
        self.name = name
        self.temperature = temperature
        self.uses_cache = uses_cache(policy)
        self._rng = rng

    def decide(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rejected: Sequence[tuple[Endpoint, Rejection]], now: float
    ) -> Decision:
        """The candidate to send `request` to, with every score and the reason. `now` is in monotonic seconds.

        Raises NoCandidate when `candidates` is empty, PolicyError when the policy raises or does not give one number for each.
        """
        if not candidates:
            raise NoCandidate(request.model, rejected)
        costs = self._costs(request, candidates, Context(now, self._rng))
        if self.temperature > 0:
            position = sample(costs, self.temperature, self._rng)
        else:
            position = lowest(costs, [candidate.load.last_assigned for candidate in candidates], self._rng)
        chosen = candidates[position]
        reason = reason_for(request, candidates, costs, position) if self.uses_cache else Reason.POLICY
        return Decision(
            chosen,
            position,
            costs[position],
            reason,
            self.name,
            candidates,
            costs,
            rejected,
            partial(self._parts, request, candidates, now),
        )

    def _parts(self, request: RoutingRequest, candidates: Sequence[Candidate], now: float) -> Sequence[Mapping[str, float]] | None:
        explain = getattr(self.policy, "explain", None)
        if explain is None:
            return None
        try:
            parts = [dict(part) for part in explain(request, candidates, Context(now, self._rng))]
        except Exception as error:  # as in `_costs`
            raise PolicyError(self.policy, f"raised {type(error).__name__} in explain: {error}") from error
        if len(parts) != len(candidates):
            raise PolicyError(self.policy, f"explained {len(parts)} costs of {len(candidates)}")
        return parts

    def _costs(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        try:
            costs = [float(cost) for cost in self.policy.score(request, candidates, context)]
        except Exception as error:  # the policy may be the user's: whatever it raises ends this request, never the router
            raise PolicyError(self.policy, f"raised {type(error).__name__}: {error}") from error
        if len(costs) != len(candidates):
            raise PolicyError(self.policy, f"gave {len(costs)} costs for {len(candidates)} candidates")
        if not math.isfinite(sum(costs)) and not all(cost > -math.inf for cost in costs):
            bad = next(number for number, cost in enumerate(costs) if not cost > -math.inf)
            raise PolicyError(self.policy, f"gave {candidates[bad].endpoint} the cost {costs[bad]}, which cannot be compared")
        return costs
