"""What guards engines and clients: a closed list of routes, keys, and series that no client can multiply."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from engines.types import EngineKind, EngineSpec
from router.forward import NOT_FORWARDED
from router.routes import INFERENCE
from tests.integration.conftest import Log
from tests.raw import ask, talking
from tests.rig import asked, fleet, prompt, routing
from tests.waiting import until

CONTROL = (
    "/version",
    "/health",
    "/metrics",
    "/v1/models",
    "/kv_event_sources",
    "/tokenize",
    "/server_info",
    "/ready",
    "/v1/loads",
    "/model_info",
)
"""What the router itself asks engines."""


DESTINATIONS = [
    "X-Data-Parallel-Rank",
    "X-data-parallel-host-port",
    "x-prefiller-host-port",
    "x-prefill-host-port",
    "x-worker-instance-id",
    "x-prefill-instance-id",
    "x-decode-instance-id",
    "x-dp-rank",
    "x-smg-target-worker",
    "x-gateway-destination-endpoint",
    "x-envoy-original-dst-host",
    "x-override-rid",
    "x-override-bootstrap-host",
    "x-override-routed-dp-rank",
    "x-commutator-engine",
    "x-commutator-rank",
]


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_A1_destination_rank_and_engine_headers_have_no_effect_and_go_nowhere(kind: EngineKind) -> None:
    async with fleet(2, kind=kind) as engines, routing(engines, policy="round-robin") as router:
        for url in (engines[0].url, engines[1].url):
            told = dict.fromkeys(DESTINATIONS, url) | {"X-Data-Parallel-Rank": "7"}
            answers = [await router.chat("x", headers=told) for _ in range(4)]
            assert [answer.status for answer in answers] == [200] * 4
            assert len({answer.engine for answer in answers}) == 2
        reached = {name.decode().lower() for engine in engines for request in asked(engine) for name, _ in request.headers}
        assert not reached & {name.lower() for name in DESTINATIONS}
        assert not {name for name in reached if name.startswith(("x-override-", "x-commutator-"))}
        assert not reached & ({name.decode() for name in NOT_FORWARDED} - {"host", "content-length", "x-request-id"})


NOT_ROUTES = [
    "/invocations",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/flush_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/update_weights_from_disk",
    "/server_info",
    "/version",
    "//v1/../invocations",
    "/v1/../pause",
    "/v1/%2e%2e/pause",
    "/%2e%2e/pause",
    "/v1/chat/completions/../../../pause",
    "/v1/chat/completions/%2e%2e/%2e%2e/%2e%2e/pause",
    "/v1//chat/completions",
    "//v1/chat/completions",
    "/v1/chat/completions/",
    "/v1/chat%2fcompletions",
    "/V1/chat/completions",
    "/v1/chat/completions;x=1",
    "/v1/chat/completions%00",
    "/v1/chat/completions%3f",
    "/v1/chat/completions\\..\\pause",
    "http://other/pause",
    "http://other//pause",
]


async def test_A5_what_is_not_in_the_table_of_routes_is_404_and_no_engine_sees_it() -> None:
    body = b'{"model": "sim", "prompt": "x"}'
    async with fleet(1) as (engine,), fleet(1, kind=EngineKind.SGLANG) as (sglang,), routing([engine, sglang]) as router:
        for target in NOT_ROUTES:
            for method in ("POST", "GET"):
                head = f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                reply = await ask(router.url, head + body, method)
                assert reply.status == 404, (method, target, reply)
                assert json.loads(reply.body)["error"]["type"] == "not_found_error"
        for one in (engine, sglang):
            assert {request.path.partition("?")[0] for request in one.requests} <= {*CONTROL, "/get_model_info", "/get_server_info"}
            assert not asked(one)
        assert (await router.chat("x")).status == 200


async def test_A6_an_address_that_a_client_names_is_not_gone_to() -> None:
    knocks = 0

    async def knocked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        writer.close()

    async with fleet(1) as (engine,), routing([engine]) as router, await asyncio.start_server(knocked, "127.0.0.1", 0) as trap:
        port = trap.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        names = ("url", "upstream", "backend", "endpoint", "engine", "worker", "host", "base_url", "api_base", "target")
        query = "&".join(f"{name}={url}" for name in names)
        answer = await router.post(
            f"/v1/chat/completions?{query}", {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        )
        assert (answer.status, answer.engine) == (200, engine.url)
        fields: dict[str, object] = dict.fromkeys((*names, "bootstrap_host", "remote_host"), url)
        fields |= {"bootstrap_port": port, "kv_transfer_params": {"remote_host": "127.0.0.1", "remote_port": port}}
        body = msgspec.json.encode({"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields)
        answer = await router.post("/v1/chat/completions", body)
        assert (answer.status, answer.engine) == (200, engine.url)
        body = msgspec.json.encode({"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        head = f"POST {url}/v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {len(body)}\r\n\r\n"
        assert (await ask(router.url, head.encode() + body)).status == 200
        assert (await router.post(f"/route?path={url}", body)).status == 404
        assert len(asked(engine)) == 3
        assert {request.header("host") for request in asked(engine)} == {urlsplit(engine.url).netloc}
        assert knocks == 0


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/models", "/route", "/v1/models/sim", "/nowhere", "/admin/engines"]
)
async def test_A10_without_a_key_nothing_but_the_routers_own_health_is_answered(path: str) -> None:
    async with fleet(1) as (engine,), routing([engine], api_key=("alice:sk-1",)) as router:
        seen = len(asked(engine))
        for headers in (
            {},
            {"authorization": "Bearer sk-2"},
            {"x-api-key": "sk-"},
            {"authorization": "sk-1"},
            {"authorization": "Basic sk-1"},
        ):
            for method in ("POST", "GET", "OPTIONS"):
                answer = await router.request(method, path, {"model": "sim", "messages": []}, headers)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                error = answer.json["error"]
                assert error["type"] == "authentication_error"
                assert (error.get("code") == "invalid_api_key") is not path.startswith("/v1/messages")
                assert (answer.json.get("type") == "error") is path.startswith("/v1/messages")
        assert len(asked(engine)) == seen
        assert [(await router.get(path)).status for path in ("/health", "/ready", "/metrics")] == [200] * 3
        assert await router.metric("router_refused_requests_total", status="401") == 15


async def test_A10_either_header_opens_and_neither_key_reaches_an_engine() -> None:
    async with fleet(1) as (plain,), fleet(1, require_key="sk-engine") as (keyed,):
        engines = [EngineSpec(plain.url), EngineSpec(keyed.url, api_key="sk-engine")]
        async with routing(engines, api_key=("alice:sk-1", "sk-2"), policy="round-robin") as router:
            for headers in ({"authorization": "Bearer sk-1"}, {"x-api-key": "sk-2"}, {"authorization": "bearer sk-2", "x-api-key": "sk-1"}):
                assert [(await router.chat("x", headers=headers)).status for _ in range(2)] == [200, 200]
            assert (await router.request("GET", "/v1/models", None, {"x-api-key": "sk-1"})).status == 200
        assert len(asked(plain)) == len(asked(keyed)) == 3
        assert {(request.header("authorization"), request.header("x-api-key")) for request in asked(plain)} == {(None, None)}
        assert {(request.header("authorization"), request.header("x-api-key")) for request in asked(keyed)} == {("Bearer sk-engine", None)}


async def test_A10_where_the_router_asks_for_no_key_the_clients_goes_to_engines_that_have_none_of_their_own() -> None:
    async with fleet(1) as (plain,), fleet(1, require_key="sk-engine") as (keyed,):
        async with routing([EngineSpec(plain.url), EngineSpec(keyed.url, api_key="sk-engine")], policy="round-robin") as router:
            for _ in range(2):
                assert (await router.chat("x", headers={"authorization": "Bearer sk-client", "x-api-key": "sk-client"})).status == 200
        (at_plain,), (at_keyed,) = asked(plain), asked(keyed)
        assert (at_plain.header("authorization"), at_plain.header("x-api-key")) == ("Bearer sk-client", "sk-client")
        assert (at_keyed.header("authorization"), at_keyed.header("x-api-key")) == ("Bearer sk-engine", None)


async def test_A10_a_body_is_not_read_of_whoever_has_no_key() -> None:
    async with fleet(1) as engines, routing(engines, api_key=("sk-1",)) as router:
        async with talking(urlsplit(router.url).port or 0) as client:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1000000\r\n\r\n")
            reply = await client.answer()
            assert (reply.status, reply.interim) == (401, [])
        async with talking(urlsplit(router.url).port or 0) as client:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            assert (await client.answer()).status == 401
        key = b"authorization: Bearer sk-1\r\n"
        async with talking(urlsplit(router.url).port or 0) as client:  # each request of a connection is asked for its own
            await client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + key + b"\r\n")
            assert (await client.answer("GET")).status == 200
            await client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.answer("GET")).status == 401


async def test_keys_of_a_file_are_read_again_when_it_changes_and_a_broken_file_changes_nothing(tmp_path: Path, logged: Log) -> None:
    file = tmp_path / "keys"
    file.write_text("# clients\nalice:sk-old\n")
    async with fleet(1) as engines, routing(engines, api_keys_file=str(file), api_key=("ops:sk-always",)) as router:

        async def opens(key: str) -> bool:
            return (await router.request("GET", "/v1/models", None, {"x-api-key": key})).status == 200

        assert [await opens(key) for key in ("sk-old", "sk-new", "sk-always")] == [True, False, True]
        file.write_text("alice:sk-old\nalice:sk-new\n")
        await until(lambda: opens("sk-new"), what="the new key opens")
        assert await opens("sk-old")
        replaced = tmp_path / "keys.new"
        replaced.write_text("alice:sk-new\n")
        replaced.rename(file)

        async def closed() -> bool:
            return not await opens("sk-old")

        await until(closed, what="the old key opens no more")
        file.write_text("alice:sk new\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: logged.lines("files could not be read again; what was read last stays in force"), what="it is said")
        file.unlink()
        os.kill(os.getpid(), signal.SIGHUP)
        assert [await opens(key) for key in ("sk-new", "sk-always")] == [True, True]
        (one, *_) = logged.lines("files could not be read again; what was read last stays in force")
        assert "line 1" in one["reason"]
        assert "sk new" not in logged.text


async def test_a_log_line_names_the_client_by_its_keys_name(logged: Log) -> None:
    async with fleet(1) as engines, routing(engines, api_key=("alice:sk-1",)) as router:
        await router.chat("x", headers={"authorization": "Bearer sk-1"})
        assert [line["client"] for line in logged.lines()] == ["alice"]
    assert "sk-1" not in logged.text


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_H11_an_engine_that_wants_a_token_gets_it_on_every_path(kind: EngineKind) -> None:
    async with fleet(1, kind=kind, require_key="sk-engine") as (engine,):
        async with routing([EngineSpec(engine.url, api_key="sk-engine")]) as router:
            assert (await router.chat(prompt("a"))).status == 200
            stream = await router.begin("x", stream=True, max_tokens=3)
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            assert (await router.complete([1, 2, 3])).status == 200
            for route in INFERENCE.values():
                if not route.websocket:
                    answer = await router.post(route.path, {"model": "sim", "input": "x", "prompt": "x", "text": "x"})
                    assert answer.status != 401, route.path
            looked = len(engine.requests)
            await until(lambda: len(engine.requests) > looked + 6, what="it is looked at again")
            ready = (await router.get("/ready")).json
            assert (ready["ready"], ready["models"]) == (True, {"sim": 1})
        assert len({request.path for request in engine.requests}) > 6
        assert {request.header("authorization") for request in engine.requests} == {"Bearer sk-engine"}


async def test_O1_what_clients_send_adds_no_metric_series() -> None:
    async with fleet(1) as engines, routing(engines, api_key=("alice:sk-1",)) as router:
        key = {"x-api-key": "sk-1"}

        async def disturb(number: int) -> None:
            assert (await router.chat("x", model=f"model-{number}", headers=key)).status == 404
            assert (await router.request("POST", f"/path/{number}", b"{}", key)).status == 404
            assert (await router.request("GET", f"/v1/models/{number}", None, {"x-api-key": f"key-{number}"})).status == 401

        async def series() -> set[str]:
            page = (await router.get("/metrics")).body.decode()
            return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}

        assert (await router.chat("x", headers=key)).status == 200
        await disturb(0)
        before = await series()
        assert len(before) > 50
        for number in range(1, 501, 20):
            await asyncio.gather(*(disturb(number + offset) for offset in range(20)))
        assert await series() == before
