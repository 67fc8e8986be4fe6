"""How the router's process ends: in order on the first signal, at once on the second."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import aiohttp

from engines.simulator.engine import SimulatedEngine
from tests.rig import Router, settings_of
from tests.waiting import until


async def test_a_second_interrupt_does_not_wait_for_requests_in_flight() -> None:
    async with SimulatedEngine(settings_of(speedup=1, decode_step_ms=200)) as engine, aiohttp.ClientSession() as session:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "commutator", "serve", "--engine", engine.url, "--host", "127.0.0.1", "--port", "0", "--grace-period-s", "600"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            router = Router(json.loads(await process.stdout.readline())["url"], session)

            async def serves() -> bool:
                return await router.serving() == 1

            await until(serves, deadline_s=30, what="the engine serves")
            stream = await router.begin("x", stream=True, max_tokens=10_000)
            process.send_signal(signal.SIGINT)

            await until(router.refuses, deadline_s=30, what="no new connection is accepted")
            assert process.returncode is None
            assert engine.running == 1
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 30) != 0
            stream.close()
            await until(lambda: engine.running == 0, what="the engine sees the stream end")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
