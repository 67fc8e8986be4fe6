"""Which models are known by name? What their published `config.json` says, as far as it is read here."""

from __future__ import annotations

import re
from typing import Any, Final

_QWEN3: Final = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
_QWEN3_MOE: Final = _QWEN3 | {
    "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
_QWEN2: Final = {"model_type": "qwen2", "use_sliding_window": False, "torch_dtype": "bfloat16"}
_LLAMA2: Final = {"model_type": "llama", "vocab_size": 32_000, "torch_dtype": "float16"}
_LLAMA3: Final = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
_GPT_OSS: Final = {
    "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


def _size(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": intermediate}


MODELS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-0.6B": _QWEN3 | _size(1024, 28, 16, 3072) | {"tie_word_embeddings": True},
    "Qwen3-1.7B": _QWEN3 | _size(2048, 28, 16, 6144) | {"tie_word_embeddings": True},
    "Qwen3-4B": _QWEN3 | _size(2560, 36, 32, 9728) | {"tie_word_embeddings": True},
    "Qwen3-8B": _QWEN3 | _size(4096, 36, 32, 12_288),
    "Qwen3-14B": _QWEN3 | _size(5120, 40, 40, 17_408),
    "Qwen3-32B": _QWEN3 | _size(5120, 64, 64, 25_600),
    "Qwen3-30B-A3B": _QWEN3_MOE | _size(2048, 48, 32, 6144) | {"moe_intermediate_size": 768},
    "Qwen3-235B-A22B": _QWEN3_MOE | _size(4096, 94, 64, 12_288) | {"moe_intermediate_size": 1536},
    "Qwen3-Next-80B-A3B": _size(2048, 48, 16, 5120)
    | {
        "model_type": "qwen3_next", "vocab_size": 151_936, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "decoder_sparse_step": 1, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts": 512, "num_experts_per_tok": 10, "torch_dtype": "bfloat16",
    },
    "Qwen2.5-0.5B": _QWEN2 | _size(896, 24, 14, 4864) | {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "Qwen2.5-1.5B": _QWEN2 | _size(1536, 28, 12, 8960) | {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "Qwen2.5-7B": _QWEN2 | _size(3584, 28, 28, 18_944) | {"num_key_value_heads": 4, "vocab_size": 152_064},
    "Qwen2.5-72B": _QWEN2 | _size(8192, 80, 64, 29_568) | {"num_key_value_heads": 8, "vocab_size": 152_064},
    "Llama-2-7B": _LLAMA2 | _size(4096, 32, 32, 11_008) | {"num_key_value_heads": 32},
    "Llama-2-70B": _LLAMA2 | _size(8192, 80, 64, 28_672) | {"num_key_value_heads": 8},
    "Llama-3.1-8B": _LLAMA3 | _size(4096, 32, 32, 14_336),
    "Llama-3.1-70B": _LLAMA3 | _size(8192, 80, 64, 28_672),
    "Llama-3.1-405B": _LLAMA3 | _size(16_384, 126, 128, 53_248),
    "Mistral-7B-v0.3": _size(4096, 32, 32, 14_336)
    | {"model_type": "mistral", "vocab_size": 32_768, "num_key_value_heads": 8, "sliding_window": None, "torch_dtype": "bfloat16"},
    "Mixtral-8x7B": _size(4096, 32, 32, 14_336)
    | {
        "model_type": "mixtral", "vocab_size": 32_000, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None, "torch_dtype": "bfloat16",
    },
    "DeepSeek-V3": _size(7168, 61, 128, 18_432)
    | {
        "model_type": "deepseek_v3", "vocab_size": 129_280, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "Gemma-3-27B": {
        "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": _size(5376, 62, 32, 21_504)
        | {"model_type": "gemma3_text", "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024},
    },
}  # fmt: skip
MODELS["DeepSeek-R1"] = MODELS["DeepSeek-V3"]

_SUFFIX: Final = re.compile(r"-(hf|chat|instruct|it|base|thinking|v0\.1)$")


def known_model(name: str) -> tuple[str, dict[str, Any]] | None:
    """The model of that name, whatever its case, with or without its organisation and `-Instruct` and the like; None for another."""
    by_lower_name = {known.lower(): known for known in MODELS}
    wanted = name.rpartition("/")[2].lower()
    while wanted not in by_lower_name and _SUFFIX.search(wanted):
        wanted = _SUFFIX.sub("", wanted)
    found = by_lower_name.get(wanted)
    return None if found is None else (found, MODELS[found])
