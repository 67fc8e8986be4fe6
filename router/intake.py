"""What is being asked? From a request's bytes to everything that choosing an engine needs to know of it."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from engines.blocks import block_keys, pack_tokens, root_seed
from engines.types import EngineKind
from router import openai, stored
from router.disagg import Why
from router.divisible import undivided
from router.exchange import Headers
from router.fleet import Fleet, Member
from router.holding import Holding
from router.prompts import conversion
from router.prompts.book import PromptBook, Tokens
from router.prompts.errors import NotRenderable, PromptRejected
from router.routes import PromptForm, Route
from router.scheduling.types import RoutingRequest
from router.stored import Whereabouts
from router.token_ids import Outcome, barrier

MAX_QUOTED_CHARS: Final = 200
"""So much of what a client wrote is repeated to it."""


MAX_BYTES_A_TOKEN = 64
"""A prompt with more bytes for each token that its model can take is not tokenized: the engine will refuse it anyway, and the time and
memory it would cost here are everybody's."""
ASSUMED_MAX_MODEL_LEN = 131_072
"""For engines that do not say."""
LONG_BODY_BYTES: Final = 262_144
"""From here on each step of reading a body takes milliseconds, and other requests get their turn between two of them."""


class Asked(msgspec.Struct):
    """One request, read."""

    route: Route
    body: bytes
    """As it will be sent: the client's bytes, less what must not pass."""
    request: RoutingRequest
    tokens: dict[str, Tokens]
    """The prompt's ids, by engine; engines that agree share one object. Empty when it was not tokenized."""
    root: int
    """Seed of the prompt's first block key."""
    priority: int = 0
    """Lower goes first, where requests have to wait."""
    made: dict[tuple[int, int], list[int]] = {}
    """Block keys already made, by identity of the ids and block size."""
    ids_barrier: Outcome | None = None
    """What in the request keeps its ids from being forwarded."""
    kept_at: str | None = None
    """The one engine that can answer, because it keeps the response that this request goes on from."""
    takes_xargs: bool = False
    """Whether vLLM's extra arguments may be added: the route has them, and the client gives none of its own."""
    read: dict[str, msgspec.Raw] | None = None
    """The body's fields, where they have been asked for."""
    undivided: Why | msgspec.UnsetType | None = msgspec.UNSET
    """What keeps it from being shared between two engines, where that has been asked."""
    streamed: bool = True
    """Whether the answer comes token by token, so that the first one is seen."""

    def fields(self) -> dict[str, msgspec.Raw]:
        """The body's fields, each as it came; read on the first call."""
        if self.read is None:
            self.read = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        return self.read

    def split_barrier(self) -> Why | None:
        """What in a request to one of `SPLIT_PATHS` keeps it from being shared between two engines; looked for on the first call."""
        if self.undivided is msgspec.UNSET:
            self.undivided = undivided(self.route, self.fields())
        return self.undivided

    def keys(self, engine_id: str, block_size: int) -> list[int]:
        """The prompt's block keys as an engine counts blocks; the same list for engines that share ids and block size."""
        tokens = self.tokens.get(engine_id)
        if tokens is None:
            return []
        at = (id(tokens), block_size)
        keys = self.made.get(at)
        if keys is None:
            keys = self.made[at] = block_keys(tokens.packed, block_size, self.root)
        return keys


