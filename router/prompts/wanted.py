"""What is to be tokenized? A chat or a text; both can be encoded here, and both can be put to an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from engines.types import EngineKind
from router.prompts import asking
from router.prompts.chat import ChatFields
from router.prompts.dialect import ChatPrompt
from router.prompts.encoder import PromptEncoder
from router.prompts.errors import NotRenderable, PromptRejected
from router.prompts.template import ChatTemplate

Outcome = bytes | NotRenderable | PromptRejected
"""Packed ids, or why there are none."""


class Chat(msgspec.Struct, frozen=True):
    """The prompt of a chat body."""

    fields: ChatFields
    raw: bytes
    """What the fields were decoded from."""

    @property
    def size(self) -> int:
        """About its length in characters."""
        return self.fields.prompt_bytes()

    def encode(self, encoders: Sequence[PromptEncoder]) -> list[Outcome]:
        """One outcome per encoder; encoders that hand the same to the same template share the work and the ids."""
        done: list[tuple[ChatTemplate, ChatPrompt, Outcome]] = []
        return [self._encode(encoder, done) for encoder in encoders]

    def body(self, kind: EngineKind, model: str) -> dict[str, Any]:
        """What an engine's `/tokenize` is asked. Raises `NotRenderable`."""
        return asking.chat_body(kind, model, self.fields)

    def digest(self, asked: object) -> bytes:
        """Equal for equal chats put to engines that answer alike."""
        return _digest(asked, self.raw)

    def _encode(self, encoder: PromptEncoder, done: list[tuple[ChatTemplate, ChatPrompt, Outcome]]) -> Outcome:
        try:
            template, prompt = encoder.prepare(self.fields)
            for known, same, outcome in done:
                if known is template and same == prompt:
                    return outcome
            outcome = encoder.encode_prepared(template, prompt)
        except (NotRenderable, PromptRejected) as problem:
            return problem
        done.append((template, prompt, outcome))
        return outcome


class Text(msgspec.Struct, frozen=True):
    """The prompt of a completions body."""

    text: str
    add_special_tokens: bool = True

    @property
    def size(self) -> int:
        """Its length in characters."""
        return len(self.text)

    def encode(self, encoders: Sequence[PromptEncoder]) -> list[Outcome]:
        """One outcome per encoder; encoders of one model share it, for no dialect changes a text."""
        done: dict[bytes, Outcome] = {}
        for encoder in encoders:
            if encoder.model.digest not in done:
                done[encoder.model.digest] = self._encode(encoder)
        return [done[encoder.model.digest] for encoder in encoders]

    def body(self, kind: EngineKind, model: str) -> dict[str, Any]:  # noqa: ARG002 - both kinds take the same, chats do not
        """What an engine's `/tokenize` is asked."""
        return asking.text_body(model, self.text, add_special_tokens=self.add_special_tokens)

    def digest(self, asked: object) -> bytes:
        """Equal for equal texts put to engines that answer alike."""
        return _digest((asked, self.add_special_tokens), self.text.encode("utf-8", "surrogatepass"))

    def _encode(self, encoder: PromptEncoder) -> Outcome:
        try:
            return encoder.encode_text(self.text, add_special_tokens=self.add_special_tokens)
        except NotRenderable as problem:
            return problem


Wanted = Chat | Text


def _digest(asked: object, prompt: bytes) -> bytes:
    told = hashlib.blake2b(repr(asked).encode(), digest_size=16)
    told.update(b"\0" + prompt)
    return told.digest()
