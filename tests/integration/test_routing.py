"""The first complete path, on simulated engines: a prompt comes back to where it is cached, and everything else that follows."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from discovery.broker import Broker
from discovery.bus import BusUnreachable
from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer as Fault
from engines.types import EngineKind, EngineSpec
from tests.rig import Router, fleet, prompt, routing, settings_of
from tests.waiting import until


async def holds(router: Router, engine: str, text: str, *, model: str = "sim") -> None:
    """Wait until the router has heard that `engine` holds `text`."""

    async def heard() -> bool:
        candidates = (await router.route(text, model=model))["candidates"]
        return any(c["engine"] == engine and c["overlap"]["device"] > 0 and not c["overlap"]["predicted"] for c in candidates)

    await until(heard, what="the events of the prompt arrive")


async def send_directly(router: Router, engine: SimulatedEngine, text: str, *, model: str = "sim") -> None:
    """Let an engine compute a chat's prompt without the router choosing it."""
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    async with router.session.post(engine.url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200


async def test_a_repeated_prompt_goes_back_to_its_engine_and_is_a_hit_by_the_engines_own_count() -> None:
    async with fleet(3) as engines, routing(engines) as router:
        homes = {}
        for name in "abcdef":
            first = await router.chat(prompt(name))
            assert (first.status, first.reason, first.cached_tokens) == (200, "no_shared_prefix", 0)
            homes[name] = first.engine
            await holds(router, first.engine, prompt(name))
        for name, home in homes.items():
            again = await router.chat(prompt(name))
            assert (again.engine, again.reason, again.signal) == (home, "kv", "live")
            assert again.cached_tokens == again.overlap_tokens > 0


async def test_M1_the_index_holds_no_more_than_is_configured_and_counts_what_it_refused() -> None:
    async with fleet(2) as engines, routing(engines, index_max_blocks=20) as router:
        for name in "abcdefgh":
            answer = await router.chat(prompt(name))
            assert (answer.status, answer.signal) == (200, "live")
        await until(lambda: _is(router, "router_index_refused_total"), what="blocks beyond the bound")
        assert await router.metric("router_index_blocks") <= 20


async def _is(router: Router, name: str) -> bool:
    return await router.metric(name) > 0


@pytest.mark.parametrize("policy", ["kv", "round-robin", "random", "least-loaded", "power-of-two", "session"])
async def test_U2_each_policy_is_one_flag(policy: str) -> None:
    async with fleet(2) as engines, routing(engines, policy=policy) as router:
        answers = [await router.chat(prompt("a"), headers={"x-session-id": "s1"}) for _ in range(6)]
        assert {answer.status for answer in answers} == {200}
        assert {answer.headers["x-commutator-policy"] for answer in answers} == {policy}
        used = {answer.engine for answer in answers}
        if policy == "round-robin":
            assert [answer.engine for answer in answers[:2]] == [answer.engine for answer in answers[2:4]]
            assert len(used) == 2
        if policy == "session":
            assert len(used) == 1


async def test_a_policy_of_the_users_own_is_one_flag_too() -> None:
    async with fleet(2) as engines, routing(engines, policy="tests.integration.test_routing:LastByName") as router:
        answers = [await router.chat(prompt(str(number))) for number in range(4)]
        assert {answer.engine for answer in answers} == {max(engine.url for engine in engines)}
        broken = await router.chat(prompt("x"), model="sim", user="fail")
        assert broken.status == 500
        assert "LastByName" in broken.json["error"]["message"]
        asked = await router.post("/route", {"model": "sim", "messages": [{"role": "user", "content": "x"}], "user": "fail"})
        assert (asked.status, asked.json["error"]["code"]) == (500, "policy_error")
        assert (await router.chat(prompt("y"))).status == 200


class LastByName:
    """Always the engine whose URL sorts last."""

    def score(self, request, candidates, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  as a user would
        if request.session == "fail":
            raise RuntimeError("told to")
        order = sorted(candidate.endpoint.engine for candidate in candidates)
        return [-order.index(candidate.endpoint.engine) for candidate in candidates]


async def test_R1_a_configured_block_size_that_disagrees_is_a_visible_mismatch() -> None:
    async with fleet(1, block_size=48) as (engine,):
        async with routing([engine]) as router:
            await router.chat(prompt("a"))
            await holds(router, engine.url, prompt("a"))
            assert (await router.chat(prompt("a"))).overlap_tokens % 48 == 0
        async with routing([EngineSpec(url=engine.url, block_size=16)]) as router:
            first = await router.chat(prompt("b"))

            async def named() -> bool:
                return await router.metric("router_signal_state", state="mismatch") == 1

            await until(named, what="the mismatch is named")
            again = await router.chat(prompt("b"))
            assert (first.status, again.status, again.signal, again.reason) == (200, 200, "mismatch", "predicted")
            assert again.overlap_tokens == again.cached_tokens > 0


async def test_R1_a_block_size_that_a_hybrid_model_chose_is_learned() -> None:
    text = prompt("a", 1000)
    async with fleet(1, block_size=2096) as (engine,), routing([engine]) as router:
        await router.chat(text)
        await holds(router, engine.url, text)
        again = await router.chat(text)
        assert (again.reason, again.signal) == ("kv", "live")
        assert again.overlap_tokens == again.cached_tokens == 2096


async def test_R2_two_engines_of_one_model_with_different_block_sizes_both_get_their_prompts_back() -> None:
    async with fleet(1, block_size=16) as (small,), fleet(1, block_size=64) as (large,), routing([small, large]) as router:
        for number in range(8):
            home = (small, large)[number % 2]
            await send_directly(router, home, prompt(f"p{number}-"))
            await holds(router, home.url, prompt(f"p{number}-"))
        for number in range(8):
            again = await router.chat(prompt(f"p{number}-"))
            assert (again.engine, again.cached_tokens) == ((small, large)[number % 2].url, again.overlap_tokens)
            assert again.cached_tokens > 0


async def test_R2_two_models_with_different_block_sizes_both_get_their_prompts_back() -> None:
    async with (
        fleet(2, block_size=16, served_model_name="a") as small,
        fleet(2, block_size=64, served_model_name="b") as large,
        routing([*small, *large]) as router,
    ):
        homes = [(*small, *large)[number % 4] for number in range(8)]
        for number, home in enumerate(homes):
            await send_directly(router, home, prompt(f"p{number}-"), model=home.settings.served_model_name)
        for number, home in enumerate(homes):
            model = home.settings.served_model_name
            await holds(router, home.url, prompt(f"p{number}-"), model=model)
            again = await router.chat(prompt(f"p{number}-"), model=model)
            assert (again.engine, again.cached_tokens) == (home.url, again.overlap_tokens)
            assert again.cached_tokens > 0


@pytest.mark.parametrize("policy", ["kv", "least-loaded"])
async def test_R25_without_engines_load_the_routers_own_counts_decide(policy: str) -> None:
    """Prompts that share nothing, all in flight at once: at random, 8 and 8 would be a matter of luck."""
    async with fleet(2, speedup=1.0) as engines:
        for engine in engines:
            engine.faults.add(Fault(status=404), path="/metrics", times=None)
        async with routing(engines, policy=policy) as router:
            assert {candidate["load"]["running"] for candidate in (await router.route("x"))["candidates"]} == {None}
            streams = [await router.begin(prompt(f"p{number}-"), stream=True, max_tokens=200) for number in range(16)]
            shares = [await router.metric("router_active_requests", engine=engine.url) for engine in engines]
            for stream in streams:
                stream.close()
            assert shares == [8, 8]
            assert await router.metric("router_decisions_total", policy="random") == 0


async def test_R3_an_engine_that_publishes_no_events_is_named_blind_and_still_gets_its_share() -> None:
    async with fleet(1) as (live,), fleet(1, kv_events=False) as (blind,), routing([live, blind]) as router:
        assert await router.metric("router_signal_state", engine=blind.url, state="blind") == 1
        assert await router.metric("router_signal_state", engine=live.url, state="live") == 1
        answers = [await router.chat(prompt(f"p{number}-")) for number in range(30)]
        at_blind = [number for number, answer in enumerate(answers) if answer.engine == blind.url]
        assert 5 <= len(at_blind) <= 25
        assert {answers[number].reason for number in at_blind} == {"blind"}
        again = await router.chat(prompt(f"p{at_blind[-1]}-"))
        assert (again.engine, again.reason, again.signal) == (blind.url, "predicted", "blind")
        assert again.cached_tokens > 0


async def test_R4_when_the_event_feed_dies_the_decisions_reason_changes() -> None:
    async with fleet(1) as (engine,), routing([engine], blind_after_s=0.3) as router:
        await router.chat(prompt("a"))
        await holds(router, engine.url, prompt("a"))
        assert (await router.chat(prompt("a"))).reason == "kv"
        engine.faults.kv.muted = True
        await router.chat(prompt("b"))

        async def stale() -> bool:
            return await router.metric("router_signal_state", state="stale") == 1

        await until(stale, what="the silence is noticed")
        again = await router.chat(prompt("b"))
        assert (again.reason, again.signal) == ("predicted", "stale")
        assert again.overlap_tokens == again.cached_tokens > 0

        engine.faults.kv.muted = False
        await router.chat(prompt("c"))
        await holds(router, engine.url, prompt("c"))
        again = await router.chat(prompt("c"))
        assert (again.reason, again.signal) == ("kv", "live")


async def test_R7_an_engine_restarted_in_place_is_believed_empty() -> None:
    async with fleet(2) as engines, routing(engines) as router:
        home = (await router.chat(prompt("a"))).engine
        await holds(router, home, prompt("a"))
        restarted = next(engine for engine in engines if engine.url == home)
        await restarted.restart()

        async def forgotten() -> bool:
            return await router.metric("router_cached_blocks", engine=home) == 0 and await router.serving() == 2

        await until(forgotten, what="the old blocks are forgotten")
        assert await router.overlap_at(home, prompt("a")) == 0
        again = await router.chat(prompt("a"))
        assert (again.status, again.overlap_tokens, again.cached_tokens) == (200, 0, 0)
        await holds(router, again.engine, prompt("a"))
        assert (await router.chat(prompt("a"))).cached_tokens > 0


async def test_R16_engines_with_different_root_hashes_both_match() -> None:
    async with fleet(2) as engines, routing(engines) as router:
        assert len({engine.settings.hash_seed for engine in engines}) == 2
        for engine in engines:
            await send_directly(router, engine, prompt("a"))
            await holds(router, engine.url, prompt("a"))
        overlaps = {await router.overlap_at(engine.url, prompt("a")) for engine in engines}
        assert len(overlaps) == 1


async def test_R36_equal_prompts_that_arrive_while_the_first_is_prefilling_do_not_scatter() -> None:
    async with fleet(4, speedup=1, prefill_tokens_per_s=2000) as engines, routing(engines) as router:
        answers = await asyncio.gather(*(router.chat(prompt("a")) for _ in range(8)))
        assert len({answer.engine for answer in answers}) == 1
        assert {answer.reason for answer in answers} == {"no_shared_prefix", "in_flight"}


async def test_R18_a_conversation_is_found_in_whichever_form_it_comes_back_or_says_why_not() -> None:
    text = prompt("a")
    message = {"role": "user", "content": text}
    forms: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"messages": [message]},
        "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}], "max_tokens": 1},
        "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}]},
    }
    for kind in EngineKind:
        async with fleet(1, kind=kind) as (engine,), routing([engine]) as router:
            await router.chat(text)
            await holds(router, engine.url, text)
            for path, body in forms.items():
                told = (await router.post(f"/route?path={path}", {"model": "sim"} | body)).json
                if kind is EngineKind.VLLM or path == "/v1/chat/completions":
                    assert (told["reason"], told["overlap_tokens"] > 0) == ("kv", True), (path, told)
                else:
                    assert (told["reason"], told["untokenizable"]) == ("untokenizable", f"what SGLang makes of {path} is not known here")
            strange = {"model": "sim", "input": 7, "messages": [[message]], "system": {"a": 1}}
            for path in forms:
                assert (await router.post(f"/route?path={path}", strange)).json["reason"] == "untokenizable"


