"""What an engine says of its load, asked or by itself, and that it is asked for its health without generating anything."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.conformance.wire import Client, Engine
from tests.waiting import until

FIELDS = 11
"""The tag and ten numbers, as of 0.5.23."""


@pytest.fixture
def sglang(engine: Engine) -> Engine:
    if engine.kind != "sglang":
        pytest.skip("only SGLang pushes its load")
    return engine


async def pushed(client: Client, count: int) -> list[tuple[bytes, bytes, list[Any]]]:
    """So many messages of the load feed, from wherever the engine says it is."""
    block = (await client.get("/server_info")).json["kv_events"]
    assert block["load_topic"] == "load"
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"load")
        socket.connect(f"tcp://127.0.0.1:{block['load_endpoint_port_base']}")
        messages = []
        async with asyncio.timeout(20):
            for _ in range(count):
                topic, number, payload = await socket.recv_multipart()
                messages.append((topic, number, msgspec.msgpack.decode(payload)))
        return messages
    finally:
        context.destroy(linger=0)


async def test_a_pushed_report_is_a_topic_a_number_and_a_tagged_array(sglang: Engine, client: Client) -> None:
    """An idle engine repeats it every second."""
    first, second = await pushed(client, 2)
    for topic, number, report in (first, second):
        assert topic == b"load"
        assert len(number) == 8
        tag, running, waiting, used, total, rank, *more = report
        assert (tag, running, waiting, rank) == ("LoadStat", 0, 0, 0)
        assert 0 <= used <= total
        assert total > 0
        assert len(report) == FIELDS
        assert all(type(value) is int for value in more)
    assert int.from_bytes(second[1], "big") == int.from_bytes(first[1], "big") + 1


async def test_the_asked_and_the_pushed_say_the_same(sglang: Engine, client: Client) -> None:
    async def agree() -> bool:
        ((_, _, report),) = await pushed(client, 1)
        (asked,) = (await client.get("/v1/loads?include=core")).json["loads"]
        told = [asked[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "dp_rank")]
        return told == report[1:6]

    await until(agree, what="both to be told of the same state")


async def test_asking_whether_it_is_ready_generates_nothing(client: Client, engine: Engine) -> None:
    path = "/health" if engine.kind == "vllm" else "/ready"
    before = await client.generated()
    for _ in range(5):
        assert (await client.get(path)).status == 200
    assert await client.generated() == before
