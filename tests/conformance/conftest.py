"""The engines the suite is held against: simulated ones, and the real ones that `tests.engines.fixtures` starts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession, ClientTimeout

from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import SimulateSettings
from engines.types import EngineKind
from tests.conformance.wire import Client, Engine, EventFeed

ENGINES = [
    "simulated_vllm",
    "simulated_sglang",
    pytest.param("real_vllm", marks=pytest.mark.real_engine),
    pytest.param("real_sglang", marks=pytest.mark.real_engine),
]


@pytest.fixture
async def simulated_vllm() -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine(SimulateSettings(port=0, kind=EngineKind.VLLM, kv_topic="kv-events")) as engine:
        yield engine


@pytest.fixture
async def simulated_sglang() -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine(SimulateSettings(port=0, kind=EngineKind.SGLANG, kv_topic="kv-events", load_feed=True)) as engine:
        yield engine


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[Client]:
    async with ClientSession(timeout=ClientTimeout(total=60)) as session:
        yield await Client.of(engine, session)


@pytest.fixture
async def feed(engine: Engine, client: Client) -> AsyncIterator[EventFeed]:
    async with EventFeed(engine) as feed:
        await feed.hear(client)
        yield feed
