"""What stands behind every router of the bench? Engines that cost next to nothing, so that what is measured is the router.

    python -m tests.bench.upstream --engines 2      prints {"engines": [{"url": …, "events": …, "replay": …}], "model": …}

Each answers the questions that the routers ask of vLLM and SGLang, and every POST of a prompt with a stream, as the current `Plan`
says. With `kv`, it renders and tokenizes the prompt, keeps a cache of blocks, and publishes what changes in it as vLLM does.

    POST /_bench/plan   a Plan, in force from the next request on        GET /_bench/counts   what has been answered so far
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import sys
from array import array
from collections import OrderedDict
from typing import Any, cast

import httptools
import msgspec
import uvloop

from engines.simulator import events, text
from engines.simulator.cache import Change, Removed, Stored
from engines.simulator.hashes import BlockNamer
from engines.simulator.publisher import Publisher
from engines.types import EngineKind

MODEL = "bench"
BLOCK_SIZE = 16
BLOCKS = 16_384
"""As many as Dynamo's mocker has by default, so that all KV rows see blocks evicted as well as stored."""
CONTEXT = 32_768


METRICS = f"""\
vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="{BLOCKS}",engine="0"}} 1.0
vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0
vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.0
"""


class Plan(msgspec.Struct, frozen=True):
    """How prompts are answered."""

    chunks: int = 16
    gap_s: float = 0.0
    """Between chunks; 0: one chunk each time around the loop, so that each is a write of its own."""
    kv: bool = False


class Counts(msgspec.Struct):
    """What has been answered."""

    requests: int = 0
    chunks: int = 0


def _chunk(delta: str, finish: str = "null") -> bytes:
    event = (
        'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1795952425,"model":"bench",'
        f'"choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]}}\n\n'
    ).encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


HEAD = b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
HEAD += b"transfer-encoding: chunked\r\n\r\n"
FIRST = _chunk('{"role":"assistant","content":""}')
MIDDLE = _chunk('{"content":" token"}')
LAST = _chunk('{"content":" token"}', '"length"')
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Cache:
    """The blocks of one engine, and the feed that tells of them."""

    def __init__(self, seed: int) -> None:
        self.publisher = Publisher("127.0.0.1", "", 1000)
        self._namer = BlockNamer(EngineKind.VLLM, BLOCK_SIZE, seed)
        self._held: OrderedDict[int, None] = OrderedDict()

    def compute(self, tokens: list[int]) -> None:
        """A prompt was computed: its new blocks are stored, the longest unused ones make room, and both are published."""
        chain = self._namer.chain()
        chain.extend(array("I", tokens))
        names, held = chain.names, self._held
        known = 0
        while known < len(names) and names[known] in held:
            held.move_to_end(names[known])
            known += 1
        fresh = names[known:]
        if not fresh:
            return
        changes: list[Change] = []
        while len(held) + len(fresh) > BLOCKS:
            changes.append(Removed(held.popitem(last=False)[0]))
        held.update(dict.fromkeys(fresh))
        covered = tokens[known * BLOCK_SIZE : len(names) * BLOCK_SIZE]
        changes.append(Stored(tuple(fresh), names[known - 1] if known else None, tuple(covered)))
        self.publisher.publish(events.encode(changes, EngineKind.VLLM, BLOCK_SIZE, ts=0.0))


class Engine:
    """One listener."""

    def __init__(self, model: text.ModelText, seed: int) -> None:
        self.model = model
        self.cache = Cache(seed)
        self.plan = Plan()
        self.counts = Counts()
        self.pages: dict[str, bytes] = {}
        self.unknown: dict[str, int] = {}
        """Questions it had no answer for."""

    def known(self, path: str) -> bytes | None:
        """What answers a GET; None, and remembered, when nothing does."""
        match path:
            case "/_bench/counts":
                return msgspec.json.encode(self.counts)
            case "/_bench/unknown":
                return msgspec.json.encode(self.unknown)
            case _:
                return self.pages.get(path)

    async def open(self) -> None:
        """Bind the event feed, and write the pages, which tell where it is."""
        publisher = self.cache.publisher
        await publisher.start()
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": self.model.folder, "parent": None}
        feed = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{publisher.port}", "topic": ""}
        about = {"model_path": self.model.folder, "tokenizer_path": self.model.folder, "served_model_name": MODEL, "is_generation": True}
        server = about | {"page_size": BLOCK_SIZE, "block_size": BLOCK_SIZE, "dp_size": 1, "version": "0.32.0", "status": "ready"}
        encode = msgspec.json.encode
        self.pages = {
            "/health": b"",
            "/version": encode({"version": "0.32.0"}),
            "/v1/models": encode({"object": "list", "data": [card | {"max_model_len": CONTEXT}]}),
            "/metrics": METRICS.encode(),
            "/kv_event_sources": encode({"0": feed | {"replay_endpoint": f"tcp://*:{publisher.replay_port}"}}),
            **dict.fromkeys(("/get_model_info", "/model_info"), encode(about)),
            **dict.fromkeys(("/get_server_info", "/server_info"), encode(server)),
        }

    def tokens(self, body: bytes) -> list[int]:
        """The prompt of a chat or of a text, as ids."""
        asked: dict[str, Any] = msgspec.json.decode(body)
        prompt = asked.get("prompt")
        return self.model.encode(self.model.render(asked, EngineKind.VLLM) if prompt is None else prompt)


