from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import time
import weakref

import msgspec
import pytest

from discovery.feed import UNREAD
from discovery.messages import Batch, Beacon, SnapshotChunk, SnapshotRequest, Store
from discovery.mirror import Mirror
from discovery.signal import LIVE, UNPUBLISHED, SignalState
from discovery.subjects import Subjects
from engines.blocks import pack_keys
from engines.types import Endpoint, EngineInfo, KvSource, Tier
from tests.integration.kv_fleet import NAMESPACE, Fleet, Index, ToyEngine, connected, fleet, prompt, running
from tests.waiting import until

ENCODE = msgspec.msgpack.encode


async def copied(mirror: Mirror, index: Index, engine: ToyEngine, what: str = "") -> None:
    """Wait until the copy is complete and is what the engine itself holds."""
    await until(
        lambda: mirror.ready(engine.endpoint) and index.keys(engine.endpoint) == engine.held,
        what=what or f"{engine.endpoint} to be copied",
    )


def state(mirror: Mirror, engine: ToyEngine) -> SignalState:
    return mirror.signal(engine.endpoint, time.monotonic()).state


def reason(mirror: Mirror, engine: ToyEngine) -> str:
    return mirror.signal(engine.endpoint, time.monotonic()).reason


def churn(engine: ToyEngine, rng: random.Random, steps: int) -> None:
    """Traffic as a small cache sees it."""
    for _ in range(steps):
        number = rng.randrange(20)
        if rng.random() < 0.6:
            engine.serve(prompt(number, rng.randint(1, 8)))
        else:
            engine.evict(prompt(number, 8), keep=rng.randrange(4))


async def test_what_an_engine_stores_and_evicts_is_in_the_index() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        await until(lambda: mirror.ready(engine.endpoint))
        assert mirror.signal(engine.endpoint, time.monotonic()) == LIVE
        engine.serve(prompt(1, 5), prompt(2, 3))
        await copied(mirror, index, engine)
        assert len(engine.held) == 8
        assert mirror.block_size(engine.endpoint) == 4
        engine.evict(prompt(1, 5), keep=2)
        await copied(mirror, index, engine)
        assert index.keys(engine.endpoint) == set(engine.keys_of(prompt(1, 2)) + engine.keys_of(prompt(2, 3)))
        counts = made.relay.stats()[engine.endpoint]
        assert (counts.batches, counts.stored, counts.removed, counts.blocks) == (2, 8, 3, 5)


async def test_an_engine_without_kv_events_is_blind_at_once_and_holds_nobody_up() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info(publishes=False)) as (mirror, _):
        made.relay.follow(engine.info(publishes=False))
        assert mirror.ready(engine.endpoint)
        assert mirror.signal(engine.endpoint, 0.0) == UNPUBLISHED
        assert made.relay.stats() == {}


async def test_R5_a_lost_batch_is_replayed_and_the_index_is_that_of_the_run_without_loss() -> None:
    lossy, whole = ToyEngine("http://lossy:1"), ToyEngine("http://whole:1")
    async with fleet() as made, lossy, whole, made.mirror(lossy.info(), whole.info()) as (mirror, index):
        for engine in (lossy, whole):
            made.relay.follow(engine.info())
        await until(lambda: mirror.ready(lossy.endpoint) and mirror.ready(whole.endpoint))
        lossy.serve(prompt(99, 1))
        whole.serve(prompt(99, 1))
        await copied(mirror, index, lossy)
        lossy.publisher.faults.lost_live = {5}
        for number in range(1, 11):
            for engine in (lossy, whole):
                engine.serve(prompt(number, 4))
                engine.evict(prompt(number - 1, 4), keep=1)
        await copied(mirror, index, lossy)
        await copied(mirror, index, whole)
        assert index.keys(lossy.endpoint) == index.keys(whole.endpoint)
        assert made.relay.stats()[lossy.endpoint].lost == 0
        assert mirror.signal(lossy.endpoint, time.monotonic()) == LIVE


