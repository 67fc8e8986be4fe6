"""Every command of the README is run, as it stands there but for ports: those the kernel chooses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

import commutator
from tests.waiting import until

ROOT = Path(commutator.__file__).parent
BIN = Path(sys.executable).parent


def commands() -> list[str]:
    """The README's commands, without the comments behind them."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s+# .*", "", line) for block in blocks for line in block.splitlines() if line]


def command(start: str) -> str:
    """The one command that begins so."""
    (found,) = [line for line in commands() if line.startswith(start)]
    return found


@contextlib.asynccontextmanager
async def started(line: str, cwd: Path = ROOT) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command of the README while the block runs, ended as Ctrl-C ends it; it must end well."""
    program, *arguments = shlex.split(line)
    path = BIN / program
    process = await asyncio.create_subprocess_exec(
        path if path.exists() else program, *arguments, cwd=cwd, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, f"{line}: {process.returncode}"


async def first_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 60)).decode()


async def test_the_readme_has_no_command_that_is_not_run_here() -> None:
    known = (
        "make run",
        "make test",
        "pip install .",
        "commutator serve --engine",
        "commutator simulate --engines 2",
        "commutator up --launch simulated",
        "commutator advise",
        "commutator replay",
        "commutator doctor",
        "curl ",
    )
    assert [line for line in commands() if not line.startswith(known)] == []
    assert len(commands()) == 15


@pytest.mark.parametrize("engines", ["", "named"])
async def test_make_run(engines: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        line = "make run PORT=0"
        if engines:
            simulator = await stack.enter_async_context(started("commutator simulate --engines 2 --port 0"))
            urls = [engine["url"] for engine in json.loads(await first_line(simulator))["engines"]]
            example = next(line for line in commands() if line.startswith("make run ENGINES"))
            line = re.sub(r'ENGINES=".*"', f'ENGINES="{" ".join(urls)}"', example) + " PORT=0"
        make = await asyncio.create_subprocess_exec(*shlex.split(line), cwd=ROOT, stdout=asyncio.subprocess.PIPE, start_new_session=True)
        assert make.stdout is not None
        said = b""
        async with asyncio.timeout(60):
            while b"Ctrl-C stops everything" not in said:
                piece = await make.stdout.readline()
                assert piece, said
                said += piece
        interrupt_group(make.pid)
        await asyncio.wait_for(make.communicate(), 60)
        counts = re.findall(rb"own count: (\d+) of", said)
        assert (int(counts[0]), int(counts[1]) > 0) == (0, True)


def interrupt_group(pid: int) -> None:
    """What a terminal does on Ctrl-C: the signal goes to the whole foreground group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGINT)


async def test_simulate_serve_and_every_curl() -> None:
    simulate = command("commutator simulate --engines 2 --port 9000").replace("--port 9000", "--port 0")
    async with started(simulate) as simulator:
        urls = [engine["url"] for engine in json.loads(await first_line(simulator))["engines"]]
        for example in [line for line in commands() if line.startswith("commutator serve")]:
            places = re.findall(r"http://127.0.0.1:\d+", example)
            for place, url in zip(places, urls, strict=True):
                example = example.replace(place, url, 1)  # noqa: PLW2901  filled in step by step
            async with started(example + " --host 127.0.0.1 --port 0") as router:
                base = json.loads(await first_line(router))["url"]
                await all_serve(base, len(urls))
                for curl in [line for line in commands() if line.startswith("curl")]:
                    await try_curl(curl.replace("http://127.0.0.1:8080", base))
                async with started(command("commutator doctor").replace("http://127.0.0.1:8080", base)) as doctor:
                    assert doctor.stdout is not None
                    said = (await asyncio.wait_for(doctor.stdout.read(), 60)).decode()
                assert {line.split()[0] for line in said.splitlines()} == {"ok"}, said


async def test_up(tmp_path: Path) -> None:
    async with started(f"{command('commutator up')} --host 127.0.0.1 --port 0 --log-folder {tmp_path}") as process:
        told = json.loads(await first_line(process))
        await all_serve(told["url"], 2)


async def test_advise() -> None:
    async with started(command("commutator advise")) as process:
        assert process.stdout is not None
        said = (await asyncio.wait_for(process.stdout.read(), 60)).decode()
    assert "262,144 bytes a token" in said
    assert "Disaggregation pays:" in said


async def test_replay() -> None:
    async with started(command("commutator replay")) as process:
        assert process.stdout is not None
        head, *rows = (await asyncio.wait_for(process.stdout.read(), 100)).decode().splitlines()
    assert head.split()[:2] == ["speed", "policy"]
    assert [row.split()[:2] for row in rows] == [[speed, policy] for speed in "12" for policy in ("kv", "round-robin")]


async def all_serve(base: str, engines: int) -> None:
    async with aiohttp.ClientSession() as session:

        async def ready() -> bool:
            async with session.get(base + "/ready") as answer:
                return engines in (await answer.json())["models"].values()

        await until(ready, deadline_s=30, what="the engines serve")


async def try_curl(line: str) -> None:
    program, *arguments = shlex.split(line)
    process = await asyncio.create_subprocess_exec(program, "--fail-with-body", "-sS", *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0, (line, out)
    if "explain" in line:
        assert b"x-commutator-reason:" in out
    if "/route" in line:
        assert len(json.loads(out)["candidates"]) == 2
    if "/metrics" in line:
        assert b"router_requests_total" in out


@pytest.mark.timeout(600)
async def test_U1_pip_install_in_a_fresh_environment_gives_a_command_that_serves_without_a_broker(tmp_path: Path) -> None:
    for line in (
        f"{sys.executable} -m venv {tmp_path}/venv",
        f"{tmp_path}/venv/bin/{command('pip install .')} --quiet",
    ):
        process = await asyncio.create_subprocess_exec(*shlex.split(line), cwd=ROOT)
        assert await process.wait() == 0, line
    async with started(f"{tmp_path}/venv/bin/commutator simulate --port 0", cwd=tmp_path) as simulator:
        url = json.loads(await first_line(simulator))["engines"][0]["url"]
        async with started(f"{tmp_path}/venv/bin/commutator serve --host 127.0.0.1 --port 0 --engine {url}", cwd=tmp_path) as router:
            await all_serve(json.loads(await first_line(router))["url"], 1)
