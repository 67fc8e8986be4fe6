"""Who is compared, and how is each started? Every router as its documentation says, with what this load needs and nothing tuned.

All stand in front of the same upstream engines, but for Dynamo's frontend, which serves only workers of its own runtime: it gets its
mocker, as fast as it goes. What is counted is the router and whatever it starts (Commutator's NATS server), never the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import msgspec

from tests.bench.processes import BenchError, running, tail
from tests.engines import environments, programs
from tests.engines.launch import RealEngine

REPOSITORY = Path(__file__).resolve().parent.parent.parent
READY_WITHIN_S = 90.0


class UpstreamEngine(msgspec.Struct, frozen=True):
    """Where an engine and its KV events are."""

    url: str
    events: str
    replay: str


class Upstream(msgspec.Struct, frozen=True):
    """The engines behind every router."""

    engines: tuple[UpstreamEngine, ...]
    model: str
    folder: str
    """Of the model's tokenizer."""
    block_size: int = 16

    @property
    def urls(self) -> list[str]:
        """Where the engines are."""
        return [engine.url for engine in self.engines]


class Contender(msgspec.Struct, frozen=True):
    """A router that runs and answers."""

    name: str
    url: str
    pid: int
    """Whose process tree is counted; 0 for the engines themselves."""
    planned: bool = True
    """Whether the upstream's plan decides its answers (Dynamo's mocker makes its own)."""


class Place(msgspec.Struct, frozen=True):
    """Where a bench runs."""

    folder: Path
    """For logs and whatever the routers keep."""
    upstream: Upstream
    client: aiohttp.ClientSession

    def log(self, name: str) -> Path:
        """The log of a program."""
        return self.folder / f"{name}.log"


Start = Callable[[Place], AbstractAsyncContextManager[Contender]]


def commutator(policy: str, processes: int = 1) -> Start:
    """Ours, from the environment that this runs in."""
    called = "commutator" if processes == 1 else f"commutator --processes {processes}"

    @contextlib.asynccontextmanager
    async def start(place: Place) -> AsyncIterator[Contender]:
        name = f"commutator-{policy}-{processes}"
        flags = [part for url in place.upstream.urls for part in ("--engine", url)]
        command: list[str | Path] = [Path(sys.executable).with_name("commutator"), "serve", "--host", "127.0.0.1", "--port", "0"]
        command += ["--policy", policy, "--processes", str(processes), *flags]
        async with running(command, place.log(name), says_where=True) as program:
            url = msgspec.json.decode(program.first_line.encode(), type=dict[str, object])["url"]
            contender = Contender(called, str(url), program.pid)
            await _answers(place, contender, program.log)
            await _all_joined(place, contender)
            yield contender

    return start


