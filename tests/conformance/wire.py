"""What does a router see of an engine? Its HTTP answers and its KV event frames, read here without any of our own readers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol, Self

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from tests.waiting import until

COUNTERS = {
    "vllm": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    "sglang": ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
}
UNFINISHED = {
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
}
GENERATED = {"vllm": "vllm:generation_tokens_total", "sglang": "sglang:generation_tokens_total"}
END = b"\xff" * 8
# The tokenizer has 4,096 entries; the first three are special, and some of the next are single bytes.
_PLAIN_IDS = range(300, 4000)


class Engine(Protocol):
    """What the suite needs to know of an engine."""

    @property
    def url(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def kv_events(self) -> str | None: ...
    @property
    def kv_replay(self) -> str | None: ...
    @property
    def block_size(self) -> int: ...


class Block(NamedTuple):
    """One block of a BlockStored event."""

    name: Any
    parent: Any
    tokens: tuple[int, ...]


class Message(NamedTuple):
    topic: bytes
    seq: int
    payload: bytes

    @property
    def batch(self) -> list[Any]:
        decoded: list[Any] = msgspec.msgpack.decode(self.payload)
        return decoded

    @property
    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.batch[1]
        return events


def blocks_of(messages: list[Message]) -> list[Block]:
    """Every stored block in the order in which it was announced."""
    found = []
    for event in itertools.chain.from_iterable(message.events for message in messages):
        if event["type"] != "BlockStored":
            continue
        size, parent = event["block_size"], event["parent_block_hash"]
        for index, name in enumerate(event["block_hashes"]):
            found.append(Block(name, parent, tuple(event["token_ids"][index * size : (index + 1) * size])))
            parent = name
    return found


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401  JSON
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[bytes]:
        """The data of each server-sent event."""
        return [part.removeprefix(b"data: ") for part in self.body.split(b"\n\n") if part]


class Client:
    """Asks one engine."""

    def __init__(self, engine: Engine, session: aiohttp.ClientSession, model: str) -> None:
        self.engine = engine
        self.session = session
        self.model = model
        self._random = random.Random()  # a real engine outlives a test, and must not know its prompts from an earlier run

    @classmethod
    async def of(cls, engine: Engine, session: aiohttp.ClientSession) -> Client:
        async with session.get(f"{engine.url}/v1/models") as response:
            return cls(engine, session, (await response.json())["data"][0]["id"])

    def ids(self, blocks: float) -> list[int]:
        """A prompt of so many blocks that no engine has seen."""
        return [self._random.choice(_PLAIN_IDS) for _ in range(int(blocks * self.engine.block_size))]

    def text(self, words: int) -> str:
        """A prompt of so many words that no engine has seen."""
        return " ".join(self._random.choice(("alpha", "self", "return", "value", "name", "import")) for _ in range(words))

    async def get(self, path: str) -> Answer:
        async with self.session.get(self.engine.url + path) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        told = {"content-type": "application/json"} | (headers or {})
        async with self.session.post(self.engine.url + path, data=data, headers=told) as response:
            return Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, await response.read())

    async def complete(self, prompt: object, **fields: object) -> Answer:
        """A completion that generates one token unless told otherwise, and does not stop before."""
        return await self.post("/v1/completions", self._body({"prompt": prompt}, fields))

    async def chat(self, messages: list[dict[str, Any]], **fields: object) -> Answer:
        return await self.post("/v1/chat/completions", self._body({"messages": messages}, fields))

    async def tokens_of_chat(self, messages: list[dict[str, Any]], **fields: object) -> list[int]:
        answer = await self.post("/tokenize", {"model": self.model, "messages": messages} | fields)
        assert answer.status == 200, answer
        ids: list[int] = answer.json["tokens"]
        return ids

    async def counters(self) -> tuple[float, float]:
        """Prompt tokens looked up in the engine's cache, and those found, by its own count."""
        queries, hits = COUNTERS[str(self.engine.kind)]
        page = (await self.get("/metrics")).body.decode()
        return total(page, queries), total(page, hits)

    async def generated(self) -> float:
        """Tokens generated, by the engine's own count."""
        return total((await self.get("/metrics")).body.decode(), GENERATED[str(self.engine.kind)])

    async def unfinished(self) -> float:
        page = (await self.get("/metrics")).body.decode()
        return sum(total(page, name) for name in UNFINISHED[str(self.engine.kind)])

    def stream(self, prompt: object, **fields: object) -> aiohttp.client._RequestContextManager:
        """A streamed completion, for a test that reads it as it comes."""
        body = self._body({"prompt": prompt}, {"stream": True} | fields)
        return self.session.post(f"{self.engine.url}/v1/completions", json=body)

    def _body(self, ask: dict[str, object], fields: dict[str, object]) -> dict[str, object]:
        return {"model": self.model, "max_tokens": 1, "temperature": 0, "ignore_eos": True} | ask | fields


def total(page: str, name: str) -> float:
    """The sum of a metric's samples."""
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith((name + "{", name + " ")))


class EventFeed:
    """Hears an engine's KV events, and asks for them again."""

    def __init__(self, engine: Engine) -> None:
        self.messages: list[Message] = []
        self._engine = engine
        self._context = zmq.asyncio.Context()
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        assert self._engine.kv_events is not None
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(self._engine.kv_events)
        self._listening = asyncio.create_task(self._listen(socket))  # noqa: TID251  owned by the block
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            topic, seq, payload = await socket.recv_multipart()
            assert len(seq) == 8
            self.messages.append(Message(topic, int.from_bytes(seq, "big"), payload))

    async def hear(self, client: Client) -> None:
        """Make the engine speak until it is heard: what a PUB socket says before a subscription has reached it is lost."""

        async def heard() -> bool:
            if not self.messages:
                await client.complete(client.ids(1))
            return bool(self.messages)

        await until(heard, deadline_s=30, what="the first KV event")

    async def blocks(self, tokens: list[int], count: int) -> list[Block]:
        """The first `count` blocks announced for a prompt; waits for them."""
        size = self._engine.block_size
        wanted = [tuple(tokens[index * size : (index + 1) * size]) for index in range(count)]

        def found() -> list[Block]:
            announced = blocks_of(self.messages)
            return [block for block in announced if block.tokens in wanted]

        await until(lambda: len(found()) >= count, what=f"{count} blocks of the prompt")
        return found()

    async def replay(self, first: int) -> list[Message]:
        """Everything the engine still has from `first` on, up to its end mark."""
        assert self._engine.kv_replay is not None
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._engine.kv_replay)
        try:
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            return [message async for message in _replies(socket)]
        finally:
            socket.close(linger=0)


async def _replies(socket: zmq.asyncio.Socket) -> AsyncIterator[Message]:
    while True:
        async with asyncio.timeout(10):
            empty, topic, seq, payload = await socket.recv_multipart()
        assert empty == b""
        if seq == END:
            assert topic == payload == b""
            return
        yield Message(topic, int.from_bytes(seq, "big"), payload)
