"""Do conversations come out as the engines' own code renders them?

`tests/data/prompts/*.jsonl` were made by running the engines' own validation, parsing and rendering (vLLM 0.32.0, SGLang 0.5.23)
over the templates in `tests/data/templates`: the prompts of the parity check, then random conversations. A line without text was
refused by the engine.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.types import EngineKind
from router.prompts.chat import ChatFields, chat_prompt
from router.prompts.dialect import ChatPrompt
from router.prompts.errors import NotRenderable, PromptRejected
from router.prompts.template import ChatTemplate

DATA = Path(__file__).parent.parent / "data"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
RECORDED = {EngineKind.VLLM: "vllm-0.32.0.jsonl", EngineKind.SGLANG: "sglang-0.5.23.jsonl"}


class Recorded(msgspec.Struct):
    template: str
    body: msgspec.Raw
    text: str | None
    tail: str = ""


def recorded(kind: EngineKind) -> list[Recorded]:
    lines = (DATA / "prompts" / RECORDED[kind]).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Recorded) for line in lines]


@functools.cache
def template(name: str) -> ChatTemplate:
    source = (DATA / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, strftime=lambda _: "01 Jan 2030")


def fields_of(body: bytes | dict[str, Any]) -> ChatFields:
    return msgspec.json.decode(body if isinstance(body, bytes) else msgspec.json.encode(body), type=ChatFields)


def prepared(kind: EngineKind, body: bytes | dict[str, Any], name: str = "thinking") -> ChatPrompt:
    return chat_prompt(kind, fields_of(body), template(name).shape)


def rendered(kind: EngineKind, body: bytes | dict[str, Any], name: str = "thinking") -> str:
    prompt = prepared(kind, body, name)
    return template(name).render(SPECIAL | prompt.variables, continue_final_message=prompt.continue_final_message)


def outcome(kind: EngineKind, line: Recorded) -> tuple[str | None, str]:
    """(text, tail) as an engine would say; None where it refuses."""
    try:
        prompt = prepared(kind, bytes(line.body), line.template)
    except NotRenderable:
        return None, ""
    rendering = template(line.template)
    tried = [prompt.variables]
    if prompt.flat_tools is not None:
        tried.append(prompt.variables | {"tools": list(prompt.flat_tools)})
    for variables in tried:
        try:
            text = rendering.render(SPECIAL | variables, continue_final_message=prompt.continue_final_message)
        except (NotRenderable, PromptRejected):
            continue
        return text, prompt.tail
    return None, ""


@pytest.mark.parametrize("kind", list(EngineKind))
def test_R17_every_recorded_conversation_is_rendered_as_the_engine_rendered_it(kind: EngineKind) -> None:
    lines = recorded(kind)
    assert len(lines) > 100
    wrong = [(line, got) for line in lines if (got := outcome(kind, line)) != (line.text, line.tail)]
    assert not wrong


USER = {"role": "user", "content": "hi"}


def test_text_parts_are_joined_by_a_newline_for_vllm_and_by_a_space_for_sglang() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    assert "user\na\nb<|im_end|>" in rendered(EngineKind.VLLM, body)
    assert "user\na b<|im_end|>" in rendered(EngineKind.SGLANG, body)


def test_parts_stay_parts_for_a_template_that_loops_over_them() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]}
    assert '<|user|>a<c>{"type": "x"}</c>' in rendered(EngineKind.VLLM, body, "parts")
    assert "<|user|>a<|end|>" in rendered(EngineKind.SGLANG, body, "parts")


@pytest.mark.parametrize("arguments", ["", "{bad", "[1]", "null"])
def test_arguments_that_are_no_object_become_an_empty_one_for_vllm_and_are_refused_by_sglang(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "r"}]}
    assert '"arguments": {}}' in rendered(EngineKind.VLLM, body)
    with pytest.raises(NotRenderable) as problem:
        prepared(EngineKind.SGLANG, body)
    assert not problem.value.ask_engine


def test_tools_are_vllms_own_dump_and_sglangs_in_the_clients_order() -> None:
    body = {"messages": [USER], "tools": [{"type": "function", "x": 1, "function": {"parameters": {"b": 1, "a": 2}, "name": "f", "y": 2}}]}
    ours = '{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1, "a": 2}}}'
    theirs = '{"type": "function", "function": {"parameters": {"b": 1, "a": 2}, "name": "f", "description": null}, "defer_loading": null}'
    assert ours in rendered(EngineKind.VLLM, body)
    assert theirs in rendered(EngineKind.SGLANG, body)


def test_tool_choice_none_hides_the_tools_from_sglang_only() -> None:
    body = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    assert "<tools>" in rendered(EngineKind.VLLM, body)
    assert "<tools>" not in rendered(EngineKind.SGLANG, body)


def test_a_developer_becomes_the_system_for_vllm_when_the_template_does_not_know_the_role() -> None:
    body = {"messages": [USER, {"role": "developer", "content": "Be kind."}, {"role": "system", "content": "Be terse."}]}
    assert rendered(EngineKind.VLLM, body).startswith("<|im_start|>system\nBe kind.\n\nBe terse.<|im_end|>")
    assert "<|developer|>" in rendered(EngineKind.VLLM, body, "parts")


@pytest.mark.parametrize(
    ("effort", "given", "expected"),
    [("none", {}, False), ("low", {}, True), ("none", {"enable_thinking": True}, True), (None, {"enable_thinking": False}, False)],
)
@pytest.mark.parametrize("kind", list(EngineKind))
def test_reasoning_effort_switches_thinking_unless_the_request_says_otherwise(
    kind: EngineKind, effort: str | None, given: dict[str, bool], expected: bool
) -> None:
    prompt = prepared(kind, {"messages": [USER], "reasoning_effort": effort, "chat_template_kwargs": given})
    assert prompt.variables["enable_thinking"] is expected


def test_sglang_takes_a_trailing_assistant_message_for_the_users() -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "so"}]}
    assert "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n" in rendered(EngineKind.SGLANG, body)
    assert "<|im_start|>user\nso" not in rendered(EngineKind.VLLM, body)


def test_a_continued_message_is_left_open_by_vllm_and_appended_by_sglang() -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "It is "}], "continue_final_message": True, "add_generation_prompt": False}
    assert rendered(EngineKind.VLLM, body).endswith("It is ")
    prompt = prepared(EngineKind.SGLANG, body)
    assert prompt.tail == "It is "
    assert rendered(EngineKind.SGLANG, body).endswith("<|im_start|>assistant\n")


def test_variables_a_template_does_not_mention_do_not_tell_the_dialects_apart() -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"nobody_reads_this": 1}}
    vllm, sglang = prepared(EngineKind.VLLM, body), prepared(EngineKind.SGLANG, body)
    assert msgspec.structs.replace(sglang, flat_tools=None) == vllm


NOT_TEXT = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]}
UNKNOWN = {"role": "user", "content": [{"type": "hologram", "text": "x"}]}


@pytest.mark.parametrize("kind", list(EngineKind))
@pytest.mark.parametrize(
    ("body", "asks"),
    [
        ({"messages": [NOT_TEXT]}, False),
        ({"messages": [UNKNOWN]}, True),
        ({"messages": []}, False),
        ({}, False),
        ({"messages": [USER], "chat_template": "{{ messages }}"}, False),
        ({"messages": [USER], "truncate_prompt_tokens": 10}, False),
        ({"messages": [USER], "prompt_embeds": "x"}, False),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, True),
        ({"messages": [USER], "chat_template_kwargs": {"tools": []}}, True),
        ({"messages": [USER], "continue_final_message": "yes"}, True),
        ({"messages": [{"role": "system", "content": "x", "tools": [{"type": "function"}]}, {"role": "developer", "tools": [1]}]}, True),
    ],
)
def test_what_cannot_be_told_here_says_so_and_whether_the_engine_could(kind: EngineKind, body: dict[str, Any], asks: bool) -> None:
    with pytest.raises(NotRenderable) as problem:
        prepared(kind, body)
    assert problem.value.reason
    assert problem.value.ask_engine is asks


WORDS = [
    "role",
    "content",
    "type",
    "text",
    "function",
    "arguments",
    "name",
    "id",
    "tool_calls",
    "tool_call_id",
    "tools",
    "parameters",
    "properties",
    "description",
    "reasoning",
    "thinking",
    "refusal",
    "effort",
    "enabled",
    "user",
    "assistant",
    "system",
    "developer",
    "tool",
    "low",
    "none",
    "auto",
    "{}",
    "[]",
    "image_url",
    "enable_thinking",
    "documents",
    "title",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(WORDS) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=6,
)
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "refusal", "image_url"]) | JSON}, optional={"text": JSON, "refusal": JSON})
FUNCTION = st.fixed_dictionaries({"name": st.just("f") | JSON}, optional={"arguments": JSON | st.text(), "parameters": JSON})
CALL = st.fixed_dictionaries({"function": FUNCTION | JSON, "type": st.just("function") | JSON, "id": st.just("c") | JSON})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | JSON},
    optional={"content": st.text() | st.lists(PART | JSON, max_size=3) | JSON, "tool_calls": st.lists(CALL | JSON, max_size=2) | JSON},
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE | JSON, max_size=4) | JSON},
    optional={name: JSON for name in ChatFields.__struct_fields__ if name not in {"messages", "chat_template", "prompt_embeds"}}
    | {"tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION | JSON}) | JSON, max_size=2) | JSON},
)


@given(BODY, st.sampled_from(EngineKind), st.sampled_from(["thinking", "parts", "headers", "alternating"]))
@settings(max_examples=60, deadline=None)
def test_whatever_json_a_client_sends_is_rendered_rejected_or_not_renderable(body: dict[str, Any], kind: EngineKind, name: str) -> None:
    with contextlib.suppress(NotRenderable, PromptRejected):
        rendered(kind, body, name)


@pytest.mark.parametrize("kind", list(EngineKind))
def test_deep_nesting_is_rendered_or_not_renderable(kind: EngineKind) -> None:
    for depth in (300, 900, 100_000):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        tools = b'[{"type": "function", "function": {"name": "f", "parameters": ' + deep + b"}}]"
        for name, raw in (("messages", deep), ("tools", tools), ("chat_template_kwargs", deep)):
            fields = ChatFields(messages=msgspec.Raw(msgspec.json.encode([USER])))
            setattr(fields, name, msgspec.Raw(raw))
            with contextlib.suppress(NotRenderable):
                prompt = chat_prompt(kind, fields, template("thinking").shape)
                template("thinking").render(prompt.variables)
                assert depth < 1000


def test_a_field_that_is_not_json_is_not_renderable() -> None:
    with pytest.raises(NotRenderable, match="messages"):
        chat_prompt(EngineKind.VLLM, ChatFields(messages=msgspec.Raw(b"[{")), template("thinking").shape)
