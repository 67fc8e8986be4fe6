"""The life of one request, from the client's last byte to the engine's.

read ──▶ admit: decide ─ reserve ──▶ send ──▶ relay … ──▶ release
▲                         │
└───── another engine ────┘  only while no byte of an answer has reached the client, and only if `retry` allows it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from discovery.logs import event
from engines import vllm
from engines.errors import EngineBroken, EngineClosed, EngineConnectTimeout, EngineError, EngineTimeout, EngineUnreachable
from router import openai, stored
from router.admission import Reason, Shed
from router.entrance import Visit
from router.metrics import REASONS, ROUTES, Phase
from router.observing import Observed
from router.pair import PairSender, Setback
from router.relay import Relay
from router.resumption import COMPLETED, Resumption
from router.retry import Answered, Attempt, End, Next, Verdict, judge
from router.routes import INFERENCE
from router.scheduling.explain import regret
from router.scheduling.scheduler import NoCandidate, PolicyError
from router.scheduling.types import Reason as Why
from router.spans import Times
from router.token_ids import Ids, Outcome, with_ids
from router.ui.recent import MAX_FAILURE_CHARS, Ended

if TYPE_CHECKING:
    from router.chooser import Choice, Chooser
    from router.entrance import Place
    from router.exchange import Exchange, Headers
    from router.forward import Line
    from router.gate import Gate
    from router.intake import Asked, Intake
    from router.load import Reservation
    from router.metrics import Metrics
    from router.prompts.book import PromptBook
    from router.scheduling.types import Decision
    from router.spans import Exporter
    from router.ui.recent import Recent

CLIENT_LEFT: Final = 499
"""What a request is logged as whose client left; never sent to anybody."""
MAX_EXPLAINED: Final = 16
"""Endpoints whose costs fit in a header; `POST /route` tells of all."""
TIMEOUT_SETTINGS: Final = {
    "connect": "connect_timeout_s",
    "response head": "response_head_timeout_s",
    "idle stream": "stream_idle_timeout_s",
}
"""The setting that each stage's time comes from."""

_LONGER_ELSEWHERE: Final = frozenset({Why.OUTWEIGHED, Why.SAMPLED})

log = logging.getLogger(__name__)


class Trip:
    """What there will be to say about a request at its end."""

    __slots__ = (
        "asked",
        "choice",
        "chosen_at",
        "failure",
        "first_token_at",
        "ids",
        "left",
        "read_at",
        "relay",
        "reservation",
        "resumption",
        "sent_at",
        "started",
        "tries",
    )

    def __init__(self, started: float) -> None:
        self.started = self.sent_at = started
        self.asked: Asked | None = None
        self.choice: Choice | None = None
        """The latest one."""
        self.reservation: Reservation | None = None
        """Its place at the engine."""
        self.relay: Relay | None = None
        self.resumption: Resumption | None = None
        """Where streams may go on on another engine."""
        self.first_token_at: float | None = None
        self.read_at: float | None = None
        """When its prompt had been read: noted where traces are told."""
        self.chosen_at: float | None = None
        self.tries = 0
        self.ids: Outcome | None = None
        """What became of the prompt's token ids in the last try, where they may be forwarded."""
        self.failure = ""
        self.left = False


class Tries:
    """What has become of one request's attempts so far."""

    __slots__ = ("_refused", "held", "repeats", "verdict", "without")

    def __init__(self, without: Iterable[str] = ()) -> None:
        self.without = set(without)
        """Engines that are not asked again."""
        self.repeats = 0
        """How often it has been sent again after an engine may have seen it."""
        self.verdict: Verdict | None = None
        """Of the latest failure."""
        self.held: Relay | None = None
        """An engine's refusal, whole: the client's answer if there will be no other."""
        self._refused: set[str] = set()

    def failed(self, engine: str, attempt: Attempt, verdict: Verdict, relay: Relay | None) -> None:
        """An attempt has failed, and others may be tried.

        An engine that is full is asked once more after its pause, if it did not say how long that must be. If it did, that is meant
        for the client.
        """
        self.verdict = verdict
        self.repeats += verdict.repeats
        if not isinstance(attempt.failure, Answered):
            self.without.add(engine)
            return
        if relay is not None and relay.error is None:
            self.held = relay
        if engine in self._refused or attempt.failure.retry_after_s is not None:
            self.without.add(engine)
        self._refused.add(engine)


