"""Where do a simulated engine's clients knock? The HTTP routes of vLLM 0.32, and those of SGLang 0.5 that a router uses.

witness (record, fault, errors) ──▶ route ──▶ Reader → Ask ──▶ Core.generate ──▶ Reply
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from engines.simulator import connections, metrics
from engines.simulator.core import Core, Feed
from engines.simulator.faults import Answer, Break, Delay, Faults, Raw, Script
from engines.simulator.publisher import Publisher
from engines.simulator.replies import Head, Reply
from engines.simulator.requests import Ask, Reader, Refusal
from engines.simulator.settings import SimulateSettings
from engines.simulator.text import ModelText
from engines.types import EngineKind

VLLM_VERSION = "0.32.0"
SGLANG_VERSION = "0.5.23"
_MAX_BODY_BYTES = 1 << 30
_EMBEDDING_DIMENSIONS = 8
_SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}

_T = TypeVar("_T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Recorded:
    """One request as it arrived, and what became of it."""

    __slots__ = ("body", "chunks", "headers", "method", "outcome", "path")

    def __init__(self, method: str, path: str, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.method = method
        self.path = path
        """With its query, as sent."""
        self.headers = headers
        self.body = b""
        self.chunks = 0
        """Stream events sent."""
        self.outcome = "open"
        """`done`, `refused`, `faulted`, or `aborted` where the client left."""

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)


_RECORD = web.RequestKey("record", Recorded)
_BREAK = web.RequestKey("break", Break)


class EngineServer:
    """The routes of one engine, over its core and its event feed."""

    def __init__(
        self, settings: SimulateSettings, text: ModelText, core: Core, publisher: Publisher, faults: Faults, *, clock: Callable[[], float]
    ) -> None:
        self.requests: deque[Recorded] = deque(maxlen=0)
        self.aborts = 0
        """Requests whose client left before the answer's end."""
        self.adapters: dict[str, str] = {}
        self._settings = settings
        self._text = text
        self._core = core
        self._publisher = publisher
        self._faults = faults
        self._clock = clock
        self._started = clock()
        self.context = min(text.context, settings.kv_blocks * settings.block_size)
        self._reader = Reader(text, settings.kind, self.context)
        self._ids = itertools.count()
        self._active: set[asyncio.Task[object]] = set()

    def application(self) -> web.Application:
        """The routes, ready to be listened for."""
        app = web.Application(middlewares=[self._witness], client_max_size=_MAX_BODY_BYTES)
        both: dict[str, _Handler] = {
            "GET /health": self._ok,
            "GET /v1/models": self._models,
            "GET /metrics": self._metrics,
            "POST /tokenize": self._tokenize,
            "POST /detokenize": self._detokenize,
            "POST /v1/chat/completions": self._chat,
            "POST /v1/completions": self._completion,
            "POST /v1/embeddings": self._embeddings,
            "POST /v1/load_lora_adapter": self._load_adapter,
            "POST /v1/unload_lora_adapter": self._unload_adapter,
        }
        vllm: dict[str, _Handler] = {
            "GET /version": self._version,
            "GET /load": self._load,
            "GET /kv_event_sources": self._kv_event_sources,
            "POST /reset_prefix_cache": self._reset_prefix_cache,
            "POST /sleep": self._sleep,
            "POST /wake_up": self._wake,
            "GET /is_sleeping": self._is_sleeping,
        }
        sglang: dict[str, _Handler] = {
            "GET /ready": self._ok,
            "GET /health_generate": self._ok,
            "GET /model_info": self._model_info,
            "GET /get_model_info": self._model_info,
            "GET /server_info": self._server_info,
            "GET /get_server_info": self._server_info,
            "GET /v1/loads": self._loads,
            "POST /v1/tokenize": self._tokenize,
            "POST /generate": self._generate,
            "POST /flush_cache": self._reset_prefix_cache,
        }
        routes = both | (vllm if self._settings.kind is EngineKind.VLLM else sglang)
        if self._settings.allow_faults:
            routes["POST /_sim/faults"] = self._script
        for route, handler in routes.items():
            method, path = route.split(" ")
            app.router.add_route(method, path, handler)
        return app

    async def stop(self) -> None:
        """Abort every request under way."""
        active = tuple(self._active)
        for task in active:
            task.cancel()
        await asyncio.gather(*active, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ around every route

    @web.middleware
    async def _witness(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        if task is not None:
            self._active.add(task)
        record = Recorded(request.method, request.raw_path, tuple(request.raw_headers))
        self.requests.append(record)
        request[_RECORD] = record
        try:
            record.body = await request.read()
            response = await self._faulted(request, record, handler)
        except Refusal as refusal:
            record.outcome = "refused"
            return web.Response(status=refusal.status, body=refusal.body(self._settings.kind), content_type="application/json")
        except web.HTTPException as error:
            record.outcome = "refused"
            return web.json_response({"detail": error.reason}, status=error.status)
        except (asyncio.CancelledError, ConnectionError):
            if record.outcome == "open":
                record.outcome = "aborted"
                self.aborts += 1
            raise
        finally:
            if task is not None:
                self._active.discard(task)
        if record.outcome == "open":
            record.outcome = "done"
        return response

    async def _faulted(self, request: web.Request, record: Recorded, handler: _Handler) -> web.StreamResponse:
        fault = self._faults.take(request.path)
        match fault:
            case None:
                pass
            case Answer(status, body, headers):
                record.outcome = "faulted"
                return web.Response(status=status, body=body, headers=headers)
            case Raw():
                record.outcome = "faulted"
                await connections.write_raw(request, fault)
            case Break(0, how):
                record.outcome = "faulted"
                await connections.end(request, how)
            case Break():
                request[_BREAK] = fault
            case Delay(head_s):
                await asyncio.sleep(head_s)
        return await handler(request)

    # ------------------------------------------------------------------------------------------------ inference

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.chat(await request.read()), "chatcmpl-")

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.completion(await request.read()), "cmpl-")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.generate(await request.read()), "")

    async def _answer(self, request: web.Request, ask: Ask, prefix: str) -> web.StreamResponse:
        self._pinned(request)
        served, adapter = self._serving(ask.model)
        prompts = ask.sequences(adapter, self._settings.output_tokens, self._settings.seed)
        with self._core.generate(prompts) as feed:
            head = Head(self._reply_id(request, ask, prefix), int(self._clock()), self._settings.kind, self._settings.prompt_tokens_details)
            reply = Reply(msgspec.structs.replace(ask, model=served), feed.sequences, self._text.words, head)
            if ask.stream:
                return await self._stream(request, feed, reply)
            while feed.left:
                await feed.take()
            if (broken := request.get(_BREAK)) is not None:
                request[_RECORD].outcome = "faulted"
                await connections.end(request, broken.end)
            return web.Response(body=reply.whole(), content_type="application/json")

    async def _stream(self, request: web.Request, feed: Feed, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(headers=_SSE)
        await response.prepare(request)
        record: Recorded = request[_RECORD]
        broken: Break | None = request.get(_BREAK)
        opening = reply.opening()
        while feed.left:
            pieces = [reply.piece(token) for token in await feed.take()]
            if opening:
                pieces.insert(0, opening)
                opening = b""
            left = None if broken is None else broken.after_chunks - record.chunks
            sent = pieces[:left]
            record.chunks += len(sent)
            await response.write(b"".join(sent))
            if broken is not None and record.chunks >= broken.after_chunks:
                record.outcome = "faulted"
                await connections.end(request, broken.end)
        await response.write(reply.closing())
        await response.write_eof()
        return response

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        model, prompts = self._reader.embeddings(await request.read())
        served, _ = self._serving(model)
        tokens = sum(len(ids) for ids in prompts)
        data = [{"index": index, "object": "embedding", "embedding": _embedding(ids)} for index, ids in enumerate(prompts)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
        return web.json_response({"id": f"embd-{next(self._ids)}", "object": "list", "model": served, "data": data, "usage": usage})

    def _serving(self, asked: str) -> tuple[str, str | None]:
        """The name a request is served under and its adapter; SGLang serves whatever name it is given."""
        names = self._settings.model_names
        if asked in self.adapters:
            return asked, asked
        if not asked or asked in names:
            return asked or names[0], None
        if self._settings.kind is EngineKind.SGLANG:
            return asked, None
        raise Refusal(404, f"The model `{asked}` does not exist.", type="NotFoundError", param="model")

    def _pinned(self, request: web.Request) -> None:
        rank = request.headers.get("X-data-parallel-rank")
        if rank is not None and rank != "0":
            raise Refusal(400, f"data_parallel_rank {rank} is out of range [0, 1).")

    def _reply_id(self, request: web.Request, ask: Ask, prefix: str) -> str:
        """VLLM puts a prefix before the id of the header; SGLang takes the body's `rid` as it is."""
        made = hashlib.blake2s(f"{self._started}-{next(self._ids)}".encode(), digest_size=8).hexdigest()
        if self._settings.kind is EngineKind.SGLANG:
            return ask.request_id or made
        return prefix + request.headers.get("X-Request-Id", made)

    # ------------------------------------------------------------------------------------------------ what it is

    async def _ok(self, _: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _version(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"version": VLLM_VERSION})

    async def _models(self, _: web.Request) -> web.StreamResponse:
        kind, base = self._settings.kind.value, self._settings.model_names
        common = {"object": "model", "created": int(self._started), "owned_by": kind}
        listed = [{"id": name, **common, "root": self._text.folder, "parent": None, "max_model_len": self.context} for name in base]
        listed += [{"id": name, **common, "root": path, "parent": base[0], "max_model_len": None} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": listed})

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        model = self._settings.model_names[0]
        page = metrics.page(self._core.scheduler, self._settings.kind, model, started=self._started, asleep=self._core.asleep)
        return web.Response(text=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _load(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"server_load": len(self._core.scheduler.running) + len(self._core.scheduler.waiting)})

    async def _kv_event_sources(self, _: web.Request) -> web.StreamResponse:
        if not self._settings.kv_events:
            return web.json_response({})
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._publisher.port}",
            "replay_endpoint": f"tcp://*:{self._publisher.replay_port}",
            "buffer_steps": self._settings.kv_replay_batches,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": self._settings.kv_topic,
        }
        return web.json_response({"0": config})

    async def _model_info(self, _: web.Request) -> web.StreamResponse:
        names = {"model_path": self._text.folder, "tokenizer_path": self._text.folder, "served_model_name": self._settings.model_names[0]}
        return web.json_response({**names, "is_generation": True, "disaggregation_mode": "null", "weight_version": "default"})

    async def _server_info(self, _: web.Request) -> web.StreamResponse:
        settings = self._settings
        feed = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self._publisher.port,
            "topic": settings.kv_topic,
            "block_size": settings.block_size,
            "dp_size": 1,
            "replay_endpoint_port_base": self._publisher.replay_port,
        }
        return web.json_response(
            {
                "model_path": self._text.folder,
                "tokenizer_path": self._text.folder,
                "served_model_name": settings.model_names[0],
                "page_size": settings.block_size,
                "dp_size": 1,
                "attn_dp_size": 1,
                "disaggregation_mode": "null",
                "max_running_requests": settings.max_num_seqs,
                "max_prefill_tokens": settings.max_num_batched_tokens,
                "chunked_prefill_size": settings.max_num_batched_tokens,
                "max_total_num_tokens": settings.kv_blocks * settings.block_size,
                "max_req_input_len": self.context - 1,
                "status": "ready",
                "version": SGLANG_VERSION,
                "frontend": "python",
                "kv_events": feed if settings.kv_events else None,
            }
        )

    async def _loads(self, _: web.Request) -> web.StreamResponse:
        scheduler, cache = self._core.scheduler, self._core.scheduler.cache
        total, used = cache.capacity * cache.block_size, cache.used * cache.block_size
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_waiting_uncached_tokens": sum(len(sequence.tokens) for sequence in scheduler.waiting),
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": total,
            "max_running_requests": self._settings.max_num_seqs,
            "token_usage": used / total,
        }
        return web.json_response({"loads": [load]})

    # ------------------------------------------------------------------------------------------------ the rest

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        tokens = self._reader.tokenize(await request.read())
        body = {"count": len(tokens), "max_model_len": self.context, "tokens": tokens}
        return web.json_response(body | ({"token_strs": None} if self._settings.kind is EngineKind.VLLM else {}))

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        name = "prompt" if self._settings.kind is EngineKind.VLLM else "text"
        return web.json_response({name: self._reader.detokenize(await request.read())})

    async def _load_adapter(self, request: web.Request) -> web.StreamResponse:
        asked = _body(await request.read(), _Adapter)
        self.adapters[asked.lora_name] = asked.lora_path
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.StreamResponse:
        asked = _body(await request.read(), _Adapter)
        if self.adapters.pop(asked.lora_name, None) is None:
            raise Refusal(404, f"The lora adapter '{asked.lora_name}' cannot be found.", type="NotFoundError")
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    async def _reset_prefix_cache(self, _: web.Request) -> web.StreamResponse:
        done = self._core.scheduler.cache.clear()
        if self._settings.kind is EngineKind.SGLANG:
            self._core.publish_changes()
            return web.Response(status=200 if done else 400, text="Cache flushed." if done else "Flush cache failed.")
        return web.json_response({"success": done})

    async def _sleep(self, _: web.Request) -> web.StreamResponse:
        self._core.sleep()
        return web.Response()

    async def _wake(self, _: web.Request) -> web.StreamResponse:
        self._core.wake()
        return web.Response()

    async def _is_sleeping(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"is_sleeping": self._core.asleep})

    async def _script(self, request: web.Request) -> web.StreamResponse:
        self._faults.apply(_body(await request.read(), Script))
        return web.json_response({})


class _Adapter(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str = ""


def _body(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise Refusal(400, str(error), type="Bad Request") from error


def _embedding(ids: list[int]) -> list[float]:
    """Numbers in [-1, 1) that depend on the tokens alone."""
    digest = hashlib.sha256(repr(ids).encode()).digest()
    return [byte / 128 - 1 for byte in digest[:_EMBEDDING_DIMENSIONS]]
