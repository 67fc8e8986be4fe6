"""The real engines that tests share. Each starts when the first test asks for it and serves until the last test is over.

Starting one takes half a minute of two cores, so a test takes the shared ones and leaves them serving, whatever it does to them in between.
Prompts of a test must be its own: the engines remember those of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.engines import launch, prefixes, programs
from tests.engines.launch import RealEngine
from tests.engines.programs import VLLM

TIMEOUT_S = 900
"""The first test that asks for an engine waits for its start, and on a fresh machine for its environment."""


def arrange(items: list[pytest.Item]) -> None:
    """Tests with real engines go last, so that whatever is wrong without them is seen first, and are given the time they need."""
    real = [item for item in items if item.get_closest_marker("real_engine")]
    for item in real:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    items.sort(key=lambda item: item in real)


@pytest.fixture(scope="session")
def real_vllm_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[RealEngine]]:
    """Two vLLM engines, each with room for about 7 of the 12 prefixes."""
    folder = tmp_path_factory.mktemp("vllm")
    setup = VLLM._replace(blocks=prefixes.blocks_for(prefixes.ROOM, VLLM.block_size))
    with launch.together([RealEngine(programs.vllm(setup), folder) for _ in range(2)]) as engines:
        yield engines


@pytest.fixture(scope="session")
def real_vllm(real_vllm_pair: Sequence[RealEngine]) -> RealEngine:
    """One vLLM engine."""
    return real_vllm_pair[0]


@pytest.fixture(scope="session")
def real_silent_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """A vLLM engine that was started without KV events."""
    with RealEngine(programs.vllm(VLLM._replace(kv_events=False)), tmp_path_factory.mktemp("silent-vllm")) as engine:
        yield engine


@pytest.fixture(scope="session")
def real_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """One SGLang engine."""
    with RealEngine(programs.sglang(), tmp_path_factory.mktemp("sglang")) as engine:
        yield engine