class Proxy:
    """Serves inference requests."""

    def __init__(  # noqa: PLR0913  what a request's life is made of
        self,
        intake: Intake,
        chooser: Chooser,
        gate: Gate,
        lines: Mapping[str, Line],
        metrics: Metrics,
        whereabouts: stored.Whereabouts,
        *,
        pairs: PairSender,
        suspect: Callable[[str], None],
        clock: Callable[[], float],
        resumes: int = 0,
        prompts: PromptBook | None = None,
        observed: Observed | None = None,
        spans: Exporter | None = None,
        recent: Recent | None = None,
    ) -> None:
        """`suspect` is told the id of an engine that failed to answer. `resumes`: how often a stream may go on on another one.

        `prompts`: how the token ids were made that engines are to be given; None: they make their own. `spans` is told of traces, and
        `recent` of each request that ends, where somebody may look.
        """
        self._intake = intake
        self._chooser = chooser
        self._gate = gate
        self._lines = lines
        self._metrics = metrics
        self._whereabouts = whereabouts
        self._pairs = pairs
        self._suspect = suspect
        self._clock = clock
        self._resumes = resumes
        self._prompts = prompts
        self._observed = Observed() if observed is None else observed
        self._spans = spans
        self._recent = recent

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request, whatever happens, and say one line about it."""
        trip = Trip(self._clock())
        try:
            trip.asked = await self._intake.read(INFERENCE[exchange.path], _asking(exchange), exchange.headers)
            self._observed.arrived(trip.asked.request.model, trip.asked.request.prompt_tokens)
            if self._spans is not None:
                trip.read_at = self._clock()
            await self._try_engines(exchange, trip, trip.asked)
        except asyncio.CancelledError:
            trip.left = exchange.client_left
            if not trip.left:
                trip.failure = "the router stopped before the answer was whole"
            raise
        except openai.BadBody as error:
            trip.failure = error.logged
            exchange.error(error.status, str(error), error.code)
        except Shed as nowhere:  # its model's first engine did not come in time
            trip.failure = str(nowhere)
            self._give_up(exchange, nowhere, trip, Tries())
        except PolicyError as error:
            trip.failure = str(error)
            if exchange.started:
                exchange.abort()
            else:
                exchange.error(500, str(error), "policy_error")
        finally:
            self._conclude(exchange, trip)
            trip.relay = None  # it can call back to this trip: without this cycle, body and answer are freed at once

    async def _try_engines(self, exchange: Exchange, trip: Trip, asked: Asked) -> None:
        """Send to one engine after another until the client has an answer."""
        tries = Tries()
        visit = Visit(exchange.headers, exchange.client, trip.started)
        if self._resumes:
            trip.resumption = Resumption(self._resumes)
        while True:
            try:
                place = await self._gate.enter(asked, tries.without, visit)
            except (NoCandidate, Shed) as nowhere:
                trip.failure = trip.failure or str(nowhere)
                self._give_up(exchange, nowhere, trip, tries)
                return
            with place:
                trip.choice = place.choice
                setback = await self._send(exchange, trip, place, tries.repeats)
                while setback is not None and (verdict := judge(setback.attempt)).next is Next.SAME_ENGINE:
                    tries.repeats += verdict.repeats
                    self._metrics.retried(verdict.code)
                    setback = await self._send(exchange, trip, place, tries.repeats, again=True)
                if setback is None:
                    self._answered(trip, place.choice)
                    return
                choice, attempt = setback.choice, setback.attempt
                trip.failure = self._hold_against(choice, attempt, verdict)  # before the place is free for the next
            if verdict.next is Next.STOP and exchange.started:
                further = self._further(trip, choice, attempt, verdict)
                if further is None:
                    return
                asked, tries, visit.arrived = further, Tries(tries.without | {choice.endpoint.engine}), self._clock()
                continue
            if verdict.next is Next.STOP and verdict.end is End.ENGINE_ANSWER and setback.relay is not None:
                trip.relay = setback.relay
                setback.relay.give_held()
                return
            if verdict.next is Next.STOP:
                exchange.error(verdict.status, trip.failure, verdict.code)
                return
            tries.failed(choice.endpoint.engine, attempt, verdict, setback.relay)
            self._metrics.retried(verdict.code or str(verdict.status))

    async def _send(self, exchange: Exchange, trip: Trip, place: Place, repeats: int, *, again: bool = False) -> Setback | None:
        """One attempt at one engine, or at a pair; None when the client has its whole answer, else what went wrong."""
        choice, sent_at = place.choice, self._clock()

        def first_token() -> None:
            if trip.first_token_at is None:
                trip.first_token_at = self._clock()
                if trip.relay is not None and trip.relay.streamed:
                    self._observed.first_token(choice.asked.request.model, trip.first_token_at - trip.started)
            self._chooser.first_token(choice, place.reservation, sent_at, streamed=trip.relay is not None and trip.relay.streamed)

        if not trip.tries:
            trip.chosen_at = sent_at
        trip.tries += 1
        if trip.tries == 1:
            self._observed.admitted(choice.asked.request.model, sent_at - trip.started)
        trip.reservation = place.reservation
        explained = _explain_headers(choice) if exchange.header(b"x-commutator-explain") == b"1" else []
        relay, body = self._relay(exchange, trip, choice, explained, first_token)
        trip.relay, trip.sent_at = relay, sent_at
        if choice.prefill is not None:
            setback, reused = await self._pairs.send(place, relay, body, repeats), False
        else:
            setback, reused = await self._send_to_one(exchange, trip, choice, body, repeats)
        if setback is not None:
            return msgspec.structs.replace(setback, attempt=msgspec.structs.replace(setback.attempt, again=again))
        if relay.head_seen is not None and not relay.accepted:  # a refusal is one even if its body breaks off
            refused = Attempt(Answered(relay.head_seen.status, relay.head_seen.retry_after_s), repeats=repeats)
            return Setback(choice, refused, relay)
        if relay.error is not None:
            client_bytes = int(exchange.started and relay.accepted)
            return Setback(choice, Attempt(relay.error, reused=reused, client_bytes=client_bytes, repeats=repeats, again=again), relay)
        return None

    async def _send_to_one(self, exchange: Exchange, trip: Trip, choice: Choice, body: bytes, repeats: int) -> tuple[Setback | None, bool]:
        """Ask an engine, and wait for the end of its answer; what kept it from being asked, and whether the connection had been used before."""
        line, relay = self._lines.get(choice.endpoint.engine), trip.relay
        if line is None or relay is None:
            return Setback(choice, Attempt(EngineUnreachable("the engine has just left"), repeats=repeats)), False
        if choice.wants_telling and choice.asked.takes_xargs:
            body = openai.add_field(body, vllm.XARGS, vllm.TELL_AGAIN)
        if self._prompts is not None:
            body = self._with_ids(trip, choice, body, self._prompts)
        request = line.request(exchange, body, choice.endpoint.rank)
        connection = line.pool.take_idle() if repeats == 0 else None
        try:
            connection = connection or await line.pool.connect()
        except EngineUnreachable as error:
            return Setback(choice, Attempt(error, repeats=repeats)), False
        reused = connection.reused
        exchange.flow = connection
        connection.send(request, relay)
        try:
            await relay.done
        finally:
            exchange.flow = None
            if not relay.over:
                connection.abandon()
        return None, reused

    def _relay(
        self, exchange: Exchange, trip: Trip, choice: Choice, explained: Headers, first_token: Callable[[], None]
    ) -> tuple[Relay, bytes]:
        """Where the engine's answer goes, and the body it is asked with."""
        if choice.asked.route.path == stored.PATH:
            engine = choice.endpoint.engine
            noted = stored.NotingRelay(exchange, explained, first_token, lambda response_id: self._whereabouts.note(response_id, engine))
            return noted, choice.asked.body
        if trip.resumption is not None:
            return trip.resumption.send(choice, exchange, explained, first_token)
        return Relay(exchange, explained, first_token), choice.asked.body

    def _with_ids(self, trip: Trip, choice: Choice, body: bytes, prompts: PromptBook) -> bytes:
        """The body with the prompt's ids in it, where they may be; which is counted either way."""
        asked, info = choice.asked, choice.member.info
        sent = Ids(body, asked.ids_barrier) if asked.ids_barrier is not None else None
        if sent is None:
            status = prompts.status(info.id)
            sent = with_ids(body, asked.route.form, info, asked.tokens.get(info.id), checked=status is not None and status.checked)
        trip.ids = sent.outcome
        self._metrics.sent_ids(sent.outcome)
        return sent.body

    def _further(self, trip: Trip, choice: Choice, attempt: Attempt, verdict: Verdict) -> Asked | None:
        """What to ask another engine after an answer has broken off, so that it goes on; None when it has ended here."""
        error = attempt.failure if isinstance(attempt.failure, EngineError) else None
        further = trip.resumption.further(trip.relay, choice, error) if trip.resumption is not None else None
        if further is None and trip.resumption is not None and trip.resumption.outcome == COMPLETED:
            trip.failure = ""
        elif further is None:
            self._metrics.broke_off(verdict.code or str(verdict.status))
        return further

    def _answered(self, trip: Trip, choice: Choice) -> None:
        """The client has an engine's whole answer, whatever it says."""
        trip.failure = ""
        if trip.resumption is not None:
            trip.resumption.answered()
        head = trip.relay.head_seen if trip.relay is not None else None
        if head is not None and head.status >= 400 and judge(Attempt(Answered(head.status))).blames_engine:
            self._suspect(choice.endpoint.engine)

    def _hold_against(self, choice: Choice, attempt: Attempt, verdict: Verdict) -> str:
        """What a failed attempt means for the engine; in words, what it was."""
        engine = choice.endpoint.engine
        if verdict.cool_down_s is not None:
            self._chooser.refused(choice, verdict.cool_down_s)
        choice.member.failures[verdict.code or str(verdict.status)] += 1
        if verdict.blames_engine:
            line = self._lines.get(engine)
            lost = isinstance(attempt.failure, EngineUnreachable | EngineClosed | EngineBroken)
            if lost and not (line is not None and line.pool.streaming):
                choice.member.suspected = True  # one that streams to clients is alive, whatever became of this connection
            self._suspect(engine)
        match attempt.failure:
            case EngineTimeout(stage=stage) | EngineConnectTimeout(stage=stage):
                self._metrics.timed_out(stage)
                return f"{attempt.failure} ({TIMEOUT_SETTINGS.get(stage, stage)})"
            case EngineError() as failure:
                return str(failure)
            case _:
                return f"the engine answered {verdict.status}"

    def _give_up(self, exchange: Exchange, nowhere: NoCandidate | Shed, trip: Trip, tries: Tries) -> None:
        """No engine will answer: give the client the most telling failure there was."""
        if trip.asked is not None:
            self._observed.shed(trip.asked.request.model)
        if exchange.started and trip.resumption is not None:
            self._metrics.broke_off("no_engine")
            trip.resumption.give_up(trip.relay, EngineBroken(f"{trip.failure}; {nowhere}"))
        elif tries.held is not None:
            tries.held.give_held()
        elif isinstance(nowhere, Shed):
            status = 503 if nowhere.reason is Reason.NO_ENGINE else 429
            exchange.error(status, str(nowhere), nowhere.reason.value, [(b"retry-after", b"%d" % nowhere.retry_after_s)])
        elif tries.verdict is not None:
            exchange.error(tries.verdict.status, trip.failure, tries.verdict.code)
        else:
            exchange.error(501 if nowhere.never else 503, trip.failure, "no_engine")

    def _conclude(self, exchange: Exchange, trip: Trip) -> None:
        """Count and log; a client that left is 499."""
        now = self._clock()
        status = CLIENT_LEFT if trip.left else exchange.status
        self._metrics.ended(exchange.path, status, now - trip.started)
        if trip.left:
            self._metrics.cancelled(_phase(trip))
        fields: dict[str, object] = {"path": ROUTES[exchange.path], "status": status, "duration_s": round(now - trip.started, 6)}
        if exchange.trace is not None:
            fields |= exchange.trace.fields
        if exchange.client:
            fields["client"] = exchange.client
        asked, choice = trip.asked, trip.choice
        if asked is not None:
            fields["model"] = asked.request.model
            fields["prompt_tokens"] = asked.request.prompt_tokens
        if choice is not None:
            self._conclude_choice(trip, choice, fields)
        if trip.first_token_at is not None:
            fields["ttft_s"] = round(trip.first_token_at - trip.started, 6)
        if trip.relay is not None:
            self._conclude_answer(trip, trip.relay, now, fields)
        if trip.failure:
            fields["failure"] = trip.failure
        event(log, logging.INFO, "request", **fields)
        self._observe(trip, now)
        self._tell(exchange, trip, now, fields)

    def _observe(self, trip: Trip, now: float) -> None:
        """Count for planners what the client saw."""
        if trip.asked is None:
            return
        model, relay, began = trip.asked.request.model, trip.relay, trip.first_token_at
        if trip.choice is not None and trip.asked.request.prompt_tokens:
            self._observed.prompt(model, trip.asked.request.prompt_tokens, trip.choice.overlap_tokens)
        if relay is None or began is None:
            return
        if not (trip.failure or trip.left):
            whole = relay.usage is not None and (trip.resumption is None or not trip.resumption.times)
            tokens = relay.usage.completion_tokens if relay.usage is not None and whole else 0
            self._observed.finished(model, tokens, now - began if relay.streamed else None)

    def _tell(self, exchange: Exchange, trip: Trip, now: float, fields: dict[str, object]) -> None:
        """Hand what is known of the request to whoever asked for it; `fields` are those of the log's line."""
        if self._spans is not None and exchange.trace is not None:
            sent_at = trip.sent_at if trip.tries else None
            times = Times(trip.started, trip.read_at, trip.chosen_at, sent_at, trip.first_token_at, now)
            self._spans.tell(exchange.trace, times, fields, trip.failure or ("the client left" if trip.left else ""))
        if self._recent is not None:
            status = CLIENT_LEFT if trip.left else exchange.status
            self._recent.ended(_ended(trip, ROUTES[exchange.path], status, now))

    def _conclude_choice(self, trip: Trip, choice: Choice, fields: dict[str, object]) -> None:
        """Count where the request went, and add it to the line."""
        decision, overlap_tokens = choice.decision, choice.overlap_tokens
        endpoint = decision.chosen.endpoint
        fields["engine"], fields["rank"] = endpoint.engine, endpoint.rank
        fields["reason"], fields["overlap_tokens"] = REASONS[decision.reason], overlap_tokens
        fields["tries"] = trip.tries
        if trip.ids is not None:
            fields["token_ids"] = trip.ids.value
        if trip.resumption is not None and trip.resumption.outcome:
            fields["resumes"], fields["resumption"] = trip.resumption.times, trip.resumption.outcome
            self._metrics.resumed(trip.resumption.outcome)
        self._metrics.decided(decision)
        if choice.split is not None:
            fields |= _split_fields(choice)
            self._metrics.prefilled(choice.split)
        lost = regret(decision.candidates, decision.position) if decision.reason in _LONGER_ELSEWHERE else 0
        self._metrics.prompt(choice.asked.request.prompt_tokens, overlap_tokens, lost)

    def _conclude_answer(self, trip: Trip, relay: Relay, now: float, fields: dict[str, object]) -> None:
        """Count what the engine's answer said of itself, and add it to the line."""
        usage = relay.usage
        if trip.first_token_at is not None and relay.streamed:
            self._metrics.first_token(trip.first_token_at - trip.started)
            whole = usage is not None and usage.completion_tokens and not trip.left
            self._metrics.streamed(
                now - trip.first_token_at, (usage.completion_tokens if usage is not None and whole else relay.pieces) - 1
            )
        if trip.reservation is not None and not trip.failure and not trip.left:
            self._chooser.answered(trip.reservation, usage.completion_tokens if usage is not None else relay.pieces)
        if usage is not None:
            self._metrics.generated(usage.completion_tokens)
            fields["completion_tokens"], fields["cached_tokens"] = usage.completion_tokens, usage.cached_tokens
            self._metrics.cached(usage.cached_tokens or 0)
            if trip.choice is not None and not (trip.failure or (trip.resumption is not None and trip.resumption.times)):
                self._chooser.ended(trip.choice, usage, trip.sent_at, streamed=relay.streamed)
        if relay.stream_failed:
            trip.failure = trip.failure or "the engine reported an error in its stream"


