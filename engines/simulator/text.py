"""How does an engine turn a request into token ids, and ids into text? With the model folder's own tokenizer and chat template.

This is written apart from the router's own rendering on purpose: that the two agree is something tests can then show.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

from engines.simulator.words import Words
from engines.types import EngineKind

SHIPPED = pathlib.Path(__file__).parent / "model"
_PLAIN_WORD = re.compile(r"[ĠA-Za-z][a-z]+")
_FALLBACK_CONTEXT = 32_768


class PromptRefused(ValueError):
    """The request cannot be turned into a prompt; the message says why, for the client."""


class Encoder(Protocol):
    """The part of a tokenizer that is used here."""

    def encode(self, text: str) -> list[int]:
        """Text with special tokens in it → ids, none added."""

    def decode(self, ids: list[int]) -> str:
        """Ids → text, special tokens left out."""


class _Fast:
    def __init__(self, path: str) -> None:
        import fastokens  # noqa: PLC0415 - not every tokenizer.json is supported; then it is not needed

        self._tokenizer = fastokens.Tokenizer.from_file(path)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class _Reference:
    def __init__(self, path: str) -> None:
        import tokenizers  # noqa: PLC0415 - only where fastokens does not do

        self._tokenizer = tokenizers.Tokenizer.from_file(path)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class ModelText(msgspec.Struct, frozen=True):
    """A model folder, as far as a text goes."""

    folder: str
    context: int
    vocabulary: int
    encoder: Encoder
    words: Words
    template: jinja2.Template
    knows_developer: bool
    """Whether the template has a word for the role `developer`."""

    def encode(self, text: str) -> list[int]:
        """Text → ids."""
        return self.encoder.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Ids → text."""
        return self.encoder.decode(ids)

    def render(self, request: Mapping[str, Any], kind: EngineKind) -> str:
        """A chat request → the prompt's text. Raises PromptRefused."""
        try:
            return self._render(request, kind)
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Whatever a template or a message makes of the other is the client's fault.
            raise PromptRefused(str(error)) from error

    def _render(self, request: Mapping[str, Any], kind: EngineKind) -> str:
        continued = bool(request.get("continue_final_message"))
        opened = request.get("add_generation_prompt", True) and not (continued and kind is EngineKind.VLLM)
        messages = [_message(message, kind) for message in request["messages"]]
        tail = ""
        if kind is EngineKind.SGLANG and messages and messages[-1]["role"] == "assistant":
            if continued:
                tail = messages.pop()["content"]
            else:
                messages[-1]["role"] = "user"
        if not self.knows_developer and kind is EngineKind.VLLM:
            messages = _systems_first(messages)
        tools = _tools(request.get("tools")) if kind is EngineKind.VLLM else _sglang_tools(request.get("tools"), request.get("tool_choice"))
        arguments = _template_arguments(request)
        text = self.template.render(messages=messages, tools=tools, add_generation_prompt=opened, **arguments)
        if kind is EngineKind.VLLM and continued:
            text = _cut_after(text, messages[-1]["content"])
        return text + tail


@functools.lru_cache(maxsize=4)
def load(folder: str) -> ModelText:
    """Read a model folder, once; "" is the shipped one. Raises OSError, ValueError or KeyError where it is not one. About 90 ms."""
    path = pathlib.Path(folder) if folder else SHIPPED
    settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocabulary = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    source = settings.get("chat_template") or (path / "chat_template.jinja").read_text(encoding="utf-8")
    encoder = _encoder(str(path / "tokenizer.json"))
    return ModelText(
        folder=str(path),
        context=int(config.get("max_position_embeddings", _FALLBACK_CONTEXT)),
        vocabulary=int(config.get("vocab_size", len(vocabulary))),
        encoder=encoder,
        words=_words(vocabulary, encoder),
        template=_environment().from_string(source),
        knows_developer="developer" in source,
    )


def _encoder(path: str) -> Encoder:
    try:
        return _Fast(path)
    except ValueError:
        return _Reference(path)


