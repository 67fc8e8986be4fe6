"""A process of the bench that is told what to do, one JSON object a line, and answers likewise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.bench.contenders import REPOSITORY
from tests.bench.processes import BenchError

LINE_BYTES = 64 << 20


class Child:
    """Its other end."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name

    async def ask(self, do: str, **arguments: object) -> Any:  # noqa: ANN401  whatever JSON holds
        """What it answers to one command. Raises BenchError when it has ended."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        return json.loads(await self.hear())

    async def hear(self) -> bytes:
        """Its next line. Raises BenchError when there is none."""
        line = b"" if self._process.stdout is None else await self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self._name} ended; what it said is above")
        return line


@contextlib.asynccontextmanager
async def child(python: str | Path, module: str, *arguments: object) -> AsyncIterator[Child]:
    """`python -m module …` until the context ends; ready for its first command."""
    process = await asyncio.create_subprocess_exec(
        str(python),
        "-m",
        module,
        *map(str, arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        limit=LINE_BYTES,
    )
    try:
        made = Child(process, module)
        await made.hear()
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