def _phase(trip: Trip) -> Phase:
    """How far a request is whose client leaves now."""
    if trip.asked is None:
        return Phase.TOKENIZING
    if trip.relay is None:
        return Phase.QUEUED
    return Phase.UNANSWERED if trip.first_token_at is None else Phase.STREAMING


def _asking(exchange: Exchange) -> bytes:
    """The body that says what is asked. A WebSocket has none; it may name its model in the query."""
    return openai.body_of_query(exchange.query) if exchange.upgrade else exchange.body


def _ended(trip: Trip, path: str, status: int, now: float) -> Ended:
    """A request as it is remembered for a while; of what was asked and answered, only the numbers."""
    choice, relay = trip.choice, trip.relay
    prefill = choice.prefill if choice is not None else None
    usage = relay.usage if relay is not None else None
    ttft_s = itl_s = None
    if trip.first_token_at is not None and relay is not None and relay.streamed:
        ttft_s = trip.first_token_at - trip.started
        gaps = (usage.completion_tokens if usage is not None and usage.completion_tokens else relay.pieces) - 1
        resumed = trip.resumption is not None and trip.resumption.times
        itl_s = (now - trip.first_token_at) / gaps if gaps > 0 and not (trip.left or trip.failure or resumed) else None
    return Ended(
        at=now,
        path=path,
        status=status,
        duration_s=now - trip.started,
        model=choice.asked.request.model if choice is not None else "",
        prompt_tokens=choice.asked.request.prompt_tokens if choice is not None else 0,
        overlap_tokens=choice.overlap_tokens if choice is not None else 0,
        decision=choice.decision if choice is not None else None,
        split=choice.split if choice is not None else None,
        prefill=prefill.decision if prefill is not None else None,
        ttft_s=ttft_s,
        itl_s=itl_s,
        completion_tokens=usage.completion_tokens if usage is not None else None,
        cached_tokens=usage.cached_tokens if usage is not None else None,
        tries=trip.tries,
        failure=trip.failure[:MAX_FAILURE_CHARS],
    )


