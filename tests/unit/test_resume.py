"""Which streams may go on on another engine, and what that engine is asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engines.types import EngineKind
from router.resume import Obstacle, Plan, decide
from router.routes import INFERENCE, Route

CHAT, COMPLETION = INFERENCE[b"/v1/chat/completions"], INFERENCE[b"/v1/completions"]
USER = {"role": "user", "content": "hello"}


def chat(**fields: object) -> Plan | Obstacle | None:
    body = {"model": "m", "messages": [USER], "stream": True} | fields
    return decide(CHAT, msgspec.json.encode(body), EngineKind.VLLM)


def completion(*, kind: EngineKind = EngineKind.VLLM, **fields: Any) -> Plan | Obstacle | None:  # noqa: ANN401  JSON
    return decide(COMPLETION, msgspec.json.encode({"model": "m", "prompt": "hello", "stream": True} | fields), kind)


def asked(plan: Plan | Obstacle | None, prompt: list[int], generated: int) -> dict[str, object]:
    assert isinstance(plan, Plan)
    body: dict[str, object] = msgspec.json.decode(plan.continued(prompt, generated))
    return body


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logit_bias": {"5": 1}, "stop_token_ids": [7], "ignore_eos": True},
        {"max_tokens": 5, "max_completion_tokens": 5, "min_tokens": 2, "stream_options": {"include_usage": True}},
        {"n": 1, "logprobs": False, "echo": False, "presence_penalty": 0, "frequency_penalty": 0.0, "tools": [], "seed": None, "stop": []},
        {"response_format": {"type": "text"}, "tool_choice": "none", "use_beam_search": False, "logit_bias": None},
        {"temperature": 0, "seed": 5, "stop": ["\n\n", "END"]},
        {"temperature": 0.0, "stop": "END"},
        {"repetition_penalty": 1.1},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "Well"}]}], "continue_final_message": True},
        {"user": "u", "priority": 3, "cache_salt": "s", "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_a_plain_text_stream_may_go_on_elsewhere(fields: dict[str, object]) -> None:
    assert isinstance(chat(**fields), Plan)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({"n": 2}, Obstacle.CHOICES),
        ({"best_of": 2}, Obstacle.CHOICES),
        ({"use_beam_search": True}, Obstacle.CHOICES),
        ({"tools": [{"type": "function"}]}, Obstacle.TOOLS),
        ({"tool_choice": "required"}, Obstacle.TOOLS),
        ({"functions": [{}]}, Obstacle.TOOLS),
        ({"response_format": {"type": "json_object"}}, Obstacle.STRUCTURED),
        ({"structured_outputs": {"regex": "a+"}}, Obstacle.STRUCTURED),
        ({"guided_json": {}}, Obstacle.STRUCTURED),
        ({"logprobs": True}, Obstacle.LOGPROBS),
        ({"logprobs": 0}, Obstacle.LOGPROBS),
        ({"prompt_logprobs": 1}, Obstacle.LOGPROBS),
        ({"return_token_ids": True}, Obstacle.TOKEN_IDS),
        ({"seed": 0}, Obstacle.SEED),
        ({"seed": 5, "temperature": 0.5}, Obstacle.SEED),
        ({"presence_penalty": 0.5}, Obstacle.PENALTIES),
        ({"frequency_penalty": -1}, Obstacle.PENALTIES),
        ({"stop": ["END"]}, Obstacle.STOP),
        ({"stop": ["END"], "temperature": 0.5}, Obstacle.STOP),
        ({"stop": [5], "temperature": 0}, Obstacle.STOP),
        ({"stop": [""], "temperature": 0}, Obstacle.STOP),
        ({"stop": ["END"], "temperature": 0, "include_stop_str_in_output": True}, Obstacle.STOP),
        ({"echo": True}, Obstacle.ECHO),
        ({"suffix": "x"}, Obstacle.ECHO),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, Obstacle.MEDIA),
        ({"messages": "hello"}, Obstacle.MEDIA),
        ({"modalities": ["text", "audio"]}, Obstacle.MEDIA),
        ({"bad_words": ["x"]}, Obstacle.PARAMETER),
        ({"thinking_token_budget": 5}, Obstacle.PARAMETER),
        ({"truncate_prompt_tokens": 5}, Obstacle.PARAMETER),
        ({"repetition_detection": {}}, Obstacle.PARAMETER),
        ({"something_new": 1}, Obstacle.PARAMETER),
    ],
)
def test_what_depends_on_more_than_the_tokens_is_not_resumed_and_says_why(fields: dict[str, object], obstacle: Obstacle) -> None:
    assert chat(**fields) is obstacle


@pytest.mark.parametrize("broken", [b'"\xff"', b"[" * 2000 + b"]" * 2000], ids=["no UTF-8", "nested deeply"])
def test_what_cannot_be_read_is_left_to_the_engine(broken: bytes) -> None:
    body = b'{"stream":true,"prompt":"x","unknown":%b}' % broken
    assert decide(COMPLETION, body, EngineKind.VLLM) is Obstacle.PARAMETER


@pytest.mark.parametrize("fields", [{"stream": False}, {"stream": None}, {"stream": "yes"}])
def test_what_is_no_stream_is_no_question(fields: dict[str, Any]) -> None:
    assert chat(**fields) is None
    assert completion(**fields) is None


@pytest.mark.parametrize("path", [path for path in INFERENCE if path not in (b"/v1/chat/completions", b"/v1/completions")])
def test_other_routes_are_no_question(path: bytes) -> None:
    route: Route = INFERENCE[path]
    assert decide(route, b'{"stream":true,"prompt":"x","messages":[]}', EngineKind.VLLM) is None


@pytest.mark.parametrize(
    ("prompt", "resumable"),
    [("text", True), ([5, 6], True), (["one"], False), ([[5]], False), (["a", "b"], False), ([], False), (5, False)],
)
def test_a_completion_has_one_prompt(prompt: object, resumable: bool) -> None:
    plan = completion(prompt=prompt)
    assert isinstance(plan, Plan) if resumable else plan is Obstacle.CHOICES


def test_sglang_tells_no_ids_of_chats_and_has_other_stop_strings_and_penalties() -> None:
    body = msgspec.json.encode({"messages": [USER], "stream": True})
    assert decide(CHAT, body, EngineKind.SGLANG) is Obstacle.ENGINE
    assert isinstance(completion(kind=EngineKind.SGLANG), Plan)
    assert completion(kind=EngineKind.SGLANG, stop="x", temperature=0) is Obstacle.STOP
    assert completion(kind=EngineKind.SGLANG, repetition_penalty=1.1) is Obstacle.PENALTIES
    assert isinstance(completion(kind=EngineKind.SGLANG, repetition_penalty=1.0), Plan)


def test_the_first_engine_is_asked_the_same_and_for_its_ids() -> None:
    plan = chat(temperature=0.5, max_tokens=7)
    assert isinstance(plan, Plan)
    expected = {"model": "m", "messages": [USER], "stream": True, "temperature": 0.5, "max_tokens": 7, "return_token_ids": True}
    assert msgspec.json.decode(plan.first()) == expected


def test_a_chat_goes_on_as_a_chat_with_its_ids_and_lower_limits() -> None:
    body = asked(chat(max_tokens=10, max_completion_tokens=9, min_tokens=2), [1, 2, 3, 4], 3)
    assert body["kv_transfer_params"] == {"prompt_token_ids": [1, 2, 3, 4]}
    assert (body["max_tokens"], body["max_completion_tokens"], body["min_tokens"]) == (7, 6, 0)
    assert body["messages"] == [USER]
    assert body["return_token_ids"] is True


def test_a_chat_without_a_limit_goes_on_without_one() -> None:
    assert not {"max_tokens", "max_completion_tokens"} & asked(chat(), [1], 1).keys()
    assert asked(chat(max_tokens=None), [1], 1)["max_tokens"] is None


def test_a_completion_goes_on_from_ids_and_keeps_its_routes_limit() -> None:
    body = asked(completion(), [1, 2, 3], 2)
    assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3], 14)
    assert asked(completion(max_tokens=5), [1, 2, 3], 2)["max_tokens"] == 3
    assert asked(completion(max_tokens=None), [1, 2, 3], 2)["max_tokens"] is None


def test_stop_strings_tell_how_much_an_engine_holds_back() -> None:
    plan = chat(stop=["a", "long one"], temperature=0)
    assert isinstance(plan, Plan)
    assert plan.held_back == 7
    plain = chat(temperature=0)
    assert isinstance(plain, Plan)
    assert plain.held_back == 0
