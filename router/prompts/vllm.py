"""How does vLLM prepare a conversation for its chat template?

As of 0.32, read off its answers and its source, and checked against both. Roles and text pass; everything that is not text, or that vLLM's own validation would refuse, is not rendered here.
"""

from __future__ import annotations

import json
from typing import Any

from router.prompts.dialect import MEDIA, ChatPrompt, flag, only_seen, refused, template_kwargs
from router.prompts.errors import NotRenderable
from router.prompts.shape import TemplateShape

_PLAIN = frozenset({"assistant", "user"})
"""Roles of which nothing but the text matters when there is nothing but a text."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Type of a content part → where its text is."""

_PART_FIELDS = MEDIA | {"closed", "data", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid"}
"""Fields of content parts that vLLM knows. Others are passed on to templates that loop over the parts."""

_BILLING = "x-anthropic-billing-header"
"""A line that changes with every request; vLLM drops it from system messages so that prefixes can be shared."""


def chat_prompt(body: dict[str, Any], shape: TemplateShape) -> ChatPrompt:
    """The prompt for the decoded fields of a chat body. Raises `NotRenderable`."""
    continues = flag(body, "continue_final_message", default=False)
    opens = flag(body, "add_generation_prompt", default=True)
    if continues and opens:
        raise refused("continue_final_message needs add_generation_prompt: false")
    variables = {
        **_kwargs(body),
        "add_generation_prompt": opens,
        "messages": conversation(body["messages"], shape),
        "tools": tools(body["tools"]) if "tools" in body else None,
    }
    return ChatPrompt(
        variables=only_seen(variables, shape),
        continue_final_message=continues,
        add_special_tokens=flag(body, "add_special_tokens", default=False),
    )


def conversation(messages: object, shape: TemplateShape) -> list[dict[str, Any]]:
    """The messages as the template sees them."""
    if not isinstance(messages, list):
        raise refused("messages is not a list")
    wraps = shape.vllm_content == "openai"
    told = [_message(message, wraps=wraps) for message in messages]
    if not shape.knows_developer and any(message["role"] == "developer" for message in told):
        return _merge_systems([_as_system(message) for message in told])
    return told


def tools(given: object) -> list[dict[str, Any]]:
    """Each tool in vLLM's own order of keys: what the client left out is null, what vLLM does not know is gone."""
    if not isinstance(given, list) or not given:
        raise refused("tools is not a list of tools")
    return [_tool(tool) for tool in given]


def _kwargs(body: dict[str, Any]) -> dict[str, Any]:
    kwargs = template_kwargs(body)
    given: dict[str, Any] = {name: body[name] for name in ("documents", "reasoning_effort") if name in body}
    if "reasoning_effort" in given and "enable_thinking" not in kwargs:
        given["enable_thinking"] = given["reasoning_effort"] != "none"
    kwargs |= {name: value for name, value in given.items() if value != "auto"}
    documents = kwargs.get("documents")
    if documents is not None and not (isinstance(documents, list) and all(isinstance(item, dict) for item in documents)):
        raise refused("documents is not a list of objects")
    return kwargs


def _message(message: object, *, wraps: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise refused("a message without a role")
    if role in _PLAIN and len(message) == 2 and isinstance(text := message.get("content"), str):  # nearly all of a long chat
        return {"role": role, "content": [{"type": "text", "text": text}] if wraps else text}
    told: dict[str, Any] = {"role": role, "content": _content(_parts(role, message), wraps=wraps)}
    if role == "assistant":
        _add_assistant(told, message)
    elif role == "tool":
        if "tool_call_id" in message:
            told["tool_call_id"] = message["tool_call_id"]
        if wraps and all(part["type"] == "text" for part in told["content"]):
            told["content"] = "\n".join(part["text"] for part in told["content"])
    told |= {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}
    if role == "developer":
        if message.get("tools"):
            raise NotRenderable("tools within a message")
        told["tools"] = message.get("tools")
    return told


def _parts(role: str, message: dict[str, Any]) -> list[Any]:
    match message.get("content"):
        case str(text):
            parts: list[Any] = [{"type": "text", "text": text}]
        case list(given):
            if given and all(isinstance(part, str) for part in given):
                raise NotRenderable("content parts that are all bare strings")  # for some roles an error, for others text
            parts = given
        case None if role == "assistant" or "content" not in message:
            parts = []
        case _:
            raise refused(f"the content of a {role} message")
    return _without_billing(parts) if role == "system" else parts


def _content(parts: list[Any], *, wraps: bool) -> str | list[dict[str, Any]]:
    if wraps:
        return [part for part in map(_wrapped, parts) if part is not None]
    return "\n".join(text for text in map(_text, parts) if text)  # an empty part is no part


def _text(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise refused("a content part that is neither text nor an object")
    kind = part.get("type")
    if kind == "tool_reference" and isinstance(name := part.get("name"), str):
        return name
    if any(key in part for key in MEDIA) or (isinstance(kind, str) and kind in MEDIA):
        raise NotRenderable(f"a content part of type {kind!r}", ask_engine=False)
    if not isinstance(kind, str) or kind not in _TEXT_PARTS or "uuid" in part:
        raise NotRenderable(f"an unknown content part of type {kind!r}")
    text = part.get(_TEXT_PARTS[kind])
    if text is None and kind != "thinking":
        return None  # vLLM skips it with a warning
    if not isinstance(text, str):
        raise refused(f"a {kind} part without text")
    return text


def _wrapped(part: object) -> dict[str, Any] | None:
    text = _text(part)
    if text is None:
        return None
    if isinstance(part, dict) and part["type"] == "tool_reference":
        return {"type": "tool_reference", "name": text}
    extra = {name: value for name, value in part.items() if name not in _PART_FIELDS} if isinstance(part, dict) else {}
    return {"type": "text", "text": text, **extra}


def _without_billing(parts: list[Any]) -> list[Any]:
    kept = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not (isinstance(text, str) and text.startswith(_BILLING)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _add_assistant(told: dict[str, Any], message: dict[str, Any]) -> None:
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise refused("tool_calls is not a list")
        told["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        told["reasoning"] = told["reasoning_content"] = reasoning


def _call(call: object) -> dict[str, Any]:
    """A tool call in the order of vLLM's schema, its arguments an object whatever they were."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict) or call.get("type") != "function":
        raise refused("a tool call that is not of type function")
    if not (isinstance(call.get("id"), str) and isinstance(function.get("name"), str)):
        raise refused("a tool call without id or name")
    if not isinstance(arguments := function.get("arguments"), str):
        raise refused("a tool call whose arguments are not a string")
    told = {**function, "arguments": _arguments(arguments)}
    ordered = {"arguments": told.pop("arguments"), "name": told.pop("name"), **told}
    rest = {name: value for name, value in call.items() if name not in {"id", "function", "type"}}
    return {"id": call["id"], "function": ordered, "type": call["type"], **rest}


def _arguments(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text) if text else {}  # stdlib: vLLM's takes NaN and infinities too
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(function := tool.get("function"), dict) or tool.get("type", "function") != "function":
        raise refused("a tool that is not of type function")
    if not isinstance(function.get("name"), str):
        raise refused("a tool without a name")
    deferred = tool.get("defer_loading")
    told = {name: function.get(name) for name in ("name", "description", "parameters")}
    optional = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    told |= {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": told} | ({} if deferred is None else {"defer_loading": deferred})


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _merge_systems(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one in front, unless there is only one and it is there already."""
    systems = [message for message in messages if message["role"] == "system"]
    if len(systems) == 1 and messages[0]["role"] == "system":
        return messages
    texts = [
        content if isinstance(content := message["content"], str) else "\n".join(part["text"] for part in content if "text" in part)
        for message in systems
    ]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]