def vllm_router(policy: str) -> Start:
    """The vLLM project's router."""

    @contextlib.asynccontextmanager
    async def start(place: Place) -> AsyncIterator[Contender]:
        port = free_port()
        command: list[str | Path] = [peer("vllm-router") / "bin" / "vllm-router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port()), "--policy", policy, "--max-concurrent-requests", "4096"]
        command += ["--worker-urls", *place.upstream.urls]
        if policy == "kv_aware":
            # Told, not found out: asking these workers itself, this release found none of their blocks (every look-up a miss).
            command += ["--kv-event-block-size", str(place.upstream.block_size), "--kv-event-model", place.upstream.model]
            for engine in place.upstream.engines:
                command += ["--kv-event-source", f"{engine.url}={engine.events}"]
                command += ["--kv-event-replay-source", f"{engine.url}={engine.replay}"]
        name = "vllm-router" if policy == "round_robin" else f"vllm-router {policy}"
        async with running(command, place.log(name.replace(" ", "-"))) as program:
            contender = Contender(name, f"http://127.0.0.1:{port}", program.pid)
            await _answers(place, contender, program.log)
            yield contender

    return start


@contextlib.asynccontextmanager
async def sglang_router(place: Place) -> AsyncIterator[Contender]:
    """The SGLang project's router, round-robin."""
    port = free_port()
    command: list[str | Path] = [peer("sglang-router") / "bin" / "sglang-router", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "round_robin", "--worker-urls", *place.upstream.urls]
    async with running(command, place.log("sglang-router")) as program:
        contender = Contender("sglang-router", f"http://127.0.0.1:{port}", program.pid)
        await _answers(place, contender, program.log)
        yield contender


@contextlib.asynccontextmanager
async def dynamo(place: Place) -> AsyncIterator[Contender]:
    """Dynamo's frontend in KV mode, with two of its mock workers."""
    python, port = peer("dynamo") / "bin" / "python", free_port()
    environment = {"DYN_FILE_KV": str(place.folder / "dynamo"), "HF_HUB_OFFLINE": "1"}
    planes = ["--discovery-backend", "file", "--event-plane", "zmq"]
    mocker: list[str | Path] = [
        python,
        "-m",
        "dynamo.mocker",
        "--model-path",
        place.upstream.folder,
        "--model-name",
        place.upstream.model,
        *planes,
    ]
    mocker += ["--num-workers", str(len(place.upstream.engines)), "--block-size", "16", "--speedup-ratio", "0"]
    frontend: list[str | Path] = [
        python,
        "-m",
        "dynamo.frontend",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(port),
        "--router-mode",
        "kv",
        *planes,
    ]
    frontend += ["--kv-cache-block-size", "16"]
    async with (
        running(mocker, place.log("dynamo-mocker"), environment=environment),
        running(frontend, place.log("dynamo"), environment=environment) as program,
    ):
        contender = Contender("dynamo", f"http://127.0.0.1:{port}", program.pid, planned=False)
        await _answers(place, contender, program.log)
        yield contender


@contextlib.asynccontextmanager
async def direct(place: Place) -> AsyncIterator[Contender]:
    """No router: the first of the engines."""
    yield Contender("direct", place.upstream.urls[0], 0)


@contextlib.asynccontextmanager
async def upstream(folder: Path) -> AsyncIterator[Upstream]:
    """The engines."""
    async with running([sys.executable, "-m", "tests.bench.upstream"], folder / "upstream.log", says_where=True) as program:
        yield msgspec.json.decode(program.first_line.encode(), type=Upstream)


@contextlib.asynccontextmanager
async def real_vllm(folder: Path) -> AsyncIterator[Upstream]:
    """One stock vLLM on the CPU, with a model of a few thousand weights."""
    engine = RealEngine(programs.vllm(), folder)
    try:
        await asyncio.to_thread(engine.start)
        where = UpstreamEngine(engine.url, engine.kv_events, engine.kv_replay)
        yield Upstream((where,), programs.MODEL_NAME, str(environments.ensure_model()), engine.block_size)
    finally:
        await asyncio.to_thread(engine.close)


def peer(name: str) -> Path:
    """Where `scripts/peers` has installed one. Raises BenchError."""
    home = os.environ.get("COMMUTATOR_ENGINES_DIR") or REPOSITORY / ".engines"
    folder = Path(home) / f"peers-{name}"
    if not (folder / ".complete").exists():
        raise BenchError(f"{name} is not installed; run scripts/peers")
    return folder


def free_port() -> int:
    """A port that was free a moment ago, for programs that cannot be told to choose one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _answers(place: Place, contender: Contender, log: Path) -> None:
    """Wait until a chat is answered, whole and as a stream."""
    asked = {"model": place.upstream.model, "stream": True, "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
    last = "nothing"
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                try:
                    async with client_post(place, contender, asked) as answer:
                        body = await answer.text()
                        last = f"{answer.status}: {body[:300]}"
                        if answer.status == 200 and body.rstrip().endswith("data: [DONE]"):
                            return
                except aiohttp.ClientError as error:
                    last = str(error)
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise BenchError(f"{contender.name} does not answer; it said {last}\n{tail(log)}") from None


def client_post(place: Place, contender: Contender, body: dict[str, object]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Ask a router for a chat."""
    return place.client.post(f"{contender.url}/v1/chat/completions", json=body)


async def _all_joined(place: Place, contender: Contender) -> None:
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            async with place.client.get(f"{contender.url}/ready") as answer:
                if (await answer.json())["models"].get(place.upstream.model) == len(place.upstream.engines):
                    return
            await asyncio.sleep(0.1)
