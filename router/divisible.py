"""Can two engines share this request? Not when it asks for more than one sequence, or for what only whoever computes the prompt can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import UNSET, Raw

from router.disagg import Why
from router.routes import PromptForm, Route
from router.token_ids import absent

SPLIT_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate"})
_MANY_OPENINGS: Final = (b'"', b"[", b"{")


def undivided(route: Route, fields: Mapping[str, Raw]) -> Why | None:
    """Why a request with this body, to one of `SPLIT_PATHS`, cannot be shared between two engines; None when it can."""
    if route.form is PromptForm.GENERATE and "sampling_params" in fields:
        fields = {**fields, **_object(fields["sampling_params"])}
    if any(_number(fields.get(name)) > 1 for name in ("n", "best_of")) or not absent(fields.get("use_beam_search", UNSET)):
        return Why.SEQUENCES
    prompts = [fields[name] for name in ("prompt", "text", "input_ids") if name in fields]
    if any(map(_many, prompts)) or not absent(fields.get("prompt_embeds", UNSET)):
        return Why.SEQUENCES
    if not (absent(fields.get("echo", UNSET)) and absent(fields.get("prompt_logprobs", UNSET))):  # a 0 asks for the prompt's own
        return Why.PROMPT_ASKED
    return None


def _object(raw: Raw) -> dict[str, Raw]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Raw])
    except msgspec.DecodeError:
        return {}


def _many(prompt: Raw) -> bool:
    """Whether it is a list of prompts, be it of one; a list of numbers is one prompt."""
    text = bytes(prompt)
    return text.startswith(b"[") and text[1:].lstrip().startswith(_MANY_OPENINGS)


def _number(raw: Raw | None) -> int:
    try:
        return 0 if raw is None else msgspec.json.decode(raw, type=int)
    except msgspec.DecodeError:
        return 0