@pytest.mark.parametrize("tail_words", [20])
async def test_R20_one_prefix_with_distinct_tails_is_reused_and_still_spread(tail_words: int) -> None:
    """Reuse is what the engines count; pinned to one of them, all but the first prompt would find the prefix."""
    common = prompt("common", 330)
    async with (
        fleet(8, speedup=1, prefill_tokens_per_s=20_000, decode_step_ms=20, kv_blocks=8192, max_num_seqs=200) as engines,
        routing(engines) as router,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session,
    ):
        many = Router(router.url, session)
        prefix = (await router.route(common))["prompt_tokens"]
        assert 900 < prefix < 1100
        texts = [f"{common} {prompt(f'tail{number}-', tail_words)}" for number in range(200)]
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(many.chat(text, max_tokens=300)) for text in texts]

            async def in_flight() -> bool:
                return await router.metric("router_active_requests") == 200

            await until(in_flight, what="all 200 are in flight")
            shares = [await router.metric("router_active_requests", engine=engine.url) for engine in engines]
        assert {answer.result().status for answer in answers} == {200}
    assert max(shares) <= 1.5 * sum(shares) / 8, shares
    assert sum(engine.counters.hits for engine in engines) >= 0.8 * 199 * (prefix - 16)


async def test_prompts_that_share_nothing_divide_evenly_over_idle_engines() -> None:
    async with fleet(2) as engines, routing(engines) as router:
        homes = [(await router.chat(prompt(f"p{number}-"))).engine for number in range(12)]
        assert [homes.count(engine.url) for engine in engines] == [6, 6]


