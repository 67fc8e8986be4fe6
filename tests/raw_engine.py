"""What stands at an engine's URL where a test decides every byte? A server that the router takes for vLLM or SGLang.

async with RawEngine(script) as engine, routing([engine.url], policy="round-robin") as router:
    ...

The script is called with each POST (and each WebSocket), read whole unless `read_bodies` is False; what it writes is the answer. It
returns to keep the connection, and raises `Close` or `Reset` to end it, or `Hang` to say nothing more until the router leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec

from engines.types import EngineKind
from router.sockets import reset_when_closed
from tests.raw import Request, read_head

Script = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\n"
SSE = OK + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"

NIXL_OFFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[7, 8, 9]],
    "remote_engine_id": "P0",
    "remote_request_id": "cmpl-x-0-1234",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
"""What vLLM's prefill engine answers beside its token: `kv_transfer_params`."""


class Hang(Exception):
    """Nothing more is said on this connection."""


class Close(Exception):
    """This connection is closed, once what was written has been sent."""


class Reset(Exception):
    """This connection is reset."""


class RawEngine:
    """An engine of one model, named `sim` unless said otherwise."""

    def __init__(self, script: Script, *, kind: EngineKind = EngineKind.VLLM, model: str = "sim", keep_alive_s: float = 60.0) -> None:
        self.script = script
        self.kind = kind
        self.read_bodies = True
        self.pages: dict[bytes, bytes] = {}
        """Whole answers to GETs of other paths."""
        self.silent = b"/nothing"
        """GETs of paths that begin so are not answered."""
        self.requests: list[Request] = []
        """Every POST and WebSocket, in the order in which they came."""
        self.left = 0
        """Answers during which the router closed the connection."""
        self.connections = 0
        """Connections so far."""
        self.answering = 0
        """Requests being answered."""
        self._model = model
        self._keep_alive_s = keep_alive_s
        self._server: asyncio.Server | None = None
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Connections open now."""
        return len(self._tasks)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        self._port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop_listening(self) -> None:
        """New connections are refused from now on."""
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            answered = 0
            while True:
                async with asyncio.timeout(self._keep_alive_s if answered else None):  # as servers do: a new connection may take its time
                    request = await read_head(reader)
                answered += 1
                if request.line.startswith(b"GET ") and request.header("upgrade") is None:
                    path = request.line.split(b" ")[1]
                    writer.write(b"" if path.startswith(self.silent) else self._about(path))
                    continue
                await self._answer(request, reader, writer)
        except Reset:
            reset_when_closed(writer.get_extra_info("socket"))
            writer.transport.abort()
        except (Close, OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watched = self.read_bodies and request.header("upgrade") is None
        request.rest = None if watched else reader
        if watched:
            request.body = await reader.readexactly(int(request.header("content-length") or b"0"))
        self.requests.append(request)
        self.answering += 1
        script = asyncio.ensure_future(self.script(request, writer))  # noqa: TID251  awaited below
        leaving = asyncio.ensure_future(reader.read(1)) if watched else None  # noqa: TID251
        try:
            await asyncio.wait([script, leaving] if leaving else [script], return_when=asyncio.FIRST_COMPLETED)
            if script.done() and isinstance(script.exception(), Hang):
                await (leaving or reader.read())
            if not script.done() or isinstance(script.exception(), Hang | ConnectionError):
                self.left += 1
                raise Close
            script.result()
        finally:
            self.answering -= 1
            for task in (script, leaving):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task

    def _about(self, path: bytes) -> bytes:
        if path in self.pages:
            return self.pages[path]
        models = {"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": self.kind.value, "max_model_len": 1 << 20}]}
        answers: dict[bytes, object] = {b"/v1/models": models}
        if self.kind is EngineKind.VLLM:
            answers |= {b"/version": {"version": "0.32.0"}, b"/health": {}}
        else:
            about = {"version": "0.5.23", "status": "ready", "model_path": "nowhere", "tokenizer_path": "nowhere", "page_size": 16}
            answers |= {b"/server_info": about, b"/ready": {}}
        body = answers.get(path)
        status = b"HTTP/1.1 404 Not Found\r\n" if body is None else OK
        told = msgspec.json.encode(body)
        return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(told), told)


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body; the last one for no data."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes, *, status: bytes = b"200 OK", kind: bytes = b"application/json", headers: bytes = b"") -> bytes:
    """An answer with its length; `headers` are whole lines."""
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, kind, headers, len(body), body)


def token(number: int) -> bytes:
    """An event that carries a token."""
    return (
        b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"t%d "},"finish_reason":null}]}\n\n'
        % number
    )


def answering(answer: bytes) -> Script:
    """Always the same bytes."""

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return script


async def never(_: Request, __: asyncio.StreamWriter) -> None:
    """No answer at all."""
    raise Hang


def streaming(events: list[bytes], *, gap_s: float = 0.0, end: bytes = chunk(b"")) -> Script:
    """A stream of events, so far apart."""

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE)
        for event in events:
            writer.write(chunk(event))
            await writer.drain()
            await asyncio.sleep(gap_s)
        writer.write(end)

    return script
