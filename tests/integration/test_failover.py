"""An engine fails a request: where it goes next, what the client gets, and what is held against whom."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer as Answers
from engines.simulator.faults import Break, Delay, End, Raw
from router.settings import AdmissionSettings
from tests.rig import Answer, Router, fleet, routing
from tests.waiting import alongside, until

CHAT = "/v1/chat/completions"
BUSY = b'{"error": {"message": "busy"}}'


def refuses(status: int, *headers: tuple[str, str], body: bytes = BUSY) -> Answers:
    return Answers(status, body, (("Content-Type", "application/json"), *headers))


def chats(*engines: SimulatedEngine) -> int:
    """How many chats have reached engines."""
    return sum(request.path == CHAT for engine in engines for request in engine.requests)


async def nothing_is_in_flight(router: Router) -> None:
    async def none() -> bool:
        return await router.metric("router_active_requests") == 0

    await until(none, what="all places are given back")
    assert await router.metric("router_active_blocks") == 0
    assert await router.metric("router_active_prefill_tokens") == 0
    assert await router.metric("router_admission_waiting") == 0


@contextlib.asynccontextmanager
async def pair(**changed: object) -> AsyncIterator[tuple[SimulatedEngine, SimulatedEngine, Router]]:
    """Two engines, asked in turn, the first one first."""
    settings: dict[str, Any] = {"policy": "tests.integration.test_failover:FirstByAge"} | changed
    async with fleet(2) as (one, other), routing([one, other], **settings) as router:
        FirstByAge.order = [one.url, other.url]
        yield one, other, router
        await nothing_is_in_flight(router)


class FirstByAge:
    """Always the first of `order` that there is."""

    order: list[str] = []  # noqa: RUF012  a test sets it
    uses_cache = False

    def score(self, request, candidates, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  as a user would
        return [self.order.index(candidate.endpoint.engine) for candidate in candidates]


async def warm(router: Router) -> None:
    """Leave an idle connection to the first engine in its pool."""
    assert (await router.chat("warm up")).status == 200


async def test_what_could_not_be_connected_goes_elsewhere() -> None:
    async with pair(probe_period_s=60.0) as (one, other, router):
        await one.die()
        answer = await router.chat("x")
        assert (answer.status, answer.engine) == (200, other.url)
        assert await router.metric("router_retries_total", failure="engine_unreachable") == 1


async def test_when_nobody_can_be_connected_the_answer_is_502() -> None:
    async with pair(probe_period_s=60.0) as (one, other, router):
        await asyncio.gather(one.die(), other.die())
        answer = await router.chat("x")
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_unreachable")
        assert answer.json["error"]["type"] == "server_error"


async def test_a_stale_connection_is_replaced_once_on_the_same_engine_and_blames_nobody() -> None:
    async with pair() as (one, other, router):
        await warm(router)
        one.faults.add(Break(0, End.CLOSE))
        answer = await router.chat("x")
        assert (answer.status, answer.engine) == (200, one.url)
        assert chats(one) == 3
        assert chats(other) == 0
        assert await router.metric("router_engine_state", engine=one.url, state="serving") == 1


async def test_a_stale_connection_whose_engine_is_gone_goes_elsewhere() -> None:
    async with pair(probe_period_s=60.0) as (one, other, router):
        await warm(router)
        await one.refuse()
        one.faults.add(Break(0, End.CLOSE))
        answer = await router.chat("x")
        assert (answer.status, answer.engine) == (200, other.url)
        assert chats(one) == 2


async def test_a_second_close_on_a_fresh_connection_goes_elsewhere_once_since_the_engine_may_be_dying() -> None:
    async with pair() as (one, other, router):
        await warm(router)
        one.faults.add(Break(0, End.CLOSE), times=2)
        answer = await router.chat("x")
        assert (answer.status, answer.engine) == (200, other.url)
        assert chats(one) == 3
        assert chats(other) == 1


async def test_a_third_close_is_the_end_since_it_may_be_the_requests_fault() -> None:
    async with pair() as (one, other, router):
        await warm(router)
        one.faults.add(Break(0, End.CLOSE), times=2)
        other.faults.add(Break(0, End.CLOSE), times=None)
        answer = await router.chat("x")
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_closed")
        assert chats(one) == 3
        assert chats(other) == 1


async def test_a_request_that_is_cut_off_at_every_engine_is_sent_to_two_and_no_more() -> None:
    async with fleet(4) as engines, routing(engines) as router:
        for engine in engines:
            engine.faults.add(Break(0, End.RESET), times=None)
        answer = await router.chat("x")
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_closed")
        assert chats(*engines) == 2
        await nothing_is_in_flight(router)


async def test_after_a_close_elsewhere_no_second_stale_connection_is_risked() -> None:
    async with pair() as (one, other, router):
        FirstByAge.order.reverse()
        await warm(router)  # an idle connection to the other
        FirstByAge.order.reverse()
        one.faults.add(Break(0, End.RESET))
        answer = await router.chat("x")
        assert (answer.status, answer.engine) == (200, other.url)
        served = [request for request in other.requests if request.path == CHAT]
        assert len(served) == 2


@pytest.mark.parametrize("status", [400, 404, 422, 500, 502])
async def test_other_errors_are_the_answer_and_nobody_else_is_asked(status: int) -> None:
    async with pair() as (one, other, router):
        one.faults.add(refuses(status, ("X-Own", "1"), body=b'{"error": "mine"}'))
        answer = await router.chat("x")
        assert (answer.status, answer.body, answer.headers["x-own"]) == (status, b'{"error": "mine"}', "1")
        assert chats(other) == 0
        assert (await router.chat("x")).engine == one.url, "it is not left alone"


@pytest.mark.parametrize(("status", "stream"), [(429, True), (503, False)])
async def test_an_overloaded_engine_sends_the_request_elsewhere_and_is_left_alone(status: int, stream: bool) -> None:
    async with pair() as (one, other, router):
        one.faults.add(refuses(status, ("Retry-After", "4")))
        assert (await router.chat("x", stream=stream)).engine == other.url
        assert await router.metric("router_engine_state", engine=one.url, state="cooling") == 1
        assert (await router.chat("y")).engine == other.url
        assert chats(one) == 1

        async def back() -> bool:
            return await router.metric("router_engine_state", engine=one.url, state="serving") == 1

        await until(back, what="the pause is over")
        assert (await router.chat("z")).engine == one.url


async def test_when_all_are_overloaded_the_client_gets_the_latest_answer_whole() -> None:
    async with pair() as (one, other, router):
        one.faults.add(refuses(429, ("Retry-After", "3")))
        other.faults.add(Answers(503, b"<html>try later</html>", (("Content-Type", "text/html"), ("Retry-After", "4"))))
        answer = await router.chat("x", stream=True)
        assert (answer.status, answer.headers["retry-after"]) == (503, "4")
        assert "try later" in answer.json["error"]["message"]


async def test_an_overloaded_engine_is_a_better_answer_than_one_that_cannot_be_reached() -> None:
    async with pair(probe_period_s=60.0) as (one, other, router):
        one.faults.add(refuses(429, ("Retry-After", "3")), times=None)
        await other.die()
        answer = await router.chat("x")
        assert (answer.status, answer.headers["retry-after"], answer.body) == (429, "3", BUSY)


async def test_a_refusal_whose_body_breaks_off_is_a_refusal_all_the_same() -> None:
    broken = Raw((b"HTTP/1.1 503 Busy\r\ncontent-length: 100\r\ncontent-type: text/plain\r\n\r\nhalf",), end=End.RESET)
    async with pair() as (one, other, router):
        one.faults.add(broken)
        assert (await router.chat("x")).engine == other.url
        one.faults.add(broken, times=None)
        other.faults.add(broken, times=None)

        async def cool() -> bool:
            return await router.metric("router_engine_state", state="cooling") == 0

        await until(cool, what="the pause is over")
        answer = await router.chat("y")
        assert answer.status == 503
        assert answer.json["error"]["message"]


async def test_S15_an_engine_that_never_answers_holds_up_nobody_else_and_its_requests_end_in_time() -> None:
    async with fleet(2) as (mute, fine), routing([mute, fine], policy="round-robin", response_head_timeout_s=2.0) as router:
        mute.faults.add(Raw((), end=End.HANG), times=None)
        answers = await asyncio.gather(*(router.chat(str(number)) for number in range(20)))
        late = [answer for answer in answers if answer.status != 200]
        assert {answer.engine for answer in answers if answer.status == 200} == {fine.url}
        assert 1 <= len(late) <= 10
        for answer in late:
            assert (answer.status, answer.json["error"]["code"]) == (504, "engine_timeout")
            assert "response_head_timeout_s" in answer.json["error"]["message"]
        assert chats(mute, fine) == 20, "what may have been generated is not generated again"
        assert await router.metric("router_timeouts_total", stage="response_head") == len(late)
        await nothing_is_in_flight(router)


async def test_S15_requests_end_in_time_even_when_their_engine_has_left_meanwhile() -> None:
    async with (
        fleet(1) as (engine,),
        routing([engine], response_head_timeout_s=2.0, probe_timeout_s=0.2) as router,
        asyncio.TaskGroup() as group,
    ):
        engine.faults.add(Raw((), end=End.HANG), times=None)
        task = group.create_task(router.chat("x"))
        await until(lambda: chats(engine) == 1, what="the engine has the request")
        engine.faults.add(Delay(30.0), path="/health", times=None)

        async def gone() -> bool:
            return await router.serving() == 0

        await until(gone, what="the engine has left")
        answer = await task
        assert (answer.status, answer.json["error"]["code"]) == (504, "engine_timeout")


async def test_a_stream_that_falls_silent_ends_in_an_error_that_names_the_timeout() -> None:
    async with pair(stream_idle_timeout_s=0.5) as (one, _, router):
        one.faults.add(Break(3, End.HANG))
        response = await router.begin("x", stream=True, max_tokens=50)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
        assert await router.metric("router_timeouts_total", stage="idle_stream") == 1
        assert await router.metric("router_engine_state", engine=one.url, state="serving") == 1


async def test_a_connect_that_takes_too_long_goes_elsewhere_and_is_named() -> None:
    async with pair(connect_timeout_s=0.3, probe_period_s=60.0) as (one, other, router):
        await one.refuse()
        async with full_backlog(int(one.url.rsplit(":", 1)[1])):
            answer = await router.chat("x")
        assert (answer.status, answer.engine) == (200, other.url)
        assert await router.metric("router_timeouts_total", stage="connect") == 1


@contextlib.asynccontextmanager
async def full_backlog(port: int) -> AsyncIterator[None]:
    """Somebody listens at a port and accepts nobody: the kernel answers no further connect."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            assert filler.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS)
        yield


