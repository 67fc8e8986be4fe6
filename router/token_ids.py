"""May an engine have the token ids that were made here, so that it need not make them again?

    request ──barrier──▶ None, or why not ─┐
    engine, its ids ───────────────────────┴─▶ Ids(body with the ids in it, FORWARDED), or the body as it is and why

The ids take the place of what they were made of, and an engine that is given them skips its template and its tokenizer: vLLM's chat takes
them in `kv_transfer_params.prompt_token_ids`, SGLang's in `input_ids`, and the completions of both as the prompt. So they are given only
where they are certainly the engine's own: made here, by rules that were compared with its `/tokenize` when it joined. Everything else in
the body stays; `messages` too, which the engines still look through for tools and media.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import UNSET, Raw

from engines.types import EngineKind
from router.routes import PromptForm

if TYPE_CHECKING:
    from engines.types import EngineInfo
    from router.openai import ApiBody
    from router.routes import Route


class Outcome(enum.StrEnum):
    """What became of a request's ids. Closed: it is a metric's label."""

    FORWARDED = "forwarded"
    # what the client asks for
    ROUTE = "route"
    """Neither a chat nor a completion."""
    HANDSHAKE = "handshake"
    """The client speaks of ids, transfers or ranks itself."""
    GIVEN = "given_as_ids"
    """The client's prompt is ids."""
    SEVERAL = "several_prompts"
    ECHO = "echo"
    """The prompt is part of the answer: `echo`, `suffix`, `prompt_logprobs`."""
    PARAMETER = "parameter"
    """What is computed is not just these ids: `prompt_embeds`, `truncate_prompt_tokens`; or a text without special tokens, which SGLang knows
    nothing of."""
    # what is known here
    UNTOKENIZED = "untokenized"
    """There are no ids: media, a template of the client's, a policy that looks at no prompts. The decision says why."""
    ENGINE_MADE = "engine_made"
    """They are an answer of the engine's `/tokenize`, which for chats is not always what it uses."""
    UNCHECKED = "parity_unchecked"
    """The engine could not be asked whether it agrees."""
    ENGINE = "engine"
    """The engine takes no ids for this, or something would be lost with them: stop strings of SGLang's built-in templates."""


class MadeIds(Protocol):
    """A prompt's ids, and who made them: `router.prompts.book.Tokens`."""

    @property
    def source(self) -> str:
        """`local`, or `engine`."""
        ...

    @property
    def count(self) -> int:
        """How many."""
        ...

    @property
    def ids(self) -> list[int]:
        """Themselves."""
        ...


class Ids(msgspec.Struct, frozen=True, gc=False):
    """A body to send, and whether the ids are in it."""

    body: bytes
    outcome: Outcome


_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_MORE_THAN_IDS: Final = ("truncate_prompt_tokens", "suffix", "image_data", "video_data", "audio_data", "input_embeds", "features")
_WHITE: Final = b" \t\r\n"


def barrier(route: Route, body: ApiBody) -> Outcome | None:
    """What in a request that has ids keeps them from being forwarded, whichever engine it goes to."""
    if route.path not in _PATHS:
        return Outcome.ROUTE
    if body.must_strip or body.input_ids is not UNSET or body.token_ids is not UNSET:
        return Outcome.HANDSHAKE
    if not (absent(body.echo) and absent(body.suffix) and absent(body.prompt_logprobs)):
        return Outcome.ECHO
    if not (absent(body.prompt_embeds) and absent(body.truncate_prompt_tokens)):
        return Outcome.PARAMETER
    if route.form is PromptForm.CHAT:
        return None
    if not body.wants_special_tokens:
        return Outcome.PARAMETER
    prompt = bytes(body.prompt).lstrip(_WHITE) if isinstance(body.prompt, Raw) else b""
    if prompt.startswith(b'"'):
        return None
    return Outcome.GIVEN if prompt[1:].lstrip(_WHITE)[:1].isdigit() else Outcome.SEVERAL


def with_ids(body: bytes, form: PromptForm, info: EngineInfo, tokens: MadeIds | None, *, checked: bool) -> Ids:
    """The body for this engine. `tokens` are its ids of this prompt; `checked`, whether it agreed when it was asked. O(body + ids)."""
    outcome = judged(form, info, tokens, checked=checked)
    if outcome is not Outcome.FORWARDED or tokens is None:
        return Ids(body, outcome)
    ids = msgspec.json.encode(tokens.ids)
    if form is PromptForm.COMPLETION:
        fields = _fields_decoder.decode(body)
        fields["prompt"] = Raw(ids)
        return Ids(msgspec.json.encode(fields), outcome)
    if info.kind is EngineKind.SGLANG:
        return Ids(with_field(body, b'"input_ids":%b' % ids), outcome)
    return Ids(with_field(body, b'"kv_transfer_params":{"prompt_token_ids":%b}' % ids), outcome)


def with_field(body: bytes, field: bytes) -> bytes:
    """A JSON object with one more field at its end, which it has not yet; its own bytes stay as they are."""
    opened = body.rstrip(_WHITE)[:-1]
    comma = b"" if opened.rstrip(_WHITE).endswith(b"{") else b","
    return b"%b%b%b}" % (opened, comma, field)


def judged(form: PromptForm, info: EngineInfo, tokens: MadeIds | None, *, checked: bool) -> Outcome:
    """Whether these are certainly the ids that the engine would make, and it takes them."""
    if tokens is None or not tokens.count:
        return Outcome.UNTOKENIZED
    if tokens.source != "local":
        return Outcome.ENGINE_MADE
    if not checked:
        return Outcome.UNCHECKED
    takes = info.chats_take_ids if form is PromptForm.CHAT else info.texts_take_ids
    return Outcome.FORWARDED if takes else Outcome.ENGINE


def is_only_ids(fields: Mapping[str, Raw]) -> bool:
    """Whether an engine computes nothing for a body with these fields but the ids of its prompt."""
    return all(absent(fields.get(name, UNSET)) for name in _MORE_THAN_IDS)


def absent(field: Raw | msgspec.UnsetType) -> bool:
    """Whether a field is not given, or says nothing: null, false, or an empty string."""
    return field is UNSET or bytes(field).strip(_WHITE) in {b"null", b"false", b'""'}
