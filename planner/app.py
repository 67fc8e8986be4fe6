"""Builds a planner and starts it. No logic: which part does what is told in the parts.

bus ─▶ observer ─▶ loop ─▶ actuator ─▶ (drains at routers, starts, stops)        GET / /decisions /metrics /health
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from aiohttp import web

from discovery.access import access_of
from discovery.bus import Bus, BusOptions
from discovery.lifetime import cancelled_at_exit, stopped_by_signals
from discovery.logs import event
from planner.actuators.process import Processes
from planner.actuators.virtual import DryRun, Virtual
from planner.capacity import Profile
from planner.loop import Loop, Told
from planner.observer import BusObserver, Observer
from planner.policy import Memory, Policy
from planner.record import Record
from planner.routers import Routers
from planner.settings import ActuatorName, PlanSettings

if TYPE_CHECKING:
    from planner.actuators.types import Actuator

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger(__name__)


class CannotPlan(Exception):
    """Something that was named cannot be used; the message says what."""


class Kept(msgspec.Struct):
    """What a state file has."""

    planner: str
    told: Told
    memory: Memory


async def plan(settings: PlanSettings) -> None:
    """Run until SIGINT or SIGTERM; with `--backtest` or a profile that is to be measured, do that and end."""
    if settings.backtest is not None:
        from planner.backtest import backtest  # noqa: PLC0415  a planner that runs has no use for it

        await backtest(settings)
        return
    if settings.profile is not None and settings.measures:
        from planner.profiling import measure  # noqa: PLC0415

        await measure(settings)
        return
    stop = stopped_by_signals()
    async with planning(settings) as url:
        sys.stdout.write(msgspec.json.encode({"ready": True, "url": url}).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()


@contextlib.asynccontextmanager
async def planning(settings: PlanSettings) -> AsyncIterator[str]:
    """A planner that works within the context; where its page is. Raises OSError, BusUnreachable, CannotPlan or PredictorMissing."""
    policy = Policy(
        settings.pools, settings.rules, predictor=settings.predictor, profile=await asyncio.to_thread(read_profile, settings.profile)
    )
    keeper = StateFile(Path(settings.state_file)) if settings.state_file is not None else None
    kept = await asyncio.to_thread(keeper.read) if keeper is not None else None
    name = secrets.token_hex(8)
    if kept is not None and set(kept.memory.capacities) == set(policy.pools):
        policy.resume(kept.memory)
        name = kept.planner
    if keeper is not None:
        keeper.planner = name
    async with contextlib.AsyncExitStack() as stack:
        bus = None
        if settings.nats is not None:
            bus = Bus(BusOptions(access=access_of(settings)))
            await bus.connect(settings.nats, name="commutator plan")
            stack.push_async_callback(bus.close)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
        )
        engines = await stack.enter_async_context(contextlib.AsyncExitStack())  # ended when nobody decides any more
        group = await stack.enter_async_context(cancelled_at_exit())
        observer = _observer(settings, bus, session)
        if isinstance(observer, BusObserver):
            observer.start()
            stack.callback(observer.stop)
        actuator = _actuator(settings, name, bus, session, group)
        engines.push_async_callback(actuator.close)
        record = Record(policy)
        loop = Loop(
            policy,
            observer,
            actuator,
            record,
            bus=bus,
            namespace=settings.namespace,
            planner=name,
            model=settings.model or "",
            interval_s=settings.load_interval_s,
            clock=time.time,  # noqa: TID251  days and weeks are the clock's, and what is kept outlives a process
            keeper=keeper,
            told=kept.told if kept is not None else None,
        )
        url = await _listen(stack, record, settings.host, settings.port)
        group.create_task(loop.run(), name="loop")
        event(_log, logging.INFO, "planning", url=url, pools=[pool.name for pool in settings.pools], actuator=settings.actuator.value)
        yield url


def read_profile(path: str | None) -> Profile | None:
    """A profile that was measured before. Raises CannotPlan."""
    if path is None:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except (OSError, msgspec.MsgspecError) as error:
        raise CannotPlan(f"the profile {path} cannot be read: {error}") from error


class StateFile:
    """Keeps what is known in a file, which is replaced whole."""

    def __init__(self, path: Path) -> None:
        self.planner = ""
        self._path = path

    def read(self) -> Kept | None:
        """What was kept; None when nothing was. Raises CannotPlan when it cannot be read: it is not overwritten."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise CannotPlan(f"the state file {self._path} cannot be used: {error}; move it away to begin anew") from error

    async def keep(self, policy: Policy, told: Told) -> None:
        """See `planner.loop.Keeper`."""
        await asyncio.to_thread(self._write, msgspec.json.encode(Kept(self.planner, told, policy.memory)))

    def _write(self, kept: bytes) -> None:
        new = self._path.with_name(self._path.name + ".new")
        new.write_bytes(kept)
        new.replace(self._path)


def _observer(settings: PlanSettings, bus: Bus | None, session: aiohttp.ClientSession) -> Observer:
    if settings.prometheus is not None:
        from planner.prometheus import PrometheusObserver  # noqa: PLC0415  seldom

        return PrometheusObserver(session, settings.prometheus)
    assert bus is not None  # noqa: S101  the settings' own check
    return BusObserver(bus, settings.namespace, settings.model, clock=time.monotonic)


def _actuator(settings: PlanSettings, name: str, bus: Bus | None, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> Actuator:
    routers = Routers(session, settings.router, settings.router_token or "")
    match settings.actuator:
        case ActuatorName.PROCESS:
            logs = Path(settings.log_folder)
            return Processes(settings.pool, routers, session, group, logs=logs, drain_s=settings.drain_s)
        case ActuatorName.VIRTUAL:
            assert bus is not None  # noqa: S101  the settings' own check
            return Virtual(settings.pools, name, bus, settings.namespace, webhook=settings.webhook, session=session)
        case ActuatorName.DOCKER:
            from planner.actuators.docker import Docker  # noqa: PLC0415  seldom

            return Docker(settings, routers, group)
        case ActuatorName.KUBERNETES:
            from planner.actuators.kubernetes import Kubernetes  # noqa: PLC0415  seldom

            return Kubernetes.of(settings, routers, group)
        case ActuatorName.DRY_RUN:
            return DryRun(settings.pools)


async def _listen(stack: contextlib.AsyncExitStack, record: Record, host: str, port: int) -> str:
    async def page(request: web.Request) -> web.Response:
        del request
        return web.Response(text=record.as_html(), content_type="text/html")

    async def decisions(request: web.Request) -> web.Response:
        del request
        return web.Response(body=record.as_json(), content_type="application/json")

    async def metrics(request: web.Request) -> web.Response:
        del request
        return web.Response(body=record.page(), headers={"content-type": CONTENT_TYPE})

    async def health(request: web.Request) -> web.Response:
        del request
        return web.Response(body=b'{"status":"ok"}', content_type="application/json")

    application = web.Application()
    application.add_routes(
        [web.get("/", page), web.get("/decisions", decisions), web.get("/metrics", metrics), web.get("/health", health)],
    )
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port).start()
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104  compared, not bound
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{runner.addresses[0][1]}"