async def test_C3_models_are_listed_once_and_requests_go_only_where_the_model_is() -> None:
    async with (
        fleet(1, served_model_name="a,b") as (ab,),
        fleet(1, served_model_name="b,c") as (bc,),
        routing([ab, bc]) as router,
    ):
        listed = (await router.get("/v1/models")).json["data"]
        assert sorted(card["id"] for card in listed) == ["a", "b", "c"]
        assert all(card["max_model_len"] and card["root"] for card in listed)
        for _ in range(4):
            assert (await router.chat("x", model="a")).engine == ab.url
            assert (await router.chat("x", model="c")).engine == bc.url
        unknown = await router.chat("x", model="d")
        assert unknown.status == 404
        assert "`d`" in unknown.json["error"]["message"]
        one = await router.get("/v1/models/b")
        assert one.json["id"] == "b"
        assert (await router.get("/v1/models/d")).status == 404


@pytest.mark.parametrize("form", ["text", "ids", "texts", "id lists"])
async def test_C5_every_form_of_prompt_passes_unchanged_and_gets_overlap(form: str) -> None:
    ids = list(range(10, 210))
    prompts: dict[str, object] = {"text": prompt("a"), "ids": ids, "texts": [prompt("a"), prompt("b")], "id lists": [ids, ids[50:]]}
    async with fleet(2) as engines, routing(engines) as router:
        body = msgspec.json.encode({"model": "sim", "max_tokens": 1, "prompt": prompts[form]})
        first = await router.post("/v1/completions", body)
        assert first.status == 200
        home = next(engine for engine in engines if engine.url == first.engine)
        assert [request.body for request in home.requests if request.path == "/v1/completions"] == [body]

        async def warm() -> bool:
            return bool((await router.post("/route?path=/v1/completions", body)).json["overlap_tokens"])

        await until(warm, what="the events of the prompt arrive")
        again = await router.post("/v1/completions", body)
        assert (again.engine, again.reason) == (home.url, "kv")


