"""How does SGLang prepare a conversation for its chat template?

As of 0.5.23, read off its answers and its source. Three habits of its own: a trailing assistant message becomes the user's, or with `continue_final_message` is appended after the
generation prompt; tools are tried a second time without their wrapper; what the client left out of a message stays out.
"""

from __future__ import annotations

import json
from typing import Any

from router.prompts.dialect import MEDIA, OURS, ChatPrompt, flag, only_seen, refused, template_kwargs
from router.prompts.errors import NotRenderable
from router.prompts.shape import TemplateShape

_ROLES = frozenset({"assistant", "developer", "function", "latest_reminder", "root", "system", "tool"})
_FIELDS = ("tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix")
_TEXT_PARTS = frozenset({"text", "input_text"})
_DROPPED_PARTS = frozenset({"thinking", "reasoning"})
_JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_OURS = OURS | {"add_generation_prompt", "continue_final_message"}
_EFFORTS = frozenset({"high", "low", "max", "medium", "minimal", "none", "ultra", "xhigh"})
_TRUTHS = frozenset({"1", "true", "yes", "y", "on"})
_FUNCTION_FIELDS = ("description", "name", "parameters", "strict", "defer_loading")


def chat_prompt(body: dict[str, Any], shape: TemplateShape) -> ChatPrompt:
    """The prompt for the decoded fields of a chat body. Raises `NotRenderable`."""
    messages, tail = _last_assistant(conversation(body["messages"], shape), continues=flag(body, "continue_final_message", default=False))
    offered = tools(body)
    variables = {**_kwargs(body, shape), "add_generation_prompt": True, "messages": messages, "tools": offered}
    return ChatPrompt(
        variables=only_seen(variables, shape),
        tail=tail,
        flat_tools=tuple(tool["function"] for tool in offered) if offered and "tools" in shape.variables else None,
    )


def conversation(messages: object, shape: TemplateShape) -> list[dict[str, Any]]:
    """The messages as the template sees them, before the last one is looked at."""
    if not isinstance(messages, list):
        raise refused("messages is not a list")
    return [_message(message, wraps=shape.sglang_content == "openai") for message in messages]


def tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools the template is given: none when none may be called, one when that one must be."""
    given, choice = body.get("tools"), body.get("tool_choice", "auto")
    if not given or choice == "none":
        return None
    if not isinstance(given, list):
        raise refused("tools is not a list")
    told = [_tool(tool) for tool in given]
    if isinstance(choice, str):
        return told
    chosen = choice.get("function") if isinstance(choice, dict) else None
    named = chosen.get("name") if isinstance(chosen, dict) else None
    return [tool for tool in told if tool["function"]["name"] == named] or None


def _kwargs(body: dict[str, Any], shape: TemplateShape) -> dict[str, Any]:
    kwargs = template_kwargs(body, _OURS)
    effort, thinks = _reasoning(body)
    if thinks is not None:
        kwargs = {"thinking": thinks, "enable_thinking": thinks, **kwargs}
    if effort is None:
        return kwargs
    kwargs = {"reasoning_effort": effort, **kwargs}
    return {"low_effort": True, **kwargs} if shape.low_effort and effort == "low" else kwargs


def _reasoning(body: dict[str, Any]) -> tuple[object, bool | None]:
    """(effort, whether to think) from `reasoning_effort` and from OpenRouter's `reasoning` object."""
    effort, thinks = body.get("reasoning_effort"), None
    asked = body.get("reasoning")
    if isinstance(asked, dict):
        nested = asked.get("effort") if asked.get("effort") is not None else asked.get("reasoning_effort")
        effort = nested if nested is not None else effort
        enabled = asked.get("enabled") if asked.get("enabled") is not None else asked.get("enable", False)
        if isinstance(enabled, str):
            enabled = enabled.strip().lower() in _TRUTHS
        thinks = True if enabled else None
    if effort is not None and not (isinstance(effort, str) and effort in _EFFORTS):
        raise NotRenderable("a reasoning effort that is not one of the named ones")
    return effort, thinks if effort is None else effort != "none"


