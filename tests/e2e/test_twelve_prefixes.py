"""Two real engines, each with KV room for about 7 of 12 long prefixes: which policy lets them hold all 12 between them?

Each prefix is sent once, then 60 repeats follow in a mixed order, each with a question of its own. A repeat is a hit when the engine that
got it says, by its own counters, that it found the prefix in its cache.

The numbers are written to `twelve-prefixes.json` and `.md` in `$E2E_REPORTS`, where it is set.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.e2e.serving import Served, serve
from tests.engines import prefixes
from tests.engines.launch import Cached, RealEngine
from tests.engines.prefixes import PREFIXES, Ask
from tests.rig import Answer

pytestmark = pytest.mark.real_engine

REPEATS = 60
WANTED_HITS = 58
POLICIES = ["kv", "round-robin", "random"]
APIS = ["chat", "completions"]
HIT = 0.9
"""Part of the prefix that has to be found: all of its whole blocks are, or next to none."""


class Outcome(msgspec.Struct):
    """One policy's run."""

    api: str
    policy: str
    hits: int
    cached_part: float
    """Of all prompt tokens of the repeats."""
    repeats_by_engine: list[int]
    prefixes_by_engine: list[int] | None
    """Prefixes that an engine holds at the end, by the router's index; None where its policy keeps it from reading prompts."""
    ms_per_repeat: float


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], Outcome]:
    """What was measured; written down by the last test of the module."""
    return {}


def counted(engines: Sequence[RealEngine]) -> Cached:
    counts = [engine.counters() for engine in engines]
    return Cached(sum(count.queries for count in counts), sum(count.hits for count in counts))


async def send(router: Served, ask: Ask, api: str) -> Answer:
    answer = await router.ask(ask.text, chat=api == "chat")
    assert answer.status == 200, answer.body
    return answer


async def holders(router: Served, engines: Sequence[RealEngine], asks: Sequence[Ask], api: str) -> list[int] | None:
    """How many of the prefixes the router believes cached at each engine."""
    held = Counter[str]()
    for ask in asks:
        body = (
            {"model": "tiny", "messages": [{"role": "user", "content": ask.text}]}
            if api == "chat"
            else {"model": "tiny", "prompt": ask.text}
        )
        told = (await router.post("/route", body)).json
        if told["reason"] == "policy":
            return None
        for candidate in told["candidates"]:
            held[candidate["engine"]] += candidate["overlap"]["device"] >= HIT * candidate["prompt_blocks"]
    return [held[engine.url] for engine in engines]


async def run(router: Served, engines: Sequence[RealEngine], name: str, api: str, policy: str) -> Outcome:
    start = counted(engines)
    for ask in prefixes.first_asks(name):
        await send(router, ask, api)
    filled = before = counted(engines)
    assert (filled - start).hits == 0, "the engines know these prefixes from before"
    hits, taken = 0, 0.0
    to = Counter[str]()
    for ask in prefixes.repeats(name, REPEATS):
        started = time.perf_counter()
        answer = await send(router, ask, api)
        taken += time.perf_counter() - started
        after = counted(engines)
        hits += (after - before).hits >= HIT * prefixes.tokens_of(prefixes.prefix(name, ask.prefix))
        before = after
        to[answer.engine] += 1
    cached = before - filled
    return Outcome(
        api=api,
        policy=policy,
        hits=hits,
        cached_part=round(cached.hits / cached.queries, 3),
        repeats_by_engine=[to[engine.url] for engine in engines],
        prefixes_by_engine=await holders(router, engines, prefixes.first_asks(name), api),
        ms_per_repeat=round(1000 * taken / REPEATS, 1),
    )


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("policy", POLICIES)
async def test_the_twelve_prefixes(
    real_vllm_pair: Sequence[RealEngine], tmp_path: Path, outcomes: dict[tuple[str, str], Outcome], policy: str, api: str
) -> None:
    blocks_of_one = prefixes.blocks_for(1, real_vllm_pair[0].block_size)
    assert all(6 < engine.blocks / blocks_of_one < 8 for engine in real_vllm_pair)
    async with serve(real_vllm_pair, tmp_path / "router.log", "--policy", policy) as router:
        outcome = await run(router, real_vllm_pair, f"{policy} {api}", api, policy)
    outcomes[api, policy] = outcome
    assert outcome.repeats_by_engine[0] + outcome.repeats_by_engine[1] == REPEATS
    if policy == "kv":
        assert outcome.hits >= WANTED_HITS, outcome
        assert outcome.prefixes_by_engine is not None
        assert sum(outcome.prefixes_by_engine) == PREFIXES, outcome
        assert min(outcome.prefixes_by_engine) >= PREFIXES // 3, outcome


async def test_no_policy_that_is_blind_to_the_cache_comes_near(outcomes: dict[tuple[str, str], Outcome]) -> None:
    if len(outcomes) < len(POLICIES) * len(APIS):
        pytest.skip("needs the runs above")
    if folder := os.environ.get("E2E_REPORTS"):
        write(Path(folder), list(outcomes.values()))
    for api in APIS:
        for policy in ("round-robin", "random"):
            assert outcomes[api, policy].hits < outcomes[api, "kv"].hits - REPEATS // 4, outcomes


def write(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """The numbers as data and as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "twelve-prefixes.json").write_text(json.dumps(msgspec.to_builtins(list(outcomes)), indent=1) + "\n")
    rows = [
        "| API | policy | hits of 60 | prompt tokens cached | repeats per engine | prefixes held at the end | ms a repeat |",
        "| --- | --- | --: | --: | --- | --- | --: |",
    ]
    for o in outcomes:
        both = [" + ".join(map(str, pair)) if pair else "–" for pair in (o.repeats_by_engine, o.prefixes_by_engine)]
        rows.append(f"| {o.api} | `{o.policy}` | {o.hits} | {o.cached_part:.0%} | {both[0]} | {both[1]} | {o.ms_per_repeat} |")
    (folder / "twelve-prefixes.md").write_text("\n".join(rows) + "\n")
