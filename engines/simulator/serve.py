"""What does `commutator simulate` do? It runs engines on neighbouring ports until it is told to stop.

When all of them listen it prints one line of JSON, which says where:

    {"engines":[{"url":"http://127.0.0.1:9000","kind":"vllm","model":"sim","kv_events":"tcp://...","kv_replay":"tcp://...",
      "role":"prefill","bootstrap":"http://127.0.0.1:9100"}]}
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import sys

import msgspec

from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import SimulateSettings
from engines.types import EngineKind, Role

LAST_PORT = 65_535
_OF_VLLM = {"connector", "kv_load_failure_policy"}
_HANDOVER = _OF_VLLM | {"kv_transfer_port", "kv_bytes_per_token", "link_bytes_per_s", "kv_lease_s"}


class CannotSimulate(Exception):
    """The engines asked for cannot be run; the message says why."""


async def run(settings: SimulateSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises CannotSimulate where a port, the model folder or a setting cannot be used."""
    _check(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with contextlib.AsyncExitStack() as stack:
            engines = [await _started(stack, _own(settings, index)) for index in range(settings.engines)]
            sys.stdout.write(msgspec.json.encode({"engines": [_described(engine) for engine in engines]}).decode() + "\n")
            sys.stdout.flush()
            await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _check(settings: SimulateSettings) -> None:
    for first in (settings.port, settings.kv_transfer_port):
        last = first + settings.engines - 1
        if first and last > LAST_PORT:
            raise CannotSimulate(f"{settings.engines} engines from port {first} would need port {last}; the last one is {LAST_PORT}")
    if idle := sorted(_without_effect(settings)):
        what = "role" if settings.role is Role.AGGREGATED else "kind vllm"
        raise CannotSimulate(f"{', '.join(idle)} would have no effect without {what}")
    if settings.load_feed and (settings.kind is not EngineKind.SGLANG or not settings.kv_events):
        raise CannotSimulate("load_feed is for kind sglang with kv_events: only SGLang pushes its load, and says where among its KV events")
    if not settings.model_names:
        raise CannotSimulate("served_model_name must name at least one model")


def _without_effect(settings: SimulateSettings) -> set[str]:
    """Settings of hand-overs that have been changed, and that engines of this kind and role have not."""
    aggregated, sglang = settings.role is Role.AGGREGATED, settings.kind is EngineKind.SGLANG
    changed = {name for name in _HANDOVER if getattr(settings, name) != getattr(SimulateSettings(), name)}
    return changed if aggregated else changed & _OF_VLLM if sglang else set()


def _own(settings: SimulateSettings, index: int) -> SimulateSettings:
    """The settings of one engine of several."""
    port, kv_transfer_port = (first + index if first else 0 for first in (settings.port, settings.kv_transfer_port))
    return msgspec.structs.replace(settings, port=port, kv_transfer_port=kv_transfer_port, hash_seed=settings.hash_seed + index)


async def _started(stack: contextlib.AsyncExitStack, settings: SimulateSettings) -> SimulatedEngine:
    try:
        return await stack.enter_async_context(SimulatedEngine(settings, record=0))
    except FileNotFoundError as error:
        raise CannotSimulate(f"the model folder has no {error.filename}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            ports = f"{settings.port}" + (f" or {settings.kv_transfer_port}" if settings.kv_transfer_port else "")
            raise CannotSimulate(f"cannot listen on {settings.host}:{ports}: the port is in use") from error
        raise CannotSimulate(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from error
    except (ValueError, KeyError) as error:
        raise CannotSimulate(f"the model folder {settings.model!r} cannot be read: {error}") from error


def _described(engine: SimulatedEngine) -> dict[str, object]:
    return {
        "url": engine.url,
        "kind": engine.kind,
        "model": engine.settings.model_names[0],
        "kv_events": engine.kv_events,
        "kv_replay": engine.kv_replay,
        "role": engine.role,
        "bootstrap": engine.bootstrap,
    }
