"""An engine of this host, from its start to its end: simulated ones, and small programs in the place of those that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from engines.launch import groups
from engines.launch.engine import EngineNotStarted, LaunchedEngine, Starting
from engines.launch.plan import EngineName, LaunchPlan
from engines.types import Connector, Role
from tests.engines.environments import REPOSITORY
from tests.waiting import until

EngineOf = Callable[[LaunchPlan], LaunchedEngine]
SIMULATED = LaunchPlan(name="sim-0", engine=EngineName.SIMULATED)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as made:
        yield made


@pytest.fixture
async def engine_of(tmp_path: Path) -> AsyncIterator[Callable[[LaunchPlan], LaunchedEngine]]:
    """Engines, all ended at the end."""
    made: list[LaunchedEngine] = []

    def make(plan: LaunchPlan) -> LaunchedEngine:
        made.append(LaunchedEngine(plan, tmp_path))
        return made[-1]

    yield make
    for engine in made:
        await engine.close(within_s=5)


def in_place_of_vllm(tmp_path: Path, source: str) -> LaunchPlan:
    """A plan whose Python, whatever it is told to run, does this instead."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{source}")
    python.chmod(0o755)
    return LaunchPlan(name="vllm-0", model="m", python=str(python))


async def test_an_engine_starts_serves_and_is_gone_at_the_end(engine_of: EngineOf, session: aiohttp.ClientSession) -> None:
    told: list[Starting] = []
    engine = engine_of(SIMULATED)
    await engine.start()
    info = await engine.ready(session, told=told.append)
    assert info.id == engine.spec.url
    assert info.kv_sources
    group = engine.pid
    assert group is not None
    assert len(await members(group)) == 2, "the engine and its leash"
    assert await engine.drained(session, within_s=30)
    await engine.close()
    assert engine.pid is None
    assert await members(group) == []
    assert "http://127.0.0.1" in engine.log.read_text()
    assert told


async def test_it_is_started_again_on_the_same_port(engine_of: EngineOf, session: aiohttp.ClientSession) -> None:
    engine = engine_of(SIMULATED)
    await engine.start()
    first = await engine.ready(session)
    await engine.stop()
    await engine.start()
    second = await engine.ready(session)
    assert first.id == second.id
    assert first.boot != second.boot


@pytest.mark.parametrize("connector", [None, Connector.MOONCAKE])
async def test_a_pair_knows_how_it_hands_over(engine_of: EngineOf, session: aiohttp.ClientSession, connector: Connector | None) -> None:
    roles = (Role.PREFILL, Role.DECODE)
    engines = [engine_of(LaunchPlan(name=f"{role}-0", engine=EngineName.SIMULATED, role=role, connector=connector)) for role in roles]
    for engine in engines:
        await engine.start()
    prefill, decode = [await engine.ready(session) for engine in engines]
    assert (prefill.role, decode.role) == roles
    assert prefill.exchange == decode.exchange
    assert prefill.exchange is not None


async def test_work_in_progress_is_waited_for(engine_of: EngineOf, session: aiohttp.ClientSession) -> None:
    engine = engine_of(LaunchPlan(name="slow-0", engine=EngineName.SIMULATED, arguments=("--decode-step-ms", "50")))
    await engine.start()
    await engine.ready(session)
    body = {"model": "sim", "prompt": "a", "max_tokens": 40, "stream": True}
    async with session.post(f"{engine.spec.url}/v1/completions", json=body) as answer:
        await answer.content.readany()
        assert not await engine.drained(session, within_s=0)
        drained = asyncio.create_task(engine.drained(session, within_s=30))  # noqa: TID251  awaited below
        assert b"[DONE]" in await answer.content.read()
        assert await drained


async def test_why_it_did_not_start_is_said(engine_of: EngineOf, tmp_path: Path, session: aiohttp.ClientSession) -> None:
    source = (
        "import sys\n"
        "sys.stderr.write('\\x1b[36m(EngineCore pid=7)\\x1b[0m ERROR 11-30 01:00:00 [core.py:10] ValueError: no room for KV\\n')\n"
        "sys.stderr.write('(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.\\n')\n"
        "sys.exit(3)\n"
    )
    engine = engine_of(in_place_of_vllm(tmp_path, source))
    await engine.start()
    with pytest.raises(EngineNotStarted) as failed:
        await engine.ready(session)
    said = str(failed.value).splitlines()
    assert said == ["vllm-0 ended with code 3; it says:", "    ValueError: no room for KV", f"    (its log: {engine.log})"]


@pytest.mark.parametrize(
    ("python", "why"),
    [
        (None, r"vllm is not installed for .*; pip install 'commutator\[vllm\]' there"),
        ("/no/such/python", "/no/such/python: No such file"),
    ],
)
async def test_an_engine_that_is_not_there_is_named(
    engine_of: EngineOf, session: aiohttp.ClientSession, python: str | None, why: str
) -> None:
    engine = engine_of(LaunchPlan(name="vllm-0", model="m", python=python))
    await engine.start()
    with pytest.raises(EngineNotStarted, match=why):
        await engine.ready(session)


WITH_A_WORKER = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


async def test_one_that_is_never_ready_is_ended_with_all_it_started(
    engine_of: EngineOf, tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    engine = engine_of(in_place_of_vllm(tmp_path, WITH_A_WORKER))
    group = await running(engine)
    with pytest.raises(EngineNotStarted, match=r"not ready within 0 s \(.*refused.*\)"):
        await engine.ready(session, within_s=0)
    assert await members(group) == []


async def test_one_that_is_killed_says_by_what_and_leaves_no_worker(engine_of: EngineOf, tmp_path: Path) -> None:
    engine = engine_of(in_place_of_vllm(tmp_path, WITH_A_WORKER))
    group = await running(engine)
    os.kill(int(engine.log.read_text().split()[1]), signal.SIGKILL)
    assert (await engine.ended()).startswith("was ended by SIGKILL")
    assert await members(group) == []


async def running(engine: LaunchedEngine) -> int:
    """Start it; the process group, once its worker runs too."""
    await engine.start()
    group = engine.pid
    assert group is not None

    async def complete() -> bool:
        return len(await members(group)) == 3 and "pid" in engine.log.read_text()

    await until(complete, what="its leash, it and its worker run")
    return group


async def members(group: int) -> list[Path]:
    return await asyncio.to_thread(groups.members, group)


RUN = """
import asyncio, pathlib, sys
from engines.launch.engine import LaunchedEngine
from engines.launch.plan import EngineName, LaunchPlan
async def main():
    engine = LaunchedEngine(LaunchPlan(name="sim-0", engine=EngineName.SIMULATED), pathlib.Path(sys.argv[1]))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_it_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, tmp_path, stdout=asyncio.subprocess.PIPE, env=environment)
    assert run.stdout is not None
    group = int(await run.stdout.readline())

    async def both() -> bool:
        return len(await members(group)) == 2

    async def none() -> bool:
        return not await members(group)

    await until(both, what="the engine and its leash run")
    run.kill()
    await run.wait()
    await until(none, what="they are gone")
