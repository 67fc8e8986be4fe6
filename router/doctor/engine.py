"""What is to be said of one engine? It is probed, its tokenizer compared, a prompt sent twice to each rank, its connection watched."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp
import msgspec

from engines.client import EngineClient
from engines.errors import EngineError, NotAnEngine
from engines.probe import describe, probe
from engines.types import EngineInfo, EngineKind, EngineSpec, Role
from router.doctor.caching import judged
from router.doctor.connection import connection
from router.doctor.findings import Finding, ok, unknown, warning, wrong
from router.doctor.trial import Refused, trial
from router.prompts.book import PromptBook

TOKENIZER: Final = "give the folder or hub name of its tokenizer: tokenizer=… of the engine, or --tokenizer"


class Engine(msgspec.Struct, frozen=True):
    """One that answers."""

    info: EngineInfo
    client: EngineClient


class Examiner:
    """Looks at engines, one or several at a time."""

    def __init__(self, session: aiohttp.ClientSession, *, tokenizer: str | None, timeout_s: float) -> None:
        self._session = session
        self._prompts = PromptBook(tokenizer=tokenizer)
        self._timeout_s = timeout_s

    async def reach(self, spec: EngineSpec, *, named: bool) -> tuple[Engine | None, Finding]:
        """Whether there is an engine. `named`: somebody says that it can be reached from here."""
        client = EngineClient.of(self._session, spec, timeout_s=self._timeout_s)
        try:
            info = await probe(client, spec)
        except NotAnEngine as error:
            return None, wrong("reachable", spec.url, str(error), "is this the engine's own port?")
        except EngineError as error:
            if not named:
                return None, unknown(
                    "reachable", spec.url, f"the router knows it, and it cannot be asked from here: {error}", "run this beside the router"
                )
            return None, wrong("reachable", spec.url, str(error), "does it run, and is its port open from here?")
        return Engine(info, client), ok("reachable", info.id, describe(info).partition(" is ")[2])

    async def examine(self, engine: Engine) -> list[Finding]:
        """Everything that can be said of it alone."""
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(connection(engine.info))
            found = [await self._tokenizer(engine)]
            for rank in engine.info.ranks:
                found += await self._tried(engine, rank)
        return found + looking.result()

    async def _tokenizer(self, engine: Engine) -> Finding:
        info, client = engine.info, engine.client

        async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = await client.post_json(path, body)
            return answer if isinstance(answer, dict) else {}

        status = await self._prompts.join(info, post)
        if status.local and status.checked:
            return ok("tokenizer", info.id, status.line)
        if status.local:
            return warning("tokenizer", info.id, status.line, "let it answer /tokenize, so that prompts are known to be tokenized alike")
        return wrong("tokenizer", info.id, f"prompts cannot be tokenized as it does: {status.line}", TOKENIZER)

    async def _tried(self, engine: Engine, rank: int) -> list[Finding]:
        info = engine.info
        if info.role is not Role.AGGREGATED and info.kind is EngineKind.SGLANG:
            return []  # it answers nothing alone
        try:
            return judged(await trial(self._session, engine.client, info, rank, timeout_s=self._timeout_s))
        except (Refused, EngineError) as error:
            return [wrong("answers", info.id, str(error), "its log says why")]
