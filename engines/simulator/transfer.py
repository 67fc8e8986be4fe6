"""How does KV get from one simulated engine to another? By HTTP between the two, over a link that takes its time.

    decode engine                                    prefill engine
    fetch ── POST /_sim/kv {key, blocks} ──────────▶ hand_over: waits until the prompt is computed, carries its bytes over the link,
          ◀── {contents, cached} ───────────────────            then forgets it

What a real engine does by RDMA is one request here, so that a killed engine, a refused connection and a slow link are real ones. Each way
to hand over (`engines.simulator.connectors`) says who waits for whom, and what happens when nobody comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ClassVar, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from engines.simulator.connections import Handler
from engines.simulator.core import Core
from engines.simulator.handover import Contents, Fetch, Keep, Never, Transfers, contents
from engines.simulator.sequences import Sequence
from engines.simulator.settings import LoadFailurePolicy, SimulateSettings

KV_PATH = "/_sim/kv"
_ROUNDING_BYTES = 0.5
_TIMER_S = 0.005
"""A loop's timers may fire that much before their time."""
_T = TypeVar("_T")


class Asked(msgspec.Struct, frozen=True):
    """What a decode engine asks a prefill engine for."""

    key: str
    missing: int
    """How many blocks: the last ones of the prompt."""
    engine: str = ""
    blocks: tuple[int, ...] | None = None
    """Which ones, where the decode engine knows them."""


class Given(msgspec.Struct, frozen=True):
    """What it gets."""

    contents: Contents
    cached: int | None = None
    """Prompt tokens that the prefill engine had found in its own cache."""


class TransferFailed(Exception):
    """The KV cannot be had; the message is what the engine tells its client."""


class Link:
    """What leaves one engine: so many bytes per second, shared equally by the transfers under way."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s` of the clock; infinite for a link that takes no time."""
        self.active = 0
        self._bytes_per_s = bytes_per_s
        self._each = 0.0
        """Bytes that a transfer has been given that is under way since the beginning."""
        self._at = 0.0
        self._changed = asyncio.Event()

    async def carry(self, size: int) -> None:
        """Return when so many bytes have been carried."""
        self._advance(1)
        goal = self._each + size
        try:
            while (left := goal - self._each) > _ROUNDING_BYTES and not math.isinf(self._bytes_per_s):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left * self.active / self._bytes_per_s):
                        await self._changed.wait()
                self._advance(0)
        finally:
            self._advance(-1)

    def _advance(self, joining: int) -> None:
        now = asyncio.get_running_loop().time()
        if self.active and not math.isinf(self._bytes_per_s):
            self._each += (now - self._at) * self._bytes_per_s / self.active
        self._at = now
        self.active += joining
        if joining:
            self._changed.set()
            self._changed = asyncio.Event()


class Kept:
    """The KV of one prompt, on the way to whoever asks for it."""

    def __init__(self) -> None:
        self.until = 0.0
        """Loop time when it is given up."""
        self.sequence: Sequence | None = None
        self.contents: Contents = ()
        self.ready = asyncio.Event()
        """Set when the prompt is computed."""
        self.asked = 0
        """Engines that wait for it, or are being sent it."""