async def test_batches_that_cannot_be_replayed_clear_the_rank_and_the_signal_says_so() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        engine.publisher.faults.lost = {1, 2}
        engine.serve(prompt(2, 4))
        engine.evict(prompt(1, 4))
        engine.serve(prompt(3, 2))
        await until(lambda: index.keys(engine.endpoint) == set(engine.keys_of(prompt(3, 2))), what="only what is certain to be left")
        assert state(mirror, engine) is SignalState.PARTIAL
        assert "1 to 2" in reason(mirror, engine)
        assert mirror.signal(engine.endpoint, time.monotonic()).believed
        assert made.relay.stats()[engine.endpoint].lost == 2


async def test_a_relay_that_comes_after_what_the_engine_remembers_is_partial() -> None:
    async with fleet() as made, ToyEngine(keep=3) as engine, made.mirror(engine.info()) as (mirror, index):
        for number in range(6):
            engine.serve(prompt(number, 2))
        made.relay.follow(engine.info())
        remembered = {key for number in (3, 4, 5) for key in engine.keys_of(prompt(number, 2))}
        await until(lambda: mirror.ready(engine.endpoint) and index.keys(engine.endpoint) == remembered, what="what can be replayed")
        assert state(mirror, engine) is SignalState.PARTIAL
        engine.publisher.publish(ENCODE([0.0, [{"type": "AllBlocksCleared"}], 0]))
        await until(lambda: mirror.signal(engine.endpoint, time.monotonic()) == LIVE, what="a cleared cache to be known whole again")
        assert index.keys(engine.endpoint) == set()


async def test_R7_an_engine_restarted_in_place_leaves_nothing_old_behind() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        for number in range(5):
            engine.serve(prompt(number, 4))
        await copied(mirror, index, engine)
        await engine.restart()
        engine.serve(prompt(77, 2))
        await copied(mirror, index, engine)
        assert index.keys(engine.endpoint) == set(engine.keys_of(prompt(77, 2)))
        assert made.relay.stats()[engine.endpoint].restarts == 1


async def test_R7_a_new_boot_time_is_enough_to_forget_the_old_life() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info(boot=1.0)) as (mirror, index):
        made.relay.follow(engine.info(boot=1.0))
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        await engine.restart()
        mirror.expect(engine.info(boot=2.0))
        assert index.keys(engine.endpoint) == set()
        made.relay.follow(engine.info(boot=2.0))
        engine.serve(prompt(2, 4))
        await copied(mirror, index, engine)


async def test_following_and_expecting_an_engine_again_changes_nothing() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        before = mirror.stats()[engine.endpoint].epochs
        made.relay.follow(engine.info())
        mirror.expect(engine.info())
        assert index.keys(engine.endpoint) == engine.held
        engine.serve(prompt(2, 4))
        await copied(mirror, index, engine)
        assert mirror.stats()[engine.endpoint].epochs == before


async def test_R8_an_engine_removed_with_events_still_queued_leaves_an_empty_index_that_stays_empty() -> None:
    gone, other = ToyEngine("http://gone:1"), ToyEngine("http://other:1")
    async with fleet() as made, gone, other, made.mirror(gone.info(), other.info()) as (mirror, index):
        for engine in (gone, other):
            made.relay.follow(engine.info())
            engine.serve(prompt(1, 4))
            await copied(mirror, index, engine)
        for number in range(2, 52):
            gone.serve(prompt(number, 4))
        mirror.forget(gone.endpoint.engine)
        assert gone.endpoint not in index.held
        before = mirror.counts.unexpected
        other.serve(prompt(2, 4))
        await copied(mirror, index, other, "what was published after it")
        await until(lambda: mirror.counts.unexpected >= before + 50, what="the queued events to arrive")
        made.relay.unfollow(gone.endpoint.engine)
        gone.serve(prompt(60, 4))
        other.serve(prompt(3, 4))
        await copied(mirror, index, other)
        assert gone.endpoint not in index.held
        assert not mirror.ready(gone.endpoint)
        assert set(made.relay.stats()) == {other.endpoint}


async def test_an_engine_that_comes_back_after_it_was_forgotten_is_copied_anew() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        mirror.forget(engine.endpoint.engine)
        made.relay.unfollow(engine.endpoint.engine)
        made.relay.unfollow(engine.endpoint.engine)
        made.relay.follow(engine.info())
        mirror.expect(engine.info())
        engine.serve(prompt(2, 4))
        await copied(mirror, index, engine)


