"""Plain counters come out on the page as prometheus-client's own would."""

from __future__ import annotations

import doctest

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router import tally
from router.tally import Count, Distribution


class Page(Collector):
    def __init__(self, *tallies: Count | Distribution) -> None:
        self._tallies = tallies

    def collect(self) -> list[Metric]:
        return [metric for each in self._tallies for metric in each.collect()]


def page(*tallies: Count | Distribution) -> list[str]:
    registry = CollectorRegistry()
    registry.register(Page(*tallies))
    return generate_latest(registry).decode().splitlines()


def theirs(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_the_examples_in_the_texts_are_true() -> None:
    results = doctest.testmod(tally)
    assert (results.attempted > 0, results.failed) == (True, 0)


def test_a_count_looks_like_a_counter() -> None:
    registry = CollectorRegistry()
    counter = Counter("router_retries", "Again.", ("failure", "stage"), registry=registry)
    count = Count("router_retries", "Again.", ("failure", "stage"))
    for labels, amount in ((("a", "x"), 1), (('odd "name"\n', "y"), 2.5), (("a", "x"), 3)):
        counter.labels(*labels).inc(amount)
        count.add(labels, amount)
    assert page(count) == theirs(registry)


def test_a_count_without_labels_is_there_from_the_start_and_one_with_labels_when_started() -> None:
    assert "plain_total 0.0" in page(Count("plain", "p"))
    labelled = Count("labelled", "l", ("stage",))
    assert not [line for line in page(labelled) if not line.startswith("#")]
    labelled.start(("connect",))
    assert 'labelled_total{stage="connect"} 0.0' in page(labelled)


def test_a_distribution_looks_like_a_histogram() -> None:
    bounds = (0.001, 0.5, 1, 20)
    registry = CollectorRegistry()
    histogram = Histogram("router_wait_seconds", "Waiting.", buckets=bounds, registry=registry)
    distribution = Distribution("router_wait_seconds", "Waiting.", bounds)
    for value in (0.0, 0.001, 0.25, 0.5, 1.5, 20.0, 21.0):
        histogram.observe(value)
        distribution.add(value)
    assert page(distribution) == theirs(registry)