@contextlib.asynccontextmanager
async def load(router: Router, *, at_once: int, streamed: bool) -> AsyncIterator[list[Answer | Exception]]:
    """Requests without a pause within the block; what became of each that has ended."""
    outcomes: list[Answer | Exception] = []

    async def keep_asking(name: int) -> None:
        number = 0
        while True:
            number += 1
            try:
                answer = await router.chat(f"client {name} asks {number}", stream=streamed, max_tokens=4)
            except aiohttp.ClientError as error:
                outcomes.append(error)
            else:
                outcomes.append(answer)

    async with contextlib.AsyncExitStack() as stack:
        for name in range(at_once):
            await stack.enter_async_context(alongside(keep_asking(name)))
        yield outcomes


async def test_H2_when_an_engine_is_killed_only_answers_that_had_begun_are_lost() -> None:
    async with fleet(3, speedup=1, decode_step_ms=2) as engines, routing(engines, policy="round-robin") as router:
        async with load(router, at_once=12, streamed=False) as outcomes:
            await until(lambda: len(outcomes) > 60, what="load")
            await engines[1].die()
            await until(lambda: len(outcomes) > 200, what="load goes on", deadline_s=30.0)
        assert {outcome.status if isinstance(outcome, Answer) else outcome for outcome in outcomes} == {200}
        assert any(answer.engine == engines[1].url for answer in outcomes if isinstance(answer, Answer))
        await nothing_is_in_flight(router)


