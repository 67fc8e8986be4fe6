"""How is something counted on the request path? In plain numbers of one loop, for the metrics page to read.

prometheus-client's own counters take a lock and a clock for each step, since many threads may use them: with seven steps a request that
was 13 of 160 µs. Only one loop counts here, so a number in a list will do; the page is still theirs to write.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric


class Count:
    """A counter with labels; a series is there once it has been counted, or `start`ed.

    >>> retries = Count("router_retries", "Requests sent again.", ("failure",))
    >>> retries.add(("engine_closed",))
    >>> retries.add(("engine_closed",), 2)
    >>> retries.values
    {('engine_closed',): 3}
    """

    __slots__ = ("labels", "name", "text", "values")

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        """`name` without `_total`."""
        self.name = name
        self.text = text
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, labels: tuple[str, ...] = (), amount: float = 1) -> None:
        """Count. Runtime complexity: O(1)."""
        self.values[labels] = self.values.get(labels, 0) + amount

    def start(self, *series: tuple[str, ...]) -> None:
        """Show series from the start, so that a rate can be taken of the first one counted."""
        for labels in series:
            self.values.setdefault(labels, 0)

    def collect(self) -> Iterator[Metric]:
        """For the page."""
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        yield family


class Distribution:
    """A histogram.

    >>> waits = Distribution("router_wait_seconds", "Waiting.", (0.1, 1.0))
    >>> waits.add(0.1)
    >>> waits.add(7.0)
    >>> waits.counts, waits.total
    ([1, 0, 1], 7.1)
    """

    __slots__ = ("bounds", "counts", "labels", "name", "text", "total")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """`bounds` are the buckets' upper ones, in rising order; one without a bound follows them."""
        self.name = name
        self.text = text
        self.labels: tuple[str, ...] = ()
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value. Runtime complexity: O(log buckets)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def collect(self) -> Iterator[Metric]:
        """For the page."""
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self.counts), strict=True))
        yield HistogramMetricFamily(self.name, self.text, buckets=buckets, sum_value=self.total)
