"""The real engines that tests share: started when the first test asks for one, serving until the last test is over.

Starting one takes half a minute of a core, most of it imports, one after another. So all that the chosen tests will want are launched
together, and each fixture waits for its own. A test takes the shared ones and leaves them serving, whatever it does to them in between.
Prompts of a test must be its own: the engines remember those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines import prefixes, programs
from tests.engines.launch import RealEngine
from tests.engines.programs import SGLANG, VLLM, Program

TIMEOUT_S = 900
"""The first test that asks for an engine waits for its start, and on a fresh machine for its environment."""


def arrange(items: list[pytest.Item]) -> None:
    """Tests with real engines go last, so that whatever is wrong without them is seen first, and are given the time they need."""
    real = [item for item in items if item.get_closest_marker("real_engine")]
    for item in real:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    items.sort(key=lambda item: item in real)


def _small_vllm() -> Program:
    """Room for about 7 of the 12 prefixes. With bfloat16, what is computed beside a sequence rounds some of its tokens to others."""
    blocks = prefixes.blocks_for(prefixes.ROOM, VLLM.block_size)
    return programs.vllm(VLLM._replace(blocks=blocks, arguments=("--dtype", "float32")))


_MAKERS: dict[str, tuple[Callable[[], Program], ...]] = {
    "real_vllm": (_small_vllm,),
    "real_vllm_pair": (_small_vllm, _small_vllm),
    "real_silent_vllm": (lambda: programs.vllm(VLLM._replace(kv_events=False)),),
    "real_sglang": (lambda: programs.sglang(SGLANG),),
}
_WITHIN = {"real_vllm": "real_vllm_pair"}
"""Where both are wanted, the one is part of the other."""


class Shared:
    """The engines of one test run, by the fixture that gives them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups: dict[str, Sequence[RealEngine]] = {}

    def launch(self, names: Collection[str]) -> None:
        """Set those that are not there yet on their way, all at once."""
        for name in sorted(names, key=list(_MAKERS).index, reverse=True):  # a whole comes before its part
            if name in self._groups:
                continue
            if (whole := _WITHIN.get(name)) in self._groups:
                self._groups[name] = self._groups[whole]
                continue
            self._groups[name] = [RealEngine(make(), self._folder) for make in _MAKERS[name]]
            for engine in self._groups[name]:
                engine.launch()

    def ready(self, name: str) -> Sequence[RealEngine]:
        """Those of one fixture, serving."""
        self.launch([name])
        for engine in self._groups[name]:
            engine.wait_ready()
        return self._groups[name]

    def close(self) -> None:
        for engine in {engine for group in self._groups.values() for engine in group}:
            engine.close()


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """The engines that any of the chosen tests wants, on their way."""
    shared = Shared(tmp_path_factory.mktemp("engines"))
    try:
        shared.launch(_wanted(request.session.items))
        yield shared
    finally:
        shared.close()


def _wanted(items: Sequence[pytest.Item]) -> set[str]:
    """Fixtures of engines that tests name, as an argument or as a parameter that stands for one."""
    named: set[object] = set()
    for item in items:
        if isinstance(item, pytest.Function):
            parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
            named.update(item.fixturenames, (value for value in parameters if isinstance(value, str)))
    return {name for name in _MAKERS if name in named}


@pytest.fixture(scope="session")
def real_vllm_pair(launched: Shared) -> Sequence[RealEngine]:
    """Two vLLM engines, each with room for about 7 of the 12 prefixes."""
    return launched.ready("real_vllm_pair")


@pytest.fixture(scope="session")
def real_vllm(launched: Shared) -> RealEngine:
    """One vLLM engine: the first of the pair."""
    return launched.ready("real_vllm")[0]


@pytest.fixture(scope="session")
def real_silent_vllm(launched: Shared) -> RealEngine:
    """A vLLM engine that was started without KV events."""
    return launched.ready("real_silent_vllm")[0]


@pytest.fixture(scope="session")
def real_sglang(launched: Shared) -> RealEngine:
    """One SGLang engine."""
    return launched.ready("real_sglang")[0]
