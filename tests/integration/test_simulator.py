"""A simulated engine as a test uses it: faults as scripted, restarts in place, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import yarl
import zmq
import zmq.asyncio

from engines.events import Stored, decode
from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer, Break, Delay, End, Raw
from engines.simulator.settings import SimulateSettings
from engines.types import EngineKind
from tests.waiting import alongside, until

CHAT = "/v1/chat/completions"
ASK = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
LONG = [400 + number for number in range(40)]


def settings(**fields: Any) -> SimulateSettings:  # noqa: ANN401  any setting
    return SimulateSettings(**{"port": 0, "speedup": 0.0} | fields)


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine(settings()) as engine:
        yield engine


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


class Heard:
    """What one subscriber got, and a way to ask again."""

    def __init__(self, engine: SimulatedEngine, context: zmq.asyncio.Context, frames: list[list[bytes]]) -> None:
        self.engine = engine
        self.context = context
        self.frames = frames

    @property
    def numbers(self) -> list[int]:
        return [int.from_bytes(frames[1], "big") for frames in self.frames]

    async def replay(self, first: int) -> list[list[bytes]]:
        socket = self.context.socket(zmq.DEALER)
        assert self.engine.kv_replay is not None
        socket.connect(self.engine.kv_replay)
        await socket.send_multipart((b"", first.to_bytes(8, "big")))
        replies: list[list[bytes]] = []
        while not replies or b"\xff" * 8 not in replies[-1]:
            async with asyncio.timeout(10):
                replies.append(await socket.recv_multipart())
        socket.close(linger=0)
        return replies


@contextlib.asynccontextmanager
async def hearing(engine: SimulatedEngine) -> AsyncIterator[Heard]:
    """Subscribed, for certain: a probe sent past the count has been heard."""
    context = zmq.asyncio.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"")
    assert engine.kv_events is not None
    subscriber.connect(engine.kv_events)
    frames: list[list[bytes]] = []

    async def listen() -> None:
        while True:
            message = await subscriber.recv_multipart()
            if message[2] != b"probe":
                frames.append(message)
            else:
                ready.set()

    async with asyncio.TaskGroup() as group:
        ready = asyncio.Event()
        listening = group.create_task(listen())

        def probed() -> bool:
            engine.faults.publish(b"probe", seq=0)
            return ready.is_set()

        await until(probed, what="the subscription")
        yield Heard(engine, context, frames)
        listening.cancel()
    context.destroy(linger=0)


async def ask(http: aiohttp.ClientSession, engine: SimulatedEngine, body: object = ASK, path: str = CHAT) -> tuple[int, bytes]:
    async with http.post(engine.url + path, json=body) as response:
        return response.status, await response.read()


async def complete(http: aiohttp.ClientSession, engine: SimulatedEngine, prompt: list[int] = LONG) -> dict[str, Any]:
    status, body = await ask(http, engine, {"model": "sim", "prompt": prompt, "max_tokens": 1}, "/v1/completions")
    assert status == 200
    answer: dict[str, Any] = json.loads(body)
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


# ---------------------------------------------------------------------------------------------------------------- requests


async def test_requests_are_recorded_as_they_came(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    sent = b'{"model": "sim",   "messages": [{"role":"user","content":"hi"}], "big": 123456789012345678901234567890, "max_tokens": 1}'
    url = yarl.URL(f"{engine.url}{CHAT}?x=%2e", encoded=True)
    async with http.post(url, data=sent, headers={"X-Mixed-Case": "ä".encode().decode("latin-1")}) as response:
        assert response.status == 200
    (record,) = engine.requests
    assert (record.method, record.path, record.body) == ("POST", f"{CHAT}?x=%2e", sent)
    assert any(name == b"X-Mixed-Case" for name, _ in record.headers)
    assert record.header("x-mixed-case") is not None
    await until(lambda: record.outcome == "done")


async def test_a_client_that_leaves_before_the_answer_frees_its_blocks_and_is_counted(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(settings(speedup=1.0, decode_step_ms=100.0)) as engine:
        async with alongside(ask(http, engine, ASK | {"max_tokens": 1000})):
            await until(lambda: engine.running == 1)
        await until(lambda: engine.aborts == 1)
        assert (engine.running, engine.waiting, engine.cache.used, engine.counters.aborted) == (0, 0, 0, 1)
        assert engine.requests[0].outcome == "aborted"


async def test_a_client_that_leaves_mid_stream_is_noticed_before_the_next_chunks(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(settings(speedup=1.0, decode_step_ms=100.0)) as engine:
        async with http.post(engine.url + CHAT, json=ASK | {"stream": True, "max_tokens": 1000}) as response:
            for _ in range(6):
                await response.content.readline()
        await until(lambda: engine.aborts == 1)
        assert engine.requests[0].chunks < 10
        assert engine.running == 0


async def test_many_requests_at_once_are_all_answered(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(settings(max_num_seqs=8, kv_blocks=64)) as engine:
        answers = await asyncio.gather(*(ask(http, engine, ASK | {"seed": number}) for number in range(60)))
        assert {status for status, _ in answers} == {200}
        assert engine.counters.finished == {"length": 60}
        assert (engine.running, engine.waiting, engine.cache.used) == (0, 0, 0)


async def test_a_stream_says_what_the_whole_answer_says(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    _, whole = await ask(http, engine)
    _, streamed = await ask(http, engine, ASK | {"stream": True})
    events = [json.loads(event.removeprefix(b"data: ")) for event in streamed.split(b"\n\n") if event and event != b"data: [DONE]"]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == json.loads(whole)["choices"][0]["message"]["content"]


async def test_time_passes_as_the_model_says(http: aiohttp.ClientSession) -> None:
    loop = asyncio.get_running_loop()
    async with SimulatedEngine(settings(speedup=1.0, prefill_tokens_per_s=100.0, decode_step_ms=100.0)) as engine:
        start = loop.time()
        await complete(http, engine, LONG)
        assert loop.time() - start >= 0.4
        start = loop.time()
        await ask(http, engine, ASK | {"max_tokens": 4})
        assert loop.time() - start >= 0.3


async def test_several_names_and_adapters_are_served_and_unknown_ones_refused(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(settings(served_model_name="a,b")) as engine:
        assert [(await ask(http, engine, ASK | {"model": model}))[0] for model in ("a", "b", "c", "ad1")] == [200, 200, 404, 404]
        async with http.post(engine.url + "/v1/load_lora_adapter", json={"lora_name": "ad1", "lora_path": "somewhere"}) as response:
            assert response.status == 200
        assert (await ask(http, engine, ASK | {"model": "ad1"}))[0] == 200
        async with http.get(engine.url + "/v1/models") as response:
            listed = {entry["id"]: entry["parent"] for entry in (await response.json())["data"]}
        assert listed == {"a": None, "b": None, "ad1": "a"}
        async with http.post(engine.url + "/v1/unload_lora_adapter", json={"lora_name": "ad1"}) as response:
            assert response.status == 200
        assert (await ask(http, engine, ASK | {"model": "ad1"}))[0] == 404


async def test_an_adapters_blocks_are_its_own(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    engine.adapters["ad1"] = "somewhere"
    async with hearing(engine) as heard:
        await complete(http, engine)
        for expected in (0, 32):
            _, body = await ask(http, engine, {"model": "ad1", "prompt": LONG, "max_tokens": 1}, "/v1/completions")
            assert cached(json.loads(body)) == expected
        await until(lambda: len(heard.frames) == 2)
        stored = [event for frames in heard.frames for event in decode(frames[2]).events if isinstance(event, Stored)]
        assert [event.lora for event in stored] == [None, "ad1"]


async def test_embeddings_depend_on_their_input(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    _, body = await ask(http, engine, {"model": "sim", "input": ["a", "b", "a"]}, "/v1/embeddings")
    first, second, third = (entry["embedding"] for entry in json.loads(body)["data"])
    assert first == third != second


async def test_sglang_generates_from_ids_and_streams_the_text_so_far(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(settings(kind=EngineKind.SGLANG)) as engine:
        sampling = {"sampling_params": {"max_new_tokens": 3}}
        await ask(http, engine, {"input_ids": LONG, **sampling}, "/generate")
        _, body = await ask(http, engine, {"input_ids": LONG, **sampling}, "/generate")
        whole = json.loads(body)
        assert whole["meta_info"]["cached_tokens"] == 32
        assert len(whole["output_ids"]) == 3
        _, streamed = await ask(http, engine, {"input_ids": LONG, "stream": True, **sampling}, "/generate")
        *events, done = [event.removeprefix(b"data: ") for event in streamed.split(b"\n\n") if event]
        assert done == b"[DONE]"
        assert json.loads(events[-1])["text"] == whole["text"]
        assert json.loads(events[-1])["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


# ---------------------------------------------------------------------------------------------------------------- faults


async def test_a_scripted_answer_is_given_once(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    engine.faults.add(Answer(503, b"busy", (("Retry-After", "2"), ("Content-Type", "text/plain"))))
    async with http.get(engine.url + "/health") as response:
        assert response.status == 200
    async with http.post(engine.url + CHAT, json=ASK) as response:
        assert (response.status, await response.read(), response.headers["Retry-After"]) == (503, b"busy", "2")
    assert (await ask(http, engine))[0] == 200
    assert [record.outcome for record in engine.requests] == ["done", "faulted", "done"]


async def test_a_fault_can_be_for_one_path_for_some_times_or_until_it_is_cleared(
    engine: SimulatedEngine, http: aiohttp.ClientSession
) -> None:
    engine.faults.add(Answer(500), path="/v1/models", times=None)
    engine.faults.add(Answer(429), times=2)
    assert [(await ask(http, engine))[0] for _ in range(3)] == [429, 429, 200]
    for expected in (500, 500):
        async with http.get(engine.url + "/v1/models") as response:
            assert response.status == expected
    engine.faults.clear()
    async with http.get(engine.url + "/v1/models") as response:
        assert response.status == 200


async def test_raw_bytes_are_written_as_they_are(engine: SimulatedEngine) -> None:
    parts = (b"HTTP/1.1 200 OK\r\ncontent-le", b"ngth: 2\r\n\r\n", b"hi")
    engine.faults.add(Raw(parts, pause_s=0.01), path="/anything")
    reader, writer = await asyncio.open_connection(*_address(engine))
    writer.write(b"GET /anything HTTP/1.1\r\nhost: x\r\n\r\n")
    assert await reader.read() == b"".join(parts)
    writer.close()


async def stream_into(got: bytearray, http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
    async with http.post(engine.url + CHAT, json=ASK | {"stream": True}) as response:
        async for data in response.content.iter_any():
            got += data


@pytest.mark.parametrize("chunks", [0, 1, 5])
async def test_a_stream_is_reset_after_so_many_chunks(engine: SimulatedEngine, http: aiohttp.ClientSession, chunks: int) -> None:
    engine.faults.add(Break(after_chunks=chunks))
    got = bytearray()
    with pytest.raises(aiohttp.ClientError):
        await stream_into(got, http, engine)
    # A reset may overtake what was sent before it.
    assert got.count(b"data: ") <= chunks
    assert engine.requests[0].chunks == chunks
    await until(lambda: engine.cache.used == 0)
    assert engine.aborts == 0


async def test_a_stream_that_is_closed_early_delivers_its_chunks_and_breaks(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    engine.faults.add(Break(after_chunks=3, end=End.CLOSE))
    got = bytearray()
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream_into(got, http, engine)
    assert got.count(b"data: ") == 3


async def test_a_stalled_stream_is_silent_until_the_client_leaves(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    engine.faults.add(Break(after_chunks=2, end=End.HANG))
    async with http.post(engine.url + CHAT, json=ASK | {"stream": True}) as response:
        for _ in range(4):
            await response.content.readline()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await response.content.readline()
    await until(lambda: engine.cache.used == 0)


async def test_a_late_head_is_late(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    engine.faults.add(Delay(head_s=0.2))
    start = asyncio.get_running_loop().time()
    assert (await ask(http, engine))[0] == 200
    assert asyncio.get_running_loop().time() - start >= 0.2


async def test_an_engine_that_refuses_connections_can_listen_again(engine: SimulatedEngine) -> None:
    await engine.refuse()
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(http, engine)
        await engine.accept()
        assert (await ask(http, engine))[0] == 200


async def test_faults_come_over_http_only_where_allowed(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    script = {"fault": {"fault": "answer", "status": 418}, "times": 1}
    assert (await ask(http, engine, script, "/_sim/faults"))[0] == 404
    async with SimulatedEngine(settings(allow_faults=True)) as open_engine:
        assert (await ask(http, open_engine, script, "/_sim/faults"))[0] == 200
        assert (await ask(http, open_engine))[0] == 418
        assert (await ask(http, open_engine, {"unknown": 1}, "/_sim/faults"))[0] == 400
        await ask(http, open_engine, script | {"kv": {"lost": [3]}, "times": None}, "/_sim/faults")
        assert open_engine.faults.kv.lost == {3}
        assert (await ask(http, open_engine))[0] == 418
        await ask(http, open_engine, {"clear": True}, "/_sim/faults")
        assert open_engine.faults.kv.lost == set()
        assert (await ask(http, open_engine))[0] == 200


# ---------------------------------------------------------------------------------------------------------------- KV faults


async def test_a_batch_lost_live_is_there_in_a_replay_and_one_lost_for_good_is_not(
    engine: SimulatedEngine, http: aiohttp.ClientSession
) -> None:
    async with hearing(engine) as heard:
        engine.faults.kv.lost_live.add(1)
        engine.faults.kv.lost.add(2)
        for number in range(4):
            await complete(http, engine, [number + 1, *LONG])
        await until(lambda: heard.numbers == [0, 3])
        again = await heard.replay(0)
        assert [int.from_bytes(frames[-2], "big") for frames in again[:-1]] == [0, 1, 3]


async def test_the_older_replay_has_no_topic_frame(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    async with hearing(engine) as heard:
        engine.faults.kv.old_replay = True
        await complete(http, engine)
        await until(lambda: heard.numbers == [0])
        assert await heard.replay(0) == [[b"", *heard.frames[0][1:]], [b"", b"\xff" * 8, b""]]


async def test_a_muted_engine_says_nothing_and_counts_nothing(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    async with hearing(engine) as heard:
        engine.faults.kv.muted = True
        await complete(http, engine)
        assert engine.next_seq == 0
        engine.faults.clear()
        await complete(http, engine, [1, *LONG])
        await until(lambda: heard.numbers == [0])


async def test_a_frame_of_the_tests_own_is_sent_with_the_number_it_wants(engine: SimulatedEngine) -> None:
    payload = msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}], 0])
    async with hearing(engine) as heard:
        engine.faults.publish(payload, seq=77)
        engine.faults.publish(payload)
        await until(lambda: heard.numbers == [77, 0])
        assert (await heard.replay(0))[0][2:] == [(0).to_bytes(8, "big"), payload]


async def test_clearing_the_cache_is_said_with_the_next_batch(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    async with hearing(engine) as heard:
        await complete(http, engine)
        _, body = await ask(http, engine, {}, "/reset_prefix_cache")
        assert json.loads(body) == {"success": True}
        assert engine.next_seq == 1
        assert cached(await complete(http, engine)) == 0
        await until(lambda: heard.numbers == [0, 1])
        assert [event["type"] for event in msgspec.msgpack.decode(heard.frames[1][2])[1]] == ["AllBlocksCleared", "BlockStored"]


async def test_an_engine_asleep_answers_once_woken_and_has_forgotten_its_blocks(
    engine: SimulatedEngine, http: aiohttp.ClientSession
) -> None:
    await complete(http, engine)
    engine.sleep()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(complete(http, engine))
        await until(lambda: engine.waiting == 1)
        engine.wake()
    assert cached(asking.result()) == 0


async def test_sleep_is_a_matter_of_http_too(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    for path, asleep in (("/sleep?level=1", True), ("/wake_up", False)):
        async with http.post(engine.url + path) as response:
            assert response.status == 200
        async with http.get(engine.url + "/is_sleeping") as response:
            assert await response.json() == {"is_sleeping": asleep}
    assert (await ask(http, engine))[0] == 200


async def test_an_sglang_engine_tells_its_load_and_forgets_its_blocks_at_once(http: aiohttp.ClientSession) -> None:
    slow = settings(kind=EngineKind.SGLANG, kv_blocks=8, speedup=1.0, decode_step_ms=100.0)
    async with SimulatedEngine(slow) as engine, hearing(engine) as heard:
        async with http.post(engine.url + CHAT, json=ASK | {"stream": True, "max_tokens": 60}) as response:
            await response.content.readline()
            async with http.get(engine.url + "/v1/loads?include=core") as told:
                (load,) = (await told.json())["loads"]
            assert (load["num_running_reqs"], load["num_waiting_reqs"], load["max_total_num_tokens"]) == (1, 0, 128)
            assert (await ask(http, engine, {}, "/flush_cache"))[0] == 400
        await until(lambda: engine.running == 0)
        assert (await ask(http, engine, {}, "/flush_cache"))[0] == 200
        await until(lambda: heard.frames and b"AllBlocksCleared" in heard.frames[-1][2])


async def test_a_completion_stream_returns_its_prompts_ids_once(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    body = {"model": "sim", "prompt": LONG, "max_tokens": 3, "stream": True, "return_token_ids": True}
    _, streamed = await ask(http, engine, body | {"stream_options": {"continuous_usage_stats": True}}, "/v1/completions")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in streamed.split(b"\n\n")[:-2]]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [LONG, None, None]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


async def test_an_engine_without_kv_events_names_no_source(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(settings(kv_events=False)) as engine:
        assert (engine.kv_events, engine.kv_replay) == (None, None)
        async with http.get(engine.url + "/kv_event_sources") as response:
            assert await response.json() == {}
        await complete(http, engine)
        assert cached(await complete(http, engine)) == 32


async def test_usage_tells_no_cached_tokens_where_that_is_off(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(settings(prompt_tokens_details=False)) as engine:
        assert (await complete(http, engine))["usage"]["prompt_tokens_details"] is None


# ---------------------------------------------------------------------------------------------------------------- life


async def test_a_restart_in_place_keeps_the_ports_and_forgets_the_rest(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    places = engine.url, engine.kv_events, engine.kv_replay
    async with http.get(engine.url + "/metrics") as response:
        before = await response.text()
    await complete(http, engine)
    assert engine.next_seq == 1
    await engine.restart()
    assert (engine.url, engine.kv_events, engine.kv_replay) == places
    assert engine.next_seq == 0
    assert cached(await complete(http, engine)) == 0
    async with hearing(engine) as heard:
        await complete(http, engine, [1, *LONG])
        await until(lambda: heard.numbers == [1])
    async with http.get(engine.url + "/metrics") as response:
        after = await response.text()
    assert _boot(after) > _boot(before)


async def test_a_subscriber_that_stays_hears_the_restarted_engine(engine: SimulatedEngine, http: aiohttp.ClientSession) -> None:
    async with hearing(engine) as heard:
        await complete(http, engine)
        await until(lambda: heard.numbers == [0])
        await engine.restart()

        async def heard_again() -> bool:
            await complete(http, engine, [len(heard.frames) + engine.next_seq, *LONG])
            return len(heard.frames) > 1

        await until(heard_again, what="events of the restarted engine")
        assert heard.frames[1][1:] != heard.frames[0][1:]


async def test_a_restart_resets_what_is_under_way(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(settings(speedup=1.0)) as engine:
        async with http.post(engine.url + CHAT, json=ASK | {"stream": True, "max_tokens": 1000}) as response:
            await response.content.readline()
            await engine.restart()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        assert (engine.running, engine.cache.used) == (0, 0)


async def test_leaving_the_block_leaves_no_task_and_no_port_behind(http: aiohttp.ClientSession) -> None:
    before = asyncio.all_tasks()
    async with SimulatedEngine(settings(speedup=1.0)) as engine:
        address = _address(engine)
        response = await http.post(engine.url + CHAT, json=ASK | {"stream": True, "max_tokens": 1000})
        await response.content.readline()
    with pytest.raises(aiohttp.ClientError):
        await response.read()
    await until(lambda: asyncio.all_tasks() == before)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def test_a_port_in_use_is_an_os_error_and_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="address already in use"):
            async with SimulatedEngine(settings(port=taken.getsockname()[1])):
                pass
    assert asyncio.all_tasks() == before


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with SimulatedEngine(settings()):
            raise KeyError


# ---------------------------------------------------------------------------------------------------------------- the command


async def _simulate(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "commutator", "simulate", *arguments, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_simulate_says_where_its_engines_are_and_stops_when_told(http: aiohttp.ClientSession, number: signal.Signals) -> None:
    process = await _simulate("--engines", "2", "--port", "0", "--kv-blocks", "64", "--block-size", "32")
    assert process.stdout is not None
    described = json.loads(await process.stdout.readline())["engines"]
    assert len({engine["url"] for engine in described}) == 2
    for engine in described:
        assert (engine["kind"], engine["model"]) == ("vllm", "sim")
        async with http.get(engine["url"] + "/metrics") as response:
            page = await response.text()
        assert 'block_size="32"' in page
        assert 'num_gpu_blocks="64"' in page
        async with http.get(engine["url"] + "/kv_event_sources") as response:
            source = (await response.json())["0"]
        assert source["endpoint"].rpartition(":")[2] == engine["kv_events"].rpartition(":")[2]
    process.send_signal(number)
    rest, complaint = await process.communicate()
    assert (process.returncode, rest, complaint) == (0, b"", b"")


async def test_simulate_names_a_port_that_is_in_use_and_fails() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await _simulate("--port", str(port))
        out, complaint = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use".encode() in complaint


def _address(engine: SimulatedEngine) -> tuple[str, int]:
    return "127.0.0.1", int(engine.url.rpartition(":")[2])


def _boot(page: str) -> float:
    return next(float(line.split(" ")[1]) for line in page.splitlines() if line.startswith("process_start_time_seconds "))
