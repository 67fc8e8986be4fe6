"""The default policy: where does the prompt's first token cost least? In seconds, by what each endpoint has been seen to take.

    cost =  prefill ahead      what is queued there, less what has been computed of it, at the endpoint's pace
         +  own prefill        what is neither cached there nor being computed, at its pace × price
         +  memory             the prompt's share of the KV cache × how long answers stay × fill ÷ (1 − fill); and the wait for room
         +  decoding           for each request there, which generates or is going to, as if it were a few tokens

The price of own work is 1 ÷ (1 − utilisation): who comes later waits for it too, and the busier the fleet, the more of them do. It is
never below 4/3, so that a prefix which is being made is waited for rather than made again elsewhere.

    prompt of 10 k tokens, pace 50 µs; A is computing the first 8 k for an earlier request; B is idle
    A: 0.4 s ahead + 4/3 · 0.1 s = 0.53 s        B: 4/3 · 0.5 s = 0.67 s
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.scheduling.types import Candidate, Context, Load, RoutingRequest
from router.work import ASSUMED_S_PER_TOKEN

ALIKE: Final = 1.25
"""Paces that differ by less from the middle one are taken for it: what is left is chance, and would send every prompt that finds all
engines idle to the same one."""
LEAST_UTILISATION: Final = 0.25
MOST_UTILISATION: Final = 0.95
DECODING_TOKENS: Final = 256
"""A request costs as much as so many tokens besides its prompt: its answer slows down every prompt and answer beside it, to its end. From
the start: were it counted from its first token only, engines that answer first would look fuller than those that do not."""
HOST_CREDIT: Final = 0.75
DISK_CREDIT: Final = 0.25
"""Of what computing a block costs, reading it from there saves so much."""


PARTS: Final = ("prefill_ahead", "own_prefill", "memory", "decoding")
Price = tuple[float, float, float, float]
"""What an endpoint costs, in seconds, by part: see `PARTS`."""


class Kv:
    """Least cost in seconds."""

    uses_cache = True

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """See the module's text. Without tokens only what is there already counts."""
        return [ahead + own + memory + decoding for ahead, own, memory, decoding in self.prices(request, candidates)]

    def explain(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[dict[str, float]]:
        """The parts of each candidate's cost."""
        return [dict(zip(PARTS, price, strict=True)) for price in self.prices(request, candidates)]

    def prices(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Price]:
        """Each candidate's price. Runtime complexity: O(n · log n) in the candidates."""
        loads = [candidate.load for candidate in candidates]
        paces = _paces(loads)
        tokens = request.prompt_tokens
        utilisation = sum([load.busy for load in loads]) / len(loads)
        own_price = 1.0 / (1.0 - min(max(utilisation, LEAST_UTILISATION), MOST_UTILISATION))
        prices = []
        for candidate, load, pace in zip(candidates, loads, paces, strict=True):
            overlap, block_size, requests = candidate.overlap, candidate.block_size, load.active_requests
            reused: float = overlap.in_flight
            if overlap.host or overlap.disk:
                reused += _lower_tiers(candidate)
            own = tokens - reused * block_size
            # who joins a prefix that is being computed is not to be sent away by the others who wait for it
            answers = requests - load.computing if overlap.in_flight > overlap.device else requests
            ahead = load.active_prefill_tokens - load.prefill_done + load.unknown_tokens
            memory, total = 0.0, candidate.total_blocks
            if total and load.residence_s:
                held = load.active_blocks + requests + load.generated_tokens / block_size
                memory = load.residence_s * _memory(held, candidate.new_blocks + 1, total)
            prices.append((ahead * pace, max(own, 1.0) * pace * own_price, memory, answers * DECODING_TOKENS * pace))
        return prices


def _paces(loads: Sequence[Load]) -> list[float]:
    """Seconds a token, for each; those not known yet are taken for the fastest, so that they get to show it."""
    paces = [load.s_per_token for load in loads]
    known = sorted([pace for pace in paces if pace is not None])
    if not known:
        return [ASSUMED_S_PER_TOKEN] * len(paces)
    middle, fastest = known[len(known) // 2], known[0]
    low, high = middle / ALIKE, middle * ALIKE
    if low <= fastest and known[-1] <= high:
        return [middle] * len(paces)
    return [middle if low <= pace <= high else pace for pace in [fastest if pace is None else pace for pace in paces]]


def _lower_tiers(candidate: Candidate) -> float:
    """What blocks in host memory and on disk are worth, of those that are not in flight as well."""
    overlap = candidate.overlap
    host_end = overlap.device + overlap.host
    disk_end = host_end + overlap.disk
    host = max(0, host_end - overlap.in_flight)
    disk = max(0, disk_end - max(host_end, overlap.in_flight))
    return HOST_CREDIT * host + DISK_CREDIT * disk


def _memory(held: float, new: int, total: int) -> float:
    """In times that an answer stays: what the prompt's `new` blocks make others wait, and what it waits itself where there is no room."""
    fill = min(held / total, MOST_UTILISATION)
    missing = held + new - total
    price = new * fill / (total * (1.0 - fill))
    return price + missing / held if missing > 0 and held else price
