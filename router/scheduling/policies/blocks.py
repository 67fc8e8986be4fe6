"""Dynamo's formula: what is cached against what is waiting, in blocks.

    cost = prefill_load_scale · max(0, active prefill + prompt − credit) + potential decode + decode_active_request_weight · requests

Names, defaults and meaning are those of Dynamo 1.6. A prefix that is being computed counts for nothing until the engine has announced it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from router.scheduling.types import Candidate, Context, RoutingRequest


class BlocksWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a block counts, in each of its roles. All are finite and at least 0; ValueError otherwise."""

    overlap_score_credit: float = 1.0
    """Taken off for each leading block on the device."""
    prefill_load_scale: float = 1.0
    """Cost of a block that must be computed before this prompt's first token."""
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    decode_active_request_weight: float = 0.0
    """Cost, in blocks, of each request in flight."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be a finite number of at least 0, not {value}")


class Blocks:
    """Least cost by prefix overlap and load."""

    uses_cache = True

    def __init__(self, weights: BlocksWeights | None = None) -> None:
        self.weights = weights or BlocksWeights()

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> list[float]:
        """See the module's text. Without tokens only the load counts."""
        weights = self.weights
        tokens = request.prompt_tokens
        unit = candidates[0].block_size  # engines that cut blocks of another size are put on one scale, in this one's blocks
        costs = []
        for candidate in candidates:
            overlap, load, block_size = candidate.overlap, candidate.load, candidate.block_size
            credit = weights.overlap_score_credit * overlap.device
            credit += weights.host_cache_hit_weight * overlap.host + weights.disk_cache_hit_weight * overlap.disk
            prefill = max(0.0, (load.active_prefill_tokens + tokens) / block_size - credit)
            blocks = weights.prefill_load_scale * prefill + load.active_blocks + candidate.new_blocks
            if block_size != unit:
                # A started block is no decode block, and larger blocks leave more of a prompt in it: counted in, so that what else
                # is equal costs the same, and prompts that share nothing do not all go to the engine with the larger blocks.
                blocks = (blocks + tokens % block_size / block_size) * block_size / unit - tokens % unit / unit
            costs.append(blocks + weights.decode_active_request_weight * load.active_requests)
        return costs
