"""Which trace a request is part of, and what it is called, from its client to its engine and into the log."""

from __future__ import annotations

import pytest

from engines.simulator.faults import Answer as Scripted
from tests.integration.conftest import Log
from tests.raw import ask
from tests.rig import asked, fleet, routing

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_O4_the_engine_gets_the_same_trace_with_a_new_parent_and_the_id_is_echoed(path: str, logged: Log) -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        body = {"model": "sim", "max_tokens": 2, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
        told = {"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "client-42"}
        for stream in (False, True):
            answer = await router.post(path, body | {"stream": stream}, told)
            assert (answer.status, answer.headers["x-request-id"]) == (200, "client-42")
        parents = [request.header("traceparent") or "" for request in asked(engine, path)]
        assert all(parent.split("-")[:2] == PARENT.split("-")[:2] and parent.endswith("-01") for parent in parents)
        assert len({PARENT, *parents}) == 3
        assert {(request.header("tracestate"), request.header("x-request-id")) for request in asked(engine, path)} == {
            ("vendor=1", "client-42")
        }
        told_of = logged.lines()
        assert [(line["request_id"], line["trace_id"], line["span_id"]) for line in told_of] == [
            ("client-42", PARENT.split("-")[1], parent.split("-")[2]) for parent in parents
        ]


async def test_O4_an_id_is_made_where_there_is_none_and_no_trace_is(logged: Log) -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        answers = [await router.chat("x"), await router.chat("x", headers={"x-request-id": "two words"}), await router.get("/v1/models")]
        answers.append(await router.chat("x", model="none"))
        ids = [answer.headers["x-request-id"] for answer in answers]
        assert len(set(ids)) == 4
        assert all(len(made) == 32 for made in ids)
        assert [request.header("x-request-id") for request in asked(engine)] == ids[:2]
        assert {request.header("traceparent") for request in asked(engine)} == {None}
        assert [line["request_id"] for line in logged.lines()] == [ids[0], ids[1], ids[3]]
        assert all("trace_id" not in line for line in logged.lines())


async def test_O4_the_engines_own_id_does_not_come_beside_the_clients() -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        for status in (200, 400, 503):
            engine.faults.add(
                Scripted(status=status, body=b"{}", headers=(("X-Request-Id", "engines"), ("Content-Type", "application/json"))), times=None
            )
            body = b'{"model": "sim", "prompt": "x"}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ncontent-length: %d\r\n\r\n" % len(body)
            reply = await ask(router.url, head + body)  # a strict client: no header comes twice
            assert (reply.status, reply.headers["x-request-id"]) == (status, "mine")
            engine.faults.clear()
