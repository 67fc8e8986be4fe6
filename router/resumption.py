"""A stream's engine is gone: does the client have to know? One request's chances to go on, between the proxy and the transcript.

    engine ──▶ ResumableRelay ──▶ Transcript ──▶ client
                     │ breaks off       │ resume
    Resumption ◀─────┘                  ▼
        └── what to ask another engine, whose ResumableRelay goes on in the same answer; or the broken end after all

Only requests for which this is switched on have one; all others pass through a plain `Relay`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from engines.blocks import pack_tokens
from engines.errors import EngineBroken, EngineError
from router.prompts.book import Tokens
from router.relay import Relay
from router.resume import Obstacle, Plan, decide
from router.sse import Scanner
from router.token_ids import Outcome
from router.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.chooser import Choice
    from router.exchange import Exchange, Headers
    from router.intake import Asked
    from router.upstream import ResponseHead

RESUMED: Final = "resumed"
COMPLETED: Final = "completed"
"""What ends well, beside the obstacles: another engine went on to the end; or only the end was missing, and could be told from here."""


class ResumableRelay(Relay):
    """Passes on what the transcript makes of a stream, and leaves it to the proxy what becomes of one that breaks off."""

    __slots__ = ("_engine_done", "_goes_on", "_transcript")

    def __init__(
        self,
        exchange: Exchange,
        extra_headers: Headers,
        on_first_token: Callable[[], None],
        transcript: Transcript,
        *,
        goes_on: bool,
    ) -> None:
        """`goes_on`: the client has the beginning already, from another engine."""
        super().__init__(exchange, extra_headers, on_first_token)
        self._transcript: Transcript | None = transcript
        self._goes_on = goes_on
        self._engine_done = False
        if goes_on:
            self._streamed = True
            self._scanner = Scanner(streamed=True)
            self._last = b"\n\n"

    def head(self, head: ResponseHead) -> None:
        """Take the answer: as one that begins, or as one that goes on."""
        if self._goes_on:
            self.head_seen = head
            self.accepted = self._passing = head.status == 200 and _is_plain_stream(head)
            return
        super().head(head)
        if not (self._passing and _is_plain_stream(head)):
            self._transcript = None

    def body(self, data: bytes, *, last: bool = False) -> None:
        """Pass on what the client has not had."""
        transcript = self._transcript
        if transcript is None:
            super().body(data, last=last)
        elif not self._passing:
            self._hold(data)
        elif not self.done.rung:
            data = transcript.feed(data)
            if data:
                super().body(data, last=last and transcript.done)
            if transcript.failure:
                self.error = EngineBroken(transcript.failure)
                self.done.ring()

    def finished(self, error: EngineError | None) -> None:
        """The engine is done with us."""
        self._engine_done = True
        transcript = self._transcript
        if transcript is None or not self._passing:
            super().finished(error)
        elif error is not None:
            self.error = error
            self.done.ring()
        elif not self.done.rung:
            if rest := transcript.rest():
                super().body(rest)
            super().finished(None)

    @property
    def over(self) -> bool:
        """The engine is done with this answer; the proxy may be done with it before."""
        return self._engine_done

    @property
    def breakable(self) -> bool:
        """Whether the client has a part of a stream, whose end is to be decided."""
        return self._transcript is not None and self.exchange.started

    def end_with(self, closing: bytes) -> None:
        """Nothing but this was missing."""
        if closing:
            super().body(closing, last=True)
        self._complete()

    def break_off(self, error: EngineError) -> None:
        """Nobody goes on."""
        self._break_off(error)


class Resumption:
    """One request's chances."""

    __slots__ = ("_left", "_obstacle", "_transcript", "outcome", "times")

    def __init__(self, limit: int) -> None:
        """`limit`: how often another engine may go on."""
        self._left = limit
        self._transcript: Transcript | None = None
        self._obstacle: Obstacle | None = None
        self.times = 0
        """How often one has been asked to."""
        self.outcome = ""
        """What came of it; empty where nothing broke off, or where it was no stream of text."""

    def send(self, choice: Choice, exchange: Exchange, extra_headers: Headers, on_first_token: Callable[[], None]) -> tuple[Relay, bytes]:
        """Where an engine's answer goes, and what to ask it."""
        asked = choice.asked
        if self.times and self._transcript is not None:
            return ResumableRelay(exchange, extra_headers, on_first_token, self._transcript, goes_on=True), asked.body
        plan = decide(asked.route, asked.body, choice.member.info.kind)
        if not isinstance(plan, Plan):
            self._transcript, self._obstacle = None, plan
            return Relay(exchange, extra_headers, on_first_token), asked.body
        self._transcript = Transcript(plan)
        return ResumableRelay(exchange, extra_headers, on_first_token, self._transcript, goes_on=False), plan.first()

    def further(self, relay: Relay | None, choice: Choice, error: EngineError | None) -> Asked | None:
        """What to ask another engine after an answer has broken off, or was refused (`error` None); None when it has been ended."""
        transcript = self._transcript
        if transcript is None or not isinstance(relay, ResumableRelay) or not relay.breakable:
            self.outcome = self._obstacle or ""
            return None
        if transcript.finished or transcript.done:
            relay.end_with(transcript.closing())
            self.outcome = COMPLETED
            return None
        if error is None:
            body: bytes | Obstacle = Obstacle.REFUSED
        else:
            body = transcript.resume() if self._left or transcript.obstacle else Obstacle.OFTEN
        if isinstance(body, Obstacle):
            self.give_up(relay, error or EngineBroken("an engine broke off, and another one refused to go on"), body)
            return None
        self._left -= 1
        self.times += 1
        return _continued(choice, body, transcript.tokens)

    def give_up(self, relay: Relay | None, error: EngineError, why: Obstacle = Obstacle.NO_ENGINE) -> None:
        """End an answer that nobody goes on with."""
        self.outcome = why
        if isinstance(relay, ResumableRelay):
            relay.break_off(error)

    def answered(self) -> None:
        """The client has its whole answer."""
        if self.times:
            self.outcome = RESUMED


def _continued(choice: Choice, body: bytes, ids: list[int]) -> Asked:
    """The rest of a request, for engines of the same kind: they are asked by tokens, and looked through for these."""
    asked, kind = choice.asked, choice.member.info.kind
    route = msgspec.structs.replace(asked.route, engines=frozenset({kind}))
    rest = msgspec.structs.replace(asked, route=route, body=body, ids_barrier=Outcome.GIVEN, read=None)
    if ids and asked.tokens:
        rest.request = msgspec.structs.replace(asked.request, prompt_tokens=len(ids))
        rest.tokens = dict.fromkeys(asked.tokens, Tokens(ids, pack_tokens(ids), "local"))
        rest.made = {}
    return rest


def _is_plain_stream(head: ResponseHead) -> bool:
    kind = (head.header(b"content-type") or b"")[:17].lower()
    return kind == b"text/event-stream" and head.header(b"content-encoding") is None
