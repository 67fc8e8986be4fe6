"""What a request's fields say of KV that is handed over, and what wrong KV is."""

from __future__ import annotations

from typing import Any

import pytest

from engines.simulator.handover import Fetch, Handover, Keep, Never, Rooms, contents, difference, from_sglang, from_vllm
from engines.simulator.settings import Connector
from engines.types import Role

HANDLE: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_block_ids": [[7, 8]],
    "remote_engine_id": "P",
    "remote_request_id": "cmpl-1-0-a",
    "remote_host": "h",
    "remote_port": 5600,
    "remote_prefill_cached_tokens": 16,
}
SENT: dict[str, Any] = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "P", "remote_bootstrap_addr": "http://h:8998"}


def without(params: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != name}


@pytest.mark.parametrize(
    ("params", "read"),
    [
        (None, None),
        ({}, None),
        ({"prompt_token_ids": [1]}, None),
        ({"do_remote_decode": True}, Keep("own")),
        (HANDLE, Fetch("http://h:5600", "cmpl-1-0-a", "P", (7, 8), 16)),
        (HANDLE | {"do_remote_decode": True}, Fetch("http://h:5600", "cmpl-1-0-a", "P", (7, 8), 16)),
        (without(HANDLE, "remote_block_ids"), Never.ENDS),
        (HANDLE | {"remote_block_ids": []}, Never.ENDS),
        *(
            (without(HANDLE, name), Never.ENDS_LATER)
            for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_nixl_does_either_part_whatever_its_role(role: Role, params: dict[str, Any] | None, read: Handover | None) -> None:
    assert from_vllm(params, Connector.NIXL, role, "own") == read


@pytest.mark.parametrize(
    ("role", "params", "read"),
    [
        (Role.PREFILL, {"do_remote_decode": True, "transfer_id": "t"}, Keep("t", after_stop=False)),
        (Role.PREFILL, {"do_remote_decode": True}, None),
        (Role.PREFILL, SENT, Never.ENDS),
        (Role.DECODE, SENT, Fetch("http://h:8998", "t", "P")),
        (Role.DECODE, {"do_remote_decode": True, "transfer_id": "t"}, Never.ENDS),
        *((Role.DECODE, without(SENT, name), Never.WAITS) for name in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")),
    ],
)
def test_mooncake_does_its_own_part_only(role: Role, params: dict[str, Any], read: Handover | None) -> None:
    assert from_vllm(params, Connector.MOONCAKE, role, "own") == read


def test_an_engine_without_a_role_does_not_look_at_it() -> None:
    assert from_vllm(HANDLE, Connector.NIXL, Role.AGGREGATED, "own") is None


def test_a_room_is_kept_for_on_the_one_side_and_fetched_from_on_the_other() -> None:
    rooms = Rooms(("h", "i"), (8998, 8999), (5, 6))
    assert from_sglang(rooms, 1, Role.PREFILL, samples=1) == Keep("6", meets=True)
    assert from_sglang(rooms, 1, Role.DECODE, samples=1) == Fetch("http://i:8999", "6")
    assert from_sglang(rooms, 0, Role.DECODE, samples=2) is Never.WAITS


def test_contents_are_those_of_all_tokens_up_to_a_blocks_end() -> None:
    whole = contents([1, 2, 3, 4, 5], 2)
    assert len(whole) == 3
    assert contents([1, 2, 3, 4], 2) == whole[:2]
    changed = contents([9, 2, 3, 4, 5], 2)
    assert all(one != other for one, other in zip(whole, changed, strict=True))
    assert contents([1, 2, 3, 4, 5], 2, "adapter") != whole
    assert contents([], 2) == ()


def test_other_contents_differ_always_in_the_same_way() -> None:
    right, wrong = contents([1, 2, 3], 2), contents([1, 2, 4], 2)
    assert difference(right, right) == 0
    assert difference(wrong, right) == difference(wrong, right) != 0
