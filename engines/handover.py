"""How is a prompt's KV cache handed from the engine that computes it to the one that goes on from it?

The engines move the bytes themselves; each leg of a request only says enough for them to find each other. Both legs carry the same
token ids: an engine that is handed the cache of another prompt does not notice, and answers 200 with wrong tokens.

    NIXL (vLLM)       prefill ─▶ its answer holds a handshake ─▶ decode, which pulls     one leg after the other
    Mooncake (vLLM)   both are told one transfer id, decode also where prefill's bootstrap server is      both at once
    rooms (SGLang)    both are told one room of prefill's bootstrap server                                both at once

Pure: requests in, requests out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from engines.types import Connector, EngineInfo, EngineKind

PREFILL_PATH: Final = b"/v1/completions"
"""Both kinds take token ids there, and neither renders nor parses anything."""
PASSED_TO_PREFILL: Final = ("cache_salt", "extra_key", "lora_path", "priority")
"""Fields of a client's body that decide where its blocks are cached, or how soon they are computed."""

_OF_THE_ANSWER: Final = frozenset(
    {
        "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stop", "stop_token_ids", "stop_regex",
        "ignore_eos", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs", "logit_bias", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "regex", "ebnf", "json_schema", "return_token_ids", "return_logprob", "include_stop_str_in_output",
    }
)  # fmt: skip
"""Fields that say what is generated, and how; none of them changes the prompt."""
_GIVEN_UP: Final = (b"abort", b"error")
"""Ends of an answer whose engine was stopped, or told to stop, before it had computed the prompt."""
_HARMLESS_CHOICES: Final = frozenset({b"", b'"none"', b'"auto"'})

Fields = dict[str, Raw]
Told = Mapping[str, Any]
"""Fields that tell an engine of the other leg."""


class BadHandshake(Exception):
    """A prefill engine answered 200, and not with a handshake that a decode engine could be given."""


class Handshake(Protocol):
    """What the two legs of one sequence are told. One object, one sequence: what is pulled once is gone."""

    at_once: bool
    """Neither leg waits for the other's answer."""

    def prefill(self) -> Told:
        """For the leg that computes the prompt."""
        ...

    def decode(self, prefilled: bytes) -> Told:
        """For the leg that goes on, given the other one's answer where there is one. Raises BadHandshake."""
        ...


class Nixl:
    """vLLM's NixlConnector: decode pulls from the blocks that prefill keeps for as long as its lease runs."""

    at_once = False

    def prefill(self) -> Told:
        """See `Handshake`."""
        return {"kv_transfer_params": {"do_remote_decode": True}}

    def decode(self, prefilled: bytes) -> Told:
        """The handshake in prefill's answer, checked: a decode server that is given a malformed one does not survive it."""
        try:
            given = msgspec.json.decode(prefilled, type=_Prefilled).kv_transfer_params
            if given is None:
                raise BadHandshake("its answer has no kv_transfer_params (is its kv_connector NixlConnector?)")
            told = msgspec.convert(given, _NixlParams)
        except msgspec.MsgspecError as error:
            raise BadHandshake(f"its kv_transfer_params are not NIXL's: {error}") from None
        if not told.do_remote_prefill or not any(told.remote_block_ids):
            raise BadHandshake("its kv_transfer_params offer nothing to pull")
        return {"kv_transfer_params": given}


class Mooncake:
    """vLLM's MooncakeConnector: both legs name one transfer, and decode asks prefill's bootstrap server for it."""

    at_once = True

    def __init__(self, transfer_id: str, engine_id: str, bootstrap: str) -> None:
        """`engine_id` is what the bootstrap server at the URL `bootstrap` calls the prefill engine's rank."""
        self._transfer_id = transfer_id
        self._engine_id = engine_id
        self._bootstrap = bootstrap

    def prefill(self) -> Told:
        """See `Handshake`."""
        return {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": self._transfer_id}}

    def decode(self, prefilled: bytes) -> Told:  # noqa: ARG002  nothing is learned from it
        """See `Handshake`."""
        return {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "transfer_id": self._transfer_id,
                "remote_engine_id": self._engine_id,
                "remote_bootstrap_addr": self._bootstrap,
            }
        }


class Room:
    """SGLang: both legs meet in a room of prefill's bootstrap server."""

    at_once = True

    def __init__(self, host: str, port: int, room: int, rank: int | None = None) -> None:
        """`room` must be new, and below 2⁶³; modulo prefill's ranks it is the rank that computes (see `room_for`).

        `rank` says so once more, where there are several: SGLang 0.5.23 takes any rank but the first for a mistake otherwise, unless its ranks
        are those of DP attention.
        """
        self._told: Told = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
        if rank is not None:
            self._told = {**self._told, "disagg_prefill_dp_rank": rank}

    def prefill(self) -> Told:
        """See `Handshake`."""
        return self._told

    def decode(self, prefilled: bytes) -> Told:  # noqa: ARG002  nothing is learned from it
        """See `Handshake`."""
        return self._told


