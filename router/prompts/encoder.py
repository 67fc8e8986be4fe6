"""Which ids will an engine of one kind make of a prompt, given one model's files? Pure computation, once everything is loaded."""

from __future__ import annotations

import contextlib
import ctypes

import msgspec

from engines.types import EngineKind
from router.prompts.chat import ChatFields, chat_prompt
from router.prompts.dialect import ChatPrompt
from router.prompts.errors import NotRenderable
from router.prompts.files import ModelFiles
from router.prompts.template import ChatTemplate
from router.prompts.tokenizer import Tokenizer

_BUILT_IN_CODE = frozenset({"gpt_oss"})
"""Models whose prompts the engines build in code; the template in their files is not what is used, nor is `/tokenize`."""


def load_model(files: ModelFiles) -> PromptModel:
    """The files, loaded, and what loading took given back to the system: of a 128k-token vocabulary 117 MB stay instead of 273.

    Takes long (a large tokenizer: seconds); call it in a thread. Raises `TokenizerNotFound`.
    """
    model = PromptModel(files)
    with contextlib.suppress(OSError, AttributeError):  # glibc only; elsewhere there is nothing to do
        ctypes.CDLL(None).malloc_trim(0)
    return model


class PromptModel:
    """A model's files, loaded: shared by the encoders of all dialects."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises `TokenizerNotFound` when the tokenizer cannot be read."""
        self.folder = files.folder
        self.digest = files.digest
        self.tokenizer = Tokenizer(files.tokenizer)
        self.special_tokens = files.special_tokens
        self.no_chat = ""
        """Why chat prompts cannot be rendered with these files; empty when they can."""
        self._templates: dict[str, ChatTemplate] = {}
        if files.model_type in _BUILT_IN_CODE:
            self.no_chat = f"{files.model_type} prompts are built in the engine's code"
            return
        try:
            self._templates = {name: ChatTemplate(source) for name, source in files.templates.items()}
        except NotRenderable as problem:
            self.no_chat = problem.reason
        if not self._templates and not self.no_chat:
            self.no_chat = "the model has no chat template"

    @property
    def engine_can_chat(self) -> bool:
        """Whether the engine's `/tokenize` is right for chats."""
        return "built in the engine's code" not in self.no_chat

    def template(self, *, with_tools: bool) -> ChatTemplate:
        """The template a conversation is rendered with. Raises `NotRenderable`."""
        if self.no_chat:
            raise NotRenderable(self.no_chat, ask_engine=self.engine_can_chat)
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if (found := self._templates.get(name)) is not None:
                return found
        raise NotRenderable(f"of several chat templates ({', '.join(sorted(self._templates))}) none is the default")


class PromptEncoder:
    """Makes an engine kind's ids of prompts for one model."""

    def __init__(self, model: PromptModel, kind: EngineKind) -> None:
        self.model = model
        self.kind = kind

    def prepare(self, fields: ChatFields) -> tuple[ChatTemplate, ChatPrompt]:
        """What will be rendered, and with what. Encoders of one model that agree here make the same ids.

        Raises `NotRenderable`.
        """
        template = self.model.template(with_tools=_given(fields.tools))
        return template, chat_prompt(self.kind, fields, template.shape)

    def encode_prepared(self, template: ChatTemplate, prompt: ChatPrompt) -> bytes:
        """The packed ids. Raises `NotRenderable` and `PromptRejected`."""
        ids = self.encode_text(self._render(template, prompt), add_special_tokens=prompt.add_special_tokens)
        return ids + self._tail(prompt.tail) if prompt.tail else ids

    def encode_chat(self, fields: ChatFields) -> bytes:
        """The packed ids of a chat. Raises `NotRenderable` and `PromptRejected`."""
        return self.encode_prepared(*self.prepare(fields))

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """The packed ids of a completion's prompt. Raises `NotRenderable`."""
        try:
            return self.model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise NotRenderable("the prompt is not text: it has half of a surrogate pair", ask_engine=False) from error

    def _render(self, template: ChatTemplate, prompt: ChatPrompt) -> str:
        variables = self.model.special_tokens | prompt.variables
        if prompt.flat_tools is None:
            return template.render(variables, continue_final_message=prompt.continue_final_message)
        try:
            return template.render(variables)
        except Exception:  # noqa: BLE001 - whatever it was, the engine tries again with flat tools and reports that failure
            return template.render(variables | {"tools": list(prompt.flat_tools)})

    def _tail(self, text: str) -> bytes:
        """SGLang encodes the message it continues as if it stood alone, and drops the token that marks a beginning."""
        ids = self.encode_text(text)
        bos = self.model.special_tokens.get("bos_token")
        first = None if bos is None else self.model.tokenizer.special_ids(bos)
        return ids[4:] if first is not None and ids[:4] == first.to_bytes(4, "little") else ids


def _given(field: msgspec.Raw | msgspec.UnsetType) -> bool:
    return isinstance(field, msgspec.Raw) and bytes(field).strip() not in {b"null", b""}
