"""Does disaggregation pay? The parts of the estimate, and that the verdict follows from them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engines.kv_bytes import kv_shape
from engines.links import EFFICIENCY, NOMINAL, Link, UnknownLink, parse_link
from engines.model_config import read_model
from engines.model_fields import Fields, ModelConfigError
from planner.advise.estimate import EVEN, Estimate, Question, estimate, seconds, size
from planner.advise.gpus import GPUS, MEMORY_UTILISATION, UTILISATION
from planner.advise.models import MODELS, known_model
from planner.advise.timing import Hardware, Work, before, beside, steps_of
from planner.advise.weights import bytes_per_parameter, count

H100 = Hardware(GPUS["H100"].flops * UTILISATION, GPUS["H100"].bytes_per_s * MEMORY_UTILISATION)
QUESTION = Question(
    prompt_tokens=8000, output_tokens=256, streams=16, link=parse_link("100GbE"), hardware=H100, batched_tokens=8192
)  # fmt: skip


def work(name: str) -> Work:
    config = MODELS[name]
    model = read_model(config)
    return Work(model, count(model, bytes_per_parameter(Fields(config))), kv_shape(config))


def asked(model: str, **changes: object) -> Estimate:
    return estimate(work(model), msgspec.structs.replace(QUESTION, **changes))


# ------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("104MB/s", 104e6),
        ("900GB/s", 900e9),
        ("1.5 GiB/s", 1.5 * 1024**3),
        ("500kB/s", 500e3),
        ("500KB/s", 500e3),
        ("2TB/s", 2e12),
        ("7B/s", 7),
        ("10Gb/s", 1.25e9),
        ("10Gbps", 1.25e9),
        ("100MBps", 100e6),
    ],
)
def test_a_rate_is_taken_as_it_is_written(text: str, bytes_per_s: float) -> None:
    link = parse_link(text)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)
    assert (link.name, link.efficiency) == (text, 1.0)


@pytest.mark.parametrize(
    ("name", "nominal"),
    [("1GbE", 125e6), ("10gbe", 1.25e9), ("25GbE", 3.125e9), ("100GBE", 12.5e9), ("400GbE", 50e9), ("NDR", 50e9), ("nvlink", 450e9), ("PCIe4", 31.5e9)],
)  # fmt: skip
def test_a_named_link_carries_a_stated_share_of_its_nominal_rate(name: str, nominal: float) -> None:
    link = parse_link(name)
    assert link.bytes_per_s == pytest.approx(EFFICIENCY * nominal)
    assert link.efficiency == EFFICIENCY
    assert link.name in NOMINAL


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("100", "'100' is neither a rate such as 104MB/s nor one of 1GbE, "),
        ("100GbB", "did you mean '100GbE'?"),
        ("", "neither"),
        ("-5MB/s", "neither"),
        ("0MB/s", "'0MB/s' carries nothing"),
        ("nanMB/s", "neither"),
        ("1e3MB/s", "neither"),
        ("104MB", "neither"),
    ],
)
def test_what_is_no_link_is_an_error_that_says_what_is_one(text: str, words: str) -> None:
    with pytest.raises(UnknownLink, match=words.replace("?", r"\?")):
        parse_link(text)


# ----------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        # as their authors give them, in billions
        ("Qwen3-0.6B", 0.6, 0.6),
        ("Qwen3-8B", 8.2, 8.2),
        ("Qwen3-32B", 32.8, 32.8),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen3-235B-A22B", 235, 22),
        ("Qwen3-Next-80B-A3B", 80, 3.9),
        ("Qwen2.5-1.5B", 1.54, 1.54),
        ("Llama-2-7B", 6.74, 6.74),
        ("Llama-3.1-8B", 8.03, 8.03),
        ("Llama-3.1-70B", 70.6, 70.6),
        ("Llama-3.1-405B", 405, 405),
        ("Mixtral-8x7B", 46.7, 12.9),
        ("DeepSeek-V3", 671, 37),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
        ("Gemma-3-27B", 27, 27),
    ],
)
def test_the_weights_counted_from_the_config_are_those_of_the_model(model: str, total: float, active: float) -> None:
    weights = work(model).weights
    assert weights.total / 1e9 == pytest.approx(total, rel=0.02)
    # some count the embeddings among the active ones
    assert (weights.active + weights.head) / 1e9 <= active * 1.02
    assert (weights.active + weights.head + weights.embeddings) / 1e9 >= active * 0.95


SMALL: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 100,
}  # fmt: skip
ATTENTION = 4 * 32 * 32


@pytest.mark.parametrize(
    ("fields", "always", "routed"),
    [
        ({"model_type": "llama"}, 2 * (ATTENTION + 3 * 32 * 64), 0),
        ({"model_type": "gpt_neox"}, 2 * (ATTENTION + 2 * 32 * 64), 0),
        ({"model_type": "opt", "ffn_dim": 80, "intermediate_size": None}, 2 * (ATTENTION + 2 * 32 * 80), 0),
        ({"model_type": "bloom", "intermediate_size": None}, 2 * (ATTENTION + 2 * 32 * 128), 0),
        ({"model_type": "gemma3n_text", "intermediate_size": [64, 128], "num_kv_shared_layers": 1}, 2 * ATTENTION - 2 * 32 * 32 + 2 * 3 * 32 * 96, 0),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, 2 * (ATTENTION + 32 * 4), 2 * 4 * 3 * 32 * 64),
        (
            {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 24},
            2 * (ATTENTION + 32 * 4 + 3 * 32 * 24), 2 * 4 * 3 * 32 * 8,
        ),
        (
            {"model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96},
            2 * ATTENTION + 3 * 32 * 96 + 32 * 4 + 3 * 32 * 64, 4 * 3 * 32 * 64,
        ),
        (
            {"model_type": "dbrx", "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
            2 * (ATTENTION + 32 * 4), 2 * 4 * 3 * 32 * 48,
        ),
    ],
)  # fmt: skip
def test_each_family_has_mlps_of_its_own(fields: dict[str, Any], always: int, routed: int) -> None:
    weights = count(read_model(SMALL | fields), 2.0)
    assert (weights.always, weights.routed) == (always, routed)


def test_experts_that_nobody_counts_are_an_error() -> None:
    config = SMALL | {"model_type": "nemotron_h", "hybrid_override_pattern": "E*"}
    with pytest.raises(ModelConfigError, match="layers of experts, but no num_experts"):
        count(read_model(config), 2.0)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    weights = work("Mixtral-8x7B").weights
    one = 2 * (weights.active + weights.head)
    assert weights.read_bytes(1) == pytest.approx(one)
    assert one < weights.read_bytes(4) < weights.read_bytes(64) == pytest.approx(2 * (weights.total - weights.embeddings))


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, 2),
        ({"quant_method": "fp8"}, 1),
        ({"quant_method": "mxfp4"}, 0.53125),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 1),
        ({"quant_method": "something"}, 2),
    ],
)
def test_weights_take_the_bits_that_the_checkpoint_says(quantization: object, expected: float) -> None:
    assert bytes_per_parameter(Fields({"quantization_config": quantization})) == expected


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "moe_intermediate_size", "num_experts_per_tok"])
def test_what_is_needed_to_count_weights_is_named(field: str) -> None:
    config = {name: value for name, value in MODELS["Qwen3-30B-A3B"].items() if name not in (field, "intermediate_size")}
    with pytest.raises(ModelConfigError, match=field):
        count(read_model(config), 2.0)


# ------------------------------------------------------------------------------------------------------------ timing


def test_a_prefills_operations_are_two_for_each_weight_and_four_for_each_pair_of_tokens_per_width() -> None:
    llama = work("Llama-2-7B")
    weights = llama.weights
    linear = 2 * weights.active * 4096 + 2 * weights.head
    assert llama.flops(4096) == linear + 32 * 4 * 4096 * (4096 * 4097 // 2)


def test_each_token_looks_at_no_more_than_its_window() -> None:
    gpt = work("gpt-oss-20b")
    linear = 2 * gpt.weights.active * 1000 + 2 * gpt.weights.head
    pairs = 12 * sum(range(1, 1001)) + 12 * sum(min(token, 128) for token in range(1, 1001))
    assert gpt.flops(1000) == linear + 4 * 64 * 64 * pairs


def test_mla_compares_what_its_heads_are_given_and_not_what_is_kept() -> None:
    deepseek = work("DeepSeek-V3")
    linear = 2 * deepseek.weights.active * 1000 + 2 * deepseek.weights.head
    assert deepseek.flops(1000) == linear + 61 * 2 * 128 * (128 + 64 + 128) * sum(range(1, 1001))


@pytest.mark.parametrize("name", ["Gemma-3-27B", "gpt-oss-120b"])
def test_a_window_bounds_how_many_tokens_are_looked_at(name: str) -> None:
    config = MODELS[name]
    wide = Work(read_model(_without_windows(config)), work(name).weights, work(name).kv)
    assert work(name).flops(100) == wide.flops(100)
    assert work(name).flops(50_000) < wide.flops(50_000)


def _without_windows(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config", config)
    return text | {"layer_types": ["full_attention"] * text["num_hidden_layers"]}


def test_a_short_prompt_takes_as_long_as_reading_the_weights() -> None:
    llama = work("Llama-3.1-8B")
    assert llama.prefill_s(1, H100) == pytest.approx(2 * (llama.weights.total - llama.weights.embeddings) / H100.bytes_per_s)
    assert llama.prefill_s(8000, H100) == pytest.approx(llama.flops(8000) / H100.flops)


def test_the_estimate_is_near_a_published_prefill_rate() -> None:
    """SGLang, DeepSeek-V3, 2,000-token prompts: 52,300 tokens/s on 8 H100 (lmsys.org/blog/2025-05-05-large-scale-ep)."""
    deepseek = work("DeepSeek-V3")
    compute = 8 * H100.flops
    assert 52_300 / 2 < 2000 / (deepseek.flops(2000) / compute) < 52_300 * 2


def test_a_chunk_that_takes_no_longer_than_reading_the_weights_delays_nobody() -> None:
    local = beside(prefill_s=0.004, weights_s=0.005, caches_s=0.001, steps=1)
    assert local == beside(prefill_s=0.001, weights_s=0.005, caches_s=0.001, steps=1)
    assert local.prefill_s == pytest.approx(0.006)
    assert local.delay_s == 0


def test_what_a_prefill_computes_beyond_the_steps_own_reading_delays_each_stream() -> None:
    local = beside(prefill_s=1.0, weights_s=0.01, caches_s=0.02, steps=4)
    assert local.prefill_s == pytest.approx(1.08)
    assert local.delay_s == pytest.approx(0.96)


def test_a_prefill_that_goes_first_delays_each_stream_by_all_of_it() -> None:
    local = before(1.5)
    assert (local.steps, local.prefill_s, local.delay_s) == (1, 1.5, 1.5)


def test_streams_take_their_place_in_each_step() -> None:
    assert steps_of(8000, 8192, 16) == 1
    assert steps_of(8000, 2048, 48) == 4
    assert steps_of(8001, 2048, 48) == 5
    with pytest.raises(ValueError, match="16 streams leave no token"):
        steps_of(1, 16, 16)


# ----------------------------------------------------------------------------------------------------------- verdict


@pytest.mark.parametrize(
    ("model", "tokens", "link", "transfer_s"),
    [
        # as published
        ("Qwen3-0.6B", 3067, "104MB/s", 3.4),
        ("Llama-2-7B", 4096, "900GB/s", 0.0024),
        ("Llama-2-7B", 4096, "50GB/s", 0.043),
    ],
)
def test_published_transfer_times_are_met(model: str, tokens: int, link: str, transfer_s: float) -> None:
    assert asked(model, prompt_tokens=tokens, link=parse_link(link)).transfer_s == pytest.approx(transfer_s, rel=0.01)


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen2.5-0.5B", "Qwen2.5-1.5B"])
@pytest.mark.parametrize("tokens", [100, 3067, 30_000])
@pytest.mark.parametrize("streams", [0, 1, 16, 64])
@pytest.mark.parametrize("batched", [8192, None])
def test_on_1gbe_a_small_model_loses(model: str, tokens: int, streams: int, batched: int | None) -> None:
    assert asked(model, prompt_tokens=tokens, streams=streams, batched_tokens=batched, link=parse_link("1GbE")).verdict == "does not pay"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "pays"),
        ({"link": parse_link("NVLink")}, "pays"),
        ({"link": parse_link("1GbE")}, "does not pay"),
        ({"streams": 0, "link": parse_link("10GbE")}, "does not pay"),
        ({"streams": 0, "link": parse_link("NVLink")}, "about even"),
        ({"prompt_tokens": 20, "link": parse_link("NVLink"), "streams": 1}, "about even"),
    ],
)
def test_the_verdict_follows_prompt_streams_and_link(changes: dict[str, Any], verdict: str) -> None:
    assert asked("Qwen3-32B", **changes).verdict == verdict


def test_remote_is_prefill_and_transfer_and_local_is_prefill_and_everybodys_delay() -> None:
    found = asked("Qwen3-32B")
    assert found.remote_s == found.prefill_s + found.transfer_s
    assert found.local_s == found.local_prefill_s + 16 * found.delay_per_stream_s
    assert found.interference_s == 16 * found.delay_per_stream_s
    assert found.kv_bytes == 8000 * found.kv_bytes_per_token


def test_about_even_ends_where_the_difference_is_larger_than_the_estimate_is_good() -> None:
    prefill_s = asked("Qwen3-32B", streams=0).local_s
    for difference, verdict in ((EVEN * 0.9, "about even"), (EVEN * 1.2, "does not pay")):
        link = Link("as needed", 2_097_152_000 / (difference * prefill_s), 1.0)
        assert asked("Qwen3-32B", streams=0, link=link).verdict == verdict


def test_a_link_that_cannot_carry_the_prompts_of_all_streams_does_not_pay_however_long_the_prefill() -> None:
    found = asked("Qwen3-32B", link=parse_link("10GbE"))
    assert found.remote_s < found.local_s
    assert found.needed_bytes_per_s > found.link_bytes_per_s
    assert found.verdict == "does not pay"
    assert "enough for 5.1 of them" in found.reasons[-1]
    assert asked("Qwen3-32B", link=parse_link("10GbE"), output_tokens=2000).verdict == "pays"


def test_measured_times_take_the_place_of_estimated_ones() -> None:
    found = asked("Qwen3-32B", prefill_tokens_per_s=4000.0, decode_step_s=0.05)
    assert found.prefill_s == 2.0
    assert found.decode_step_s == pytest.approx(0.05)
    assert found.delay_per_stream_s == pytest.approx(2.0 - 0.05 * 0.657, rel=0.01)  # 0.657: the weights' share of a step


def test_a_prefill_that_goes_first_disturbs_more() -> None:
    assert asked("Qwen3-32B", batched_tokens=None).interference_s > asked("Qwen3-32B").interference_s


def test_reasons_say_why_nobody_is_delayed() -> None:
    assert "nothing is being decoded" in asked("Qwen3-32B", streams=0).reasons[1]
    assert "delays none of them" in asked("Qwen3-32B", prompt_tokens=20).reasons[1]
    assert "each of 16 streams by 1.4 s, together by 22.5 s" in asked("Qwen3-32B").reasons[1]


def test_numbers_are_told_for_people() -> None:
    assert [seconds(value) for value in (0, 2e-6, 0.0125, 1.5, 12_345)] == ["0 s", "2 µs", "12.5 ms", "1.5 s", "12,345 s"]
    assert [size(value) for value in (7, 1500, 2.5e6, 2.097e9, 3e12)] == ["7 bytes", "1.5 kB", "2.5 MB", "2.097 GB", "3 TB"]


# ------------------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("name", ["Qwen3-32B", "qwen3-32b", "Qwen/Qwen3-32B", "Qwen3-32B-Base"])
def test_a_model_is_known_by_its_name_however_it_is_written(name: str) -> None:
    assert known_model(name) == ("Qwen3-32B", MODELS["Qwen3-32B"])


@pytest.mark.parametrize("name", ["", "Qwen3", "Qwen3-33B", "Qwen3-32B-FP8", "-instruct"])
def test_a_name_that_is_another_models_is_not_known(name: str) -> None:
    assert known_model(name) is None


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_is_read_without_a_guess(name: str) -> None:
    found = work(name)
    assert not [note for note in found.kv.notes if "not known" in note]
    assert estimate(found, QUESTION).verdict
