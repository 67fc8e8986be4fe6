"""C7: a request that goes on from a stored response goes to the engine that keeps it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest

from router import stored
from tests.raw import Request
from tests.raw_engine import SSE, RawEngine, chunk, whole
from tests.rig import Router, routing
from tests.waiting import until


class Keeping(RawEngine):
    """Answers `/v1/responses`, keeps what it answered, and says so when asked."""

    def __init__(self, name: str, *, streams: bool = False) -> None:
        super().__init__(self._respond)
        self._name = name
        self._streams = streams
        self._made = 0

    async def _respond(self, sent: Request, writer: asyncio.StreamWriter) -> None:
        self._made += 1
        response_id = f"resp_{self._name}{self._made}"
        self.pages[f"/v1/responses/{response_id}".encode()] = whole(b'{"id":"' + response_id.encode() + b'"}')
        answer = msgspec.json.encode({"id": response_id, "object": "response", "output": []})
        if self._streams:
            event = b'event: response.created\ndata: {"type":"response.created","response":' + answer + b"}\n\n"
            writer.write(SSE + chunk(event[:20]) + chunk(event[20:]) + chunk(b""))
        else:
            writer.write(whole(answer))

    @property
    def asked_for(self) -> list[str | None]:
        """The response that each request went on from."""
        return [msgspec.json.decode(sent.body).get("previous_response_id") for sent in self.requests]


@contextlib.asynccontextmanager
async def keeping(*, streams: bool = False) -> AsyncIterator[list[Keeping]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Keeping(name, streams=streams)) for name in "abc"]


async def respond(router: Router, after: str | None = None) -> str:
    """Ask for a response; its id."""
    body = {"model": "sim", "input": "hello"} | ({"previous_response_id": after} if after is not None else {})
    answer = await router.post("/v1/responses", body)
    assert answer.status == 200, answer
    found = answer.body.partition(b'"id":"')[2].partition(b'"')[0]
    return found.decode()


@pytest.mark.parametrize("streams", [False, True])
async def test_C7_the_next_turn_goes_where_the_first_is_stored(streams: bool) -> None:
    async with keeping(streams=streams) as engines, routing([e.url for e in engines], policy="round-robin") as router:
        firsts = [await respond(router) for _ in engines]
        assert {first[5] for first in firsts} == {"a", "b", "c"}, "each has one"
        for first in firsts:
            after = first
            for _ in range(5):
                after = await respond(router, after)
                assert after[5] == first[5], "a chain stays with its engine"


async def test_C7_a_router_that_has_not_seen_the_first_turn_asks_who_keeps_it() -> None:
    async with keeping() as engines:
        async with routing([e.url for e in engines], policy="round-robin") as router:
            firsts = [await respond(router) for _ in engines]
        async with routing([e.url for e in engines], policy="round-robin") as router:
            for first in firsts * 3:
                assert (await respond(router, first))[5] == first[5]


async def test_C7_an_engine_that_does_not_say_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "ASK_TIMEOUT_S", 1000.0)
    monkeypatch.setattr(stored, "FIND_TIMEOUT_S", 1000.0)
    async with keeping() as engines:
        async with routing([e.url for e in engines], policy="round-robin") as router:
            firsts = [await respond(router) for _ in range(24)]
        silent = engines[0]
        silent.silent = b"/v1/responses/"
        elsewhere = [first for first in firsts if first[5] != "a"]
        async with routing([e.url for e in engines], policy="round-robin") as router, asyncio.timeout(60):
            thens = await asyncio.gather(*[respond(router, first) for first in elsewhere])
        assert [then[5] for then in thens] == [first[5] for first in elsewhere]


async def test_C7_a_response_that_nobody_keeps_is_for_the_engines_to_judge() -> None:
    async with keeping() as engines, routing([e.url for e in engines], policy="round-robin") as router:
        for unknown in ("resp_x", "../../metrics?", "x" * 100_000, "resp_é☃"):
            for _ in engines:
                await respond(router, unknown)
        spread = Counter(asked for engine in engines for asked in engine.asked_for)
        assert spread == {"resp_x": 3, "../../metrics?": 3, "x" * 100_000: 3, "resp_é☃": 3}
        assert all(len(engine.requests) == 4 for engine in engines)
        assert (await router.post("/v1/responses", {"model": "sim", "input": "x", "previous_response_id": 7})).status == 200


async def test_C7_when_its_engine_has_left_another_one_is_asked() -> None:
    async with keeping() as engines, routing([e.url for e in engines], policy="round-robin") as router:
        first = await respond(router)
        owner = next(engine for engine in engines if engine.requests)
        await owner.__aexit__()
        await until(lambda: _gone(router), what="the engine to be gone", deadline_s=20)
        assert (await respond(router, first))[5] != first[5]


async def _gone(router: Router) -> bool:
    return await router.metric("router_model_engines", model="sim") == 2


async def test_C7_a_full_or_silent_owner_is_not_replaced() -> None:
    async with keeping() as engines, routing([e.url for e in engines], policy="round-robin") as router:
        first = await respond(router)
        owner = next(engine for engine in engines if engine.requests)

        async def refuse(_: Request, writer: asyncio.StreamWriter) -> None:
            writer.write(whole(b'{"error":{"message":"full"}}', status=b"503 Service Unavailable", headers=b"retry-after: 7\r\n"))

        owner.script = refuse
        answer = await router.post("/v1/responses", {"model": "sim", "input": "x", "previous_response_id": first})
        assert (answer.status, answer.headers["retry-after"]) == (503, "7")
        assert sum(len(engine.requests) for engine in engines) == 2, "nobody else could answer it"
