"""What does the event path say of itself when a metrics page is asked for? Gauges and counters read off, none kept.

A page shows the `relay_*` families wherever engines are followed: in a router, and in a process that only relays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from discovery.bus import Bus
    from discovery.relay import Relay

ENDPOINT: Final = ("engine", "rank")

Reading = tuple[str, str, tuple[str, ...], Sequence[tuple[tuple[str, ...], float]]]
"""Name, help, label names, and (label values, value) pairs: one family read off a room. A name that ends in `_total` is a counter."""

_BY_ENDPOINT: Final = (
    ("relay_batches_total", "KV event batches read from engines.", "batches"),
    ("relay_connects_total", "Connections to engines' publishers.", "connects"),
    ("relay_gaps_total", "Times that a batch was not the next.", "gaps"),
    ("relay_replays_total", "Questions to engines' replay sockets.", "replays"),
    ("relay_replays_unanswered_total", "Of them, those that were not answered, or not to the end.", "unanswered"),
    ("relay_replayed_batches_total", "Batches that came from a replay.", "replayed"),
    ("relay_blocks_stored_total", "Blocks stored, by KV events.", "stored"),
    ("relay_blocks_removed_total", "Blocks removed, by KV events.", "removed"),
    ("relay_restarts_total", "New lives of an engine's cache.", "restarts"),
    ("relay_losses_total", "Times that batches could not be had again.", "losses"),
    ("relay_lost_batches_total", "Batches that could not be had again.", "lost"),
    ("relay_crashes_total", "Times that following an engine failed in a way nobody foresaw; the log says how.", "crashes"),
    ("relay_orphans_total", "Blocks stored under a parent not known.", "orphans"),
    ("relay_blocks", "Blocks held, by KV events.", "blocks"),
    ("relay_event_lag_seconds", "From the latest batch's being made to its being read, by the clocks of both.", "lag_s"),
)
_BY_KIND: Final = (
    ("relay_undecodable_total", "Event messages that could not be read, by kind.", "undecodable"),
    ("relay_skipped_total", "Events tolerated and not used, by reason.", "skipped"),
)


class Readings(Collector):
    """A part of a page: whatever `read` gives."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on what engines there are."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every family, as it stands now."""
        for name, text, labels, values in self._read():
            family: CounterMetricFamily | GaugeMetricFamily
            if name.endswith("_total"):
                family = CounterMetricFamily(name, text, labels=labels)
            else:
                family = GaugeMetricFamily(name, text, labels=labels)
            for label_values, value in values:
                family.add_metric(label_values, value)
            yield family


def of_relay(relay: Relay) -> Iterator[Reading]:
    """What came from engines, per endpoint that is followed now."""
    feeds = {(endpoint.engine, str(endpoint.rank)): counts for endpoint, counts in relay.stats().items()}
    for name, text, field in _BY_ENDPOINT:
        yield name, text, ENDPOINT, [(label, float(getattr(counts, field))) for label, counts in feeds.items()]
    for name, text, field in _BY_KIND:
        values = [((*label, str(kind)), float(count)) for label, counts in feeds.items() for kind, count in getattr(counts, field).items()]
        yield name, text, (*ENDPOINT, "kind"), values
    yield "relay_rejected_requests_total", "Requests for a snapshot that could not be read or were too many.", (), [((), relay.rejected)]


def of_bus(bus: Bus, prefix: str) -> Iterator[Reading]:
    """How the connection to NATS is, under the name of who has it."""
    yield f"{prefix}_bus_connected", "Whether the event bus is connected.", (), [((), float(bus.connected))]
    yield f"{prefix}_bus_reconnects_total", "Times the bus was connected again.", (), [((), float(bus.counts.reconnects))]
    dropped = float(bus.counts.unsent + bus.counts.overflowed)
    yield f"{prefix}_bus_dropped_total", "Bus messages dropped; each is found and mended by a resync.", (), [((), dropped)]
