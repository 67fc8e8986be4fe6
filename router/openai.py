"""The slice of a request body that routing reads; everything else stays the client's bytes.

One decode finds the few fields there are to read, most of them still raw: `messages` is decoded only if it is rendered.
"""

from __future__ import annotations

import operator
import re
from typing import Annotated, Any, Final
from urllib.parse import parse_qs

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from router.prompts.chat import ChatFields

Field = Raw | UnsetType

STRIPPED: Final = (
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "ec_transfer_params",
    "encoder_urls",
)
"""Fields by which the router and the engines speak of transfers and ranks. From a client they could end a vLLM server
(a malformed handshake does) or undo the choice of a rank, so they never pass. Nor do they in an object of extra arguments:
vLLM takes a handshake there as well."""


class BadBody(Exception):
    """The body cannot be routed; the message is for the client, `status` the answer's."""

    def __init__(self, message: str, status: int = 400, *, logged: str | None = None) -> None:
        """`logged` is for the log, where the message quotes the client."""
        super().__init__(message)
        self.status = status
        self.code = "no_engine" if status == 503 else None
        """The answer's, as where an engine was looked for and none found."""
        self.logged = message if logged is None else logged


class ApiBody(ChatFields, kw_only=True):
    """What is read of a JSON body, whatever the route."""

    model: str | None = None
    stream: Field = UNSET
    user: Field = UNSET
    priority: Field = UNSET
    cache_salt: Field = UNSET
    previous_response_id: Field = UNSET
    prompt: Field = UNSET
    echo: Field = UNSET
    suffix: Field = UNSET
    prompt_logprobs: Field = UNSET
    text: Field = UNSET
    input_ids: Field = UNSET
    token_ids: Field = UNSET
    kv_transfer_params: Field = UNSET
    bootstrap_host: Field = UNSET
    bootstrap_port: Field = UNSET
    bootstrap_room: Field = UNSET
    bootstrap_pair_key: Field = UNSET
    routed_dp_rank: Field = UNSET
    data_parallel_rank: Field = UNSET
    disagg_prefill_dp_rank: Field = UNSET
    ec_transfer_params: Field = UNSET
    encoder_urls: Field = UNSET
    vllm_xargs: Field = UNSET
    sampling_params: Field = UNSET
    input: Field = UNSET

    def prompt_bytes(self) -> int:
        """How long everything is that could be a prompt, as JSON."""
        plain = (self.prompt, self.text, self.input_ids, self.token_ids, self.input)
        return ChatFields.prompt_bytes(self) + sum(len(memoryview(field)) for field in plain if isinstance(field, Raw))

    @property
    def must_strip(self) -> bool:
        """Whether the body carries fields that must not pass."""
        if _to_strip(self) != _NONE_TO_STRIP:
            return True
        if _extra(self) == _NO_EXTRA:  # as nearly always: this is asked of every request
            return False
        return any(_cleaned(getattr(self, way[0]), way[1:]) is not None for way in _EXTRA)

    @property
    def wants_special_tokens(self) -> bool:
        """Whether a plain text prompt gets its model's special tokens; it does unless the client says no."""
        return not (isinstance(self.add_special_tokens, Raw) and bytes(self.add_special_tokens) == b"false")

    @property
    def streams(self) -> bool:
        """Whether the answer is to come token by token."""
        return isinstance(self.stream, Raw) and bytes(self.stream) == b"true"

    @property
    def session(self) -> str | None:
        """The end user's id, where the client gives one."""
        return None if self.user is UNSET else _string(self.user)

    @property
    def goes_on_from(self) -> str | None:
        """The id of the stored response that this one goes on from."""
        return None if self.previous_response_id is UNSET else _string(self.previous_response_id)

    @property
    def urgency(self) -> int:
        """The engines' own `priority`: lower goes first. 0 when there is none, or when it is not a whole number."""
        if self.priority is UNSET:
            return 0
        try:
            return msgspec.json.decode(self.priority, type=int)
        except msgspec.DecodeError:
            return 0  # for the engine to complain about

    @property
    def salt(self) -> str | None:
        """The cache salt: prompts with different salts share no cache."""
        return _string(self.cache_salt)


