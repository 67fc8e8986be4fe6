"""What does a layer keep that has no KV cache? A state, as large for a long sequence as for a short one.

Sizes follow vLLM's `model_executor/layers/mamba/mamba_utils.py` (`MambaStateShapeCalculator`); groups that tensor parallelism repeats are
not counted, which is a few percent of a state at most.
"""

from __future__ import annotations

import msgspec

from engines.model_fields import Fields, ModelConfigError


class State(msgspec.Struct, frozen=True):
    """What a linear-attention, Mamba or convolution layer keeps of a sequence: as much for a long one as for a short one."""

    conv_elements: int
    """Kept in the model's own type."""
    recurrent_elements: int
    recurrent_bytes: int
    """Bytes of each."""
    parameters: int
    """Weights of the layer's projections."""


def read_state(model_type: str, fields: Fields) -> State:
    """The state of one layer without attention, or beside it. Raises ModelConfigError where no field tells its size."""
    hidden = fields.whole("hidden_size", "d_model")
    wide = 4 if (fields.text("mamba_ssm_dtype") or fields.text("mamba_ssm_cache_dtype")) == "float32" else 2
    if "linear_num_value_heads" in fields:  # gated delta net: Qwen3-Next, Qwen3.5
        key_dim, value_dim = fields.whole("linear_key_head_dim"), fields.whole("linear_value_head_dim")
        keys, values = fields.whole("linear_num_key_heads") * key_dim, fields.whole("linear_num_value_heads") * value_dim
        conv = (fields.whole("linear_conv_kernel_dim") - 1) * (2 * keys + values)
        return State(conv, values * key_dim, wide, hidden * (2 * keys + 2 * values) + values * hidden)
    if "linear_attn_config" in fields or "linear_num_heads" in fields:  # KDA: Kimi Linear, as published and as transformers writes it
        linear = Fields({**fields.values, **fields.table("linear_attn_config").values})
        head_dim = linear.whole("head_dim" if "linear_attn_config" in fields else "linear_head_dim")
        inner = linear.whole("num_heads" if "linear_attn_config" in fields else "linear_num_heads") * head_dim
        conv = (linear.whole("short_conv_kernel_size", "linear_conv_kernel_dim", default=4) - 1) * 3 * inner
        return State(conv, inner * head_dim, 4, 4 * hidden * inner)
    if "conv_L_cache" in fields:  # short convolution: LFM2
        inner = fields.whole("conv_dim", default=hidden)
        return State((fields.whole("conv_L_cache") - 1) * inner, 0, wide, hidden * 3 * inner + inner * hidden)
    return _mamba(model_type, fields, hidden, wide)


def _mamba(model_type: str, fields: Fields, hidden: int, wide: int) -> State:
    size = ("mamba_d_state", "ssm_state_size", "state_size")
    if not any(name in fields for name in size):
        raise ModelConfigError(f"the model's config has layers without attention, and no field of {model_type!r} tells their state's size")
    states = fields.whole(*size)
    kernel = fields.whole("mamba_d_conv", "conv_kernel")
    inner = fields.whole("mamba_expand", "expand", default=2) * hidden
    if model_type in ("mamba", "falcon_mamba", "jamba"):
        inner = fields.whole("intermediate_size", default=inner) if model_type != "jamba" else inner
        rank = -(-hidden // 16)
        return State(
            (kernel - 1) * inner, inner * states, wide, hidden * 2 * inner + inner * (rank + 2 * states) + rank * inner + inner * hidden
        )
    heads = fields.whole("mamba_n_heads", "mamba_num_heads", "num_heads")
    groups = fields.whole("mamba_n_groups", "n_groups", default=1)
    inner = heads * fields.whole("mamba_head_dim") if model_type == "nemotron_h" else fields.whole("mamba_d_ssm", default=inner)
    mixed = inner + 2 * groups * states
    return State((kernel - 1) * mixed, inner * states, wide, hidden * (inner + mixed + heads) + inner * hidden)
