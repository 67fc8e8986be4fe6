"""What do running streams feel of long prompts, and what do those wait: one engine for all, or prefill and decode apart?

scripts/bench-disagg [--quick] [--real] [--rounds N] [--seconds S] [--json OUT]

Two engines in each case, the same requests: streams that run all the time, and a long prompt every so often that shares nothing with the others.

    aggregated   both take whole requests
    always, measured, never   one computes prompts, one decodes (`--disagg`)

The simulated engines compute 20,000 prompt tokens a second, and a step that computes prompts delays whatever decodes beside it, as on a GPU;
KV (128 KiB a token) goes over a link of 10 GB/s, and in a second table of 100 MB/s. With --real, two real vLLM on the CPU, over NIXL and the
loopback interface: their prompts take as long wherever they are computed, and the two engines share the cores with everything else, so it
shows that it works and little more. Times are of the clients'; the router is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import SimulateSettings
from engines.types import Role
from tests.bench.report import conditions, described
from tests.e2e.serving import Served, serve
from tests.engines import pairs
from tests.engines.launch import RealEngine, together
from tests.engines.programs import VLLM, vllm

MODES = ("always", "measured", "never")
FAST, SLOW = 10e9, 100e6
STREAMS = 6


class Load(msgspec.Struct, frozen=True):
    """What is asked, all the while."""

    seconds: float
    prompt_tokens: int
    every_s: float
    model: str = "sim"


class Felt(msgspec.Struct, frozen=True):
    """What clients felt, in seconds."""

    itl_p50: float
    itl_p99: float
    ttft_p50: float
    ttft_p99: float
    prompts: int
    remote: int


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so many are not above."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


async def stream(router: Served, body: dict[str, Any], gaps: list[float]) -> float:
    """One streamed completion; the times between its pieces go to `gaps`. Its time to first token."""
    began = last = time.perf_counter()
    first = 0.0
    async with router.session.post(f"{router.url}/v1/completions", data=msgspec.json.encode(body)) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b'data: {"') and b'"choices":[{' in line:
                now = time.perf_counter()
                if first:
                    gaps.append(now - last)
                else:
                    first = now - began
                last = now
    return first


async def measure(router: Served, load: Load, unique: int) -> Felt:
    """One run. `unique` makes its prompts unlike those of other runs."""
    gaps: list[float] = []
    waits: list[float] = []
    end = time.perf_counter() + load.seconds

    async def keep_streaming(number: int) -> None:
        turn = 0
        while time.perf_counter() < end:
            turn += 1
            ids = [300 + (unique * 7919 + number * 31 + turn * 101 + place) % 3500 for place in range(16)]
            await stream(router, {"model": load.model, "prompt": ids, "max_tokens": 100, "ignore_eos": True, "stream": True}, gaps)

    async def long_prompts() -> None:
        number = 0
        async with asyncio.TaskGroup() as prompts:
            while time.perf_counter() < end:
                number += 1
                ids = [300 + (unique * 104729 + number * 15485863 + place * place) % 3500 for place in range(load.prompt_tokens)]
                prompts.create_task(one_prompt(ids))
                await asyncio.sleep(load.every_s)

    async def one_prompt(ids: list[int]) -> None:
        waits.append(await stream(router, {"model": load.model, "prompt": ids, "max_tokens": 4, "ignore_eos": True, "stream": True}, []))

    before = await router.metric("router_prefills_total", where="remote")
    async with asyncio.TaskGroup() as tasks:
        for number in range(STREAMS):
            tasks.create_task(keep_streaming(number))
        tasks.create_task(long_prompts())
    remote = await router.metric("router_prefills_total", where="remote") - before
    return Felt(quantile(gaps, 0.5), quantile(gaps, 0.99), quantile(waits, 0.5), quantile(waits, 0.99), len(waits), int(remote))


@contextlib.asynccontextmanager
async def simulated(folder: Path, link: float) -> AsyncIterator[dict[str, Served]]:
    """A router for each case, each in front of two engines of its own."""
    common = SimulateSettings(port=0, kv_blocks=65_536, link_bytes_per_s=link)
    async with contextlib.AsyncExitStack() as stack:
        routers = {}
        for name in ("aggregated", *MODES):
            roles = (Role.AGGREGATED, Role.AGGREGATED) if name == "aggregated" else (Role.PREFILL, Role.DECODE)
            engines = [await stack.enter_async_context(SimulatedEngine(msgspec.structs.replace(common, role=role))) for role in roles]
            lines = [f"{engine.url},role={role.value}" for engine, role in zip(engines, roles, strict=True)]
            flags = () if name == "aggregated" else ("--disagg", name)
            routers[name] = await stack.enter_async_context(serve(lines, folder / f"{name}.log", *flags))
        yield routers


@contextlib.asynccontextmanager
async def real(folder: Path) -> AsyncIterator[dict[str, Served]]:
    """A router for each case; those of a pair share it, and the aggregated case has two engines of its own."""
    alone = VLLM._replace(arguments=("--dtype", "float32"))
    async with contextlib.AsyncExitStack() as stack:
        both = await asyncio.to_thread(stack.enter_context, together([RealEngine(vllm(alone), folder) for _ in range(2)]))
        pair = await asyncio.to_thread(stack.enter_context, pairs.Pair(pairs.NIXL, folder))
        lines = [f"{pair.prefill.url},role=prefill", f"{pair.decode.url},role=decode"]
        routers = {"aggregated": await stack.enter_async_context(serve(both, folder / "aggregated.log"))}
        for name in MODES:
            routers[name] = await stack.enter_async_context(serve(lines, folder / f"{name}.log", "--disagg", name))
        yield routers


def table(title: str, felt: dict[str, list[Felt]]) -> str:
    """Medians of the rounds, in milliseconds."""
    rows = [
        f"{title}\n",
        "| | ITL p50 | ITL p99 | TTFT p50 | TTFT p99 | prompts computed elsewhere |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name, rounds in felt.items():
        numbers = [
            f"{1000 * median(getattr(one, field) for one in rounds):,.1f}" for field in ("itl_p50", "itl_p99", "ttft_p50", "ttft_p99")
        ]
        share = sum(one.remote for one in rounds)
        rows.append(f"| {name} | {' | '.join(numbers)} | {share} |")
    return "\n".join(rows)


async def run(routers: dict[str, Served], load: Load, rounds: int) -> dict[str, list[Felt]]:
    """All cases in alternation; the first round, in which paces are learned, does not count."""
    felt: dict[str, list[Felt]] = {name: [] for name in routers}
    for number in range(rounds + 1):
        for place, (name, router) in enumerate(routers.items()):
            found = await measure(router, load, number * 10 + place)
            if number:
                felt[name].append(found)
    return felt


async def bench(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[Felt]]]:
    """Every table."""
    rounds, seconds = (1, 1.5) if options.quick else (options.rounds, options.seconds)
    results = {}
    if options.real:
        async with real(folder) as routers:
            results["real"] = await run(routers, Load(seconds, 1500, 1.0, "tiny"), rounds)
        sys.stdout.write(table("Real vLLM, NIXL over loopback; ms", results["real"]) + "\n")
        return results
    for title, link, tokens in (("10 GB/s", FAST, 4000), ("100 MB/s", SLOW, 1000)):
        async with simulated(folder, link) as routers:
            results[title] = await run(routers, Load(seconds, tokens, 0.5 if link == FAST else 2.0), rounds)
        sys.stdout.write(table(f"Simulated engines, a link of {title}, prompts of {tokens} tokens; ms", results[title]) + "\n\n")
    return results


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench-disagg", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 1.5 s: does everything run?")
    parser.add_argument("--real", action="store_true", help="real vLLM instead of simulated engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    where = conditions()
    sys.stdout.write(f"{described(where)}\n\n")
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(bench(options, Path(folder)))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"conditions": where, "results": results})))


if __name__ == "__main__":
    main()
