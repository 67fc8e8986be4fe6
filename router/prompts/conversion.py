"""What conversation does vLLM make of a request in another API's form? The Messages and Responses APIs, told as chat fields.

As vLLM 0.32 does it before its chat template sees anything; compared with what its render endpoints answer. What depends on more than the
body, or would have to be guessed, is not converted, and the request is routed without overlap and with the reason.

    /v1/messages    system, messages of blocks, tools with input_schema ──┐
    /v1/responses   instructions, input items, flat tools ────────────────┴──▶ ChatFields ──▶ as any chat
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from router.prompts.chat import ChatFields
from router.prompts.dialect import refused
from router.prompts.errors import NotRenderable
from router.routes import PromptForm

Field = Raw | UnsetType

_BILLING = "x-anthropic-billing-header"


class MessagesFields(msgspec.Struct):
    """What of a Messages body reaches the prompt, besides what a chat has too."""

    system: Field = UNSET
    thinking: Field = UNSET
    output_config: Field = UNSET


class ResponsesFields(msgspec.Struct):
    """The same of a Responses body."""

    input: Field = UNSET
    instructions: Field = UNSET
    truncation: Field = UNSET
    previous_response_id: Field = UNSET
    previous_input_messages: Field = UNSET


_messages_decoder = msgspec.json.Decoder(MessagesFields)
_responses_decoder = msgspec.json.Decoder(ResponsesFields)


def chat_of(form: PromptForm, chat: ChatFields, body: bytes) -> ChatFields:
    """The chat that a body in this form is; `chat` was decoded from it. Raises `NotRenderable`, whatever the client sent."""
    try:
        return _FORMS[form](chat, body)
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError) as error:
        raise refused(f"a body of an unknown form ({error})") from error


def _of_messages(chat: ChatFields, body: bytes) -> ChatFields:
    own = _messages_decoder.decode(body)
    told: dict[str, Any] = {"messages": _messages(_value(own.system), _value(chat.messages))}
    if (tools := _value(chat.tools)) is not None:
        told["tools"] = [_messages_tool(tool) for tool in _list(tools, "tools")]
    thinking, output = _object(_value(own.thinking), "thinking"), _object(_value(own.output_config), "output_config")
    if thinking.get("type") == "disabled":
        raise NotRenderable("thinking is disabled, in a way that vLLM picks for each template", ask_engine=False)
    if output.get("effort") is not None:
        told["reasoning_effort"] = output["effort"]
    return _fields(told, chat.chat_template_kwargs)


def _of_responses(chat: ChatFields, body: bytes) -> ChatFields:
    own = _responses_decoder.decode(body)
    if _value(own.previous_response_id) is not None or _value(own.previous_input_messages) is not None:
        raise NotRenderable("it goes on from a response that is kept elsewhere", ask_engine=False)
    if _value(own.truncation) not in (None, "disabled"):
        raise NotRenderable("truncation", ask_engine=False)
    told: dict[str, Any] = {"messages": _items(_value(own.instructions), given := _value(own.input)), "add_special_tokens": True}
    if tools := _value(chat.tools):
        told["tools"] = [_responses_tool(tool) for tool in _list(tools, "tools")]
    reasoning = _object(_value(chat.reasoning), "reasoning")
    if reasoning.get("effort") is not None:
        told["reasoning_effort"] = reasoning["effort"]
    if isinstance(given, list) and _is_unfinished(given[-1]):
        told |= {"add_generation_prompt": False, "continue_final_message": True}
    return _fields(told, chat.chat_template_kwargs)


_FORMS: Final = {PromptForm.MESSAGES: _of_messages, PromptForm.RESPONSES: _of_responses}
FORMS: Final = frozenset(_FORMS)


def _fields(told: dict[str, Any], kwargs: Field) -> ChatFields:
    fields = ChatFields(**{name: Raw(msgspec.json.encode(value)) for name, value in told.items()})
    fields.chat_template_kwargs = kwargs
    return fields


def _value(field: Field) -> Any:  # noqa: ANN401  JSON
    return None if isinstance(field, UnsetType) else msgspec.json.decode(field)


def _object(value: object, name: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise refused(f"{name} is not an object")
    return value or {}


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise refused(f"{name} is not a list")
    return value


# the Messages API


def _messages(system: object, given: object) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    if system:
        parts = [system] if isinstance(system, str) else list(filter(None, map(_system_text, _list(system, "system"))))
        if parts:
            told.append({"role": "system", "content": "".join(parts)})
    for message in _list(given, "messages"):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise refused("a message of an unknown role")
        if message["role"] == "system":
            raise NotRenderable("a system message within the conversation, which vLLM places by the template", ask_engine=False)
        _add_message(told, message["role"], message.get("content"))
    return told


def _system_text(block: object) -> str:
    if not isinstance(block, dict) or block.get("type") != "text":
        raise NotRenderable("a system prompt that is not text", ask_engine=False)
    text = block.get("text") or ""
    return "" if text.startswith(_BILLING) else text


class _Blocks(msgspec.Struct):
    """What the blocks of one message add up to."""

    results: list[dict[str, Any]] = []
    """Messages of tools, which go before it."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []

    def add(self, role: str, block: object) -> None:
        match block:
            case {"type": "text", "text": str(text)} if text:
                self.texts.append(text)
            case {"type": "thinking", "thinking": str(thinking)}:
                self.reasoning.append(thinking)
            case {"type": "text" | "thinking" | "redacted_thinking"}:
                pass  # nothing in it, or nothing that is shown to the model
            case {"type": "tool_use", "id": str(call_id), "name": str(name), **rest} if call_id:
                arguments = json.dumps(rest.get("input") or {})  # stdlib: as vLLM writes it
                self.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case {"type": "tool_result", **rest} if role == "user":
                self.results.append({"role": "tool", "tool_call_id": rest.get("tool_use_id") or "", "content": _result_text(rest)})
            case _:
                kind = block.get("type") if isinstance(block, dict) else block
                raise NotRenderable(f"a block of type {kind!r} in a message of the {role}", ask_engine=False)