def handshake_for(info: EngineInfo, rank: int, bits: int) -> Handshake:
    """For a sequence that this prefill engine's `rank` computes; `bits` are 128 random ones, new for each."""
    match info.connector:
        case Connector.MOONCAKE:
            return Mooncake(f"{bits:032x}", dict(info.transfer_ids)[rank], info.bootstrap or "")
        case Connector.ROOMS:
            where = urlsplit(info.bootstrap or info.id)
            room = room_for(bits, info.ranks.index(rank), len(info.ranks))
            return Room(where.hostname or "", where.port or 80, room, rank if info.pins_rank else None)
        case _:
            return Nixl()


def room_for(bits: int, rank: int, ranks: int) -> int:
    """A room for prefill's `rank` of `ranks`, from random `bits`: SGLang's prefill engines take the rank that the room leaves.

    >>> room_for(1000, rank=2, ranks=4) % 4
    2
    """
    room = bits % (1 << 62)
    return room - room % ranks + rank


def engine_ids(answer: bytes) -> dict[int, str]:
    """What Mooncake's bootstrap server calls each rank of its engine, from its answer to `/query`. Raises BadHandshake.

    >>> engine_ids(b'{"0": {"engine_id": "MP", "worker_addr": {"0": {"0": "tcp://127.0.0.1:40791"}}}}')
    {0: 'MP'}
    """
    try:
        return {rank: entry.engine_id for rank, entry in msgspec.json.decode(answer, type=dict[int, _BootstrapEntry]).items()}
    except msgspec.MsgspecError as error:
        raise BadHandshake(f"its bootstrap server does not answer as Mooncake's: {error}") from None


def check_computed(answer: bytes) -> None:
    """Raises BadHandshake where a prefill engine's answer of 200 says that the prompt was not computed: decode would wait for it in vain.

    >>> check_computed(b'{"choices": [{"finish_reason": "length"}]}')
    >>> check_computed(b'{"choices": [{"finish_reason": "abort"}]}')
    Traceback (most recent call last):
    engines.handover.BadHandshake: the prefill engine ended with: abort
    """
    try:
        told = msgspec.json.decode(answer, type=_Ended)
    except msgspec.ValidationError:
        return  # of no known shape, so it says nothing of the kind
    except msgspec.DecodeError as error:
        raise BadHandshake(f"the prefill engine's answer is none: {error}") from None
    reasons = [one.finish_reason for one in (*told.choices, told.meta_info)]
    given_up = next((word for reason in reasons for word in _GIVEN_UP if word in bytes(reason)), None)
    if given_up is not None or told.error is not None:
        raise BadHandshake(f"the prefill engine ended with: {(given_up or b'error').decode()}")


def prefill_leg(model: str, ids: Raw, body: Fields, told: Told) -> bytes:
    """A request of one token, for its prompt only: nothing of what the client wants generated is part of it.

    `ignore_eos`: Mooncake's prefill hands nothing over when the one token ends the answer.
    """
    kept = {name: body[name] for name in PASSED_TO_PREFILL if name in body}
    return msgspec.json.encode({"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **kept, **told})


def prefill_leg_as_asked(kind: EngineKind, body: Fields, told: Told) -> bytes:
    """The client's own request, for one token: where its ids are not known for certain, both engines are left to make them alike."""
    kept: dict[str, Any] = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
    if bytes(body.get("tool_choice", b"")) not in _HARMLESS_CHOICES:  # it would have the one token parsed as a whole call
        del kept["tool_choice"]
    once = {"temperature": 0, "ignore_eos": True}
    if "messages" in body or "prompt" in body:
        kept |= {"max_tokens": 1, **once}
    else:
        kept["sampling_params"] = {"max_tokens" if kind is EngineKind.VLLM else "max_new_tokens": 1, **once}
    return msgspec.json.encode({**kept, **_beside_ids(body, told)})


def decode_leg_as_asked(body: Fields, told: Told) -> bytes:
    """The client's own request, and where the other leg is."""
    return msgspec.json.encode({**body, **_beside_ids(body, told)})


def decode_leg(kind: EngineKind, ids: Raw, body: Fields, told: Told) -> bytes:
    """The client's request, its prompt given as the token ids that the other leg has computed."""
    fields: dict[str, Any] = {**body, **told}
    if "messages" in body:
        if kind is EngineKind.VLLM:
            fields["kv_transfer_params"] = {**told["kv_transfer_params"], "prompt_token_ids": ids}
        else:
            fields["input_ids"] = ids
    elif "prompt" in body:
        fields["prompt"] = ids
    elif kind is EngineKind.SGLANG:
        fields.pop("text", None)
        fields["input_ids"] = ids
    else:
        fields["token_ids"] = ids
    return msgspec.json.encode(fields)


def _beside_ids(body: Fields, told: Told) -> Told:
    """What a leg is told, beside the ids that a chat has there which goes on elsewhere: what clients put there never comes so far."""
    name = "kv_transfer_params"
    if name not in body or name not in told:
        return told
    return {**told, name: {**msgspec.json.decode(body[name], type=Fields), **told[name]}}


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class _Finish(msgspec.Struct, frozen=True):
    finish_reason: Raw = Raw(b"null")
    """A word, or within SGLang's `meta_info` an object that has it as its `type`."""


class _Ended(msgspec.Struct):
    choices: list[_Finish] = []
    meta_info: _Finish = _Finish()
    error: Any = None


class _NixlParams(msgspec.Struct):
    do_remote_prefill: bool
    remote_block_ids: list[list[int]]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int


class _BootstrapEntry(msgspec.Struct):
    engine_id: str
