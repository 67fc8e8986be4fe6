"""Which engines announce themselves on the bus? Whoever starts an engine, or stands beside it, says that it is there, every second.

    Announcer ──▶ <namespace>.engines: Announced(spec, lease_s)  every second     Withdrawn(url)  once, and made good by the lease
    AnnouncedSource: a lease that is not renewed ends, by our own clock

Keys never pass over the bus: a router gives its own to engines that are announced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from discovery.sources.found import Found, SourceFailed, Tell
from discovery.subjects import Subjects
from engines.types import EngineSpec
from engines.urls import normalise

if TYPE_CHECKING:
    from discovery.bus import Bus

PERIOD_S: Final = 1.0
LEASE_S: Final = 5.0
MAX_LEASE_S: Final = 3600.0
MAX_ENGINES: Final = 10_000
FIRST_S: Final = 1.5
"""After so long, who is there has been heard."""


class Announced(msgspec.Struct, frozen=True, array_like=True, tag="engine"):
    """An engine is there, for so long."""

    spec: EngineSpec
    lease_s: float


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """An engine is there no more."""

    url: str


Announcement = Announced | Withdrawn
_encode = msgspec.msgpack.Encoder().encode
_announcements: msgspec.msgpack.Decoder[Announcement] = msgspec.msgpack.Decoder(Announcement)


class Announcer:
    """Says of engines that they are there, from `announce` to `withdraw`."""

    def __init__(self, bus: Bus, namespace: str) -> None:
        self._bus = bus
        self._subject = Subjects(namespace).engines
        self._specs: dict[str, EngineSpec] = {}

    def announce(self, spec: EngineSpec) -> None:
        """It is there from now on, by these words; its key is left out. Raises ValueError for a URL that is none."""
        spec = msgspec.structs.replace(spec, url=normalise(spec.url), api_key=None)
        self._specs[spec.url] = spec
        self._say(Announced(spec, LEASE_S))

    def withdraw(self, url: str) -> None:
        """It is there no more: routers send it nothing new, and let what it has end. Idempotent."""
        if self._specs.pop(normalise(url), None) is not None:
            self._say(Withdrawn(normalise(url)))

    async def run(self) -> None:
        """Say it again and again, until cancelled; then, that they are gone."""
        try:
            while True:
                for spec in self._specs.values():
                    self._say(Announced(spec, LEASE_S))
                await asyncio.sleep(PERIOD_S)
        finally:
            for url in list(self._specs):
                self.withdraw(url)

    def _say(self, message: Announcement) -> None:
        if self._bus.connected:
            self._bus.publish(self._subject, _encode(message))


class AnnouncedSource:
    """What is announced in one namespace."""

    name = "announced"

    def __init__(self, bus: Bus, namespace: str, *, api_key: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.rejected = 0
        """Messages that could not be read, or named what can be no engine."""
        self._bus = bus
        self._subject = Subjects(namespace).engines
        self._api_key = api_key
        self._clock = clock
        self._known: dict[str, tuple[EngineSpec, float]] = {}
        self._changed = asyncio.Event()

    async def run(self, tell: Tell) -> None:
        """See `Source`. While the bus is away nobody is let go: nobody could have been heard."""
        subscription = self._bus.subscribe(self._subject, self._on_message)
        try:
            await self._pause(FIRST_S)
            while True:
                if not self._bus.connected:
                    self._hold()
                    raise SourceFailed("the bus is not connected")
                self._expire()
                tell(Found(tuple(spec for spec, _ in self._known.values())))
                self._changed.clear()
                await self._pause(PERIOD_S)
        finally:
            subscription.cancel()

    def _on_message(self, subject: str, payload: bytes, reply: str) -> None:
        del subject, reply
        try:
            self._take(_announcements.decode(payload))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.rejected += 1

    def _take(self, message: Announcement) -> None:
        match message:
            case Withdrawn():
                if self._known.pop(normalise(message.url), None) is not None:
                    self._changed.set()
            case Announced():
                spec = msgspec.structs.replace(message.spec, url=normalise(message.spec.url), api_key=self._api_key)
                if not 0 < message.lease_s <= MAX_LEASE_S or (spec.url not in self._known and len(self._known) >= MAX_ENGINES):
                    raise ValueError(message)
                known = self._known.get(spec.url)
                if known is None or known[0] != spec:
                    self._changed.set()
                self._known[spec.url] = (spec, self._clock() + message.lease_s)

    def _expire(self) -> None:
        now = self._clock()
        self._known = {url: known for url, known in self._known.items() if known[1] > now}

    def _hold(self) -> None:
        """Nobody's lease ends for what could not be heard: each has one more from now."""
        until = self._clock() + LEASE_S
        self._known = {url: (spec, max(deadline, until)) for url, (spec, deadline) in self._known.items()}

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
