"""`commutator serve --processes N` as an operator starts it, for tests of several processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp

from engines.simulator.engine import SimulatedEngine
from tests.integration.commands import COMMAND, DEADLINE_S, Process
from tests.rig import Answer
from tests.waiting import until

TOKEN = "an-admin-token-for-tests"


class Group(Process):
    """A client of the group, each request on a connection of its own, so that the kernel chooses its process anew."""

    def __init__(self, process: asyncio.subprocess.Process, told: dict[str, Any], log: Path, session: aiohttp.ClientSession) -> None:
        super().__init__(process, told, log, session)
        self.told = told
        self._stopped = False

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Have it end; a second call does nothing, since a second signal means: at once."""
        if not self._stopped:
            self._stopped = True
            self.process.send_signal(by)

    def served(self) -> Counter[int]:
        """How many requests each process has logged."""
        return Counter(line["process"] for line in self.lines("request"))

    async def admin_call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with self.session.request(method, self.admin + path, json=body, headers=headers) as answer:
            return answer.status, json.loads(await answer.read())

    def workers(self) -> list[int]:
        """Process ids of the workers there are."""
        found = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if b"router.processes.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    async def through_all(self, count: int, text: str) -> list[Answer]:
        """Chats until each of `count` processes has served one that was asked here."""
        before, answers = self.served(), list[Answer]()

        async def ask() -> bool:
            answers.append(await self.chat(text))
            return len(self.served() - before) >= count

        await until(ask, deadline_s=DEADLINE_S, what=f"{count} processes served a request")
        return answers


@contextlib.asynccontextmanager
async def group(
    engines: Iterable[SimulatedEngine | str], log: Path, *flags: str, processes: int = 2, code: int = 0, trust: ssl.SSLContext | bool = True
) -> AsyncIterator[Group]:
    """The command while the block runs; ended by SIGTERM, and it must end with `code`. An engine may be a line, such as `http://…,role=decode`."""
    engines = list(engines)
    named = [part for engine in engines for part in ("--engine", engine if isinstance(engine, str) else engine.url)]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            COMMAND,
            *("serve", "--processes", str(processes), "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"),
            *("--probe-period-s", "0.2", "--log-format", "json", "--log-level", "info", *named, *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=os.environ | {"COMMUTATOR_ADMIN_TOKEN": TOKEN},
        )
    connector = aiohttp.TCPConnector(force_close=True, limit=0, ssl=trust)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=DEADLINE_S), auto_decompress=False
    ) as session:
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
            assert line, log.read_text()
            router = Group(process, json.loads(line), log, session)
            expected = len(engines)

            async def all_serve() -> bool:
                return await router.serving() >= expected

            await until(all_serve, deadline_s=DEADLINE_S, what=f"{expected} engines serve in every process")
            yield router
            router.stop()
            rest = await asyncio.wait_for(process.stdout.read(), DEADLINE_S)
            assert rest == b"", "more than one line on standard output"
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), DEADLINE_S)
            except TimeoutError:
                process.kill()
                raise
    assert process.returncode == code, log.read_text()


def alive(pid: int) -> bool:
    """Whether a process is there and more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Every process below one."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(below for child in children for below in descendants(child))]
