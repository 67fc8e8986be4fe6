"""Are the ids made here the engine's own?

Asked once per engine, when it joins: a handful of prompts, each touching one rule, are rendered here and sent to the engine's
`/tokenize`. A prompt that both refuse is agreement too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from engines.errors import EngineAnswered, EngineError
from router.prompts.asking import chat_body, text_body
from router.prompts.chat import ChatFields
from router.prompts.encoder import PromptEncoder
from router.prompts.errors import NotRenderable, PromptRejected
from router.prompts.tokenizer import CHECKED, unpack

Ask = Callable[[dict[str, Any]], Awaitable[list[int]]]
"""Posts a body to the engine's `/tokenize` and gives the ids. Raises `EngineError`."""

REFUSALS = frozenset({400, 422, 500})
"""Statuses with which an engine refuses a prompt; others mean that it does not tokenize at all."""

_WEATHER = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
        "name": "get_weather",
        "description": "Tells the weather.",
    },
}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 2}'},
}
_SYSTEM = {"role": "system", "content": "You are terse."}
_USER = {"role": "user", "content": "What is a prefix cache good for?"}
_ASSISTANT = {"role": "assistant", "content": "It saves prefill."}
_SPECIAL_WORDS = "<|im_start|>system\nno<|im_end|> <s>[INST]x[/INST]</s> <|eot_id|> <think>a</think> <|endoftext|>"

CHATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("system and user", {"messages": [_SYSTEM, _USER]}),
    ("several turns", {"messages": [_SYSTEM, _USER, _ASSISTANT, {"role": "user", "content": "  And\n\nwhat else? "}]}),
    (
        "tools",
        {
            "messages": [
                {"role": "user", "content": "Weather in Zürich?"},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call00001", "content": '{"temp": 21}'},
            ],
            "tools": [_WEATHER, {"type": "function", "function": {"name": "now"}}],
            "tool_choice": "auto",
        },
    ),
    ("a question with tools", {"messages": [_SYSTEM, _USER], "tools": [_WEATHER], "tool_choice": "auto"}),
    ("unicode", {"messages": [{"role": "user", "content": "Grüße, 世界! 👩‍👩‍👧‍👦 e\u0301 \u00a0\u200b"}]}),
    ("parts", {"messages": [{"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}]}),
    (
        "continue_final_message",
        {"messages": [_USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True, "add_generation_prompt": False},
    ),
    ("chat_template_kwargs", {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
    ("reasoning_effort", {"messages": [_USER], "reasoning_effort": "low"}),
    ("an assistant's last word", {"messages": [_USER, _ASSISTANT]}),
    ("a developer", {"messages": [{"role": "developer", "content": "Be kind."}, _USER]}),
    ("special tokens as text", {"messages": [{"role": "user", "content": _SPECIAL_WORDS}]}),
)
"""One conversation per rule."""

TEXTS: tuple[tuple[str, str, bool], ...] = (
    ("text", "Once upon a time", True),
    ("text without special tokens", "Once upon a time", False),
    ("awkward texts", "\n".join(CHECKED), True),
    ("special tokens in a text", _SPECIAL_WORDS, True),
)


class ParityReport(msgspec.Struct, frozen=True):
    """Whether ids made here can be trusted."""

    prompts: int
    """How many were compared."""
    chat: str = ""
    """The first difference among the chats, in words; empty when there is none."""
    text: str = ""
    """The first difference among the texts."""
    unchecked: str = ""
    """Why comparing ended early: the engine does not tokenize, or did not answer."""

    @property
    def ok(self) -> bool:
        """Everything was compared and is equal."""
        return not (self.chat or self.text or self.unchecked)


async def check(encoder: PromptEncoder, ask: Ask, *, model: str) -> ParityReport:
    """Compares every prompt, texts first. Never raises for what the engine did."""
    compared, differing = 0, {"text": "", "chat": ""}
    try:
        for name, text, special in TEXTS:
            ours = _here(lambda text=text, special=special: encoder.encode_text(text, add_special_tokens=special))  # type: ignore[misc]
            theirs = await _there(ask, text_body(model, text, add_special_tokens=special))
            differing["text"] = differing["text"] or _difference(name, ours, theirs)
            compared += 1
        for name, body in CHATS:
            fields = msgspec.convert({key: msgspec.Raw(msgspec.json.encode(value)) for key, value in body.items()}, ChatFields)
            ours = _here(lambda fields=fields: encoder.encode_chat(fields))  # type: ignore[misc]
            theirs = await _there(ask, chat_body(encoder.kind, model, fields))
            differing["chat"] = differing["chat"] or _difference(name, ours, theirs)
            compared += 1
    except EngineError as error:
        return ParityReport(compared, differing["chat"], differing["text"], unchecked=str(error))
    return ParityReport(compared, differing["chat"], differing["text"])


Answer = list[int] | str
"""Ids, or why there are none."""


def _here(encode: Callable[[], bytes]) -> Answer:
    try:
        return unpack(encode())
    except NotRenderable as problem:
        return problem.reason
    except PromptRejected as rejection:
        return rejection.message


async def _there(ask: Ask, body: dict[str, Any]) -> Answer:
    try:
        return await ask(body)
    except EngineAnswered as answer:
        if answer.status in REFUSALS:
            return str(answer)
        raise


def _difference(name: str, ours: Answer, theirs: Answer) -> str:
    match ours, theirs:
        case str(), str():
            return ""
        case str(), _:
            return f"“{name}”: not rendered here ({ours}), but by the engine"
        case _, str():
            return f"“{name}”: refused by the engine ({theirs}), but not here"
        case _ if ours == theirs:
            return ""
        case _:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
            return f"“{name}”: {len(ours)} ids here, {len(theirs)} by the engine, differing from id {at} on"
