"""Which layers does a config.json describe, and which of them are dense, which experts?"""

from __future__ import annotations

from typing import Any

import pytest

from engines.model_config import Layer, MlpKind, read_model

BASE: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 8, "hidden_size": 32}
MOE = BASE | {"num_experts": 8}
DEEPSEEK = {"n_routed_experts": 8, "first_k_dense_replace": 2, "moe_layer_freq": 1}


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        (BASE, []),
        (BASE | {"num_local_experts": 0}, []),
        (MOE, [0, 1, 2, 3, 4, 5]),
        (MOE | {"decoder_sparse_step": 2}, [1, 3, 5]),
        (MOE | {"mlp_only_layers": [0, 3]}, [1, 2, 4, 5]),
        (BASE | DEEPSEEK, [2, 3, 4, 5]),
        (MOE | {"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, [1, 2, 4, 5]),
        (MOE | {"interleave_moe_layer_step": 2}, [1, 3, 5]),
        (MOE | {"moe_layers": [1, 5]}, [1, 5]),
        (MOE | {"expert_layer_period": 2, "expert_layer_offset": 0}, [0, 2, 4]),
        (MOE | {"mlp_layer_types": ["dense"] * 4 + ["sparse", "moe"]}, [4, 5]),
        (BASE | {"ffn_config": {"moe_num_experts": 16}}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layers_of_experts_are_where_the_config_puts_them(fields: dict[str, Any], experts: list[int]) -> None:
    kinds: list[MlpKind] = [layer.mlp for layer in read_model({"model_type": "llama", **fields}).layers]
    assert kinds == ["experts" if index in experts else "dense" for index in range(6)]


NEMOTRON = BASE | {
    "model_type": "nemotron_h",
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_routed_experts": 4,
}


@pytest.mark.parametrize(
    "told", [{"hybrid_override_pattern": "M-*E"}, {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}, {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}]
)  # fmt: skip
def test_a_layer_of_nemotron_h_is_one_thing_each(told: dict[str, Any]) -> None:
    def shape(layer: Layer) -> tuple[bool, bool, str]:
        return layer.attention is not None, layer.state is not None, layer.mlp

    layers = read_model(NEMOTRON | told | {"num_hidden_layers": 4}).layers
    assert [shape(layer) for layer in layers] == [
        (False, True, "none"),
        (False, False, "dense"),
        (True, False, "none"),
        (False, False, "experts"),
    ]


def test_a_number_written_with_a_point_is_a_number() -> None:
    assert len(read_model({"model_type": "llama", **BASE, "num_hidden_layers": 6.0}).layers) == 6


def test_a_list_of_attention_types_counts_from_linear() -> None:
    config = {"model_type": "minimax_m2", **BASE, "attn_type_list": [1] * 6}
    assert all(layer.attention for layer in read_model(config).layers)


def test_a_chatglm_without_multi_query_has_as_many_kv_heads_as_heads() -> None:
    config = {"model_type": "chatglm", **BASE, "multi_query_attention": False, "multi_query_group_num": 2}
    (attention,) = {layer.attention for layer in read_model(config).layers}
    assert attention is not None
    assert getattr(attention, "kv_heads", None) == 4
