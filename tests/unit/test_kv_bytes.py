"""Bytes of KV cache: figures as published, every way a config.json has to say them, and a clear word where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from engines.kv_bytes import KvDtype, KvShape, Window, kv_shape
from engines.model_fields import ModelConfigError
from planner.advise.models import MODELS

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}
LLAMA_BYTES = 2 * 32 * 8 * 128 * 2


def changed(**fields: object) -> dict[str, Any]:
    """The Llama with some fields changed; None takes one away."""
    return {name: value for name, value in {**LLAMA, **fields}.items() if value is not None}


@pytest.mark.parametrize(
    ("model", "per_token", "tokens", "whole"),
    [
        ("Qwen3-32B", 256 * 1024, 8000, 2_097_152_000),  # published: 256 KiB, 2.1 GB
        ("Qwen3-0.6B", 114_688, 3067, 351_748_096),  # 351.75 MB
        ("Llama-2-7B", 512 * 1024, 4096, 2 << 30),  # 2 GiB
        ("Qwen2.5-1.5B", 28 * 1024, 1, 28 * 1024),
        ("Llama-3.1-70B", 320 * 1024, 1, 320 * 1024),
        ("DeepSeek-V3", 70_272, 1, 70_272),  # this and the next two: arXiv:2505.09343, table 1
        ("Qwen2.5-72B", 327_680, 1, 327_680),
        ("Llama-3.1-405B", 516_096, 1, 516_096),
    ],
)
def test_published_figures_are_met(model: str, per_token: int, tokens: int, whole: int) -> None:
    shape = kv_shape(MODELS[model])
    assert shape == KvShape(per_token)
    assert shape.bytes(tokens) == whole


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        (changed(num_key_value_heads=None), 4 * LLAMA_BYTES),
        (changed(head_dim=64), LLAMA_BYTES // 2),
        (changed(head_dim=None, hidden_size=2048), LLAMA_BYTES // 2),
        (changed(v_head_dim=64), LLAMA_BYTES * 3 // 4),
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, 2 * 12 * 768 * 2),
        ({"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True}, 2 * 40 * 128 * 2),
        ({"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}, 8192),
        (
            {
                "model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8, "hidden_size": 8192,
                "multi_query": True, "new_decoder_architecture": True,
            },
            2 * 60 * 8 * 64 * 2,
        ),
        (
            {
                "model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32, "kv_channels": 128, "hidden_size": 4096,
                "multi_query_attention": True, "multi_query_group_num": 2,
            },
            28 * 1024,
        ),
        ({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096}, 512 * 1024),
        ({"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}}, 2 * 40 * 8 * 128 * 2),
        ({"model_type": "llava", "text_config": LLAMA, "vision_config": {"num_hidden_layers": 24}}, LLAMA_BYTES),
        ({"model_type": "internvl_chat", "llm_config": LLAMA}, LLAMA_BYTES),
        ({"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "x", "text_config": LLAMA}}, LLAMA_BYTES),
        (
            changed(
                model_type="nemotron-nas", num_hidden_layers=2, num_key_value_heads=None,
                block_configs=[{"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True, "n_heads_in_group": None}}],
            ),
            2 * 4 * 128 * 2,
        ),
    ],
)  # fmt: skip
def test_each_family_says_it_in_its_own_words(config: dict[str, Any], per_token: int) -> None:
    assert kv_shape(config) == KvShape(per_token)


@pytest.mark.parametrize(
    ("dtype", "element"),
    [("auto", 2), ("bfloat16", 2), ("float16", 2), ("float32", 4), ("fp8", 1), ("fp8_e4m3", 1), ("fp8_e5m2", 1), ("int8", 1)],
)
def test_the_caches_own_type_decides(dtype: KvDtype, element: int) -> None:
    assert kv_shape(LLAMA, kv_dtype=dtype).bytes_per_token == LLAMA_BYTES // 2 * element


@pytest.mark.parametrize(
    ("quantization", "element"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 1),
        ({"quant_method": "fp8"}, 2),
        ({"quant_method": "awq", "bits": 4, "kv_cache_scheme": None}, 2),
    ],
)
def test_a_checkpoint_that_brings_scales_for_its_cache_is_served_with_8_bits(quantization: dict[str, Any], element: int) -> None:
    config = changed(quantization_config=quantization)
    assert kv_shape(config).bytes_per_token == LLAMA_BYTES // 2 * element
    assert kv_shape({"text_config": LLAMA, "quantization_config": quantization}).bytes_per_token == LLAMA_BYTES // 2 * element
    assert kv_shape(config, kv_dtype="bfloat16").bytes_per_token == LLAMA_BYTES


def test_a_32_bit_checkpoint_is_cached_in_16_bits_as_engines_serve_it() -> None:
    assert kv_shape(changed(torch_dtype="float32")).bytes_per_token == LLAMA_BYTES
    assert kv_shape(changed(torch_dtype=None)).bytes_per_token == LLAMA_BYTES


# ------------------------------------------------------------------------------------------------- tensor parallelism


@pytest.mark.parametrize(("ranks", "times"), [(1, 1), (2, 1), (8, 1), (16, 2), (32, 4)])
def test_more_ranks_than_kv_heads_keep_each_head_several_times(ranks: int, times: int) -> None:
    assert kv_shape(LLAMA, tensor_parallel=ranks).bytes_per_token == times * LLAMA_BYTES


def test_every_rank_keeps_all_of_mlas_vector() -> None:
    assert kv_shape(MODELS["DeepSeek-V3"], tensor_parallel=8).bytes_per_token == 8 * 70_272


def test_heads_that_ranks_cannot_share_are_an_error() -> None:
    with pytest.raises(ModelConfigError, match=r"8 KV heads .* 3 tensor-parallel ranks"):
        kv_shape(LLAMA, tensor_parallel=3)


# ----------------------------------------------------------------------------------------------------- what is bounded


SLIDING = ["sliding_attention"] * 24 + ["full_attention"] * 8


@pytest.mark.parametrize(
    ("config", "growing", "window"),
    [
        (changed(model_type="olmo3", layer_types=SLIDING, sliding_window=1000), 8, 1000),
        (changed(model_type="new", layer_types=SLIDING, sliding_window=1000), 8, 1000),
        (changed(model_type="mistral", sliding_window=4096), 0, 4096),
        (changed(model_type="mistral", sliding_window=None), 32, None),
        (changed(model_type="qwen2", sliding_window=4096, use_sliding_window=False), 32, None),
        (changed(model_type="qwen2", sliding_window=4096, max_window_layers=28), 32, None),
        (changed(model_type="qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=28), 28, 4096),
        (changed(model_type="gemma2", head_dim=128, sliding_window=4096), 16, 4096),
        (changed(model_type="gemma3_text", head_dim=128, sliding_window=512), 5, 512),
        (changed(model_type="gemma3_text", head_dim=128, sliding_window=512, sliding_window_pattern=4), 8, 512),
        (changed(model_type="cohere2", sliding_window=4096), 8, 4096),
        (changed(model_type="gpt_oss", sliding_window=128), 16, 128),
        (changed(model_type="llama4_text", attention_chunk_size=8192), 8, 8192),
        (changed(model_type="llama4_text", attention_chunk_size=8192, no_rope_layers=[1, 1, 1, 0] * 8), 8, 8192),
        (changed(model_type="llama4_text", attention_chunk_size=8192, no_rope_layers=[0] * 32), 32, None),
        (changed(model_type="mimo_v2_flash", sliding_window=128, hybrid_layer_pattern=[0, 1, 1, 1] * 8), 8, 128),
    ],
)
def test_layers_that_slide_are_counted_up_to_their_window(config: dict[str, Any], growing: int, window: int | None) -> None:
    layer = LLAMA_BYTES // 32
    shape = kv_shape(config)
    assert shape.bytes_per_token == growing * layer
    assert shape.windows == (() if window is None else (Window(window, (32 - growing) * layer),))
    for tokens in (1, 100, 5000, 100_000):
        assert shape.bytes(tokens) == layer * (growing * tokens + (32 - growing) * min(tokens, window or 0))


def test_sliding_layers_may_have_heads_of_their_own() -> None:
    shape = kv_shape(
        changed(
            model_type="mimo_v2_flash", num_hidden_layers=2, hybrid_layer_pattern=[0, 1], sliding_window=128, head_dim=192, v_head_dim=128,
            num_key_value_heads=4, swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128,
        )
    )  # fmt: skip
    assert shape.bytes_per_token == 4 * (192 + 128) * 2
    assert shape.windows == (Window(128, 8 * (192 + 128) * 2),)


def test_gemma_4s_full_layers_have_a_head_size_of_their_own() -> None:
    config = changed(model_type="gemma4_text", num_hidden_layers=6, head_dim=256, sliding_window=512, global_head_dim=512)
    assert kv_shape(config).bytes_per_token == 2 * 8 * 512 * 2
    config |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    assert kv_shape(config).bytes_per_token == 2 * 2 * 512 * 2
    config |= {"per_layer_config": {"5": {"head_dim": 128, "num_key_value_heads": 1}}}  # as transformers 5 writes it
    assert kv_shape(config).bytes_per_token == 2 * 128 * 2


def test_layers_that_share_the_kv_of_earlier_ones_keep_none() -> None:
    config = changed(model_type="gemma3n_text", num_hidden_layers=30, head_dim=128, sliding_window=512, num_kv_shared_layers=10)
    layer = LLAMA_BYTES // 32
    assert kv_shape(config).bytes_per_token == 4 * layer
    assert kv_shape(config).windows == (Window(512, 16 * layer),)


def test_a_published_gemma_3_leaves_out_what_its_family_takes_for_granted() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
    }
    assert kv_shape(config).bytes_per_token == 5 * 2 * 4 * 256 * 2
    assert kv_shape(config).windows == (Window(1024, 29 * 2 * 4 * 256 * 2),)


MAMBA2 = {"mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_heads": 64, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_head": 128}


@pytest.mark.parametrize(
    ("config", "growing", "state"),
    [
        # Qwen3-Next: 3 · (2 · 2048 + 4096) of convolution and 32 · 128 · 128 of state, 36 layers of 48
        (MODELS["Qwen3-Next-80B-A3B"], 12 * 2 * 2 * 256 * 2, 36 * 2 * (3 * 8192 + 32 * 128 * 128)),
        (MODELS["Qwen3-Next-80B-A3B"] | {"mamba_ssm_dtype": "float32"}, 24_576, 36 * (2 * 3 * 8192 + 4 * 32 * 128 * 128)),
        (changed(model_type="bamba", attn_layer_indices=[9, 18, 27], **MAMBA2), 3 * 4096, 29 * 2 * (3 * (8192 + 256) + 8192 * 128)),
        (
            changed(model_type="granitemoehybrid", layer_types=["mamba"] * 28 + ["attention"] * 4, **MAMBA2),
            4 * 4096, 28 * 2 * (3 * (8192 + 256) + 8192 * 128),
        ),
        (changed(model_type="falcon_h1", mamba_d_ssm=1024, **MAMBA2), 32 * 4096, 32 * 2 * (3 * (1024 + 256) + 1024 * 128)),
        (
            changed(model_type="jamba", attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2),
            4 * 4096, 28 * 2 * (3 * 8192 + 8192 * 16),
        ),
        (
            changed(
                model_type="nemotron_h", hybrid_override_pattern="M-M*-E", num_hidden_layers=6, ssm_state_size=128, conv_kernel=4,
                mamba_num_heads=128, mamba_head_dim=64, n_groups=8, mamba_ssm_cache_dtype="float32", head_dim=128,
            ),
            4096, 2 * (2 * 3 * (8192 + 2 * 8 * 128) + 4 * 8192 * 128),
        ),
        (
            {
                "model_type": "kimi_linear", "num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 2304, "kv_lora_rank": 512,
                "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
                "linear_attn_config": {
                    "full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
                },
            },
            576 * 2, 3 * (2 * 3 * 3 * 4096 + 4 * 4096 * 128),
        ),
        (changed(model_type="lfm2", full_attn_idxs=[2, 5], conv_L_cache=3), 2 * 4096, 30 * 2 * 2 * 4096),
        ({"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 1024, "expand": 2, "num_heads": 32, "head_dim": 64,
          "state_size": 128, "conv_kernel": 4, "n_groups": 1}, 0, 2 * 2 * (3 * (2048 + 256) + 2048 * 128)),
        ({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2048, "state_size": 16,
          "conv_kernel": 4}, 0, 2 * 2 * (3 * 2048 + 2048 * 16)),
    ],
)  # fmt: skip
def test_a_state_is_the_same_for_every_prompt(config: dict[str, Any], growing: int, state: int) -> None:
    shape = kv_shape(config)
    assert (shape.bytes_per_token, shape.windows, shape.state_bytes) == (growing, (), state)
    assert shape.bytes(0) == 0
    assert shape.bytes(1000) == 1000 * growing + state


def test_an_indexers_keys_are_kept_beside_mlas_vector() -> None:
    config = MODELS["DeepSeek-V3"] | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
    assert kv_shape(config).bytes_per_token == 61 * (2 * 576 + 132)
    assert kv_shape(config, kv_dtype="fp8").bytes_per_token == 61 * (656 + 132)  # vLLM's fp8_ds_mla: 512 + 16 of scales + 2 · 64
    assert kv_shape(config | {"index_topk_pattern": "F" + "S" * 60}).bytes_per_token == 61 * 2 * 576 + 132
    assert kv_shape(config | {"index_topk_freq": 4}).bytes_per_token == 61 * 2 * 576 + 16 * 132


# ----------------------------------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no num_hidden_layers"),
        (changed(num_hidden_layers=None), "no num_hidden_layers"),
        (changed(num_attention_heads=None), "no num_attention_heads"),
        (changed(hidden_size=None), "no hidden_size"),
        (changed(hidden_size=4097), "no head_dim, and hidden_size 4097 is no multiple of its 32 heads"),
        (changed(num_hidden_layers="32"), "num_hidden_layers = '32', expected a whole number above 0"),
        (changed(num_hidden_layers=True), "num_hidden_layers = True"),
        (changed(num_key_value_heads=-1), "num_key_value_heads = -1"),
        (changed(num_hidden_layers=10**9), "1000000000 layers"),
        (changed(model_type=7), "model_type = 7"),
        (changed(kv_lora_rank=512), "no qk_nope_head_dim"),
        (changed(layer_types=["full_attention"] * 3), "32 layers, but layer_types tells of 3"),
        (changed(layer_types="full"), "layer_types = 'full', expected a list"),
        (changed(layer_types=["full_attention"] * 31 + ["holographic"]), "'holographic' in layer_types"),
        (changed(layer_types=[{}] * 32), "{} in layer_types"),
        (changed(layer_types=["sliding_attention"] * 32), "no sliding_window"),
        (changed(layer_types=["mamba"] * 32), "no field of 'llama' tells their state's size"),
        (changed(hybrid_override_pattern="M?"), "'?' in hybrid_override_pattern"),
        (changed(model_type="new", sliding_window=4096), "sliding_window, but no layer_types"),
        (changed(model_type="exaone4"), "no layer_types, and the layers of 'exaone4' are not all of one kind"),
        (changed(model_type="new", mamba_d_state=128), "'new' is not known here, and mamba_d_state"),
        (changed(model_type="zamba2"), "model_type 'zamba2', whose cache is not known here"),
        (changed(compress_ratios=[4, 128]), "compress_ratios"),
        (changed(model_type="t5", is_encoder_decoder=True), "is_encoder_decoder"),
        (changed(cross_attention_layers=[3]), "cross_attention_layers"),
        (changed(quantization_config={"kv_cache_scheme": {"num_bits": 4}}), "kv_cache_scheme in quantization_config .* say kv_dtype"),
        (changed(model_type="bamba", attn_layer_indices=["a"], **MAMBA2), "attn_layer_indices = .*, expected whole numbers"),
    ],
)
def test_what_a_config_does_not_tell_is_an_error_that_names_the_field(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelConfigError, match=words):
        kv_shape(config)


def test_a_family_that_is_not_known_is_read_by_the_usual_fields_and_says_so() -> None:
    assert kv_shape(LLAMA).notes == ()
    shape = kv_shape(changed(model_type="brand_new"))
    assert shape.bytes_per_token == LLAMA_BYTES
    assert shape.notes == ("model_type 'brand_new' is not known here: its layers are read by the usual fields",)
