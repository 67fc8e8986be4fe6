"""A router that reads an engine itself takes nothing of it from the bus, and is still the same copy as everybody else's."""

from __future__ import annotations

import functools
import operator
import os
import random
import signal
import time

from discovery.digests import digest_of
from discovery.mirror import Mirror
from discovery.signal import LIVE, SignalState
from discovery.subjects import Subjects
from tests.integration.kv_fleet import NAMESPACE, Fleet, Index, ToyEngine, connected, fleet, prompt, running
from tests.waiting import until


def churn(engine: ToyEngine, rng: random.Random, steps: int) -> None:
    """Traffic as a small cache sees it."""
    for _ in range(steps):
        number = rng.randrange(20)
        if rng.random() < 0.6:
            engine.serve(prompt(number, rng.randint(1, 8)))
        else:
            engine.evict(prompt(number, 8), keep=rng.randrange(4))


def digest(index: Index, engine: ToyEngine) -> int:
    return functools.reduce(operator.xor, (digest_of(key, tier) for tier, key in index.held[engine.endpoint]), 0)


def state(mirror: Mirror, engine: ToyEngine) -> SignalState:
    return mirror.signal(engine.endpoint, time.monotonic()).state


async def copied(mirror: Mirror, index: Index, engine: ToyEngine) -> None:
    await until(lambda: mirror.ready(engine.endpoint) and index.keys(engine.endpoint) == engine.held, what="the engine to be copied")


async def agreed(one: Index, remote: Mirror, other: Index, engine: ToyEngine) -> None:
    """Wait until both are what the engine holds; then they are the same by digest, and the remote one has its digest from a beacon."""
    await copied(remote, other, engine)
    await until(lambda: one.keys(engine.endpoint) == engine.held)
    sync = remote._copies[engine.endpoint].sync
    assert sync.digest == digest(other, engine) == digest(one, engine)
    assert sync.blocks == len(engine.held)


async def test_R34_a_mirror_told_directly_is_the_same_copy_as_one_across_the_bus() -> None:
    async with (
        fleet() as made,
        ToyEngine() as engine,
        made.router() as (relay, local, local_index),
        made.mirror(engine.info()) as (remote, remote_index),
    ):
        relay.follow(engine.info())
        local.expect(engine.info())
        rng = random.Random(1)
        for _ in range(20):
            churn(engine, rng, 10)
            await agreed(local_index, remote, remote_index, engine)
        assert local.signal(engine.endpoint, time.monotonic()) == LIVE
        assert local.block_size(engine.endpoint) == 4
        counts = remote.stats()[engine.endpoint]
        assert (counts.gaps, counts.mismatches) == (0, 0)
        async with made.mirror(engine.info()) as (late, late_index):
            churn(engine, rng, 10)
            await agreed(local_index, late, late_index, engine)
        assert local.stats()[engine.endpoint].requests == 0, "it never has to ask"
        assert (local.counts.unexpected, local.counts.undecodable) == (0, 0)


async def test_H14_while_the_broker_is_away_a_router_that_reads_engines_itself_misses_nothing() -> None:
    async with (
        fleet() as made,
        ToyEngine() as engine,
        made.router() as (relay, local, local_index),
        made.mirror(engine.info()) as (remote, remote_index),
    ):
        relay.follow(engine.info())
        local.expect(engine.info())
        engine.serve(prompt(1, 4))
        await agreed(local_index, remote, remote_index, engine)
        rng = random.Random(2)
        for _ in range(2):
            before = made.broker.restarts
            assert made.broker.pid is not None
            os.kill(made.broker.pid, signal.SIGKILL)
            await until(lambda: state(remote, engine) is SignalState.STALE, what="the one across the bus to be stale")
            churn(engine, rng, 50)
            await copied(local, local_index, engine)
            assert state(local, engine) is SignalState.LIVE
            await until(lambda before=before: made.broker.restarts > before)
            churn(engine, rng, 50)
            await agreed(local_index, remote, remote_index, engine)
            await until(lambda: remote.signal(engine.endpoint, time.monotonic()) == LIVE)


async def test_two_routers_that_both_read_an_engine_do_not_disturb_each_other() -> None:
    async with (
        fleet() as made,
        ToyEngine() as engine,
        made.router() as (relay, one, one_index),
        made.router() as (other_relay, other, other_index),
    ):
        for each, mirror in ((relay, one), (other_relay, other)):
            each.follow(engine.info())
            mirror.expect(engine.info())
        rng = random.Random(3)
        epochs = one.stats()[engine.endpoint].epochs
        for _ in range(10):
            churn(engine, rng, 10)
            await copied(one, one_index, engine)
            await copied(other, other_index, engine)
        assert digest(one_index, engine) == digest(other_index, engine)
        assert one.stats()[engine.endpoint].requests == other.stats()[engine.endpoint].requests == 0
        assert one.stats()[engine.endpoint].epochs == epochs