async def test_H2_streams_that_had_begun_break_visibly_and_no_other_client_sees_an_error() -> None:
    async with fleet(3, speedup=1, decode_step_ms=2) as engines, routing(engines, policy="round-robin") as router:
        async with load(router, at_once=12, streamed=True) as outcomes:
            await until(lambda: len(outcomes) > 60, what="load")
            await engines[1].die()
            await until(lambda: len(outcomes) > 200, what="load goes on", deadline_s=30.0)
        whole = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        assert {answer.status for answer in whole} == {200}
        assert all(answer.body.endswith(b"data: [DONE]\n\n") for answer in whole)
        broken = len(outcomes) - len(whole)
        assert broken <= 4, "more than were being served by that engine"
        assert await router.metric("router_broken_answers_total") == broken
        await nothing_is_in_flight(router)


async def test_H4_a_warm_engine_that_has_left_is_not_missed() -> None:
    text = "a long conversation " * 40
    async with fleet(3) as engines, routing(engines) as router:
        home = (await router.chat(text)).engine

        async def known() -> bool:
            return await router.overlap_at(home, text) > 0

        await until(known, what="the cache is known")
        assert (await router.chat(text)).engine == home
        await next(engine for engine in engines if engine.url == home).die()
        answers = [await router.chat(text) for _ in range(5)]
        assert {answer.status for answer in answers} == {200}
        assert home not in {answer.engine for answer in answers}


