"""What does `commutator doctor` do? It looks at everything that was named, prints a line for each thing, and fails when one is wrong."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Sequence
from typing import Final

import aiohttp

from engines.types import EngineSpec
from engines.urls import normalise
from router.doctor.broker import bus
from router.doctor.engine import Engine, Examiner
from router.doctor.findings import Finding, State, as_json, as_text, healthy, ok, warning
from router.doctor.fleet import LEAST_FILES, Router, read, routing
from router.doctor.pairs import pairs
from router.doctor.settings import DoctorSettings

AT_ONCE: Final = 8
"""Engines looked at at a time: each is sent some prompts, and they are to be answered as they would be otherwise."""


class SomethingIsWrong(Exception):
    """The message says how much."""


async def run(settings: DoctorSettings) -> None:
    """Print what was found. Raises SomethingIsWrong."""
    found = await examine(settings)
    sys.stdout.write((as_json(found) if settings.json else as_text(found)) + "\n")
    sys.stdout.flush()
    if not healthy(found):
        count = sum(finding.state is State.WRONG for finding in found)
        raise SomethingIsWrong(
            f"{count} of {len(found)} things looked at {'is' if count == 1 else 'are'} wrong; see docs/troubleshooting.md"
        )


async def examine(settings: DoctorSettings) -> list[Finding]:
    """Everything, in the order in which it is told: router, bus, engines, pairs."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False, trust_env=False
    ) as session:
        found: list[Finding] = [] if settings.router is not None else [_files()]
        specs = {normalise(spec.url): spec for spec in settings.engine}
        if settings.router is not None:
            router = Router(session, settings.router, settings.router_key, settings.timeout_s)
            page, told = await read(router)
            found += told
            if page is not None:
                found += await routing(router)
                specs = {url: EngineSpec(url=url) for url in page.engines} | specs
        named = frozenset(normalise(spec.url) for spec in settings.engine)
        examiner = Examiner(session, tokenizer=settings.tokenizer, timeout_s=settings.timeout_s)
        engines, of_engines = await _engines(examiner, list(specs.values()), named)
        if settings.nats is not None:
            found += await bus(settings, [engine.info for engine in engines])
        return found + of_engines + await pairs(engines)


async def _engines(examiner: Examiner, specs: Sequence[EngineSpec], named: frozenset[str]) -> tuple[list[Engine], list[Finding]]:
    """Those that answer, and what is to be said of all, engine by engine."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(spec: EngineSpec) -> tuple[Engine | None, list[Finding]]:
        async with turns:
            engine, reached = await examiner.reach(spec, named=normalise(spec.url) in named)
            return engine, [reached] if engine is None else [reached, *await examiner.examine(engine)]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(spec)) for spec in specs]
    told = [task.result() for task in tasks]
    return [engine for engine, _ in told if engine is not None], [finding for _, found in told for finding in found]


def _files() -> Finding:
    """Of this process: a router started from here has the same."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < LEAST_FILES:
        mend = "ulimit -n 65536 before a router is started; LimitNOFILE=65536 in a systemd unit; --ulimit nofile=65536 of docker"
        return warning("files", "here", f"a process started from here may have {limit} files open, two for each request", mend)
    return ok("files", "here", f"a process started from here may have {limit} files open")