async def test_a_mirror_that_expects_an_engine_late_has_at_once_what_its_relay_holds() -> None:
    async with fleet() as made, ToyEngine() as engine, made.router() as (relay, mirror, index):
        relay.follow(engine.info())
        engine.serve(prompt(1, 4), prompt(2, 3))
        await until(lambda: relay.stats()[engine.endpoint].blocks == 7)
        mirror.expect(engine.info())
        assert mirror.ready(engine.endpoint)
        assert index.keys(engine.endpoint) == engine.held
        assert mirror.block_size(engine.endpoint) == 4
        mirror.forget(engine.endpoint.engine)
        assert engine.endpoint not in index.held
        engine.serve(prompt(3, 2))
        await until(lambda: relay.stats()[engine.endpoint].blocks == 9)
        assert engine.endpoint not in index.held
        mirror.expect(engine.info())
        assert index.keys(engine.endpoint) == engine.held


async def test_a_mirror_that_copied_from_the_bus_turns_to_its_own_relay_and_back() -> None:
    async with (
        fleet() as made,
        ToyEngine() as engine,
        made.router() as (relay, mirror, index),
        connected(made.url, "another router") as bus,
    ):
        first = made.new_relay(bus)
        first.follow(engine.info())
        mirror.expect(engine.info())
        async with running(first.run()):
            engine.serve(prompt(1, 4))
            await copied(mirror, index, engine)
            relay.follow(engine.info())
            assert mirror.ready(engine.endpoint)
            assert index.keys(engine.endpoint) == engine.held, "until its own relay has read all that the engine published"
            engine.serve(prompt(2, 4))
            await copied(mirror, index, engine)
            assert mirror.signal(engine.endpoint, time.monotonic()) == LIVE
            relay.unfollow(engine.endpoint.engine)
            assert mirror.ready(engine.endpoint)
            assert index.keys(engine.endpoint) == engine.held, "what was known counts on until the bus tells of it"
            engine.serve(prompt(3, 4))
            await copied(mirror, index, engine)
            await until(lambda: mirror.signal(engine.endpoint, time.monotonic()) == LIVE)


async def test_R7_a_restart_and_a_loss_reach_the_local_mirror_as_they_reach_others() -> None:
    async with (
        fleet() as made,
        ToyEngine() as engine,
        made.router() as (relay, local, local_index),
        made.mirror(engine.info()) as (remote, remote_index),
    ):
        relay.follow(engine.info())
        local.expect(engine.info())
        engine.serve(prompt(1, 4))
        await agreed(local_index, remote, remote_index, engine)
        await engine.restart()
        engine.serve(prompt(77, 2))
        await agreed(local_index, remote, remote_index, engine)
        engine.publisher.faults.lost = {1, 2}
        engine.serve(prompt(2, 4))
        engine.evict(prompt(77, 2))
        engine.serve(prompt(3, 2))
        left = set(engine.keys_of(prompt(3, 2)))
        for mirror, index in ((local, local_index), (remote, remote_index)):
            await until(lambda index=index: index.keys(engine.endpoint) == left, what="only what is certain to be left")
            await until(lambda mirror=mirror: state(mirror, engine) is SignalState.PARTIAL)


async def test_a_relay_that_nobody_else_can_hear_says_nothing_on_the_bus() -> None:
    async with fleet() as made, ToyEngine() as engine, made.router(alone=True) as (relay, mirror, index):
        heard: list[str] = []
        made.bus.subscribe(Subjects(NAMESPACE).streams, lambda subject, payload, reply: heard.append(subject))
        await made.bus.flush()
        relay.follow(engine.info())
        mirror.expect(engine.info())
        churn(engine, random.Random(4), 50)
        await copied(mirror, index, engine)
        await _beacon(made)
        assert set(heard) == {"test.kv.other.0"}


async def test_what_a_connection_without_an_echo_publishes_reaches_others_only() -> None:
    async with fleet() as made, ToyEngine() as engine, made.router() as (relay, mirror, _):
        heard: list[str] = []
        relay._bus.subscribe(Subjects(NAMESPACE).streams, lambda subject, payload, reply: heard.append(subject))
        await relay._bus.flush()
        relay.follow(engine.info())
        mirror.expect(engine.info())
        engine.serve(prompt(1, 4))
        await until(lambda: relay.stats()[engine.endpoint].blocks == 4)
        await relay._bus.flush()
        await _beacon(made)
        await until(lambda: heard, what="another connection's message")
        assert heard == ["test.kv.other.0"]


async def _beacon(made: Fleet) -> None:
    """Something of another relay's, after all that was published before."""
    made.bus.publish(f"{NAMESPACE}.kv.other.0", b"")
    await made.bus.flush()
