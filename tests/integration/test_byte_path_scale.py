"""Many requests, many streams, large prompts: nothing is left behind, and nothing waits that should not. Rows M2, M7 and S17."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import resource
import shutil
import sys
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from discovery.broker import Broker
from engines.simulator import text
from engines.types import EngineSpec
from router import app
from router.exchange import Exchange
from router.intake import Asked
from router.proxy import Trip
from router.relay import Relay
from router.settings import AdmissionSettings
from router.upstream import EngineConnection
from tests.raw import RawClient, Request, port_of, request, talking
from tests.raw_engine import DONE, SSE, Close, Hang, RawEngine, Reset, answering, chunk, never, streaming, token, whole
from tests.rig import Router, fleet, routing
from tests.waiting import until

KINDS = ("whole", "stream", "leaves before", "leaves within", "closed", "reset within", "500", "503")
WEIGHTS = (40, 30, 10, 5, 4, 4, 4, 3)


async def by_user(sent: Request, writer: asyncio.StreamWriter) -> None:
    """Answers as the request's `user` asks."""
    match json.loads(sent.body)["user"]:
        case "whole":
            writer.write(whole(b'{"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":1}}'))
        case "stream":
            writer.write(SSE + chunk(token(1)) + chunk(token(2) + DONE) + chunk(b""))
        case "leaves within":
            writer.write(SSE + chunk(token(1)))
            raise Hang
        case "closed":
            raise Close
        case "reset within":
            writer.write(SSE + chunk(token(1)))
            await writer.drain()
            raise Reset
        case "500":
            writer.write(whole(b"oops", status=b"500 Oops", kind=b"text/plain"))
        case "503":
            writer.write(whole(b'{"error":{}}', status=b"503 Busy", headers=b"retry-after: 0\r\n"))
        case _:
            raise Hang


class Crowd:
    """Clients that ask, and sometimes leave."""

    def __init__(self, router: Router, seed: int, kinds: tuple[str, ...] = KINDS, weights: tuple[int, ...] = WEIGHTS) -> None:
        self._kinds, self._weights = kinds, weights
        self._port = port_of(router.url)
        self._random = random.Random(seed)
        self.seen: Counter[str] = Counter()

    async def lane(self, count: int) -> None:
        """So many requests one after the other, on one connection while it lasts."""
        left = count
        while left:
            async with talking(self._port) as client:
                client.patience_s = 90
                while left:
                    left -= 1
                    if not await self._ask(client):
                        break

    async def _ask(self, client: RawClient) -> bool:
        (kind,) = self._random.choices(self._kinds, self._weights)
        prompt = [self._random.randrange(1000), *range(64)]
        await client.send(request("/v1/completions", msgspec.json.encode({"model": "sim", "user": kind, "prompt": prompt})))
        if kind == "leaves before":
            self.seen[kind] += 1
            await asyncio.sleep(self._random.uniform(0, 0.004))
            return False
        if kind == "leaves within":
            await client.read()
            self.seen[kind] += 1
            return False
        answer = await client.answer()
        self.seen[f"{kind} {answer.status} {'whole' if answer.whole else 'broken'}"] += 1
        return answer.whole and answer.headers.get("connection") != "close"


def resident_mb() -> float:
    with open("/proc/self/statm") as statm:  # noqa: PTH123  a line of the kernel's
        return int(statm.read().split()[1]) * resource.getpagesize() / 1e6


def alive(*kinds: type) -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))


async def at_rest(router: Router) -> None:
    """Wait until every table that follows requests is empty."""

    async def empty() -> bool:
        page = (await router.get("/metrics")).body.decode()
        tables = ("router_active_requests", "router_active_blocks", "router_active_prefill_tokens", "router_waiting")
        return all(line.endswith(" 0.0") for line in page.splitlines() if line.startswith(tables)) and "router_in_progress 1.0" in page

    await until(empty, what="every table is empty")


@pytest.mark.timeout(400)
async def test_M2_after_twenty_thousand_requests_with_many_that_failed_nothing_is_left_of_any() -> None:
    async with RawEngine(by_user) as one, RawEngine(by_user) as two, RawEngine(by_user) as three:
        engines = [EngineSpec(url=engine.url, block_size=16) for engine in (one, two, three)]
        patient = AdmissionSettings(max_wait_s=60)  # all three may have failed somebody at once, and then wait for a look at them
        async with routing(engines, predicted_ttl_s=2.0, admission=patient, probe_timeout_s=20.0) as router:
            sizes = []
            seen: Counter[str] = Counter()
            for part in range(4):
                crowd = Crowd(router, part)
                await asyncio.gather(*[crowd.lane(100) for _ in range(50)])
                seen += crowd.seen
                for engine in (one, two, three):
                    engine.requests.clear()
                await at_rest(router)
                sizes.append(resident_mb())
            assert seen.total() == 20_000
            unhappy = seen.total() - seen["whole 200 whole"] - seen["stream 200 whole"]
            assert unhappy > 0.25 * seen.total()
            assert {outcome for outcome in seen if outcome.startswith(("whole", "stream"))} == {"whole 200 whole", "stream 200 whole"}
            assert seen["reset within 200 broken"] > 100
            assert sizes[3] - sizes[1] < 4, sizes
            await until(lambda: one.answering + two.answering + three.answering == 0)
            assert alive(Exchange, Trip, Relay, Asked) == {}
            assert alive(EngineConnection)["EngineConnection"] < 100
            assert await router.metric("router_connections") == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_M2_no_request_leaves_a_reference_cycle_however_it_ends(kind: str) -> None:
    async with RawEngine(by_user) as engine, routing([engine.url], policy="round-robin") as router:
        crowd = Crowd(router, 0, (kind,), (1,))

        async def ask() -> None:
            await crowd.lane(1)
            await at_rest(router)

        await ask()  # what is made once
        gc.collect()
        gc.disable()
        try:
            await ask()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(thing).__name__ for thing in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not left & {"Exchange", "Trip", "Relay", "Asked", "EngineConnection", "ClientConnection", "Reservation"}, left


