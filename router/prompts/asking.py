"""What is an engine's `/tokenize` asked, so that its answer is the ids a request would have?

`/tokenize` takes fewer fields than a chat: what it would ignore is put where it does not.
"""

from __future__ import annotations

from typing import Any

from engines.types import EngineKind
from router.prompts.chat import ChatFields, decode
from router.prompts.errors import NotRenderable

PATH = "/tokenize"

_SHARED = ("messages", "tools", "continue_final_message")
_VLLM = ("add_generation_prompt", "add_special_tokens")
_SGLANG = ("tool_choice", "reasoning_effort", "reasoning")
_FIXED_LATER = ("truncate_prompt_tokens", "chat_template", "prompt_embeds")


def chat_body(kind: EngineKind, model: str, fields: ChatFields) -> dict[str, Any]:
    """The body that asks for a chat's ids. Raises `NotRenderable` when even the engine's answer would not be those."""
    body = decode(fields)
    for name in _FIXED_LATER:
        if name in body:
            raise NotRenderable(f"{name}: /tokenize does not apply it", ask_engine=False)
    kwargs = dict(body.get("chat_template_kwargs") or {})
    if kind is EngineKind.VLLM:
        names: tuple[str, ...] = _SHARED + _VLLM
        kwargs |= {name: body[name] for name in ("documents", "reasoning_effort") if name in body}
        if "reasoning_effort" in body:
            kwargs.setdefault("enable_thinking", body["reasoning_effort"] != "none")
    else:
        names = _SHARED + _SGLANG  # without add_generation_prompt: given, it makes SGLang render otherwise than for a chat
    asked = {"model": model, **{name: body[name] for name in names if name in body}}
    if kwargs:
        asked["chat_template_kwargs"] = kwargs
    if kind is EngineKind.VLLM:
        asked["messages"] = [_with_reasoning(message) for message in asked.get("messages", [])]
    return asked


def text_body(model: str, text: str, *, add_special_tokens: bool) -> dict[str, Any]:
    """The body that asks for a completion prompt's ids."""
    return {"model": model, "prompt": text, "add_special_tokens": add_special_tokens}


def _with_reasoning(message: object) -> object:
    """A chat to vLLM has `reasoning_content` renamed, /tokenize does not do it."""
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**rest, "reasoning": message.get("reasoning") or message["reasoning_content"]}
