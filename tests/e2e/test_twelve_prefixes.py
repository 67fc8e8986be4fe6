"""Two real engines of either kind, or one of each, with KV room for about 7 of 12 long prefixes each: which policy lets them hold all 12 between them?

Each prefix is sent once, then 60 repeats follow in a mixed order, each with a question of its own. A repeat is a hit when the engine that
got it says, by its own counters, that it found the prefix in its cache.

What one run's engines found is what `engines/virtual` says they find, given the same prompts in the same order.

The numbers are written to `twelve-prefixes.json` and `.md` in `$E2E_REPORTS`, where it is set.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence as Many
from pathlib import Path

import msgspec
import pytest

from engines.blocks import block_keys, pack_tokens, root_seed
from engines.simulator.sequences import Prompt, Sequence
from engines.types import EngineKind
from engines.virtual.engine import VirtualEngine
from engines.virtual.models import EngineModel
from tests.e2e.serving import Served, serve
from tests.engines import prefixes
from tests.engines.launch import Cached, RealEngine
from tests.engines.prefixes import PREFIXES, Ask
from tests.rig import Answer

pytestmark = pytest.mark.real_engine

REPEATS = 60
WANTED_HITS = 58
RUNS = [
    *(("real_vllm_pair", api, policy) for policy in ("kv", "round-robin", "random") for api in ("chat", "completions")),
    *(("real_sglang_pair", api, "kv") for api in ("chat", "completions")),
    ("real_sglang_pair", "chat", "round-robin"),
    ("real_mixed_pair", "chat", "kv"),
    ("real_mixed_pair", "chat", "round-robin"),
]
"""Fleet, API, policy."""
HIT = 0.9
"""Part of the prefix that has to be found: all of its whole blocks are, or next to none."""


class Sent(msgspec.Struct):
    """One prompt, and what its engine found of it by its own counters."""

    engine: str
    ids: list[int]
    generated: int
    hits: int


class Outcome(msgspec.Struct):
    """One policy's run."""

    fleet: str
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
def outcomes() -> dict[tuple[str, str, str], Outcome]:
    """What was measured; written down by the last test of the module."""
    return {}


def counted(engines: Many[RealEngine]) -> Cached:
    counts = [engine.counters() for engine in engines]
    return Cached(sum(count.queries for count in counts), sum(count.hits for count in counts))


async def send(router: Served, ask: Ask, api: str) -> Answer:
    answer = await router.ask(ask.text, chat=api == "chat")
    assert answer.status == 200, answer.body
    return answer


async def holders(router: Served, engines: Many[RealEngine], asks: Many[Ask], api: str) -> list[int] | None:
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


