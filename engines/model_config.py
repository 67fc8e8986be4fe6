"""What does a model's `config.json` say of its layers? Families name the same thing differently; here each thing has one name.

    {"model_type": "qwen3", "num_hidden_layers": 28, "num_key_value_heads": 8, …}  ──read_model──▶  Model(layers=(Layer(…), …), …)

Only what is written there counts, and what the field's own library (transformers) takes for granted where a family leaves it out.
A layer whose cache cannot be told is an error that names the field, never a guess. What is a guess after all, is among the `notes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from engines.model_families import DEFAULTS, EVERY_LAYER_SLIDES, KNOWN, LAYERED, NESTED, OTHERWISE, STATE_ONLY, SUSPICIOUS, UNREADABLE
from engines.model_fields import Fields, ModelConfigError, entry, shown
from engines.model_states import State, read_state

MlpKind = Literal["dense", "experts", "none"]


class Attention(msgspec.Struct, frozen=True):
    """Multi-head, grouped-query or multi-query attention: one key and one value vector per KV head and token."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    """Tokens that are looked back at; None looks at all of them."""
    keeps_cache: bool = True
    """False where the layer reads the KV of an earlier one."""


class LatentAttention(msgspec.Struct, frozen=True):
    """Multi-head latent attention (MLA): one compressed vector per token, whatever the number of heads."""

    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    v_head_dim: int
    q_rank: int | None
    sparse: bool
    """Looks only at the tokens that an indexer picks (DeepSeek-V3.2)."""
    index_dim: int = 0
    """Size of the indexer's own key per token; 0 where this layer has none."""


class Layer(msgspec.Struct, frozen=True):
    """One decoder layer; some have a state beside their attention."""

    attention: Attention | LatentAttention | None = None
    state: State | None = None
    mlp: MlpKind = "dense"


class Model(msgspec.Struct, frozen=True):
    """A language model, or the language part of a multimodal one."""

    model_type: str
    layers: tuple[Layer, ...]
    fields: Fields
    """What the layers were read from, for whoever asks more."""
    notes: tuple[str, ...]
    """What had to be taken for granted, in words."""


MOST_LAYERS: Final = 10_000

_MLA: Final = "kv_lora_rank"


def read_model(config: Mapping[str, Any]) -> Model:
    """The language model that a `config.json`'s object describes. Raises ModelConfigError."""
    values: Mapping[str, Any] = config
    while nested := next((values[name] for name in NESTED if isinstance(values.get(name), dict)), None):
        values = nested
    model_type = values.get("model_type") or config.get("model_type") or ""
    if not isinstance(model_type, str):
        raise ModelConfigError(f"the model's config has model_type = {shown(model_type)}, expected text")
    if model_type in OTHERWISE:
        raise ModelConfigError(f"the model's config has model_type {model_type!r}, whose cache is not known here")
    told = {name: value for name, value in values.items() if value is not None}
    fields = Fields({**DEFAULTS.get(model_type, {}), **told})
    for name, what in UNREADABLE.items():
        if fields.values.get(name):
            raise ModelConfigError(f"the model's config has {name}: {what}, whose cache is not known here")
    notes = tuple(_notes(model_type, fields))
    return Model(model_type, tuple(_layers(model_type, fields)), fields, notes)


def _notes(model_type: str, fields: Fields) -> Iterator[str]:
    if model_type in KNOWN:
        return
    name = f"model_type {model_type!r}" if model_type else "a config without model_type"
    if not any(told in fields for told in _LISTS):
        for field in fields.values:
            if field in fields and any(part in field for part in SUSPICIOUS):
                raise ModelConfigError(f"{name} is not known here, and {field} tells of layers that may be no plain attention")
    yield f"{name} is not known here: its layers are read by the usual fields"


# ------------------------------------------------------------------------------------------------------------ layers

_LISTS: Final = ("layer_types", "layers_block_type", "hybrid_override_pattern", "hybrid_layer_pattern", "attn_type_list", "block_configs")

_KINDS: Final = {
    "full_attention": "full", "attention": "full", "indexed_attention": "full", "deepseek_sparse_attention": "full",
    "sliding_attention": "window", "chunked_attention": "chunk",
    "linear_attention": "state", "mamba": "state", "mamba2": "state", "conv": "state",
    "hybrid": "both", "mlp": "mlp", "moe": "moe",
}  # fmt: skip
_PATTERN: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Nemotron-H's letters."""