def _message(message: object, *, wraps: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise refused("a message without a role")
    content = message.get("content")
    if role == "user":
        if content is None:
            raise refused("a user message without content")
        return _with_content({"role": role, "content": content}, content, wraps=wraps)
    if (role := role.lower()) not in _ROLES:
        raise refused(f"a message of role {role!r}")
    if message.get("tools"):
        raise NotRenderable("tools within a message")
    told = {"role": role, "content": "" if content is None else content}
    told |= {name: message[name] for name in _FIELDS if message.get(name) is not None}
    if "tool_calls" in told:
        told["tool_calls"] = _calls(told["tool_calls"], parses=role == "assistant")
    return _with_content(told, told["content"], wraps=wraps)


def _with_content(told: dict[str, Any], content: object, *, wraps: bool) -> dict[str, Any]:
    """Text stays; parts are joined with a space, or kept for templates that loop over them (a tool's parts never)."""
    if isinstance(content, str):
        return told
    if not isinstance(content, list):
        raise refused(f"the content of a {told['role']} message")
    parts = [part for part in map(_part, content) if part is not None]
    flat = all(part["type"] == "text" for part in parts)
    if not wraps or (told["role"] == "tool" and flat):
        return {**told, "content": " ".join(part["text"] for part in parts if part["type"] == "text")}
    told.pop("content")
    return {**told, "content": parts}


def _part(part: object) -> dict[str, Any] | None:
    if not isinstance(part, dict):
        raise refused("a content part that is not an object")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise refused("a content part without a type")
    if kind in _DROPPED_PARTS:
        return None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in MEDIA:
        raise NotRenderable(f"a content part of type {kind!r}", ask_engine=False)
    raise NotRenderable(f"an unknown content part of type {kind!r}")


def _calls(calls: object, *, parses: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise refused("tool_calls is not a list")
    told = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise refused("a tool call without a function")
        arguments = function.get("arguments")
        if parses and isinstance(arguments, str):
            arguments = _arguments(arguments)
        told.append(
            {
                "id": call.get("id"),
                "index": call.get("index"),
                "type": call.get("type", "function"),
                "function": {"name": function.get("name"), "arguments": arguments},
            }
        )
    return told


def _arguments(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text, parse_int=_integer, parse_constant=_no_constant)
    except ValueError as error:
        raise refused("tool call arguments that are not JSON") from error
    if not isinstance(parsed, dict):
        raise refused("tool call arguments that are not an object")
    return parsed


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _integer(digits: str) -> int | float:
    """As orjson, which SGLang parses with: what 64 bits do not hold becomes a float."""
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else float(number)


def _tool(tool: object) -> dict[str, Any]:
    """A tool with its function's keys in the client's order; those it left out follow as null."""
    if not isinstance(tool, dict) or not isinstance(function := tool.get("function"), dict) or not isinstance(function.get("name"), str):
        raise refused("a tool without a named function")
    if not _standard(function.get("parameters")):
        raise NotRenderable("a tool whose parameters have types that are not of JSON Schema")
    deferred = tool.get("defer_loading")
    known = {name: function.get(name) for name in _FUNCTION_FIELDS}
    if known["defer_loading"] is None:
        known["defer_loading"] = deferred
    told = {name: known[name] for name in (*function, *_FUNCTION_FIELDS) if name in known}
    for name in ("strict", "defer_loading"):
        if told[name] is None:
            del told[name]
    return {"type": tool.get("type", "function"), "function": told, "defer_loading": deferred}


def _standard(schema: object) -> bool:
    """Whether SGLang would leave the schema as it is: it rewrites names of types that come from databases."""
    if isinstance(schema, list):
        return all(map(_standard, schema))
    if not isinstance(schema, dict):
        return True
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return all(name in _JSON_TYPES for name in names if isinstance(name, str)) and all(map(_standard, schema.values()))


def _last_assistant(messages: list[dict[str, Any]], *, continues: bool) -> tuple[list[dict[str, Any]], str]:
    """(messages, text to append): a conversation never ends with the assistant, says SGLang."""
    if not messages or messages[-1]["role"] != "assistant" or not isinstance(content := messages[-1]["content"], str):
        return messages, ""
    if continues:
        return messages[:-1], content
    return [*messages[:-1], {"role": "user", "content": content}], ""
