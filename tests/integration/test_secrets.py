"""A7: what is secret is in no log, error, metric or trace, whoever sends it and wherever it stands."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import msgspec
import pytest

from engines.simulator.faults import Answer as Scripted
from engines.simulator.faults import Break
from engines.types import EngineSpec
from router.forward import NOT_FORWARDED
from tests.integration.conftest import Log
from tests.raw import ask
from tests.rig import Router, fleet, routing
from tests.waiting import until

CANARY = "canary-7f3a9"
TOKEN = "an-admin-token-for-tests"
QUERY = f"?api_key={CANARY}&model={CANARY}&{CANARY}={CANARY}"

HEADERS = dict.fromkeys(
    (
        {name.decode() for name in NOT_FORWARDED}
        - {"connection", "content-length", "expect", "host", "te", "trailer", "transfer-encoding", "upgrade"}
    )
    | {"accept", "accept-language", "anthropic-version", "api-key", "authorization", "b3", "baggage", "cookie", "idempotency-key"}
    | {
        "openai-organization",
        "origin",
        "referer",
        "user-agent",
        "x-api-key",
        "x-forwarded-for",
        "x-priority",
        "x-secret",
        "x-session-id",
        "x-tenant-id",
    },
    CANARY,
) | {
    "authorization": f"Bearer {CANARY}",
    "tracestate": f"vendor={CANARY}",
    "x-request-id": "an-id-is-there-to-be-shown",
    "x-commutator-explain": "1",
}
"""Every header that we or engines know, and others that carry secrets."""

BODY: dict[str, Any] = {
    "model": "sim",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": CANARY, "name": CANARY}],
    "user": CANARY,
    "cache_salt": CANARY,
    "metadata": {"key": CANARY, CANARY: "value"},
    "stop": [CANARY],
    "unknown": {"nested": [CANARY]},
    CANARY: CANARY,
    "kv_transfer_params": {"remote_host": CANARY},
}
"""Every field but the model's name, which its client is told when it is wrong."""