class Intake:
    """Reads requests."""

    def __init__(
        self,
        fleet: Fleet,
        prompts: PromptBook,
        whereabouts: Whereabouts,
        *,
        session_header: bytes,
        tokenize: bool,
        holding: Holding | None = None,
    ) -> None:
        """`tokenize` False: the policy in use does not look at prompts. `holding`: where requests wait for a model's first engine."""
        self._fleet = fleet
        self._prompts = prompts
        self._whereabouts = whereabouts
        self._session_header = session_header
        self._tokenize = tokenize
        self._holding = holding

    async def read(self, route: Route, body: bytes, headers: Headers) -> Asked:
        """Parse, find the model's engines, tokenize. Raises `openai.BadBody` with the status and words for the client.

        A model whose first engine is being started is waited for; raises `Shed` when that takes too long.
        """
        content_type = session = None
        for name, value in headers:
            if name == b"content-type":
                content_type = value
            elif name == self._session_header:
                session = value.decode("latin-1")
        parsed = openai.parse(body, content_type if route.form is PromptForm.UNREAD else None)
        model = parsed.model
        members = self._fleet.able(model, route.engines) if model is not None else []
        if (
            not members
            and model is not None
            and self._holding is not None
            and not self._fleet.of_model(model)
            and self._holding.comes(model)
        ):
            await self._holding.enter(model)
            members = self._fleet.able(model, route.engines)
        if not members or model is None:
            model, members = self._engines_for(route, model)
        if parsed.must_strip:
            body = openai.strip(body)
        tokens: dict[str, Tokens] = {}
        reason = "the policy does not look at prompts"
        if self._tokenize:
            try:
                tokens, reason = await self._tokens(route, parsed, members, body)
            except PromptRejected as error:
                rejects = "the model's chat template rejects this conversation"
                raise openai.BadBody(f"{rejects}: {error.message}", logged=rejects) from None
        count = max(shared.count for shared in tokens.values()) if tokens else 0
        kept_at = await self._kept_at(parsed, members, headers) if route.path == stored.PATH else None
        request = RoutingRequest(model, count, "" if count else reason, session or parsed.session)
        root = root_seed(self._fleet.adapter(model), parsed.salt) if tokens else 0
        takes_xargs = route.takes_xargs and parsed.vllm_xargs is msgspec.UNSET
        return Asked(
            route,
            body,
            request,
            tokens,
            root,
            parsed.urgency,
            {},
            barrier(route, parsed),
            kept_at,
            takes_xargs,
            streamed=parsed.streams,
        )

    async def _kept_at(self, parsed: openai.ApiBody, members: list[Member], headers: Headers) -> str | None:
        response_id = parsed.goes_on_from
        if not response_id:
            return None
        authorization = next((value for name, value in headers if name == b"authorization"), None)
        return await self._whereabouts.find(response_id, [member.info for member in members], authorization)

    def _engines_for(self, route: Route, model: str | None) -> tuple[str, list[Member]]:
        if model is None:
            ids = list(self._fleet.model_ids)
            if not ids:
                raise openai.BadBody("no engine is ready", 503)
            bases = {member.info.models[0].id for member in self._fleet.members.values() if member.serving and member.info.models}
            if len(bases) > 1:
                raise openai.BadBody(f"the field `model` is required: this router serves {', '.join(sorted(ids))}")
            model = min(bases)
        members = self._fleet.of_model(model)
        if not members:
            if model in self._fleet.lost_models():
                raise openai.BadBody(f"no engine serves `{model}` at the moment", 503)
            if not self._fleet.model_ids:
                raise openai.BadBody("no engine is ready", 503)
            served = ", ".join(sorted(self._fleet.model_ids))
            message = f"the model `{model[:MAX_QUOTED_CHARS]}` does not exist; this router serves {served}"
            raise openai.BadBody(message, 404, logged="there is no such model")
        able = [member for member in members if member.info.kind in route.engines]
        if not able:
            kinds = " or ".join(sorted(route.engines))
            raise openai.BadBody(f"{route.path} is only offered by {kinds}, and no such engine serves `{model}`", 501)
        return model, able

    async def _tokens(self, route: Route, parsed: openai.ApiBody, members: list[Member], body: bytes) -> tuple[dict[str, Tokens], str]:
        """The prompt's ids by engine; when there are none, why."""
        if route.form is PromptForm.UNREAD:
            return {}, f"prompts of {route.path} are not read"
        if parsed.prompt_bytes() > MAX_BYTES_A_TOKEN * _longest(members):
            return {}, "the prompt is longer than the model takes"
        engines = [member.info.id for member in members]
        try:
            if route.form is PromptForm.CHAT:
                prompt = await self._prompts.tokens_chat(engines, parsed, body)
            elif route.form in conversion.FORMS:
                return await self._converted(route, parsed, members, body)
            else:
                await _let_others(body)
                plain = openai.completion_prompt(parsed) if route.form is PromptForm.COMPLETION else openai.generate_prompt(parsed)
                if plain is None:
                    return {}, "the body has no prompt of a known form"
                if plain.ids is not None:
                    await _let_others(body)
                    tokens = Tokens(plain.ids, pack_tokens(plain.ids), "local")
                    await _let_others(body)
                    return dict.fromkeys(engines, tokens), ""
                prompt = await self._prompts.tokens_text(engines, plain.text or "", add_special_tokens=parsed.wants_special_tokens)
        except NotRenderable as error:
            return {}, error.reason
        return prompt.tokens, next(iter(prompt.reasons.values()), "")

    async def _converted(self, route: Route, parsed: openai.ApiBody, members: list[Member], body: bytes) -> tuple[dict[str, Tokens], str]:
        """The ids of a prompt that vLLM makes a chat of. Raises `NotRenderable`."""
        engines = [member.info.id for member in members if member.info.kind is EngineKind.VLLM]
        if not engines:
            return {}, f"what SGLang makes of {route.path} is not known here"
        try:
            fields = conversion.chat_of(route.form, parsed, body)
            prompt = await self._prompts.tokens_chat(engines, fields, route.form.value.encode() + body)
        except PromptRejected as error:  # the engine's own answer is the client's: it speaks this API
            return {}, f"the model's chat template rejects this conversation: {error.message}"
        return prompt.tokens, next(iter(prompt.reasons.values()), "")


async def _let_others(body: bytes) -> None:
    """Between two steps of reading a body: others get their turn, where a step takes long."""
    if len(body) >= LONG_BODY_BYTES:
        await asyncio.sleep(0)


def _longest(members: list[Member]) -> int:
    """The longest context, in tokens, of any of the engines."""
    lengths = [entry.max_model_len for member in members for entry in member.info.models if entry.max_model_len]
    return max(lengths, default=ASSUMED_MAX_MODEL_LEN)
