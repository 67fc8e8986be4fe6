"""What most integration tests need: a real router, in this loop, in front of simulated engines, and a client to ask it.

async with fleet(2) as engines, routing(engines) as router:
    answer = await router.chat("hello " * 100)
    assert answer.engine == engines[0].url
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import aiohttp
import msgspec

from engines.simulator.engine import SimulatedEngine
from engines.simulator.parts import Recorded
from engines.simulator.settings import SimulateSettings
from engines.types import EngineSpec
from router.app import running
from router.settings import ServeSettings
from tests.waiting import until


class Answer(msgspec.Struct, frozen=True):
    """An answer with what the router says of its choice."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401  JSON
        return msgspec.json.decode(self.body)

    @property
    def engine(self) -> str:
        return self.headers["x-commutator-engine"]

    @property
    def reason(self) -> str:
        return self.headers["x-commutator-reason"]

    @property
    def signal(self) -> str:
        return self.headers["x-commutator-signal"]

    @property
    def overlap_tokens(self) -> int:
        return int(self.headers["x-commutator-overlap-tokens"])

    @property
    def cached_tokens(self) -> int:
        """As the engine itself counts them."""
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])


class Router:
    """A client of the router under test."""

    def __init__(self, url: str, session: aiohttp.ClientSession, admin: str = "") -> None:
        self.url = url
        self.admin = admin
        self.session = session

    async def request(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answer:
        """Any request; `body` is encoded unless it is bytes."""
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        told = {"x-commutator-explain": "1", "content-type": "application/json"} | (headers or {})
        async with self.session.request(method, self.url + path, data=data, headers=told) as response:
            return Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, await response.read())

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
        return await self.request("POST", path, body, headers)

    async def get(self, path: str) -> Answer:
        return await self.request("GET", path)

    async def chat(self, text: str, *, model: str = "sim", headers: dict[str, str] | None = None, **fields: object) -> Answer:
        body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": text}]} | fields
        return await self.post("/v1/chat/completions", body, headers)

    async def begin(self, text: str, *, model: str = "sim", **fields: object) -> aiohttp.ClientResponse:
        """A chat whose head has come and whose body is still to be read."""
        body = {"model": model, "messages": [{"role": "user", "content": text}]} | fields
        return await self.session.post(self.url + "/v1/chat/completions", data=msgspec.json.encode(body))

    async def complete(self, prompt: object, *, model: str = "sim", **fields: object) -> Answer:
        return await self.post("/v1/completions", {"model": model, "max_tokens": 2, "prompt": prompt} | fields)

    async def route(self, text: str, *, model: str = "sim") -> dict[str, Any]:
        """What the router would do with a chat."""
        answer = await self.post("/route", {"model": model, "messages": [{"role": "user", "content": text}]})
        assert answer.status == 200, answer.body
        return dict(answer.json)

    async def overlap_at(self, engine: str, text: str, *, model: str = "sim") -> int:
        """Device blocks of a chat's prompt that the router believes cached at an engine; 0 while it is no candidate."""
        candidates = (await self.route(text, model=model))["candidates"]
        return sum(int(c["overlap"]["device"]) for c in candidates if c["engine"] == engine)

    async def refuses(self) -> bool:
        """Whether no new connection is accepted."""
        try:
            await self.get("/health")
        except aiohttp.ClientError:
            return True
        return False

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a series over all label sets that include `labels`; 0 when there is none."""
        page = (await self.get("/metrics")).body.decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in page.splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == name and all(pair in series for pair in wanted):
                total += float(value)
        return total

    async def serving(self) -> int:
        """Engines that take requests."""
        return int(await self.metric("router_engine_state", state="serving"))


def settings_of(**changed: object) -> SimulateSettings:
    """A simulated engine that waits for nothing."""
    return msgspec.structs.replace(SimulateSettings(port=0, speedup=0), **changed)


@contextlib.asynccontextmanager
async def fleet(count: int, **changed: object) -> AsyncIterator[list[SimulatedEngine]]:
    """`count` simulated engines, alike."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(SimulatedEngine(settings_of(hash_seed=number, **changed))) for number in range(count)]


@contextlib.asynccontextmanager
async def routing(
    engines: Sequence[SimulatedEngine | str | EngineSpec],
    *,
    wait_for: int | None = None,
    trust: ssl.SSLContext | bool = True,
    **changed: object,
) -> AsyncIterator[Router]:
    """A router in front of `engines`, once `wait_for` of them (all, unless said otherwise) take requests.

    `trust` is for a router that serves HTTPS.
    """
    settings = ServeSettings(
        engine=tuple(specs_of(engines)), host="127.0.0.1", port=0, admin_port=0, probe_period_s=0.2, probe_timeout_s=1.0
    )
    connector = aiohttp.TCPConnector(ssl=trust)
    async with (
        running(msgspec.structs.replace(settings, **changed)) as listening,
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60), auto_decompress=False) as session,
    ):
        router = Router(listening.url, session, listening.admin)
        expected = len(engines) if wait_for is None else wait_for

        async def all_serve() -> bool:
            return await router.serving() >= expected

        await until(all_serve, what=f"{expected} engines serve")
        yield router


def specs_of(engines: Iterable[SimulatedEngine | str | EngineSpec]) -> Iterable[EngineSpec]:
    for engine in engines:
        match engine:
            case EngineSpec():
                yield engine
            case str():
                yield EngineSpec(url=engine)
            case SimulatedEngine():
                yield EngineSpec(url=engine.url)


def asked(engine: SimulatedEngine, path: str = "/v1/chat/completions") -> list[Recorded]:
    """Requests to a path that reached the engine."""
    return [request for request in engine.requests if request.path.partition("?")[0] == path]


def prompt(name: str, words: int = 200) -> str:
    """A text that shares no prefix with one of another name."""
    return " ".join(f"{name}{number}" for number in range(words))
