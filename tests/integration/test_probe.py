"""The probe, over real HTTP, against each thing that can stand at a URL."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from engines.client import EngineClient
from engines.errors import (
    EngineAnswered,
    EngineBroken,
    EngineClosed,
    EngineError,
    EngineNotReady,
    EngineTimeout,
    EngineUnreachable,
    NotAnEngine,
)
from engines.metrics import EngineLoad
from engines.probe import alive, describe, look, probe
from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import SimulateSettings
from engines.types import Connector, EngineInfo, EngineKind, EngineSpec, KvSource, Role
from engines.zmtp import socket_type
from tests.integration.engine_fakes import Answer, FakeEngine, sglang_answers, vllm_answers
from tests.waiting import until

Start = Callable[..., Awaitable[FakeEngine]]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[FakeEngine] = []

    async def start(answers: dict[str, Answer], **options: str) -> FakeEngine:
        started.append(await FakeEngine(answers, **options).start())
        return started[-1]

    yield start
    for engine in started:
        await engine.stop()


async def ask(session: aiohttp.ClientSession, spec: EngineSpec, *, timeout_s: float = 5.0) -> EngineInfo:
    return await probe(EngineClient.of(session, spec, timeout_s=timeout_s), spec)


async def test_vllm_is_told_by_its_own_answers(session: aiohttp.ClientSession, start: Start) -> None:
    engine = await start(vllm_answers())
    info = await ask(session, EngineSpec(engine.url + "/"))
    assert (info.id, info.kind, info.version) == (engine.url, EngineKind.VLLM, "0.32.0")
    assert [model.id for model in info.models] == ["tiny"]
    assert (info.block_size, info.total_blocks, info.ranks) == (32, 12, (0,))
    assert info.kv_sources == (KvSource(0, "tcp://127.0.0.1:5601", "tcp://127.0.0.1:5701", topic="kv-events"),)
    assert (info.tokenizer, info.boot, info.load_path) == ("models/tiny", 1795954074.36, "/metrics")
    assert await alive(EngineClient(session, engine.url), info)
    assert "/server_info" not in engine.hits  # where vLLM has it, it takes seconds


async def test_sglang_is_told_by_its_own_answers(session: aiohttp.ClientSession, start: Start) -> None:
    engine = await start(sglang_answers())
    info = await ask(session, EngineSpec(engine.url))
    assert (info.id, info.kind, info.version) == (engine.url, EngineKind.SGLANG, "0.5.23")
    assert [model.id for model in info.models] == ["models/tiny"]
    assert (info.block_size, info.total_blocks, info.ranks, info.max_num_batched_tokens) == (16, 1024, (0,), 4096)
    assert info.kv_sources == (KvSource(0, "tcp://127.0.0.1:32557", "tcp://127.0.0.1:32558", topic="kv@w0@tiny"),)
    assert info.tokenizer == "models/tiny"
    assert await alive(EngineClient(session, engine.url), info)
    assert "/health" not in engine.hits  # it would generate a token


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_a_simulated_engine_is_found_to_be_what_it_is(session: aiohttp.ClientSession, kind: EngineKind) -> None:
    async with SimulatedEngine(SimulateSettings(port=0, kind=kind, kv_blocks=99, block_size=8, kv_topic="t")) as engine:
        info = await ask(session, EngineSpec(engine.url))
        assert (info.id, info.kind, info.block_size, info.total_blocks, info.ranks) == (engine.url, kind, 8, 99, (0,))
        assert [(source.events, source.replay, source.topic) for source in info.kv_sources] == [(engine.kv_events, engine.kv_replay, "t")]
        assert not info.kv_sources[0].bind
        client = EngineClient(session, engine.url)
        assert await alive(client, info)
        asleep = False if kind is EngineKind.VLLM else None
        assert (await look(client, info)).load == {0: EngineLoad(0, 0, 0.0, asleep=asleep)}


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_an_engine_without_events_is_found_to_publish_none(session: aiohttp.ClientSession, kind: EngineKind) -> None:
    async with SimulatedEngine(SimulateSettings(port=0, kind=kind, kv_events=False)) as engine:
        info = await ask(session, EngineSpec(engine.url))
        assert info.kv_sources == ()
        assert "publishes no KV events: it was started without --kv-events-config" in describe(info)


async def test_R2_two_engines_keep_their_own_block_sizes(session: aiohttp.ClientSession, start: Start) -> None:
    one, other = await start(vllm_answers()), await start(sglang_answers())
    assert (await ask(session, EngineSpec(one.url))).block_size == 32
    assert (await ask(session, EngineSpec(other.url))).block_size == 16


async def test_R28_an_engine_owning_ranks_4_to_7_has_just_these(session: aiohttp.ClientSession, start: Start) -> None:
    answers = vllm_answers()
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""}
    answers["/kv_event_sources"] = Answer(msgspec.json.encode({str(r): {**config, "endpoint": f"tcp://*:{5600 + r}"} for r in range(4, 8)}))
    engine = await start(answers)
    info = await ask(session, EngineSpec(engine.url))
    assert info.ranks == (4, 5, 6, 7)
    assert [source.events for source in info.kv_sources] == [f"tcp://127.0.0.1:{5600 + rank}" for rank in range(4, 8)]
    given = await ask(session, EngineSpec(engine.url, kv_events="tcp://kv:6000", kv_replay="tcp://kv:7000"))
    assert [(source.rank, source.events, source.replay) for source in given.kv_sources] == [
        (rank, f"tcp://kv:{6000 + rank}", f"tcp://kv:{7000 + rank}") for rank in range(4, 8)
    ]


async def test_what_the_user_gives_goes_before_what_the_engine_says(session: aiohttp.ClientSession, start: Start) -> None:
    engine = await start(vllm_answers())
    spec = EngineSpec(engine.url, kv_events="tcp://*:6000", kv_topic="mine", tokenizer="/my/tokenizer", block_size=64)
    info = await ask(session, spec)
    assert info.kv_sources == (KvSource(0, "tcp://127.0.0.1:6000", "tcp://127.0.0.1:5701", topic="mine"),)
    assert info.tokenizer == "/my/tokenizer"
    assert info.block_size == 32  # the engine knows; the disagreement is shown
    assert "configured as 64" in describe(info)


async def test_vllm_before_0_31_has_only_the_sources_that_are_given(session: aiohttp.ClientSession, start: Start) -> None:
    answers = vllm_answers()
    del answers["/kv_event_sources"]
    answers["/version"] = Answer(b'{"version":"0.30.1"}')
    engine = await start(answers)
    info = await ask(session, EngineSpec(engine.url))
    assert info.kv_sources == ()
    assert "publishes no KV events: vLLM 0.30.1 does not say where (404 at /kv_event_sources, which came with 0.31)" in describe(info)
    given = await ask(session, EngineSpec(engine.url, kv_events="tcp://127.0.0.1:6000"))
    assert given.kv_sources == (KvSource(0, "tcp://127.0.0.1:6000"),)
    assert given.no_kv_events == ""


async def test_R25_an_engine_without_a_load_signal_is_found_at_the_probe(session: aiohttp.ClientSession, start: Start) -> None:
    answers = vllm_answers()
    del answers["/metrics"]
    engine = await start(answers)
    info = await ask(session, EngineSpec(engine.url, block_size=16))
    assert (info.load_path, info.boot, info.block_size, info.total_blocks) == (None, None, 16, None)
    assert describe(info).endswith("reports no load")
    assert (await look(EngineClient(session, engine.url), info)).load == {}


async def test_sglang_reports_load_without_a_metrics_page_and_with_one_only(session: aiohttp.ClientSession, start: Start) -> None:
    answers = sglang_answers()
    del answers["/metrics"]
    engine = await start(answers)
    client = EngineClient(session, engine.url)
    info = await ask(session, EngineSpec(engine.url))
    assert (await look(client, info)).load == {0: EngineLoad(2, 1, 0.5)}
    del answers["/v1/loads"]
    answers["/metrics"] = sglang_answers()["/metrics"]
    info = await ask(session, EngineSpec(engine.url))
    assert (await look(client, info)).load == {0: EngineLoad(0, 0, 0.0)}
    del answers["/metrics"]
    assert (await ask(session, EngineSpec(engine.url))).load_path is None


async def test_the_rust_frontend_without_ready_is_asked_elsewhere(session: aiohttp.ClientSession, start: Start) -> None:
    answers = sglang_answers()
    del answers["/ready"]
    engine = await start(answers)
    info = await ask(session, EngineSpec(engine.url))
    client = EngineClient(session, engine.url)
    assert await alive(client, info)
    answers["/model_info"] = Answer(status=503)
    assert not await alive(client, info)


async def test_an_older_sglang_with_the_older_path_is_recognised(session: aiohttp.ClientSession, start: Start) -> None:
    answers = sglang_answers()
    answers["/get_server_info"] = answers.pop("/server_info")
    engine = await start(answers)
    assert (await ask(session, EngineSpec(engine.url))).kind is EngineKind.SGLANG


async def test_H11_the_key_is_sent_on_every_path(session: aiohttp.ClientSession, start: Start) -> None:
    for answers in (vllm_answers(), sglang_answers()):
        engine = await start(answers, api_key="secret")
        spec = EngineSpec(engine.url, api_key="secret")
        client = EngineClient.of(session, spec)
        info = await ask(session, spec)
        assert await alive(client, info)
        await look(client, info)
        assert engine.refused_keys == 0
        with pytest.raises(EngineAnswered, match=r"401 .*wants an API key"):
            await ask(session, EngineSpec(engine.url))


@pytest.mark.parametrize(
    ("answers", "path"),
    [(vllm_answers, "/health"), (vllm_answers, "/version"), (vllm_answers, "/v1/models"), (sglang_answers, "/ready")],
)
async def test_503_while_loading_is_not_ready_and_not_a_stranger(
    session: aiohttp.ClientSession, start: Start, answers: Callable[[], dict[str, Answer]], path: str
) -> None:
    engine = await start({**answers(), path: Answer(b"starting", 503)})
    with pytest.raises(EngineNotReady, match=f"{path}|not ready"):
        await ask(session, EngineSpec(engine.url))


@pytest.mark.parametrize(
    ("answers", "spec", "said"),
    [
        (vllm_answers, {"link": "1GbE", "group": "a"}, "link, group has no effect without a role, which vLLM 0.32.0 does not tell"),
        (vllm_answers, {"bootstrap": "http://h:1"}, "bootstrap has no effect without a role"),
        (vllm_answers, {"role": Role.DECODE, "connector": Connector.ROOMS}, "does not hand KV over by rooms"),
        (sglang_answers, {"group": "a"}, "group has no effect: SGLang 0.5.23 was started with no --disaggregation-mode"),
        (sglang_answers, {"role": Role.PREFILL}, "not prefill"),
        (sglang_answers, {"connector": Connector.NIXL}, "does not hand KV over by nixl: leave connector out"),
    ],
)
async def test_what_is_said_of_pairs_and_has_no_effect_keeps_an_engine_out_in_words(
    start: Start, session: aiohttp.ClientSession, answers: Callable[[], dict[str, Answer]], spec: dict[str, Any], said: str
) -> None:
    engine = await start(answers())
    with pytest.raises(EngineNotReady, match=said):
        await ask(session, EngineSpec(engine.url, **spec))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, r"uvicorn answered 404 at /version and 404 at /server_info .*Not Found.*; expected vLLM \(/version\) or SGLang"),
        (
            {"/version": Answer(b"<html>\n <h1>nginx</h1>", 404, "nginx/1.25"), "/server_info": Answer(b"", 404, "nginx/1.25")},
            r"nginx/1.25 answered 404 at /version .*<html> <h1>nginx</h1>",
        ),
        ({"/version": Answer(b'{"Version":"24.0"}', 200, "Docker/24.0")}, r"Docker/24.0 answered 200 at /version"),
        ({"/version": Answer(b'{"version":"1"}')}, r"uvicorn answered 404 at /v1/models"),
        (
            {"/version": Answer(b'{"version":"1"}'), "/v1/models": Answer(b'{"data":[{"id":"m","owned_by":"aphrodite"}]}')},
            r"answered 200 at /version and 404",
        ),
        ({"/version": Answer(b'{"version":"1"}'), "/v1/models": Answer(b"[]")}, r"as vLLM 1 does, but /v1/models with '\[\]'"),
        ({"/version": Answer(b"", 301), "/server_info": Answer(b"", 301)}, r"answered 301 at /version and 301 at /server_info"),
    ],
)
async def test_a_stranger_gets_a_line_saying_what_answered(
    session: aiohttp.ClientSession, start: Start, answers: dict[str, Answer], words: str
) -> None:
    engine = await start(answers)
    with pytest.raises((NotAnEngine, EngineAnswered), match=words) as error:
        await ask(session, EngineSpec(engine.url))
    assert "\n" not in str(error.value)


async def test_who_binds_is_found_out_where_the_configuration_does_not_tell(session: aiohttp.ClientSession, start: Start) -> None:
    answers = vllm_answers()
    engine = await start(answers)
    with zmq.asyncio.Context() as context:
        bound = {kind: context.socket(kind) for kind in (zmq.PUB, zmq.SUB)}
        for kind, engine_binds in ((zmq.PUB, True), (zmq.SUB, False)):
            port = bound[kind].bind_to_random_port("tcp://127.0.0.1")
            source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}"}
            answers["/kv_event_sources"] = Answer(msgspec.json.encode({"0": source}))
            (found,) = (await ask(session, EngineSpec(engine.url))).kv_sources
            assert (found.events, found.bind) == (f"tcp://127.0.0.1:{port}", not engine_binds)
            bound[kind].close(linger=0)
            await until(lambda port=port: refused(port), what="the socket to be closed: a thread of its own does that")
            (found,) = (await ask(session, EngineSpec(engine.url))).kv_sources
            assert found.bind  # nobody listens there: it is ours to bind


def refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


async def test_what_speaks_no_zmq_is_no_publisher() -> None:
    for said in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 100):
        server, url = await serve_raw(said)
        async with server:
            assert await socket_type(url.replace("http://", "tcp://"), timeout_s=5.0) is None
    assert await socket_type("ipc:///nowhere", timeout_s=5.0) is None


async def serve_raw(said: bytes) -> tuple[asyncio.Server, str]:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_something_that_does_not_speak_http_is_not_an_engine(session: aiohttp.ClientSession) -> None:
    server, url = await serve_raw(b"SSH-2.0-OpenSSH_9.2\r\n")
    async with server:
        with pytest.raises(NotAnEngine, match="not HTTP"):
            await ask(session, EngineSpec(url))


async def test_a_connection_closed_without_an_answer_is_closed(session: aiohttp.ClientSession) -> None:
    server, url = await serve_raw(b"")
    async with server:
        with pytest.raises(EngineClosed):
            await ask(session, EngineSpec(url))


async def test_an_answer_cut_short_is_broken(session: aiohttp.ClientSession) -> None:
    server, url = await serve_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    async with server:
        with pytest.raises(EngineBroken, match="/x"):
            await EngineClient(session, url).get_bytes("/x")


async def test_an_answer_over_the_limit_is_not_read_to_its_end(session: aiohttp.ClientSession, start: Start) -> None:
    engine = await start({"/x": Answer(b"x" * 100_000)})
    with pytest.raises(EngineBroken, match="longer than 1000 bytes"):
        await EngineClient(session, engine.url, max_bytes=1000).get_bytes("/x")


async def test_an_answer_that_is_not_json_is_broken(session: aiohttp.ClientSession, start: Start) -> None:
    engine = await start({"/x": Answer(b"<html>hello"), "/deep": Answer(b"[" * 100_000)})
    client = EngineClient(session, engine.url)
    with pytest.raises(EngineBroken, match=r"not JSON .*hello"):
        await client.get_json("/x")
    with pytest.raises(EngineBroken, match="not JSON"):
        await client.get_json("/deep")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_refused_connection_is_unreachable_and_says_why(session: aiohttp.ClientSession, host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(EngineUnreachable, match=r"^connection refused$") as error:
            await ask(session, EngineSpec(f"http://{host}:{taken.getsockname()[1]}"))
    assert error.value.number is not None


async def test_silence_is_a_timeout(session: aiohttp.ClientSession, start: Start) -> None:
    engine = await start(vllm_answers())
    engine.stalled.add("*")
    with pytest.raises(EngineTimeout, match=r"/version timed out after 0\.05 s"):
        await ask(session, EngineSpec(engine.url), timeout_s=0.05)


async def test_post_carries_json_and_returns_json(session: aiohttp.ClientSession) -> None:
    server, url = await serve_raw(b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"count":3}  ')
    async with server:
        assert await EngineClient(session, url).post_json("/tokenize", {"prompt": "x"}) == {"count": 3}


async def test_every_failure_is_one_of_the_engines_errors(session: aiohttp.ClientSession) -> None:
    for said in (
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 999999 X\r\n\r\n",
        b"\x16\x03\x01\x00\x00",
        b"HTTP/1.1 200 OK\r\nA" + b"a" * 100_000,
    ):
        server, url = await serve_raw(said)
        async with server:
            with pytest.raises(EngineError):
                await ask(session, EngineSpec(url))


async def test_a_tls_failure_is_unreachable_in_words(session: aiohttp.ClientSession) -> None:
    server, url = await serve_raw(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    async with server:
        with pytest.raises(EngineUnreachable, match="TLS failed"):
            await ask(session, EngineSpec(url.replace("http://", "https://")))
