"""Builds everything and starts it. No logic: which part does what is told in the parts.

Start:  broker → bus → event path → listener → monitor.         Stop:  listener (in-flight requests finish) → everything else.

One of several processes (`router.processes`) is built the same, with what it has in common with the others in place of its own:
their broker, their port, their admin API.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import zmq.asyncio

from discovery.access import Access, access_of
from discovery.broker import Broker
from discovery.bus import Bus, BusOptions
from discovery.logs import event
from discovery.mirror import Mirror
from discovery.monitor import Monitor
from discovery.peers import Peers
from discovery.registry import Registry
from discovery.relay import Relay as KvRelay
from discovery.sharing import Sharing
from discovery.sources.chosen import chosen
from discovery.sources.finder import Finder
from router.admin import MAX_BODY_BYTES, Admin
from router.admission import QueueLimits
from router.answers import Answers
from router.beginning import Beginning
from router.caches import Caches
from router.calibration import Calibration
from router.census import Census
from router.chooser import Chooser
from router.disagg import StaticRule
from router.entrance import HeaderNames
from router.exchange import Exchange
from router.fleet import Fleet
from router.gate import Gate
from router.guards import read_guards
from router.holding import Holding
from router.intake import Intake
from router.load import LoadBook
from router.membership import Membership
from router.metrics import Metrics
from router.observing import Observed, Observing, Told
from router.pair import PairSender
from router.pairing import DisaggRules, Pairing
from router.processes.parent import processes
from router.processes.part import Inside, Part
from router.prompts.book import PromptBook
from router.proxy import Proxy
from router.readings import VERSION, Readings
from router.roster import Roster
from router.routes import INFERENCE
from router.running import Listening, cancelled_at_exit, listen, say_ready, stopped_by_signals, told_by_hangup
from router.scheduling.policies.blocks import BlocksWeights
from router.scheduling.scheduler import Scheduler
from router.scheduling.table import load_policy
from router.server import Handler, Server
from router.spans import Exporter
from router.stored import Whereabouts
from router.tracing import Trace
from router.ui.document import document
from router.ui.page import LivePage
from router.ui.plans import Plans
from router.ui.recent import Recent
from router.ui.view import View
from router.upstream import Timeouts

if TYPE_CHECKING:
    from router.settings import AdmissionSettings, ServeSettings

SWEEP_PERIOD_S = 0.25
SWEEP_ENTRIES = 2_000
"""A millisecond of work; then everything else has its turn."""
SWEEPS = 10
"""In a period."""

GC_THRESHOLD = (20_000, 20, 50)
"""Requests leave next to nothing for the collector to find, so it need not look after every 700 objects."""

COLLECT_PERIOD_S = 600.0
"""By itself the collector would come to the oldest garbage after millions of objects: each time the bus is lost, 90 kB of it are left."""

log = logging.getLogger(__name__)
clock = time.monotonic


async def serve(settings: ServeSettings) -> None:
    """Run the router until SIGINT or SIGTERM."""
    stop = stopped_by_signals()
    if settings.processes > 1:
        async with processes(settings) as listening:
            say_ready(listening)
            await stop.wait()
        return
    async with running(settings) as listening:
        collect_less()
        say_ready(listening)
        await stop.wait()


def collect_less() -> None:
    """Everything is built: have the garbage collector leave it alone."""
    gc.collect()
    gc.freeze()  # what start-up made stays; looking through it again and again took 8 % of the router's time
    gc.set_threshold(*GC_THRESHOLD)


@contextlib.asynccontextmanager
async def running(settings: ServeSettings, part: Part | None = None) -> AsyncIterator[Listening]:  # noqa: PLR0915  a list
    """A router that serves within the context. Raises OSError, BrokerError, BusUnreachable, PolicyNotLoaded or GuardsUnusable.

    `part` is what it has in common with other processes, when it is one of several.
    """
    guards = await read_guards(settings)
    weights = msgspec.convert(msgspec.structs.asdict(settings.blocks), BlocksWeights)
    name, policy = await asyncio.to_thread(load_policy, settings.policy, weights)  # it may import a user's module
    scheduler = Scheduler(policy, name, settings.router_temperature, random.Random())
    async with contextlib.AsyncExitStack() as stack:
        named = settings.nats if part is None else part.nats
        broker = None if named else Broker()
        if broker is not None:
            stack.push_async_callback(broker.stop)
        bus = Bus(BusOptions(access=access_of(settings) if settings.nats else Access(), echo=False))
        await bus.connect(named or await _started(broker), name="commutator")
        stack.push_async_callback(bus.close)
        session = await stack.enter_async_context(_control_session())
        context = stack.enter_context(zmq.asyncio.Context())

        fleet, metrics = Fleet(_share(settings.admission.max_active_requests, 1 if part is None else part.processes)), Metrics()
        caches, load = Caches(settings.index_max_blocks, settings.predicted_ttl_s), LoadBook()
        mirror = Mirror(bus, settings.namespace, caches, blind_after_s=settings.blind_after_s)
        relay = KvRelay(bus, settings.namespace, context, local=mirror, alone=broker is not None)
        sharing = peers = None
        if named:  # on a broker of its own, a router is alone
            peers = Peers(secrets.token_hex(8) if part is None else part.router, clock(), expected=1 if part is None else part.processes)
            sharing = Sharing(bus, settings.namespace, peers, load, relay, clock=clock)
        prompts = PromptBook(tokenizer=settings.tokenizer)
        whereabouts = Whereabouts(session, pass_clients_keys=guards.door is None)
        holding, observed = Holding(fleet, settings.admission.max_waiting, clock=clock), Observed()
        intake = Intake(
            fleet,
            prompts,
            whereabouts,
            session_header=settings.session_header.lower().encode(),
            tokenize=scheduler.uses_cache,
            holding=holding,
        )
        calibration = Calibration()
        static = StaticRule(settings.eff_isl_threshold, settings.eff_isl_ratio_threshold)
        pairing = Pairing(DisaggRules(settings.disagg, static, enforce=settings.without_prefill == "enforce"))
        chooser = Chooser(fleet, caches, load, scheduler, mirror, calibration, pairing=pairing, clock=clock)

        group = await stack.enter_async_context(cancelled_at_exit())
        membership = Membership(
            fleet=fleet,
            caches=caches,
            load=load,
            pairing=pairing,
            calibration=calibration,
            relay=relay if sharing is None else sharing,
            mirror=mirror,
            prompts=prompts,
            timeouts=Timeouts(settings.connect_timeout_s, settings.response_head_timeout_s, settings.stream_idle_timeout_s),
            pass_clients_keys=guards.door is None,
            session=session,
            group=group,
            clock=clock,
        )
        monitor = Monitor(
            settings.engine,
            Registry(),
            session,
            membership,
            probe_period_s=settings.probe_period_s,
            probe_timeout_s=settings.probe_timeout_s,
        )
        recent = Recent() if settings.has_admin else None
        gate = _gate(settings.admission, chooser, metrics, 1 if part is None else part.processes)
        spans = _exporter(settings, session, stack)
        proxy = Proxy(
            intake,
            chooser,
            gate,
            membership.lines,
            metrics,
            whereabouts,
            pairs=PairSender(membership.lines, chooser, prompts, metrics, settings.kv_transfer_timeout_s, settings.kv_lease_s, clock),
            suspect=monitor.suspect,
            clock=clock,
            resumes=settings.resume,
            prompts=prompts if settings.forward_tokens else None,
            observed=observed,
            spans=spans,
            recent=recent,
        )
        roster = Roster(monitor, fleet, load)
        finder = Finder(chosen(settings.discover, bus, settings.namespace), roster, fixed=monitor.watched)
        beginning = Beginning(monitor, fleet, finder, clock=clock)
        group_of_all = None if part is None else part.group
        answers = Answers(fleet, intake, chooser, metrics, accepting=lambda: beginning.over and not server.stopping, group=group_of_all)
        server = Server(
            _dispatch(proxy, answers, settings.trace_ratio),
            max_body_bytes=settings.max_body_bytes,
            stall_timeout_s=settings.client_stall_timeout_s,
            grace_period_s=settings.grace_period_s,
            door=guards.door,
        )
        metrics.read_from(
            Readings(
                fleet=fleet,
                caches=caches,
                load=load,
                pairing=pairing,
                calibration=calibration,
                mirror=mirror,
                monitor=monitor,
                relay=relay,
                bus=bus,
                server=server,
                gate=gate,
                peers=peers,
                spans=spans,
                finder=finder,
                clock=clock,
            )
        )
        census = Census(monitor=monitor, fleet=fleet, roster=roster, caches=caches, load=load, mirror=mirror, pairing=pairing, clock=clock)
        control = Admin(roster, census)
        plans = Plans()
        told = Told(observed, holding, fleet, census, load, gate)
        observing = Observing(bus, settings.namespace, peers.router, told, plans, clock=clock) if peers is not None else None
        view = View(
            recent=recent or Recent(),
            plans=plans,
            census=census,
            fleet=fleet,
            caches=caches,
            pairing=pairing,
            metrics=metrics,
            bus=bus,
            server=server,
            gate=gate,
            peers=peers,
            policy=name,
            clock=clock,
        )
        admin = url = ""
        if part is None:
            if guards.admin_door is not None:
                page = LivePage(control.serve, lambda: _state(view))
                admins = Server(page.serve, max_body_bytes=MAX_BODY_BYTES, grace_period_s=1.0, door=guards.admin_door)
                stack.push_async_callback(admins.stop)
                admin = await listen(admins, settings.admin_host, settings.admin_port, guards)
                group.create_task(admins.run(), name="admin")
            stack.push_async_callback(server.stop)
            url = await listen(server, settings.host, settings.port, guards)
        if guards.files:
            stack.enter_context(told_by_hangup(guards.files))
            group.create_task(guards.files.run(), name="files")
        for room in (relay, mirror, monitor, finder, server, gate, sharing, observing, broker, spans):
            if room is not None:
                group.create_task(room.run(), name=type(room).__name__.lower())
        group.create_task(_keep_house(caches, load, membership, roster, gate, holding), name="housekeeping")
        if part is not None:
            if sharing is None:
                raise AssertionError
            await part.prepare(Inside(control, answers, metrics, view, sharing=sharing, monitor=monitor, fleet=fleet))
            stack.push_async_callback(server.stop)
            url = await listen(server, settings.host, part.port, guards, shared=True)
        event(log, logging.INFO, "serving", url=url, admin=admin, policy=name, engines=len(settings.engine), bus=bus.servers)
        yield Listening(url, admin)


async def _state(view: View) -> dict[str, Any]:
    """What the live page shows of a router that is one process."""
    return document({0: await view.part()}, VERSION)


def _share(whole: int, processes: int) -> int:
    """Each process's part, rounded up."""
    return -(-whole // processes)


def _gate(settings: AdmissionSettings, chooser: Chooser, metrics: Metrics, processes: int) -> Gate:
    """Each of several processes holds its part of those who may wait: their number is what keeps the wait short."""
    names = HeaderNames(
        tenant=settings.tenant_header.lower().encode() if settings.tenant_header is not None else None,
        priority=settings.priority_header.lower().encode(),
        deadline=settings.deadline_header.lower().encode(),
    )
    limits = QueueLimits(_share(settings.max_waiting, processes), settings.max_wait_s)
    return Gate(chooser, limits, names, waited=metrics.waited, clock=clock)


async def _started(broker: Broker | None) -> str:
    if broker is None:
        raise AssertionError
    return await broker.start()


def _exporter(settings: ServeSettings, session: aiohttp.ClientSession, stack: contextlib.AsyncExitStack) -> Exporter | None:
    """Who tells of traces, where somebody wants to hear of them. Raises OtelMissing."""
    if settings.otlp_endpoint is None:
        return None
    spans = Exporter(session, settings.otlp_endpoint, VERSION, clock=clock)
    stack.push_async_callback(spans.close)
    return spans


def _dispatch(proxy: Proxy, answers: Answers, trace_ratio: float = 0.0) -> Handler:
    """Inference paths to the proxy, everything else to the router's own answers."""
    source = random.Random()
    bits, draw = source.getrandbits, source.random

    def handle(exchange: Exchange) -> Coroutine[Any, Any, None]:
        exchange.trace = Trace(exchange.headers, bits, begins=bool(trace_ratio) and draw() < trace_ratio)
        route = INFERENCE.get(exchange.path)
        if route is not None and exchange.method == route.method and exchange.upgrade == route.websocket:
            return proxy.serve(exchange)
        return answers.serve(exchange)

    return handle


async def _keep_house(caches: Caches, load: LoadBook, membership: Membership, roster: Roster, gate: Gate, holding: Holding) -> None:
    """Time-outs of engines, and memory given back, in slices that the loop does not notice."""
    collected_at = clock()
    while True:
        await asyncio.sleep(SWEEP_PERIOD_S)
        if clock() - collected_at >= COLLECT_PERIOD_S:
            gc.collect()  # cached blocks are nothing to it: 0.3 ms for five million
            collected_at = clock()
        membership.sweep()
        for _ in range(SWEEPS):
            if caches.sweep(SWEEP_ENTRIES) < SWEEP_ENTRIES:
                break
            await asyncio.sleep(0)
        caches.expire(clock(), SWEEP_ENTRIES)
        load.sweep(SWEEP_ENTRIES)
        roster.sweep()
        gate.sweep()
        holding.sweep()


def _control_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False, trust_env=False
    )
