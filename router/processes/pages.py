"""What do all processes together measure? One page of theirs, the same through whichever process it is asked for.

Counters and histograms are sums, and never go back: what a process had counted when it ended, or when a series of it began anew, is kept.
Gauges are sums too, but for those that say the same thing in every process.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.samples import Sample as PrometheusSample

from router.processes.messages import Family, Page, Sample

MAX_KEPT: Final = 10_000
"""Series kept of processes that have ended; the longest untouched go first."""

Key = tuple[str, tuple[tuple[str, str], ...]]


class How(enum.Enum):
    """How a gauge of several processes becomes one."""

    SUM = enum.auto()
    MEAN = enum.auto()
    """1 where all say 1; between where they differ."""
    LEAST = enum.auto()
    MOST = enum.auto()


HOW: Final = {
    "router_engine_state": How.MEAN,
    "router_signal_state": How.MEAN,
    "router_model_engines": How.LEAST,
    "router_cached_blocks": How.MOST,
    "router_bus_connected": How.LEAST,
    "router_peers": How.LEAST,
    "router_build_info": How.MOST,
    "router_engine_info": How.MOST,
    "router_engine_running_requests": How.MOST,
    "router_engine_waiting_requests": How.MOST,
    "router_engine_kv_usage_ratio": How.MOST,
    "relay_event_lag_seconds": How.MOST,
    "discovery_source_up": How.LEAST,
    "discovery_source_engines": How.MOST,
    "discovery_source_faults": How.MOST,
    "process_max_fds": How.LEAST,
    "router_kv_link_bytes_per_second": How.MOST,
    "router_kv_link_slow": How.MOST,
}
"""Gauges that say the same thing in every process; all others are sums."""


def page_of(metrics: Iterable[Metric]) -> Page:
    """A process's own page, to be sent."""
    return Page([Family(metric.name, metric.documentation, metric.type, [_sample(s) for s in metric.samples]) for metric in metrics])


class Pages:
    """The latest page of each process, and what those that ended had counted.

    >>> def page(value): return Page([Family("requests", "", "counter", [("requests_total", (), value)])])
    >>> pages = Pages()
    >>> pages.take("a", page(5.0)); pages.take("b", page(7.0)); pages.gone("a"); pages.take("c", page(1.0))
    >>> [sample.value for metric in pages.collect() for sample in metric.samples]
    [13.0]
    """

    def __init__(self) -> None:
        self._pages: dict[str, Page] = {}
        self._counted: dict[str, dict[Key, float]] = {}
        self._kept: dict[Key, float] = {}
        self._families: dict[str, tuple[Family, dict[Key, None]]] = {}
        """Of what is kept: the family, and its series."""

    def take(self, process: str, page: Page) -> None:
        """This is what the process measures now. O(series)."""
        counted = {(name, labels): value for family in page.families if family.kind != "gauge" for name, labels, value in family.samples}
        before = self._pages.get(process)
        if before is not None:
            self._keep(before, {key: last for key, last in self._counted[process].items() if counted.get(key, -1.0) < last})
        self._pages[process] = page
        self._counted[process] = counted

    def gone(self, process: str) -> None:
        """The process has ended. O(series)."""
        page = self._pages.pop(process, None)
        if page is not None:
            self._keep(page, self._counted.pop(process))

    def collect(self) -> Iterator[Metric]:
        """All families, as one process would have them. O(series of all)."""
        families: dict[str, Family] = {family.name: family for page in self._pages.values() for family in page.families}
        families |= {name: family for name, (family, _) in self._families.items() if name not in families}
        values: dict[str, dict[Key, list[float]]] = {name: {} for name in families}
        for page in self._pages.values():
            for family in page.families:
                series = values[family.name]
                for name, labels, value in family.samples:
                    series.setdefault((name, labels), []).append(value)
        for name, (_, keys) in self._families.items():
            series = values[name]
            for key in keys:
                # Of an engine that no process knows any more nothing is shown, as one process does not either.
                if key in series or all(label != "engine" for label, _ in key[1]):
                    series.setdefault(key, []).append(self._kept[key])
        for name, family in families.items():
            yield self._metric(family, values[name])

    def _metric(self, family: Family, series: dict[Key, list[float]]) -> Metric:
        metric = Metric(family.name, family.text, family.kind)
        how = HOW.get(family.name, How.SUM) if family.kind == "gauge" else How.SUM
        for (name, labels), values in series.items():
            metric.add_sample(name, dict(labels), self._one(how, values))
        return metric

    def _one(self, how: How, values: list[float]) -> float:
        match how:
            case How.SUM:
                return sum(values)
            case How.MEAN:
                return sum(values) / len(self._pages)
            case How.LEAST:
                return min(values) if len(values) == len(self._pages) else 0.0
            case How.MOST:
                return max(values)

    def _keep(self, page: Page, counted: dict[Key, float]) -> None:
        for family in page.families:
            for name, labels, _ in family.samples:
                key = (name, labels)
                if key in counted:
                    self._kept[key] = self._kept.pop(key, 0.0) + counted[key]
                    self._families.setdefault(family.name, (family, {}))[1][key] = None
        while len(self._kept) > MAX_KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            for _, keys in self._families.values():
                keys.pop(oldest, None)


def _sample(sample: PrometheusSample) -> Sample:
    return sample.name, tuple(sample.labels.items()), sample.value
