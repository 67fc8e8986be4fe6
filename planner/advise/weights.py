"""How many weights does a model have, and how many of them does a token pass through? Counted from its `config.json`.

Matrices only: norms, biases and rotary tables are less than a thousandth. Embedding tables are looked up, not multiplied, so they count
as weights and not as work; the output head works once per prompt, for its last token.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engines.model_config import Attention, LatentAttention, Layer, Model, experts
from engines.model_fields import Fields, ModelConfigError

_TWO_MATRICES: Final = frozenset({
    "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "nemotron", "nemotron_h", "opt", "persimmon", "phi", "starcoder2",
})  # fmt: skip
"""An MLP without a gate; everybody else's has three matrices."""

_BITS: Final = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "modelopt": 8.0, "modelopt_fp4": 4.5, "nvfp4": 4.5}
"""Bits of a weight by `quant_method`, scales of 4-bit blocks included (one byte for 32 weights, or 16)."""


class Weights(msgspec.Struct, frozen=True):
    """Weights of a model, in numbers of parameters."""

    always: int
    """What every token passes through, output head and embeddings aside."""
    routed: int
    """All routed experts of all layers."""
    experts: int
    """Routed experts of a layer, 1 in a dense model."""
    experts_per_token: int
    head: int
    """The output head."""
    embeddings: int
    """The tables that are only looked up."""
    bytes_per_parameter: float

    @property
    def total(self) -> int:
        """All of them."""
        return self.always + self.routed + self.head + self.embeddings

    @property
    def active(self) -> int:
        """What one token passes through, output head and embeddings aside."""
        return self.always + self.routed * self.experts_per_token // self.experts

    def read_bytes(self, tokens: int) -> float:
        """Bytes that a step over `tokens` tokens reads: of the experts, those that at least one token is expected to choose."""
        reached = 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens
        return (self.always + self.routed * reached + self.head) * self.bytes_per_parameter


def count(model: Model, bytes_per_parameter: float) -> Weights:
    """The weights of `model`. Raises ModelConfigError, naming the field that is missing."""
    fields = model.fields
    hidden = fields.whole("hidden_size", "n_embd", "d_model")
    vocabulary = fields.whole("vocab_size", "padded_vocab_size") * hidden
    tied = fields.values.get("tie_word_embeddings", model.model_type.startswith(("gemma", "gpt2", "cohere"))) is True
    matrix = hidden * (2 if model.model_type in _TWO_MATRICES else 3)
    dense = sum(layer.mlp == "dense" for layer in model.layers)
    sparse = sum(layer.mlp == "experts" for layer in model.layers)
    always = sum(_mixer(layer, hidden) for layer in model.layers)
    always += dense * matrix * _dense_size(fields, hidden) if dense else 0
    if sparse:
        each, number = _expert_size(fields), _experts(fields)
        always += sparse * (matrix * _shared_size(fields, each) + hidden * number)  # and the router
        routed, per_token = sparse * number * matrix * each, min(_experts_per_token(fields), number)
    else:
        routed, number, per_token = 0, 1, 1
    return Weights(always, routed, number, per_token, vocabulary, 0 if tied else vocabulary, bytes_per_parameter)


def bytes_per_parameter(config: Fields) -> float:
    """Of a `config.json`: what `quantization_config` says, else 2."""
    quantization = config.table("quantization_config")
    if "bits" in quantization:
        return quantization.whole("bits") / 8
    method = quantization.text("quant_method").lower()
    if method in _BITS:
        return _BITS[method] / 8
    groups = quantization.table("config_groups").values.values()  # compressed-tensors
    bits = [Fields(group).table("weights").whole("num_bits") for group in groups if isinstance(group, dict) and "weights" in group]
    return max(bits) / 8 if bits else 2.0


def _mixer(layer: Layer, hidden: int) -> int:
    state = layer.state.parameters if layer.state else 0
    match layer.attention:
        case Attention(heads, kv_heads, head_dim, v_head_dim, _, keeps_cache):
            own = kv_heads * (head_dim + v_head_dim) if keeps_cache else 0
            return state + hidden * (heads * (head_dim + v_head_dim) + own)
        case LatentAttention(heads, rank, rope, nope, v_head_dim, q_rank):
            query = heads * (nope + rope)
            queries = hidden * query if q_rank is None else q_rank * (hidden + query)
            return state + queries + hidden * (rank + rope) + rank * heads * (nope + v_head_dim) + heads * v_head_dim * hidden
        case None:
            return state


def _dense_size(fields: Fields, hidden: int) -> int:
    names = ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    if isinstance(sizes := fields.values.get("intermediate_size"), list):  # Gemma 3n has one for each layer
        return sum(size for size in sizes if type(size) is int) // max(1, len(sizes))
    return fields.whole(*names, default=4 * hidden)


def _expert_size(fields: Fields) -> int:
    inner = fields.table("ffn_config").whole("ffn_hidden_size", default=0)  # DBRX
    return inner or fields.whole("moe_intermediate_size", "intermediate_size")


def _shared_size(fields: Fields, expert_size: int) -> int:
    """Width of the experts that every token passes through, together."""
    names = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
    if any(name in fields for name in names):
        return fields.whole(*names)
    return expert_size * (1 if fields.text("model_type") == "llama4_text" else fields.count("n_shared_experts"))


def _experts(fields: Fields) -> int:
    if not (number := experts(fields)):
        raise ModelConfigError("the model's config has layers of experts, but no num_experts")
    return number


def _experts_per_token(fields: Fields) -> int:
    chosen = fields.table("ffn_config").count("moe_top_k")
    return chosen or fields.whole("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
