"""The event stream's rows, from the engine's cache to the router's decision: whatever happens to batches, the router knows what is there."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Sequence

import msgspec
import pytest

from discovery.peers import MAX_PEERS, Hello, Presence, Told, Update
from discovery.subjects import Subjects
from engines.simulator.engine import SimulatedEngine
from engines.types import EngineKind
from tests.frames import recorded
from tests.integration.kv_fleet import NAMESPACE, ToyEngine, connected
from tests.integration.kv_fleet import fleet as toys
from tests.integration.kv_fleet import prompt as tokens
from tests.integration.test_admin import TOKEN, Operator
from tests.integration.test_several_routers import holds_the_truth, longest, overlaps, replayed_through
from tests.rig import Router, fleet, prompt, routing
from tests.waiting import until

ENCODE = msgspec.msgpack.encode
RECORDED = (
    "vllm/events_ev0.jsonl",
    "vllm/events_lora.jsonl",
    "vllm/events_hybrid_gemma3.jsonl",
    "sglang/page1.jsonl",
    "sglang/events_hicache.json",
)


async def served(router: Router, engine: SimulatedEngine, texts: Sequence[str]) -> None:
    """Each is computed by the engine, and the engine has published what came of it."""
    for text in texts:
        before = engine.next_seq
        assert (await router.chat(text)).status == 200
        await until(lambda before=before: engine.next_seq > before, what="the engine publishes")


async def counted(router: Router, name: str) -> float:
    return await router.metric(f"relay_{name}_total")


@pytest.mark.parametrize("kind", list(EngineKind))
async def test_R5_of_ten_batches_one_is_lost_and_the_router_knows_what_it_would_have_known(kind: EngineKind) -> None:
    texts = [prompt(f"t{number}", 60) for number in range(10)]
    async with fleet(2, kind=kind) as (lossy, whole), routing([lossy]) as router, routing([whole]) as other:
        lossy.faults.kv.lost_live = {lossy.next_seq + 5}
        for one, engine in ((router, lossy), (other, whole)):
            await served(one, engine, texts)
            await holds_the_truth([one], [engine])
        known, wanted = longest(await overlaps(router, texts)), longest(await overlaps(other, texts))
        assert known == wanted
        assert min(known) > 0
        assert [await counted(router, name) for name in ("gaps", "losses", "restarts")] == [1, 0, 0]
        assert await counted(router, "replayed_batches") >= 1
        assert await router.metric("router_signal_state", state="live") == 1


async def test_R6_what_was_stored_in_a_gap_and_removed_after_it_is_absent_though_the_replay_comes_late() -> None:
    first = prompt("a", 60)
    async with fleet(1, kv_blocks=32) as (engine,), replayed_through(engine) as (way, spec), routing([spec]) as router:
        await served(router, engine, [prompt("before", 10)])
        await holds_the_truth([router], [engine])
        way.stalled = True
        asked = way.accepted
        engine.faults.kv.lost_live = {engine.next_seq}
        await served(router, engine, [first])
        held = engine.cache.names
        await served(router, engine, [prompt(f"evicting{number}", 60) for number in range(4)])
        assert held & engine.cache.names < held, "the engine has dropped of what it stored in the gap"
        await until(lambda: way.accepted > asked, what="the replay is asked")
        way.stalled = False
        await holds_the_truth([router], [engine])
        answer = await router.chat(first)
        assert (answer.overlap_tokens, answer.cached_tokens) == (0, 0)


async def test_R8_an_engine_removed_with_fifty_of_its_events_still_queued_leaves_nothing() -> None:
    async with fleet(2) as (gone, stays), routing([gone, stays], admin_token=TOKEN) as router:
        for number in range(8):
            await router.chat(prompt(f"t{number}", 60))
        await holds_the_truth([router], [gone, stays])
        for number in range(50):  # published in one go: none of it has been read when the engine is removed
            gone.faults.publish(ENCODE([0.0, [_stored(number)], 0]))
        assert (await Operator(router).engine(gone.url, "", "DELETE", "?now=1")).status == 200
        await _removed(router, gone)
        await router.chat(prompt("after", 60))
        await holds_the_truth([router], [stays])
        known = await overlaps(router, [prompt(f"t{number}", 60) for number in range(8)])
        assert {engine for candidates in known for engine in candidates} == {stays.url}
        await _removed(router, gone)


async def _removed(router: Router, engine: SimulatedEngine) -> None:
    async def gone() -> bool:
        return f'engine="{engine.url}"' not in (await router.get("/metrics")).body.decode()

    await until(gone, what="the engine is gone")


def _stored(name: int, *, parent: int | None = None) -> dict[str, object]:
    token_ids = [name * 100 + at for at in range(16)]
    return {
        "type": "BlockStored",
        "block_hashes": [name + 1],
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
    }


@pytest.mark.parametrize("old", [True, False], ids=["seq, payload", "topic, seq, payload"])
async def test_R10_a_router_that_comes_late_rebuilds_the_index_from_replies_of_either_shape(old: bool) -> None:
    texts = [prompt(f"t{number}", 60) for number in range(6)]
    async with fleet(1) as (engine,):
        engine.faults.kv.old_replay = old
        async with routing([engine]) as before:
            await served(before, engine, texts)
            await holds_the_truth([before], [engine])
            known = longest(await overlaps(before, texts))
        async with routing([engine]) as late:
            assert longest(await overlaps(late, texts)) == known
            await holds_the_truth([late], [engine])
            assert await counted(late, "replayed_batches") == engine.next_seq


async def test_R11_a_block_stored_twice_and_removed_once_is_still_held() -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:

        async def publish(*events: dict[str, object]) -> None:
            seq = engine.next_seq
            engine.faults.publish(ENCODE([0.0, list(events), 0]))

            async def read() -> bool:
                return await counted(router, "batches") == seq + 1

            await until(read, what="the router has read it")

        held = _stored(1)
        removed: dict[str, object] = {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}

        async def overlap() -> int:
            body = {"model": "sim", "prompt": [*held["token_ids"], 1]}  # type: ignore[misc]  # a list
            [candidate] = (await router.post("/route", body)).json["candidates"]
            return int(candidate["overlap"]["device"])

        await publish(held, held)
        assert await overlap() == 1
        await publish(removed)
        assert await overlap() == 1
        await publish(removed)
        assert await overlap() == 0


async def test_A9_ten_thousand_fuzzed_event_frames_end_nothing_and_leave_nothing_behind() -> None:
    rng = random.Random(13)
    honest = [message.payload for name in RECORDED for message in recorded(name) if message.is_kv]
    async with toys() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(tokens(1, 4))
        await until(lambda: index.keys(engine.endpoint) == engine.held != set())
        tasks = len(asyncio.all_tasks())

        async def fuzz(count: int) -> None:
            read = made.relay.stats()[engine.endpoint]
            seen = read.batches + sum(read.undecodable.values())
            for number in range(count):
                engine.publisher.publish(_fuzzed(rng, honest))
                if number % 100 == 99:
                    await asyncio.sleep(0)

            def all_read() -> bool:
                now = made.relay.stats()[engine.endpoint]
                return now.batches + sum(now.undecodable.values()) >= seen + count

            await until(all_read, deadline_s=60, what="all of it is read")

        await fuzz(2_000)
        tracemalloc.start()
        try:
            await fuzz(1_000)
            before = tracemalloc.get_traced_memory()[0]
            await fuzz(7_000)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        counts = made.relay.stats()[engine.endpoint]
        assert (counts.crashes, counts.restarts) == (0, 0)
        assert len(counts.undecodable) + len(counts.skipped) < 40, "kinds are of a closed list"
        assert sum(counts.undecodable.values()) > 1000
        assert grown < 8 << 20, "what honest fragments stored is held, and the publisher's memory of what it sent; nothing else"
        assert len(asyncio.all_tasks()) == tasks
        engine.publisher.publish(ENCODE([0.0, [{"type": "AllBlocksCleared"}], 0]))
        engine.held.clear()
        engine.serve(tokens(2, 4))
        await until(lambda: index.keys(engine.endpoint) == engine.held, what="and what is honest is followed as before")
        assert mirror.ready(engine.endpoint)


def _fuzzed(rng: random.Random, honest: Sequence[bytes]) -> bytes:
    if rng.random() < 0.3:
        return rng.randbytes(rng.randrange(64))
    made = bytearray(rng.choice(honest))
    for _ in range(rng.randrange(1, 4)):
        made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made[: rng.randrange(len(made))] if rng.random() < 0.3 else made)


async def test_A9_ten_thousand_fuzzed_messages_between_routers_change_no_count_of_ours() -> None:
    rng = random.Random(17)
    honest = [
        ENCODE(Hello("x")),
        ENCODE(Presence("x", [Told("http://e:1", 0, 1, 2)], ["http://e:1"], {"http://e:1": 9}, None)),
        ENCODE(Update("x", [Told("http://e:1", 0, 1, 2)], [], [])),
    ]
    async with (
        toys() as made,
        fleet(1) as (engine,),
        connected(made.url, "stranger") as stranger,
        routing([engine], nats=made.url, namespace=NAMESPACE) as router,
    ):
        sent = 0
        for _ in range(10_000):
            sent += stranger.publish(Subjects(NAMESPACE).routers, _fuzzed(rng, honest))
            if sent % 500 == 0:
                await asyncio.sleep(0)
        await stranger.flush()
        assert sent == 10_000
        assert (await router.chat(prompt("a"))).status == 200
        assert await router.metric("router_peers") <= MAX_PEERS
        await holds_the_truth([router], [engine])
        assert await counted(router, "batches") > 0, "what nobody relays, it reads itself"
