"""The real engines that tests share: started when the first test asks for one, serving until the last test is over.

Starting one takes half a minute of a core, most of it imports, one after another. So all that the chosen tests will want are launched
together, and each fixture waits for its own. A test takes the shared ones and leaves them serving, whatever it does to them in between.
Prompts of a test must be its own: the engines remember those of others.

Of pairs that hand KV over only one runs at a time: the tests of each follow one another, and the next one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines import pairs, prefixes, programs
from tests.engines.launch import RealEngine
from tests.engines.pairs import Pair
from tests.engines.programs import SGLANG, VLLM, Program

TIMEOUT_S = 900
"""The first test that asks for an engine waits for its start, and on a fresh machine for its environment."""


def arrange(items: list[pytest.Item]) -> None:
    """Tests with real engines go last, so that whatever is wrong without them is seen first, and are given the time they need.

    Those with a pair of engines come after all others, pair by pair, and of each pair's those that end one of its engines.
    """
    real = [item for item in items if item.get_closest_marker("real_engine")]
    for item in real:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    kinds = list(_PAIRS)

    def order(item: pytest.Item) -> tuple[bool, int, bool]:
        pair = max((kinds.index(name) for name in _named(item) if name in _PAIRS), default=-1)
        return item in real, pair, item.get_closest_marker("ends_engines") is not None

    items.sort(key=order)


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
_PAIRS = {"real_nixl_pair": pairs.NIXL, "real_mooncake_pair": pairs.MOONCAKE, "real_sglang_pd_pair": pairs.SGLANG_TCP}


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
    """Fixtures of engines that any of the tests names."""
    named = set[str]().union(*map(_named, items))
    return {name for name in _MAKERS if name in named}


def _named(item: pytest.Item) -> set[str]:
    """Fixtures that a test names, as an argument or as a parameter that stands for one."""
    if not isinstance(item, pytest.Function):
        return set()
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {*item.fixturenames, *(value for value in parameters if isinstance(value, str))}


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


class OnePair:
    """The pair that serves now, if any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pair: Pair | None = None

    def ready(self, kind: pairs.Kind) -> Pair:
        """A pair of that kind, both engines serving, whatever a test before did to them."""
        if self._pair is None or self._pair.kind is not kind:
            self.close()
            self._pair = Pair(kind, self._folder)
        self._pair.start()
        return self._pair

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
        self._pair = None


@pytest.fixture(scope="session")
def one_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnePair]:
    one = OnePair(tmp_path_factory.mktemp("pairs"))
    yield one
    one.close()


@pytest.fixture
def real_nixl_pair(one_pair: OnePair) -> Pair:
    """Two vLLM engines: the decode engine pulls KV by NIXL."""
    return one_pair.ready(_PAIRS["real_nixl_pair"])


@pytest.fixture
def real_mooncake_pair(one_pair: OnePair) -> Pair:
    """Two vLLM engines: the prefill engine pushes KV by Mooncake."""
    return one_pair.ready(_PAIRS["real_mooncake_pair"])


@pytest.fixture
def real_sglang_pd_pair(one_pair: OnePair) -> Pair:
    """Two SGLang engines: the prefill engine pushes KV by Mooncake's engine, over TCP."""
    return one_pair.ready(_PAIRS["real_sglang_pd_pair"])
