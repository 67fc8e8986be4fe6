"""How many bytes of KV cache does a prompt take? What a transfer to another engine has to carry.

    kv_shape(config).bytes(tokens) = bytes_per_token · tokens                      full attention: grows with the prompt
                                   + Σ window.bytes_per_token · min(tokens, window)  sliding windows: bounded
                                   + state_bytes                                   linear attention, Mamba: the same for every prompt

Attention keeps a key and a value per KV head: `layers · kv_heads · (head_dim + v_head_dim) · element`. MLA keeps one vector per token:
`layers · (kv_lora_rank + qk_rope_head_dim) · element` (DeepSeek-V2, arXiv:2405.04434, section 2.1). Sizes follow vLLM's
`v1/kv_cache_interface.py` and `mamba_utils.py`; bytes that fill up a last block are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from engines.model_config import Attention, LatentAttention, Layer, Model, read_model
from engines.model_fields import Fields, ModelConfigError

KvDtype = Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
"""What the engine is told (`--kv-cache-dtype`); `auto` is what it takes by itself."""

_ELEMENT_BYTES: Final[dict[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
_SCALE_GROUP: Final = 128
"""Elements that share one 4-byte scale, in an indexer's keys and in the packed fp8 cache of sparse MLA (`fp8_ds_mla`)."""


class Window(msgspec.Struct, frozen=True, order=True):
    """Layers that look back at the last `tokens` only."""

    tokens: int
    bytes_per_token: int


class KvShape(msgspec.Struct, frozen=True):
    """How much KV cache a model keeps, on all ranks together. Every number is in bytes or tokens."""

    bytes_per_token: int
    """Of the layers whose cache grows with every token."""
    windows: tuple[Window, ...] = ()
    state_bytes: int = 0
    """Per sequence, whatever its length."""
    notes: tuple[str, ...] = ()
    """What had to be taken for granted, in words."""

    def bytes(self, tokens: int) -> int:
        """Bytes that a prompt of `tokens` tokens takes; never less for more tokens."""
        bounded = sum(window.bytes_per_token * min(tokens, window.tokens) for window in self.windows)
        return self.bytes_per_token * tokens + bounded + (self.state_bytes if tokens else 0)


def kv_shape(config: Mapping[str, Any], *, kv_dtype: KvDtype = "auto", tensor_parallel: int = 1) -> KvShape:
    """The shape of the KV cache of the model that a `config.json`'s object describes.

    `tensor_parallel` is the number of ranks of the engine: where there are more of them than KV heads, each head is kept several times,
    and MLA's vector is kept by all. Raises ModelConfigError, naming the field that is missing or cannot be read.
    """
    return kv_shape_of(read_model(config), config, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)


def kv_shape_of(model: Model, config: Mapping[str, Any], *, kv_dtype: KvDtype, tensor_parallel: int) -> KvShape:
    """The same for a model that has been read already."""
    element = _element_bytes(kv_dtype, config, model.fields)
    growing, windows = 0, Counter[int]()
    for attention in (layer.attention for layer in model.layers):
        match attention:
            case Attention(keeps_cache=True, window=None):
                growing += _per_token(attention, element, tensor_parallel)
            case Attention(keeps_cache=True, window=int(window)):
                windows[window] += _per_token(attention, element, tensor_parallel)
            case LatentAttention():
                growing += _latent_per_token(attention, element) * tensor_parallel
            case _:
                pass
    return KvShape(
        bytes_per_token=growing,
        windows=tuple(sorted(Window(tokens, size) for tokens, size in windows.items())),
        state_bytes=sum(_state_bytes(layer) for layer in model.layers),
        notes=(*model.notes, *_notes(growing, windows)),
    )


def _per_token(attention: Attention, element: int, tensor_parallel: int) -> int:
    heads = attention.kv_heads
    if heads % tensor_parallel and tensor_parallel % heads:
        raise ModelConfigError(f"{heads} KV heads (num_key_value_heads) cannot be divided among {tensor_parallel} tensor-parallel ranks")
    return max(heads, tensor_parallel) * (attention.head_dim + attention.v_head_dim) * element


def _latent_per_token(attention: LatentAttention, element: int) -> int:
    index = attention.index_dim + 4 * attention.index_dim // _SCALE_GROUP  # fp8 whatever the cache is
    if attention.sparse and element == 1:
        return attention.rank + 4 * attention.rank // _SCALE_GROUP + 2 * attention.rope_dim + index
    return (attention.rank + attention.rope_dim) * element + index


def _state_bytes(layer: Layer) -> int:
    if layer.state is None:
        return 0
    return 2 * layer.state.conv_elements + layer.state.recurrent_bytes * layer.state.recurrent_elements


def _element_bytes(kv_dtype: KvDtype, config: Mapping[str, Any], fields: Fields) -> int:
    """`auto` is 8 bits where the checkpoint brings scales for it, else 16: engines serve 32-bit checkpoints in 16 bits too."""
    if kv_dtype != "auto":
        return _ELEMENT_BYTES[kv_dtype]
    for name in ("quantization_config", "compression_config"):
        for holder in (Fields(config), fields):
            quantization = holder.table(name)
            scheme = quantization.values.get("kv_cache_scheme") or quantization.values.get("kv_cache_quant_algo")
            bits = scheme.get("num_bits") if isinstance(scheme, dict) else 8 if str(scheme).lower() in ("fp8", "int8") else None
            if scheme and bits != 8:
                raise ModelConfigError(f"the model's config has a kv_cache_scheme in {name} that is not known here; say kv_dtype")
            if bits == 8:
                return 1
    return 2


def _notes(growing: int, windows: Mapping[int, int]) -> Iterator[str]:
    if windows:
        spans = ", ".join(f"{tokens:,}" for tokens in sorted(windows))
        yield f"layers with a sliding window ({spans} tokens) hand over no more than their window"
    if not growing:
        yield "no layer's cache grows with the prompt"
