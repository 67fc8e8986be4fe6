"""Which fields of a chat request reach the prompt, and which template variables does an engine make of them?"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType

Field = Raw | UnsetType


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
    truncate_prompt_tokens: Field = UNSET
    truncation_side: Field = UNSET
    reasoning: Field = UNSET
    task: Field = UNSET
