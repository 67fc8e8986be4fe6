"""What is measured? Each row puts a few routers under one load, in turn and several times, and says what it cost each of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from tests.bench.contenders import (
    Contender,
    Place,
    Start,
    Upstream,
    commutator,
    direct,
    dynamo,
    real_vllm,
    sglang_router,
    upstream,
    vllm_router,
)
from tests.bench.load import Load, Seen, put
from tests.bench.processes import cpu_s, machine_s, memory_bytes
from tests.bench.upstream import Counts, Plan

SETTLE_S = 0.3
"""After a load, for what it leaves to do: events on their way, sockets to close."""
WARM_S = 2.0
"""Before a stream is measured: all connections have begun."""

CHUNK_EVERY_S = 0.04

Measured = dict[str, float]
"""One round of one contender, by column."""


class Row(msgspec.Struct, frozen=True):
    """A load, and who is put under it."""

    name: str
    title: str
    starts: tuple[Start, ...]
    measure: Callable[[Place, Contender, float, int], Awaitable[Measured]]
    """Of a contender, for so many seconds, with a seed."""
    targets: dict[str, dict[str, float]] = {}
    """The most that ours may be of a peer's, by column and peer."""
    upstream: Callable[[Path], AbstractAsyncContextManager[Upstream]] = upstream
    """The engines behind all of them."""


class Others:
    """What share of the machine was used by programs that are not the bench's, since this was made."""

    def __init__(self) -> None:
        self._ours = cpu_s(os.getpid())
        self._busy, self._available = machine_s()

    def share(self) -> float:
        """0 … 1."""
        ours = cpu_s(os.getpid()) - self._ours
        busy, available = machine_s()
        return max(0.0, (busy - self._busy - ours) / (available - self._available))


async def plan(place: Place, what: Plan) -> None:
    """How the upstream answers from now on."""
    for url in place.upstream.urls:
        async with place.client.post(f"{url}/_bench/plan", data=msgspec.json.encode(what)) as answer:
            answer.raise_for_status()


async def counts(place: Place) -> Counts:
    """What the upstream has answered so far."""
    total = Counts()
    for url in place.upstream.urls:
        async with place.client.get(f"{url}/_bench/counts") as answer:
            counted = msgspec.json.decode(await answer.read(), type=Counts)
        total = Counts(total.requests + counted.requests, total.chunks + counted.chunks)
    return total


async def loaded(contender: Contender, load: Load, place: Place, seconds: float, seed: int) -> tuple[Seen, Measured]:
    """Put one under load; what came back, and what it cost per request."""
    before, others = cpu_s(contender.pid), Others()
    seen = await put(load, contender.url, place.upstream.model, seconds, seed)
    await asyncio.sleep(SETTLE_S)
    spent = cpu_s(contender.pid) - before
    return seen, {
        "cpu_us_per_request": 1e6 * spent / seen.requests,
        "requests_per_s": seen.per_s,
        "memory_mb": memory_bytes(contender.pid) / 1e6,
        "others_share": others.share(),
    }


async def proxied(place: Place, contender: Contender, seconds: float, seed: int) -> Measured:
    """Streams of 16 chunks as fast as they go, 32 at a time."""
    await plan(place, Plan(chunks=16))
    _, measured = await loaded(contender, Load(connections=32), place, seconds, seed)
    return measured


async def saturated(place: Place, contender: Contender, seconds: float, seed: int) -> Measured:
    """The same, with enough connections that each of several processes has its share of them."""
    await plan(place, Plan(chunks=16))
    _, measured = await loaded(contender, Load(connections=64), place, seconds, seed)
    return measured


async def saturated_kv(place: Place, contender: Contender, seconds: float, seed: int) -> Measured:
    """The same by KV cache, with the events that it causes."""
    await plan(place, Plan(chunks=16, kv=True))
    _, measured = await loaded(contender, Load(connections=64), place, seconds, seed)
    return measured


async def streamed(place: Place, contender: Contender, seconds: float, seed: int) -> Measured:
    """400 streams at once, each of a chunk every 40 ms; measured while all of them run."""
    lasts_s = WARM_S + seconds + 1  # longer than is measured: no stream begins or ends meanwhile
    await plan(place, Plan(chunks=int(2 * lasts_s / CHUNK_EVERY_S), gap_s=CHUNK_EVERY_S))
    async with asyncio.TaskGroup() as group:
        load = Load(connections=400, words=20, ends=False)
        putting = group.create_task(put(load, contender.url, place.upstream.model, lasts_s, seed))
        await asyncio.sleep(WARM_S)
        others = Others()
        before, chunks, started = cpu_s(contender.pid), (await counts(place)).chunks, asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        spent, passed = cpu_s(contender.pid) - before, (await counts(place)).chunks - chunks
        took = asyncio.get_running_loop().time() - started
        measured = {
            "cpu_us_per_chunk": 1e6 * spent / passed,
            "chunks_per_s": passed / took,
            "memory_mb": memory_bytes(contender.pid) / 1e6,
            "others_share": others.share(),
        }
        await putting
    return measured


