"""How are routers told that an engine comes or goes? Through their admin API; a scale-down drains at each of them first.

An engine that a router does not know gets nothing from it: for drains that is as good as done. A router that cannot be reached is an error,
since it may go on sending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec

from engines.types import EngineSpec

TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.2


class RouterUnreachable(Exception):
    """A router's admin API did not do what it was asked to; the message says which, and why."""


class Routers:
    """The admin APIs of all routers in front of these engines."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        token: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._headers = {"authorization": f"Bearer {token}"}
        self._clock = clock

    async def engines(self) -> list[dict[str, dict[str, Any]]]:
        """For each router, what it knows of each engine. Raises RouterUnreachable."""
        answers = await asyncio.gather(*(self._ask("GET", url, "/admin/engines") for url in self._urls))
        return [{engine["id"]: engine for engine in (answer or {}).get("engines", [])} for answer in answers]

    async def add(self, spec: EngineSpec) -> None:
        """Every router follows it. Raises RouterUnreachable."""
        body = {name.replace("-", "_"): value for name, value in msgspec.to_builtins(spec).items() if value is not None and value != ""}
        await asyncio.gather(*(self._ask("POST", url, "/admin/engines", body) for url in self._urls))

    async def drain(self, engine: str) -> None:
        """No router sends anything new there. Raises RouterUnreachable."""
        await self._each("POST", engine, "/drain")

    async def remove(self, engine: str) -> None:
        """No router follows it any more. Raises RouterUnreachable."""
        await self._each("DELETE", engine, "?now=1")

    async def in_flight(self, engine: str) -> int:
        """Requests that routers have there. Raises RouterUnreachable."""
        answers = await self._each("GET", engine, "")
        return sum(int(answer["in_flight"]) for answer in answers if answer is not None)

    async def drained(self, engine: str, within_s: float) -> bool:
        """Nothing new goes there, and what was there has ended: whether in time. Raises RouterUnreachable."""
        await self.drain(engine)
        deadline = self._clock() + within_s
        while await self.in_flight(engine):
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def serving(self, engine: str) -> bool:
        """Whether every router sends requests there. Raises RouterUnreachable."""
        answers = await self._each("GET", engine, "")
        return all(answer is not None and answer.get("state") == "serving" for answer in answers)

    async def _each(self, method: str, engine: str, rest: str) -> list[dict[str, Any] | None]:
        path = f"/admin/engines/{quote(engine, safe='')}{rest}"
        return list(await asyncio.gather(*(self._ask(method, url, path) for url in self._urls)))

    async def _ask(self, method: str, url: str, path: str, body: object = None) -> dict[str, Any] | None:
        """The answer; None where the router does not know the engine."""
        try:
            async with self._session.request(
                method,
                url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            ) as response:
                answer = await response.read()
                if (response.status == 404 and method != "POST") or (response.status == 404 and path.endswith("drain")):
                    return None
                if response.status >= 400:
                    raise RouterUnreachable(f"the router at {url} answers {response.status} to {method} {path}: {_words(answer)}")
                found = msgspec.json.decode(answer)
                return found if isinstance(found, dict) else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise RouterUnreachable(f"the router's admin API at {url}: {error or type(error).__name__}") from error


def _words(answer: bytes) -> str:
    return answer[:300].decode("utf-8", "replace")
