"""What can stand at an engine's URL in a test? The control routes of a real engine, answered from samples, and anything else."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from pathlib import Path

import msgspec
from aiohttp import web

DATA = Path(__file__).parents[1] / "data" / "endpoints"
SGLANG_MODELS = (
    b'{"object":"list","data":[{"id":"models/tiny","object":"model","owned_by":"sglang","root":"models/tiny","max_model_len":2048}]}'
)
SGLANG_LOADS = b'{"loads":[{"dp_rank":0,"num_running_reqs":2,"num_waiting_reqs":1,"token_usage":0.5}]}'


class Answer(msgspec.Struct, frozen=True):
    """What one path answers."""

    body: bytes = b""
    status: int = 200
    server: str = "uvicorn"


class FakeEngine:
    """Answers GET on the paths in `answers` (a change takes effect at once), 404 elsewhere; stalls on the paths in `stalled`."""

    def __init__(self, answers: dict[str, Answer], *, api_key: str | None = None) -> None:
        self.answers = answers
        self.stalled: set[str] = set()
        self.hits: Counter[str] = Counter()
        self.refused_keys = 0
        self.port = 0
        self._api_key = api_key
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> FakeEngine:
        """Listens, on the same port as before if it did before."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)  # 0 would mean for ever
        await self._runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()
        return self

    async def stop(self) -> None:
        """Nobody listens any more, and open connections are closed."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        self.hits[request.path] += 1
        if request.path in self.stalled or "*" in self.stalled:
            await asyncio.Event().wait()
        if self._api_key is not None and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            self.refused_keys += 1
            return web.Response(status=401, body=b'{"error":"Unauthorized"}')
        answer = self.answers.get(request.path, Answer(b'{"detail":"Not Found"}', 404))
        return web.Response(status=answer.status, body=answer.body, headers={"Server": answer.server})


def vllm_answers() -> dict[str, Answer]:
    """Real vLLM 0.32, as its samples have it."""
    folder = DATA / "vllm"
    return {
        "/version": Answer(b'{"version":"0.32.0"}'),
        "/health": Answer(),
        "/v1/models": Answer((folder / "models.json").read_bytes()),
        "/metrics": Answer((folder / "metrics.txt").read_bytes()),
        "/kv_event_sources": Answer((folder / "kv_event_sources.json").read_bytes()),
    }


def sglang_answers() -> dict[str, Answer]:
    """Real SGLang 0.5.23 with its Python frontend."""
    return {
        "/server_info": Answer((DATA / "sglang" / "server_info.json").read_bytes()),
        "/model_info": Answer(b'{"model_path":"models/tiny"}'),
        "/ready": Answer(),
        "/v1/models": Answer(SGLANG_MODELS),
        "/v1/loads": Answer(SGLANG_LOADS),
        "/metrics": Answer((DATA / "sglang" / "metrics.txt").read_bytes()),
    }