async def test_bad_input_is_answered_in_the_openai_shape_and_no_engine_sees_it() -> None:
    async with fleet(1) as (engine,), routing([engine], max_body_bytes=10_000) as router:
        seen = len(engine.requests)
        cases = [
            (await router.chat("x", model="nope"), 404, "nope"),
            (await router.post("/v1/chat/completions", b"{not json"), 400, "JSON"),
            (await router.post("/v1/chat/completions", b'{"model": 7}'), 400, "model"),
            (await router.post("/v1/chat/completions", b'{"model": "sim", "messages": ' + b"[" * 9000), 400, "nested too deeply"),
            (await router.chat("x" * 20_000), 413, "10000"),
            (await router.post("/v1/chat/completions", {"model": "sim", "messages": [{"role": "wizard", "content": "x"}]}), 400, "wizard"),
            (await router.get("/v1/chat/completions"), 405, "POST"),
            (await router.post("/pause", {}), 404, "/pause"),
            (await router.post("//v1/../invocations", {}), 404, ""),
        ]
        for answer, status, words in cases:
            assert answer.status == status, answer
            error = answer.json["error"]
            assert words in error["message"]
            assert set(error) == {"message", "type", "param", "code"}
        paths = [request.path for request in list(engine.requests)[seen:]]
        assert not [path for path in paths if path not in ("/health", "/metrics", "/v1/models", "/version")]
        assert (await router.chat("x")).status == 200


