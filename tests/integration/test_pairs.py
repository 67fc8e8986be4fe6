"""Two engines serve one request: what each is asked, and what the client sees when either fails. P rows, by engines whose every byte is the test's.

The engines here only play their parts; that KV caches really arrive is shown on real ones (tests/e2e/test_pairs_real.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from engines.types import EngineKind, EngineSpec, Role
from router.disagg import Mode
from router.legs import PrefillLeg
from router.pairing import Pairing
from tests.integration.test_failover import FirstByAge
from tests.raw import Request, port_of, request, talking
from tests.raw_engine import DONE, NIXL_OFFER, SSE, Close, Hang, RawEngine, Script, answering, chunk, never, streaming, token, whole
from tests.rig import Answer, Router
from tests.rig import routing as any_routing
from tests.waiting import until

IDS = list(range(400, 500))
DECODED = streaming([token(1), token(2), DONE])


def prefilled(**changed: object) -> Script:
    """vLLM's answer to a prefill, with NIXL's handshake."""
    return answering(whole(msgspec.json.encode({"id": "x", "choices": [{"text": "t"}], "kv_transfer_params": NIXL_OFFER | changed})))


PREFILLED = prefilled()


class Pair(NamedTuple):
    prefill: RawEngine
    decode: RawEngine
    router: Router


def pages_of_sglang(engine: RawEngine, role: str) -> None:
    about = {
        "version": "0.5.23", "status": "ready", "model_path": "nowhere", "tokenizer_path": "nowhere", "page_size": 16,
        "disaggregation_mode": role, "disaggregation_bootstrap_port": 8998,
    }  # fmt: skip
    engine.pages[b"/server_info"] = engine.pages[b"/model_info"] = whole(msgspec.json.encode(about))


@contextlib.asynccontextmanager
async def pair(
    prefill: Script = PREFILLED,
    decode: Script = DECODED,
    *,
    kind: EngineKind = EngineKind.VLLM,
    **changed: Any,  # noqa: ANN401  settings
) -> AsyncIterator[Pair]:
    async with RawEngine(prefill, kind=kind) as there, RawEngine(decode, kind=kind) as here:
        if kind is EngineKind.SGLANG:
            pages_of_sglang(there, "prefill")
            pages_of_sglang(here, "decode")
        async with routing(specs(there, here), **changed) as router:
            yield Pair(there, here, router)


def routing(engines: Sequence[str | EngineSpec], **changed: Any) -> contextlib.AbstractAsyncContextManager[Router]:  # noqa: ANN401  settings
    """A router that shares all that can be, unless said otherwise: what is measured here would be the test's own."""
    return any_routing(engines, **{"disagg": Mode.ALWAYS, **changed})


def specs(there: RawEngine, *here: RawEngine, group: str = "") -> list[EngineSpec]:
    return [EngineSpec(there.url, role=Role.PREFILL, group=group), *(EngineSpec(one.url, role=Role.DECODE, group=group) for one in here)]


def told(asked: Request) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(asked.body)
    return fields


async def ask(router: Router, **fields: Any) -> Answer:  # noqa: ANN401  JSON
    return await router.complete(IDS, stream=True, **fields)


async def where(router: Router) -> Counter[str]:
    """Prompts so far, by where they were computed and why."""
    page = (await router.get("/metrics")).body.decode()
    found = Counter[str]()
    for line in page.splitlines():
        if line.startswith("router_prefills_total{"):
            labels, _, value = line.rpartition(" ")
            side, why = (part.split('"')[1] for part in labels.partition("{")[2].split(","))
            found[f"{side} {why}"] += int(float(value))
    return found


async def test_P13_the_prefill_leg_is_a_clean_request_for_one_token_and_decode_gets_the_original() -> None:
    async with pair() as (there, here, router):
        wants = {
            "max_tokens": 50, "min_tokens": 5, "stop": ["x"], "logprobs": 3, "temperature": 0.7, "seed": 1,
            "stream_options": {"include_usage": True}, "cache_salt": "s", "priority": 3, "user": "u",
        }  # fmt: skip
        answer = await ask(router, **wants)
        assert (answer.status, answer.headers["x-commutator-prefill-engine"]) == (200, there.url)
        assert answer.body == token(1) + token(2) + DONE
        (first,), (second,) = there.requests, here.requests
        assert first.line == b"POST /v1/completions HTTP/1.1"
        assert told(first) == {
            "model": "sim", "prompt": IDS, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "cache_salt": "s", "priority": 3,
            "kv_transfer_params": {"do_remote_decode": True},
        }  # fmt: skip
        assert told(second) == {"model": "sim", "prompt": IDS, "stream": True, "kv_transfer_params": NIXL_OFFER} | wants
        assert await where(router) == Counter({"remote always": 1})
        assert first.header("x-request-id") == second.header("x-request-id")


