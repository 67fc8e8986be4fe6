"""`commutator up`: engines and the router in front of them, started and ended as one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.commands import COMMAND, fails
from tests.rig import Router
from tests.waiting import until

PAIR = """
[[pool]]
name = "prefill"
engine = "simulated"
role = "prefill"

[[pool]]
name = "decode"
engine = "simulated"
role = "decode"
replicas = 2

[serve]
disagg = "always"
without_prefill = "enforce"
"""


class Up:
    """The command, and a client of its router."""

    def __init__(self, process: asyncio.subprocess.Process, told: dict[str, Any], log: Path, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.engines: list[dict[str, str]] = told.get("engines", [])
        self.planner: str = told.get("planner", "")
        self.router = Router(told["url"], session)
        self._log = log

    def lines(self, message: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self._log.read_text().splitlines())
        return [line for line in lines if line["message"] == message]


@contextlib.asynccontextmanager
async def up(folder: Path, *flags: str, ready_within_s: float = 90) -> AsyncIterator[Up]:
    """From its ready line on; ended by Ctrl-C, and well."""
    log = folder / "up.log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(str(COMMAND), "up", "--host", "127.0.0.1", "--port", "0", "--log-format", "json", *flags),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), ready_within_s)
        assert line, log.read_text()
        async with aiohttp.ClientSession() as session:
            yield Up(process, json.loads(line), log, session)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 60)
    assert process.returncode == 0, log.read_text()


def engines_in(folder: Path) -> list[int]:
    """Processes whose folder this is, as engines' are."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found


async def test_a_pair_serves_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "up.toml").write_text(PAIR)
    async with up(tmp_path, "--config", "up.toml") as running:
        assert [engine["name"] for engine in running.engines] == ["prefill-0", "decode-0", "decode-1"]
        await until(lambda: len(running.lines("engine serves")) == 3, what="all serve")
        answer = await running.router.chat("which part of this is whose? " * 20)
        assert answer.status == 200, answer.body
        assert answer.headers["x-commutator-prefill-engine"] == running.engines[0]["url"]
        assert answer.engine in {engine["url"] for engine in running.engines[1:]}
        assert all((tmp_path / engine["log"]).stat().st_size for engine in running.engines)
    assert engines_in(tmp_path) == []


async def test_an_engine_that_ends_is_started_again_in_its_place(tmp_path: Path) -> None:
    async with up(tmp_path, "--launch", "simulated", "--serve", '{"probe_period_s": 0.2}') as running:
        (engine,) = running.engines
        assert (await running.router.chat("hello")).engine == engine["url"]
        (simulator,) = [pid for pid in engines_in(tmp_path) if " simulate " in command_of(pid) and "leash" not in command_of(pid)]
        os.kill(simulator, signal.SIGKILL)
        await until(lambda: running.lines("engine ended; it is started again"), what="it is noticed")
        (line,) = running.lines("engine ended; it is started again")
        assert line["reason"].startswith("was ended by SIGKILL")
        await until(lambda: len(running.lines("engine serves")) == 2, what="it serves again")
        assert (await running.router.chat("hello")).engine == engine["url"]


async def test_an_engine_that_does_not_start_says_why_and_ends_the_others(tmp_path: Path) -> None:
    good = '{"name": "good", "engine": "simulated"}'
    bad = '{"name": "bad", "engine": "simulated", "arguments": ["--kv-blocks", "none"]}'
    code, said = await fails("up", "--pool", good, "--pool", bad, "--port", "0", "--log-folder", str(tmp_path))
    assert code == 1
    assert "bad-0 ended with code 2; it says:" in said
    assert "--kv-blocks: 'none' is not allowed" in said
    assert f"(its log: {tmp_path}/bad-0.log)" in said
    url = re.search(r"--port[ =](\d+)", said)
    assert url is None
    assert "up.toml" not in said


async def test_what_the_router_would_refuse_is_said_before_anything_is_started(tmp_path: Path) -> None:
    code, said = await fails("up", "--launch", "simulated", "--serve", '{"polcy": "kv"}', "--log-folder", str(tmp_path / "logs"))
    assert code == 2
    assert "[serve] unknown key polcy; did you mean 'policy'?" in said
    assert not (tmp_path / "logs").exists()


async def test_replicas_that_a_planner_could_not_keep_are_said_before_anything_is_started(tmp_path: Path) -> None:
    code, said = await fails("up", "--launch", "simulated", "--replicas", "9", "--plan", "{}", "--log-folder", str(tmp_path / "logs"))
    assert code == 2
    assert "begins with its `replicas`, 9, which is more than `aggregated.max`, 8" in said
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("pool", "limits"), [({}, {"min": 2, "max": 3}), ({"replicas": 2}, {"max": 3})])
async def test_with_a_planner_it_starts_the_engines_and_all_of_it_ends(
    tmp_path: Path, pool: dict[str, int], limits: dict[str, int]
) -> None:
    described = json.dumps({"name": "chat", "engine": "simulated"} | pool)
    async with up(tmp_path, "--pool", described, "--plan", json.dumps({"aggregated": limits})) as running:

        async def two() -> bool:
            return await running.router.serving() == 2

        await until(two, what="as many as the pool says, or the least")
        assert (await running.router.chat("hello")).status == 200
        async with running.router.session.get(running.planner + "/decisions") as answer:
            assert answer.status == 200
    assert engines_in(tmp_path) == []


async def test_ctrl_c_while_engines_start_ends_them(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho loading\nexec sleep 600\n")
    (tmp_path / "python").chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        *(COMMAND, "up", "--model", "m", "--python", str(tmp_path / "python"), "--port", "0"), cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    log = tmp_path / "commutator-logs" / "engine-0.log"
    await until(lambda: log.exists() and "loading" in log.read_text(), what="it starts")
    process.send_signal(signal.SIGINT)
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, said) == (0, b"")
    assert engines_in(tmp_path) == []


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
