"""How fast is a GPU? Its data sheet's peak, and the share of it that a prefill and a decode step are taken to reach."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

GpuName = Literal["A10", "A100", "B200", "H100", "H200", "L4", "L40S", "MI300X", "RTX4090"]


class Gpu(msgspec.Struct, frozen=True):
    """One GPU, by its maker's data sheet."""

    flops: float
    """Dense bf16 operations per second; sheets that tell it with sparsity are halved."""
    bytes_per_s: float
    """Memory bandwidth."""
    source: str


GPUS: Final[dict[GpuName, Gpu]] = {
    "A10": Gpu(125e12, 600e9, "NVIDIA A10 data sheet"),
    "A100": Gpu(312e12, 2_039e9, "NVIDIA A100 data sheet, SXM 80 GB"),
    "B200": Gpu(2_250e12, 8_000e9, "NVIDIA HGX B200 data sheet, an eighth of 36 PFLOPS with sparsity, halved"),
    "H100": Gpu(989e12, 3_350e9, "NVIDIA H100 data sheet, SXM, 1,979 TFLOPS with sparsity, halved"),
    "H200": Gpu(989e12, 4_800e9, "NVIDIA H200 data sheet, SXM, 1,979 TFLOPS with sparsity, halved"),
    "L4": Gpu(121e12, 300e9, "NVIDIA L4 data sheet, 242 TFLOPS with sparsity, halved"),
    "L40S": Gpu(362e12, 864e9, "NVIDIA L40S data sheet"),
    "MI300X": Gpu(1_307e12, 5_300e9, "AMD Instinct MI300X data sheet"),
    "RTX4090": Gpu(165e12, 1_008e9, "NVIDIA Ada architecture whitepaper, with fp32 accumulation"),
}

UTILISATION: Final = 0.4
"""Share of the peak that a prefill reaches. 52,300 input tokens/s on a node of 8 H100, DeepSeek-V3, 2,000-token prompts
(lmsys.org/blog/2025-05-05-large-scale-ep), are 0.49 of the bf16 peak and 0.25 of the fp8 peak it may use."""
MEMORY_UTILISATION: Final = 0.7
"""Share of the memory bandwidth that a decode step reaches: an assumption, within what engines show (0.6 to 0.85)."""
