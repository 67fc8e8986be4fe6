"""Which fields of a chat request reach the prompt, and what does an engine make of them before its template sees them?

Each engine's server rewrites a conversation in its own way; `vllm` and `sglang` know how. Both turn `ChatFields` (the client's
bytes) into a `ChatPrompt` (values a template can be rendered with):

    ChatFields ──(dialect, shape of the template)──▶ ChatPrompt ──template──▶ text ──tokenizer──▶ ids
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from engines.types import EngineKind
from router.prompts import sglang, vllm
from router.prompts.dialect import ChatPrompt
from router.prompts.errors import NotRenderable
from router.prompts.shape import TemplateShape

Field: TypeAlias = Raw | UnsetType


class ChatFields(msgspec.Struct, kw_only=True):
    """The fields of a chat body that affect the prompt, still as the client's bytes: they are decoded only when rendering.

    A request Struct inherits from it, so that the body is decoded once.
    """

    messages: Field = UNSET
    tools: Field = UNSET
    tool_choice: Field = UNSET
    documents: Field = UNSET
    chat_template: Field = UNSET
    chat_template_kwargs: Field = UNSET
    add_generation_prompt: Field = UNSET
    continue_final_message: Field = UNSET
    add_special_tokens: Field = UNSET
    reasoning_effort: Field = UNSET
    reasoning: Field = UNSET
    truncate_prompt_tokens: Field = UNSET
    prompt_embeds: Field = UNSET

    def prompt_bytes(self) -> int:
        """How long what has to be rendered is, as JSON."""
        return sum(len(memoryview(field)) for field in (self.messages, self.tools, self.documents) if isinstance(field, Raw))


_NAMES = ChatFields.__struct_fields__
_DIALECTS: dict[EngineKind, Callable[[dict[str, Any], TemplateShape], ChatPrompt]] = {
    EngineKind.VLLM: vllm.chat_prompt,
    EngineKind.SGLANG: sglang.chat_prompt,
}


def decode(fields: ChatFields) -> dict[str, Any]:
    """The fields that were given and are not null, decoded.

    Raises `NotRenderable` when one of them is not JSON, or when the ids depend on something no template sees.
    """
    body: dict[str, Any] = {}
    for name in _NAMES:
        raw = getattr(fields, name)
        if raw is UNSET:
            continue
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise NotRenderable(f"{name}: {error}", ask_engine=False) from error
        if value is not None:
            body[name] = value
    return body


def chat_prompt(kind: EngineKind, fields: ChatFields, shape: TemplateShape) -> ChatPrompt:
    """What an engine of this kind would render for these fields with a template of this shape. Raises `NotRenderable`."""
    body = decode(fields)
    if not body.get("messages"):
        raise NotRenderable("no messages", ask_engine=False)
    if "chat_template" in body:
        raise NotRenderable("the request brings its own chat template", ask_engine=False)
    if "truncate_prompt_tokens" in body:
        raise NotRenderable("truncate_prompt_tokens", ask_engine=False)
    if "prompt_embeds" in body:
        raise NotRenderable("prompt embeddings", ask_engine=False)
    try:
        return _DIALECTS[kind](body, shape)
    except RecursionError as error:
        raise NotRenderable("nested too deeply", ask_engine=False) from error
