"""What do all engines' ways of preparing a conversation have in common?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from router.prompts.errors import NotRenderable
from router.prompts.shape import TemplateShape


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation as the engine hands it to the template. Two that are equal give the same ids."""

    variables: dict[str, Any]
    """What the template sees, without the tokenizer's special tokens."""
    continue_final_message: bool = False
    """The text ends inside the last message, which is rendered open-ended."""
    add_special_tokens: bool = False
    tail: str = ""
    """Text encoded on its own and appended after the rendered prompt (SGLang's way to continue a message)."""
    flat_tools: tuple[Any, ...] | None = None
    """Tools without their wrapper, for a second try when the template fails with `variables`."""


MEDIA = frozenset(
    {"audio", "audio_embeds", "audio_url", "file", "image", "image_embeds", "image_pil", "image_url", "input_audio", "input_image"}
    | {"prompt_embeds", "video", "video_embeds", "video_url"}
)
"""Keys and types that mark a content part as more than text."""

OURS = frozenset(
    {"chat_template", "conversation", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"}
    | {"return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"}
)
"""Names in `chat_template_kwargs` that steer the rendering itself instead of reaching the template."""


def template_kwargs(body: Mapping[str, Any], reserved: frozenset[str] = OURS) -> dict[str, Any]:
    """The request's own template variables. Raises `NotRenderable` when they would steer more than the template."""
    kwargs = body.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise refused("chat_template_kwargs is not an object")
    if taken := sorted(kwargs.keys() & reserved):
        raise NotRenderable(f"chat_template_kwargs sets {', '.join(taken)}")
    return dict(kwargs)


def flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A boolean field. Raises `NotRenderable` when it is something else that the engine might still read as one."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise NotRenderable(f"{name} is not true or false")
    return value


def refused(why: str) -> NotRenderable:
    """The engine itself will answer with a 400: it is asked nothing beforehand, and its answer is the client's."""
    return NotRenderable(f"the engine refuses this: {why}", ask_engine=False)


def only_seen(variables: Mapping[str, Any], shape: TemplateShape) -> dict[str, Any]:
    """The variables the template mentions: leaving out the others changes nothing and lets dialects agree."""
    return {name: value for name, value in variables.items() if name in shape.variables}