def _add_message(told: list[dict[str, Any]], role: str, content: object) -> None:
    if isinstance(content, str):
        told.append({"role": role, "content": content})
        return
    blocks = _Blocks()
    for block in _list(content, "content"):
        blocks.add(role, block)
    told += blocks.results
    message: dict[str, Any] = {"role": role}
    if blocks.reasoning:
        message["reasoning"] = "".join(blocks.reasoning)
    if blocks.calls:
        message["tool_calls"] = blocks.calls
    if texts := blocks.texts:
        message["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    if role != "user" or texts:
        told.append(message)


def _result_text(block: dict[Any, Any]) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = _list(content, "the content of a tool's result")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise NotRenderable("a tool's result that is not text", ask_engine=False)
    return "\n".join(part.get("text", "") for part in parts)


def _messages_tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(schema := tool.get("input_schema"), dict):
        raise refused("a tool without input_schema")
    told = {name: tool.get(name) for name in ("name", "description")}
    told["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    return {"type": "function", "function": told | {name: tool.get(name) for name in ("strict", "defer_loading")}}


# the Responses API


def _items(instructions: object, given: object) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    if instructions:
        told.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*told, {"role": "user", "content": given}]
    if not given:
        raise refused("no input")
    first = len(told)
    for item in _list(given, "input"):
        before = told[-1] if len(told) > first and told[-1]["role"] == "assistant" else None
        message = _item(item, before)
        if message is not None:
            told.append(message)
    return told


def _item(item: object, before: dict[str, Any] | None) -> dict[str, Any] | None:
    """The message that an item is, or None where it became part of the one before, the assistant's."""
    kind = item.get("type", "message") if isinstance(item, dict) else item
    match item:
        case {"type": "function_call", "namespace": str(namespace)} if namespace:
            raise NotRenderable("a call of a function in a namespace", ask_engine=False)
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            if before is None:
                return {"role": "assistant", "tool_calls": [call]}
            before.setdefault("tool_calls", []).append(call)
            return None
        case {"type": "function_call_output", "call_id": str(call_id), "output": str(output)}:
            return {"role": "tool", "content": output, "tool_call_id": call_id}
        case {"type": "reasoning", **rest} if not rest.get("encrypted_content"):
            told = rest.get("content") or rest.get("summary") or [{"text": ""}]
            return _part_of(before, "reasoning", _first_text(told))
        case {"role": "assistant", "content": content} if kind == "message":
            return _part_of(before, "content", content if isinstance(content, str) else _first_text(content))
        case {"role": "user" | "system" | "developer" as role, "content": content} if kind == "message":
            return {"role": role, "content": content}
        case _:
            raise NotRenderable(f"an input item of type {kind!r}", ask_engine=False)


def _part_of(before: dict[str, Any] | None, name: str, text: str) -> dict[str, Any] | None:
    if before is not None and before.get(name) is None:
        before[name] = text
        return None
    return {"role": "assistant", name: text}


def _first_text(parts: object) -> str:
    """Of several parts, vLLM takes the first."""
    match parts:
        case [{"text": str(text)}, *_]:
            return text
        case _:
            raise NotRenderable("a message of the assistant without text", ask_engine=False)


def _responses_tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise NotRenderable("a tool that is no function", ask_engine=False)
    return {
        "type": "function",
        "function": {name: tool.get(name) for name in ("name", "description", "parameters", "strict", "defer_loading")},
    }


def _is_unfinished(item: object) -> bool:
    kinds = ("message", "reasoning")
    return isinstance(item, dict) and item.get("type", "message") in kinds and item.get("status") in ("in_progress", "incomplete")
