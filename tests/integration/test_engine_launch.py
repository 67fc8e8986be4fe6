"""How engines are started and ended, shown with a small HTTP server in the place of one."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import httpx
import pytest

from engines.launch.plan import Ports
from engines.launch.programs import Program as Launched
from engines.types import EngineSpec
from tests.engines.environments import REPOSITORY
from tests.engines.launch import EngineFailed, RealEngine, together
from tests.engines.programs import VLLM, Program, Setup
from tests.waiting import until

SERVER = """
import http.server, os, subprocess, sys
print("serving", sys.argv[1], flush=True)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"pids {os.getpid()} {worker.pid}\\n".encode() + b'hits_total{a="1"} 3\\nhits_total{a="2"} 4.0\\nhits_total_created 9\\nasked_total 10\\n'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


def program(source: str = SERVER) -> Program:
    def made(_: Setup, ports: Ports) -> Launched:
        url = f"http://127.0.0.1:{ports.http}"
        return Launched((sys.executable, "-c", source, str(ports.http)), dict(os.environ), EngineSpec(url))

    return Program("fake", VLLM, made, "/", hits="hits_total", queries="asked_total", running="none", waiting="none")


def pids(engine: RealEngine) -> list[int]:
    return [int(pid) for pid in engine.get("/").split()[1:3]]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_an_engine_restarts_in_place_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with RealEngine(program(), tmp_path) as engine:
        url, before = engine.url, pids(engine)
        engine.restart()
        after = pids(engine)
        assert engine.url == url
        assert not any(map(alive, before))
        assert all(map(alive, after))
        assert engine.log.read_text().count("serving") == 2
        engine.kill()
        assert not any(map(alive, after))
        engine.start()
        last = pids(engine)
    assert not any(map(alive, last))


def test_its_counters_are_sums_over_labels(tmp_path: Path) -> None:
    with RealEngine(program(), tmp_path) as engine:
        assert engine.counters() == (10, 7)
        assert engine.unfinished() == 0
        assert engine.memory_mb() > 5


def test_an_engine_that_ends_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="no room for KV"), RealEngine(program("import sys; sys.exit('no room for KV')"), tmp_path):
        pass


def test_an_engine_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    engine = RealEngine(program("import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"), tmp_path)
    engine.launch()
    with pytest.raises(EngineFailed, match=r"not ready within 0\.5 s"):
        engine.wait_ready(deadline_s=0.5)
    told = engine.log.read_text().split()
    assert not told or not alive(int(told[1]))
    engine.close()


def test_several_are_ended_when_one_of_them_fails(tmp_path: Path) -> None:
    good, bad = RealEngine(program(), tmp_path), RealEngine(program("raise SystemExit(1)"), tmp_path)
    with pytest.raises(EngineFailed), together([good, bad]):
        pass
    with pytest.raises((httpx.HTTPError, RuntimeError)):
        good.get("/")


RUN = """
import pathlib, sys, time
from tests.engines.launch import RealEngine
from tests.integration.test_engine_launch import pids, program
engine = RealEngine(program(), pathlib.Path(sys.argv[1])).start()
print(*pids(engine), flush=True)
time.sleep(600)
"""


async def test_an_engine_does_not_outlive_a_test_run_that_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, tmp_path, stdout=asyncio.subprocess.PIPE, env=environment)
    assert run.stdout is not None
    started = [int(pid) for pid in (await run.stdout.readline()).split()]
    assert len(started) == 2
    assert all(map(alive, started))
    run.kill()
    await run.wait()
    await until(lambda: not any(map(alive, started)), what="the engine and its worker are gone")
