"""Real vLLM engines, started and ended by plans while a client streams through a router."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import msgspec
import pytest

from engines.launch.plan import EngineName
from engines.launch.plan import Pool as LaunchPool
from engines.launch.ports import Held
from planner.settings import ActuatorName, PoolSettings
from planner.types import Target
from tests.engines import environments, programs
from tests.engines.programs import MODEL_NAME, VLLM
from tests.integration.nats_servers import nats_server
from tests.integration.test_planner import OPERATOR, TOKEN, planned
from tests.rig import Router, prompt, routing
from tests.waiting import until

pytestmark = [pytest.mark.real_engine]

START_S = 420.0
TOKENS = 150
CLIENTS = 6
"""More than one engine has room for, so that it is full however long the second takes to start."""


def pool() -> LaunchPool:
    """Engines whose KV cache holds four such requests, and no more."""
    setup = VLLM._replace(blocks=72, max_model_len=2048)
    ports = Held()
    try:
        launched = programs.vllm(setup).made(setup, ports.ports)
    finally:
        ports.close()
    argv = list(launched.argv)
    told = argv[argv.index("--served-model-name") :]
    env = {name: value for name, value in launched.environment.items() if os.environ.get(name) != value}
    return LaunchPool(
        name="vllm",
        engine=EngineName.VLLM,
        model=str(environments.ensure_model()),
        python=argv[0],
        env=env,
        arguments=tuple(told),
    )


async def streams(router: Router, name: str) -> None:
    """It comes whole, however long an engine that starts beside it makes it wait."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": prompt(name, 80)}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    patient, headers = aiohttp.ClientTimeout(total=None), {"content-type": "application/json"}
    url = f"{router.url}/v1/chat/completions"
    async with router.session.post(url, data=msgspec.json.encode(body), headers=headers, timeout=patient) as answer:
        whole = await answer.read()
    assert answer.status == 200, whole
    compact = whole.replace(b" ", b"").rstrip()
    assert compact.endswith(b"data:[DONE]"), whole[-1000:]
    assert b'"completion_tokens":%d' % TOKENS in compact, whole[-1000:]


async def test_real_engines_go_from_one_to_two_to_one_under_load_and_no_request_is_lost(tmp_path: Path) -> None:
    async with (
        nats_server(tmp_path) as nats,
        routing([], nats=nats.url, admin_token=TOKEN, probe_period_s=2.0, probe_timeout_s=5.0) as router,
        planned(
            nats.url,
            actuator=ActuatorName.PROCESS,
            target=Target.LOAD,
            decode_up=0.5,
            decode_down=0.3,
            prefill_up=1.0,
            load_interval_s=1.0,
            stabilise_s=30.0,
            pool=(pool(),),
            aggregated=PoolSettings(min=1, max=2, startup_s=60.0),
            router=(router.admin,),
            router_token=TOKEN,
            log_folder=str(tmp_path),
            drain_s=120.0,
        ) as page,
    ):

        async def there(count: int) -> bool:
            states = await page.states("vllm")
            return (states.get("ready"), states.get("draining")) == (count, 0)

        await until(lambda: there(1), deadline_s=START_S, what="the first engine is ready")
        busy, number = True, 0

        async def client() -> None:
            nonlocal number
            while busy:
                number += 1
                await streams(router, f"p{number}")

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())
            await until(lambda: there(2), deadline_s=START_S, what="the second engine is ready")
            await until(lambda: _both_asked(router), what="both serve")
            busy = False
        await streams(router, "last")
        await until(lambda: there(1), deadline_s=120.0, what="one is left")
        await streams(router, "after")


async def _both_asked(router: Router) -> bool:
    async with router.session.get(f"{router.admin}/admin/engines", headers=OPERATOR) as answer:
        engines = msgspec.json.decode(await answer.read())["engines"]
    return len([engine for engine in engines if engine["in_flight"] > 0]) == 2