async def test_H5_engines_join_and_leave_all_the_time_and_every_request_ends() -> None:
    """A tenth of the row's minute, at its pace, with as many requests."""
    rng = random.Random(5)
    async with fleet(4) as engines, routing(engines, admission=AdmissionSettings(max_wait_s=5.0)) as router:
        up = set(engines)

        async def churn() -> None:
            while True:
                await asyncio.sleep(0.2)
                engine = rng.choice(engines[1:])
                if engine in up:
                    up.discard(engine)
                    await engine.die()
                else:
                    await engine.restart()
                    up.add(engine)

        async def client(name: int) -> list[int]:
            statuses = []
            for number in range(30):
                async with asyncio.timeout(20.0):
                    statuses.append((await router.chat(f"client {name} asks {number}")).status)
            return statuses

        async with alongside(churn()):
            results = await asyncio.gather(*(client(name) for name in range(50)))
        statuses = [status for result in results for status in result]
        assert len(statuses) == 1500
        assert statuses.count(200) >= 1490, {status: statuses.count(status) for status in statuses}
        await nothing_is_in_flight(router)


async def test_H7_an_engine_that_was_busy_ten_times_serves_the_next_request() -> None:
    async with fleet(1) as (engine,), routing([engine]) as router:
        engine.faults.add(refuses(503, ("Retry-After", "0")), times=10)
        assert [(await router.chat("x")).status for _ in range(10)] == [503] * 10
        assert (await router.chat("y")).status == 200
        assert chats(engine) == 11


async def test_a_shortage_of_our_own_is_held_against_no_engine() -> None:
    async with pair(probe_period_s=60.0) as (one, other, router):
        assert (await router.get("/health")).status == 200  # the client's own connection is open
        with no_more_sockets():
            answer = await router.chat("x")
        assert (answer.status, answer.json["error"]["code"]) == (502, "engine_unreachable")
        assert await router.metric("router_engine_state", state="serving") == 2
        assert (await router.chat("x")).engine == one.url
        assert chats(one, other) == 1


@contextlib.contextmanager
def no_more_sockets() -> Iterator[None]:
    """This process may open nothing more within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.open(os.devnull, os.O_RDONLY)  # the kernel gives the lowest there is
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
