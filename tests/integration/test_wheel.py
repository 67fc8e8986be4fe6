"""What is released is a wheel: built, put into an environment with nothing else in it, does it serve?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 240
ROOMS = ("engines", "discovery", "router", "planner")


async def done(*command: str | Path, cwd: Path) -> str:
    """What a command says that must succeed. Nothing of this checkout is on its path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COMMUTATOR_"))}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 0, said.decode()
    return said.decode()


@contextlib.asynccontextmanager
async def started(*command: str | Path, cwd: Path) -> AsyncIterator[dict[str, Any]]:
    """A command of ours while the block runs; its ready line."""
    process = await asyncio.create_subprocess_exec(*command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        yield json.loads(await asyncio.wait_for(process.stdout.readline(), DEADLINE_S))
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), DEADLINE_S)


@pytest.mark.timeout(2 * DEADLINE_S)
async def test_U1_the_wheel_serves_from_an_environment_with_nothing_else_in_it(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    await done(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("commutator-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{room}/py.typed" for room in ROOMS} <= names
    assert {"commutator.py", "router/ui/index.html", "router/ui/page.js", "router/ui/page.css", "router/ui/plots.js"} <= names
    assert any(name.startswith("engines/simulator/model/") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "docs/"))]

    clean = tmp_path / "clean"
    await done(sys.executable, "-m", "venv", "--without-pip", clean, cwd=tmp_path)
    await done(*pip, "--python", clean / "bin" / "python", "install", wheel, cwd=tmp_path)
    command = clean / "bin" / "commutator"
    version = wheel.name.split("-")[1]
    assert (await done(command, "--version", cwd=tmp_path)).strip() == f"commutator {version}"
    async with contextlib.AsyncExitStack() as stack:
        simulated = await stack.enter_async_context(started(command, "simulate", "--port", "0", cwd=tmp_path))
        serve = ("serve", "--engine", simulated["engines"][0]["url"], "--host", "127.0.0.1", "--port", "0")
        router = await stack.enter_async_context(started(command, *serve, cwd=tmp_path))
        client = await stack.enter_async_context(aiohttp.ClientSession(router["url"]))

        async def ready() -> bool:
            async with client.get("/ready") as answer:
                return answer.status == 200

        await until(ready, deadline_s=60)
        async with client.post("/v1/completions", json={"model": "sim", "prompt": "Hello", "max_tokens": 1}) as answer:
            assert answer.status == 200


def test_the_version_is_written_in_one_place() -> None:
    line = next(line for line in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines() if line.startswith("version = "))
    version = line.split('"')[1]
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")] + [
        ROOT / "commutator.py",
        ROOT / "mkdocs.yml",
        ROOT / "Dockerfile",
    ]
    assert [path for path in sources if f'"{version}"' in path.read_text(encoding="utf-8")] == []
