"""`make run`, as a newcomer meets it: the program behind it, on ports the kernel chooses."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import commutator

RUN = Path(commutator.__file__).parent / "scripts" / "run"
COUNTED = re.compile(r"by the engine's own count: (\d+) of (\d+) prompt tokens cached")


@contextlib.asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, RUN, "--port", "0", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


async def read_until(process: asyncio.subprocess.Process, mark: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(60):
        while not lines or mark not in lines[-1]:
            line = await process.stdout.readline()
            assert line, f"ended before {mark!r}: {lines}"
            lines.append(line.decode())
    return lines


async def test_the_second_time_a_prompt_is_found_in_a_cache_by_the_engines_own_count() -> None:
    async with running("--exit") as process:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    counts = [(int(cached), int(prompt)) for cached, prompt in COUNTED.findall(out.decode())]
    assert len(counts) == 2, out.decode()
    assert counts[0][0] == 0
    assert counts[1][0] >= counts[1][1] - 16, "all but the last block"


async def test_an_interrupt_stops_the_router_and_its_engines() -> None:
    async with running() as process:
        lines = await read_until(process, "Ctrl-C stops everything")
        urls = re.findall(r"http://127\.0\.0\.1:\d+(?=\s)", "".join(line for line in lines if line.startswith(("router:", "engines:"))))
        assert len(urls) == 3, lines
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    for url in urls:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)


async def test_a_port_in_use_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        serve = [str(Path(sys.executable).with_name("commutator")), "serve", "--host", "127.0.0.1", "--engine", "http://127.0.0.1:9"]
        process = await asyncio.create_subprocess_exec(*serve, "--port", port, "--log-level", "error", stderr=asyncio.subprocess.PIPE)
        _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    (line,) = err.decode().splitlines()
    assert line.startswith("commutator serve: error: ")
    assert port in line


async def test_a_command_that_cannot_start_ends_the_run_with_its_reason() -> None:
    async with running("--exit", "no-scheme:8000") as process:
        _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert err.decode().splitlines() == [
        "commutator serve: error: --engine: 'no-scheme:8000' has no scheme; write http://no-scheme:8000",
        "run: commutator serve ended with code 2",
    ]
