from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator

import pytest

import discovery.bus
from discovery.broker import Broker
from discovery.bus import Bus, BusNoAnswer, BusUnreachable
from tests.integration.kv_fleet import connected, running
from tests.waiting import until


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    made = Broker()
    await made.start()
    async with running(made.run()):
        yield made
    await made.stop()


@pytest.fixture
async def url(broker: Broker) -> str:
    return broker.url


class Heard:
    """Remembers what it is called with."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes, str]] = []

    def __call__(self, subject: str, payload: bytes, reply: str) -> None:
        self.messages.append((subject, payload, reply))

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payload, _ in self.messages]


def kill(broker: Broker) -> None:
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGKILL)


async def test_messages_arrive_in_the_order_they_were_published(url: str) -> None:
    numbers = [b"%d" % number for number in range(5000)]
    async with connected(url, "reader") as reader, connected(url, "writer") as writer:
        heard = Heard()
        reader.subscribe("a.*", heard)
        await reader.flush()
        for number in numbers:
            assert writer.publish("a.b", number, "back.here")
        await until(lambda: len(heard.messages) == len(numbers), what="all messages")
        assert heard.payloads == numbers
        assert heard.messages[0] == ("a.b", b"0", "back.here")


async def test_a_request_finds_a_subscription_made_before_it_in_place(url: str) -> None:
    async with connected(url, "server") as server, connected(url, "client") as client:

        def double(subject: str, payload: bytes, reply: str) -> None:
            server.publish(reply, payload * 2)

        server.subscribe("double", double)
        await server.flush()
        assert await client.request("double", b"ab", timeout_s=5) == b"abab"
        answers = Heard()
        client.subscribe("answers", answers)
        client.publish("double", b"x", "answers")
        await until(lambda: answers.payloads == [b"xx"], what="the answer")


async def test_nobody_there_to_answer_is_told_at_once_and_silence_after_the_time_allowed(url: str) -> None:
    async with connected(url, "client") as client:
        async with asyncio.timeout(5):
            with pytest.raises(BusNoAnswer):
                await client.request("nobody", b"", timeout_s=60)
        client.subscribe("mute", Heard())
        with pytest.raises(BusNoAnswer):
            await client.request("mute", b"", timeout_s=0.05)


async def test_a_cancelled_subscription_is_not_called_again(url: str) -> None:
    async with connected(url, "bus") as bus:
        heard, other = Heard(), Heard()
        subscription = bus.subscribe("a", heard)
        bus.subscribe("a", other)
        bus.publish("a", b"1")
        subscription.cancel()
        subscription.cancel()
        bus.publish("a", b"2")
        await until(lambda: other.payloads == [b"1", b"2"], what="the other subscription's messages")
        assert heard.payloads == []


async def test_a_callback_that_raises_is_counted_and_costs_only_its_own_message(url: str) -> None:
    async with connected(url, "bus") as bus:
        heard = Heard()

        def fragile(subject: str, payload: bytes, reply: str) -> None:
            if payload == b"bad":
                raise RuntimeError("cannot read this")
            heard(subject, payload, reply)

        bus.subscribe("a", fragile)
        for payload in (b"1", b"bad", b"2"):
            bus.publish("a", payload)
        await until(lambda: heard.payloads == [b"1", b"2"], what="the messages before and after")
        assert bus.counts.failed == 1


async def test_no_server_there_is_an_error_that_names_the_url_and_no_secret() -> None:
    with pytest.raises(BusUnreachable) as caught:
        await Bus().connect("nats://someone:s3cret@127.0.0.1:1", name="test")
    assert "127.0.0.1:1" in str(caught.value)
    assert "refused" in str(caught.value)
    assert "s3cret" not in str(caught.value)


async def test_something_else_at_the_url_is_an_error_too() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BusUnreachable):
            await Bus().connect(f"nats://127.0.0.1:{port}", name="test")


async def test_of_several_servers_one_that_answers_is_enough(url: str) -> None:
    async with connected(f"nats://127.0.0.1:1,{url}", "test") as bus:
        assert bus.connected


async def test_H14_a_lost_broker_is_told_and_everything_works_again_when_it_is_back(broker: Broker) -> None:
    async with connected(broker.url, "reader") as reader, connected(broker.url, "writer") as writer:
        heard, told = Heard(), list[str]()
        reader.subscribe("a", heard)
        reader.watch(lambda: told.append("lost"), lambda: told.append("back"))
        for times in (1, 2):
            kill(broker)
            await until(lambda: not writer.connected, what="the writer to notice")
            assert not writer.publish("a", b"while away")
            assert writer.counts.unsent == times
            with pytest.raises(BusUnreachable):
                await writer.request("a", b"", timeout_s=1)
            with pytest.raises(BusUnreachable):
                await writer.flush()
            await until(lambda: told == ["lost", "back"] * times and writer.connected, what="both to be back")  # noqa: B023  awaited at once
            await reader.flush()
            assert writer.publish("a", b"after")
            await until(lambda: heard.payloads == [b"after"] * times, what="the next message")  # noqa: B023
        assert reader.counts.reconnects == 2


async def test_what_is_subscribed_while_it_is_away_is_there_when_it_is_back(broker: Broker) -> None:
    async with connected(broker.url, "bus") as bus:
        kill(broker)
        await until(lambda: not bus.connected, what="it to notice")
        heard, cancelled = Heard(), Heard()
        bus.subscribe("a", heard)
        bus.subscribe("a", cancelled).cancel()
        await until(lambda: bus.connected, what="it to be back")
        await bus.flush()
        bus.publish("a", b"1")
        await until(lambda: heard.payloads == [b"1"], what="the message, once")
        assert cancelled.payloads == []


async def test_whoever_waits_for_a_flush_is_told_that_the_bus_went_away(broker: Broker) -> None:
    async with connected(broker.url, "bus") as bus:
        os.kill(broker.pid or 0, signal.SIGSTOP)
        waiting = asyncio.get_running_loop().create_task(bus.flush())
        await asyncio.sleep(0)
        kill(broker)
        with pytest.raises(BusUnreachable):
            await asyncio.wait_for(waiting, 10)


async def test_closing_sends_what_was_published_and_ends_everything(url: str) -> None:
    before = asyncio.all_tasks()
    async with connected(url, "reader") as reader:
        heard = Heard()
        reader.subscribe("a", heard)
        await reader.flush()
        writer = Bus()
        await writer.connect(url, name="writer")
        for _ in range(100):
            writer.publish("a", bytes(1000))
        await writer.close()
        await writer.close()
        assert not writer.connected
        await until(lambda: len(heard.messages) == 100, what="all that was published")
    await until(lambda: asyncio.all_tasks() <= before, what="its tasks to end")


async def test_closing_while_the_broker_is_away_does_not_wait_for_it() -> None:
    broker, bus = Broker(), Bus()
    await bus.connect(await broker.start(), name="bus")
    await broker.stop()
    await until(lambda: not bus.connected, what="it to notice")
    async with asyncio.timeout(5):
        await bus.close()


async def test_more_than_a_reader_can_hold_is_dropped_and_counted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery.bus, "INBOX_MESSAGES", 10)
    async with connected(url, "reader") as reader, connected(url, "writer") as writer:
        heard = Heard()
        reader.subscribe("a", heard)
        await reader.flush()
        for _ in range(2000):
            writer.publish("a", b"x")
        await writer.flush()
        await until(lambda: len(heard.messages) + reader.counts.overflowed == 2000, what="every message to be taken or counted")
        assert reader.counts.overflowed > 0


async def test_more_than_the_outbox_holds_is_dropped_and_counted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery.bus, "OUTBOX_BYTES", 10_000)
    async with connected(url, "bus") as bus:
        assert [bus.publish("a", bytes(4000)) for _ in range(4)] == [True, True, False, False]
        assert bus.counts.unsent == 2
        await bus.flush()
        assert bus.publish("a", bytes(4000))


async def test_a_bulk_sender_waits_for_room_and_then_has_it(url: str) -> None:
    async with connected(url, "bus") as bus:
        for _ in range(4 * discovery.bus.ROOM_BYTES // 500_000):
            bus.publish("a", bytes(500_000))
        waiting = asyncio.get_running_loop().create_task(bus.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.wait_for(waiting, 10)


async def test_M11_a_burst_leaves_the_rest_of_the_loop_its_turns(url: str) -> None:
    async with connected(url, "reader") as reader, connected(url, "writer") as writer:
        turns_between: list[int] = []
        turns = 0

        def take(subject: str, payload: bytes, reply: str) -> None:
            turns_between.append(turns)

        reader.subscribe("a", take)
        await reader.flush()
        for _ in range(2000):
            writer.publish("a", bytes(4096))

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with running(others()):
            await until(lambda: len(turns_between) == 2000, what="the burst")
        longest = max(turns_between.count(turn) for turn in set(turns_between))
        assert longest <= discovery.bus.TURN_BYTES // 4096 + 1, "messages taken between two turns of another task"


async def test_A7_credentials_are_in_no_log_at_any_level(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    secret = broker.url.removeprefix("nats://").partition("@")[0]
    with caplog.at_level(logging.DEBUG):
        async with connected(broker.url, "bus") as bus:
            kill(broker)
            await until(lambda: bus.counts.reconnects == 1, what="it to be back")
        with pytest.raises(BusUnreachable):
            await Bus().connect(f"nats://{secret}x@127.0.0.1:{broker.url.rpartition(':')[2]}", name="wrong")
    assert "bus lost" in caplog.text
    assert secret not in caplog.text
    assert not any(secret in str(getattr(record, "fields", "")) for record in caplog.records)
