"""Commands of ours as processes of their own, as an operator starts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.rig import Answer, Router
from tests.waiting import until

COMMAND = Path(sys.executable).with_name("commutator")
DEADLINE_S = 60


class Process(Router):
    """A command that serves HTTP, and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, told: dict[str, Any], log: Path, session: aiohttp.ClientSession) -> None:
        super().__init__(told["url"], session, told.get("admin", ""))
        self.process = process
        self.log = log

    async def kill(self) -> None:
        """As a crash does."""
        self.process.kill()
        await self.process.wait()

    def lines(self, message: str) -> list[dict[str, Any]]:
        """What it has logged with this message."""
        return [line for line in map(_line, self.log.read_text().splitlines()) if line.get("message") == message]

    async def ready(self) -> Answer:
        return await self.get("/ready")


@contextlib.asynccontextmanager
async def command(name: str, *flags: str, log: Path, within_s: float = DEADLINE_S, **environ: str) -> AsyncIterator[Process]:
    """The command while the block runs, from its ready line on, which comes `within_s`; ended by SIGTERM, and well, unless it was killed."""
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            COMMAND,
            *(name, "--host", "127.0.0.1", "--port", "0", "--log-format", "json", "--probe-period-s", "0.2", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=os.environ | environ,
        )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), auto_decompress=False) as session:
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), within_s)
            assert line, log.read_text()
            yield Process(process, json.loads(line), log, session)
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), DEADLINE_S)
            except TimeoutError:
                process.kill()
                raise
    assert process.returncode in (0, -9), log.read_text()


async def fails(name: str, *flags: str, **environ: str) -> tuple[int, str]:
    """A command that cannot do what it was asked to: its exit code and what it says."""
    process = await asyncio.create_subprocess_exec(
        COMMAND, name, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | environ
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def is_ready(process: Process) -> None:
    async def answers() -> bool:
        return (await process.ready()).status == 200

    await until(answers, deadline_s=DEADLINE_S, what="it is ready")


def _line(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}
