"""Much at once, the whole way: engines' sockets, relay, NATS, mirror, and the index that routing asks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from discovery.mirror import Mirror
from engines.blocks import pack_keys
from engines.types import Tier
from router.caches import Caches
from tests.integration.kv_fleet import BLIND_S, BLOCK, NAMESPACE, Fleet, ToyEngine, connected, fleet, prompt, running
from tests.waiting import until

BATCHES = 100_000
BASE = 400
BRANCHES = 10_000
DEADLINE_S = 180.0


@contextlib.asynccontextmanager
async def index_of(made: Fleet, *engines: ToyEngine) -> AsyncIterator[tuple[Mirror, Caches]]:
    """A router's index, told over the bus."""
    caches = Caches()
    async with connected(made.url, "index") as bus:
        mirror = Mirror(bus, NAMESPACE, caches, blind_after_s=BLIND_S)
        for engine in engines:
            caches.add(engine.endpoint)
            mirror.expect(engine.info())
            made.relay.follow(engine.info())
        async with running(mirror.run()):
            await until(lambda: all(mirror.ready(engine.endpoint) for engine in engines))
            for engine in engines:
                engine.serve(prompt(0, 1))
            await until(lambda: all(caches.size(engine.endpoint) for engine in engines), what="the first batch of each")
            yield mirror, caches


def same(mirror: Mirror, caches: Caches, engine: ToyEngine, prompts: list[list[int]]) -> bool:
    """Whether the index has of every prompt what the engine has, and nothing else."""
    if not mirror.ready(engine.endpoint) or caches.size(engine.endpoint) != len(engine.held):
        return False
    for tokens in prompts:
        keys = engine.keys_of(tokens)
        held = next((depth for depth, key in enumerate(keys) if key not in engine.held), len(keys))
        if caches.overlaps(keys, [engine.endpoint])[engine.endpoint].device != held:
            return False
    return True


def burst(engine: ToyEngine, batches: int, rng: random.Random) -> None:
    """So many batches, without a pause."""
    wanted = engine.publisher.next_seq + batches
    while engine.publisher.next_seq < wanted:
        tokens = prompt(rng.randrange(1, 60), 8)
        if rng.random() < 0.5:
            engine.serve(tokens[: BLOCK * rng.randint(1, 8)])
        else:
            engine.evict(tokens, keep=rng.randrange(8))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("batches", "lost"), [(BATCHES, "nothing"), (BATCHES // 10, "on the way from the engine"), (BATCHES // 10, "on the way from the bus")]
)
async def test_M10_after_a_hundred_thousand_batches_in_a_burst_the_index_is_what_the_engines_hold(
    batches: int, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(10)
    heard = 0
    on_stream = Mirror._on_stream

    def forgetful(self: Mirror, subject: str, payload: bytes, reply: str) -> None:
        nonlocal heard
        heard += 1
        if heard % 20:
            on_stream(self, subject, payload, reply)

    if lost == "on the way from the bus":
        monkeypatch.setattr(Mirror, "_on_stream", forgetful)
    async with (
        fleet() as made,
        ToyEngine("http://a:1", keep=batches) as a,
        ToyEngine("http://b:1", keep=batches) as b,
        index_of(made, a, b) as (mirror, caches),
    ):
        engines = [a, b]
        if lost == "on the way from the engine":
            for engine in engines:
                engine.publisher.faults.lost_live.update(rng.sample(range(2, batches // 2), 100))
        for engine in engines:
            burst(engine, batches // 2, rng)
        prompts = [prompt(number, 8) for number in range(60)]
        await until(
            lambda: all(made.relay.stats()[engine.endpoint].batches == engine.publisher.next_seq for engine in engines),
            deadline_s=DEADLINE_S,
            what="the relay to have every batch",
        )
        await until(
            lambda: all(same(mirror, caches, engine, prompts) for engine in engines),
            deadline_s=DEADLINE_S,
            what="the index to be the truth",
        )
        counts = mirror.stats().values()
        assert all(made.relay.stats()[engine.endpoint].losses == 0 for engine in engines)
        if lost == "on the way from the bus":
            assert sum(count.gaps for count in counts) > 0
            assert sum(count.snapshots for count in counts) > 0
        else:
            assert sum(count.gaps + count.mismatches + count.snapshots for count in counts) == 0
        caches._check()


@pytest.mark.timeout(400)
async def test_M3_ten_thousand_branches_of_a_long_prefix_come_and_go_and_leave_what_was_there_before() -> None:
    base = prompt(1, BASE)
    async with fleet() as made, ToyEngine(keep=100) as engine, index_of(made, engine) as (mirror, caches):
        engine.serve(base)
        await until(lambda: same(mirror, caches, engine, [base]))
        entries, memory, kept = len(caches), caches.memory_bytes(), made.relay.stats()[engine.endpoint].blocks
        for branch in range(BRANCHES):
            tokens = base[: BLOCK * (branch % BASE + 1)] + [3_000_000_000 + branch] * 3 * BLOCK
            engine.serve(tokens)
            engine.evict(tokens, keep=branch % BASE + 1)
            if branch % 100 == 0:
                await asyncio.sleep(0)
        engine.serve(base)
        await until(
            lambda: made.relay.stats()[engine.endpoint].batches == engine.publisher.next_seq, deadline_s=DEADLINE_S, what="every batch"
        )
        await until(lambda: same(mirror, caches, engine, [base]), deadline_s=DEADLINE_S, what="the index to be as before")
        assert len(caches) == entries
        assert made.relay.stats()[engine.endpoint].blocks == kept
        assert caches.memory_bytes() < 2 * memory
        caches._check()


async def test_M3_ten_thousand_engines_that_come_and_go_leave_nothing_behind() -> None:
    caches = Caches()
    base = list(range(1, BASE + 1))
    async with fleet() as made, connected(made.url, "index") as bus:
        mirror = Mirror(bus, NAMESPACE, caches)
        keeper = ToyEngine("http://keeper:1")
        caches.add(keeper.endpoint)
        caches.store(keeper.endpoint, Tier.DEVICE, [pack_keys(base)])
        memory = caches.memory_bytes()
        for number in range(BRANCHES):
            info = ToyEngine(f"http://e{number}:1").info()
            [endpoint] = info.endpoints
            caches.add(endpoint)
            mirror.expect(info)
            caches.store(endpoint, Tier.DEVICE, [pack_keys(base[: number % BASE] + [number << 20 | depth for depth in range(8)])])
            mirror.forget(info.id)
            caches.discard(endpoint)
            while caches.sweep(1000) == 1000:
                pass
        assert len(caches) == BASE
        assert caches.size(keeper.endpoint) == BASE
        assert caches.memory_bytes() < 2 * memory
        assert mirror.stats() == {}
        caches._check()
