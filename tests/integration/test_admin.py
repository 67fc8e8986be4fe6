"""The admin API: who may call it, and what changes when somebody does."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import pytest

from engines.simulator.engine import SimulatedEngine
from tests.rig import Answer, Router, fleet, prompt, routing, settings_of
from tests.waiting import until

TOKEN = "an-admin-token-for-tests"


class Operator:
    """Calls the admin API of a router."""

    def __init__(self, router: Router, token: str | None = TOKEN) -> None:
        self.router = router
        self.headers = {} if token is None else {"authorization": f"Bearer {token}"}

    async def ask(self, method: str, path: str, body: object = None) -> Answer:
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        async with self.router.session.request(method, self.router.admin + path, data=data, headers=self.headers) as response:
            return Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, await response.read())

    async def engines(self) -> dict[str, dict[str, Any]]:
        answer = await self.ask("GET", "/admin/engines")
        assert answer.status == 200, answer.body
        return {engine["id"]: engine for engine in answer.json["engines"]}

    async def engine(self, url: str, action: str = "", method: str = "GET", query: str = "") -> Answer:
        return await self.ask(method, f"/admin/engines/{quote(url, safe='')}{action}{query}")

    async def in_state(self, url: str, state: str) -> None:
        async def reached() -> bool:
            return bool((await self.engines()).get(url, {"state": "gone"})["state"] == state)

        await until(reached, what=f"{url} is {state}")


async def test_without_a_token_there_is_no_admin_api() -> None:
    async with fleet(1) as engines, routing(engines) as router:
        assert router.admin == ""


async def test_A3_without_the_admin_token_nothing_is_told_and_nothing_is_changed() -> None:
    async with fleet(2) as (one, other), routing([one], admin_token=TOKEN) as router:
        for token in (None, "wrong-but-long-enough", TOKEN[:-1], TOKEN + "x", ""):
            stranger = Operator(router, token)
            for answer in (
                await stranger.ask("GET", "/admin/engines"),
                await stranger.ask("POST", "/admin/engines", {"url": other.url}),
                await stranger.engine(one.url, "/drain", "POST"),
                await stranger.engine(one.url, "", "DELETE", "?now=1"),
                await stranger.ask("GET", "/nowhere"),
            ):
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json["error"]["code"] == "invalid_api_key"
                assert one.url.encode() not in answer.body
        assert list(await Operator(router).engines()) == [one.url]
        assert (await router.chat("x")).status == 200
        assert not other.requests


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "[fe80::1]",
        "[::ffff:169.254.169.254]",
        "2852039166",
        "0xa9fea9fe",
        "169.254.43518",
        "100.100.100.200",
        "0.0.0.0",
        "224.0.0.1",
    ],
)
async def test_A3_no_engine_is_added_where_only_credentials_are(host: str) -> None:
    async with fleet(1) as (engine,), routing([engine], admin_token=TOKEN) as router:
        operator = Operator(router)
        for body in (
            {"url": f"http://{host}:80"},
            {"url": engine.url, "kv_events": f"tcp://{host}:5557"},
            {"url": engine.url, "kv_events": "tcp://*:5557", "kv_replay": f"tcp://{host}:5558"},
        ):
            if body["url"] == engine.url and host == "0.0.0.0":
                continue  # of an event address it means the engine's own host
            answer = await operator.ask("POST", "/admin/engines", body)
            assert answer.status == 400, answer.body
            assert "no engine is added there" in answer.json["error"]["message"]
        assert list(await operator.engines()) == [engine.url]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"not json", "JSON"),
        (b"[]", "JSON"),
        (b"[" * 5000, "JSON"),
        ({}, "url"),
        ({"url": "h:8000"}, "scheme"),
        ({"url": "ftp://h:8000"}, "http"),
        ({"url": "http://127.0.0.1:8000/v1"}, "path"),
        ({"url": "http://user:canary@127.0.0.1:8000"}, "api-key"),
        ({"url": "http://127.0.0.1:8000", "rôle": "decode"}, "rôle"),
        ({"url": "http://127.0.0.1:8000", "role": "cook"}, "aggregated"),
        ({"url": "http://127.0.0.1:8000", "block_size": "16"}, "block-size"),
        ({"url": "http://127.0.0.1:8000", "kv_replay": "tcp://h:1"}, "kv-events"),
        ({"url": "http://no-such-host.invalid:8000"}, "no-such-host.invalid"),
    ],
)
async def test_a_description_that_is_none_is_refused_in_words(body: object, words: str) -> None:
    async with routing([], admin_token=TOKEN) as router:
        answer = await Operator(router).ask("POST", "/admin/engines", body)
        assert answer.status == 400, answer.body
        assert words in answer.json["error"]["message"]
        assert b"canary" not in answer.body
        assert not await Operator(router).engines()


async def test_A4_the_admin_api_is_not_on_the_public_port_and_nothing_public_on_its_own() -> None:
    async with fleet(1) as (engine,), routing([engine], admin_token=TOKEN) as router:
        headers = {"authorization": f"Bearer {TOKEN}"}
        for method, path in (
            ("GET", "/admin/engines"),
            ("POST", "/admin/engines"),
            ("POST", f"/admin/engines/{quote(engine.url, safe='')}/drain"),
            ("DELETE", f"/admin/engines/{quote(engine.url, safe='')}"),
        ):
            assert (await router.request(method, path, b"{}", headers)).status == 404
        assert urlsplit(router.admin).port != urlsplit(router.url).port
        for path in ("/metrics", "/health", "/v1/models", "/", "/admin", "/admin/enginesx"):
            assert (await Operator(router).ask("GET", path)).status == 404
        assert (await Operator(router).ask("POST", "/v1/chat/completions", {"model": "sim"})).status == 404


async def test_what_is_known_of_each_engine_is_told_and_no_secret_with_it() -> None:
    async with fleet(1, require_key="sk-canary") as (engine,), routing([], admin_token=TOKEN) as router:
        operator = Operator(router)
        absent = "http://127.0.0.1:9"
        added = await operator.ask("POST", "/admin/engines", {"url": engine.url + "/", "api_key": "sk-canary"})
        assert (added.status, added.json["outcome"], added.json["id"]) == (201, "added", engine.url)
        assert (await operator.ask("POST", "/admin/engines", {"url": absent, "role": "decode"})).status == 201
        await operator.in_state(engine.url, "serving")
        await router.chat(prompt("a"))

        async def told() -> bool:
            return bool((await operator.engines())[engine.url]["endpoints"][0]["cached_blocks"]["device"])

        await until(told, what="the prompt's events are counted")
        listed = await operator.ask("GET", "/admin/engines")
        assert b"canary" not in listed.body
        known = (await operator.engines())[engine.url]
        assert (known["role"], known["state"], known["kind"], known["in_flight"]) == ("aggregated", "serving", "vllm", 0)
        assert [model["id"] for model in known["models"]] == ["sim"]
        assert known["tokenizer"]
        (endpoint,) = known["endpoints"]
        assert (endpoint["rank"], endpoint["block_size"], endpoint["signal"]["state"]) == (0, 16, "live")
        assert endpoint["load"]["active_requests"] == 0

        async def reason() -> bool:
            return "refused" in (await operator.engine(absent)).json["waiting_for"]

        await until(reason, what="why the absent engine has not joined")
        waiting = (await operator.engine(absent)).json
        assert (waiting["role"], waiting["state"]) == ("decode", "waiting")


async def test_an_engine_is_added_and_removed_while_requests_go_on() -> None:
    async with fleet(2) as (one, other), routing([one], admin_token=TOKEN, policy="round-robin") as router:
        operator = Operator(router)
        assert {(await router.chat("x")).engine for _ in range(4)} == {one.url}
        assert (await operator.ask("POST", "/admin/engines", {"url": other.url})).status == 201
        await operator.in_state(other.url, "serving")
        assert {(await router.chat("x")).engine for _ in range(4)} == {one.url, other.url}
        gone = await operator.engine(one.url, "", "DELETE")
        assert (gone.status, gone.json) == (200, {"id": one.url, "state": "removed"})
        assert list(await operator.engines()) == [other.url]
        assert {(await router.chat("x")).engine for _ in range(4)} == {other.url}
        seen = len(one.requests)
        rounds = len(other.requests)
        await until(lambda: len(other.requests) >= rounds + 6, what="the other engine has been looked at again and again")
        assert len(one.requests) == seen, "a removed engine is not asked any more"
        assert (await operator.engine(one.url)).status == 404


async def test_H18_an_engine_that_drains_ends_its_20_streams_well_and_gets_none() -> None:
    async with (
        SimulatedEngine(settings_of(speedup=1, decode_step_ms=30)) as draining,
        SimulatedEngine(settings_of()) as other,
        routing([draining], admin_token=TOKEN) as router,
    ):
        operator = Operator(router)
        streams = [await router.begin(f"stream {number}", stream=True, max_tokens=200) for number in range(20)]
        await until(lambda: draining.running == 20, what="20 streams run")
        await operator.ask("POST", "/admin/engines", {"url": other.url})
        await operator.in_state(other.url, "serving")
        drained = await operator.engine(draining.url, "/drain", "POST")
        assert (drained.status, drained.json["state"], drained.json["in_flight"]) == (200, "draining", 20)
        assert [(await router.chat(f"late {number}")).engine for number in range(20)] == [other.url] * 20
        assert draining.running == 20, "the streams still run: this was a drain, not a wait"
        bodies = await asyncio.gather(*(stream.read() for stream in streams))
        assert all(body.endswith(b"data: [DONE]\n\n") and body.count(b"data: ") >= 200 for body in bodies)
        assert (await operator.engine(draining.url)).json["in_flight"] == 0
        assert (draining.aborts, len([r for r in draining.requests if r.path == "/v1/chat/completions"])) == (0, 20)


async def test_an_engine_is_deleted_once_its_streams_have_ended_and_at_once_when_told() -> None:
    async with SimulatedEngine(settings_of(speedup=1, decode_step_ms=5)) as engine, routing([engine], admin_token=TOKEN) as router:
        operator = Operator(router)
        stream = await router.begin("x", stream=True, max_tokens=60)
        await until(lambda: engine.running == 1, what="the stream runs")
        leaving = await operator.engine(engine.url, "", "DELETE")
        assert (leaving.status, leaving.json["state"], leaving.json["leaving"]) == (202, "draining", True)
        assert (await router.chat("late")).status in (404, 503)
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        await operator.in_state(engine.url, "gone")
        assert (await operator.ask("POST", "/admin/engines", {"url": engine.url})).status == 201
        await operator.in_state(engine.url, "serving")
        stream = await router.begin("y", stream=True, max_tokens=60)
        await until(lambda: engine.running == 1, what="the stream runs")
        assert (await operator.engine(engine.url, "", "DELETE", "?now=1")).status == 200
        assert not await operator.engines()
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")


async def test_a_drained_engine_may_restart_and_takes_requests_when_it_is_told_to() -> None:
    async with fleet(2) as (one, other), routing([one, other], admin_token=TOKEN) as router:
        operator = Operator(router)
        await operator.ask("POST", f"/admin/engines/{one.url}/drain")  # written without encoding, as by hand
        await operator.in_state(one.url, "draining")
        await one.refuse()
        await one.restart()

        async def back() -> bool:
            return len((await operator.engine(one.url)).json.get("endpoints", ())) == 1 and await router.serving() == 1

        await until(back, what="it is back")
        assert {(await router.chat(f"{number}")).engine for number in range(8)} == {other.url}
        ready = (await router.get("/ready")).json
        assert ready["models"] == {"sim": 1}
        assert (await operator.engine(one.url, "/undrain", "POST")).json["draining"] is False
        await operator.in_state(one.url, "serving")
        assert {(await router.chat(f"again {number}")).engine for number in range(16)} == {one.url, other.url}


async def test_a_model_all_of_whose_engines_drain_is_not_ready_and_not_listed() -> None:
    async with fleet(1) as (engine,), routing([engine], admin_token=TOKEN) as router:
        await Operator(router).engine(engine.url, "/drain", "POST")
        assert (await router.get("/ready")).status == 503
        assert (await router.get("/v1/models")).json["data"] == []
        assert (await router.chat("x")).status == 503
        await Operator(router).engine(engine.url, "/undrain", "POST")
        assert (await router.get("/ready?model=sim")).status == 200
        assert [card["id"] for card in (await router.get("/v1/models")).json["data"]] == ["sim"]
        assert (await router.chat("x")).status == 200


async def test_H9_the_same_url_registered_again_with_another_model_and_role_leaves_nothing_of_the_old() -> None:
    async with contextlib.AsyncExitStack() as first, fleet(1, served_model_name="old,new") as (other,):
        engine = await first.enter_async_context(SimulatedEngine(settings_of(served_model_name="old")))
        port = urlsplit(engine.url).port or 0
        async with routing([engine, other], admin_token=TOKEN, policy="round-robin") as router:
            operator = Operator(router)
            assert (await router.chat(prompt("a"), model="old")).status == 200
            await first.aclose()
            async with SimulatedEngine(settings_of(port=port, served_model_name="new")) as replaced:
                assert replaced.url == engine.url
                again = await operator.ask("POST", "/admin/engines", {"url": replaced.url, "role": "decode"})
                assert (again.status, again.json["outcome"], again.json["role"]) == (200, "replaced", "decode")

                async def serves_new() -> bool:
                    known = (await operator.engine(replaced.url)).json
                    return known["state"] == "serving" and [model["id"] for model in known["models"]] == ["new"]

                await until(serves_new, what="the new registration serves")
                known = await operator.engines()
                assert sorted(known) == sorted([replaced.url, other.url])
                assert known[replaced.url]["endpoints"][0]["cached_blocks"]["device"] == 0
                assert await router.metric("router_model_engines", model="old") == 1
                assert await router.metric("router_model_engines", model="new") == 2
                assert {(await router.chat("x", model="old")).engine for _ in range(4)} == {other.url}
                share = [(await router.chat("x", model="new")).engine for _ in range(20)]
                assert share.count(replaced.url) == share.count(other.url) == 10, "weight 1"
                unchanged = await operator.ask("POST", "/admin/engines", {"url": replaced.url, "role": "decode"})
                assert (unchanged.status, unchanged.json["outcome"]) == (200, "unchanged")
                await operator.engine(replaced.url, "", "DELETE", "?now=1")
            await operator.engine(other.url, "", "DELETE", "?now=1")


async def test_methods_and_paths_that_are_none_are_named() -> None:
    async with fleet(1) as (engine,), routing([engine], admin_token=TOKEN) as router:
        operator = Operator(router)
        assert (await operator.ask("DELETE", "/admin/engines")).headers["allow"] == "GET, HEAD, POST"
        assert (await operator.engine(engine.url, "", "POST")).headers["allow"] == "GET, HEAD, DELETE"
        assert (await operator.engine(engine.url, "/drain", "GET")).status == 405
        assert (await operator.engine(engine.url, "", "DELETE", "?now=soon")).status == 400
        for path in (
            "/admin/engines/",
            "/admin/engines/nonsense",
            "/admin/engines/http%3A%2F%2F127.0.0.1%3A1",
            f"/admin/engines/{engine.url}/x",
        ):
            assert (await operator.ask("GET", path)).status == 404, path
        assert (await operator.ask("POST", "/admin/engines", b"x" * 70_000)).status == 413
        assert (await operator.engines())[engine.url]["state"] == "serving"