class Host(msgspec.Struct, frozen=True):
    """What the hand-overs of an engine need of it."""

    settings: SimulateSettings
    core: Core
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Starts a task that the engine owns."""
    die: Callable[[], None]
    """Ends the whole engine."""


class KvExchange:
    """One engine's hand-overs. See `Exchange` in `engines.simulator.core` for what the engine tells it."""

    lease_s: ClassVar[float]
    """What the real engine waits, where the settings do not say."""

    def __init__(self, host: Host) -> None:
        self.settings = settings = host.settings
        self.core = host.core
        self.engine_id = str(uuid.uuid4())
        self.counts = Transfers(settings.role)
        self.kept: dict[str, Kept] = {}
        self.port = 0
        self.lease = settings.kv_lease_s or self.lease_s
        self._host = host
        self._tasks: dict[Sequence, set[asyncio.Task[None]]] = {}
        self._link = Link(settings.link_bytes_per_s * settings.speedup or math.inf)
        self._client: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, port: int) -> None:
        """Listen for other engines; 0 lets the kernel choose. Raises OSError where the port is taken."""
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application()
        for route, handler in self.routes().items():
            method, path = route.split(" ")
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.settings.host, port).start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Break off what is under way, and listen no more."""
        tasks = [task for own in self._tasks.values() for task in own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        if self._runner is not None:
            for connection in tuple(self._runner.server.connections if self._runner.server is not None else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()

    def counted(self) -> Transfers:
        """What it has counted so far."""
        return self.counts

    def routes(self) -> dict[str, Handler]:
        """Method and path → who answers other engines."""
        return {f"POST {KV_PATH}": self._answer}

    @property
    def url(self) -> str:
        """Where other engines ask."""
        return f"http://{self.settings.host}:{self.port}"

    # ------------------------------------------------------------------------------------------------ told by the engine

    def arrived(self, sequence: Sequence) -> bool:
        """A new sequence; whether it may be queued."""
        if sequence.prompt.handover is not Never.ENDS:
            return True
        self.drop(sequence)
        self._host.die()
        return False

    def fetch(self, sequence: Sequence) -> None:
        """Have KV brought for a sequence that has blocks for it."""
        if isinstance(sequence.prompt.handover, Fetch):
            self.own(sequence, self._fetch(sequence, sequence.prompt.handover))

    def finished(self, sequence: Sequence) -> bool:
        """Keep the KV of a sequence that has ended, if it is to be kept; whether its last token may be told."""
        match sequence.prompt.handover:
            case Keep(key) if sequence in self.core.scheduler.kept:
                self.keep(key, sequence)
        return True

    def left(self, sequence: Sequence) -> None:
        """Nobody waits for a sequence any more."""
        for task in self._tasks.get(sequence, ()):
            task.cancel()
        if sequence.prompt.handover is Never.ENDS_LATER and not sequence.done:
            self._host.die()

    def handle(self, sequence: Sequence) -> dict[str, Any] | None:  # noqa: ARG002 - only NIXL's answers tell anything
        """What an answer tells about a sequence's KV."""
        return None

    def own(self, sequence: Sequence, work: Coroutine[Any, Any, None]) -> None:
        """Run a task for a sequence, as long as anybody waits for it."""
        task = self._host.spawn(work)
        own = self._tasks.setdefault(sequence, set())
        own.add(task)

        def over(task: asyncio.Task[None]) -> None:
            own.discard(task)
            if not own:
                self._tasks.pop(sequence, None)

        task.add_done_callback(over)

    def drop(self, sequence: Sequence) -> None:
        """Give up a sequence that has not been queued."""
        sequence.done = True
        self.core.scheduler.counters.aborted += 1

    # ------------------------------------------------------------------------------------------------ the prefill engine

    async def hand_over(self, asked: Asked) -> Given:
        """Send a prompt's KV. Raises TransferFailed."""
        raise NotImplementedError

    def keep(self, key: str, sequence: Sequence) -> None:
        """Keep the KV of a prompt for whoever asks for it."""
        kept = self.keeping(key)
        kept.sequence = sequence
        kept.contents = contents(sequence.prompt.tokens, self.settings.block_size, sequence.prompt.adapter)
        self.extend(key, kept, self.lease)
        kept.ready.set()

    def keeping(self, key: str) -> Kept:
        """What is kept, or will be, under a key."""
        if key not in self.kept:
            self.kept[key] = Kept()
        return self.kept[key]

    def extend(self, key: str, kept: Kept, seconds: float) -> None:
        """Keep it for so long from now, if not for longer."""
        loop = asyncio.get_running_loop()
        kept.until = max(kept.until, loop.time() + seconds)
        loop.call_at(kept.until, self._look, key, kept)

    @contextlib.contextmanager
    def asking(self, key: str, kept: Kept) -> Iterator[None]:
        """Not give it up meanwhile."""
        kept.asked += 1
        try:
            yield
        finally:
            kept.asked -= 1
            self._look(key, kept)

    async def carry(self, blocks: int) -> float:
        """Let so many blocks pass over the link; the seconds that took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self._link.carry(self.size(blocks))
        return loop.time() - started

    def size(self, blocks: int) -> int:
        """Bytes of KV in so many blocks."""
        return blocks * self.settings.block_size * self.settings.kv_bytes_per_token

    def count(self, blocks: int, seconds: float) -> None:
        """Count a transfer."""
        self.counts.transfers += 1
        self.counts.blocks += blocks
        self.counts.bytes += self.size(blocks)
        self.counts.seconds += seconds

    def forget(self, key: str) -> None:
        """Free the blocks of a prompt that has been fetched, or will not be."""
        kept = self.kept.pop(key, None)
        if kept is not None and kept.sequence is not None:
            self.core.scheduler.forget(kept.sequence)
            self.core.nudge()

    def expired(self, sequence: Sequence) -> None:  # noqa: ARG002 - for those to whom it matters
        """A prompt was given up that nobody had fetched."""
        self.counts.expired += 1

    def _look(self, key: str, kept: Kept) -> None:
        """Give up what is over and not being asked for."""
        if self.kept.get(key) is kept and not kept.asked and asyncio.get_running_loop().time() + _TIMER_S >= kept.until:
            self.forget(key)
            if kept.sequence is not None:
                self.expired(kept.sequence)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=Asked)
        try:
            given = await self.hand_over(asked)
        except TransferFailed as failure:
            return web.Response(status=409, text=str(failure))
        return web.Response(body=msgspec.json.encode(given), content_type="application/json")

    # ------------------------------------------------------------------------------------------------- the decode engine

    async def bring(self, fetch: Fetch, asked: Asked) -> Given:
        """Get a prompt's KV. Raises TransferFailed."""
        raise NotImplementedError

    async def ask(self, url: str, path: str, body: msgspec.Struct | None = None, *, answer: type[_T]) -> _T:
        """Ask another engine. Raises aiohttp.ClientError where it is not there, TransferFailed where it refuses or makes no sense."""
        if self._client is None:
            raise TransferFailed("not running")
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._client.request("GET" if body is None else "POST", url + path, data=data) as response:
                status, told = response.status, await response.read()
        except UnicodeError as error:  # of a host that is no name
            raise aiohttp.ClientConnectionError(str(error)) from error
        if status != 200:
            raise TransferFailed(told.decode(errors="replace"))
        try:
            return msgspec.json.decode(told, type=answer)
        except msgspec.MsgspecError as error:
            raise TransferFailed(str(error)) from error

    @property
    def recomputes(self) -> bool:
        """Whether a prompt whose KV cannot be had is computed here."""
        return self.settings.kv_load_failure_policy is LoadFailurePolicy.RECOMPUTE

    async def _fetch(self, sequence: Sequence, fetch: Fetch) -> None:
        scheduler = self.core.scheduler
        missing = scheduler.missing(sequence)
        blocks = None if fetch.blocks is None else fetch.blocks[sequence.stored :][:missing]
        try:
            given = await self.bring(fetch, Asked(fetch.key, missing, fetch.engine, blocks))
        except TransferFailed as failure:
            self.counts.failed += 1
            if not self.recomputes:
                self.core.fail(sequence, str(failure))
                return
            scheduler.unfetched(sequence)
        else:
            scheduler.fetched(sequence, given.contents, given.cached)
            self.core.publish_changes()
        self.core.nudge()
