"""The real engines that tests share: started when the first test asks for one, serving until the last test is over.

Starting one takes half a minute of a core, most of it imports, one after another. So all that the chosen tests will want are launched
together before the first test, whatever that is, and each fixture waits for its own. A test takes the shared ones and leaves them serving, whatever it does to them in between.
Prompts of a test must be its own: the engines remember those of others.

Of pairs that hand KV over only one is in use at a time: the tests of each follow one another. The next one starts meanwhile, in the memory
that shared engines had which no test is going to ask for any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from tests.engines import environments, pairs, prefixes, programs
from tests.engines.launch import RealEngine
from tests.engines.pairs import Pair
from tests.engines.programs import SGLANG, VLLM, Program, Setup

TIMEOUT_S = 900
"""The first test that asks for an engine waits for its start, and on a fresh machine for its environment."""

ALONE = {"unit", "property"}
"""Folders of tests that start no process and measure no time."""


def arrange(items: list[pytest.Item]) -> None:
    """Tests with real engines go last, so that whatever is wrong without them is seen first, and are given the time they need. Those of
    one module alone come first, while the engines start.

    Those with a pair of engines come after all others, pair by pair, and of each pair's those that end one of its engines.
    """
    real = [item for item in items if item.get_closest_marker("real_engine")]
    for item in real:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    kinds = list(HAND_OVER)

    def order(item: pytest.Item) -> tuple[bool, bool, int, bool]:
        pair = max((kinds.index(name) for name in _named(item) if name in HAND_OVER), default=-1)
        return item in real, item.path.parent.name not in ALONE, pair, item.get_closest_marker("ends_engines") is not None

    items.sort(key=order)


def _small(setup: Setup) -> Setup:
    """Room for about 7 of the 12 prefixes. With bfloat16, what is computed beside a sequence rounds some of its tokens to others."""
    blocks = prefixes.blocks_for(prefixes.ROOM, setup.block_size)
    return setup._replace(blocks=blocks, arguments=("--dtype", "float32"))


_ENGINES: dict[str, Callable[[], Program]] = {
    "vllm": lambda: programs.vllm(_small(VLLM)),
    "second vllm": lambda: programs.vllm(_small(VLLM)),
    "silent vllm": lambda: programs.vllm(VLLM._replace(kv_events=False)),
    "sglang": lambda: programs.sglang(_small(SGLANG)),
    "second sglang": lambda: programs.sglang(_small(SGLANG)),
    "silent sglang": lambda: programs.sglang(SGLANG._replace(kv_events=False)),
}
FLEETS = {
    "real_vllm": ("vllm",),
    "real_sglang": ("sglang",),
    "real_vllm_pair": ("vllm", "second vllm"),
    "real_sglang_pair": ("sglang", "second sglang"),
    "real_mixed_pair": ("vllm", "sglang"),
    "half_silent_vllm": ("vllm", "silent vllm"),
    "half_silent_sglang": ("sglang", "silent sglang"),
    "half_silent_mixed": ("sglang", "silent vllm"),
}
"""The engines of each fixture; `engines` gives those of the one that its parameter names."""
PAIRS = ["real_vllm_pair", "real_sglang_pair", "real_mixed_pair"]
HALF_SILENT = ["half_silent_vllm", "half_silent_sglang", "half_silent_mixed"]
"""The second one publishes nothing."""
HAND_OVER = {"nixl_pair": pairs.NIXL, "mooncake_pair": pairs.MOONCAKE, "sglang_pair": pairs.SGLANG_TCP}
"""Pairs of engines of which one computes prompts and the other goes on from them."""
BESIDE_PAIRS = ["real_vllm", "real_sglang"]
"""What the answers of pairs are compared with."""


class Shared:
    """The engines of one test run, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[str, RealEngine] = {}

    def launch(self, fleets: Collection[str]) -> None:
        """Set those that are not there yet on their way, all at once."""
        for name in dict.fromkeys(name for fleet in fleets for name in FLEETS[fleet]):
            if name not in self._engines:
                self._engines[name] = RealEngine(_ENGINES[name](), self._folder)
                self._engines[name].launch()

    def ready(self, fleet: str) -> Sequence[RealEngine]:
        """Those of one fixture, serving."""
        self.launch([fleet])
        engines = [self._engines[name] for name in FLEETS[fleet]]
        for engine in engines:
            engine.wait_ready()
        return engines

    def keep(self, fleets: Collection[str]) -> None:
        """Stop those that belong to none of these."""
        kept = {name for fleet in fleets for name in FLEETS[fleet]}
        stopped = [self._engines.pop(name) for name in list(self._engines) if name not in kept]
        for engine in stopped:
            engine.terminate()
        for engine in stopped:
            engine.close()


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """The engines that any of the chosen tests wants, on their way."""
    shared = Shared(tmp_path_factory.mktemp("engines"))
    try:
        shared.launch(_wanted(request.session.items))
        yield shared
    finally:
        shared.keep([])


