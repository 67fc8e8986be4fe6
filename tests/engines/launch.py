"""How does a test get a real engine? A stock vLLM or SGLang server on the CPU, started, watched and ended from here.

    with RealEngine(programs.vllm(Setup(blocks=560)), log_folder) as engine:
        engine.url, engine.kv_events   # the same ports for the object's whole life: restart() is a restart in place
        engine.counters()              # what the engine itself says it found in its cache

As `engines.launch` does it, of which the parts that are not asynchronous are used here: fixtures live longer than any test's loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import httpx

from engines.launch import groups
from engines.launch.engine import LEASH
from engines.launch.ports import Held
from tests.engines.programs import Program

READY_DEADLINE_S = 480.0
"""An engine alone on two quiet cores is ready in 25 (vLLM) or 45 s (SGLang); beside much other work 230 s were seen. One that ends is noticed at once."""
POLL_S = 0.2
STOP_GRACE_S = 15.0


class Cached(NamedTuple):
    """The engine's own count of prompt tokens since it started."""

    queries: float
    hits: float

    def __sub__(self, earlier: Cached) -> Cached:
        return Cached(self.queries - earlier.queries, self.hits - earlier.hits)


class EngineFailed(Exception):
    """The engine ended, or was not ready in time; the message carries the tail of its log."""


class RealEngine:
    """One engine process tree and its ports."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self._held = Held(program.setup.ranks)
        self._ports = self._held.ports
        self.log = folder / f"{program.kind}-{self._ports.http}.log"
        self._process: subprocess.Popen[bytes] | None = None
        # one client for all: making one reads the certificates of the world, which takes 50 ms of CPU
        # a connection is used once: an engine closes one that has been idle for 5 s, which it may be on a busy machine just as it is used
        self._client = httpx.Client(base_url=self.url, timeout=60, trust_env=False, headers={"connection": "close"})

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
        made = self.program.made(self.program.setup, self._ports)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", LEASH, *made.argv],
                env=made.environment,
                stdin=subprocess.PIPE,  # held open: see the leash
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                start_new_session=True,  # a group of its own, so that kill() reaches the workers
            )

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Return when the engine serves. Raises EngineFailed."""
        end = time.monotonic() + deadline_s
        while not self._answers(self.program.ready_path):
            if self._ended_within(POLL_S):
                raise EngineFailed(f"{self.kind} ended before it was ready:\n{self.log_tail()}")
            if time.monotonic() > end:
                self.kill()
                raise EngineFailed(f"{self.kind} was not ready within {deadline_s:g} s:\n{self.log_tail()}")

    def start(self) -> Self:
        """Launch and wait."""
        self.launch()
        self.wait_ready()
        return self

    def terminate(self) -> None:
        """Ask it to end; `stop` follows. Several engines asked together end together."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def stop(self) -> None:
        """End it as an operator would: SIGTERM, and SIGKILL for what is left."""
        if self._process is None:
            return
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the whole process tree at once, as a crash or the kernel would."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        end = time.monotonic() + STOP_GRACE_S
        while self._members() and time.monotonic() < end:
            time.sleep(0.01)  # noqa: TID251  whoever is killed is gone a moment later, and nothing tells us but looking
        self._process = None

    def restart(self) -> None:
        """Stop and start in place: the same ports, an empty cache, event sequence numbers from zero."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop it and give its ports back."""
        self.stop()
        self._client.close()
        self._held.close()

    def get(self, path: str) -> bytes:
        """The body of a GET. Raises httpx.HTTPError, also for an answer that is an error."""
        return self._client.get(path).raise_for_status().content

    def post(self, path: str, body: object) -> bytes:
        """The body of the answer to a POST of JSON. Raises httpx.HTTPError, also for an answer that is an error."""
        return self._client.post(path, json=body).raise_for_status().content

    def metrics(self, *names: str) -> list[float]:
        """The sum of each metric's samples on the engine's own page; 0 where it has none."""
        lines = self.get("/metrics").decode().splitlines()
        # a parser takes 50 ms for an engine's page, and tests read it hundreds of times
        return [sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} "))) for name in names]

    def counters(self) -> Cached:
        """The engine's own count of cache hits."""
        return Cached(*self.metrics(self.program.queries, self.program.hits))

    def unfinished(self) -> float:
        """Requests the engine is running or has waiting, by its own count."""
        return sum(self.metrics(self.program.running, self.program.waiting))

    def memory_mb(self) -> float:
        """Proportional memory of the process tree now."""
        if self._process is None:
            return 0.0
        return sum(map(_proportional_kb, self._members())) / 1024

    def cpu_s(self) -> float:
        """CPU time that the process tree has had, of those processes that live."""
        return sum(map(_cpu_s, self._members())) if self._process is not None else 0.0

    def log_tail(self, lines: int = 60) -> str:
        """The end of what the engine wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _members(self) -> list[Path]:
        """The process group, as folders of /proc."""
        assert self._process is not None
        return groups.members(self._process.pid)

    def _answers(self, path: str) -> bool:
        try:
            self.get(path)
        except httpx.HTTPError:
            return False
        return True

    def _ended_within(self, seconds: float) -> bool:
        if self._process is None:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


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


def _cpu_s(process: Path) -> float:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _proportional_kb(process: Path) -> int:
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
