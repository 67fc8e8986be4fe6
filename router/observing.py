"""What do planners hear of this router? What clients ask for and see, counted as requests come and go, and told on the bus each second.

A few additions a request, none a chunk. What is told are counts since the router began (`discovery.observations`), so nothing is lost with
a message. A planner tells in turn for which models it will start an engine where there is none; requests for those wait (`holding`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from discovery.observations import OBSERVE_S, EngineReport, PlanMessage, RouterReport, TrafficReport
from discovery.subjects import Subjects

if TYPE_CHECKING:
    from discovery.bus import Bus
    from router.census import Census
    from router.fleet import Fleet, Member
    from router.gate import Gate
    from router.holding import Holding
    from router.load import LoadBook
    from router.ui.plans import Plans

MS: Final = 1e3
MAX_MODELS: Final = 1000
"""Counted apart; models are those that engines serve, so this many mean that something else is wrong."""

_encode = msgspec.msgpack.Encoder().encode
_plans: msgspec.msgpack.Decoder[PlanMessage] = msgspec.msgpack.Decoder(PlanMessage)


class Observed:
    """Counts, by model. Plain calls from the request path; `models` is read by whoever tells."""

    __slots__ = ("models",)

    def __init__(self) -> None:
        self.models: dict[str, TrafficReport] = {}

    def arrived(self, model: str, prompt_tokens: int) -> None:
        """A request has been read. Runtime complexity: O(1)."""
        traffic = self._of(model)
        traffic.arrived += 1
        if prompt_tokens:
            traffic.isl.add(prompt_tokens)

    def admitted(self, model: str, waited_s: float) -> None:
        """It has been sent to an engine for the first time."""
        self._of(model).wait_ms.add(waited_s * MS)

    def shed(self, model: str) -> None:
        """It has been turned away."""
        self._of(model).shed += 1

    def first_token(self, model: str, seconds: float) -> None:
        """A streamed answer has begun, so long after the request."""
        self._of(model).ttft_ms.add(seconds * MS)

    def finished(self, model: str, tokens: int, stream_s: float | None) -> None:
        """The client has the whole answer. `tokens` 0: the engine did not tell; `stream_s`: from first token to last, where it was streamed."""
        traffic = self._of(model)
        traffic.finished += 1
        if tokens:
            traffic.osl.add(tokens)
            if stream_s is not None and tokens > 1:
                traffic.itl_ms.add(stream_s * MS / (tokens - 1))

    def prompt(self, model: str, tokens: int, overlap: int) -> None:
        """Its engine is believed to have had so many of its tokens."""
        traffic = self._of(model)
        traffic.prompt_tokens += tokens
        traffic.overlap_tokens += overlap

    def _of(self, model: str) -> TrafficReport:
        traffic = self.models.get(model)
        if traffic is None:
            traffic = TrafficReport(model)
            if len(self.models) < MAX_MODELS:
                self.models[model] = traffic
        return traffic


class Told(NamedTuple):
    """The rooms that have something to tell."""

    observed: Observed
    holding: Holding
    fleet: Fleet
    census: Census
    load: LoadBook
    gate: Gate


class Observing:
    """Tells, and hears of plans."""

    def __init__(self, bus: Bus, namespace: str, router: str, told: Told, plans: Plans, *, clock: Callable[[], float]) -> None:
        self.rejected = 0
        """Messages that could not be read."""
        self._bus = bus
        self._subjects = Subjects(namespace)
        self._router = router
        self._plans = plans
        self._observed, self._holding, self._fleet, self._census, self._load, self._gate = told
        self._clock = clock
        self._began = clock()

    async def run(self) -> None:
        """Ends only by cancellation."""
        subscription = self._bus.subscribe(self._subjects.plans, self._on_plan)
        try:
            while True:
                await asyncio.sleep(OBSERVE_S)
                if self._bus.connected:
                    self._bus.publish(self._subjects.observations, _encode(self.report()))
        finally:
            subscription.cancel()

    def report(self) -> RouterReport:
        """All that there is to tell now."""
        waiting = dict(self._gate.waiting())
        for model, held in self._holding.waiting():
            waiting[model] = waiting.get(model, 0) + held
        for model, traffic in self._observed.models.items():
            traffic.waiting = waiting.get(model, 0)
        # A model that everybody waits for and nobody has asked for before is told of too.
        fresh = [TrafficReport(model, waiting=count) for model, count in waiting.items() if count and model not in self._observed.models]
        engines = tuple(map(self._engine, self._fleet.members.values()))
        return RouterReport(self._router, self._clock() - self._began, (*self._observed.models.values(), *fresh), engines)

    def _engine(self, member: Member) -> EngineReport:
        info, now = member.info, self._clock()
        loads = [self._load.load(endpoint, now) for endpoint in member.endpoints]
        own = [self._load.own(endpoint) for endpoint in member.endpoints]
        running = [load.running for load in loads if load.running is not None]
        waiting = [load.waiting for load in loads if load.waiting is not None]
        usages = [load.kv_usage for load in loads if load.kv_usage is not None]
        return EngineReport(
            engine=info.id,
            role=info.role,
            state=self._census.state(info.id),
            models=tuple(model.id for model in info.models),
            in_flight=sum(carried.requests for carried in own),
            prefill_tokens=sum(carried.prefill_tokens for carried in own),
            running=sum(running) if running else None,
            waiting=sum(waiting) if waiting else None,
            kv_usage=max(usages, default=None),
            context=max((model.max_model_len for model in info.models if model.max_model_len), default=None),
        )

    def _on_plan(self, subject: str, payload: bytes, reply: str) -> None:
        del subject, reply
        try:
            plan = _plans.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.rejected += 1
            return
        now = self._clock()
        self._holding.expect(plan.model, plan.comes_within_s, now)
        self._plans.heard(plan, now)
