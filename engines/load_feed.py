"""How loaded is an engine, told at once instead of when it is asked? SGLang's feed of load reports, a PUB socket for each rank.

    topic "load" | number, 8 bytes | msgpack ["LoadStat", running, waiting, tokens in use, tokens in all, rank, …]

A change is sent when it happens, and what has not changed every second. Each report replaces the one before, so nothing is ever asked
again; where nothing has come for a while, the engine is to be asked instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from engines.metrics import EngineLoad, read_load_stat
from engines.subscription import BadAddress, subscribed
from engines.types import KvSource

HEARTBEATS_MISSED_S = 3.0
"""A rank that has said nothing for so long is not heard any more."""
_SHORTEST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0
_FRAMES = 3

_LOG = logging.getLogger(__name__)


class LoadFeed:
    """Hears one engine's ranks."""

    def __init__(self, sources: Sequence[KvSource], tell: Callable[[int, EngineLoad], None], *, clock: Callable[[], float]) -> None:
        """`tell` is called with a rank and its report as it comes; it must not block. `clock`: seconds that only go forward."""
        self.reports = 0
        """That were read."""
        self.malformed = 0
        """Messages that were no report, and were passed over."""
        self._sources = sources
        self._tell = tell
        self._clock = clock
        self._latest: dict[int, tuple[EngineLoad, float]] = {}

    def latest(self) -> dict[int, EngineLoad] | None:
        """The last report of every rank; None unless all have been heard just now."""
        since = self._clock() - HEARTBEATS_MISSED_S
        fresh = {rank: load for rank, (load, at) in self._latest.items() if at >= since}
        return fresh if self._sources and len(fresh) == len(self._sources) else None

    async def run(self) -> None:
        """Never returns, unless there is nothing to listen to; cancellation closes every connection."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._follow(source), name=f"load of rank {source.rank}")

    def take(self, rank: int, messages: list[list[bytes]]) -> None:
        """What has come from one rank: of several reports the last one counts."""
        latest = None
        for frames in messages:
            load = read_load_stat(frames[-1]) if len(frames) == _FRAMES else None
            if load is None:
                self.malformed += 1
            else:
                self.reports += 1
                latest = load
        if latest is not None:
            self._latest[rank] = (latest, self._clock())
            self._tell(rank, latest)

    async def _follow(self, source: KvSource) -> None:
        pause_s, complained = _SHORTEST_PAUSE_S, False
        while True:
            line = _Line(self, source.rank)
            try:
                async with subscribed(source, line) as subscription:
                    await line.over.wait()
                if subscription.wrong and not complained:
                    complained = True
                    fields = {"load": source.events, "reason": subscription.wrong}
                    _LOG.warning("what is at the load report address is no ZMQ publisher", extra={"fields": fields})
            except (BadAddress, OSError, TimeoutError):
                pass  # the engine is asked meanwhile, and says more clearly what is wrong
            pause_s = _SHORTEST_PAUSE_S if line.connected else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)


class _Line:
    """One connection's reader (`engines.subscription.Reader`)."""

    def __init__(self, feed: LoadFeed, rank: int) -> None:
        self.connected = False
        self.over = asyncio.Event()
        self._feed = feed
        self._rank = rank

    def joined(self) -> None:
        self.connected = True

    def messages(self, messages: list[list[bytes]]) -> bool:
        self._feed.take(self._rank, messages)
        return True

    def ended(self) -> None:
        self.over.set()
