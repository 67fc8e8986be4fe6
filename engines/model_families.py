"""Which families of models are known, and what do they leave unsaid in their `config.json`?

What is taken for granted here is what transformers takes for granted (its `configuration_*.py`), checked against 5.19.
"""

from __future__ import annotations

from typing import Any, Final

NESTED: Final = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where a multimodal model keeps the config of its language part; `thinker_config` has a `text_config` in turn."""

DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
        "vocab_size": 262_208,
    },
    "gemma3n_text": {"sliding_window_pattern": 5},
    "gemma4_text": {"sliding_window_pattern": 6, "global_head_dim": 512},
    "cohere2": {"sliding_window_pattern": 4},
    "gpt_oss": {"sliding_window_pattern": 2},
    "qwen3_next": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "llama4_text": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192},
    "bamba": {"attn_layer_indices": [], "mamba_expand": 2},
    "granitemoehybrid": {"mamba_expand": 2},
}  # fmt: skip
"""What transformers takes for granted where a published `config.json` of the family leaves it out."""

EVERY_LAYER_SLIDES: Final = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
"""`sliding_window`, where it is set, holds for all layers."""

_PLAIN: Final = frozenset({
    "apertus", "arcee", "baichuan", "bloom", "chatglm", "cohere", "dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone", "falcon", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox", "gptj",
    "granite", "granitemoe", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2", "internlm3", "kimi_k2", "llama",
    "minicpm", "minimax_m2", "mpt", "nemotron", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi", "qwen", "qwen2",
    "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text",
    "seed_oss", "solar", "stablelm",
})  # fmt: skip
LAYERED: Final = frozenset({
    "afmoe", "exaone4", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mimo_v2_flash", "nemotron_h", "nemotron-nas", "olmo3",
})  # fmt: skip
"""Their layers differ, and only the config tells how."""

STATE_ONLY: Final = frozenset({"falcon_mamba", "granitemoehybrid", "mamba", "mamba2"})
"""No layer has attention unless the config says so."""

_OTHERS: Final = frozenset({"deepseek_v32", "falcon_h1", "glm_moe_dsa", "smollm3"})
KNOWN: Final = _PLAIN | _OTHERS | LAYERED | STATE_ONLY | EVERY_LAYER_SLIDES | frozenset(DEFAULTS)

OTHERWISE: Final = frozenset({"deepseek_v4", "longcat_flash", "minicpm3", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"})
"""Families whose cache is not what their fields suggest."""

UNREADABLE: Final = {
    "compress_ratios": "compressed attention",
    "compress_rates": "compressed attention",
    "cross_attention_layers": "layers that attend to an image",
    "block_types": "recurrent blocks",
    "is_encoder_decoder": "an encoder and a decoder",
}
"""Fields of architectures whose cache is none of the kinds above."""

SUSPICIOUS: Final = (
    "mamba", "ssm", "linear_attn", "linear_num", "conv_kernel", "recurrent", "lru_", "kda", "compress", "state_size", "hybrid",
)  # fmt: skip
"""Parts of names that tell, in a family that is not known here, of layers that are no plain attention."""