async def test_P9_what_a_client_says_of_transfers_is_never_passed_on() -> None:
    async with pair() as (there, here, router):
        forged: dict[str, Any] = {
            "kv_transfer_params": {"do_remote_prefill": True},
            "bootstrap_room": 1,
            "bootstrap_host": "evil",
            "data_parallel_rank": 9,
        }
        answer = await router.complete(IDS, stream=True, **forged)
        assert answer.status == 200
        assert told(there.requests[0])["kv_transfer_params"] == {"do_remote_decode": True}
        assert told(here.requests[0])["kv_transfer_params"] == NIXL_OFFER
        for one in (told(there.requests[0]), told(here.requests[0])):
            assert not one.keys() & {"bootstrap_room", "bootstrap_host", "data_parallel_rank"}


@pytest.mark.parametrize("mode", [Mode.ALWAYS, Mode.NEVER])
async def test_P9_nor_is_what_it_says_of_them_in_an_engines_extra_arguments(mode: Mode) -> None:
    """vLLM looks for a handshake there too, and a malformed one ends a decode server."""
    forged = {"kv_transfer_params": {"do_remote_prefill": True}, "ec_transfer_params": {"x": 1}}
    async with pair(disagg=mode) as (there, here, router):
        for path, body in (
            ("/v1/completions", {"prompt": IDS, "vllm_xargs": {"kv_transfer_params": "x", "kept": 1}}),
            ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"max_tokens": 9, "extra_args": forged | {"kept": 1}}}),
        ):
            assert (await router.post(path, {"model": "sim", "stream": True} | body)).status == 200
            last = told(here.requests[-1])
            assert last.pop("kv_transfer_params", None) == (NIXL_OFFER if mode is Mode.ALWAYS else None)
            assert {"kept": 1} in (last.get("vllm_xargs"), last.get("sampling_params", {}).get("extra_args"))
            assert not any(b"kv_transfer" in msgspec.json.encode(part) for part in last.values())
        assert all(
            b"_transfer_params" not in one.body.replace(b'"kv_transfer_params":{"do_remote_decode":true}', b"") for one in there.requests
        )


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_P1_a_prefill_error_is_the_clients_answer_and_decode_waits_for_nothing(kind: EngineKind) -> None:
    error = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
    async with pair(answering(whole(error, status=b"400 Bad Request")), never, kind=kind) as (there, here, router):
        answer = await ask(router)
        assert (answer.status, answer.body) == (400, error)
        assert len(there.requests) == 1
        await until(lambda: here.answering == 0, what="the decode leg is closed")
        assert here.left == len(here.requests) == (0 if kind is EngineKind.VLLM else 1)
        assert await where(router) == Counter({"remote always": 1})


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_P1_an_answer_of_prefill_that_is_no_error_either_is_never_the_clients(kind: EngineKind) -> None:
    elsewhere = whole(b"", status=b"307 Temporary Redirect", headers=b"location: http://inside/v1/completions\r\n")
    async with pair(answering(elsewhere), DECODED if kind is EngineKind.VLLM else never, kind=kind) as (_, here, router):
        answer = await router.complete(IDS, stream=True)
        assert answer.status == (200 if kind is EngineKind.VLLM else 502)
        assert await router.metric("router_kv_transfers_total", outcome="failed") == 1
        await until(lambda: here.answering == 0, what="the decode leg is closed")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "given_up", [b"", b'{"choices":[{"text":"","finish_reason":"abort"}]}', b'{"error":{"message":"stopping"}}'], ids=str
)
async def test_P1_decode_waits_for_no_prompt_that_prefill_has_given_up(given_up: bytes, stream: bool) -> None:
    """An engine that is being stopped answers 200; decode, which has been asked already, would wait for as long as its own limit."""
    async with pair(answering(whole(given_up)), never, kind=EngineKind.SGLANG) as (_, here, router):
        answer = await router.complete(IDS, stream=stream)
        assert (answer.status, answer.json["error"]["code"]) == (502, "kv_transfer_failed")
        await until(lambda: here.answering == 0, what="the decode leg is closed")
        assert here.left == 1


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_P11_a_prompt_longer_than_the_model_takes_never_reaches_decode(kind: EngineKind) -> None:
    error = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
    models = whole(msgspec.json.encode({"data": [{"id": "sim", "owned_by": kind.value, "max_model_len": len(IDS) - 1}]}))
    async with RawEngine(answering(whole(error, status=b"400 Bad Request")), kind=kind) as there, RawEngine(DECODED, kind=kind) as here:
        for engine, role in ((there, "prefill"), (here, "decode")):
            engine.pages[b"/v1/models"] = models
            if kind is EngineKind.SGLANG:
                pages_of_sglang(engine, role)
        async with routing(specs(there, here)) as router:
            answer = await ask(router)
            assert (answer.status, answer.body) == (400, error)
            assert not here.requests


