"""Can two engines share this request? Not when it asks for more than one sequence, or for what only whoever computes the prompt can tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import UNSET, Raw

from router.disagg import Why
from router.routes import PromptForm, Route
from router.token_ids import absent

SPLIT_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate"})
_MANY_OPENINGS: Final = (b'"', b"[", b"{")
_HOW_MANY: Final = ("n", "best_of", "beam_width")
_OF_THE_PROMPT: Final = ("echo", "prompt_logprobs")
_EMBEDDED_PROMPTS: Final = re.compile(rb"\s*\[\s*\[\s*\[")


def undivided(route: Route, fields: Mapping[str, Raw]) -> Why | None:
    """Why a request with this body, to one of `SPLIT_PATHS`, cannot be shared between two engines; None when it can."""
    told = [fields, *_sampling(fields)] if route.form is PromptForm.GENERATE else [fields]
    if any(_number(one.get(name)) > 1 for one in told for name in _HOW_MANY):
        return Why.SEQUENCES
    if not all(absent(one.get("use_beam_search", UNSET)) for one in told):
        return Why.SEQUENCES
    prompts = [fields[name] for name in ("prompt", "text", "input_ids") if name in fields]
    if (
        any(map(_many, prompts))
        or not absent(fields.get("prompt_embeds", UNSET))
        or _EMBEDDED_PROMPTS.match(fields.get("input_embeds", b""))
    ):
        return Why.SEQUENCES
    if not all(absent(one.get(name, UNSET)) for one in told for name in _OF_THE_PROMPT):  # a 0 asks for the prompt's own
        return Why.PROMPT_ASKED
    if not absent(fields.get("return_logprob", UNSET)) and _number(fields.get("logprob_start_len")) >= 0:
        return Why.PROMPT_ASKED
    return None


def _sampling(fields: Mapping[str, Raw]) -> list[dict[str, Raw]]:
    """The sampling parameters of a generate body; SGLang takes a list of them even for one prompt."""
    if "sampling_params" not in fields:
        return []
    try:
        given = msgspec.json.decode(fields["sampling_params"], type=dict[str, Raw] | list[dict[str, Raw]])
    except msgspec.DecodeError:
        return []
    return [given] if isinstance(given, dict) else given


def _many(prompt: Raw) -> bool:
    """Whether it is a list of prompts, be it of one; a list of numbers is one prompt."""
    text = bytes(prompt)
    return text.startswith(b"[") and text[1:].lstrip().startswith(_MANY_OPENINGS)


def _number(raw: Raw | None) -> float:
    """A number, also one in quotes, as engines read it; -1 where there is none."""
    try:
        return -1.0 if raw is None else float(msgspec.json.decode(raw))
    except (TypeError, ValueError, OverflowError):  # msgspec's own are ValueErrors
        return -1.0