async def test_R34_one_who_joins_late_is_ready_only_when_its_index_equals_the_first_s() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (first, first_index):
        made.relay.follow(engine.info())
        for number in range(200):
            engine.serve(prompt(number, 5))
        await copied(first, first_index, engine)
        async with made.mirror(engine.info()) as (late, late_index):
            assert not late.ready(engine.endpoint)
            assert not late.signal(engine.endpoint, time.monotonic()).believed
            wrong: list[int] = []

            def ready() -> bool:
                if late.ready(engine.endpoint) and late_index.held != first_index.held:
                    wrong.append(len(late_index.keys(engine.endpoint)))
                return late.ready(engine.endpoint)

            await until(ready)
            assert wrong == []
            assert late.signal(engine.endpoint, time.monotonic()) == LIVE
            assert late.block_size(engine.endpoint) == 4
            engine.serve(prompt(500, 3))
            await copied(late, late_index, engine)
            await copied(first, first_index, engine)


async def test_one_who_joins_in_the_middle_of_traffic_misses_nothing_of_it() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (first, first_index):
        made.relay.follow(engine.info())
        rng = random.Random(7)
        stop = False

        async def traffic() -> None:
            while not stop:
                churn(engine, rng, 5)
                await asyncio.sleep(0.001)
            await asyncio.Event().wait()

        async with running(traffic()):
            await until(lambda: first.ready(engine.endpoint) and len(first_index.keys(engine.endpoint)) > 20)
            async with made.mirror(engine.info()) as (late, late_index):
                await until(lambda: late.ready(engine.endpoint))
                stop = True
                await copied(late, late_index, engine)
                await copied(first, first_index, engine)
                assert late.stats()[engine.endpoint].mismatches == 0


async def test_S17_a_snapshot_over_one_mebibyte_passes_the_broker_s_limit() -> None:
    blocks = 200_000
    async with fleet() as made, ToyEngine() as engine:
        made.relay.follow(engine.info())
        for number in range(blocks // 2000):
            engine.serve(prompt(number, 2000))
            await asyncio.sleep(0)
        await until(lambda: made.relay.stats()[engine.endpoint].blocks == blocks, deadline_s=60, what="the relay to have it all")
        async with made.mirror(engine.info()) as (mirror, index):
            await until(lambda: mirror.ready(engine.endpoint), deadline_s=60)
            assert len(index.held[engine.endpoint]) == blocks
            assert index.keys(engine.endpoint) == engine.held


async def test_what_was_known_of_an_engine_that_left_is_gone_without_a_garbage_collection() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        feed = weakref.ref(made.relay._followed[engine.endpoint].feed)
        gc.disable()
        try:
            made.relay.unfollow(engine.endpoint.engine)
            await until(lambda: feed() is None, what="its feed to be freed")
        finally:
            gc.enable()


async def test_of_questions_that_wait_in_line_only_the_last_of_each_mirror_is_answered() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index), connected(made.url, "asks") as asks:
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        subjects, answered = Subjects(NAMESPACE), []
        asks.subscribe(f"{NAMESPACE}.reply.>", lambda subject, payload, reply: answered.append(subject))
        await asks.flush()
        questions = [subjects.reply(name, engine.endpoint, attempt) for attempt in (1, 2, 3) for name in ("one", "other")]
        for reply in questions:  # in one go: none is answered before the last is asked
            made.relay._on_request("", ENCODE(SnapshotRequest(engine.endpoint)), reply)
        await until(lambda: len(answered) >= 2)
        await made.bus.flush()
        await asks.flush()
        assert answered == questions[-2:]


async def test_one_step_that_stores_more_than_a_message_holds_is_split_and_whole() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        await until(lambda: mirror.ready(engine.endpoint))
        engine.serve(prompt(1, 150_000))
        await until(lambda: len(index.held[engine.endpoint]) == 150_000, deadline_s=60)
        await copied(mirror, index, engine)
        assert mirror.stats()[engine.endpoint].batches > 1


