"""How did it go? What every request took, and what that comes to: means and percentiles, hits, goodput, balance."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engines.virtual.engine import Pace
from engines.virtual.models import EngineModel


class Targets(msgspec.Struct, frozen=True):
    """What a client is to get, for a request to count as good."""

    ttft_s: float = 2.0
    itl_s: float = 0.05
    """On the mean of its answer."""


class Served(msgspec.Struct):
    """One request, and what became of it; times from its arrival."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    engine: int = -1
    cached_tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
    shed: str = ""
    """Why it was turned away."""
    failed: str = ""
    """What broke it off, or kept it from being served."""

    def good(self, targets: Targets) -> bool:
        """Whether it met the targets."""
        if self.ttft_s is None or self.e2e_s is None or self.ttft_s > targets.ttft_s:
            return False
        return self.output_tokens < 2 or (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) <= targets.itl_s


class Spread(msgspec.Struct, frozen=True):
    """A distribution, in seconds."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


def spread(values: Sequence[float], weights: Sequence[int] | None = None) -> Spread:
    """The spread of `values`, each counted `weights` times. A percentile is the smallest value with so many at or below it."""
    if not values:
        return Spread()
    counted = sorted(zip(values, weights or [1] * len(values), strict=True))
    total = sum(weight for _, weight in counted)
    wanted = [0.5 * total, 0.95 * total, 0.99 * total]
    found: list[float] = []
    passed = 0
    for value, weight in counted:
        passed += weight
        while len(found) < len(wanted) and passed >= wanted[len(found)]:
            found.append(value)
    return Spread(sum(value * weight for value, weight in counted) / total, *found)


class Run(msgspec.Struct, frozen=True):
    """One run: a policy, a speed and a seed."""

    workload: str
    policy: str
    speed: float
    seed: int
    engines: int
    requests: int
    ttft_s: Spread
    itl_s: Spread
    e2e_s: Spread
    hit_rate: float
    """Prompt tokens found in the engines' caches, of all."""
    goodput: float
    """Requests per second that met the targets."""
    good: float
    """Share of requests that met the targets."""
    shed: float
    """Share of requests turned away."""
    failed: float
    """Share of requests that an engine's failure ended, or that no engine could hold."""
    balance: float
    """Time that the busiest engine computed, over the mean."""
    busy: float
    """Share of the engines' time in which they computed anything."""
    engine_s: float
    """Engines' time that was paid for, starting and draining included."""
    duration_s: float
    """From the first arrival to the last token."""
    slowdown: float
    """Mean TTFT over what it would be if no prompt ever waited: 1 is an idle fleet."""


class Tally:
    """Collects one run."""

    def __init__(self) -> None:
        self.served: list[Served] = []
        self._ended_at = 0.0
        self._engines: list[tuple[float, float, float]] = []
        self._gaps: list[float] = []
        self._counts: list[int] = []

    def paced(self, pace: Pace) -> None:
        """Tokens came at a pace."""
        self._gaps.append(pace.seconds / pace.steps)
        self._counts.append(pace.steps * pace.sequences)

    def ended(self, now: float, engines: list[tuple[float, float, float]]) -> None:
        """The run is over; of each engine, when it joined and left, and how long it has computed."""
        self._ended_at, self._engines = now, engines

    def run(self, workload: str, policy: str, speed: float, seed: int, targets: Targets, model: EngineModel) -> Run:
        """What it comes to."""
        done = [served for served in self.served if served.e2e_s is not None and served.ttft_s is not None]
        begin = min((served.at_s for served in self.served), default=0.0)
        duration_s = max((served.at_s + (served.e2e_s or 0.0) for served in done), default=begin) - begin
        busy_s = [busy for _, _, busy in self._engines]
        engine_s = sum(left - joined for joined, left, _ in self._engines)
        prompts = sum(served.prompt_tokens for served in done)
        good = sum(served.good(targets) for served in done)
        count = len(self.served)
        alone = sum(model.step_s + (served.prompt_tokens - served.cached_tokens) * model.prefill_token_s for served in done)
        mean_busy = sum(busy_s) / len(busy_s) if busy_s else 0.0
        return Run(
            workload=workload,
            policy=policy,
            speed=speed,
            seed=seed,
            engines=len(busy_s),
            requests=count,
            ttft_s=spread([served.ttft_s or 0.0 for served in done]),
            itl_s=spread(self._gaps, self._counts),
            e2e_s=spread([served.e2e_s or 0.0 for served in done]),
            hit_rate=sum(served.cached_tokens for served in done) / prompts if prompts else 0.0,
            goodput=good / duration_s if duration_s else 0.0,
            good=good / count if count else 0.0,
            shed=sum(bool(served.shed) for served in self.served) / count if count else 0.0,
            failed=sum(bool(served.failed) for served in self.served) / count if count else 0.0,
            balance=max(busy_s) / mean_busy if mean_busy else 1.0,
            busy=sum(busy_s) / engine_s if engine_s else 0.0,
            engine_s=engine_s,
            duration_s=duration_s,
            slowdown=sum(served.ttft_s or 0.0 for served in done) / alone if alone else 1.0,
        )
