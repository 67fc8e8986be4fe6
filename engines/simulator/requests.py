"""What does a request ask for? Bodies of every inference route → one `Ask`: token ids, how many tokens, how to answer.

What cannot be served raises `Refusal`, with the status and words of the real engine.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from engines.simulator.handover import Handover, Rooms
from engines.simulator.sequences import Prompt
from engines.simulator.text import ModelText, PromptRefused
from engines.types import EngineKind

_T = TypeVar("_T")
_Prompts = str | list[int | str | list[int]]
_NOT_INT = "token ids are whole numbers"


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, *, type: str = "BadRequestError", param: str | None = None) -> None:  # noqa: A002 - the field's name
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param

    def body(self, kind: EngineKind) -> bytes:
        """The error in the engine's own shape."""
        if kind is EngineKind.SGLANG:
            return msgspec.json.encode(
                {"object": "error", "message": self.message, "type": self.type, "param": self.param, "code": self.status}
            )
        return msgspec.json.encode({"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}})


class Shape(enum.Enum):
    """Which answer is wanted."""

    CHAT = "chat"
    COMPLETION = "completion"
    GENERATE = "generate"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request, understood."""

    shape: Shape
    model: str
    prompts: list[list[int]]
    samples: int = 1
    limit: int | None = None
    """Tokens to generate for each; None where the request does not say."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    batched: bool = False
    """Whether SGLang's /generate answers with a list."""
    seed: int = 0
    salt: str | None = None
    session: str | None = None
    tells_hits: bool = False
    request_id: str = ""
    transfer: dict[str, Any] | None = None
    """VLLM's `kv_transfer_params`."""
    rooms: Rooms | None = None
    """SGLang's bootstrap fields, one of each for every prompt."""

    def sequences(
        self, adapter: str | None, output_tokens: int, seed: int, handovers: Sequence[Handover | None] = (), *, most: int | None = None
    ) -> list[Prompt]:
        """One prompt for each sample of each prompt, in the order of their choices; `handovers` in that order too. At most `most` tokens."""
        limit, ending = (output_tokens, "stop") if self.limit is None else (self.limit, "length")
        if most is not None and most < limit:
            limit, ending = most, "length"
        prompts = [
            Prompt(tokens, limit, ending, seed + self.seed + sample, self.salt, adapter, self.session, self.tells_hits)
            for tokens in self.prompts
            for sample in range(self.samples)
        ]
        if not handovers:
            return prompts
        return [msgspec.structs.replace(prompt, handover=handover) for prompt, handover in zip(prompts, handovers, strict=True)]


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    seed: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    rid: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    vllm_xargs: dict[str, Any] | None = None


class _Chat(_Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    input_ids: list[int] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Completion(_Common, frozen=True, kw_only=True):
    prompt: _Prompts | None = None


class _Sampling(msgspec.Struct, frozen=True):
    max_new_tokens: int | None = None
    n: int | None = None
    sampling_seed: int | None = None


class _Generate(msgspec.Struct, frozen=True, kw_only=True):
    text: _Prompts | None = None
    input_ids: _Prompts | None = None
    sampling_params: _Sampling = _Sampling()
    stream: bool = False
    rid: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None


class _Tokenize(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None


class _Detokenize(msgspec.Struct, frozen=True):
    tokens: list[int]


class _Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    input: _Prompts
    model: str | None = None


class Reader:
    """Reads the bodies of one engine's requests."""

    def __init__(self, text: ModelText, kind: EngineKind, context: int) -> None:
        self._text = text
        self._kind = kind
        self._context = context

    def chat(self, body: bytes) -> Ask:
        """`/v1/chat/completions`."""
        fields = _json(body)
        asked = _convert(fields, _Chat)
        if (
            asked.add_generation_prompt
            and asked.continue_final_message
            and "add_generation_prompt" in fields
            and self._kind is EngineKind.VLLM
        ):
            raise Refusal(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if asked.stream and asked.return_token_ids and self._kind is EngineKind.SGLANG:
            raise Refusal(400, "return_token_ids is not supported with streaming on chat completions. Please set stream=false.")
        given = asked.input_ids if self._kind is EngineKind.SGLANG else _given_ids(asked.kv_transfer_params)
        ids = self._text.encode(self._render(fields)) if given is None else given
        limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        return self._ask(asked, Shape.CHAT, [ids], limit)

    def completion(self, body: bytes) -> Ask:
        """`/v1/completions`."""
        asked = _convert(_json(body), _Completion)
        limit = 16 if asked.max_tokens is None else asked.max_tokens  # OpenAI's default for this route
        return self._ask(asked, Shape.COMPLETION, self._prompts(asked.prompt, "prompt"), limit)

    def generate(self, body: bytes) -> Ask:
        """SGLang's `/generate`."""
        asked = _convert(_json(body), _Generate)
        source = asked.text if asked.input_ids is None else asked.input_ids
        prompts = self._prompts(source, "text")
        sampling = asked.sampling_params
        limit = 128 if sampling.max_new_tokens is None else sampling.max_new_tokens
        self._fits(prompts, limit)
        return Ask(
            shape=Shape.GENERATE,
            model="",
            prompts=prompts,
            samples=sampling.n or 1,
            limit=limit,
            stream=asked.stream,
            batched=isinstance(source, list) and bool(source) and not isinstance(source[0], int),
            seed=sampling.sampling_seed or 0,
            salt=asked.cache_salt,
            session=asked.session_id,
            request_id=asked.rid or "",
            rooms=_rooms(asked, len(prompts)),
        )

    def tokenize(self, body: bytes) -> list[int]:
        """`/tokenize`, of a prompt or of a conversation."""
        fields = _json(body)
        asked = _convert(fields, _Tokenize)
        if asked.messages is not None:
            # The real route knows neither of these two, and so answers with other ids than the chat route uses.
            known = {key: value for key, value in fields.items() if key not in {"reasoning_effort", "documents"}}
            return self._text.encode(self._render(known))
        if asked.prompt is None:
            raise Refusal(400, "either `prompt` or `messages` is required")
        return self._text.encode(asked.prompt)

    def detokenize(self, body: bytes) -> str:
        """`/detokenize`."""
        tokens = _convert(_json(body), _Detokenize).tokens
        self._known([tokens])
        return self._text.decode(tokens)

    def embeddings(self, body: bytes) -> tuple[str, list[list[int]]]:
        """`/v1/embeddings`: the model asked for and the inputs."""
        asked = _convert(_json(body), _Embeddings)
        prompts = self._prompts(asked.input, "input")
        self._fits(prompts, 0)
        return asked.model or "", prompts

    def _ask(self, asked: _Common, shape: Shape, prompts: list[list[int]], limit: int | None) -> Ask:
        if limit is not None and limit < 1:
            raise Refusal(400, f"max_tokens must be at least 1, got {limit}.", param="max_tokens")
        if asked.n is not None and asked.n < 1:
            raise Refusal(400, f"n must be at least 1, got {asked.n}.", param="n")
        self._fits(prompts, limit)
        options = asked.stream_options or _StreamOptions()
        return Ask(
            shape=shape,
            model=asked.model or "",
            prompts=prompts,
            samples=asked.n or 1,
            limit=limit,
            stream=bool(asked.stream),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            return_token_ids=bool(asked.return_token_ids),
            seed=asked.seed or 0,
            salt=asked.cache_salt,
            session=asked.session_id,
            tells_hits=self._kind is EngineKind.VLLM and (asked.vllm_xargs or {}).get("kv_cache_report_mode") == "full",
            request_id=asked.rid or "",
            transfer=asked.kv_transfer_params,
            rooms=_rooms(asked, len(prompts)),
        )

    def _render(self, fields: dict[str, Any]) -> str:
        try:
            return self._text.render(fields, self._kind)
        except PromptRefused as error:
            raise Refusal(400, str(error)) from error

    def _prompts(self, source: _Prompts | None, name: str) -> list[list[int]]:
        match source:
            case None | []:
                raise Refusal(400, f"`{name}` must not be empty", param=name)
            case str():
                return [self._text.encode(source)]
            case _ if isinstance(source[0], int):
                return [_whole(source)]
            case _:
                return [self._text.encode(part) if isinstance(part, str) else _whole(part) for part in source]

    def _known(self, prompts: list[list[int]]) -> None:
        for ids in prompts:
            if ids and (min(ids) < 0 or max(ids) >= self._text.vocabulary):
                raise Refusal(400, f"Token id {max(ids)} is out of vocabulary", param="prompt_token_ids")

    def _fits(self, prompts: list[list[int]], limit: int | None) -> None:
        self._known(prompts)
        for ids in prompts:
            if not ids:
                raise Refusal(400, "The decoder prompt cannot be empty", param="prompt")
            # Without a limit there must be room for one token; an embedding generates none.
            if len(ids) + (1 if limit is None else limit) > self._context:
                asked = "" if limit is None else f" and {limit} output tokens"
                raise Refusal(
                    400,
                    f"This model's maximum context length is {self._context} tokens. However, your prompt contains {len(ids)} input tokens{asked}. "
                    "Please reduce the length of the input prompt or the number of requested output tokens.",
                    param="input_tokens",
                )


def decoded(body: bytes, kind: type[_T]) -> _T:
    """A body as `kind`; raises Refusal where it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise Refusal(400, str(error), type="Bad Request") from error


def _whole(ids: object) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise Refusal(400, _NOT_INT, param="prompt")
    return ids


def _rooms(asked: _Common | _Generate, prompts: int) -> Rooms | None:
    """Bootstrap fields for each prompt: one for all where they are not lists, and rooms that follow one another."""
    room = asked.bootstrap_room
    if room is None:
        return None
    rooms = tuple(room) if isinstance(room, list) else tuple(range(room, room + prompts))
    hosts = tuple(asked.bootstrap_host) if isinstance(asked.bootstrap_host, list) else (asked.bootstrap_host,) * prompts
    ports = tuple(asked.bootstrap_port) if isinstance(asked.bootstrap_port, list) else (asked.bootstrap_port,) * prompts
    if not len(rooms) == len(hosts) == len(ports) == prompts:
        raise Refusal(400, f"bootstrap fields for {len(rooms)} prompts, of which there are {prompts}")
    return Rooms(hosts, ports, rooms)


def _given_ids(params: dict[str, Any] | None) -> list[int] | None:
    given = (params or {}).get("prompt_token_ids")
    return None if given is None else _whole(given)


def _json(body: bytes) -> dict[str, Any]:
    try:
        read = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise Refusal(400, f"JSON decode error: {error}", type="Bad Request") from error
    if not isinstance(read, dict):
        raise Refusal(400, "the body must be a JSON object", type="Bad Request")
    return read


def _convert(fields: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise Refusal(400, str(error), type="Bad Request") from error