def _layers(model_type: str, fields: Fields) -> Iterator[Layer]:
    kinds = _kinds(model_type, fields)
    alone = any(kind in ("mlp", "moe") for kind in kinds)  # Nemotron-H: a layer is a mixer or an MLP, not one after the other
    shared_from = len(kinds) - fields.count("num_kv_shared_layers")
    overrides = fields.table("per_layer_config")  # as transformers 5 writes layers that differ
    for index, kind in enumerate(kinds):
        own = Fields({**fields.values, **overrides.table(str(index)).values})
        attention = _attention(model_type, own, kind, index, keeps_cache=index < shared_from)
        state = read_state(model_type, fields) if kind in ("state", "both") else None
        mlp: MlpKind
        match kind:
            case "mlp":
                mlp = "dense"
            case "moe":
                mlp = "experts"
            case _:
                mlp = "none" if alone or model_type in ("mamba", "mamba2", "falcon_mamba") else _mlp_kind(fields, index)
        yield Layer(attention, state, mlp)


def _kinds(model_type: str, fields: Fields) -> list[str]:
    """What each layer is: a value of `_KINDS`, or `none`."""
    if pattern := fields.text("hybrid_override_pattern"):
        return [_kind(_PATTERN.get(letter, letter), "hybrid_override_pattern") for letter in pattern]
    if model_type == "nemotron_h" and (told := fields.items("layers_block_type")):
        return [_kind(one, "layers_block_type") for one in told]
    layers = fields.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if layers > MOST_LAYERS:
        raise ModelConfigError(f"the model's config has {layers} layers (num_hidden_layers), more than any model has")
    for name in ("layer_types", "layers_block_type"):
        if (told := fields.items(name, layers)) is not None:
            return [_kind(one, name) for one in told]
    if (told := fields.items("attn_type_list", layers)) is not None:
        return ["full" if one == 1 else "state" for one in told]
    if (told := fields.items("hybrid_layer_pattern", layers)) is not None:
        return ["window" if one == 1 else "full" for one in told]
    if (told := fields.items("block_configs", layers)) is not None:
        return ["none" if entry(one).table("attention").values.get("no_op") else "full" for one in told]
    return _by_rule(model_type, fields, layers)


def _kind(name: object, field: str) -> str:
    if not isinstance(name, str) or name not in _KINDS:
        raise ModelConfigError(f"the model's config has {shown(name)} in {field}, a kind of layer that is not known here")
    return _KINDS[name]


def _by_rule(model_type: str, fields: Fields, layers: int) -> list[str]:
    """Layers that a period or a list of exceptions tells of, not one by one."""
    other = "state"
    if model_type in STATE_ONLY:
        return ["state"] * layers
    if model_type == "falcon_h1":
        return ["both"] * layers
    is_full: Callable[[int], bool]
    if "full_attention_interval" in fields:
        period = fields.whole("full_attention_interval")
        is_full = lambda index: (index + 1) % period == 0  # noqa: E731  one of several rules
    elif "attn_layer_period" in fields:
        period, offset = fields.whole("attn_layer_period"), fields.count("attn_layer_offset")
        is_full = lambda index: index % period == offset  # noqa: E731
    elif (chosen := _chosen(fields)) is not None:
        is_full = lambda index: index in chosen  # noqa: E731
    elif "attention_chunk_size" in fields and model_type == "llama4_text":
        told, period, other = fields.items("no_rope_layers", layers), fields.whole("no_rope_layer_interval"), "chunk"
        is_full = lambda index: not told[index] if told else (index + 1) % period == 0  # noqa: E731
    else:
        return _by_window(model_type, fields, layers)
    return ["full" if is_full(index) else other for index in range(layers)]


def _chosen(fields: Fields) -> frozenset[int] | None:
    """The layers that are full attention, counted from 0, where a list names them."""
    linear = fields.table("linear_attn_config")
    if "full_attn_layers" in linear:  # Kimi Linear counts from 1
        return frozenset(one - 1 for one in linear.indices("full_attn_layers"))
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if name in fields:
            return frozenset(fields.indices(name))
    return None


def _by_window(model_type: str, fields: Fields, layers: int) -> list[str]:
    if model_type in LAYERED:
        raise ModelConfigError(f"the model's config has no layer_types, and the layers of {model_type!r} are not all of one kind")
    if "sliding_window" not in fields or fields.values.get("use_sliding_window") is False:
        return ["full"] * layers
    if "sliding_window_pattern" in fields:
        period = fields.whole("sliding_window_pattern")
        return ["window" if (index + 1) % period else "full" for index in range(layers)]
    if model_type in EVERY_LAYER_SLIDES:
        return ["window"] * layers
    if "use_sliding_window" in fields:  # Qwen's: the first layers look at everything
        first = fields.count("max_window_layers")
        return ["full" if index < first else "window" for index in range(layers)]
    if model_type.startswith(("qwen2", "qwen3")):
        return ["full"] * layers
    raise ModelConfigError(f"the model's config has sliding_window, but no layer_types to tell in which layers of {model_type!r} it holds")


# ------------------------------------------------------------------------------------------------- attention and MLP


