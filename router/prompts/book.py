"""Which prompts has each engine's own dialect been learned for? One encoder per (tokenizer files, engine kind), shared by engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec

from engines.types import EngineInfo
from router.prompts.chat import ChatFields

Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""`await post(path, body)`: the engine's JSON answer. Raises `EngineRefused` on a 4xx, another `EngineError` on anything else."""


class Tokens(msgspec.Struct, frozen=True):
    """A prompt as the engine will see it."""

    ids: list[int]
    packed: bytes
    """The ids as little-endian u32, ready to be hashed."""
    source: Literal["local", "engine"]


class Prompt(msgspec.Struct, frozen=True):
    """One prompt for several engines. Engines that agree share one `Tokens` object (compare by `is`)."""

    tokens: dict[str, Tokens]
    """By engine id; an engine whose ids could not be told is absent."""
    reasons: dict[str, str]
    """By engine id: why it is absent."""


class TokenizerStatus(msgspec.Struct, frozen=True):
    """What prompts for an engine are tokenized with."""

    local: bool
    line: str
    """For the log and the fleet page: `fastokens, parity ok (9 prompts)`."""


class PromptBook:
    """Knows an encoder per engine."""

    def __init__(self, *, tokenizer: str | None = None, ask_timeout_s: float = 1.0) -> None:
        """`tokenizer`: folder or hub name looked in before each engine's own (the `--tokenizer` setting)."""
        raise NotImplementedError

    async def join(self, info: EngineInfo, post: Post) -> TokenizerStatus:
        """Afterwards prompts can be tokenized for this engine, in the way the status tells. Never raises for what an engine did."""
        raise NotImplementedError

    def leave(self, engine_id: str) -> None:
        """The engine is forgotten; its encoder goes when no other engine uses it."""
        raise NotImplementedError

    def status(self, engine_id: str) -> TokenizerStatus | None:
        """As `join` returned it."""
        raise NotImplementedError

    async def tokens_chat(self, engines: Sequence[str], fields: ChatFields, body: bytes) -> Prompt:
        """The prompt of a chat body, for each of `engines`.

        Raises `PromptRejected` when every dialect's template refuses it, `NotRenderable` when no engine's ids could be told.
        """
        raise NotImplementedError

    async def tokens_text(self, engines: Sequence[str], text: str, *, add_special_tokens: bool = True) -> Prompt:
        """The prompt of a completions text, for each of `engines`. Raises `NotRenderable`."""
        raise NotImplementedError


def pack(ids: Sequence[int]) -> bytes:
    """Ids as little-endian u32: for prompts that come as token ids. Raises `ValueError` when one is not a u32."""
    raise NotImplementedError
