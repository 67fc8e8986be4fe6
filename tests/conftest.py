"""What every test gets: uvloop, as in production, and an alarm for calls of ours that block it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import blockbuster
import pytest
import uvloop
from pytest_asyncio.plugin import LoopFactory

ROOMS = ["engines", "discovery", "router", "planner"]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def alarm_on_blocking_calls() -> Iterator[blockbuster.BlockBuster]:
    """Any blocking call made on a running loop, by a frame of ours, raises `BlockingError` where it is made."""
    with blockbuster.blockbuster_ctx(ROOMS) as alarm:
        yield alarm