async def test_H14_a_broker_killed_under_load_costs_nothing_once_it_is_back() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        rng = random.Random(3)
        for _ in range(2):
            before = made.broker.restarts
            assert made.broker.pid is not None
            os.kill(made.broker.pid, signal.SIGKILL)
            await until(lambda: state(mirror, engine) is SignalState.STALE, what="the signal to be stale while the bus is away")
            assert "bus" in reason(mirror, engine) or "copied" in reason(mirror, engine)
            held = index.keys(engine.endpoint)
            churn(engine, rng, 50)
            assert index.keys(engine.endpoint) == held, "what was known is kept"
            await until(lambda before=before: made.broker.restarts > before)
            await copied(mirror, index, engine)
            await until(lambda: mirror.signal(engine.endpoint, time.monotonic()) == LIVE, what="the signal to be live again")


async def test_a_relay_that_dies_makes_its_engines_stale_and_the_next_one_mends_it() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        async with connected(made.url, "second") as bus:
            first = made.new_relay(bus)
            first.follow(engine.info())
            async with running(first.run()):
                engine.serve(prompt(1, 4))
                await copied(mirror, index, engine)
        await until(lambda: state(mirror, engine) is SignalState.STALE, what="silence of the relay to be noticed")
        assert "relay" in reason(mirror, engine)
        assert index.keys(engine.endpoint) == engine.held
        engine.evict(prompt(1, 4), keep=1)
        made.relay.follow(engine.info())
        await copied(mirror, index, engine)
        await until(lambda: mirror.signal(engine.endpoint, time.monotonic()) == LIVE)


@pytest.mark.parametrize("blocks", [5, 400], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("changed", [False, True], ids=["unchanged", "changed meanwhile"])
async def test_R34_a_relay_that_takes_over_takes_nothing_away_meanwhile(changed: bool, blocks: int) -> None:
    """Looked at in every turn of the loop: what the router knows is never less than what the engine has held all the time."""
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        async with connected(made.url, "first") as bus:
            first = made.new_relay(bus)
            first.follow(engine.info())
            async with running(first.run()):
                for number in range(50):
                    engine.serve(prompt(number, blocks))
                await copied(mirror, index, engine)
        least = len(engine.held)
        if changed:
            engine.evict(prompt(7, blocks), keep=2)
            engine.serve(prompt(60, blocks))
            least -= blocks - 2
        seen: list[int] = []

        async def look() -> None:
            while True:
                seen.append(len(index.held[engine.endpoint]))
                assert mirror.ready(engine.endpoint)
                await asyncio.sleep(0)

        async with running(look()):
            made.relay.follow(engine.info())
            await until(lambda: made.relay.complete(engine.endpoint.engine), what="it has read all")
            await copied(mirror, index, engine)
            engine.serve(prompt(61, 5))
            await copied(mirror, index, engine)
        assert min(seen) >= least
        assert mirror.stats()[engine.endpoint].resyncs == {"joined": 1} | ({"relay": 1} if changed else {})


async def test_R3_an_engine_that_never_publishes_is_named_blind_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, _):
        engine.publisher.faults.muted = True
        made.relay.follow(engine.info())
        await until(lambda: mirror.ready(engine.endpoint))
        with caplog.at_level(logging.INFO, "discovery.mirror"):
            for _ in range(3):
                mirror.served(engine.endpoint, time.monotonic(), new_blocks=4)
            await until(lambda: state(mirror, engine) is SignalState.BLIND)
            assert reason(mirror, engine)
            assert not mirror.signal(engine.endpoint, time.monotonic()).believed
            await until(lambda: _changes(caplog) == [("blind", engine.endpoint)])
        engine.publisher.faults.muted = False
        engine.serve(prompt(1, 4))
        await until(lambda: mirror.signal(engine.endpoint, time.monotonic()) == LIVE, what="it to be live as soon as it is heard")


async def test_R4_a_feed_that_dies_mid_run_is_stale_and_says_since_when() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        engine.publisher.faults.muted = True
        sent = time.monotonic()
        mirror.served(engine.endpoint, time.monotonic(), new_blocks=4, sent_at=sent)
        await until(lambda: state(mirror, engine) is SignalState.STALE)
        assert "events stopped" in reason(mirror, engine)