@pytest.mark.parametrize("ids", [True, False])
async def test_a_prompt_far_longer_than_the_model_takes_costs_nothing_here(ids: bool) -> None:
    async with fleet(1, kv_blocks=64) as (engine,), routing([engine]) as router:
        assert (await router.get("/v1/models")).json["data"][0]["max_model_len"] == 64 * 16
        long = [7] * 40_000 if ids else "word " * 20_000
        told = (await router.post("/route", {"model": "sim", "prompt": long})).json
        assert (told["reason"], told["untokenizable"]) == ("untokenizable", "the prompt is longer than the model takes")
        assert (await router.complete(long)).status == 400, "the engine's own answer"


async def test_streams_pass_byte_for_byte() -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        body = msgspec.json.encode(
            {"model": "sim", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "héllo 你好 🎉"}], "seed": 1}
        )
        direct = await (await router.session.post(engine.url + "/v1/chat/completions", data=body)).read()
        routed = await router.post("/v1/chat/completions", body)
        assert routed.headers["content-type"].startswith("text/event-stream")
        assert routed.body.endswith(b"data: [DONE]\n\n")
        assert routed.body.count(b"\n\n") == direct.count(b"\n\n")


async def test_handshake_fields_of_clients_never_reach_an_engine() -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        sent: dict[str, object] = {
            "kv_transfer_params": {"do_remote_prefill": True},
            "bootstrap_room": 7,
            "routed_dp_rank": 3,
            "unknown": {"big": 2**70},
        }
        body = {"model": "sim", "messages": [{"role": "user", "content": "x"}]} | sent
        answer = await router.post("/v1/chat/completions", body, {"X-data-parallel-rank": "5"})
        assert answer.status == 200
        request = next(request for request in reversed(engine.requests) if request.path == "/v1/chat/completions")
        assert b"do_remote_prefill" not in request.body
        assert b"bootstrap_room" not in request.body
        assert b"routed_dp_rank" not in request.body
        assert str(2**70).encode() in request.body
        assert b"x-data-parallel-rank" not in {name.lower() for name, _ in request.headers}


async def test_an_engine_that_is_not_up_yet_joins_when_it_is() -> None:
    async with fleet(1) as (late,):
        await late.refuse()
        async with routing([late], wait_for=0) as router:
            ready = await router.get("/ready")
            assert (ready.status, ready.json["ready"]) == (503, False)
            assert (await router.chat("x")).status == 503
            await late.accept()

            async def serves() -> bool:
                return (await router.get("/ready")).status == 200

            await until(serves, what="the engine joins")
            assert (await router.get("/ready?model=sim")).status == 200
            assert (await router.get("/ready?model=other")).status == 503
            assert (await router.chat("x")).status == 200


async def test_a_mixed_fleet_of_both_kinds_shares_the_index() -> None:
    async with fleet(1) as (vllm,), fleet(1, kind=EngineKind.SGLANG) as (sglang,), routing([vllm, sglang]) as router:
        homes: dict[str, str] = {}
        for name in "abcdefgh":
            answer = await router.chat(prompt(name))
            homes[name] = answer.engine
            await holds(router, answer.engine, prompt(name))
        assert set(homes.values()) == {vllm.url, sglang.url}
        for name, home in homes.items():
            assert (await router.chat(prompt(name))).engine == home


async def test_a_nats_server_of_the_users_own_is_used_and_left_running() -> None:
    broker = Broker()
    url = await broker.start()
    try:
        for _ in range(2):
            async with fleet(1) as engines, routing(engines, nats=url) as router:
                await router.chat(prompt("a"))
                await holds(router, engines[0].url, prompt("a"))
                assert (await router.chat(prompt("a"))).reason == "kv"
        assert broker.pid is not None
    finally:
        await broker.stop()


async def test_a_nats_server_that_cannot_be_reached_is_named() -> None:
    async with fleet(1) as engines:
        with pytest.raises(BusUnreachable, match=r"127\.0\.0\.1:9"):
            async with routing(engines, nats="nats://user:hidden@127.0.0.1:9"):
                pass


async def test_a_request_in_flight_finishes_when_the_router_is_stopped() -> None:
    async with SimulatedEngine(settings_of(speedup=1, decode_step_ms=20)) as engine, aiohttp.ClientSession() as session:
        async with routing([engine], grace_period_s=10.0) as router:
            response = await Router(router.url, session).begin("x", stream=True, max_tokens=30)
            await until(lambda: engine.running == 1, what="the request is running")
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
