"""Data-parallel ranks behind one URL, on real engines: each has a KV cache of its own, and is an endpoint of its own.

SGLang's two ways (`--dp-size`, and DP attention) and vLLM's. An engine of two ranks takes 3 GB, so they run one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Served, serve
from tests.engines import programs
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME, SGLANG, VLLM, Program, Setup
from tests.rig import prompt
from tests.waiting import until

pytestmark = pytest.mark.real_engine

CACHE_TOKENS = 4096
"""Of each rank: room for some ten prompts."""
MAX_TOKENS = CACHE_TOKENS - 256


def _ranked(setup: Setup) -> Setup:
    return setup._replace(ranks=2, blocks=CACHE_TOKENS // setup.block_size, max_model_len=MAX_TOKENS, arguments=("--dtype", "float32"))


MODES: dict[str, Callable[[], Program]] = {
    "sglang": lambda: programs.sglang(_ranked(SGLANG)),
    "sglang-dp-attention": lambda: programs.sglang(_ranked(SGLANG)._replace(dp_attention=True)),
    "vllm": lambda: programs.vllm(_ranked(VLLM)),
}


QUICK = ["sglang", "vllm"]
"""With DP attention the ranks compute in step, and take three times as long: for what does not depend on where the ranks come from."""


@pytest.fixture(scope="module", params=MODES)
def ranked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """An engine with ranks 0 and 1."""
    with RealEngine(MODES[request.param](), tmp_path_factory.mktemp("ranks")) as engine:
        yield engine


def text(name: str) -> str:
    return prompt(name, words=100)


async def overlaps(router: Served, words: str) -> dict[int, int]:
    """By rank: tokens of a chat's prompt that the router believes to be in its device cache."""
    candidates = (await router.route(words, model=MODEL_NAME))["candidates"]
    return {int(c["rank"]): int(c["overlap"]["device"]) * int(c["block_size"]) for c in candidates}


async def holds(router: Served, rank: int, words: str) -> None:
    async def known() -> bool:
        return (await overlaps(router, words))[rank] > 0

    await until(known, what=f"the router hears that rank {rank} holds the prompt")


def ask_rank(engine: RealEngine, rank: int, words: str) -> int:
    """Ask a rank behind the router's back, as a chat; how many tokens it says it found."""
    body = {"model": MODEL_NAME, "max_tokens": 1, "messages": [{"role": "user", "content": words}]}
    answer = httpx.post(engine.url + "/v1/chat/completions", json=body, headers={"X-Data-Parallel-Rank": str(rank)}, timeout=60)
    found: int = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_R28_each_rank_is_an_endpoint_and_its_events_are_its_own(ranked: RealEngine, tmp_path: Path) -> None:
    async with serve([ranked], tmp_path / "router.log") as router:
        assert set(await overlaps(router, "x")) == {0, 1}
        (joined,) = router.logged(message="engine joined")
        ports = [int(ranked.kv_events.rpartition(":")[2]) + rank for rank in (0, 1)]
        assert all(f":{port}" in joined["found"] for port in ports)
        for rank in (0, 1):
            words = text(f"own events {rank} ")
            ask_rank(ranked, rank, words)
            await holds(router, rank, words)
            assert (await overlaps(router, words))[1 - rank] == 0


async def test_R29_a_repeated_prompt_goes_back_to_its_rank_and_is_a_hit_there(ranked: RealEngine, tmp_path: Path) -> None:
    async with serve([ranked], tmp_path / "router.log") as router:
        texts = [text(f"home {number} ") for number in range(6)]
        homes = [int((await router.ask(words)).headers["x-commutator-rank"]) for words in texts]
        assert set(homes) == {0, 1}
        for words, home in zip(texts, homes, strict=True):
            await holds(router, home, words)
            before = ranked.counters()
            again = await router.ask(words)
            assert (int(again.headers["x-commutator-rank"]), again.reason, again.signal) == (home, "kv", "live")
            assert (ranked.counters() - before).hits == again.cached_tokens == again.overlap_tokens > 0
        known = (await overlaps(router, texts[0]))[homes[0]]
        assert ask_rank(ranked, 1 - homes[0], texts[0]) < known / 2, "another rank would not have found it"


@pytest.mark.parametrize("ranked", QUICK, indirect=True)
async def test_R29_what_one_rank_drops_the_other_still_holds(ranked: RealEngine, tmp_path: Path) -> None:
    words = text("both ranks ")
    async with serve([ranked], tmp_path / "router.log") as router:
        for rank in (0, 1):
            ask_rank(ranked, rank, words)
            await holds(router, rank, words)
        known = (await overlaps(router, words))[0]

        async def dropped() -> bool:
            return (await overlaps(router, words))[1] == 0

        for number in range(50):
            ask_rank(ranked, 1, text(f"filling {number} "))
            if await dropped():
                break
        await until(dropped, what="rank 1 has dropped the prompt")
        assert (await overlaps(router, words))[0] == known
        again = await router.ask(words)
        assert (again.headers["x-commutator-rank"], again.reason) == ("0", "kv")
        assert again.cached_tokens == again.overlap_tokens == known


@pytest.mark.parametrize("ranked", ["sglang"], indirect=True)
async def test_R28_sglangs_own_route_gets_the_rank_in_the_body(ranked: RealEngine, tmp_path: Path) -> None:
    async with serve([ranked], tmp_path / "router.log") as router:
        seen = set()
        for number in range(4):
            body = {"text": text(f"generate {number} "), "sampling_params": {"max_new_tokens": 1}, "routed_dp_rank": 7}
            answer = await router.post("/generate", body)
            assert answer.status == 200, answer.body
            rank = int(answer.headers["x-commutator-rank"])
            assert json.loads(answer.body)["meta_info"]["dp_rank"] == rank
            seen.add(rank)
        assert seen == {0, 1}


@pytest.mark.parametrize("ranked", QUICK, indirect=True)
async def test_the_load_of_each_rank_is_known(ranked: RealEngine, tmp_path: Path) -> None:
    """What runs on rank 1 is told of rank 1."""
    async with serve([ranked], tmp_path / "router.log", "--probe-period-s", "0.5") as router:

        async def running() -> dict[int, int]:
            candidates: Sequence[dict[str, dict[str, int]]] = (await router.route("x", model=MODEL_NAME))["candidates"]
            return {int(str(c["rank"])): c["load"]["running"] for c in candidates}

        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": MAX_TOKENS - 100, "ignore_eos": True, "stream": True}
        async with router.session.post(ranked.url + "/v1/completions", json=body, headers={"X-Data-Parallel-Rank": "1"}) as stream:
            await stream.content.readline()

            async def told() -> bool:
                return await running() == {0: 0, 1: 1}

            await until(told, what="one request runs on rank 1")
