"""SGLang's answers, and what they mean."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines import sglang
from engines.types import EngineInfo, EngineKind, EngineSpec, KvSource

REAL = (Path(__file__).parents[1] / "data" / "endpoints" / "sglang" / "server_info.json").read_bytes()


def server(**changes: object) -> sglang.ServerInfo:
    info = sglang.recognise(msgspec.json.encode({**msgspec.json.decode(REAL), **changes}))
    assert info is not None
    return info


def kv(**changes: object) -> dict[str, Any]:
    block: dict[str, Any] = msgspec.json.decode(REAL)["kv_events"]
    return {**block, **changes}


def test_a_real_answer_is_read() -> None:
    info = server()
    assert (info.version, info.tokenizer_path) == ("0.5.23", "models/tiny")
    assert not sglang.starting(info)
    assert sglang.ranks(info) == (0,)
    assert sglang.block_size(info) == 16
    assert sglang.total_blocks(info) == 1024
    assert sglang.max_batched_tokens(info) == 4096
    assert sglang.read_kv_sources(info, "10.0.0.7") == (KvSource(0, "tcp://10.0.0.7:32557", "tcp://10.0.0.7:32558", topic="kv@w0@tiny"),)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"{}", b'{"vllm_config":{}}', b'{"version":"0.5.23"}', b'{"model_path":"m"}'])
def test_another_answer_is_not_recognised(answer: bytes) -> None:
    assert sglang.recognise(answer) is None


def test_with_dp_attention_the_ranks_are_those_of_the_kv_events_block() -> None:
    info = server(dp_size=1, attn_dp_size=2, kv_events=kv(dp_size=2, endpoint_port_base=32800, replay_endpoint_port_base=32802))
    assert sglang.ranks(info) == (0, 1)
    found = sglang.read_kv_sources(info, "h")
    assert [(source.rank, source.events, source.replay) for source in found] == [
        (0, "tcp://h:32800", "tcp://h:32802"),
        (1, "tcp://h:32801", "tcp://h:32803"),
    ]


def test_load_is_pushed_where_the_discovery_block_says_whatever_host_the_events_have() -> None:
    block = kv(dp_size=2, endpoint_host="10.9.9.9", load_endpoint_port_base=32804, load_topic="load")
    assert sglang.read_load_sources(server(kv_events=block), "h") == (
        KvSource(0, "tcp://h:32804", topic="load"),
        KvSource(1, "tcp://h:32805", topic="load"),
    )
    for without in (server(kv_events=kv(load_endpoint_port_base=None)), server(kv_events=None)):
        assert sglang.read_load_sources(without, "h") == ()


def test_a_chat_brings_no_ids_where_its_template_has_stop_strings() -> None:
    assert all(sglang.chats_take_ids(server(chat_template=name)) for name in (None, "/templates/mine.jinja"))
    assert not any(sglang.chats_take_ids(server(chat_template=name)) for name in ("vicuna_v1.1", "/templates/mine.json"))
    assert sglang.texts_take_ids(server(completion_template=None))
    assert not sglang.texts_take_ids(server(completion_template="qwen_coder"))


@pytest.mark.parametrize(
    ("hicache", "blocks"),
    [
        ({}, None),
        ({"enable_hierarchical_cache": True, "hicache_ratio": 2.5}, 2560),
        ({"enable_hierarchical_cache": False, "hicache_ratio": 2.5}, None),
        ({"enable_hierarchical_cache": True, "hicache_ratio": 2, "hicache_size": 30}, None),
        ({"enable_hierarchical_cache": True, "hicache_ratio": None}, None),
    ],
)
def test_a_host_tier_counts_in_blocks_where_it_is_sized_by_the_device_s(hicache: dict[str, object], blocks: int | None) -> None:
    assert sglang.host_blocks(server(**hicache)) == blocks


def test_without_kv_events_the_ranks_are_still_known_and_there_is_no_source() -> None:
    info = server(kv_events=None, kv_events_config=None, dp_size=4)
    assert sglang.ranks(info) == (0, 1, 2, 3)
    assert sglang.read_kv_sources(info, "h") == ()
    assert sglang.block_size(info) == 16


@pytest.mark.parametrize(
    ("host", "config", "events", "bind"),
    [
        ("*", {}, "tcp://[fd00::7]:32557", False),
        ("0.0.0.0", {}, "tcp://[fd00::7]:32557", False),
        ("::", {}, "tcp://[fd00::7]:32557", False),
        ("[::]", {}, "tcp://[fd00::7]:32557", False),
        ("127.0.0.1", {}, "tcp://127.0.0.1:32557", True),
        ("127.0.0.1", {"bind": True}, "tcp://127.0.0.1:32557", False),
        ("*", {"bind": True}, "tcp://[fd00::7]:32557", False),
    ],
)
def test_whoever_the_engine_is_not_binds(host: str, config: dict[str, object], events: str, bind: bool) -> None:
    written = msgspec.json.encode({"publisher": "zmq", **config}).decode()
    (source,) = sglang.read_kv_sources(server(kv_events=kv(endpoint_host=host), kv_events_config=written), "fd00::7")
    assert (source.events, source.bind) == (events, bind)
    assert source.replay == "tcp://[fd00::7]:32558"


def test_a_version_without_the_discovery_block_is_read_from_its_configuration() -> None:
    info = server(kv_events=None, dp_size=2)
    assert sglang.read_kv_sources(info, "h") == (
        KvSource(0, "tcp://h:32557", "tcp://h:32558", topic="kv@w0@tiny"),
        KvSource(1, "tcp://h:32558", "tcp://h:32559", topic="kv@w0@tiny"),
    )


def test_without_chunking_a_step_takes_a_whole_prefill_batch() -> None:
    assert sglang.max_batched_tokens(server(chunked_prefill_size=-1)) == 16384


def test_a_server_that_says_it_is_starting_is_believed() -> None:
    assert sglang.starting(server(status="starting"))
    assert not sglang.starting(server(status=None))


def test_R28_a_header_only_goes_where_there_are_ranks_to_choose_from() -> None:
    one = EngineInfo(id="http://h:1", spec=EngineSpec("http://h:1"), kind=EngineKind.SGLANG, version="0.5.23", models=())
    assert sglang.pin_headers(one, 0) == {}
    assert sglang.pin_fields(one, 0) == {}
    assert sglang.pin_fields(msgspec.structs.replace(one, ranks=(0, 1)), 1) == {"routed_dp_rank": 1}
    assert sglang.pin_headers(msgspec.structs.replace(one, ranks=(0, 1)), 1) == {"X-Data-Parallel-Rank": "1"}
