"""The guards as an operator meets them: the command, its environment, its one line, its signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.rig import fleet
from tests.waiting import until

COMMAND = Path(sys.executable).with_name("commutator")
TOKEN = "an-admin-token-for-tests"


@contextlib.asynccontextmanager
async def serving(*flags: str, log: Path, **environ: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """`commutator serve`, and what it says when it is ready; ended by SIGTERM, and well."""
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            COMMAND,
            "serve",
            *("--host", "127.0.0.1", "--port", "0", "--log-level", "debug", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=os.environ | environ,
        )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, log.read_text()
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)
    assert process.returncode == 0, log.read_text()


async def test_one_variable_opens_the_admin_api_and_engines_can_be_named_there_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with (
        fleet(1) as (engine,),
        aiohttp.ClientSession() as session,
        serving("--admin-port", "0", log=log, COMMUTATOR_ADMIN_TOKEN=TOKEN) as (_, told),
    ):
        admin = told["admin"] + "/admin/engines"
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with session.get(admin, headers=headers) as listed:
            assert await listed.json() == {"engines": []}
        async with session.post(admin, json={"url": engine.url}, headers=headers) as added:
            assert added.status == 201

        async def ready() -> bool:
            async with session.get(told["url"] + "/ready") as answer:
                return answer.status == 200

        await until(ready, what="the engine serves")
    assert TOKEN not in log.read_text()


async def test_a_hangup_has_keys_read_again_and_ends_nothing(tmp_path: Path) -> None:
    keys, log = tmp_path / "keys", tmp_path / "log"
    keys.write_text("alice:sk-1\n")
    async with (
        fleet(1) as (engine,),
        aiohttp.ClientSession() as session,
        serving("--engine", engine.url, "--api-keys-file", str(keys), log=log) as (process, told),
    ):
        assert "admin" not in told

        async def status(key: str) -> int:
            async with session.get(told["url"] + "/v1/models", headers={"x-api-key": key}) as answer:
                return answer.status

        assert [await status(key) for key in ("sk-1", "sk-2")] == [200, 401]
        stat = keys.stat()
        keys.write_text("alice:sk-2\n")
        os.utime(keys, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # it does not look changed
        process.send_signal(signal.SIGHUP)

        async def changed() -> bool:
            return [await status(key) for key in ("sk-1", "sk-2")] == [401, 200]

        await until(changed, what="the keys are the new ones")
        assert process.returncode is None
    assert "sk-1" not in log.read_text()
    assert "sk-2" not in log.read_text()


async def test_a_guard_that_cannot_be_used_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        COMMAND, "serve", "--engine", "http://127.0.0.1:9", "--api-keys-file", str(tmp_path / "none"),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (2, b"")
    assert err.decode().strip().startswith("commutator serve: error: ")
    assert str(tmp_path / "none") in err.decode()
