"""What is `commutator relay`? The relay of a router without the router: it probes engines, follows their events, and puts them on the bus.

    engines ── probe ──▶ Monitor ── joined, left ──▶ Sharing ── our turn ──▶ Relay ──▶ bus ──▶ routers' mirrors
                                                        └── claims ──▶ bus          GET /metrics, /health, /ready

Routers leave an engine to whoever only relays it; of several relays one has it, and when that one ends another takes over.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import zmq.asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from discovery.access import access_of
from discovery.bus import Bus, BusOptions
from discovery.lifetime import cancelled_at_exit, stopped_by_signals
from discovery.logs import event
from discovery.monitor import Monitor
from discovery.peers import Carried, Others, Peers
from discovery.readings import Reading, Readings, of_bus, of_relay
from discovery.registry import Registry
from discovery.relay import Relay
from discovery.sharing import Sharing
from discovery.sources.announced import Announcer
from discovery.sources.chosen import chosen
from discovery.sources.finder import Finder, of_finder
from engines.types import Endpoint

if TYPE_CHECKING:
    from discovery.settings import RelaySettings
    from engines.metrics import EngineLoad
    from engines.types import EngineInfo, EngineSpec

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger(__name__)


class NothingInFlight:
    """The book of one who serves nobody (see `discovery.sharing.Book`)."""

    others: Others | None = None

    def carried(self) -> Iterable[tuple[Endpoint, Carried]]:
        """Nothing."""
        return ()


class Members:
    """Has every engine that is there followed, and announced where that is wanted."""

    def __init__(self, sharing: Sharing, announcer: Announcer | None) -> None:
        self._sharing = sharing
        self._announcer = announcer

    def joined(self, info: EngineInfo) -> None:
        """It can be followed."""
        if not info.kv_sources:
            event(_log, logging.WARNING, "engine publishes no KV events", engine=info.id, reason=info.no_kv_events)
        self._sharing.follow(info)
        if self._announcer is not None:
            self._announcer.announce(info.spec)

    def changed(self, info: EngineInfo) -> None:
        """Its models are another list; its cache is the same."""

    def left(self, info: EngineInfo, reason: str) -> None:  # noqa: ARG002  the watch has logged it
        """It cannot be followed any more."""
        self._sharing.unfollow(info.id)
        if self._announcer is not None:
            self._announcer.withdraw(info.id)

    def load(self, engine_id: str, load: dict[int, EngineLoad], *, answered: bool = True) -> None:
        """No concern of a relay."""

    def busy(self, engine_id: str) -> bool:  # noqa: ARG002  no request passes through here
        """Nobody knows."""
        return False


class Watched:
    """Follows what sources find: a relay has nothing in flight, so who is released is let go."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def follow(self, spec: EngineSpec, source: str) -> None:  # noqa: ARG002  the finder has logged it
        """See `discovery.sources.finder.Target`."""
        self._monitor.remove(spec.url)
        self._monitor.add(spec)

    def release(self, engine_id: str) -> None:
        """See `discovery.sources.finder.Target`."""
        self._monitor.remove(engine_id)


class Pages:
    """What it says over HTTP."""

    def __init__(self, bus: Bus, relay: Relay, peers: Peers, monitor: Monitor, finder: Finder) -> None:
        self._finder = finder
        self._bus = bus
        self._relay = relay
        self._peers = peers
        self._monitor = monitor
        self._registry = CollectorRegistry()
        self._registry.register(Readings(self.readings))

    def application(self) -> web.Application:
        """Its three paths."""
        made = web.Application()
        made.add_routes(
            [web.get("/metrics", self._metrics), web.get("/health", self._health), web.get("/ready", self._ready)],
        )
        return made

    def engines(self) -> dict[str, str]:
        """Each engine's state in words."""
        followed = set(self._peers.follows)
        return {engine: self._state(engine, followed) for engine in self._monitor.watched}

    def _state(self, engine: str, followed: set[str]) -> str:
        if engine not in followed:
            why = self._monitor.waiting_for(engine)
            return f"waiting: {why}" if why else "joining: it has not answered yet"
        if engine in self._peers.relays:
            return "relayed" if self._relay.complete(engine) else "joining: what it published before is being read"
        return "relayed by another process" if self._peers.relayed(engine) else "joining: nobody relays it yet"

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE})

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return _json(200, {"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        """Ready: the bus is there, and every engine that is there is relayed. One that is not there makes nobody wait."""
        del request
        engines = self.engines()
        ready = self._bus.connected and self._finder.complete and not any(state.startswith("joining") for state in engines.values())
        return _json(200 if ready else 503, {"ready": ready, "bus": self._bus.connected, "engines": engines})

    def readings(self) -> Iterator[Reading]:
        """Every family of its page, as it stands now."""
        yield from of_relay(self._relay)
        yield from of_bus(self._bus, "relay")
        yield from of_finder(self._finder)
        states = [((engine, state.partition(":")[0].replace(" ", "_")), 1.0) for engine, state in self.engines().items()]
        yield "relay_engine_state", "1 for the state each engine is in.", ("engine", "state"), states
        yield "relay_peers", "Routers and other relays heard of on the bus.", (), [((), float(len(self._peers)))]


async def relay(settings: RelaySettings) -> None:
    """Run until SIGINT or SIGTERM."""
    stop = stopped_by_signals()
    async with relaying(settings) as url:
        sys.stdout.write(msgspec.json.encode({"ready": True, "url": url}).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()


@contextlib.asynccontextmanager
async def relaying(settings: RelaySettings) -> AsyncIterator[str]:
    """A relay that works within the context; where its pages are. Raises OSError, BusUnreachable or AccessUnusable."""
    async with contextlib.AsyncExitStack() as stack:
        bus = Bus(BusOptions(access=access_of(settings), echo=False))
        await bus.connect(settings.nats or "", name="commutator relay")
        stack.push_async_callback(bus.close)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
        )
        context = stack.enter_context(zmq.asyncio.Context())
        group = await stack.enter_async_context(cancelled_at_exit())
        kv = Relay(bus, settings.namespace, context)
        peers = Peers(secrets.token_hex(8), time.monotonic(), only_relays=True)
        sharing = Sharing(bus, settings.namespace, peers, NothingInFlight(), kv)
        announcer = Announcer(bus, settings.namespace) if settings.announce else None
        monitor = Monitor(
            settings.engine,
            Registry(),
            session,
            Members(sharing, announcer),
            probe_period_s=settings.probe_period_s,
            probe_timeout_s=settings.probe_timeout_s,
        )
        finder = Finder(chosen(settings.discover, bus, settings.namespace), Watched(monitor), fixed=monitor.watched)
        url = await _listen(stack, Pages(bus, kv, peers, monitor, finder), settings.host, settings.port)
        for room in (kv, sharing, monitor, finder, announcer):
            if room is not None:
                group.create_task(room.run(), name=type(room).__name__.lower())
        event(_log, logging.INFO, "relaying", url=url, engines=len(settings.engine), bus=bus.servers)
        yield url


async def _listen(stack: contextlib.AsyncExitStack, pages: Pages, host: str, port: int) -> str:
    runner = web.AppRunner(pages.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port).start()
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104  compared, not bound
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{runner.addresses[0][1]}"


def _json(status: int, body: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