def _split_fields(choice: Choice) -> dict[str, object]:
    """Where the prompt of a decode engine was computed, for the log."""
    if choice.split is None:
        return {}
    told: dict[str, object] = {"prefill_reason": choice.split.why.value}
    if choice.prefill is not None:
        told["prefill_engine"] = choice.prefill.endpoint.engine
    return told


def _explain_headers(choice: Choice) -> Headers:
    """Why this engine, for a client that asked (`x-commutator-explain: 1`)."""
    decision = choice.decision
    told = {
        "engine": decision.chosen.endpoint.engine,
        "rank": decision.chosen.endpoint.rank,
        "policy": decision.policy,
        "reason": decision.reason.value,
        "signal": decision.chosen.signal.state.value if decision.looked_at_caches else "not asked",
        "prompt-tokens": choice.asked.request.prompt_tokens,
        "overlap-tokens": choice.overlap_tokens,
    }
    if choice.split is not None:
        told["prefill-reason"] = choice.split.why.value
    if choice.prefill is not None:
        told |= {"prefill-engine": choice.prefill.endpoint.engine, "prefill-overlap-tokens": choice.prefill.overlap_tokens}
    told["costs"] = _costs(decision)
    return [(b"x-commutator-" + name.encode(), str(value).encode()) for name, value in told.items()]


def _costs(decision: Decision) -> str:
    """What the cheapest endpoints would have cost, each with the parts of it: `http://e1:8000#0=0.31 (own_prefill=0.3 decoding=0.01), …`."""
    parts = decision.parts() or [{}] * len(decision.costs)
    told = []
    for scored, part in sorted(zip(decision.scores, parts, strict=True), key=lambda one: one[0].cost)[:MAX_EXPLAINED]:
        within = " ".join(f"{name}={value:.6g}" for name, value in part.items())
        told.append(f"{scored.candidate.endpoint}={scored.cost:.6g}" + (f" ({within})" if within else ""))
    return ", ".join(told)
