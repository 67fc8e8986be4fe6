"""Requests into token ids, by the engines' own rules; answers that can be quoted."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from engines.simulator.requests import Reader, Refusal, Shape
from engines.simulator.text import SHIPPED, ModelText, PromptRefused, load
from engines.types import EngineKind

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "well, "}
TEXT = "<|im_start|>user\nhi<|im_end|>\n"
OPENED = TEXT + "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def text() -> ModelText:
    return load("")


def rendered(text: ModelText, kind: EngineKind, messages: list[dict[str, Any]], **fields: object) -> str:
    return text.render({"messages": messages, **fields}, kind)


def test_the_shipped_folder_is_small_and_complete() -> None:
    assert {path.name for path in SHIPPED.iterdir()} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert (SHIPPED / "tokenizer.json").stat().st_size < 300_000
    config = msgspec.json.decode((SHIPPED / "config.json").read_bytes())
    assert (config["vocab_size"], config["max_position_embeddings"]) == (4096, 32768)


def test_ids_equal_those_of_the_reference_tokenizer(text: ModelText) -> None:
    reference = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    for sample in (OPENED, "naïve — 日本語 🙂", "\n\n  def f(x):\n\treturn x  ", "<|endoftext|><|im_end|>", "  "):
        assert text.encode(sample) == reference.encode(sample, add_special_tokens=False).ids
    assert [reference.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]


def test_what_it_says_encodes_to_what_it_said(text: ModelText) -> None:
    said = array("I", text.encode(OPENED))
    start = len(said)
    for _ in range(200):
        said.append(text.words.following(said, 7))
    answer = "".join(text.words.texts[token] for token in said[start:])
    assert text.decode(said[start:].tolist()) == answer
    assert text.encode(OPENED + answer) == said.tolist()


def test_different_prompts_and_seeds_get_different_answers(text: ModelText) -> None:
    firsts = {(text.words.following(array("I", prompt), seed)) for prompt in ([5, 6, 7], [5, 6, 8], [4, 6, 7]) for seed in (0, 1)}
    assert len(firsts) == 6


@pytest.mark.parametrize("kind", list(EngineKind))
def test_a_conversation_is_opened_for_the_assistant(text: ModelText, kind: EngineKind) -> None:
    assert rendered(text, kind, [USER]) == OPENED
    assert rendered(text, kind, [USER], add_generation_prompt=False) == TEXT


def test_text_parts_are_joined_as_each_engine_joins_them(text: ModelText) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "a\nb" in rendered(text, EngineKind.VLLM, parts)
    assert "a b" in rendered(text, EngineKind.SGLANG, parts)


def test_a_picture_is_refused(text: ModelText) -> None:
    with pytest.raises(PromptRefused, match="text only"):
        rendered(text, EngineKind.VLLM, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_an_unknown_role_is_refused_by_the_template(text: ModelText) -> None:
    with pytest.raises(PromptRefused, match="alien"):
        rendered(text, EngineKind.VLLM, [{"role": "alien", "content": "x"}])


def test_tools_are_told_in_the_engines_form(text: ModelText) -> None:
    tools = [{"function": {"parameters": {"type": "object"}, "name": "f", "strict": True}, "type": "function"}]
    told = '{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object"}}}'
    assert told in rendered(text, EngineKind.VLLM, [USER], tools=tools)


@pytest.mark.parametrize(("arguments", "told"), [('{"a": 1}', '{"a": 1}'), ("", "{}"), ("{broken", "{}"), ({"a": "é"}, '{"a": "é"}')])
def test_tool_calls_come_as_text_and_are_told_as_objects(text: ModelText, arguments: object, told: str) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    prompt = rendered(text, EngineKind.VLLM, [USER, call, {"role": "tool", "content": "42"}])
    assert f'{{"name": "f", "arguments": {told}}}' in prompt
    assert "<tool_response>\n42\n</tool_response>" in prompt


def test_vllm_continues_the_final_message_where_it_ends(text: ModelText) -> None:
    prompt = rendered(text, EngineKind.VLLM, [USER, ASSISTANT], continue_final_message=True)
    assert prompt == OPENED + "well, "


def test_sglang_continues_the_final_message_after_the_generation_prompt_or_takes_it_for_the_users(text: ModelText) -> None:
    assert rendered(text, EngineKind.SGLANG, [USER, ASSISTANT], continue_final_message=True) == OPENED + "well, "
    assert rendered(text, EngineKind.SGLANG, [USER, ASSISTANT]) == TEXT + "<|im_start|>user\nwell, <|im_end|>\n<|im_start|>assistant\n"


def test_vllm_moves_developers_to_the_front_as_system(text: ModelText) -> None:
    messages = [{"role": "system", "content": "be brief"}, USER, {"role": "developer", "content": "and kind"}]
    assert rendered(text, EngineKind.VLLM, messages) == "<|im_start|>system\nbe brief\nand kind<|im_end|>\n" + OPENED


def test_template_arguments_reach_the_template(text: ModelText) -> None:
    closed = OPENED + "<think>\n\n</think>\n\n"
    assert rendered(text, EngineKind.VLLM, [USER], chat_template_kwargs={"enable_thinking": False}) == closed
    assert rendered(text, EngineKind.VLLM, [USER], reasoning_effort="none") == closed
    assert rendered(text, EngineKind.VLLM, [USER], reasoning_effort="high") == OPENED


def reader(kind: EngineKind = EngineKind.VLLM, context: int = 64) -> Reader:
    return Reader(load(""), kind, context)


def body(**fields: object) -> bytes:
    return msgspec.json.encode(fields)


def test_a_chat_reads_to_ids_and_a_limit() -> None:
    ask = reader().chat(body(model="m", messages=[USER], max_tokens=9, max_completion_tokens=5, n=2, stream=True))
    assert (ask.shape, ask.model, ask.limit, ask.samples, ask.stream) == (Shape.CHAT, "m", 5, 2, True)
    assert ask.prompts == [load("").encode(OPENED)]


def test_a_limit_that_is_not_given_ends_by_itself() -> None:
    (prompt,) = reader().chat(body(messages=[USER])).sequences(None, 7, 0)
    assert (prompt.limit, prompt.ending) == (7, "stop")
    (prompt,) = reader().chat(body(messages=[USER], max_tokens=3)).sequences(None, 7, 0)
    assert (prompt.limit, prompt.ending) == (3, "length")


def test_samples_differ_by_their_seed() -> None:
    prompts = reader().completion(body(prompt=["a", "b"], n=2, seed=5)).sequences("ad1", 1, 100)
    assert [prompt.seed for prompt in prompts] == [105, 106, 105, 106]
    assert {prompt.adapter for prompt in prompts} == {"ad1"}


@pytest.mark.parametrize(
    "given",
    [
        b"{",
        b"[]",
        body(messages="no"),
        body(),
        body(messages=[]),
        body(messages=[{}]),
        body(messages=[{"role": "user", "content": 7}]),
        body(messages=[{"role": "assistant", "tool_calls": ["x"]}]),
        body(messages=[USER], tools=[{"function": "x"}]),
        body(messages=[USER], chat_template_kwargs={"self": 1}),
        body(messages=[USER], n=0),
        body(messages=[USER], max_tokens=0),
        body(messages=[USER], max_tokens=60),
        body(messages=[USER], kv_transfer_params={"prompt_token_ids": ["x"]}, input_ids=["x"]),
        body(messages=[USER], kv_transfer_params={"prompt_token_ids": [4096]}, input_ids=[4096]),
        body(messages=[USER], kv_transfer_params={"prompt_token_ids": []}, input_ids=[]),
    ],
)
@pytest.mark.parametrize("kind", list(EngineKind))
def test_a_chat_that_cannot_be_served_is_refused_with_400(given: bytes, kind: EngineKind) -> None:
    with pytest.raises(Refusal) as refused:
        reader(kind).chat(given)
    assert refused.value.status == 400
    assert msgspec.json.decode(refused.value.body(EngineKind.VLLM))["error"]["code"] == 400
    assert msgspec.json.decode(refused.value.body(EngineKind.SGLANG))["object"] == "error"


def test_vllm_refuses_to_open_and_to_continue_at_once() -> None:
    with pytest.raises(Refusal, match="Cannot set both"):
        reader().chat(body(messages=[USER], add_generation_prompt=True, continue_final_message=True))


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [-1], [1, "x"], {"a": 1}])
def test_a_prompt_that_is_none_is_refused(prompt: object) -> None:
    with pytest.raises(Refusal):
        reader().completion(body(prompt=prompt))


def test_a_prompt_fits_if_its_answer_fits_too() -> None:
    assert reader().completion(body(prompt=[5] * 60, max_tokens=4)).limit == 4
    with pytest.raises(Refusal, match="64 tokens"):
        reader().completion(body(prompt=[5] * 60, max_tokens=5))
    with pytest.raises(Refusal):
        reader().chat(body(messages=[USER], kv_transfer_params={"prompt_token_ids": [5] * 64}))
    assert reader().chat(body(messages=[USER], kv_transfer_params={"prompt_token_ids": [5] * 63})).limit is None


@pytest.mark.parametrize(
    ("given", "batched"), [({"text": "a"}, False), ({"text": ["a"]}, True), ({"input_ids": [5]}, False), ({"input_ids": [[5]]}, True)]
)
def test_generate_answers_a_batch_with_a_list(given: dict[str, object], batched: bool) -> None:
    ask = reader(EngineKind.SGLANG).generate(body(**given, sampling_params={"max_new_tokens": 2}))
    assert (ask.batched, ask.limit) == (batched, 2)


def test_tokenize_knows_no_reasoning_effort() -> None:
    plain = reader().tokenize(body(messages=[USER]))
    assert reader().tokenize(body(messages=[USER], reasoning_effort="none")) == plain
    assert reader().chat(body(messages=[USER], reasoning_effort="none")).prompts != [plain]


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(str(tmp_path))