async def test_an_engine_whose_events_change_nothing_is_not_taken_for_silent() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, _):
        made.relay.follow(engine.info())
        await until(lambda: mirror.ready(engine.endpoint))
        mirror.served(engine.endpoint, time.monotonic(), new_blocks=4)
        await until(lambda: state(mirror, engine) is SignalState.BLIND)
        engine.publish_nothing_new()
        await until(lambda: mirror.signal(engine.endpoint, time.monotonic()) == LIVE)


async def test_R1_a_configured_block_size_that_the_events_contradict_is_a_mismatch() -> None:
    info: EngineInfo
    async with fleet() as made, ToyEngine() as engine:
        info = engine.info(configured=16)
        async with made.mirror(info) as (mirror, _):
            made.relay.follow(info)
            await until(lambda: mirror.ready(engine.endpoint))
            engine.serve(prompt(1, 4))
            await until(lambda: state(mirror, engine) is SignalState.MISMATCH)
            assert "16" in reason(mirror, engine)
            assert "4" in reason(mirror, engine)


async def test_a_source_that_can_never_be_read_is_stale_and_ends_nobody_else_s() -> None:
    engine = ToyEngine("http://good:1")
    async with fleet() as made, engine:
        bad = msgspec.structs.replace(engine.info(), id="http://bad:1", kv_sources=(KvSource(0, "not-a-transport://nowhere"),))
        async with made.mirror(bad, engine.info()) as (mirror, index):
            made.relay.follow(bad)
            made.relay.follow(engine.info())
            engine.serve(prompt(1, 4))
            await copied(mirror, index, engine)
            mirror.served(Endpoint("http://bad:1"), time.monotonic(), new_blocks=1)
            await until(lambda: not mirror.signal(Endpoint("http://bad:1"), time.monotonic()).believed)


async def test_data_parallel_ranks_are_copies_of_their_own() -> None:
    zero, one = ToyEngine("http://both:1"), ToyEngine("http://both:1")
    async with fleet() as made, zero, one:
        sources = (*zero.info().kv_sources, msgspec.structs.replace(one.info().kv_sources[0], rank=1))
        info = msgspec.structs.replace(zero.info(), ranks=(0, 1), kv_sources=sources)
        one.endpoint = Endpoint("http://both:1", 1)
        async with made.mirror(info) as (mirror, index):
            made.relay.follow(info)
            for engine in (zero, one):
                engine.serve(prompt(1, 4))
                await copied(mirror, index, engine)
            one.evict(prompt(1, 4))
            await copied(mirror, index, one)
            assert index.keys(zero.endpoint) == zero.held != set()
            fewer = msgspec.structs.replace(info, ranks=(0,), kv_sources=sources[:1])
            mirror.expect(fewer)
            made.relay.follow(fewer)
            assert one.endpoint not in index.held
            assert set(made.relay.stats()) == {zero.endpoint}


async def test_a_copy_that_is_wrong_for_whatever_reason_is_found_by_its_digest_and_mended() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        subjects, stats = Subjects(NAMESPACE), mirror.stats()[engine.endpoint]
        epoch, seq = await _position(made, engine)
        forged = Batch(epoch, seq, [Store(Tier.DEVICE, pack_keys([1, 2, 3]))])
        made.bus.publish(subjects.stream(engine.endpoint), ENCODE(forged))
        await until(lambda: stats.requests > 0 and stats.mismatches + stats.duplicates + stats.gaps > 0, what="the forgery to be found")
        await copied(mirror, index, engine)
        engine.serve(prompt(2, 4))
        await copied(mirror, index, engine)


