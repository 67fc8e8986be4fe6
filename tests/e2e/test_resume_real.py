"""Real engines that are killed in the midst of streams: what clients read is what an undisturbed engine says."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.e2e.serving import Served, serve
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME
from tests.waiting import until

pytestmark = pytest.mark.real_engine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
STREAMS = 10
TOKENS = 1000
"""Some seconds, of which the engine dies in the first."""
EVENT_BYTES = 180
"""About as long as an event of one token is."""


class Heard(NamedTuple):
    """A stream as its client understands it."""

    text: str
    finish: str | None
    usage: tuple[int, int]
    ids: set[str]
    whole: bool


def path_of(number: int) -> str:
    """Of both kinds, to each of two engines that are asked in turn."""
    return CHAT if number % 4 < 2 else COMPLETION


def body(number: int) -> dict[str, object]:
    """Every third has stop strings, every other one goes on until its limit; no two share a prompt."""
    path = path_of(number)
    text = f"story {number} " + "tell me a story " * (number % 4)
    asked: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    asked |= {"stop": ["zzz", "qqqq"]} if number % 3 == 0 else {}
    options = {"stream_options": {"include_usage": True}, "max_tokens": TOKENS, "ignore_eos": number % 2 == 0}
    return {"model": MODEL_NAME, "stream": True, "temperature": 0} | options | asked


class Stream:
    """One client's stream, as far as it has come."""

    def __init__(self, router: Served, number: int) -> None:
        self._router = router
        self._number = number
        self.got = b""
        self.engine = ""

    async def read(self) -> Heard:
        """To its end; raises aiohttp's error when it breaks off."""
        url = self._router.url + path_of(self._number)
        headers = {"content-type": "application/json", "x-commutator-explain": "1"}
        async with self._router.session.post(url, data=msgspec.json.encode(body(self._number)), headers=headers) as response:
            assert response.status == 200, await response.read()
            self.engine = response.headers["x-commutator-engine"]
            async for piece in response.content.iter_any():
                self.got += piece
        return heard(self.got)


def heard(stream: bytes) -> Heard:
    events = stream.split(b"\n\n")
    chunks: list[dict[str, Any]] = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events if event.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    assert all(choice.get("token_ids") is None for choice in choices)
    usage = chunks[-1]["usage"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return Heard(text, choices[-1]["finish_reason"], counts, {chunk["id"] for chunk in chunks}, events[-2:] == [b"data: [DONE]", b""])


async def disturbed(router: Served, numbers: range, kill: RealEngine, *, how: str, after: int) -> list[Heard]:
    """Streams at once, and an engine that is killed when one of its own has `after` bytes; the others are wherever they are."""
    core = core_of(kill)
    streams = [Stream(router, number) for number in numbers]

    def under_way() -> bool:
        its = [stream for stream in streams if stream.engine == kill.url]
        return len(its) == len(streams) // 2 and max(len(stream.got) for stream in its) >= after

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream.read()) for stream in streams]
        await until(under_way, what="they have come so far", deadline_s=60)
        if how == "whole":
            await asyncio.to_thread(kill.kill)
        else:
            os.kill(core, signal.SIGKILL)
    return [task.result() for task in tasks]


def core_of(engine: RealEngine) -> int:
    """The process of vLLM's that computes; its HTTP server lives on for a moment without it."""
    (core,) = [folder for folder in engine._members() if (folder / "comm").read_text().startswith("VLLM::EngineCor")]
    return int(core.name)


@pytest.mark.parametrize("how", ["whole", "core"])
async def test_H2_streams_of_a_killed_vllm_go_on_and_read_as_if_nothing_had_been(
    real_vllm_pair: Sequence[RealEngine], tmp_path: Path, how: str
) -> None:
    rng = random.Random(how)
    stays, goes = real_vllm_pair
    numbers = range(STREAMS)
    async with serve(real_vllm_pair, tmp_path / "router.log", "--policy", "round-robin", "--resume", "1") as router:

        async def both_serve() -> bool:
            return await router.serving() == 2

        expected = await asyncio.gather(*(Stream(router, number).read() for number in numbers))
        assert len({stream.text for stream in expected}) > STREAMS / 2, "texts that differ"
        resumed = 0.0
        for _ in range(5):  # on a busy machine an engine may have computed all before its client has seen anything
            try:
                got = await disturbed(router, numbers, goes, how=how, after=EVENT_BYTES * rng.randrange(1, TOKENS // 5))
            finally:
                await asyncio.to_thread(goes.restart)
            for one, other in zip(got, expected, strict=True):
                assert (one.text, one.finish, one.usage, one.whole) == (other.text, other.finish, other.usage, True)
                assert len(one.ids) == 1
            assert await router.metric("router_broken_answers_total") == 0
            resumed = await router.metric("router_resumes_total", outcome="resumed")
            if resumed >= 2:
                break
            await until(both_serve, what="the engine is back", deadline_s=30)
        ended_well = resumed + await router.metric("router_resumes_total", outcome="completed")
        assert ended_well == await router.metric("router_resumes_total")
        assert resumed >= 2, "streams of the engine that was killed"
        await until(lambda: stays.unfinished() == 0, what="the engine is idle", deadline_s=30)
        assert await router.metric("router_active_requests") == 0
