"""Is one engine there? A loop without memory of how it got where it is (level-triggered).

    ┌─▶ not joined: probe, 0.25 s, 0.5 s, … one period apart, until an engine answers ──▶ joined ─┐
    │                                                                                             │
    └── left ◀── refused a connection, or failed two checks in a row, or another process answers ◀─┘

Slow is not gone: a check that times out does not count while the engine is streaming to clients.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from typing import Protocol

import aiohttp
import msgspec

from discovery.logs import event
from discovery.registry import Changed, Joined, Registry
from engines.client import EngineClient
from engines.errors import EngineError, EngineTimeout, EngineUnreachable
from engines.load_feed import LoadFeed
from engines.metrics import EngineLoad
from engines.probe import alive, describe, look, probe
from engines.types import EngineInfo, EngineSpec

FIRST_DELAY_S = 0.25
FAILURES_TO_LEAVE = 2
MIN_APART_S = 0.1
"""However many requests suspect an engine, its checks start at least so far apart."""
_MAX_REASONS = 16

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Told what happens to engines; answers at once (all methods are plain functions)."""

    def joined(self, info: EngineInfo) -> None:
        """The engine serves. Its cache is unknown: whatever was known of an earlier life has been told as `left`."""

    def changed(self, info: EngineInfo) -> None:
        """The engine's models changed (adapters were loaded or unloaded); the process and its cache are the same."""

    def left(self, info: EngineInfo, reason: str) -> None:
        """The engine gets no new work and its cache is to be forgotten. Streams in flight on it may still end well."""

    def load(self, engine_id: str, load: dict[int, EngineLoad], *, answered: bool = True) -> None:
        """What ranks reported just now; fields they did not report are None.

        `answered`: the engine has answered questions, for all of its ranks. Else it pushed this by itself, which does not say that it
        serves.
        """

    def busy(self, engine_id: str) -> bool:
        """Whether bytes from this engine are reaching clients now."""


class WatchTimes(msgspec.Struct, frozen=True):
    """How often and how long to ask. An engine that is gone has left within two periods if the time-out is at most half of one."""

    probe_period_s: float = 2.0
    probe_timeout_s: float = 1.0