async def test_A9_ten_thousand_fuzzed_messages_are_counted_and_harmless() -> None:
    rng = random.Random(11)
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        subjects = Subjects(NAMESPACE)
        targets = [
            subjects.stream(engine.endpoint),
            subjects.snapshot(engine.endpoint),
            f"{NAMESPACE}.kv.=GG.0",
            f"{NAMESPACE}.kv.{'x' * 200}.7",
            subjects.stream(Endpoint("http://unknown:1")),
            subjects.reply(mirror._name, engine.endpoint, 1),
            f"{NAMESPACE}.reply.{mirror._name}.a.b.c",
        ]
        honest = [
            ENCODE(Batch("r.1", 3, [Store(Tier.DEVICE, pack_keys([1, 2]))])),
            ENCODE(Beacon("r.1", 3, 2, 3, 16, "live", "")),
            ENCODE(SnapshotChunk("r.1", 3, 0, 1, [])),
            ENCODE(SnapshotRequest(engine.endpoint)),
        ]
        sent = 0
        for _ in range(10_000):
            body = rng.randbytes(rng.randrange(64)) if rng.random() < 0.3 else _mutated(rng, rng.choice(honest))
            sent += made.bus.publish(rng.choice(targets), body, rng.choice(["", "nowhere"]))
            if sent % 500 == 0:
                await asyncio.sleep(0)
        await made.bus.flush()
        engine.serve(prompt(2, 4))
        await copied(mirror, index, engine, "the copy to be right after all that")
        assert sent == 10_000
        assert mirror.counts.undecodable > 1000
        assert mirror.counts.unexpected > 1000
        assert made.relay.rejected > 500
        assert made.bus.counts.failed == 0
        assert set(index.held) == {engine.endpoint}
        assert set(mirror.stats()) == {engine.endpoint}


async def test_garbage_from_the_engine_is_counted_and_what_it_may_have_removed_is_held_no_more() -> None:
    rng = random.Random(5)
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        before = set(engine.held)
        for _ in range(100):
            engine.publisher.publish(rng.randbytes(rng.randrange(1, 64)))
        engine.serve(prompt(2, 4))
        await until(lambda: index.keys(engine.endpoint) == engine.held - before, what="what came since to be copied")
        assert (state(mirror, engine), reason(mirror, engine)) == (SignalState.PARTIAL, UNREAD)
        counts = made.relay.stats()[engine.endpoint]
        assert sum(counts.undecodable.values()) + sum(counts.skipped.values()) >= 90
        assert counts.crashes == 0


async def test_a_new_router_asks_nobody_and_is_told_when_the_relay_comes() -> None:
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        await until(lambda: mirror.counts.unanswered > 0, what="NATS to say that nobody is there")
        assert not mirror.ready(engine.endpoint)
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)


async def test_nothing_of_relay_and_mirror_outlives_them() -> None:
    before = asyncio.all_tasks()
    async with fleet() as made, ToyEngine() as engine, made.mirror(engine.info()) as (mirror, index):
        made.relay.follow(engine.info())
        engine.serve(prompt(1, 4))
        await copied(mirror, index, engine)
        made.relay.unfollow(engine.endpoint.engine)
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert any(name.startswith("kv events") for name in names)
        await until(lambda: not any(task.get_name().startswith("kv events") for task in asyncio.all_tasks()))
    await until(lambda: asyncio.all_tasks() <= before, what="every task to end")


def _changes(caplog: pytest.LogCaptureFixture) -> list[tuple[object, object]]:
    fields = [getattr(record, "fields", {}) for record in caplog.records if record.getMessage() == "KV signal changed"]
    return [(said["signal"], Endpoint(said["endpoint"].rpartition("#")[0])) for said in fields]


async def _position(made: Fleet, engine: ToyEngine) -> tuple[str, int]:
    """Epoch and next number of an endpoint's stream, as its next beacon has them."""
    seen: list[Beacon] = []

    def take(subject: str, payload: bytes, reply: str) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            seen.append(msgspec.msgpack.decode(payload, type=Beacon))

    subscription = made.bus.subscribe(Subjects(NAMESPACE).stream(engine.endpoint), take)
    await until(lambda: seen, what="a beacon")
    subscription.cancel()
    return seen[-1].epoch, seen[-1].seq


def _mutated(rng: random.Random, body: bytes) -> bytes:
    made = bytearray(body)
    for _ in range(rng.randrange(1, 4)):
        made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made[: rng.randrange(len(made))] if rng.random() < 0.3 else made)
