"""What every test gets: uvloop, as in production, and an alarm for calls of ours that block it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import blockbuster
import pytest
import uvloop
from pytest_asyncio.plugin import LoopFactory

from discovery import logs
from tests.engines.fixtures import (  # noqa: F401  for all below
    arrange,
    early,
    engines,
    launched,
    mooncake_pair,
    nixl_pair,
    one_pair,
    real_sglang,
    real_vllm,
    real_vllm_pair,
    sglang_pair,
)

ROOMS = ["engines", "discovery", "router", "planner"]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    arrange(items)


@pytest.fixture(autouse=True)
def alarm_on_blocking_calls() -> Iterator[blockbuster.BlockBuster]:
    """Any blocking call made on a running loop, by a frame of ours, raises `BlockingError` where it is made."""
    with blockbuster.blockbuster_ctx(ROOMS) as alarm:
        for call in alarm.functions.values():
            call.can_block_in("tests/engines/launch.py", {"_members"})  # a test's own look at the processes of its engine
        yield alarm


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """For a test that configures logging, which is the process's own."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for room in logs.ROOMS:
        logging.getLogger(room).setLevel(logging.NOTSET)