async def first_byte(place: Place, contender: Contender, seconds: float, seed: int) -> Measured:
    """Answers of one chunk, so that the answer's end is its beginning: alone, then 64 that ask now and then, then 64 that always ask."""
    await plan(place, Plan(chunks=1))
    found = {}
    for column, load in {
        "p50_us_at_1": Load(connections=1, words=20),
        "p50_us_at_64": Load(connections=64, words=20, pause_ms=80),
        "p50_us_at_64_saturated": Load(connections=64, words=20),
    }.items():
        found[column] = (await put(load, contender.url, place.upstream.model, max(1.0, seconds / 2), seed)).p50_us
    return found


async def routed(place: Place, contender: Contender, seconds: float, seed: int) -> Measured:
    """By KV cache: fresh prompts of 1,600 tokens, with the events that they cause."""
    return await _routed(place, contender, seconds, seed, Load(connections=16))


async def routed_shared(place: Place, contender: Contender, seconds: float, seed: int) -> Measured:
    """The same, but the first 1,200 tokens are one of eight beginnings."""
    return await _routed(place, contender, seconds, seed, Load(connections=16, shared_words=250))


async def before_real(place: Place, contender: Contender, seconds: float, seed: int) -> Measured:
    """Answers of one token from a real engine to fresh prompts of 1,600 tokens, one after the other."""
    return {"p50_us": (await put(Load(connections=1, tokens=1), contender.url, place.upstream.model, 3 * seconds, seed)).p50_us}


async def _routed(place: Place, contender: Contender, seconds: float, seed: int, load: Load) -> Measured:
    await plan(place, Plan(chunks=16, kv=True))
    _, measured = await loaded(contender, load, place, seconds, seed)
    await plan(place, Plan(chunks=1, kv=True))
    alone = msgspec.structs.replace(load, connections=1, tokens=1)
    measured["p50_us_at_1"] = (await put(alone, contender.url, place.upstream.model, max(1.0, seconds / 4), seed + 1)).p50_us
    return measured


PROXIES = (commutator("round-robin"), vllm_router("round_robin"), sglang_router)
KV = (commutator("kv"), vllm_router("kv_aware"), dynamo)

ROWS = {
    row.name: row
    for row in (
        Row(
            "proxy",
            "round-robin, streams of 16 chunks, fresh prompts of 1,600 tokens, 32 connections",
            PROXIES,
            proxied,
            {"cpu_us_per_request": {"vllm-router": 0.45, "sglang-router": 0.6}},
        ),
        Row(
            "stream",
            "round-robin, 400 concurrent streams, a chunk every 40 ms",
            PROXIES,
            streamed,
            {"cpu_us_per_chunk": {"vllm-router": 0.6, "sglang-router": 0.6}},
        ),
        Row(
            "first-byte",
            "round-robin, time to first byte, short prompts",
            (direct, *PROXIES),
            first_byte,
            {"p50_us_at_64": {"vllm-router": 0.7, "sglang-router": 0.7}},
        ),
        Row(
            "kv",
            "by KV cache, fresh prompts of 1,600 tokens, 16 chunks, live events, 16 connections",
            KV,
            routed,
            {"cpu_us_per_request": {"vllm-router kv_aware": 0.4, "dynamo": 0.12}},
        ),
        Row(
            "real",
            "by KV cache, in front of one real vLLM, fresh prompts of 1,600 tokens, time to first byte",
            (direct, commutator("kv"), vllm_router("kv_aware")),
            before_real,
            {"p50_us": {"vllm-router kv_aware": 0.3}},
            real_vllm,
        ),
        Row("kv-shared", "by KV cache, the first 1,200 of 1,600 tokens shared by one request in eight", KV, routed_shared),
        Row(
            "processes",
            "one process against two, round-robin, streams of 16 chunks, 64 connections",
            (commutator("round-robin"), commutator("round-robin", 2)),
            saturated,
        ),
        Row(
            "processes-kv",
            "one process against two, by KV cache, fresh prompts of 1,600 tokens, live events, 64 connections",
            (commutator("kv"), commutator("kv", 2)),
            saturated_kv,
        ),
    )
}


async def run(row: Row, place: Place, rounds: int, seconds: float, say: Callable[[str], None]) -> dict[str, list[Measured]]:
    """Measure a row: one round of each contender after the other, in an order that turns, so that a slow minute is everybody's."""
    found: dict[str, list[Measured]] = {}
    async with contextlib.AsyncExitStack() as stack:
        contenders = [await stack.enter_async_context(start(place)) for start in row.starts]
        for contender in contenders:  # connections, caches, allocators
            await row.measure(place, contender, 1.0, 1)
        for round_ in range(rounds):
            turn = round_ % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                measured = await row.measure(place, contender, seconds, 100 + round_)
                found.setdefault(contender.name, []).append(measured)
                say(f"{row.name} {round_ + 1}/{rounds} {contender.name}: " + ", ".join(f"{k} {v:.4g}" for k, v in measured.items()))
    return {contender.name: found[contender.name] for contender in contenders}
