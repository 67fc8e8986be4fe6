"""Longer prompts take more, faster links less, 8 bits half; and no config.json does anything but be read or be refused by name."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings

from engines.kv_bytes import KvShape, Window, kv_shape
from engines.links import EFFICIENCY, NOMINAL, Link, parse_link
from engines.model_config import read_model
from engines.model_fields import Fields, ModelConfigError
from planner.advise.estimate import Estimate, Question, estimate
from planner.advise.models import MODELS
from planner.advise.timing import Hardware, Work
from planner.advise.weights import bytes_per_parameter, count

names = st.sampled_from(sorted(MODELS))
tokens = st.integers(1, 200_000)
rates = st.floats(1e6, 1e12)
questions = st.builds(
    Question,
    prompt_tokens=tokens,
    output_tokens=st.integers(1, 10_000),
    streams=st.integers(0, 512),
    link=st.builds(Link, st.just("link"), rates, st.just(1.0)),
    hardware=st.builds(Hardware, st.floats(1e13, 1e16), st.floats(1e11, 1e13)),
    batched_tokens=st.none() | st.integers(513, 16_384),
    prefill_tokens_per_s=st.none() | st.floats(10, 1e6),
    decode_step_s=st.none() | st.floats(1e-4, 1),
)
VERDICTS = ["does not pay", "about even", "pays"]


def work(name: str) -> Work:
    config = MODELS[name]
    model = read_model(config)
    return Work(model, count(model, bytes_per_parameter(Fields(config))), kv_shape(config))


WORK = {name: work(name) for name in MODELS}


def answer(name: str, question: Question, **changes: object) -> Estimate:
    return estimate(WORK[name], msgspec.structs.replace(question, **changes))


@settings(deadline=None)
@given(names, tokens, tokens)
def test_more_tokens_take_more_bytes_and_more_work(name: str, one: int, other: int) -> None:
    fewer, more = sorted((one, other))
    found = WORK[name]
    assert found.kv.bytes(fewer) <= found.kv.bytes(more)
    assert found.flops(fewer) <= found.flops(more)
    assert found.kv.bytes(more) >= found.kv.bytes_per_token * more
    if fewer < more:
        assert found.kv.bytes(fewer) < found.kv.bytes(more)


@settings(deadline=None)
@given(
    st.builds(
        KvShape,
        st.integers(0, 1 << 20),
        st.lists(st.builds(Window, st.integers(1, 9000), st.integers(0, 1 << 20))).map(tuple),
        st.integers(0, 1 << 30),
    ),
    tokens,
)
def test_what_is_bounded_stays_within_its_bound(shape: KvShape, length: int) -> None:
    bounded = shape.bytes(length) - shape.bytes_per_token * length
    assert 0 <= bounded <= shape.state_bytes + sum(window.tokens * window.bytes_per_token for window in shape.windows)


@settings(deadline=None)
@given(names, tokens)
def test_an_8_bit_cache_takes_half_but_for_the_states(name: str, length: int) -> None:
    sixteen, eight = kv_shape(MODELS[name], kv_dtype="bfloat16"), kv_shape(MODELS[name], kv_dtype="fp8")
    assert 2 * (eight.bytes(length) - eight.state_bytes) == sixteen.bytes(length) - sixteen.state_bytes
    assert eight.state_bytes == sixteen.state_bytes


@settings(deadline=None)
@given(names, st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_more_ranks_never_keep_less_in_all(name: str, ranks: int) -> None:
    one, many = kv_shape(MODELS[name]), kv_shape(MODELS[name], tensor_parallel=ranks)
    assert one.bytes(1000) <= many.bytes(1000) <= ranks * one.bytes(1000)


@settings(deadline=None)
@given(names, questions, st.floats(1, 1000))
def test_a_faster_link_never_speaks_against_disaggregation(name: str, question: Question, faster: float) -> None:
    slow = answer(name, question)
    fast = answer(name, question, link=Link("faster", question.link.bytes_per_s * faster, 1.0))
    assert fast.transfer_s <= slow.transfer_s
    assert fast.local_s == slow.local_s
    assert VERDICTS.index(fast.verdict) >= VERDICTS.index(slow.verdict)


@settings(deadline=None)
@given(names, questions)
def test_every_number_is_finite_and_the_verdict_is_theirs(name: str, question: Question) -> None:
    found = answer(name, question)
    numbers = [value for value in msgspec.structs.astuple(found) if isinstance(value, float | int)]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert found.local_prefill_s >= found.prefill_s
    if found.verdict == "pays":
        assert found.remote_s < found.local_s
        assert found.needed_bytes_per_s <= found.link_bytes_per_s
    if not question.streams:
        assert found.verdict != "pays"
        assert found.local_s == found.prefill_s


@settings(deadline=None)
@given(names, questions, st.integers(1, 100))
def test_more_streams_are_disturbed_more_by_a_prefill_that_goes_first(name: str, question: Question, more: int) -> None:
    few = answer(name, question, batched_tokens=None)
    many = answer(name, question, batched_tokens=None, streams=question.streams + more)
    assert many.interference_s > few.interference_s
    assert many.remote_s == few.remote_s


@settings(deadline=None)
@given(st.sampled_from(sorted(NOMINAL)), st.floats(0.001, 1e5).map(lambda number: round(number, 3)))
def test_links_are_read_as_they_are_written(name: str, number: float) -> None:
    assert parse_link(name.lower()).bytes_per_s == NOMINAL[name] * EFFICIENCY
    assert math.isclose(parse_link(f"{number:f}GB/s").bytes_per_s, number * 1e9)
    assert math.isclose(parse_link(f"{number:f}Gb/s").bytes_per_s, number * 1e9 / 8)


LEAVES = [None, True, False, 0, 1, 2, 3, 7, 8, -1, 10**9, 10**30, 1.0, 0.5, float("nan"), "", "x", "M-*E", "fp8", "full_attention", "mamba"]
leaves = st.sampled_from(LEAVES)
tables = st.dictionaries(
    st.sampled_from(["num_bits", "attention", "n_heads_in_group", "num_heads", "full_attn_layers"]), leaves, max_size=3
)
values = leaves | tables | st.lists(leaves | tables, max_size=4)
FIELDS = sorted({
    *(field for config in MODELS.values() for field in config), "layer_types", "hybrid_override_pattern", "hybrid_layer_pattern", "text_config",
    "attn_type_list", "block_configs", "attn_layer_indices", "attn_layer_period", "linear_attn_config", "mamba_d_state", "mlp_layer_types",
    "index_head_dim", "index_topk_freq", "num_kv_shared_layers", "multi_query", "attn_config", "ffn_config", "moe_layers", "v_head_dim",
    "full_attn_idxs", "conv_L_cache", "expert_layer_period", "use_sliding_window", "no_rope_layers", "sliding_window_pattern",
})  # fmt: skip
TYPES = sorted(
    {*(config["model_type"] for config in MODELS.values()), "llama4_text", "jamba", "bamba", "nemotron_h", "kimi_linear", "lfm2", "mamba2"}
)


@settings(deadline=None)
@given(names, st.dictionaries(st.sampled_from(FIELDS), values, max_size=4), st.sampled_from([None, *TYPES]), st.integers(1, 16))
def test_any_object_is_read_or_refused(name: str, changes: dict[str, Any], model_type: str | None, ranks: int) -> None:
    config = MODELS[name] | {"num_hidden_layers": 3} | changes | ({} if model_type is None else {"model_type": model_type})
    try:
        model = read_model(config)
        shape = kv_shape(config, tensor_parallel=ranks)
        weights = count(model, bytes_per_parameter(Fields(config)))
    except ModelConfigError:
        return
    assert shape.bytes(1) <= shape.bytes(1000)
    assert 0 <= weights.active <= weights.total
