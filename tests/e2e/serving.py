"""The router as a user runs it: the command `commutator serve`, in a process of its own, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME
from tests.rig import Answer, Router
from tests.waiting import until

COMMAND = Path(sys.executable).with_name("commutator")
STOP_DEADLINE_S = 40.0


class Served(Router):
    """A router process under test."""

    def __init__(self, url: str, session: aiohttp.ClientSession, log: Path, pid: int) -> None:
        super().__init__(url, session)
        self.log = log
        self.pid = pid

    def logged(self, **fields: object) -> list[dict[str, Any]]:
        """The log's lines that have all these fields."""
        lines = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return [line for line in lines if fields.items() <= line.items()]

    async def ask(self, text: str, *, chat: bool = True) -> Answer:
        """A chat or a completion of two tokens."""
        return await (self.chat(text, model=MODEL_NAME) if chat else self.complete(text, model=MODEL_NAME))

    async def overlap_tokens(self, engine: str, text: str) -> int:
        """Tokens of a chat's prompt that the router believes cached at an engine."""
        candidates = (await self.route(text, model=MODEL_NAME))["candidates"]
        return next(int(c["overlap"]["device"]) * int(c["block_size"]) for c in candidates if c["engine"] == engine)


@contextlib.asynccontextmanager
async def serve(engines: Sequence[RealEngine | str], log: Path, *flags: str, serving: int | None = None) -> AsyncIterator[Served]:
    """`commutator serve` in front of `engines`, once all of them (or `serving`) take requests. Ends it with SIGTERM.

    An engine of which more than its URL is to be said is given as a line: `http://…,role=prefill`.
    """
    arguments = [part for engine in engines for part in ("--engine", engine if isinstance(engine, str) else engine.url)]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            COMMAND, "serve", "--host", "127.0.0.1", "--port", "0", "--log-format", "json", *arguments, *flags,
            stdout=asyncio.subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
    try:
        url = await _ready(process, log)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), auto_decompress=False) as session:
            router = Served(url, session, log, process.pid)
            expected = len(engines) if serving is None else serving

            async def all_serve() -> bool:
                return await router.serving() >= expected

            await until(all_serve, deadline_s=30, what=f"{expected} engines serve")
            yield router
    finally:
        await _stop(process)


async def _ready(process: asyncio.subprocess.Process, log: Path) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        line = await process.stdout.readline()
    assert line, f"commutator serve ended:\n{log.read_text()}"
    return str(json.loads(line)["url"])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_DEADLINE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
