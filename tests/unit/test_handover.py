"""What each leg of a request is told: by value, and never what a decode server would not survive."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from engines.handover import (
    BadHandshake,
    Mooncake,
    Nixl,
    Room,
    decode_leg,
    decode_leg_as_asked,
    engine_ids,
    handshake_for,
    prefill_leg,
    prefill_leg_as_asked,
    room_for,
)
from engines.types import Connector, EngineInfo, EngineKind, EngineSpec
from tests.raw_engine import NIXL_OFFER

IDS = Raw(b"[5,6,7]")


def fields(body: dict[str, Any]) -> dict[str, Raw]:
    return msgspec.json.decode(msgspec.json.encode(body), type=dict[str, Raw])


def answer(params: object) -> bytes:
    return msgspec.json.encode({"id": "x", "kv_transfer_params": params})


def test_nixl_passes_on_what_prefill_offers_unchanged() -> None:
    offer = NIXL_OFFER | {"a_field_of_a_later_version": [1]}
    assert Nixl().decode(answer(offer)) == {"kv_transfer_params": offer}


@pytest.mark.parametrize("name", [name for name in NIXL_OFFER if name not in {"do_remote_decode", "tp_size"}])
@pytest.mark.parametrize("value", [None, "x", -1.5, {}, [["x"]]])
def test_a_malformed_offer_is_refused(name: str, value: object) -> None:
    if isinstance(NIXL_OFFER[name], str) and isinstance(value, str):
        return
    with pytest.raises(BadHandshake, match="NIXL"):
        Nixl().decode(answer(NIXL_OFFER | {name: value}))
    with pytest.raises(BadHandshake):
        Nixl().decode(answer({key: kept for key, kept in NIXL_OFFER.items() if key != name}))


@given(st.binary(max_size=200))
def test_no_answer_of_prefill_is_fatal(body: bytes) -> None:
    with pytest.raises(BadHandshake):
        Nixl().decode(body)


def test_mooncake_tells_both_of_one_transfer() -> None:
    handshake = Mooncake("t1", "MP", "http://p:8998")
    assert handshake.prefill() == {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t1"}}
    assert handshake.decode(b"") == {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "transfer_id": "t1",
            "remote_engine_id": "MP",
            "remote_bootstrap_addr": "http://p:8998",
        }
    }


def test_a_bootstrap_server_that_answers_something_else_is_named() -> None:
    with pytest.raises(BadHandshake, match="Mooncake"):
        engine_ids(b"<html>")


@given(st.integers(0, 2**64), st.integers(1, 64), st.data())
def test_a_rooms_number_tells_the_rank(bits: int, ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    room = room_for(bits, rank, ranks)
    assert 0 <= room < 2**63
    assert room % ranks == rank


@pytest.mark.parametrize(
    ("kind", "body", "wanted"),
    [
        (EngineKind.VLLM, {"messages": [{"role": "user"}]}, {"kv_transfer_params": NIXL_OFFER | {"prompt_token_ids": [5, 6, 7]}}),
        (EngineKind.VLLM, {"prompt": "text"}, {"prompt": [5, 6, 7], "kv_transfer_params": NIXL_OFFER}),
        (EngineKind.VLLM, {"token_ids": [5, 6, 7]}, {"token_ids": [5, 6, 7], "kv_transfer_params": NIXL_OFFER}),
    ],
    ids=["chat", "completion", "generate"],
)
def test_decode_is_told_the_ids_that_prefill_has_computed(kind: EngineKind, body: dict[str, Any], wanted: dict[str, Any]) -> None:
    sent = msgspec.json.decode(decode_leg(kind, IDS, fields(body | {"model": "m", "n": 1}), {"kv_transfer_params": NIXL_OFFER}))
    assert sent == {"model": "m", "n": 1} | body | wanted


@pytest.mark.parametrize("body", [{"messages": []}, {"text": "x"}, {"input_ids": [5, 6, 7]}], ids=str)
def test_sglang_is_told_ids_and_room(body: dict[str, Any]) -> None:
    told = Room("h", 8998, 42).decode(b"")
    sent = msgspec.json.decode(decode_leg(EngineKind.SGLANG, IDS, fields(body), told))
    assert sent == {key: value for key, value in body.items() if key == "messages"} | {
        "input_ids": [5, 6, 7], "bootstrap_host": "h", "bootstrap_port": 8998, "bootstrap_room": 42,
    }  # fmt: skip


def test_prefill_gets_what_decides_where_its_blocks_are_cached_and_nothing_of_the_answer() -> None:
    body = fields({"stream": True, "stop": ["x"], "tools": [1], "cache_salt": "s", "extra_key": "k", "lora_path": "l", "priority": -1})
    assert msgspec.json.decode(prefill_leg("m", IDS, body, Room("h", 1, 2).prefill())) == {
        "model": "m", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0, "ignore_eos": True, "cache_salt": "s", "extra_key": "k",
        "lora_path": "l", "priority": -1, "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2,
    }  # fmt: skip


def test_where_ids_are_not_certain_both_get_the_clients_own_words() -> None:
    chat: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"a": 1}], "tool_choice": "required", "stream": True, "n": 1,
        "max_completion_tokens": 99, "response_format": {"type": "json_object"}, "reasoning_effort": "low", "cache_salt": "s",
    }  # fmt: skip
    told = Nixl().prefill()
    assert msgspec.json.decode(prefill_leg_as_asked(EngineKind.VLLM, fields(chat), told)) == {
        "model": "m", "messages": chat["messages"], "tools": chat["tools"], "reasoning_effort": "low", "cache_salt": "s",
        "max_tokens": 1, "temperature": 0, "ignore_eos": True, "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip
    handshake = {"kv_transfer_params": NIXL_OFFER}
    assert msgspec.json.decode(decode_leg_as_asked(fields(chat), handshake)) == chat | handshake
    auto = msgspec.json.decode(prefill_leg_as_asked(EngineKind.VLLM, fields(chat | {"tool_choice": "none"}), told))
    assert auto["tool_choice"] == "none"  # some templates leave tools out then


@pytest.mark.parametrize(("kind", "limit"), [(EngineKind.VLLM, "max_tokens"), (EngineKind.SGLANG, "max_new_tokens")])
def test_engines_own_routes_have_their_limit_in_the_sampling_parameters(kind: EngineKind, limit: str) -> None:
    body = fields({"text": "x", "stream": True, "sampling_params": {limit: 99, "stop": "y"}})
    assert msgspec.json.decode(prefill_leg_as_asked(kind, body, {})) == {
        "text": "x",
        "sampling_params": {limit: 1, "temperature": 0, "ignore_eos": True},
    }


def test_a_chat_that_goes_on_elsewhere_keeps_the_ids_it_goes_on_from() -> None:
    """Without them, both engines would begin the answer anew."""
    body = fields({"messages": [], "kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}})
    there = msgspec.json.decode(prefill_leg_as_asked(EngineKind.VLLM, body, Nixl().prefill()))
    here = msgspec.json.decode(decode_leg_as_asked(body, {"kv_transfer_params": NIXL_OFFER}))
    assert there["kv_transfer_params"] == {"do_remote_decode": True, "prompt_token_ids": [5, 6, 7]}
    assert here["kv_transfer_params"] == NIXL_OFFER | {"prompt_token_ids": [5, 6, 7]}


@pytest.mark.parametrize(("ranks", "told"), [((0, 1, 2), {"disagg_prefill_dp_rank": 2}), ((2,), {})])
def test_both_legs_are_told_which_of_several_ranks_computes(ranks: tuple[int, ...], told: dict[str, int]) -> None:
    spec = EngineSpec("http://p:8000")
    info = EngineInfo(spec.url, spec, EngineKind.SGLANG, "1", (), ranks=ranks, connector=Connector.ROOMS, bootstrap="http://p:8998")
    handshake = handshake_for(info, 2, 1000)
    assert handshake.prefill() == handshake.decode(b"")
    assert {name: value for name, value in handshake.prefill().items() if not name.startswith("bootstrap_")} == told