async def test_rooms_are_told_to_both_engines_at_once() -> None:
    met = asyncio.Event()

    async def there(_: Request, writer: asyncio.StreamWriter) -> None:
        await met.wait()
        writer.write(whole(b'{"choices":[{"text":"t"}]}'))

    async def here(asked: Request, writer: asyncio.StreamWriter) -> None:
        met.set()
        await DECODED(asked, writer)

    async with pair(there, here, kind=EngineKind.SGLANG) as (prefill, decode, router):
        rooms = set()
        for _ in range(3):
            assert (await ask(router)).status == 200
            first, second = told(prefill.requests[-1]), told(decode.requests[-1])
            assert first["prompt"] == second["prompt"] == IDS
            for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
                assert first[name] == second[name]
            assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", 8998)
            rooms.add(first["bootstrap_room"])
        assert len(rooms) == 3


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_P2_a_decode_engine_that_refuses_the_connection_is_replaced(kind: EngineKind) -> None:
    async with RawEngine(PREFILLED, kind=kind) as there, RawEngine(DECODED, kind=kind) as gone, RawEngine(DECODED, kind=kind) as here:
        if kind is EngineKind.SGLANG:
            pages_of_sglang(there, "prefill")
            pages_of_sglang(gone, "decode")
            pages_of_sglang(here, "decode")
        settings: dict[str, Any] = {"policy": "tests.integration.test_failover:FirstByAge", "probe_period_s": 600.0}
        async with routing(specs(there, gone, here), **settings) as router:
            FirstByAge.order = [there.url, gone.url, here.url]
            gone.stop_listening()
            for _ in range(4):
                assert (await ask(router)).status == 200
            assert len(here.requests) == 4
            assert await router.metric("router_retries_total") >= 1, "the one that is gone was chosen"
            assert there.answering == 0


async def test_P7_without_a_prefill_engine_decode_computes_the_prompt_itself() -> None:
    async with RawEngine(DECODED) as here, routing([EngineSpec(here.url, role=Role.DECODE)]) as router:
        assert (await ask(router)).status == 200
        assert "kv_transfer_params" not in told(here.requests[0])
        assert await where(router) == Counter({"local no_prefill_engine": 1})


async def test_P7_or_the_request_is_refused_where_that_is_wanted() -> None:
    async with RawEngine(DECODED) as here, routing([EngineSpec(here.url, role=Role.DECODE)], without_prefill="enforce") as router:
        answer = await ask(router)
        assert answer.status == 503
        assert "add one, --engine 'http://HOST:PORT,role=prefill'" in answer.json["error"]["message"]
        assert not here.requests


