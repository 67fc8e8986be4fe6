"""What can be measured about the router? All its metric series, in one place, each bounded in number.

Labels only take values from closed lists (routes, reasons, states) or from the fleet; nothing a client sends becomes a label.
Counters and histograms are fed on the request path; gauges are read off the rooms when the page is asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from discovery.readings import Reading, Readings
from router.disagg import Split
from router.routes import INFERENCE
from router.scheduling.types import Decision, Reason
from router.tally import Count, Distribution

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

ITL_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
LENGTH_BUCKETS: Final = tuple(2**exponent for exponent in range(4, 21))
"""16 tokens to a million."""
TTFT_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
WAIT_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DURATION_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Phase(enum.StrEnum):
    """Where a request was when its client left. A closed list: metrics rely on it."""

    TOKENIZING = "tokenizing"
    QUEUED = "queued"
    UNANSWERED = "before_first_token"
    STREAMING = "streaming"


ROUTES: Final = {path: route.path for path, route in INFERENCE.items()}
REASONS: Final = {reason: reason.value for reason in Reason}


class _Tallies(Collector):
    def __init__(self, tallies: Sequence[Count | Distribution]) -> None:
        self._tallies = tallies

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for tally in self._tallies:
            yield from tally.collect()


class Metrics:
    """The router's own series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Count("router_requests", "Requests by route and status as the client saw it (499: it left).", ("route", "status"))
        self._decisions = Count("router_decisions", "Routing decisions by policy and reason.", ("policy", "reason"))
        self._retries = Count("router_retries", "Requests sent again, by what had failed.", ("failure",))
        self._broken = Count("router_broken_answers", "Answers that broke off after they had begun, by what had failed.", ("failure",))
        self._resumes = Count(
            "router_resumes", "Streams whose engine failed, by what came of it, while streams may be resumed.", ("outcome",)
        )
        self._token_ids = Count(
            "router_token_ids", "Requests sent to engines while token ids may be forwarded, by whether they were.", ("outcome",)
        )
        self._timeouts = Count("router_timeouts", "Engines that took too long, by what for.", ("stage",))
        self._timeouts.start(("connect",), ("response_head",), ("idle_stream",))
        self._admission_wait = Distribution(
            "router_admission_wait_seconds", "Time that requests waited for room which were let in after waiting.", WAIT_BUCKETS_S
        )
        self._ttft = Distribution(
            "router_time_to_first_token_seconds", "From the request's last byte to the first token of a streamed answer.", TTFT_BUCKETS_S
        )
        self._itl = Distribution(
            "router_inter_token_latency_seconds",
            "Mean time between the tokens of a streamed answer, once for each: by its usage, or by its pieces where it tells none.",
            ITL_BUCKETS_S,
        )
        self._duration = Distribution(
            "router_request_duration_seconds", "From the request's last byte to the answer's.", DURATION_BUCKETS_S
        )
        self._prefills = Count("router_prefills", "Prompts for decode engines, by who computed them and why.", ("where", "why"))
        self._transfers = Count("router_kv_transfers", "Handovers of a prompt's KV cache, by what became of them.", ("outcome",))
        self._transfers.start(("done",), ("failed",), ("stranded",))
        self._transfer_bytes = Count("router_kv_transfer_bytes", "KV cache handed over, by the model's size of a token.")
        self._transfer_s = Distribution(
            "router_kv_transfer_seconds", "From asking the decode engine to its first token, of prompts computed elsewhere.", TTFT_BUCKETS_S
        )
        self._remote_s = Count(
            "router_remote_prefill_seconds",
            "Time to first token of prompts computed elsewhere, as `--disagg measured` had expected it and as it was, over the same requests.",
            ("kind",),
        )
        self._remote_s.start(("estimated",), ("actual",))
        self._prompt_tokens = Count("router_prompt_tokens", "Prompt tokens of requests whose prompts were read.")
        self._overlap_tokens = Count("router_overlap_tokens", "Prompt tokens believed cached on the engine chosen.")
        self._cached_tokens = Count("router_engine_cached_tokens", "Prompt tokens from cache, as engines report them in usage.")
        self._regret_tokens = Count(
            "router_overlap_regret_tokens",
            "Prompt tokens cached on the best engine that could be chosen and not on the one chosen, for its load.",
        )
        self._input = Distribution("router_input_tokens", "Lengths of prompts that were read.", LENGTH_BUCKETS)
        self._output = Distribution("router_output_tokens", "Lengths of answers, where usage tells.", LENGTH_BUCKETS)
        self._cancelled = Count("router_cancellations", "Requests whose clients left, by how far they were.", ("phase",))
        self._cancelled.start(*((phase.value,) for phase in Phase))
        self.tallies = tuple(tally for tally in vars(self).values() if isinstance(tally, Count | Distribution))
        self.registry.register(_Tallies(self.tallies))

    def read_from(self, read: Callable[[], Iterable[Reading]]) -> None:
        """Add families whose values are read when the page is asked for."""
        self.registry.register(Readings(read))

    def decided(self, decision: Decision) -> None:
        """Count a decision that was acted on."""
        self._decisions.add((decision.policy, REASONS[decision.reason]))

    def prefilled(self, split: Split) -> None:
        """Count where a decode engine's prompt was computed."""
        self._prefills.add(("remote" if split.remote else "local", split.why.value))

    def transferred(self, count: int) -> None:
        """A prompt's KV cache, of `count` bytes, has been handed over."""
        self._transfers.add(("done",))
        self._transfer_bytes.add(amount=count)

    def transfer_took(self, seconds: float) -> None:
        """So long after a decode engine was asked for it, a stream has its first token."""
        self._transfer_s.add(seconds)

    def remote_prefill_took(self, seconds: float, estimated_s: float) -> None:
        """From asking the prefill engine to the first token on the other, and what that had been expected to take."""
        self._remote_s.add(("estimated",), estimated_s)
        self._remote_s.add(("actual",), seconds)

    def transfer_failed(self) -> None:
        """One has not arrived."""
        self._transfers.add(("failed",))

    @property
    def transfers(self) -> dict[str, int]:
        """Handovers of KV so far, by outcome."""
        return {outcome: int(count) for (outcome,), count in self._transfers.values.items()}

    def stranded(self) -> None:
        """A prompt has been computed, and nobody fetches it: the prefill engine keeps it until its lease ends."""
        self._transfers.add(("stranded",))

    def retried(self, failure: str) -> None:
        """Count a further try."""
        self._retries.add((failure,))

    def timed_out(self, stage: str) -> None:
        """Count an engine that took too long, by what for."""
        self._timeouts.add((stage.replace(" ", "_"),))

    def waited(self, seconds: float) -> None:
        """A request that had to wait for room has been let in."""
        self._admission_wait.add(seconds)

    def broke_off(self, failure: str) -> None:
        """Count an answer whose client had to be told that it is not whole."""
        self._broken.add((failure,))

    def resumed(self, outcome: str) -> None:
        """Count a stream whose engine failed, by what came of it."""
        self._resumes.add((outcome,))

    def sent_ids(self, outcome: str) -> None:
        """Count a request sent to an engine, by what became of its ids."""
        self._token_ids.add((outcome,))

    def first_token(self, seconds: float) -> None:
        """A streamed answer has begun."""
        self._ttft.add(seconds)

    def ended(self, route: bytes, status: int, seconds: float) -> None:
        """A request is over."""
        self._requests.add((ROUTES.get(route, "other"), str(status)))
        self._duration.add(seconds)

    def prompt(self, tokens: int, overlap: int, regret: int) -> None:
        """A prompt was sent to an engine that is believed to have `overlap` of its tokens, `regret` fewer than another one that was eligible."""
        if tokens:
            self._prompt_tokens.add(amount=tokens)
            self._overlap_tokens.add(amount=overlap)
            self._input.add(tokens)
            if regret:
                self._regret_tokens.add(amount=regret)

    def cached(self, tokens: int) -> None:
        """What the engine says it had."""
        self._cached_tokens.add(amount=tokens)

    def generated(self, tokens: int) -> None:
        """How long an answer was."""
        self._output.add(tokens)

    def streamed(self, seconds: float, gaps: int) -> None:
        """From a stream's first token to its end, `gaps` others having followed."""
        if gaps > 0:
            self._itl.add(seconds / gaps)

    def cancelled(self, phase: Phase) -> None:
        """A client has left."""
        self._cancelled.add((phase.value,))

    def page(self) -> bytes:
        """The metrics page."""
        return generate_latest(self.registry)
