"""What can be measured about the router? All its metric series, in one place, each bounded in number.

Labels only take values from closed lists (routes, reasons, states) or from the fleet; nothing a client sends becomes a label.
Counters and histograms are fed on the request path; gauges are read off the rooms when the page is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.routes import INFERENCE
from router.scheduling.types import Decision

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
WAIT_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DURATION_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

Reading = tuple[str, str, tuple[str, ...], Sequence[tuple[tuple[str, ...], float]]]
"""Name, help, label names, and (label values, value) pairs: one family read off a room. A name that ends in `_total` is a counter."""


class _Readings(Collector):
    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, text, labels, values in self._read():
            family: CounterMetricFamily | GaugeMetricFamily
            if name.endswith("_total"):
                family = CounterMetricFamily(name, text, labels=labels)
            else:
                family = GaugeMetricFamily(name, text, labels=labels)
            for label_values, value in values:
                family.add_metric(label_values, value)
            yield family


class Metrics:
    """The router's own series."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it would double the page, and nothing reads them
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "router_requests_total",
            "Requests by route and status as the client saw it (499: it left).",
            ("route", "status"),
            registry=self.registry,
        )
        self._decisions = Counter(
            "router_decisions_total", "Routing decisions by policy and reason.", ("policy", "reason"), registry=self.registry
        )
        self._retries = Counter("router_retries_total", "Requests sent again, by what had failed.", ("failure",), registry=self.registry)
        self._broken = Counter(
            "router_broken_answers_total",
            "Answers that broke off after they had begun, by what had failed.",
            ("failure",),
            registry=self.registry,
        )
        self._timeouts = Counter("router_timeouts_total", "Engines that took too long, by what for.", ("stage",), registry=self.registry)
        for stage in ("connect", "response_head", "idle_stream"):
            self._timeouts.labels(stage)  # there from the start, so that a rate can be taken of the first one
        self._admission_wait = Histogram(
            "router_admission_wait_seconds",
            "Time that requests waited for room which were let in after waiting.",
            buckets=WAIT_BUCKETS_S,
            registry=self.registry,
        )
        self._ttft = Histogram(
            "router_time_to_first_token_seconds",
            "From the request's last byte to the first token of a streamed answer.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._duration = Histogram(
            "router_request_duration_seconds",
            "From the request's last byte to the answer's.",
            buckets=DURATION_BUCKETS_S,
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "router_prompt_tokens_total", "Prompt tokens of requests whose prompts were read.", registry=self.registry
        )
        self._overlap_tokens = Counter(
            "router_overlap_tokens_total", "Prompt tokens believed cached on the engine chosen.", registry=self.registry
        )
        self._cached_tokens = Counter(
            "router_engine_cached_tokens_total", "Prompt tokens from cache, as engines report them in usage.", registry=self.registry
        )
        self._children: dict[tuple[str, int], Counter] = {}
        self._reasons: dict[tuple[str, str], Counter] = {}

    def read_from(self, read: Callable[[], Iterable[Reading]]) -> None:
        """Add families whose values are read when the page is asked for."""
        self.registry.register(_Readings(read))

    def decided(self, decision: Decision) -> None:
        """Count a decision that was acted on."""
        key = (decision.policy, decision.reason.value)
        child = self._reasons.get(key)
        if child is None:
            child = self._reasons[key] = self._decisions.labels(*key)
        child.inc()

    def retried(self, failure: str) -> None:
        """Count a further try."""
        self._retries.labels(failure).inc()

    def timed_out(self, stage: str) -> None:
        """Count an engine that took too long, by what for."""
        self._timeouts.labels(stage.replace(" ", "_")).inc()

    def waited(self, seconds: float) -> None:
        """A request that had to wait for room has been let in."""
        self._admission_wait.observe(seconds)

    def broke_off(self, failure: str) -> None:
        """Count an answer whose client had to be told that it is not whole."""
        self._broken.labels(failure).inc()

    def first_token(self, seconds: float) -> None:
        """A streamed answer has begun."""
        self._ttft.observe(seconds)

    def ended(self, route: bytes, status: int, seconds: float) -> None:
        """A request is over."""
        key = (INFERENCE[route].path if route in INFERENCE else "other", status)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._requests.labels(key[0], str(status))
        child.inc()
        self._duration.observe(seconds)

    def prompt(self, tokens: int, overlap: int) -> None:
        """A prompt was sent to an engine that is believed to have `overlap` of its tokens."""
        self._prompt_tokens.inc(tokens)
        self._overlap_tokens.inc(overlap)

    def cached(self, tokens: int) -> None:
        """What the engine says it had."""
        self._cached_tokens.inc(tokens)

    def page(self) -> bytes:
        """The metrics page."""
        return generate_latest(self.registry)
