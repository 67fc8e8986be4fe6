"""How is a prompt tokenized for each engine? One encoder per (tokenizer files, engine kind), shared by the engines that agree.

    join ──▶ files found? ──▶ loaded ──▶ parity with the engine's /tokenize? ──yes──▶ ids are made here
                  └── no ────────┴───────────────── no ───────────────────────────▶ the engine is asked, with a time limit

Whatever is decided is told in the status; a request never fails for want of ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from engines.types import EngineInfo
from router.errand import in_task
from router.prompts import asking, parity
from router.prompts.asker import Asker, Post
from router.prompts.chat import ChatFields
from router.prompts.encoder import PromptEncoder, load_model
from router.prompts.errors import NotRenderable, PromptRejected, TokenizerNotFound
from router.prompts.files import find_model_files
from router.prompts.memo import Memo
from router.prompts.tokenizer import pack, unpack
from router.prompts.wanted import Chat, Outcome, Text, Wanted

__all__ = ["Post", "Prompt", "PromptBook", "TokenizerStatus", "Tokens", "pack"]


class Tokens:
    """A prompt as the engine will see it."""

    __slots__ = ("_ids", "packed", "source")

    def __init__(self, ids: list[int] | None, packed: bytes, source: Literal["local", "engine"]) -> None:
        """`packed`: the ids as little-endian u32, ready to be hashed. `ids`: the same as a list, where it exists already."""
        self._ids = ids
        self.packed = packed
        self.source = source

    @property
    def count(self) -> int:
        """How many ids. O(1)."""
        return len(self.packed) // 4

    @property
    def ids(self) -> list[int]:
        """The ids as a list, made on the first call (some 30 ns an id) and kept: hashing needs only `packed`."""
        if self._ids is None:
            self._ids = unpack(self.packed)
        return self._ids


class Prompt(msgspec.Struct, frozen=True):
    """One prompt for several engines. Engines that agree share one `Tokens` object (compare by `is`)."""

    tokens: dict[str, Tokens]
    """By engine id; an engine whose ids could not be told is absent."""
    reasons: dict[str, str]
    """By engine id: why it is absent."""


class TokenizerStatus(msgspec.Struct, frozen=True):
    """What an engine's prompts are tokenized with."""

    chat_local: bool
    text_local: bool
    checked: bool
    """Whether the ids made here were compared with the engine's."""
    line: str
    """For the log and the fleet page: `fastokens, parity ok (16 prompts)`."""

    @property
    def local(self) -> bool:
        """No prompt needs asking the engine, but for those that cannot be rendered here at all."""
        return self.chat_local and self.text_local


class _Entry(msgspec.Struct, frozen=True):
    """What is known of one engine."""

    info: EngineInfo
    asker: Asker
    encoder: PromptEncoder | None
    status: TokenizerStatus

    def encoder_for(self, wanted: Wanted) -> PromptEncoder | None:
        """Its encoder, where it can be trusted."""
        local = self.status.chat_local if isinstance(wanted, Chat) else self.status.text_local
        return self.encoder if local else None

    def not_asked(self, wanted: Wanted) -> str:
        """Why its `/tokenize` is no use for this prompt; empty when it is."""
        known = self.encoder is not None and isinstance(wanted, Chat) and not self.encoder.model.engine_can_chat
        return self.encoder.model.no_chat if self.encoder is not None and known else ""

    @property
    def asks(self) -> tuple[object, ...]:
        """Engines that are equal here answer `/tokenize` alike."""
        return (self.info.kind, self.info.version, self.info.tokenizer, self.asker.model, self.status.line)