class Connection(asyncio.Protocol):
    """One router's socket."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._transport = cast("asyncio.Transport", None)
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._target, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        path = self._target.partition(b"?")[0].decode()
        body = b"".join(self._body)
        if self._parser.get_method() != b"POST":
            self._reply(self._engine.known(path), path)
        elif path in ("/v1/chat/completions", "/v1/completions"):
            self._stream(body)
        elif path == "/_bench/plan":
            self._engine.plan = msgspec.json.decode(body, type=Plan)
            self._reply(b"{}", path)
        elif path == "/tokenize":
            tokens = self._engine.tokens(body)
            self._reply(msgspec.json.encode({"count": len(tokens), "max_model_len": CONTEXT, "tokens": tokens}), path)
        elif path == "/v1/chat/completions/render":
            self._reply(msgspec.json.encode(self._rendered(body)), path)
        else:
            self._reply(None, path)

    def _rendered(self, body: bytes) -> dict[str, object]:
        return {
            "request_id": "chatcmpl-0123456789abcdef",
            "token_ids": self._engine.tokens(body),
            "features": None,
            "sampling_params": {"max_tokens": 16, "temperature": 0.0},
            "model": MODEL,
            "stream": True,
            "cache_salt": None,
            "priority": 0,
            "kv_transfer_params": None,
        }

    def _reply(self, body: bytes | None, path: str) -> None:
        status = b"200 OK"
        if body is None:
            self._engine.unknown[path] = self._engine.unknown.get(path, 0) + 1
            status, body = b"404 Not Found", b'{"detail":"Not Found"}'
        head = b"HTTP/1.1 %b\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    def _stream(self, body: bytes) -> None:
        plan = self._engine.plan
        if plan.kv:
            self._engine.cache.compute(self._engine.tokens(body))
        self._transport.write(HEAD)
        if plan.gap_s:
            self._loop.call_later(random.random() * plan.gap_s, self._next, plan.chunks, plan)
        else:
            self._loop.call_soon(self._next, plan.chunks, plan)

    def _next(self, left: int, plan: Plan) -> None:
        if self._transport.is_closing():
            return
        if not left:
            self._engine.counts.requests += 1
            self._transport.write(DONE)
            return
        self._engine.counts.chunks += 1
        self._transport.write(LAST if left == 1 else FIRST if left == plan.chunks else MIDDLE)
        if plan.gap_s and left > 1:
            self._loop.call_later(plan.gap_s, self._next, left - 1, plan)
        else:
            self._loop.call_soon(self._next, left - 1, plan)


async def main(count: int) -> None:
    """Serve until killed."""
    model, loop = text.load(""), asyncio.get_running_loop()
    told = []
    async with asyncio.TaskGroup() as group:
        for seed in range(count):
            engine = Engine(model, seed)
            await engine.open()
            group.create_task(engine.cache.publisher.run())
            server = await loop.create_server(functools.partial(Connection, engine), "127.0.0.1", 0, backlog=4096)
            group.create_task(server.serve_forever())
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            told.append({"url": url, "events": engine.cache.publisher.events, "replay": engine.cache.publisher.replay})
        sys.stdout.write(msgspec.json.encode({"engines": told, "model": MODEL, "folder": model.folder}).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="upstream")
    arguments.add_argument("--engines", type=int, default=2)
    uvloop.run(main(arguments.parse_args().engines))
