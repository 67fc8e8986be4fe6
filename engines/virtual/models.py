"""How fast and how roomy is an engine that is not there? A table of some, each with its source, and the form of a user's own."""

from __future__ import annotations

from typing import Final

import msgspec

from engines.simulator.cache import BlockCache
from engines.simulator.scheduler import Limits
from engines.simulator.timing import Timing


class EngineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine: a step takes `step_s`, and so much more for each of its parts."""

    step_s: float = 0.006
    prefill_token_s: float = 50e-6
    decode_sequence_s: float = 50e-6
    kv_token_s: float = 5e-8
    """For each token of KV cache that a step reads."""
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    kv_tokens: int = 400_000
    """Tokens that its KV cache holds."""

    def timing(self, speed: float = 1.0) -> Timing:
        """Its steps, `speed` times as fast."""
        return Timing(1 / self.prefill_token_s, 0.0, self.decode_sequence_s, speed, self.step_s, self.kv_token_s)

    @property
    def limits(self) -> Limits:
        """What a step holds."""
        return Limits(self.max_num_seqs, self.max_num_batched_tokens)

    def cache(self, block_size: int) -> BlockCache:
        """Its KV cache, empty."""
        return BlockCache(self.kv_tokens // block_size, block_size)


MODELS: Final = {"8b-h100": EngineModel()}