def _words(vocabulary: Mapping[str, int], encoder: Encoder) -> Words:
    """Words with a space before them that encode to themselves."""
    candidates = {token: " " + piece[1:] for piece, token in vocabulary.items() if piece[0] == "Ġ" and _PLAIN_WORD.fullmatch(piece)}
    sayable = {token: text for token, text in candidates.items() if encoder.encode(text) == [token]}
    return Words(sayable or {vocabulary[piece]: piece for piece in vocabulary if piece.isascii() and piece.isalpha()})


def _environment() -> jinja2.Environment:
    """Jinja as transformers sets it up for chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: object, indent: int | None = None, **_: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    helpers: dict[str, Callable[..., Any]] = {"raise_exception": refuse}
    environment.globals.update(helpers)
    environment.filters["tojson"] = tojson
    return environment


def _message(message: Mapping[str, Any], kind: EngineKind) -> dict[str, Any]:
    """One message as engines hand it to a template that wants text."""
    read = dict(message)
    content = read.get("content")
    if isinstance(content, list):
        joint = "\n" if kind is EngineKind.VLLM else " "
        read["content"] = joint.join(_text_of(part) for part in content)
    elif content is None:
        read["content"] = ""
    if read.get("tool_calls"):
        read["tool_calls"] = [_tool_call(call) for call in read["tool_calls"]]
    return read


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    msg = "this model takes text only"
    raise PromptRefused(msg)


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments come as a JSON string and are handed on as an object; what is no object becomes {}."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    function["arguments"] = arguments or {}
    return {**call, "function": function}


def _tools(tools: object) -> list[dict[str, Any]] | None:
    """Tools in the engines' own form: known keys, in their order, absent ones as null."""
    if not isinstance(tools, list) or not tools:
        return None
    return [
        {
            "type": tool.get("type", "function"),
            "function": {key: (tool.get("function") or {}).get(key) for key in ("name", "description", "parameters")},
        }
        for tool in tools
    ]


def _sglang_tools(tools: object, choice: object) -> list[dict[str, Any]] | None:
    """Tools as SGLang dumps them: the client's keys in its order, absent ones as null behind; none at all when none may be called."""
    if not isinstance(tools, list) or not tools or choice == "none":
        return None
    return [_sglang_tool(tool, tool.get("function") or {}) for tool in tools]


def _sglang_tool(tool: Mapping[str, Any], function: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: function.get(name) for name in ("description", "name", "parameters")}
    told = {name: known[name] for name in (*function, *known) if name in known}
    return {"type": tool.get("type", "function"), "function": told, "defer_loading": None}


def _systems_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages as one system message at the front, as vLLM does for templates that do not know the role."""
    if all(message.get("role") != "developer" for message in messages):
        return messages
    lead = [message for message in messages if message.get("role") in {"developer", "system"}]
    rest = [message for message in messages if message.get("role") not in {"developer", "system"}]
    return [{"role": "system", "content": "\n".join(message["content"] for message in lead)}, *rest]


def _template_arguments(request: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(request.get("chat_template_kwargs") or {})
    for name in ("messages", "tools", "add_generation_prompt"):
        arguments.pop(name, None)
    effort = request.get("reasoning_effort")
    if effort is not None:
        arguments["reasoning_effort"] = effort
        arguments.setdefault("enable_thinking", effort != "none")
    if request.get("documents") is not None:
        arguments["documents"] = request["documents"]
    return arguments


def _cut_after(text: str, final: str) -> str:
    """The prompt up to the end of its final message, as transformers cuts it for `continue_final_message`."""
    at = text.rfind(final.strip())
    if at < 0:
        msg = "continue_final_message is set but the final message does not appear in the chat after applying the chat template"
        raise PromptRefused(msg)
    whole = final.lstrip()
    return text[: at + len(whole)] if text[at : at + len(whole)] == whole else text[: at + len(final.strip())]
