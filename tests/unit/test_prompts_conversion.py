"""What is made of other APIs' bodies; that it is what vLLM makes of them is shown with a real one (tests/e2e/test_conversions.py)."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import openai
from router.prompts.chat import ChatFields
from router.prompts.conversion import chat_of
from router.prompts.errors import NotRenderable
from router.routes import PromptForm

USER = {"role": "user", "content": "Hi"}
MESSAGES, RESPONSES = PromptForm.MESSAGES, PromptForm.RESPONSES


def converted(form: PromptForm, **body: object) -> dict[str, Any]:
    raw = msgspec.json.encode(body)
    fields = chat_of(form, openai.parse(raw), raw)
    given = {name: getattr(fields, name) for name in ChatFields.__struct_fields__}
    return {name: msgspec.json.decode(value) for name, value in given.items() if value is not msgspec.UNSET}


def test_a_messages_body_is_a_chat() -> None:
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}
    told = converted(
        MESSAGES,
        system=[{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "Be brief."}],
        messages=[USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}],
        tools=[{"name": "f", "input_schema": {}}],
        output_config={"effort": "low"},
    )
    assert told["messages"] == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "1\n2"},
        {"role": "user", "content": "So?"},
    ]
    assert told["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert told["reasoning_effort"] == "low"


def test_a_responses_body_is_a_chat() -> None:
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well,"}], "status": "incomplete"}
    told = converted(
        RESPONSES,
        instructions="Be brief.",
        input=[USER, called, {"type": "function_call_output", "call_id": "c", "output": "1"}, said],
        reasoning={"effort": "low"},
    )
    assert told["messages"] == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "Well,"},
    ]
    assert (told["add_generation_prompt"], told["continue_final_message"], told["add_special_tokens"]) == (False, True, True)


@pytest.mark.parametrize(
    ("form", "body", "words"),
    [
        (MESSAGES, {}, "messages is not a list"),
        (MESSAGES, {"messages": [{"role": "system", "content": "x"}, USER]}, "a system message within the conversation"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a block of type 'image'"),
        (MESSAGES, {"messages": [USER], "thinking": {"type": "disabled"}}, "thinking is disabled"),
        (MESSAGES, {"messages": [USER], "system": [{"type": "image"}]}, "a system prompt that is not text"),
        (MESSAGES, {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "w"}]}, "a tool without input_schema"),
        (RESPONSES, {}, "no input"),
        (RESPONSES, {"input": "x", "previous_response_id": "r"}, "goes on from a response"),
        (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation"),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "a tool that is no function"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]}, "an input item of type 'item_reference'"),
        (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "an input item of type 'reasoning'"),
    ],
)
def test_R18_what_is_not_certain_is_not_converted_and_says_why(form: PromptForm, body: dict[str, Any], words: str) -> None:
    with pytest.raises(NotRenderable) as raised:
        converted(form, **body)
    assert words in raised.value.reason
    assert not raised.value.ask_engine


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(["", "user", "assistant", "text", "message", "function_call", "tool_use"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "id", "name", "input", "call_id", "summary"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(
    st.sampled_from([MESSAGES, RESPONSES]), st.dictionaries(st.sampled_from(["messages", "input", "system", "instructions", "tools"]), JSON)
)
def test_no_body_is_too_strange(form: PromptForm, body: dict[str, Any]) -> None:
    with contextlib.suppress(NotRenderable):
        assert "messages" in converted(form, **body)