class Teller:
    """Sends the canary, and looks for it in whatever the router itself says."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def send(self, status: int, path: str, body: object = None, *, method: str = "POST", of_engine: bool = False) -> None:
        answer = await self.router.request(method, path + QUERY, body, HEADERS)
        assert answer.status == status, (path, answer)
        assert CANARY not in repr(answer.headers), answer
        assert of_engine or CANARY.encode() not in answer.body, answer  # what is generated may repeat the prompt

    async def says_nothing_in_metrics(self) -> None:
        await self.send(200, "/metrics", method="GET")


@pytest.fixture(params=[False, True], ids=["no keys", "keys"])
def keys(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return (f"someone:{CANARY}",) if request.param else ()


def nothing_is_shown(logged: Log, requests: int) -> None:
    assert len(logged.lines()) >= requests
    assert CANARY not in logged.text


async def test_A7_of_requests_that_are_served(logged: Log, keys: tuple[str, ...]) -> None:
    async with fleet(2) as engines, routing(engines, api_key=keys) as router:
        teller = Teller(router)
        await teller.send(200, "/v1/chat/completions", BODY, of_engine=True)
        await teller.send(200, "/v1/chat/completions", BODY | {"stream": True}, of_engine=True)
        await teller.send(200, "/v1/completions", {"model": "sim", "prompt": CANARY, "max_tokens": 1, "user": CANARY}, of_engine=True)
        await teller.send(200, "/v1/embeddings", {"model": "sim", "input": CANARY}, of_engine=True)
        await teller.send(200, "/route", BODY)
        await teller.send(503, "/ready", method="GET")  # the model of the query has no engine
        await teller.send(200, "/v1/models", method="GET")
        await teller.send(200, "/health", method="GET")
        await teller.says_nothing_in_metrics()
        assert all(
            CANARY.encode() in request.body for engine in engines for request in engine.requests if request.path.startswith("/v1/chat")
        )
    nothing_is_shown(logged, requests=4)


async def test_A7_of_requests_that_cannot_be_served(logged: Log, keys: tuple[str, ...]) -> None:
    async with fleet(2) as engines, routing(engines, api_key=keys, max_body_bytes=100_000) as router:
        teller = Teller(router)
        await teller.send(400, "/v1/chat/completions", BODY | {"model": 7})
        await teller.send(400, "/v1/chat/completions", BODY | {"messages": [CANARY]})
        await teller.send(400, "/v1/chat/completions", json.dumps(BODY)[:-1].encode())
        await teller.send(400, "/v1/chat/completions", CANARY.encode())
        await teller.send(404, "/v1/chat/completions", BODY | {"model": "no-such"})
        await teller.send(413, "/v1/chat/completions", BODY | {"more": CANARY * 10_000})
        await teller.send(404, "/no/such/path", BODY)
        await teller.send(405, "/v1/chat/completions", BODY, method="PUT")
        for fault, status in ((Scripted(status=503, body=b'{"error": {"message": "full"}}'), 503), (Break(after_chunks=0), 502)):
            for engine in engines:
                engine.faults.add(fault, times=None)
            await teller.send(status, "/v1/chat/completions", BODY)
            for engine in engines:
                engine.faults.clear()
        for broken in (
            f"POST /v1/chat/completions{QUERY} HTTP/1.1\r\nauthorization : Bearer {CANARY}\r\n\r\n",
            f"POST /{CANARY} HTTP/9.9\r\nauthorization: {CANARY}\r\n\r\n",
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx: {CANARY * 8000}\r\n\r\n",
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {CANARY}\r\ntransfer-encoding: {CANARY}\r\n\r\n",
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {CANARY}\r\nexpect: {CANARY}\r\ncontent-length: 2\r\n\r\n",
        ):
            reply = await ask(router.url, broken.encode())
            assert reply.status >= 400
            assert CANARY not in repr(reply.headers)
            assert CANARY.encode() not in reply.body
        await teller.says_nothing_in_metrics()
    nothing_is_shown(logged, requests=7)


async def test_A7_of_a_client_that_leaves_and_of_an_engine_that_dies_in_its_stream(logged: Log) -> None:
    async with fleet(1, speedup=1) as (engine,), routing([engine]) as router:
        streaming = BODY | {"stream": True, "max_tokens": 400}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await router.request("POST", "/v1/chat/completions" + QUERY, streaming, HEADERS)
        await until(lambda: [line for line in logged.lines() if line["status"] == 499], what="the client's leaving is logged")
        engine.faults.add(Break(after_chunks=3))
        async with router.session.post(
            router.url + "/v1/completions" + QUERY, json=streaming | {"prompt": CANARY}, headers=HEADERS
        ) as response:
            data = b""
            with contextlib.suppress(Exception):  # it breaks off, which is what this is about
                async for piece in response.content.iter_any():
                    data += piece
        assert b"broke off" in data
        assert CANARY.encode() not in data[data.rfind(b"broke off") - 100 :]
        await Teller(router).says_nothing_in_metrics()
    nothing_is_shown(logged, requests=2)


async def test_A7_of_operators_right_and_wrong(logged: Log) -> None:
    async with fleet(1) as engines, routing(engines, admin_token=TOKEN) as router:
        wrong = [HEADERS | {"authorization": value} for value in (f"Bearer {CANARY}", f"Basic {CANARY}", CANARY)]
        right = HEADERS | {"authorization": f"Bearer {TOKEN}"}
        at = "http://127.0.0.1:9"
        tries = [(headers, BODY, 401) for headers in wrong]
        tries += [(right, {"url": at, "api_key": CANARY}, 201), (right, {"url": at, "api_key": CANARY, "role": "cook"}, 400)]
        tries += [(right, {"url": f"http://{CANARY}:{CANARY}@127.0.0.1:9"}, 400), (right, {"url": at, "api_key": [CANARY]}, 400)]
        for headers, body, status in tries:
            async with router.session.post(f"{router.admin}/admin/engines{QUERY}", json=body, headers=headers) as response:
                assert response.status == status
                assert CANARY not in repr(response.headers)
                assert CANARY.encode() not in await response.read()
        async with router.session.get(router.admin + "/admin/engines", headers=right) as listed:
            assert at.encode() in await listed.read()
            assert CANARY.encode() not in await listed.read()
        await until(lambda: [line for line in logged.lines("waiting for engine") if line["engine"] == at], what="the engine added is asked")
    nothing_is_shown(logged, requests=0)
    assert TOKEN not in logged.text


async def test_A7_of_engines_keys(logged: Log) -> None:
    async with fleet(1, require_key=CANARY) as (engine,):
        async with routing([EngineSpec(engine.url, api_key=CANARY)]) as router:
            assert (await router.chat("x")).status == 200
            assert CANARY.encode() not in (await router.get("/metrics")).body
        async with routing([EngineSpec(engine.url, api_key="wrong-" + CANARY)], wait_for=0):
            await until(lambda: logged.lines("waiting for engine"), what="the engine refuses the key")
    nothing_is_shown(logged, requests=1)


async def test_a_model_that_is_none_is_named_to_its_client_in_bounds_and_not_in_the_log(logged: Log) -> None:
    async with fleet(1) as engines, routing(engines) as router:
        answer = await router.chat("x", model=CANARY + "m" * 100_000)
        assert answer.status == 404
        assert CANARY in answer.json["error"]["message"]
        assert len(answer.body) < 1000
        (line,) = logged.lines()
        assert (line["status"], line["failure"]) == (404, "there is no such model")
    nothing_is_shown(logged, requests=1)


async def test_a_template_that_rejects_a_conversation_is_quoted_to_its_client_and_not_in_the_log(logged: Log) -> None:
    async with fleet(1) as engines, routing(engines) as router:
        answer = await router.post("/v1/chat/completions", {"model": "sim", "messages": [{"role": CANARY, "content": "x"}]})
        assert answer.status == 400
        assert msgspec.json.decode(answer.body)["error"]["message"]
    nothing_is_shown(logged, requests=1)