def in_virtual_time(engines: Many[RealEngine], sent: Many[Sent]) -> list[int]:
    """What virtual engines of the same size find of the same prompts."""
    size = engines[0].block_size
    model = EngineModel(kv_tokens=0)
    virtual = {
        engine.url: VirtualEngine(
            model.timing(),
            model.limits,
            msgspec.structs.replace(model, kv_tokens=(engine.blocks - 1) * size).cache(size),  # vLLM keeps one for itself
        )
        for engine in engines
    }
    found = []
    for number, one in enumerate(sent):
        names = block_keys(pack_tokens(one.ids), size, root_seed())
        answer = [(number + 1 << 64) + block for block in range(len(one.ids) // size, (len(one.ids) + one.generated) // size)]
        sequence = Sequence(Prompt([], one.generated), len(one.ids), names + answer)
        engine = virtual[one.engine]
        engine.submit(sequence, 0.0)
        while not sequence.done:
            engine.advance()
        found.append(sequence.cached)
    return found


async def run(router: Served, engines: Many[RealEngine], name: str, api: str, policy: str, sent: list[Sent]) -> Outcome:
    start = last = counted(engines)

    def note(ask: Ask, answer: Answer, hits: int) -> None:
        sent.append(Sent(answer.engine, prefixes.ids_of(ask.text), answer.json["usage"]["completion_tokens"], hits))

    for ask in prefixes.first_asks(name):
        answer = await send(router, ask, api)
        before, last = last, counted(engines)
        note(ask, answer, int((last - before).hits))
    filled = before = counted(engines)
    assert (filled - start).hits == 0, "the engines know these prefixes from before"
    hits, taken = 0, 0.0
    to = Counter[str]()
    for ask in prefixes.repeats(name, REPEATS):
        started = time.perf_counter()
        answer = await send(router, ask, api)
        taken += time.perf_counter() - started
        after = counted(engines)
        note(ask, answer, int((after - before).hits))
        hits += (after - before).hits >= HIT * prefixes.tokens_of(prefixes.prefix(name, ask.prefix))
        before = after
        to[answer.engine] += 1
    cached = before - filled
    return Outcome(
        fleet=" + ".join(engine.kind for engine in engines),
        api=api,
        policy=policy,
        hits=hits,
        cached_part=round(cached.hits / cached.queries, 3),
        repeats_by_engine=[to[engine.url] for engine in engines],
        prefixes_by_engine=await holders(router, engines, prefixes.first_asks(name), api),
        ms_per_repeat=round(1000 * taken / REPEATS, 1),
    )


@pytest.mark.parametrize(("engines", "api", "policy"), RUNS, indirect=["engines"])
async def test_the_twelve_prefixes(
    request: pytest.FixtureRequest,
    engines: Many[RealEngine],
    tmp_path: Path,
    outcomes: dict[tuple[str, str, str], Outcome],
    api: str,
    policy: str,
) -> None:
    assert all(6 < engine.blocks / prefixes.blocks_for(1, engine.block_size) < 8 for engine in engines)
    fleet = request.node.callspec.params["engines"]
    async with serve(engines, tmp_path / "router.log", "--policy", policy) as router:
        sent = list[Sent]()
        outcome = await run(router, engines, f"{policy} {api} {fleet}", api, policy, sent)
    outcomes[fleet, api, policy] = outcome
    if api == "completions" and all(engine.kind is EngineKind.VLLM for engine in engines):
        assert [one.hits for one in sent] == in_virtual_time(engines, sent)
    assert outcome.repeats_by_engine[0] + outcome.repeats_by_engine[1] == REPEATS
    if policy == "kv":
        assert outcome.hits >= WANTED_HITS, outcome
        assert outcome.prefixes_by_engine is not None
        assert sum(outcome.prefixes_by_engine) == PREFIXES, outcome
        assert min(outcome.prefixes_by_engine) >= PREFIXES // 3, outcome


async def test_no_policy_that_is_blind_to_the_cache_comes_near(outcomes: dict[tuple[str, str, str], Outcome]) -> None:
    if len(outcomes) < len(RUNS):
        pytest.skip("needs the runs above")
    if folder := os.environ.get("E2E_REPORTS"):
        write(Path(folder), list(outcomes.values()))
    for fleet, api, policy in RUNS:
        if policy != "kv":
            assert outcomes[fleet, api, policy].hits < outcomes[fleet, api, "kv"].hits - REPEATS // 4, outcomes


def write(folder: Path, outcomes: Many[Outcome]) -> None:
    """The numbers as data and as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "twelve-prefixes.json").write_text(json.dumps(msgspec.to_builtins(list(outcomes)), indent=1) + "\n")
    rows = [
        "| engines | API | policy | hits of 60 | prompt tokens cached | repeats per engine | prefixes held at the end | ms a repeat |",
        "| --- | --- | --- | --: | --: | --- | --- | --: |",
    ]
    for o in outcomes:
        both = [" + ".join(map(str, pair)) if pair else "–" for pair in (o.repeats_by_engine, o.prefixes_by_engine)]
        rows.append(f"| {o.fleet} | {o.api} | `{o.policy}` | {o.hits} | {o.cached_part:.0%} | {both[0]} | {both[1]} | {o.ms_per_repeat} |")
    (folder / "twelve-prefixes.md").write_text("\n".join(rows) + "\n")