class PromptBook:
    """Knows for every engine that joined how its prompts are tokenized."""

    def __init__(self, *, tokenizer: str | None = None, hub_cache: Path | None = None, ask_timeout_s: float = 1.0) -> None:
        """`tokenizer`: folder or hub name to look in before the engines' own (the `--tokenizer` setting)."""
        self._tokenizer = tokenizer
        self._hub_cache = hub_cache
        self._ask_timeout_s = ask_timeout_s
        self._entries: dict[str, _Entry] = {}
        self._memo = Memo()
        self._loading = asyncio.Lock()  # two engines of one model that join together must not load its tokenizer twice

    async def join(self, info: EngineInfo, post: Post) -> TokenizerStatus:
        """Afterwards prompts can be tokenized for this engine, in the way the status tells.

        Never raises for what an engine did, or for want of files. Takes seconds for a large tokenizer that is not loaded yet.
        """
        asker = Asker(post, _model_of(info), timeout_s=self._ask_timeout_s)
        best, problems = _Entry(info, asker, None, TokenizerStatus(chat_local=False, text_local=False, checked=False, line="")), []
        for where in self._places(info):
            try:
                encoder = await self._load(where, info)
            except TokenizerNotFound as problem:
                problems.append(str(problem))
                continue
            status = _status(encoder, await parity.check(encoder, asker.ids, model=asker.model))
            if best.encoder is None or status.chat_local > best.status.chat_local:
                best = _Entry(info, asker, encoder, status)
            if status.local:
                break
        if best.encoder is None:
            why = "; ".join(problems) or "the engine does not say where its tokenizer is; name it with --tokenizer"
            line = f"engine's own {asking.PATH}: {why}"
            best = _Entry(info, asker, None, TokenizerStatus(chat_local=False, text_local=False, checked=False, line=line))
        self._entries[info.id] = best
        return best.status

    def leave(self, engine_id: str) -> None:
        """The engine is forgotten; its encoder goes when no other engine uses it."""
        self._entries.pop(engine_id, None)

    def status(self, engine_id: str) -> TokenizerStatus | None:
        """As `join` returned it; None for an engine that has not joined."""
        entry = self._entries.get(engine_id)
        return None if entry is None else entry.status

    def folder(self, engine_id: str) -> str | None:
        """Where the model's files are that prompts for the engine are made with; None where there are none."""
        entry = self._entries.get(engine_id)
        return entry.encoder.model.folder if entry is not None and entry.encoder is not None else None

    async def tokens_chat(self, engines: Sequence[str], fields: ChatFields, body: bytes) -> Prompt:
        """The prompt of a chat, for each of `engines`. `body` is what `fields` were decoded from.

        Raises `PromptRejected` when the templates of all of them refuse it, `NotRenderable` when no engine's ids could be told.
        """
        return await self._tokens(engines, Chat(fields, body))

    async def tokens_text(self, engines: Sequence[str], text: str, *, add_special_tokens: bool = True) -> Prompt:
        """The prompt of a completions text, for each of `engines`. Raises `NotRenderable`."""
        return await self._tokens(engines, Text(text, add_special_tokens))

    async def _tokens(self, engines: Sequence[str], wanted: Wanted) -> Prompt:
        entries = [entry for engine in engines if (entry := self._entries.get(engine)) is not None]
        found = _Found({}, dict.fromkeys(engines, "the engine has not joined yet"), [])
        asked = await self._encode(entries, wanted, found)
        for group in asked:
            await self._ask(group, wanted, found)
        if found.tokens:
            return Prompt(found.tokens, {engine: why for engine, why in found.reasons.items() if engine not in found.tokens})
        if found.rejections and len(found.rejections) == len(engines):
            raise found.rejections[0]
        raise NotRenderable("; ".join(dict.fromkeys(found.reasons.values())) or "no engine to tokenize for", ask_engine=False)

    async def _encode(self, entries: Iterable[_Entry], wanted: Wanted, found: _Found) -> Iterable[list[_Entry]]:
        """Makes what can be made here; the groups of engines that have to be asked remain."""
        asked: dict[tuple[object, ...], list[_Entry]] = {}
        encoding: dict[PromptEncoder, list[_Entry]] = {}
        for entry in entries:
            if (encoder := entry.encoder_for(wanted)) is not None:
                encoding.setdefault(encoder, []).append(entry)
            elif why := entry.not_asked(wanted):
                found.reasons[entry.info.id] = why
            else:
                asked.setdefault(entry.asks, []).append(entry)
        encoders = list(encoding)
        slow = any(encoder.model.tokenizer.stalls(wanted.size) for encoder in encoders)
        outcomes = await asyncio.to_thread(wanted.encode, encoders) if slow else wanted.encode(encoders)
        for group, outcome in zip(encoding.values(), outcomes, strict=True):
            if isinstance(outcome, NotRenderable) and outcome.ask_engine:
                asked.setdefault(group[0].asks, []).extend(group)
            else:
                found.note(group, outcome, "local")
        return asked.values()

    async def _ask(self, group: list[_Entry], wanted: Wanted, found: _Found) -> None:
        """Asks the engines of a group, which would all answer alike, one after the other until one does; two at most."""
        key = wanted.digest(group[0].asks)
        outcome: Outcome | None = self._memo.get(key)
        for entry in group[:2] if outcome is None else ():
            try:
                outcome = await in_task(entry.asker.packed(wanted.body(entry.info.kind, entry.asker.model)))
                self._memo.put(key, outcome)
                break
            except NotRenderable as problem:
                outcome = problem
                if not problem.ask_engine:
                    break
        if outcome is not None:
            found.note(group, outcome, "engine")

    def _places(self, info: EngineInfo) -> list[str]:
        """Where to look for an engine's tokenizer, the user's word first."""
        model = info.models[0] if info.models else None
        given = (info.spec.tokenizer, self._tokenizer, info.tokenizer, model.root if model else None, model.id if model else None)
        return list(dict.fromkeys(where for where in given if where))

    async def _load(self, where: str, info: EngineInfo) -> PromptEncoder:
        """An encoder for the files found there, that of another engine when the files are equal. Raises `TokenizerNotFound`."""
        async with self._loading:
            files = await asyncio.to_thread(find_model_files, where, cache=self._hub_cache)
            digest_ = await asyncio.to_thread(lambda: files.digest)
            known = [entry.encoder for entry in self._entries.values() if entry.encoder and entry.encoder.model.digest == digest_]
            for encoder in known:
                if encoder.kind is info.kind:
                    return encoder
            model = known[0].model if known else await asyncio.to_thread(load_model, files)
            return PromptEncoder(model, info.kind)