class Watch:
    """Follows the engine that `spec` names, until cancelled."""

    def __init__(
        self,
        spec: EngineSpec,
        registry: Registry,
        session: aiohttp.ClientSession,
        listener: Listener,
        times: WatchTimes,
    ) -> None:
        self.spec = spec
        self.waiting_for = ""
        """Why it has not joined, as of the last probe."""
        self._registry = registry
        self._client = EngineClient.of(session, spec, timeout_s=times.probe_timeout_s)
        self._listener = listener
        self._times = times
        self._suspected = asyncio.Event()
        self._failures = 0
        self._feed = LoadFeed((), self._pushed, clock=time.monotonic)
        self._read = self._malformed = 0
        """Load reports in earlier lives of the engine."""

    @property
    def load_reports(self) -> tuple[int, int]:
        """How many load reports the engine has pushed, and how many messages that were none."""
        return self._read + self._feed.reports, self._malformed + self._feed.malformed

    def suspect(self) -> None:
        """Check (or probe) now instead of at the end of the period."""
        self._suspected.set()

    async def run(self) -> None:
        """Join, stay, leave, and again."""
        loop = asyncio.get_running_loop()
        while True:
            await self._join()
            joined = loop.time()
            self.leave(await self._stay_and_hear())
            if loop.time() - joined < self._times.probe_period_s:
                # Two processes taking turns at one URL would have us probe without a pause.
                await self._pause(self._times.probe_period_s)

    def leave(self, reason: str) -> None:
        """The engine is no member any more, if it was one."""
        left = self._registry.leave(self._client.url, reason)
        if left is not None:
            event(_log, logging.WARNING, "engine left", engine=left.info.id, reason=reason)
            self._listener.left(left.info, reason)

    async def _join(self) -> None:
        delay, said = FIRST_DELAY_S, set[str]()
        while True:
            self._suspected.clear()
            try:
                info = await probe(self._client, self.spec)
            except EngineError as error:
                self.waiting_for = str(error)
                self._say_waiting(str(error), said)
            else:
                self.waiting_for = ""
                self._announce(info)
                return
            await self._pause(min(delay, self._times.probe_period_s))
            delay *= 2

    async def _stay_and_hear(self) -> str:
        """Returns the reason to leave; until then, load that the engine pushes is passed on."""
        self._read, self._malformed = self.load_reports
        self._feed = LoadFeed(self._info().load_sources, self._pushed, clock=time.monotonic)
        async with asyncio.TaskGroup() as group:
            hearing = group.create_task(self._feed.run(), name=f"load of {self._client.url}")
            reason = await self._stay()
            hearing.cancel()
        return reason

    def _pushed(self, rank: int, load: EngineLoad) -> None:
        self._listener.load(self._client.url, {rank: load}, answered=False)

    async def _stay(self) -> str:
        """Returns the reason to leave."""
        loop = asyncio.get_running_loop()
        self._failures, started = 0, loop.time()
        reason = await self._refresh()
        while reason is None:
            # Counted from the start of the last check, and half a period after a failure: two failures in a row then end within two
            # periods of the last success, however long each took to fail.
            wait_s = self._times.probe_period_s / (2 if self._failures else 1)
            await asyncio.sleep(started + min(wait_s, MIN_APART_S) - loop.time())
            await self._pause(started + wait_s - loop.time())
            self._suspected.clear()
            started = loop.time()
            reason = await self._check()
        return reason

    async def _check(self) -> str | None:
        info = self._info()
        try:
            failure = None if await alive(self._client, info) else "it says that it does not serve"
        except EngineUnreachable as error:
            if error.number == errno.ECONNREFUSED:
                return str(error)
            failure = str(error)
            if error.ours:
                event(_log, logging.ERROR, "engine could not be checked", engine=info.id, reason=str(error))
                return None
        except EngineTimeout as error:
            if self._listener.busy(info.id):
                return None
            failure = str(error)
        except EngineError as error:
            failure = str(error)
        if failure is None:
            self._failures = 0
            return await self._refresh()
        self._failures += 1
        event(_log, logging.WARNING, "engine failed a check", engine=info.id, reason=failure, failures=self._failures)
        return failure if self._failures >= FAILURES_TO_LEAVE else None

    async def _refresh(self) -> str | None:
        """Takes in what may have changed; the reason to leave when it is not the same process any more."""
        info = self._info()
        try:
            seen = await look(self._client, info, known=self._feed.latest())
        except EngineError as error:
            if isinstance(error, EngineUnreachable) and error.number == errno.ECONNREFUSED:
                return str(error)
            self._listener.load(info.id, dict.fromkeys(info.ranks, EngineLoad()))
            return None
        if not Changed(info, seen.info).same_life:
            if info.boot != seen.info.boot:
                return "it was restarted"
            return "it serves another model" if info.role is seen.info.role else f"its role is {seen.info.role} now"
        self._announce(seen.info)
        self._listener.load(info.id, {rank: seen.load.get(rank, EngineLoad()) for rank in info.ranks})
        return None

    def _announce(self, info: EngineInfo) -> None:
        match self._registry.announce(info, asyncio.get_running_loop().time()):
            case Joined():
                event(_log, logging.INFO, "engine joined", engine=info.id, found=describe(info))
                self._listener.joined(info)
            case Changed(old, new) as change if change.same_life:
                event(_log, logging.INFO, "engine's models changed", engine=info.id, models=[model.id for model in new.models])
                self._listener.changed(info)
            case Changed(old, _):
                self._listener.left(old, "announced anew")
                self._listener.joined(info)
            case None:
                pass

    def _info(self) -> EngineInfo:
        info = self._registry.get(self._client.url)
        if info is None:
            raise LookupError(f"{self._client.url} was removed from the registry behind its watch")
        return info

    def _say_waiting(self, reason: str, said: set[str]) -> None:
        """One line per distinct reason; bounded, since a reason quotes what a stranger answered."""
        if reason not in said and len(said) < _MAX_REASONS:
            said.add(reason)
            event(_log, logging.WARNING, "waiting for engine", engine=self._client.url, reason=reason)

    async def _pause(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._suspected.wait()
        except TimeoutError:
            pass