def _attention(model_type: str, fields: Fields, kind: str, index: int, *, keeps_cache: bool) -> Attention | LatentAttention | None:
    if kind not in ("full", "window", "chunk", "both"):
        return None
    if _MLA in fields:
        return _latent(fields, index)
    window = {"window": ("sliding_window", "sliding_window_size"), "chunk": ("attention_chunk_size",)}.get(kind)
    heads, kv_heads, head_dim, v_head_dim = _heads(model_type, fields, index, slides=kind == "window")
    return Attention(heads, kv_heads, head_dim, v_head_dim, fields.whole(*window) if window else None, keeps_cache)


def _heads(model_type: str, fields: Fields, index: int, *, slides: bool) -> tuple[int, int, int, int]:
    """Query heads, KV heads, size of a key, size of a value."""
    heads = fields.whole("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _kv_heads(model_type, fields, heads, index)
    if any(name in fields for name in ("head_dim", "kv_channels", "attention_head_dim", "hidden_size_per_head")):
        head_dim = fields.whole("head_dim", "kv_channels", "attention_head_dim", "hidden_size_per_head")
    else:
        hidden = fields.whole("hidden_size", "n_embd", "d_model")
        if hidden % heads:
            raise ModelConfigError(f"the model's config has no head_dim, and hidden_size {hidden} is no multiple of its {heads} heads")
        head_dim = hidden // heads
    if slides and "swa_num_key_value_heads" in fields:  # MiMo-V2: sliding layers of another shape
        heads, kv_heads = fields.whole("swa_num_attention_heads", default=heads), fields.whole("swa_num_key_value_heads")
        head_dim = fields.whole("swa_head_dim", default=head_dim)
        return heads, kv_heads, head_dim, fields.whole("swa_v_head_dim", "v_head_dim", default=head_dim)
    if not slides and "global_head_dim" in fields and "per_layer_config" not in fields:  # Gemma 4: full layers of another shape
        head_dim = fields.whole("global_head_dim")
        if fields.values.get("attention_k_eq_v"):
            kv_heads = fields.whole("num_global_key_value_heads", default=kv_heads)
    return heads, kv_heads, head_dim, fields.whole("v_head_dim", default=head_dim)


def _kv_heads(model_type: str, fields: Fields, heads: int, index: int) -> int:
    if blocks := fields.items("block_configs"):
        return max(1, heads // entry(blocks[index]).table("attention").whole("n_heads_in_group"))
    if fields.values.get("multi_query") and not fields.values.get("new_decoder_architecture"):  # Falcon, StarCoder
        return 1
    if model_type in ("chatglm", "glm") and fields.values.get("multi_query_attention") is False:
        return heads
    grouped = fields.table("attn_config").whole("kv_n_heads", default=heads)  # DBRX, MPT
    return fields.whole(
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups", default=grouped
    )


def _latent(fields: Fields, index: int) -> LatentAttention:
    nope = fields.whole("qk_nope_head_dim")
    return LatentAttention(
        heads=fields.whole("num_attention_heads"),
        rank=fields.whole(_MLA),
        rope_dim=fields.whole("qk_rope_head_dim"),
        nope_dim=nope,
        v_head_dim=fields.whole("v_head_dim", default=nope),
        q_rank=fields.whole("q_lora_rank") if "q_lora_rank" in fields else None,
        sparse="index_head_dim" in fields,
        index_dim=fields.whole("index_head_dim") if "index_head_dim" in fields and _has_indexer(fields, index) else 0,
    )


def _has_indexer(fields: Fields, index: int) -> bool:
    """Whether the layer picks tokens itself, rather than take those another one has picked."""
    if pattern := fields.text("index_topk_pattern"):
        return pattern[index : index + 1] != "S"
    return max(index - fields.count("index_skip_topk_offset", 2) + 1, 0) % fields.whole("index_topk_freq", default=1) == 0


def _mlp_kind(fields: Fields, index: int) -> MlpKind:
    if not experts(fields):
        return "dense"
    if (told := fields.items("mlp_layer_types")) is not None and index < len(told):
        return "dense" if told[index] == "dense" else "experts"
    if "moe_layers" in fields:
        return "experts" if index in fields.indices("moe_layers") else "dense"
    if index in fields.indices("mlp_only_layers") or index < fields.count("first_k_dense_replace"):
        return "dense"
    if isinstance(freq := fields.values.get("moe_layer_freq"), list):  # MiMo-V2 has one for each layer, DeepSeek a period
        return "experts" if freq[index : index + 1] == [1] else "dense"
    if "expert_layer_period" in fields:  # Jamba
        return "experts" if index % fields.whole("expert_layer_period") == fields.count("expert_layer_offset") else "dense"
    period = fields.whole("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1)
    return "experts" if (index + 1) % period == 0 else "dense"


def experts(fields: Fields) -> int:
    """How many routed experts a layer of them has; 0 in a dense model."""
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    return next((count for name in names if (count := fields.count(name))), fields.table("ffn_config").count("moe_num_experts"))
