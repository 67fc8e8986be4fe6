"""How fast and how roomy is an engine that is not there? A table of some, each with its source, and the form of a user's own.

    a step takes   step_s + prefill_token_s · prompt tokens + decode_sequence_s · decoding sequences + kv_token_s · KV tokens read

`8b-h100` is what policies are compared with. The others follow from it as bandwidth and arithmetic do, by the numbers of
`planner/advise/gpus.py` (vendors' data sheets; 0.4 of the peak in prefill, 0.7 of the bandwidth), for fp16 weights and KV of grouped-query models:
step = bytes of weights ÷ bandwidth + 2 ms for all else (an assumption); a prefill token 2 · parameters ÷ flops; a KV token its bytes ÷ bandwidth; and KV in what
90 % of the memory leave beside the weights.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engines.simulator.cache import BlockCache
from engines.simulator.scheduler import Limits
from engines.simulator.timing import Timing


class EngineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine: how long its steps take, and how much it holds."""

    step_s: float = 0.006
    prefill_token_s: float = 50e-6
    decode_sequence_s: float = 50e-6
    kv_token_s: float = 5e-8
    """For each token of KV cache that a step reads."""
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    kv_tokens: int = 400_000
    """Tokens that its KV cache holds."""
    source: str = "the model that policies are compared with"

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


def estimated(  # noqa: PLR0913  what a data sheet and a config.json say
    source: str, *, parameters: float, kv_bytes_per_token: int, tflops: float, tb_per_s: float, memory_gb: float, gpus: int = 1
) -> EngineModel:
    """By the formulas of the module's text, for `gpus` of a kind that share every step."""
    flops, bytes_per_s = 0.4 * tflops * 1e12 * gpus, 0.7 * tb_per_s * 1e12 * gpus
    weights = 2 * parameters
    return EngineModel(
        step_s=weights / bytes_per_s + 0.002,
        prefill_token_s=2 * parameters / flops,
        decode_sequence_s=50e-6,
        kv_token_s=kv_bytes_per_token / bytes_per_s,
        kv_tokens=int((0.9 * memory_gb * 1e9 * gpus - weights) / kv_bytes_per_token),
        source=source,
    )


MODELS: Final = {
    "8b-h100": EngineModel(),
    "8b-a100": estimated(
        "NVIDIA's A100 80GB data sheet; Llama-3.1-8B",
        parameters=8.0e9,
        kv_bytes_per_token=131_072,
        tflops=312,
        tb_per_s=2.04,
        memory_gb=80,
    ),
    "8b-l4": estimated(
        "NVIDIA's L4 data sheet; Llama-3.1-8B", parameters=8.0e9, kv_bytes_per_token=131_072, tflops=121, tb_per_s=0.3, memory_gb=24
    ),
    "70b-4xh100": estimated(
        "NVIDIA's H100 SXM data sheet; Llama-3.1-70B, tensor parallel 4",
        parameters=70.6e9,
        kv_bytes_per_token=327_680,
        tflops=989,
        tb_per_s=3.35,
        memory_gb=80,
        gpus=4,
    ),
    "32b-2xh200": estimated(
        "NVIDIA's H200 SXM data sheet; Qwen3-32B, tensor parallel 2",
        parameters=32.8e9,
        kv_bytes_per_token=262_144,
        tflops=989,
        tb_per_s=4.8,
        memory_gb=141,
        gpus=2,
    ),
}
