"""What does `commutator up` do? Engines first, then the router in front of them; and all of it ends together.

    pools ──▶ engines start, side by side ──▶ all serve ──▶ commutator serve ──▶ one line: ready
    Ctrl-C, SIGTERM ──▶ the router finishes what it has ──▶ engines end

An engine that does not start ends all of it, with the reason. With a planner it is the other way round: the router first, then the planner, which
starts as many engines as there should be and tells the router of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from discovery.broker import Broker
from discovery.lifetime import cancelled_at_exit, stopped_by_signals
from discovery.logs import event
from discovery.up.commands import Beside, CommandFailed
from discovery.up.engines import Engines
from engines.types import EngineSpec, Role

if TYPE_CHECKING:
    from discovery.up.settings import UpSettings

POLL_S: Final = 0.1

_log = logging.getLogger(__name__)


async def up(settings: UpSettings) -> None:
    """Run until SIGINT or SIGTERM. Raises ConfigError, EngineNotStarted or CommandFailed."""
    stop = stopped_by_signals()
    async with contextlib.AsyncExitStack() as stack:
        private = Path(await asyncio.to_thread(stack.enter_context, tempfile.TemporaryDirectory(prefix="commutator-up-")))
        session = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))
        begin = _engines_first if settings.plan is None else _planner_last
        told = await begin(settings, private, session, stack, stop)
        if told is None:
            return
        event(_log, logging.INFO, "up", logs=settings.log_folder, **told)
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()


async def _engines_first(
    settings: UpSettings, private: Path, session: aiohttp.ClientSession, stack: contextlib.AsyncExitStack, stop: asyncio.Event
) -> dict[str, Any] | None:
    """Everything runs until `stack` is left: where it is reached; None when `stop` came first."""
    await Beside("serve", _served(settings, ()), private).check()
    engines = Engines(settings, Path(settings.log_folder), session)
    stack.push_async_callback(engines.stop)
    if not await _unless(stop, engines.start()):
        return None
    router = Beside("serve", _served(settings, engines.specs), private)
    stack.push_async_callback(router.stop)
    told = await router.start()
    if not await _unless(stop, _ready(session, told["url"])):
        return None
    group = await stack.enter_async_context(cancelled_at_exit())
    group.create_task(engines.keep(), name="engines")
    group.create_task(_must_not_end(router, stop), name="router")
    return told | {"engines": [{"name": engine.name, "url": engine.spec.url, "log": str(engine.log)} for engine in engines.all]}


async def _planner_last(
    settings: UpSettings, private: Path, session: aiohttp.ClientSession, stack: contextlib.AsyncExitStack, stop: asyncio.Event
) -> dict[str, Any] | None:
    """The same with a planner: it ends after the router, and its engines with it."""
    nats = os.environ.get("COMMUTATOR_NATS") or settings.serve.get("nats")
    broker = None if nats else Broker()
    serve = {"admin_token": secrets.token_urlsafe(24), "admin_port": 0} | _served(settings, ())
    token = os.environ.get("COMMUTATOR_ADMIN_TOKEN") or str(serve["admin_token"])
    serve |= {"nats": nats or "nats://127.0.0.1:4222", "engine": []}
    for name, table in (("serve", serve), ("plan", _planned(settings, serve, token, "http://127.0.0.1:8081"))):
        await Beside(name, table, private).check()
    if broker is not None:
        stack.push_async_callback(broker.stop)
        serve["nats"] = await broker.start()
    planner = Beside("plan", {}, private)
    stack.push_async_callback(planner.stop)
    router = Beside("serve", serve, private)
    stack.push_async_callback(router.stop)
    told = await router.start()
    planner.table = _planned(settings, serve, token, told["admin"])
    told["planner"] = (await planner.start())["url"]
    group = await stack.enter_async_context(cancelled_at_exit())
    if broker is not None:
        group.create_task(broker.run(), name="broker")
    group.create_task(_must_not_end(router, stop), name="router")
    group.create_task(_must_not_end(planner, stop), name="planner")
    return told if await _unless(stop, _ready(session, told["url"])) else None


def _served(settings: UpSettings, engines: Sequence[EngineSpec]) -> dict[str, object]:
    """The router's configuration. Before there are engines, one that nobody asks stands for them."""
    named = list(engines) or [EngineSpec("http://127.0.0.1:1")]
    return settings.serve | {"engine": named, "host": settings.host, "port": settings.port} | _logged(settings)


def _planned(settings: UpSettings, serve: dict[str, object], token: str, admin: str) -> dict[str, object]:
    """The planner's configuration."""
    roles = {pool.role for pool in settings.pools}
    given = settings.plan or {}
    ours = {
        "actuator": "process",
        "pool": list(settings.pools),
        "router": [admin],
        "router_token": token,
        "log_folder": settings.log_folder,
    }
    shared = {key: value for key, value in serve.items() if key.startswith("nats") or key == "namespace"}
    return {"port": 0, "mode": "aggregated" if roles == {Role.AGGREGATED} else "disaggregated"} | given | ours | shared | _logged(settings)


def _logged(settings: UpSettings) -> dict[str, object]:
    return {"log_level": settings.log_level, "log_format": settings.log_format}


async def _ready(session: aiohttp.ClientSession, url: str) -> None:
    """The router knows its engines, and has a model to serve."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/ready", ssl=False) as answer:
                if answer.status == 200 and any((await answer.json())["models"].values()):
                    return
        await asyncio.sleep(POLL_S)


async def _unless(stop: asyncio.Event, doing: Coroutine[object, object, None]) -> bool:
    """Whether it was done before `stop`; cancelled when not. Raises what it raises: of several, the first."""
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(doing, name="starting")
            stopped = group.create_task(stop.wait(), name="stop")
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            done = task.done()
            task.cancel()
            stopped.cancel()
        return done
    except BaseExceptionGroup as failed:
        raise _first(failed) from None


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _must_not_end(router: Beside, stop: asyncio.Event) -> None:
    said = await router.ended()
    if not stop.is_set():
        raise CommandFailed(said)