_to_strip = operator.attrgetter(*STRIPPED)
_NONE_TO_STRIP: Final = (UNSET,) * len(STRIPPED)
_EXTRA: Final = (("vllm_xargs",), ("sampling_params", "extra_args"))
"""Where bodies have extra arguments."""
_extra = operator.attrgetter(*(way[0] for way in _EXTRA))
_NO_EXTRA: Final = (UNSET,) * len(_EXTRA)
_decoder = msgspec.json.Decoder(ApiBody)
_ids_decoder = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, le=2**32 - 1)]])
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_MULTIPART_MODEL: Final = re.compile(rb'name="model"(?:\r\n[^\r\n]+)*\r\n\r\n([^\r\n]*)\r\n')


def parse(body: bytes, content_type: bytes | None = None) -> ApiBody:
    """Read a body. Raises BadBody, in words that name what is wrong.

    A multipart form (audio) is not JSON: of it only the field `model` is read.
    """
    if content_type is not None and content_type.lower().startswith(b"multipart/form-data"):
        found = _MULTIPART_MODEL.search(body)
        return ApiBody(model=found[1].decode("utf-8", "replace") if found else None)
    try:
        if not body.isascii():
            body.decode()  # what stays raw would else be found out later, or nowhere
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadBody(f"the request body is not valid: {error}") from None
    except RecursionError:
        raise BadBody("the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the request body is not valid JSON: {error}") from None


def body_of_query(query: bytes) -> bytes:
    """What a query says of what routing reads, as a body: `?model=m`."""
    named = parse_qs(query.decode("latin-1")).get("model")
    return msgspec.json.encode({"model": named[0]} if named else {})


def strip(body: bytes) -> bytes:
    """The same body without the fields of `STRIPPED`; the other fields keep their bytes."""
    fields = _object_decoder.decode(body)
    for name in STRIPPED:
        fields.pop(name, None)
    for name, *within in _EXTRA:
        cleaned = _cleaned(fields.get(name, UNSET), tuple(within))
        if cleaned is not None:
            fields[name] = cleaned
    return msgspec.json.encode(fields)


def add_field(body: bytes, name: str, value: object) -> bytes:
    """The same body, an object that has no such field, with this one behind the others, which keep their bytes.

    >>> add_field(b'{"model": "m" }', "seed", 1)
    b'{"model": "m" ,"seed":1}'
    """
    end = body.rindex(b"}")
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return b"%b%b%b:%b}" % (body[:end], comma, msgspec.json.encode(name), msgspec.json.encode(value))


class Prompt(msgspec.Struct, frozen=True):
    """A prompt that needs no chat template: text or token ids. Of a list of prompts, the first."""

    text: str | None = None
    ids: list[int] | None = None


def completion_prompt(body: ApiBody) -> Prompt | None:
    """The prompt of a completions body; None when there is none, or when it is of no known form (the engine then says so)."""
    return _prompt(body.prompt)


def generate_prompt(body: ApiBody) -> Prompt | None:
    """The prompt of a generate body: SGLang's `text` or `input_ids`, or vLLM's `token_ids`."""
    for field in (body.input_ids, body.token_ids, body.text):
        if field is not UNSET:
            return _prompt(field)
    return None


def _prompt(field: Field) -> Prompt | None:
    if isinstance(field, UnsetType):
        return None
    try:
        ids = _ids_decoder.decode(field)
    except msgspec.ValidationError:
        pass
    else:
        return Prompt(ids=ids) if ids else None
    try:
        value: Any = msgspec.json.decode(field)
    except msgspec.ValidationError:  # a number that no type holds
        return None
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, str):
        return Prompt(text=value)
    if isinstance(value, list) and value and all(type(item) is int and 0 <= item < 2**32 for item in value):
        return Prompt(ids=value)
    return None


def _string(field: Field) -> str | None:
    if isinstance(field, UnsetType):
        return None
    try:
        return msgspec.json.decode(field, type=str)
    except msgspec.ValidationError:
        return None


def _cleaned(field: Field, way: tuple[str, ...]) -> Raw | None:
    """An object without the fields of `STRIPPED`, which are looked for where `way` leads in it; None where there are none."""
    if field is UNSET:
        return None
    try:
        fields = _object_decoder.decode(field)
    except msgspec.ValidationError:
        return None
    if way:
        within = _cleaned(fields.get(way[0], UNSET), way[1:])
        kept = fields if within is None else {**fields, way[0]: within}
    else:
        within, kept = None, {name: value for name, value in fields.items() if name not in STRIPPED}
    return Raw(msgspec.json.encode(kept)) if within is not None or len(kept) < len(fields) else None
