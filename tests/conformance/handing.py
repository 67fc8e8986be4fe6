"""How is a pair of engines asked for one answer? By raw HTTP to both, with none of our own code in between.

nixl       prefill, then decode with the handle of its answer
mooncake   both at once, with one transfer id
sglang     both at once, with one room
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from tests.conformance.wire import Answer, Client, Engine, total

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
Fields = dict[str, Any]


class PairedEngines(Protocol):
    """What the suite needs to know of a pair."""

    @property
    def prefill(self) -> Engine: ...
    @property
    def decode(self) -> Engine: ...
    @property
    def bootstrap(self) -> str:
        """Where the prefill engine's own server for decode engines is."""
        ...


class Sources(NamedTuple):
    """Where an engine's prompts had their KV from, in tokens."""

    computed: float
    cached: float
    fetched: float

    def __sub__(self, earlier: Sources) -> Sources:
        return Sources(*(now - before for now, before in zip(self, earlier, strict=True)))


class Hands:
    """A pair that is asked for answers."""

    def __init__(self, way: str, pair: PairedEngines, prefill: Client, decode: Client, kill: Callable[[], Awaitable[None]]) -> None:
        self.way = way
        self.pair = pair
        self.prefill = prefill
        self.decode = decode
        self.kill_prefill = kill
        """End the prefill engine at once."""

    @property
    def size(self) -> int:
        """Tokens per block."""
        return self.pair.prefill.block_size

    async def told(self) -> tuple[Fields, Fields]:
        """What the two legs of one answer are told, where both can be told beforehand."""
        if self.way == "sglang":
            host, _, port = self.pair.bootstrap.removeprefix("http://").rpartition(":")
            room = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": random.getrandbits(62)}
            return room, room
        transfer = {"transfer_id": uuid.uuid4().hex}
        there = {"remote_engine_id": await self.engine_id(), "remote_bootstrap_addr": self.pair.bootstrap}
        return wrapped({"do_remote_decode": True} | transfer), wrapped({"do_remote_prefill": True} | transfer | there)

    async def engine_id(self) -> str:
        """What Mooncake's bootstrap server calls its engine."""
        async with self.prefill.session.get(f"{self.pair.bootstrap}/query") as response:
            found: str = (await response.json())["0"]["engine_id"]
            return found

    async def handle(self, prompt: list[int]) -> Fields:
        """NIXL: a prompt computed by the prefill engine, and what a decode engine is to be told of it."""
        answer = await self.prefill.complete(prompt, **wrapped({"do_remote_decode": True}))
        assert answer.status == 200
        found: Fields = answer.json["kv_transfer_params"]
        return found

    async def legs(self, prompt: list[int], **fields: object) -> tuple[Answer, Answer]:
        """Both answers to a prompt; `fields` are for the decode engine."""
        if self.way == "nixl":
            first = await self.prefill.complete(prompt, **wrapped({"do_remote_decode": True}))
            return first, await self.decode.complete(prompt, **(wrapped(first.json["kv_transfer_params"]) | fields))
        there, here = await self.told()
        return await asyncio.gather(self.prefill.complete(prompt, **there), self.decode.complete(prompt, **(here | fields)))

    async def ids(self, prompt: list[int], count: int) -> list[int]:
        """The tokens that the pair answers with."""
        _, answer = await self.legs(prompt, max_tokens=count, return_token_ids=True)
        return ids_of(answer)

    async def sources(self) -> Sources:
        """Of the decode engine's prompts (vLLM)."""
        page = (await self.decode.get("/metrics")).body.decode()
        name = "vllm:prompt_tokens_by_source_total"
        lines = [line for line in page.splitlines() if line.startswith(name)]
        return Sources(*(sum(float(line.rpartition(" ")[2]) for line in lines if f'source="{source}"' in line) for source in SOURCES))

    async def used(self) -> float:
        """The part of the prefill engine's cache that is in use (vLLM)."""
        return await metric(self.prefill, "vllm:kv_cache_usage_perc")


def wrapped(params: Fields) -> Fields:
    """As vLLM takes it."""
    return {"kv_transfer_params": params}


def ids_of(answer: Answer) -> list[int]:
    assert answer.status == 200, answer.body
    ids: list[int] = answer.json["choices"][0]["token_ids"]
    return ids


def failure_of(answer: Answer) -> Fields:
    """The error that a stream ended in."""
    assert answer.status == 200
    *_, error, done = answer.events
    assert done == b"[DONE]"
    found: Fields = Answer(200, {}, error).json["error"]
    return found


async def metric(client: Client, name: str) -> float:
    return total((await client.get("/metrics")).body.decode(), name)
