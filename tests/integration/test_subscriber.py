"""Over real ZMQ sockets: what an engine published is what the sink is told, in order, whatever got lost on the way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from discovery.translate import Translator
from engines import subscriber, subscription
from engines.events import KvBatch, decode
from engines.frames import GREETING, FrameReader
from engines.subscriber import FollowTimes, KvSubscriber, SubscriberCounts
from engines.types import KvSource
from tests.frames import recorded, recorded_replay
from tests.waiting import until

END = b"\xff" * 8


def batch(ts: float, *events: object) -> bytes:
    return msgspec.msgpack.encode([ts, events, 0])


def store(name: int, parent: int | None = None) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": [name, name],
        "block_size": 2,
        "medium": "GPU",
    }


def remove(name: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"}


class Sink:
    """Remembers what it was told, and keeps a translator as a relay would."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.caught_up_after: list[int] = []
        """How much had been told, each time that it had caught up."""
        self.out_of_reach: list[str] = []
        self.translator = Translator()

    def restarted(self, reason: str) -> None:
        self.told.append(f"restarted: {reason}" if reason != "joined" else reason)
        self.translator.clear()

    def batch(self, batch: KvBatch) -> None:
        self.told.append(batch.ts)
        self.translator.apply(batch.events)

    def lost(self, first: int, last: int) -> None:
        self.told.append(("lost", first, last))

    def undecodable(self, kind: str, seq: int | None = None) -> None:
        self.told.append(("undecodable", kind) if seq is None else ("undecodable", kind, seq))

    def caught_up(self) -> None:
        self.caught_up_after.append(len(self.told))

    def unreachable(self, reason: str) -> None:
        self.out_of_reach.append(reason)

    @property
    def restarts(self) -> int:
        return sum(isinstance(item, str) and item.startswith("restarted") for item in self.told)


