"""How is one engine started, watched, drained and ended? A process tree of its own, and the ports it keeps for its whole life.

    engine = LaunchedEngine(plan, folder)
    await engine.start()
    info = await engine.ready(session, told=show)     raises EngineNotStarted, saying why
    await engine.drained(session, within_s=60)        whoever routes to it has stopped before
    await engine.close()                              SIGTERM, then SIGKILL for what is left of the tree

However we end, it ends with us: see `leash`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from engines.client import EngineClient
from engines.errors import EngineError
from engines.launch import groups, log
from engines.launch.plan import EngineName, LaunchPlan
from engines.launch.ports import Held
from engines.launch.programs import Program, program
from engines.metrics import EngineLoad
from engines.probe import look, probe
from engines.types import EngineInfo, EngineSpec

LEASH: Final = Path(__file__).with_name("leash.py")
READY_WITHIN_S: Final = 1800.0
"""Weights may have to be downloaded first."""
STOP_WITHIN_S: Final = 20.0
GONE_WITHIN_S: Final = 15.0
POLL_S: Final = 0.25
ASK_TIMEOUT_S: Final = 5.0
TAIL_BYTES: Final = 64 * 1024
_SHELL_SIGNALS: Final = range(129, 129 + 64)


class EngineNotStarted(Exception):
    """The engine ended, or was not ready in time; the message says why, and where its log is."""


class Starting(msgspec.Struct, frozen=True):
    """How far an engine is."""

    name: str
    seconds: float
    """Since it was started."""
    says: str
    """The last line of its log."""


class LaunchedEngine:
    """One engine of this host, from `start` to `close`. It can be started again in place once it has ended."""

    def __init__(self, plan: LaunchPlan, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Its log is `<name>.log` in `folder`. Raises OSError when no ports are free, and BadPlan."""
        self.plan = plan
        self.log = folder / f"{plan.name}.log"
        self._held = Held(plan.data_parallel_size)
        self._clock = clock
        self._process: Process | None = None
        self._started = 0.0
        self._log_began = 0
        self._info: EngineInfo | None = None
        try:
            self.program: Program = program(plan, self._held.ports, dict(os.environ))
        except ValueError:
            self._held.close()
            raise

    @property
    def name(self) -> str:
        """The plan's."""
        return self.plan.name

    @property
    def spec(self) -> EngineSpec:
        """How routers are told of it."""
        return self.program.spec

    @property
    def pid(self) -> int | None:
        """Its process group; None when it does not run."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Its process runs; `ready` follows. Several that are started together share their start-up time. Raises OSError."""
        self._log_began = await asyncio.to_thread(self._size)
        file = await asyncio.to_thread(self.log.open, "ab")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(LEASH), *self.program.argv),
                env=self.program.environment,
                stdin=PIPE,  # held open: see the leash
                stdout=file,
                stderr=file,
                start_new_session=True,  # a group of its own, so that all of it can be ended, and not by a terminal's Ctrl-C
            )
        finally:
            file.close()
        self._started = self._clock()

    async def ready(
        self,
        session: aiohttp.ClientSession,
        *,
        within_s: float = READY_WITHIN_S,
        told: Callable[[Starting], None] = lambda _: None,
    ) -> EngineInfo:
        """It serves; what it says of itself. `told` hears each new thing its log says meanwhile. Raises EngineNotStarted, and has ended then."""
        client, said = EngineClient.of(session, self.spec, timeout_s=ASK_TIMEOUT_S), ""
        while True:
            try:
                self._info = await probe(client, self.spec)
            except EngineError as error:
                waiting_for = str(error)
            else:
                return self._info
            if await self._ends_within(POLL_S):
                raise EngineNotStarted(f"{self.name} {await self.ending()}")
            text, seconds = await self._text(), self._clock() - self._started
            if (says := log.latest(text)) != said:
                said = says
                told(Starting(self.name, seconds, says))
            if seconds > within_s:
                await self.stop(within_s=0)
                raise EngineNotStarted(f"{self.name} was not ready within {within_s:g} s ({waiting_for}); it says:\n{self._excerpt(text)}")

    async def ended(self) -> str:
        """Returns when its process has ended: how, and why as far as its log tells. What it may have left running is ended."""
        if self._process is None:
            return "was not started"
        await self._process.wait()
        await self._clear()
        return await self.ending()

    async def ending(self) -> str:
        """How a process that has ended did, in words."""
        text, code = await self._text(), None if self._process is None else self._process.returncode
        how = f"was ended by {_signal_name(code - 128)}" if code in _SHELL_SIGNALS and code is not None else f"ended with code {code}"
        if (missing := log.not_installed(text)) is not None and self.plan.engine is not EngineName.SIMULATED:
            python = self.program.argv[0]
            return (
                f"{how}: {missing} is not installed for {python}; pip install 'commutator[{missing}]' there, or name the Python that has it"
            )
        return f"{how}; it says:\n{self._excerpt(text)}"

    async def drained(self, session: aiohttp.ClientSession, *, within_s: float) -> bool:
        """Whether it has nothing running or waiting any more, by its own count; waited for. One that has ended has nothing."""
        client = EngineClient.of(session, self.spec, timeout_s=ASK_TIMEOUT_S)
        deadline = self._clock() + within_s
        while True:
            with contextlib.suppress(EngineError):
                info = self._info or await probe(client, self.spec)
                seen = await look(client, info)
                if seen.load and not any(map(_unfinished, seen.load.values())):
                    return True
            if await self._ends_within(POLL_S):
                return True
            if self._clock() >= deadline:
                return False

    async def stop(self, *, within_s: float = STOP_WITHIN_S) -> None:
        """Its process tree is gone: it was asked to end, and what had not after `within_s` was killed. It can be started again."""
        if self._process is None:
            return
        if within_s > 0:
            self.terminate()
            await self._ends_within(within_s)
        await self._clear()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = self._info = None

    def terminate(self) -> None:
        """Ask it to end; `stop` follows. Several that are asked together end together."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def close(self, *, within_s: float = STOP_WITHIN_S) -> None:
        """Stop it and give its ports back. Idempotent."""
        try:
            await self.stop(within_s=within_s)
        finally:
            self._held.close()

    # inside

    async def _ends_within(self, seconds: float) -> bool:
        if self._process is None:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
        return self._process.returncode is not None

    async def _clear(self) -> None:
        """Nothing of its process group lives."""
        if self._process is None:
            return
        group = self._process.pid
        deadline = self._clock() + GONE_WITHIN_S
        while self._clock() < deadline and await asyncio.to_thread(groups.lives, group):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            await asyncio.sleep(0.01)

    async def _text(self) -> str:
        return (await asyncio.to_thread(self._tail)).decode(errors="replace")

    def _tail(self) -> bytes:
        """What it has written since it was started, as far as it is of interest."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_began, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read()

    def _size(self) -> int:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        return self.log.stat().st_size if self.log.exists() else 0

    def _excerpt(self, text: str) -> str:
        lines = log.cause(text) or ["nothing"]
        return "\n".join(f"    {line}" for line in [*lines, f"(its log: {self.log})"])


def _unfinished(load: EngineLoad) -> float:
    return (load.running or 0) + (load.waiting or 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