async def test_P3_nothing_reaches_a_decode_engine_of_sglang_that_no_prefill_engine_can_serve() -> None:
    async with RawEngine(DECODED, kind=EngineKind.SGLANG) as here:
        pages_of_sglang(here, "decode")
        async with routing([here.url]) as router:
            answer = await ask(router)
            assert answer.status == 503
            assert not here.requests


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/completions", {"prompt": IDS}, "remote always"),
        ("/v1/completions", {"prompt": IDS, "n": 2}, "local several_sequences"),
        ("/v1/completions", {"prompt": IDS, "best_of": 2}, "local several_sequences"),
        ("/v1/completions", {"prompt": IDS, "n": "2"}, "local several_sequences"),
        ("/v1/completions", {"prompt": IDS, "n": 2.0}, "local several_sequences"),
        ("/v1/completions", {"prompt": IDS, "n": 1, "best_of": None}, "remote always"),
        ("/v1/completions", {"prompt": IDS, "use_beam_search": True}, "local several_sequences"),
        ("/v1/completions", {"prompt": [IDS, IDS]}, "local several_sequences"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "local untokenized"),
        ("/v1/completions", {"prompt": IDS, "prompt_embeds": "AA=="}, "local several_sequences"),
        ("/v1/completions", {"prompt": IDS, "echo": True}, "local prompt_in_answer"),
        ("/v1/completions", {"prompt": IDS, "prompt_logprobs": 0}, "local prompt_in_answer"),
        ("/v1/completions", {"prompt": "text, and nobody has a tokenizer"}, "local untokenized"),
        ("/inference/v1/generate", {"token_ids": IDS}, "remote always"),
        ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"n": 2}}, "local several_sequences"),
        ("/v1/completions/render", {"prompt": IDS}, "local route"),
        ("/v1/responses", {"input": "hello"}, "local route"),
        ("/v1/messages", {"messages": []}, "local route"),
        ("/v1/embeddings", {"input": "hello"}, "local route"),
        ("/tokenize", {"prompt": "hello"}, "local route"),
    ],
    ids=str,
)
async def test_P8_every_route_is_two_legs_or_a_counted_reason_why_not(path: str, body: dict[str, object], why: str) -> None:
    async with pair() as (there, here, router):
        assert (await router.post(path, {"model": "sim", "max_tokens": 2} | body)).status == 200
        assert await where(router) == Counter({why: 1})
        first, second = (
            [one for one in engine.requests if path == "/tokenize" or b"/tokenize" not in one.line] for engine in (there, here)
        )
        assert (len(first), len(second)) == (int(why.startswith("remote")), 1)
        assert ("kv_transfer_params" in told(second[0])) == why.startswith("remote")


@pytest.mark.parametrize(
    "more",
    [
        {"sampling_params": {"n": 2}},
        {"sampling_params": [{"n": "2"}]},
        {"sampling_params": {"beam_width": 4}},
        {"input_ids": [IDS, IDS]},
        {"input_ids": None, "input_embeds": [[[0.1]], [[0.2]]]},
        {"return_logprob": True, "logprob_start_len": 0},
    ],
    ids=str,
)
async def test_P8_what_hangs_a_decode_engine_of_sglang_or_would_lack_half_its_answer_is_refused(more: dict[str, object]) -> None:
    async with pair(kind=EngineKind.SGLANG) as (there, here, router):
        assert (await router.post("/generate", {"model": "sim", "input_ids": IDS} | more)).status == 501
        assert (there.requests, here.requests) == ([], [])
        fine = {"sampling_params": [{"n": 1}], "return_logprob": True, "logprob_start_len": -1}
        assert (await router.post("/generate", {"model": "sim", "input_ids": IDS} | fine)).status == 200
        assert await where(router) == Counter({"remote always": 1})


async def test_P8_several_prompts_are_seen_however_the_body_is_laid_out() -> None:
    """Of a list taken for one prompt, all but the first would be lost."""
    async with pair() as (there, here, router):
        body = b'{"model": "sim", "prompt": [%b[400, 401], [402]]}' % (b"\n" + b" " * 80)
        assert (await router.post("/v1/completions", body)).status == 200
        assert await where(router) == Counter({"local several_sequences": 1})
        assert (there.requests, told(here.requests[0])["prompt"]) == ([], [[400, 401], [402]])


async def test_P8_a_form_where_json_belongs_is_the_clients_mistake() -> None:
    async with pair(kind=EngineKind.SGLANG) as (there, here, router):
        form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--x--\r\n'
        answer = await router.post("/v1/chat/completions", form, {"content-type": "multipart/form-data; boundary=x"})
        assert (answer.status, there.requests, here.requests) == (400, [], [])


async def test_P8_a_body_that_is_not_json_goes_to_the_decode_engine() -> None:
    async with pair() as (_, here, router):
        form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--x--\r\n'
        headers = {"content-type": "multipart/form-data; boundary=x"}
        assert (await router.post("/v1/audio/transcriptions", form, headers)).status == 200
        assert [request.body for request in here.requests] == [form]
        assert await where(router) == Counter({"local route": 1})