class Publisher:
    """An engine's side of the two sockets, without an engine: it can lose messages, forget them, and say nothing."""

    def __init__(self, context: zmq.asyncio.Context, *, connect_to: str | None = None) -> None:
        self._context = context
        self.connect_to = connect_to
        self.events = connect_to or "tcp://127.0.0.1:*"
        self.replay = "tcp://127.0.0.1:*"
        self.memory: list[tuple[int, bytes]] = []
        self.next = 0
        self.asked: list[int] = []
        self.mute = False
        self.topic_in_replies = True
        self.delimiter_in_replies = [b""]
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.drop_in_replies: set[int] = set()
        """Numbers that are left out of the next answer, as a ROUTER with a full queue leaves them out; so is the end marker."""
        self.subscribed = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        # An XPUB is a PUB that tells of subscriptions, so that a test need not guess when one has arrived.
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.linger = self._router.linger = 0
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        if self.connect_to:
            self._pub.connect(self.connect_to)
        else:
            self.events = await self._bind(self._pub, self.events)
        self.replay = await self._bind(self._router, self.replay)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch()), loop.create_task(self._serve())]  # ended by `stop`

    @staticmethod
    async def _bind(sock: zmq.asyncio.Socket, endpoint: str) -> str:
        async def free() -> bool:
            with contextlib.suppress(zmq.ZMQError):
                sock.bind(endpoint)
                return True
            return False

        await until(free, what=f"{endpoint} is free again")
        return sock.getsockopt_string(zmq.LAST_ENDPOINT)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pub.close()
        self._router.close()
        self.subscribed = 0

    async def restart(self) -> None:
        """Another process on the same ports: nothing remembered, numbers from 0."""
        await self.stop()
        self.memory, self.next = [], 0
        await self.start()

    async def publish(self, payload: bytes, *, send: bool = True) -> None:
        self.memory.append((self.next, payload))
        if send:
            await self.send(b"", self.next.to_bytes(8, "big"), payload)
        self.next += 1

    async def send(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    async def _watch(self) -> None:
        while True:
            [message] = await self._pub.recv_multipart()
            self.subscribed += 1 if message[0] else -1

    async def _serve(self) -> None:
        while True:
            client, *_, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            if self.mute:
                continue
            await self.may_answer.wait()
            topic = [b"topic"] if self.topic_in_replies else []
            dropped, self.drop_in_replies = self.drop_in_replies, set()
            for seq, payload in list(self.memory):
                if seq >= first and seq not in dropped:
                    await self._router.send_multipart([client, *self.delimiter_in_replies, *topic, seq.to_bytes(8, "big"), payload])
            if not dropped:
                await self._router.send_multipart([client, *self.delimiter_in_replies, *([b""] if topic else []), END, b""])


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def publisher(context: zmq.asyncio.Context) -> AsyncIterator[Publisher]:
    publisher = Publisher(context)
    await publisher.start()
    yield publisher
    await publisher.stop()


@contextlib.asynccontextmanager
async def running(
    source: KvSource,
    sink: Sink,
    *,
    quiet_s: float = 60.0,
    silence_s: float = 5.0,
    mend_s: float = 60.0,
    counts: SubscriberCounts | None = None,
) -> AsyncIterator[None]:
    # A context of its own, as a router has one: nothing is shared with the publisher's side but the wire.
    with zmq.asyncio.Context() as context:
        async with asyncio.TaskGroup() as group:
            times = FollowTimes(replay_silence_s=silence_s, quiet_s=quiet_s, mend_s=mend_s)
            task = group.create_task(KvSubscriber(context, source, sink, times, counts).run())
            try:
                yield
            finally:
                assert not task.done()  # it ends only by cancellation
                task.cancel()
        assert not list(context._sockets)  # all were closed


@contextlib.asynccontextmanager
async def following(
    publisher: Publisher,
    *,
    replay: bool = True,
    quiet_s: float = 60.0,
    silence_s: float = 5.0,
    mend_s: float = 60.0,
    topic: str = "",
    counts: SubscriberCounts | None = None,
) -> AsyncIterator[Sink]:
    source = KvSource(0, publisher.events, publisher.replay if replay else None, topic, bind=publisher.connect_to is not None)
    sink = Sink()
    async with running(source, sink, quiet_s=quiet_s, silence_s=silence_s, mend_s=mend_s, counts=counts):
        yield sink


async def joined(publisher: Publisher, asked: int = 1) -> None:
    """Until the subscription is there and the first replay has been asked for: what is published from now on comes live."""
    await until(lambda: publisher.subscribed > 0 and len(publisher.asked) >= asked, what="the subscriber has joined")


def told(sink: Sink, *expected: object) -> Callable[[], bool]:
    return lambda: sink.told == list(expected)


async def eventually(sink: Sink, *expected: object, deadline_s: float = 20.0) -> None:
    try:
        await until(told(sink, *expected), deadline_s=deadline_s)
    except AssertionError:
        assert sink.told == list(expected)  # shows the difference
        raise


async def test_a_late_joiner_is_told_what_was_published_before(publisher: Publisher) -> None:
    for ts in range(3):
        await publisher.publish(batch(ts))
    async with following(publisher) as sink:
        await joined(publisher)
        await publisher.publish(batch(3))
        await eventually(sink, "joined", 0, 1, 2, 3)
    assert publisher.asked == [0]


async def test_R10_answers_without_the_empty_first_frame_are_read(publisher: Publisher) -> None:
    publisher.delimiter_in_replies = []
    publisher.topic_in_replies = False
    await publisher.publish(batch(0))
    await publisher.publish(batch(1))
    async with following(publisher) as sink:
        await joined(publisher)
        await publisher.publish(batch(2))
        await eventually(sink, "joined", 0, 1, 2)
    assert publisher.asked == [0]


@pytest.mark.parametrize("topic_in_replies", [True, False], ids=["topic, seq, payload", "seq, payload"])
async def test_R5_R10_a_lost_message_is_replayed_and_the_end_is_as_if_nothing_was_lost(
    publisher: Publisher, topic_in_replies: bool
) -> None:
    publisher.topic_in_replies = topic_in_replies
    payloads = [batch(ts, store(ts + 1, ts or None)) for ts in range(10)]
    truth = Translator()
    for payload in payloads:
        truth.apply(decode(payload).events)
    async with following(publisher) as sink:
        await joined(publisher)
        for ts, payload in enumerate(payloads):
            await publisher.publish(payload, send=ts != 5)
        await eventually(sink, "joined", *range(10))
        assert publisher.asked == [0, 5]
        assert sink.translator.held() == truth.held()
        assert sink.translator.blocks == 10


async def test_R10_a_real_answer_rebuilds_what_the_engine_held(context: zmq.asyncio.Context) -> None:
    with context.socket(zmq.ROUTER) as router, context.socket(zmq.XPUB) as pub:
        router.bind("tcp://127.0.0.1:*")
        pub.bind("tcp://127.0.0.1:*")
        source = KvSource(0, pub.getsockopt_string(zmq.LAST_ENDPOINT), router.getsockopt_string(zmq.LAST_ENDPOINT), "kv")
        sink = Sink()
        async with running(source, sink):
            client, *_ = await router.recv_multipart()
            for frames in recorded_replay():
                await router.send_multipart([client, *frames])
            await until(lambda: len(sink.told) == 1 + 8)
    truth = Translator()
    for frames in recorded_replay()[:-1]:
        truth.apply(decode(frames[-1]).events)
    assert sink.translator.held() == truth.held()


async def test_R6_a_removal_behind_a_gap_waits_for_the_store_in_it(publisher: Publisher) -> None:
    async with following(publisher) as sink:
        await joined(publisher)
        await publisher.publish(batch(0, store(1)))
        await eventually(sink, "joined", 0)
        publisher.may_answer.clear()
        await publisher.publish(batch(1, store(2)), send=False)
        await publisher.publish(batch(2, remove(2)))
        await publisher.publish(batch(3, store(3)))
        await until(lambda: publisher.asked == [0, 1])
        assert sink.told == ["joined", 0]  # the live ones wait
        publisher.may_answer.set()
        await eventually(sink, "joined", 0, 1, 2, 3)
        assert sink.translator.unknown_removals == 0
        assert sink.translator.blocks == 2


async def test_R6_a_removal_is_not_undone_by_an_answer_that_comes_after_it_was_given_up(publisher: Publisher) -> None:
    async with following(publisher, silence_s=0.2) as sink:
        await joined(publisher)
        await publisher.publish(batch(0))
        await eventually(sink, "joined", 0)
        publisher.may_answer.clear()
        await publisher.publish(batch(1, store(2)), send=False)
        await publisher.publish(batch(2, remove(2)))
        await eventually(sink, "joined", 0, ("lost", 1, 1), 2)
        publisher.may_answer.set()
        await publisher.publish(batch(3))
        await eventually(sink, "joined", 0, ("lost", 1, 1), 2, 3)
        assert sink.translator.blocks == 0


async def test_what_the_engine_no_longer_remembers_is_named_lost(publisher: Publisher) -> None:
    for ts in range(10):
        await publisher.publish(batch(ts))
    del publisher.memory[:4]
    async with following(publisher) as sink:
        await eventually(sink, "joined", ("lost", 0, 3), *range(4, 10))
        await joined(publisher)
        await publisher.publish(batch(10), send=False)
        publisher.memory.clear()
        await publisher.publish(batch(11))
        await eventually(sink, "joined", ("lost", 0, 3), *range(4, 10), ("lost", 10, 10), 11)


async def test_an_answer_with_a_hole_and_without_an_end_is_asked_for_again_from_there(publisher: Publisher) -> None:
    for ts in range(10):
        await publisher.publish(batch(ts))
    publisher.drop_in_replies = {3, 4, 8, 9}
    async with following(publisher, silence_s=0.2) as sink:
        await eventually(sink, "joined", *range(10))
    assert publisher.asked == [0, 3]


async def test_an_answer_that_breaks_off_is_asked_for_again(publisher: Publisher) -> None:
    for ts in range(4):
        await publisher.publish(batch(ts))
    publisher.drop_in_replies = {2, 3}
    async with following(publisher, silence_s=0.2) as sink:
        await eventually(sink, "joined", *range(4))
    assert publisher.asked == [0, 2]


async def test_the_last_message_before_a_quiet_spell_is_not_lost_for_long(publisher: Publisher) -> None:
    async with following(publisher, quiet_s=0.2) as sink:
        await joined(publisher)
        await publisher.publish(batch(0))
        await publisher.publish(batch(1), send=False)
        await eventually(sink, "joined", 0, 1)


async def test_R7_an_engine_that_restarts_in_place_is_a_new_life_and_nothing_old_survives(publisher: Publisher) -> None:
    async with following(publisher) as sink:
        await joined(publisher)
        for ts in range(5):
            await publisher.publish(batch(ts, store(ts + 1, ts or None)))
        await eventually(sink, "joined", *range(5))
        await publisher.restart()
        await until(lambda: sink.restarts == 1, what="the restart is noticed without a single new event", deadline_s=20)
        assert sink.translator.blocks == 0
        await joined(publisher)
        await publisher.publish(batch(100, store(50)))
        await until(lambda: sink.translator.blocks == 1)
    assert sink.told[6:] == ["restarted: reconnected, and the replay does not know the latest batch", 100]


async def test_R7_a_new_life_that_got_further_than_the_old_one_is_not_mistaken_for_it(publisher: Publisher) -> None:
    async with following(publisher) as sink:
        await joined(publisher)
        await publisher.publish(batch(0, store(1)))
        await publisher.publish(batch(1, store(2)))
        await eventually(sink, "joined", 0, 1)
        await publisher.stop()
        publisher.memory, publisher.next = [(seq, batch(100 + seq)) for seq in range(4)], 4
        await publisher.start()
        await eventually(sink, "joined", 0, 1, "restarted: reconnected, and the replay does not know the latest batch", 100, 101, 102, 103)
        assert sink.translator.blocks == 0


async def test_the_same_process_after_a_lost_connection_goes_on_where_it_was(publisher: Publisher) -> None:
    async with following(publisher) as sink:
        await joined(publisher)
        for ts in range(3):
            await publisher.publish(batch(ts))
        await eventually(sink, "joined", 0, 1, 2)
        await publisher.stop()
        publisher.memory.append((3, batch(3)))
        publisher.next = 4
        await publisher.start()
        await eventually(sink, "joined", 0, 1, 2, 3)
        assert publisher.asked == [0, 2, 3]


async def test_without_a_replay_every_reconnect_is_a_new_life(publisher: Publisher) -> None:
    async with following(publisher, replay=False) as sink:
        await joined(publisher, asked=0)
        await publisher.publish(batch(0))
        await eventually(sink, "joined", 0)
        await publisher.stop()
        await publisher.start()
        await until(lambda: sink.restarts == 1, deadline_s=20)
        await joined(publisher, asked=0)
        await publisher.publish(batch(1))
        await eventually(
            sink, "joined", 0, "restarted: reconnected, and no replay socket to tell whether it is the same process", ("lost", 0, 0), 1
        )


async def test_without_a_replay_a_late_joiner_is_told_what_it_missed(publisher: Publisher) -> None:
    for ts in range(3):
        await publisher.publish(batch(ts))
    async with following(publisher, replay=False) as sink:
        await joined(publisher, asked=0)
        await publisher.publish(batch(3))
        await publisher.publish(batch(4))
        await eventually(sink, "joined", ("lost", 0, 2), 3, 4)


async def test_a_replay_that_never_answers_costs_completeness_and_not_the_stream(publisher: Publisher) -> None:
    publisher.mute = True
    await publisher.publish(batch(0))
    async with following(publisher, silence_s=0.1) as sink:
        await joined(publisher)
        await publisher.publish(batch(1))
        await eventually(sink, "joined", ("lost", 0, 0), 1)
        await publisher.publish(batch(2))
        await eventually(sink, "joined", ("lost", 0, 0), 1, 2)


async def test_a_sequence_that_goes_back_on_one_connection_is_a_new_life(publisher: Publisher) -> None:
    async with following(publisher, replay=False) as sink:
        await joined(publisher, asked=0)
        for ts in range(3):
            await publisher.publish(batch(ts))
        publisher.next = 0
        await publisher.publish(batch(100))
        await eventually(sink, "joined", 0, 1, 2, "restarted: the next number was to be 3 and is 0", 100)


async def test_an_engine_that_connects_is_bound_for(context: zmq.asyncio.Context) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    publisher = Publisher(context, connect_to=f"tcp://127.0.0.1:{port}")
    await publisher.start()
    try:
        await publisher.publish(batch(0))
        async with following(publisher) as sink:
            await joined(publisher)
            await publisher.publish(batch(1))
            await eventually(sink, "joined", 0, 1)
            await publisher.restart()
            await until(lambda: sink.restarts == 1, deadline_s=20)
            await publisher.publish(batch(100))
            await until(lambda: 100 in sink.told, deadline_s=20)
    finally:
        await publisher.stop()


async def test_an_engine_that_is_not_up_yet_is_waited_for(context: zmq.asyncio.Context) -> None:
    publisher = Publisher(context)
    await publisher.start()
    await publisher.stop()
    async with following(publisher) as sink:
        await eventually(sink, "joined")
        await publisher.start()
        try:
            await joined(publisher)
            await publisher.publish(batch(0))
            await eventually(sink, "joined", 0)
        finally:
            await publisher.stop()


async def test_other_topics_are_not_heard(publisher: Publisher) -> None:
    async with following(publisher, topic="kv", replay=False) as sink:
        await joined(publisher, asked=0)
        await publisher.send(b"load", (0).to_bytes(8, "big"), batch(7))
        await publisher.send(b"kv", (0).to_bytes(8, "big"), batch(0))
        await eventually(sink, "joined", 0)


ODD_FRAMES = [
    [b""],
    [b"", b""],
    [b"", b"\0" * 7, batch(1)],
    [b"", b"\0" * 9, batch(1)],
    [b"", END, batch(1)],
    [b"", b"", b"\0" * 8, batch(1)],
    [b"x"] * 50,
]


async def test_R31_A9_frames_that_make_no_sense_are_counted_and_the_stream_goes_on(publisher: Publisher) -> None:
    async with following(publisher) as sink:
        await joined(publisher)
        await publisher.publish(batch(0))
        for frames in ODD_FRAMES:
            await publisher.send(*frames)
        await publisher.publish(b"garbage")
        await publisher.publish(recorded("sglang/plain_tp1.jsonl")[0].payload)
        await publisher.publish(batch(3))
        odd = [("undecodable", "frames")] * len(ODD_FRAMES) + [("undecodable", "not_a_batch", seq) for seq in (1, 2)]
        await eventually(sink, "joined", 0, *odd, 3)
        assert publisher.asked == [0]


async def test_R31_older_engines_that_publish_without_a_topic_are_heard(publisher: Publisher) -> None:
    async with following(publisher) as sink:
        await joined(publisher)
        await publisher.send((0).to_bytes(8, "big"), batch(0))
        await eventually(sink, "joined", 0)


async def test_A9_a_number_out_of_all_reason_heals(publisher: Publisher) -> None:
    async with following(publisher) as sink:
        await joined(publisher)
        await publisher.publish(batch(0))
        await publisher.send(b"", (2**64 - 2).to_bytes(8, "big"), batch(99))
        await until(lambda: 99 in sink.told)
        await publisher.publish(batch(1))
        await until(lambda: sink.told[-2:] == [0, 1])
        await publisher.publish(batch(2))
        restart = f"restarted: the next number was to be {2**64 - 1} and is 1"
        await eventually(sink, "joined", 0, ("lost", 1, 2**64 - 3), 99, restart, 0, 1, 2)


async def test_a_replay_that_contradicts_the_live_stream_does_not_hang_it(publisher: Publisher) -> None:
    async with following(publisher) as sink:
        await joined(publisher)
        await publisher.publish(batch(0))
        await eventually(sink, "joined", 0)
        publisher.memory += [(1, batch(-1)), (2, batch(-2))]
        publisher.next = 2
        await publisher.send(b"", (2).to_bytes(8, "big"), batch(2))
        await until(lambda: ("undecodable", "sequence") in sink.told)
        publisher.next = 3
        await publisher.publish(batch(3))
        await until(lambda: sink.told[-1] == 3)


async def test_R34_it_has_caught_up_only_when_the_replay_has_ended(publisher: Publisher) -> None:
    for ts in range(3):
        await publisher.publish(batch(ts))
    publisher.may_answer.clear()
    async with following(publisher) as sink:
        await joined(publisher)
        await publisher.publish(batch(3))
        assert (sink.told, sink.caught_up_after) == (["joined"], [])
        publisher.may_answer.set()
        await until(lambda: sink.caught_up_after)
        assert sink.told[:4] == ["joined", 0, 1, 2]
        assert sink.caught_up_after[0] >= 4
        assert sink.out_of_reach == []


async def test_a_replay_that_does_not_answer_is_not_taken_for_an_empty_one_and_is_asked_again(publisher: Publisher) -> None:
    await publisher.publish(batch(0))
    publisher.mute = True
    counts = SubscriberCounts()
    async with following(publisher, silence_s=0.1, quiet_s=0.1, counts=counts) as sink:
        await until(lambda: len(publisher.asked) >= 5, what="it to be asked again, though nothing happens")
        assert (sink.told, sink.caught_up_after) == (["joined"], [])
        publisher.mute = False
        await eventually(sink, "joined", 0)
        await until(lambda: sink.caught_up_after == [2])
        await until(lambda: counts.replayed == 1)
        assert counts.unanswered >= 2
        assert counts.replays > counts.unanswered
        assert (counts.gaps, counts.connects) == (0, 1)
        asked = len(publisher.asked)
        await publisher.publish(batch(1))
        await until(lambda: len(publisher.asked) > asked, what="one question after each silence")
        assert publisher.asked[-1] == 2


async def test_what_comes_says_what_was_before_where_the_replay_never_answers(publisher: Publisher) -> None:
    await publisher.publish(batch(0))
    publisher.mute = True
    async with following(publisher, silence_s=0.1, quiet_s=0.1) as sink:
        await until(lambda: publisher.asked)
        await publisher.publish(batch(1))
        await until(lambda: sink.caught_up_after)
        assert sink.told == ["joined", ("lost", 0, 0), 1]


async def test_a_publisher_that_cannot_be_reached_is_told(publisher: Publisher) -> None:
    await publisher.publish(batch(0))
    async with following(publisher) as sink:
        await eventually(sink, "joined", 0)
        await publisher.stop()
        await until(lambda: sink.out_of_reach, what="it to be told")
        assert publisher.events in sink.out_of_reach[0]
        before = len(sink.caught_up_after)
        await publisher.start()
        await until(lambda: len(sink.caught_up_after) > before, what="it to be there again")
        assert sink.told == ["joined", 0]


async def test_a_message_that_was_overtaken_is_not_taken_for_a_restart(publisher: Publisher) -> None:
    counts = SubscriberCounts()
    async with following(publisher, counts=counts) as sink:
        await joined(publisher)
        for ts in range(4):
            await publisher.publish(batch(ts), send=ts != 1)
        await eventually(sink, "joined", 0, 1, 2, 3)
        await publisher.send(b"", (1).to_bytes(8, "big"), batch(1))
        await publisher.publish(batch(4))
        await eventually(sink, "joined", 0, 1, 2, 3, 4)
        assert (counts.gaps, sink.restarts) == (1, 0)


async def test_what_was_given_up_is_read_anew_once_the_replay_has_it_all(publisher: Publisher) -> None:
    async with following(publisher, silence_s=0.1, mend_s=0.1) as sink:
        await joined(publisher)
        await publisher.publish(batch(0, store(1)))
        await eventually(sink, "joined", 0)
        publisher.mute = True
        await publisher.publish(batch(1, store(2)), send=False)
        await publisher.publish(batch(2, store(3)))
        await until(lambda: ("lost", 1, 1) in sink.told)
        publisher.mute = False
        restarted = "restarted: the replay has everything from the first batch on"
        await eventually(sink, "joined", 0, ("lost", 1, 1), 2, restarted, 0, 1, 2)
        assert sink.translator.blocks == 3


async def test_what_the_replay_has_forgotten_is_final_and_asked_for_once(publisher: Publisher) -> None:
    for ts in range(4):
        await publisher.publish(batch(ts))
    del publisher.memory[:2]
    async with following(publisher, mend_s=0.05, quiet_s=0.2) as sink:
        await eventually(sink, "joined", ("lost", 0, 1), 2, 3)
        await until(lambda: publisher.asked.count(0) == 2, what="it to be asked whether it has everything after all")
        await publisher.publish(batch(4))
        await until(lambda: publisher.asked[-1] == 5, what="some more time to pass")
        assert publisher.asked.count(0) == 2
        assert sink.told == ["joined", ("lost", 0, 1), 2, 3, 4]


async def test_a_port_that_speaks_something_else_is_not_an_event_and_not_a_busy_loop(caplog: pytest.LogCaptureFixture) -> None:
    connections = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        sink = Sink()
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with running(KvSource(0, address), sink):
            await until(lambda: connections >= 4, deadline_s=20)
        assert loop.time() - began > 0.3
        assert sink.told == ["joined"]
        (said,) = [record for record in caplog.records if "no ZMQ publisher" in record.message]
        assert said.fields["events"] == address  # type: ignore[attr-defined]
        assert "HTTP/1.1" in said.fields["reason"]  # type: ignore[attr-defined]


async def test_an_idle_publisher_is_still_there_as_long_as_it_answers(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "HEARTBEAT_S", 0.01)
    beats = 0
    feed = FrameReader.feed

    def counted(reader: FrameReader, data: bytes) -> object:
        nonlocal beats
        beats += data.count(b"PONG")
        return feed(reader, data)

    monkeypatch.setattr(FrameReader, "feed", counted)
    async with following(publisher) as sink:
        await joined(publisher)
        await until(lambda: beats > 2 * subscription.MISSED_HEARTBEATS)
        await publisher.publish(batch(0))
        await eventually(sink, "joined", 0)
        assert publisher.asked == [0]


async def test_a_publisher_that_no_longer_answers_is_left_and_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "HEARTBEAT_S", 0.01)
    connections = 0

    async def says_no_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB")
        while await reader.read(1000):
            pass
        writer.close()

    async with await asyncio.start_server(says_no_more, "127.0.0.1", 0) as server:
        sink = Sink()
        async with running(KvSource(0, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"), sink):
            await until(lambda: connections >= 2)


@pytest.mark.parametrize("bind", [False, True])
async def test_a_unix_socket_serves_as_well(context: zmq.asyncio.Context, tmp_path: Path, bind: bool) -> None:
    path = f"ipc://{tmp_path}/events"
    with context.socket(zmq.XPUB) as pub:
        if not bind:
            pub.bind(path)
        sink = Sink()
        async with running(KvSource(0, path, bind=bind), sink):
            if bind:
                pub.connect(path)
            assert await pub.recv() == b"\x01"
            await pub.send_multipart([b"", bytes(8), batch(0)])
            await eventually(sink, "joined", 0)


async def test_a_stranger_on_the_port_we_listen_on_changes_nothing(context: zmq.asyncio.Context) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    publisher = Publisher(context, connect_to=f"tcp://127.0.0.1:{port}")
    await publisher.start()
    try:
        async with following(publisher) as sink:
            await joined(publisher)
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                writer.write_eof()
                assert (await reader.read()).startswith(GREETING[:10])
                writer.close()
            await publisher.publish(batch(0))
            await eventually(sink, "joined", 0)
            assert publisher.asked == [0]
    finally:
        await publisher.stop()


async def test_what_a_sink_raises_reaches_whoever_runs_the_subscriber(publisher: Publisher) -> None:
    class Broken(Sink):
        def batch(self, batch: KvBatch) -> None:
            raise LookupError(batch.ts)

    with zmq.asyncio.Context() as context:
        task = asyncio.get_running_loop().create_task(KvSubscriber(context, KvSource(0, publisher.events), Broken()).run())
        await until(lambda: publisher.subscribed > 0)
        for _ in range(2):  # the first may come before the connection has been seen to, and so in the task
            await publisher.publish(batch(0))
        await until(task.done)
        assert isinstance(task.exception(), LookupError)


async def test_a_long_line_is_delivered_whole_and_in_order(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "_LINE_BYTES", 10_000)
    paused = 0
    pause = subscription.Subscription.pause

    def counted(self: subscription.Subscription) -> None:
        nonlocal paused
        paused += 1
        pause(self)

    monkeypatch.setattr(subscription.Subscription, "pause", counted)
    async with following(publisher) as sink:
        await joined(publisher)
        publisher.may_answer.clear()
        await publisher.publish(batch(0), send=False)
        for ts in range(1, 2000):
            await publisher.publish(batch(ts))
        await until(lambda: paused > 0, what="so much waits that no more is read")
        publisher.may_answer.set()
        await eventually(sink, "joined", *range(2000))
        assert publisher.asked[:2] == [0, 0]  # again from 1000 on, where the ROUTER dropped what its queue does not hold


async def test_an_address_that_is_none_is_said_in_the_log_and_is_not_fatal(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    async with running(KvSource(0, "carrier-pigeon://roof"), sink):
        await until(lambda: caplog.records)
    assert caplog.records[0].message == "no connection to the KV event address"
    assert sink.told == ["joined"]


async def test_a_replay_address_that_is_none_does_not_stop_the_live_stream(publisher: Publisher) -> None:
    sink = Sink()
    async with running(KvSource(0, publisher.events, "carrier-pigeon://roof"), sink):
        await joined(publisher, asked=0)
        await publisher.publish(batch(0))
        await publisher.publish(batch(1), send=False)
        await publisher.publish(batch(2))
        await eventually(sink, "joined", 0, ("lost", 1, 1), 2)
