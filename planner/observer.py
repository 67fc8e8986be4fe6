"""Where does a planner look? At what routers publish on the bus; or at a Prometheus server (`planner.prometheus`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from discovery.observations import BOUNDS, RouterReport, TrafficReport
from discovery.subjects import Subjects
from planner.sightings import Look, Sightings

if TYPE_CHECKING:
    from discovery.bus import Bus, Subscription

_reports: msgspec.msgpack.Decoder[RouterReport] = msgspec.msgpack.Decoder(RouterReport)


class Observer(Protocol):
    """Whoever can tell what clients ask for and see."""

    async def look(self) -> Look:
        """What has happened since the last look, and what is. Never raises: what cannot be had is None."""
        ...


class BusObserver:
    """Listens to routers. `start` before the first look."""

    def __init__(self, bus: Bus, namespace: str, model: str | None, *, clock: Callable[[], float]) -> None:
        self.rejected = 0
        """Messages that could not be read."""
        self.sightings = Sightings(model)
        self._bus = bus
        self._subject = Subjects(namespace).observations
        self._clock = clock
        self._subscription: Subscription | None = None

    def start(self) -> None:
        """Listen from now on."""
        self._subscription = self._bus.subscribe(self._subject, self._on_report)

    def stop(self) -> None:
        """Listen no more. Idempotent."""
        if self._subscription is not None:
            self._subscription.cancel()
            self._subscription = None

    async def look(self) -> Look:
        """See `Observer`."""
        return self.sightings.look(self._clock())

    def _on_report(self, subject: str, payload: bytes, reply: str) -> None:
        del subject, reply
        try:
            report = _reports.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.rejected += 1
            return
        if all(_sound(traffic) for traffic in report.traffic):
            self.sightings.hear(report, self._clock())
        else:
            self.rejected += 1


def _sound(traffic: TrafficReport) -> bool:
    """Histograms have the buckets that are counted in here."""
    found = (traffic.isl, traffic.osl, traffic.ttft_ms, traffic.itl_ms, traffic.wait_ms)
    return all(len(histogram.counts) == len(BOUNDS) + 1 for histogram in found)
