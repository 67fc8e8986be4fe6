"""Which requests bring their token ids, and what a body looks like that does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engines.types import EngineInfo, EngineKind, EngineSpec
from router import openai
from router.prompts.book import Tokens, pack
from router.routes import INFERENCE, PromptForm
from router.token_ids import Outcome, barrier, with_field, with_ids

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION = INFERENCE[b"/v1/chat/completions"], INFERENCE[b"/v1/completions"]
IDS = [5, 6, 4095]


def engine(kind: EngineKind, *, chats: bool = True, texts: bool = True) -> EngineInfo:
    url = "http://a:1"
    return EngineInfo(url, EngineSpec(url), kind, "1", (), chats_take_ids=chats, texts_take_ids=texts)


def tokens(source: str = "local") -> Tokens:
    return Tokens(None, pack(IDS), source)  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [b'{"messages":[],"x":1}', b'{"messages":[],"x":1} \r\n', b' {"messages":[],\n"x":1\t}\n'])
def test_a_field_is_added_and_all_else_stays(body: bytes) -> None:
    assert msgspec.json.decode(with_field(body, b'"a":[1]')) == {"messages": [], "x": 1, "a": [1]}
    assert with_field(body, b'"a":[1]').startswith(body.rstrip()[:-1])


def test_an_empty_object_gets_its_first_field() -> None:
    assert msgspec.json.decode(with_field(b"{ }", b'"a":1')) == {"a": 1}


@pytest.mark.parametrize(
    ("kind", "where"),
    [(EngineKind.VLLM, {"kv_transfer_params": {"prompt_token_ids": IDS}}), (EngineKind.SGLANG, {"input_ids": IDS})],
)
def test_a_chat_brings_its_ids_where_each_kind_reads_them(kind: EngineKind, where: dict[str, object]) -> None:
    body = {"messages": MESSAGES, "tools": [], "n": 2}
    sent = with_ids(msgspec.json.encode(body), PromptForm.CHAT, engine(kind), tokens(), checked=True)
    assert sent.outcome is Outcome.FORWARDED
    assert msgspec.json.decode(sent.body) == body | where


@pytest.mark.parametrize("kind", list(EngineKind))
def test_a_completion_has_its_ids_for_a_prompt(kind: EngineKind) -> None:
    body = {"prompt": "hi", "n": 2}
    sent = with_ids(msgspec.json.encode(body), PromptForm.COMPLETION, engine(kind), tokens(), checked=True)
    assert msgspec.json.decode(sent.body) == {"prompt": IDS, "n": 2}


@pytest.mark.parametrize(
    ("form", "info", "made", "checked", "outcome"),
    [
        (PromptForm.CHAT, engine(EngineKind.VLLM), None, True, Outcome.UNTOKENIZED),
        (PromptForm.CHAT, engine(EngineKind.VLLM), Tokens([], b"", "local"), True, Outcome.UNTOKENIZED),
        (PromptForm.CHAT, engine(EngineKind.VLLM), tokens("engine"), True, Outcome.ENGINE_MADE),
        (PromptForm.CHAT, engine(EngineKind.VLLM), tokens(), False, Outcome.UNCHECKED),
        (PromptForm.CHAT, engine(EngineKind.SGLANG, chats=False), tokens(), True, Outcome.ENGINE),
        (PromptForm.COMPLETION, engine(EngineKind.SGLANG, texts=False), tokens(), True, Outcome.ENGINE),
    ],
)
def test_ids_that_are_not_certainly_the_engines_own_are_kept(
    form: PromptForm, info: EngineInfo, made: Tokens | None, checked: bool, outcome: Outcome
) -> None:
    sent = with_ids(b"{}", form, info, made, checked=checked)
    assert (sent.body, sent.outcome) == (b"{}", outcome)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (b"/v1/chat/completions", {}, None),
        (b"/v1/chat/completions", {"echo": False, "prompt_logprobs": None}, None),
        (b"/v1/chat/completions", {"echo": True}, Outcome.ECHO),
        (b"/v1/chat/completions", {"prompt_logprobs": 0}, Outcome.ECHO),
        (b"/v1/chat/completions", {"input_ids": [1]}, Outcome.HANDSHAKE),
        (b"/v1/chat/completions", {"truncate_prompt_tokens": 4}, Outcome.PARAMETER),
        *((b"/v1/chat/completions", {name: None}, Outcome.HANDSHAKE) for name in openai.STRIPPED),
        (b"/v1/completions", {"prompt": "hi"}, None),
        (b"/v1/completions", {"prompt": "hi", "suffix": "there"}, Outcome.ECHO),
        (b"/v1/completions", {"prompt": "hi", "add_special_tokens": False}, Outcome.PARAMETER),
        (b"/v1/completions", {"prompt": "hi", "prompt_embeds": "AA=="}, Outcome.PARAMETER),
        (b"/v1/completions", {"prompt": [1, 2]}, Outcome.GIVEN),
        (b"/v1/completions", {"prompt": ["hi", "you"]}, Outcome.SEVERAL),
        (b"/v1/completions", {"prompt": ["hi"]}, Outcome.SEVERAL),
        (b"/v1/completions", {"prompt": [[1], [2]]}, Outcome.SEVERAL),
        (b"/generate", {"text": "hi"}, Outcome.ROUTE),
        (b"/v1/responses", {"input": "hi"}, Outcome.ROUTE),
    ],
)
def test_what_in_a_request_is_in_the_way(path: bytes, fields: dict[str, Any], expected: Outcome | None) -> None:
    body = openai.parse(msgspec.json.encode({"model": "m", "messages": MESSAGES} | fields))
    assert barrier(INFERENCE[path], body) is expected