async def test_P12_engines_of_different_groups_are_never_paired() -> None:
    async with contextlib.AsyncExitStack() as stack:
        groups = {}
        for name in ("a", "b"):
            script = prefilled(remote_engine_id=name)
            groups[name] = [await stack.enter_async_context(RawEngine(one)) for one in (script, script, DECODED, DECODED)]
        engines = [
            EngineSpec(engine.url, role=Role.PREFILL if number < 2 else Role.DECODE, group=name)
            for name, group in groups.items()
            for number, engine in enumerate(group)
        ]
        router = await stack.enter_async_context(routing(engines))
        answers = await asyncio.gather(*(router.complete([number, *IDS], stream=True) for number in range(500)))
        assert {answer.status for answer in answers} == {200}
        for name, (*there, one, other) in groups.items():
            assert all(engine.requests for engine in there)
            handed = [told(request)["kv_transfer_params"]["remote_engine_id"] for engine in (one, other) for request in engine.requests]
            assert set(handed) == {name}
        assert await where(router) == Counter({"remote always": 500})


@pytest.mark.parametrize(
    "failure",
    [
        answering(SSE + chunk(b'data: {"error":{"message":"KV load failed","code":500}}\n\n') + chunk(DONE) + chunk(b"")),
        answering(whole(b'{"error":{"message":"KV load failed"}}', status=b"500 Internal Server Error")),
        streaming([b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'], end=b""),
    ],
    ids=["error in the stream", "500", "stream that ends before a token"],
)
async def test_a_failed_transfer_is_seen_before_the_client_has_a_byte_and_the_request_is_saved(failure: Script) -> None:
    async def here(asked: Request, writer: asyncio.StreamWriter) -> None:
        if "kv_transfer_params" in told(asked):
            await failure(asked, writer)
            raise Close
        await DECODED(asked, writer)

    async with pair(PREFILLED, here) as (_, decode, router):
        answer = await ask(router)
        assert (answer.status, answer.body) == (200, token(1) + token(2) + DONE)
        assert len(decode.requests) == 2
        assert await router.metric("router_kv_transfers_total", outcome="failed") == 1
        assert await where(router) == Counter({"local no_prefill_engine": 1})

        again = await ask(router)
        assert again.status == 200
        assert len(decode.requests) == 3, "the pair is left alone for a while"


async def test_the_only_pair_there_is_is_tried_again_at_once() -> None:
    failing = answering(whole(b'{"error":{"message":"Decode handshake failed"}}', status=b"500 Internal Server Error"))

    async def here(asked: Request, writer: asyncio.StreamWriter) -> None:
        await (failing if len(decode.requests) == 1 else DECODED)(asked, writer)

    async with pair(answering(whole(b"{}")), here, kind=EngineKind.SGLANG) as (_, decode, router):
        first = await ask(router)
        assert (first.status, first.json["error"]["code"]) == (502, "kv_transfer_failed")
        assert (await ask(router)).status == 200


async def test_a_transfer_that_never_comes_ends_in_time() -> None:
    async def here(asked: Request, writer: asyncio.StreamWriter) -> None:
        if "kv_transfer_params" in told(asked):
            writer.write(SSE)
            raise Hang
        await DECODED(asked, writer)

    async with pair(PREFILLED, here, kv_transfer_timeout_s=0.2) as (_, decode, router):
        assert (await ask(router)).body == token(1) + token(2) + DONE
        assert decode.left == 1


@pytest.mark.parametrize("kind", EngineKind)
async def test_an_answer_that_comes_whole_may_take_longer_than_a_first_token(kind: EngineKind) -> None:
    """Nothing of it comes before it is generated, so nothing can be expected by then."""
    generated = asyncio.Event()

    async def here(_: Request, writer: asyncio.StreamWriter) -> None:
        await generated.wait()
        writer.write(whole(b'{"id":"x","choices":[]}'))

    async with pair(PREFILLED, here, kind=kind, kv_transfer_timeout_s=0.05) as (_, decode, router), asyncio.TaskGroup() as group:
        answer = group.create_task(router.complete(IDS))
        await until(lambda: decode.answering, what="decode has been asked")
        started = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > started + 0.3, what="a token of a stream would be overdue")
        generated.set()
        assert (await answer).status == 200
        assert len(decode.requests) == 1
        assert await router.metric("router_kv_transfers_total", outcome="failed") == 0


async def test_only_streams_tell_how_long_a_prompt_took(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(Pairing, "computed", lambda _, decode, *__, **___: seen.append(decode.engine))

    async def here(asked: Request, writer: asyncio.StreamWriter) -> None:
        await (DECODED if told(asked).get("stream") else PREFILLED)(asked, writer)

    async with pair(decode=here, disagg=Mode.NEVER) as (_, decode, router):
        assert (await router.complete(IDS)).status == 200
        assert seen == []
        assert (await ask(router)).status == 200
        assert seen == [decode.url]


@pytest.mark.parametrize("kind", EngineKind)
async def test_M2_a_request_that_two_engines_served_is_freed_at_once(kind: EngineKind) -> None:
    def left() -> set[str]:
        return {type(thing).__name__ for thing in gc.get_objects()} & {"_Legs", "Proof", "PrefillLeg", "Asked", "Trip", "Exchange", "Place"}

    async with pair(kind=kind) as (_, _, router):
        gc.collect()
        gc.disable()
        try:
            assert (await ask(router)).status == 200
            await until(lambda: not left(), what="nothing is left of it", deadline_s=5)
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", EngineKind)
async def test_a_kept_connection_that_decode_has_just_closed_costs_nothing(kind: EngineKind) -> None:
    used: set[asyncio.StreamWriter] = set()

    async def here(asked: Request, writer: asyncio.StreamWriter) -> None:
        if writer in used:
            raise Close
        used.add(writer)
        await DECODED(asked, writer)

    async with pair(PREFILLED, here, kind=kind) as (_, decode, router):
        assert [(await ask(router)).status for _ in range(4)] == [200] * 4
        assert len(decode.requests) > 4, "a connection was kept"
        assert await router.serving() == 2


@pytest.mark.parametrize(
    "offer",
    [
        {"kv_transfer_params": None},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": NIXL_OFFER | {"remote_block_ids": []}},
    ],
    ids=["none", "malformed", "nothing to pull"],
)
async def test_a_handshake_that_could_end_the_decode_server_never_reaches_it(
    offer: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(answering(whole(msgspec.json.encode({"choices": []} | offer)))) as (there, here, router):
        assert (await ask(router)).status == 200
        assert len(there.requests) == 1
        assert ["kv_transfer_params" in told(request) for request in here.requests] == [False]
        said = [getattr(record, "fields", {}) for record in caplog.records if record.getMessage() == "KV transfer failed"]
        assert [(one["prefill"], "kv_transfer_params" in one["reason"]) for one in said] == [(f"{there.url}#0", True)]


async def test_a_handshake_as_long_as_a_long_prompt_makes_it_is_passed_on_whole() -> None:
    blocks = [list(range(100_000, 400_000))]
    async with pair(prefilled(remote_block_ids=blocks)) as (_, here, router):
        assert (await ask(router)).status == 200
        assert told(here.requests[0])["kv_transfer_params"] == NIXL_OFFER | {"remote_block_ids": blocks}


async def test_a_handshake_that_is_too_long_to_be_held_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PrefillLeg, "most_held", 1 << 20)
    async with pair(prefilled(remote_block_ids=[list(range(100_000, 400_000))])) as (_, here, router):
        assert (await ask(router)).status == 200
        assert ["kv_transfer_params" in told(request) for request in here.requests] == [False]
        said = [getattr(record, "fields", {}) for record in caplog.records if record.getMessage() == "KV transfer failed"]
        assert [one["reason"] for one in said] == ["its answer is longer than the 1 MiB that are held of one"]


async def test_a_handshake_whose_lease_may_be_over_is_not_used() -> None:
    async with pair(kv_lease_s=1e-9) as (_, here, router):
        assert (await ask(router)).status == 200
        assert ["kv_transfer_params" in told(request) for request in here.requests] == [False]
        assert await router.metric("router_kv_transfers_total", outcome="stranded") == 1


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_P4_a_client_that_leaves_closes_both_legs(leg: str) -> None:
    scripts = (never, DECODED) if leg == "prefill" else (PREFILLED, never)
    async with pair(*scripts) as (there, here, router):
        waits = there if leg == "prefill" else here
        async with contextlib.AsyncExitStack() as clients:
            for _ in range(10):
                client = await clients.enter_async_context(talking(port_of(router.url)))
                await client.send(request("/v1/completions", msgspec.json.encode({"model": "sim", "prompt": IDS, "stream": True})))
            await until(lambda: waits.answering == 10, what="ten requests wait")
        await until(lambda: waits.answering == 0, what="they are given up")
        assert waits.left == 10

        async def free() -> bool:
            return await router.metric("router_active_requests") == 0

        await until(free, what="nothing is counted any more")


async def test_P4_a_client_that_leaves_closes_both_legs_that_went_out_at_once() -> None:
    async with pair(never, never, kind=EngineKind.SGLANG) as (there, here, router):
        async with talking(port_of(router.url)) as client:
            await client.send(request("/v1/completions", msgspec.json.encode({"model": "sim", "prompt": IDS, "stream": True})))
            await until(lambda: there.answering == here.answering == 1, what="both legs are out")
        await until(lambda: there.answering == here.answering == 0, what="both are given up")
        assert (there.left, here.left) == (1, 1)


@pytest.mark.parametrize(("mode", "remote"), [(Mode.ALWAYS, True), (Mode.NEVER, False), (Mode.STATIC, True)])
async def test_the_operator_says_when(mode: Mode, remote: bool) -> None:
    async with pair(disagg=mode) as (there, here, router):
        assert (await ask(router)).status == 200
        assert bool(there.requests) is remote
        assert ("kv_transfer_params" in told(here.requests[0])) is remote


async def test_a_prefill_engine_is_never_asked_for_an_answer() -> None:
    async with RawEngine(PREFILLED) as there, routing([EngineSpec(there.url, role=Role.PREFILL)]) as router:
        assert (await router.get("/ready")).status == 503
        answer = await ask(router)
        assert answer.status == 503
        assert "--engine 'http://HOST:PORT,role=decode'" in answer.json["error"]["message"]
        assert not there.requests


async def test_engines_that_change_their_roles_while_they_run_are_used_as_they_are_now() -> None:
    """SGLang's `/pd_role_switch`. A leg sent by the old role would wait for a peer that cannot come."""
    async with RawEngine(PREFILLED, kind=EngineKind.SGLANG) as one, RawEngine(DECODED, kind=EngineKind.SGLANG) as other:
        pages_of_sglang(one, "prefill")
        pages_of_sglang(other, "decode")
        async with routing([one.url, other.url]) as router:
            assert (await ask(router)).headers["x-commutator-prefill-engine"] == one.url
            pages_of_sglang(one, "decode")
            pages_of_sglang(other, "prefill")
            one.script, other.script = DECODED, PREFILLED

            async def swapped() -> bool:
                told = (await router.post("/route", {"model": "sim", "prompt": IDS})).json
                return bool(told.get("engine") == one.url and told["prefill"]["engine"] == other.url)

            await until(swapped, what="both are known by their new roles")
            answer = await ask(router)
            assert (answer.status, answer.headers["x-commutator-prefill-engine"]) == (200, other.url)


async def test_who_computes_a_prompt_is_explained() -> None:
    async with pair() as (there, here, router):
        told = (await router.post("/route", {"model": "sim", "prompt": IDS})).json
        assert told["engine"] == here.url
        assert told["prefill"]["engine"] == there.url
        assert (told["prefill"]["remote"], told["prefill"]["reason"]) == (True, "always")
        assert [candidate["engine"] for candidate in told["prefill"]["candidates"]] == [there.url]


async def test_R21_decode_engines_share_what_one_prefill_engine_computes() -> None:
    async with contextlib.AsyncExitStack() as stack:
        there = await stack.enter_async_context(RawEngine(PREFILLED))
        slow = streaming([token(1), DONE], gap_s=0.05)
        here = [await stack.enter_async_context(RawEngine(slow)) for _ in range(5)]
        router = await stack.enter_async_context(routing(specs(there, *here)))
        await asyncio.gather(*(router.complete([number, *IDS], stream=True) for number in range(256)))
        assert len(there.requests) == 256
        assert min(len(engine.requests) for engine in here) >= 256 / 5 / 2