async def test_cycles_that_others_leave_do_not_wait_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a NATS client's, of each connection that it lost: they are old by then, and the collector rarely looks at what is old."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    monkeypatch.setattr(app, "COLLECT_PERIOD_S", 0.1)
    gc.disable()
    try:
        async with RawEngine(by_user) as engine, routing([engine.url], policy="round-robin"):
            left = weakref.ref(Cycle())
            await until(lambda: left() is None, what="the cycle to be found")
    finally:
        gc.enable()


@contextlib.asynccontextmanager
async def served(*flags: str) -> AsyncIterator[str]:
    """The router as a process of its own; its URL."""
    command = (str(Path(sys.executable).with_name("commutator")), "serve", "--host", "127.0.0.1", "--port", "0", *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        yield str(json.loads(await process.stdout.readline())["url"])
    finally:
        process.terminate()
        await process.wait()


async def seconds_for(url: str) -> float:
    """How long a good answer takes, as another process sees it that has nothing else to do; 0 when there is none."""
    command = ("curl", "--silent", "--fail", "--output", "/dev/null", "--write-out", "%{time_total}", url)
    curl = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await curl.communicate()
    return float(told) if curl.returncode == 0 else 0.0


@pytest.mark.timeout(300)
async def test_M7_two_thousand_slow_streams_leave_the_router_alive_and_prompt() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 9_000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    count, stop = 2_000, asyncio.Event()

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE)
        while not stop.is_set():
            writer.write(chunk(token(1)))
            await writer.drain()
            await asyncio.sleep(4.0)
        writer.write(chunk(DONE) + chunk(b""))

    async def stream(url: str) -> bool:
        async with talking(port_of(url)) as client:
            client.patience_s = 120
            await client.send(request("/v1/completions", b'{"model":"sim","stream":true,"prompt":"x"}'))
            await client.read_until(DONE)
            return (await client.read_until(b"0\r\n\r\n")).endswith(b"\r\n0\r\n\r\n")

    async with (
        RawEngine(script) as engine,
        served("--engine", engine.url, "--policy", "round-robin", "--log-level", "warning", "--connect-timeout-s", "100") as url,
    ):
        await until(lambda: seconds_for(url + "/ready"), what="the engine serves")
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(stream(url)) for _ in range(count)]
            await until(lambda: engine.answering == count, deadline_s=120, what="all streams run")
            took = [await seconds_for(url + path) for path in ["/health", "/metrics"] * 10]
            assert min(took) > 0
            assert max(took) < 1.0
            stop.set()
        assert all(task.result() for task in streams)
        await until(lambda: engine.answering == 0)


async def test_S17_a_prompt_of_200k_tokens_and_an_index_of_more_than_a_mebibyte_meet_no_limit_of_the_bus(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(text.__file__).parent / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 262_144}))
    bodies = [
        msgspec.json.encode({"model": "large", "max_tokens": 1, "prompt": [(turn + number) % 4000 for number in range(30_000)]})
        for turn in range(5)
    ]
    longest = msgspec.json.encode({"model": "long", "max_tokens": 1, "prompt": [number % 4000 for number in range(200_000)]})

    async def overlap(router: Router, body: bytes) -> int:
        answer = await router.post("/route?path=/v1/completions", body)
        return int(answer.json["overlap_tokens"]) if answer.status == 200 else 0

    broker = Broker()
    nats = await broker.start()
    try:
        async with (
            fleet(1, model=str(model), served_model_name="large", block_size=1, kv_blocks=200_000) as (large,),
            fleet(1, model=str(model), served_model_name="long", kv_blocks=20_000) as (long,),
            routing([large, long], nats=nats, namespace="s17", probe_timeout_s=20.0) as first,
        ):
            for body in [*bodies, longest]:
                assert (await first.post("/v1/completions", body)).status == 200
            tokens = [30_000] * 5 + [200_000]

            async def known_to(router: Router) -> bool:
                return [await overlap(router, body) // 100 * 100 for body in [*bodies, longest]] == tokens

            await until(lambda: known_to(first), deadline_s=60, what="the index has the prompts")
            async with routing([large, long], nats=nats, namespace="s17", probe_timeout_s=20.0) as second:
                await until(lambda: known_to(second), deadline_s=60, what="a second router has the same index")
                assert await second.metric("router_cached_blocks", engine=large.url) * 8 > 1 << 20
                again = await second.post("/v1/completions", longest, {"x-commutator-explain": "1"})
                assert (again.status, again.reason) == (200, "kv")
    finally:
        await broker.stop()


async def test_silence_before_the_first_byte_is_allowed_as_long_as_a_prefill_takes() -> None:
    async with RawEngine(never) as engine, routing([engine.url], policy="round-robin", stream_idle_timeout_s=0.2) as router:

        async def late(_: Request, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(1.0)
            writer.write(whole(b"{}"))

        engine.script = late
        assert (await router.post("/v1/completions", b'{"model":"sim"}')).status == 200
        engine.script = streaming([token(1)] * 5, gap_s=0.1)
        assert (await router.post("/v1/completions", b'{"model":"sim"}')).body == token(1) * 5
        engine.script = answering(whole(b"{}"))
        assert (await router.post("/v1/completions", b'{"model":"sim"}')).status == 200