@pytest.fixture(scope="session", autouse=True)
def early(request: pytest.FixtureRequest) -> None:
    """Has the engines start beside the first tests; not where their environments have to be built, which only their own tests have time for."""
    if _wanted(request.session.items) and environments.complete():
        request.getfixturevalue("launched")


def _wanted(items: Sequence[pytest.Item]) -> set[str]:
    """Fixtures of engines that any of the tests names."""
    named = set[str]().union(*map(_named, items))
    return {name for name in FLEETS if name in named}


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
def real_sglang(launched: Shared) -> RealEngine:
    """One SGLang engine, with as much room."""
    return launched.ready("real_sglang")[0]


@pytest.fixture
def engines(launched: Shared, request: pytest.FixtureRequest) -> Sequence[RealEngine]:
    """The fleet that the parameter names: `@pytest.mark.parametrize("engines", PAIRS, indirect=True)`."""
    return launched.ready(request.param)


class OnePair:
    """The pair that is in use, if any, and the one that comes after it."""

    def __init__(self, folder: Path, wanted: Collection[str], shared: Shared) -> None:
        """`wanted`: the fixtures of pairs that the chosen tests name."""
        self._folder = folder
        self._wanted = [kind for name, kind in HAND_OVER.items() if name in wanted]
        self._shared = shared
        self._pair: Pair | None = None
        self._next: Pair | None = None

    def ready(self, kind: pairs.Kind) -> Pair:
        """A pair of that kind, both engines serving, whatever a test before did to them."""
        if self._pair is None or self._pair.kind is not kind:
            self._shared.keep(BESIDE_PAIRS)
            self._pair = self._change_to(kind)
        self._pair.start()
        return self._pair

    def _change_to(self, kind: pairs.Kind) -> Pair:
        if self._pair is not None:
            self._pair.close()
        pair = self._next or Pair(kind, self._folder)
        assert pair.kind is kind, "`arrange` has the pairs in another order"
        pair.launch()
        later = self._wanted[self._wanted.index(kind) + 1 :]
        self._next = Pair(later[0], self._folder) if later else None
        if self._next is not None:
            self._next.launch()
        return pair

    def close(self) -> None:
        for pair in (self._pair, self._next):
            if pair is not None:
                pair.close()


@pytest.fixture(scope="session")
def one_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, launched: Shared) -> Iterator[OnePair]:
    one = OnePair(tmp_path_factory.mktemp("pairs"), set[str]().union(*map(_named, request.session.items)), launched)
    yield one
    one.close()


@pytest.fixture
def nixl_pair(one_pair: OnePair) -> Pair:
    """Two vLLM engines: the decode engine pulls KV by NIXL."""
    return one_pair.ready(HAND_OVER["nixl_pair"])


@pytest.fixture
def mooncake_pair(one_pair: OnePair) -> Pair:
    """Two vLLM engines: the prefill engine pushes KV by Mooncake."""
    return one_pair.ready(HAND_OVER["mooncake_pair"])


@pytest.fixture
def sglang_pair(one_pair: OnePair) -> Pair:
    """Two SGLang engines: the prefill engine pushes KV by Mooncake's engine, over TCP."""
    return one_pair.ready(HAND_OVER["sglang_pair"])