class _Found(msgspec.Struct):
    """What became of a prompt so far."""

    tokens: dict[str, Tokens]
    reasons: dict[str, str]
    rejections: list[PromptRejected]

    def note(self, group: Iterable[_Entry], outcome: Outcome, source: Literal["local", "engine"]) -> None:
        """The outcome for these engines."""
        match outcome:
            case bytes():
                same = (known for known in self.tokens.values() if known.packed == outcome)
                tokens = next(same, None) or Tokens(None, outcome, source)
                self.tokens.update((entry.info.id, tokens) for entry in group)
            case NotRenderable(reason=why):
                self.reasons.update((entry.info.id, why) for entry in group)
            case PromptRejected(message=why):
                for entry in group:
                    self.reasons[entry.info.id] = f"the chat template refuses the prompt: {why}"
                    self.rejections.append(outcome)


def _model_of(info: EngineInfo) -> str:
    """The name the engine's base model goes by: adapters share its tokenizer."""
    return next((model.id for model in info.models if model.parent is None), "")


def _status(encoder: PromptEncoder, report: parity.ParityReport) -> TokenizerStatus:
    tokenizer = encoder.model.tokenizer
    with_ = tokenizer.backend + (f" ({tokenizer.why})" if tokenizer.why else "")
    chat = report.chat or ("" if encoder.model.engine_can_chat else encoder.model.no_chat)
    checked = f"parity not checked: {report.unchecked}" if report.unchecked else f"parity ok ({report.prompts} prompts)"
    if report.text:
        line = f"engine's own {asking.PATH}: parity failed on {report.text}"
    elif chat:
        instead = f"engine's own {asking.PATH}" if encoder.model.engine_can_chat else "no ids"
        checked = checked if report.unchecked else "parity ok"
        line = f"texts: {with_}, {checked}; chats: {instead}: {chat}"
    else:
        line = f"{with_}, {checked}"
    return TokenizerStatus(chat_local=not chat and not report.text, text_local=not report.text, checked=not report.unchecked, line=line)
