"""What does `commutator simulate` do? It runs engines on neighbouring ports until it is told to stop.

When all of them listen it prints one line of JSON, which says where:

    {"engines":[{"url":"http://127.0.0.1:9000","kind":"vllm","model":"sim","kv_events":"tcp://...","kv_replay":"tcp://..."}]}
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import msgspec

from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import SimulateSettings


async def run(settings: SimulateSettings) -> None:
    """Serve until SIGINT or SIGTERM. Ends the process with status 1 and a message where a port or the model folder cannot be used."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with contextlib.AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(_engine(settings, index)) for index in range(settings.engines)]
            sys.stdout.write(msgspec.json.encode({"engines": [_described(engine) for engine in engines]}).decode() + "\n")
            sys.stdout.flush()
            await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _engine(settings: SimulateSettings, index: int) -> SimulatedEngine:
    own = msgspec.structs.replace(settings, port=settings.port + index if settings.port else 0, hash_seed=settings.hash_seed + index)
    return SimulatedEngine(own, record=0)


def _described(engine: SimulatedEngine) -> dict[str, object]:
    return {
        "url": engine.url,
        "kind": engine.kind,
        "model": engine.settings.model_names[0],
        "kv_events": engine.kv_events,
        "kv_replay": engine.kv_replay,
    }
