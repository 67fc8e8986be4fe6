"""Where do a simulated engine's clients knock? The HTTP routes of vLLM 0.32, and those of SGLang 0.5 that a router uses.

witness (record, fault, errors) ──▶ route ──▶ Reader → Ask ──▶ Core.generate ──▶ Reply
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools

import msgspec
from aiohttp import web

from engines.simulator import connections
from engines.simulator.about import About
from engines.simulator.connections import Handler
from engines.simulator.core import Feed, RequestFailed
from engines.simulator.faults import Answer, Break, Delay, Fail, Raw, Script
from engines.simulator.handover import Handover, from_sglang, from_vllm
from engines.simulator.parts import Parts, Recorded
from engines.simulator.replies import Head, Reply, failure
from engines.simulator.requests import Ask, Reader, Refusal, Shape, decoded
from engines.types import EngineKind, Role

_MAX_BODY_BYTES = 1 << 30
_EMBEDDING_DIMENSIONS = 8
_SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}


_RECORD = web.RequestKey("record", Recorded)
_BREAK = web.RequestKey("break", Break)
_FAIL = web.RequestKey("fail", Fail)
_FAILURE = "EngineCore encountered an issue."


class EngineServer:
    """The routes of one engine, over the parts it is made of."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._reader = Reader(parts.text, parts.settings.kind, parts.context)
        self._ids = itertools.count()
        self._active: set[asyncio.Task[object]] = set()

    def application(self) -> web.Application:
        """The routes, ready to be listened for."""
        app = web.Application(middlewares=[self._witness], client_max_size=_MAX_BODY_BYTES)
        routes = About(self._parts).routes() | {
            "POST /tokenize": self._tokenize,
            "POST /detokenize": self._detokenize,
            "POST /v1/chat/completions": self._chat,
            "POST /v1/completions": self._completion,
            "POST /v1/embeddings": self._embeddings,
        }
        if self._parts.settings.kind is EngineKind.SGLANG:
            routes |= {"POST /v1/tokenize": self._tokenize, "POST /generate": self._generate}
        if self._parts.settings.allow_faults:
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
    async def _witness(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        if task is not None:
            self._active.add(task)
        record = Recorded(request.method, request.raw_path, tuple(request.raw_headers))
        self._parts.history.requests.append(record)
        request[_RECORD] = record
        try:
            record.body = await request.read()
            self._must_have_key(request)
            response = await self._faulted(request, record, handler)
        except Refusal as refusal:
            if record.outcome == "open":
                record.outcome = "refused"
            return web.Response(status=refusal.status, body=refusal.body(self._parts.settings.kind), content_type="application/json")
        except web.HTTPException as error:
            record.outcome = "refused"
            return web.json_response({"detail": error.reason}, status=error.status)
        except (asyncio.CancelledError, ConnectionError):
            if record.outcome == "open":
                record.outcome = "aborted"
                self._parts.history.aborts += 1
            raise
        finally:
            if task is not None:
                self._active.discard(task)
        if record.outcome == "open":
            record.outcome = "done"
        return response

    def _must_have_key(self, request: web.Request) -> None:
        key = self._parts.settings.require_key
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            raise Refusal(401, "Unauthorized", type="AuthenticationError")

    async def _faulted(self, request: web.Request, record: Recorded, handler: Handler) -> web.StreamResponse:
        fault = self._parts.faults.take(request.path)
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
            case Fail():
                request[_FAIL] = fault
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
        settings = self._parts.settings
        served, adapter = self._serving(ask.model)
        reply_id = self._reply_id(request, ask, prefix)
        try:
            handovers = self._handovers(ask, reply_id)
        except Refusal as refusal:
            if not ask.stream:
                raise
            return await self._refuse_within(request, refusal)
        most = 1 if settings.kind is EngineKind.SGLANG and settings.role is Role.PREFILL else None
        prompts = ask.sequences(adapter, settings.output_tokens, settings.seed, handovers, most=most)
        with self._parts.core.generate(prompts) as feed:
            head = Head(reply_id, int(self._parts.clock()), settings.kind, settings.prompt_tokens_details)
            reply = Reply(msgspec.structs.replace(ask, model=served), feed.sequences, self._parts.text.words, head)
            if ask.stream:
                # SGLang's OpenAI routes answer nothing, not even a status, before there is something to say.
                early = settings.kind is EngineKind.VLLM or ask.shape is Shape.GENERATE
                return await self._stream(request, feed, reply, early=early)
            try:
                while feed.left:
                    await feed.take()
            except RequestFailed as failed:
                request[_RECORD].outcome = "failed"
                raise Refusal(500, str(failed), type="500" if settings.kind is EngineKind.SGLANG else "InternalServerError") from failed
            if (broken := request.get(_BREAK)) is not None:
                request[_RECORD].outcome = "faulted"
                await connections.end(request, broken.end)
            exchange = self._parts.exchange
            told = None if exchange is None else exchange.handle(feed.sequences[0])
            return web.Response(body=reply.whole(told), content_type="application/json")

    def _handovers(self, ask: Ask, reply_id: str) -> list[Handover | None]:
        """For each sequence, what is asked about its KV; empty for an engine that takes whole requests."""
        settings, each = self._parts.settings, [(prompt, sample) for prompt in range(len(ask.prompts)) for sample in range(ask.samples)]
        if settings.role is Role.AGGREGATED:
            return []
        if settings.kind is EngineKind.VLLM:
            numbers = [f"-{index}" if ask.shape is Shape.COMPLETION else "" for index in range(len(each))]
            keys = [f"{reply_id}{number}-{next(self._ids):08x}" for number in numbers]
            return [from_vllm(ask.transfer, settings.connector, settings.role, key) for key in keys]
        if (rooms := ask.rooms) is None:
            raise Refusal(400, f"Invalid request: Disaggregated request received without bootstrap room id. req.rid='{reply_id}'")
        return [from_sglang(rooms, prompt, settings.role, samples=ask.samples) for prompt, _ in each]

    async def _refuse_within(self, request: web.Request, refusal: Refusal) -> web.StreamResponse:
        """Refuse as SGLang's scheduler does when the stream has been opened already."""
        response = web.StreamResponse(headers=_SSE)
        await response.prepare(request)
        request[_RECORD].outcome = "refused"
        await response.write(failure(self._parts.settings.kind, refusal.message, refusal.status))
        await response.write_eof()
        return response

    async def _stream(self, request: web.Request, feed: Feed, reply: Reply, *, early: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers=_SSE)
        if early:
            await response.prepare(request)
        record: Recorded = request[_RECORD]
        broken: Break | None = request.get(_BREAK)
        failing: Fail | None = request.get(_FAIL)
        opening = reply.opening()
        while feed.left:
            try:
                pieces = [reply.piece(token) for token in await feed.take()]
            except RequestFailed as failed:
                record.outcome = "failed"
                told = opening if self._parts.settings.kind is EngineKind.VLLM else b""
                await response.prepare(request)
                await response.write(told + failure(self._parts.settings.kind, str(failed)))
                await response.write_eof()
                return response
            await response.prepare(request)
            if opening:
                pieces.insert(0, opening)
                opening = b""
            fault = broken or failing
            left = None if fault is None else fault.after_chunks - record.chunks
            sent = pieces[:left]
            record.chunks += len(sent)
            await response.write(b"".join(sent))
            if broken is not None and record.chunks >= broken.after_chunks:
                record.outcome = "faulted"
                if broken.bytes_more:
                    following = pieces[len(sent) :] or [reply.piece(token) for token in await feed.take()] or [reply.closing()]
                    await response.write(following[0][: broken.bytes_more])
                await connections.end(request, broken.end)
            if failing is not None and record.chunks >= failing.after_chunks:
                record.outcome = "faulted"
                await response.write(failure(EngineKind.VLLM, _FAILURE))
                await response.write_eof()
                return response
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
        names = self._parts.settings.model_names
        if asked in self._parts.history.adapters:
            return asked, asked
        if not asked or asked in names:
            return asked or names[0], None
        if self._parts.settings.kind is EngineKind.SGLANG:
            return asked, None
        raise Refusal(404, f"The model `{asked}` does not exist.", type="NotFoundError", param="model")

    def _pinned(self, request: web.Request) -> None:
        rank = request.headers.get("X-data-parallel-rank")
        if rank is not None and rank != "0":
            raise Refusal(400, f"data_parallel_rank {rank} is out of range [0, 1).")

    def _reply_id(self, request: web.Request, ask: Ask, prefix: str) -> str:
        """VLLM puts a prefix before the id of the header; SGLang takes the body's `rid` as it is."""
        made = hashlib.blake2s(f"{self._parts.started}-{next(self._ids)}".encode(), digest_size=8).hexdigest()
        if self._parts.settings.kind is EngineKind.SGLANG:
            return ask.request_id or made
        return prefix + request.headers.get("X-Request-Id", made)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        tokens = self._reader.tokenize(await request.read())
        body = {"count": len(tokens), "max_model_len": self._parts.context, "tokens": tokens}
        return web.json_response(body | ({"token_strs": None} if self._parts.settings.kind is EngineKind.VLLM else {}))

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        name = "prompt" if self._parts.settings.kind is EngineKind.VLLM else "text"
        return web.json_response({name: self._reader.detokenize(await request.read())})

    async def _script(self, request: web.Request) -> web.StreamResponse:
        self._parts.faults.apply(decoded(await request.read(), Script))
        return web.json_response({})


def _embedding(ids: list[int]) -> list[float]:
    """Numbers in [-1, 1) that depend on the tokens alone."""
    digest = hashlib.sha256(repr(ids).encode()).digest()
    return [byte / 128 - 1 for byte in digest[:_EMBEDDING_DIMENSIONS]]
