"""An attempt at an engine has failed: may the request be tried again, where, and what is the client told otherwise?

One rule behind the table: a prompt is computed twice only when nothing else can save the request, and never once the client has
seen a byte of an answer.

    what happened                          try again                      else the client gets          against the engine
    ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
    could not connect                      elsewhere, always              502                           yes, unless this
                                                                                                        process is at fault
    closed before the response began       once: here on a new            502                           yes, unless reused
                                           connection if it was reused
                                           (and elsewhere if that is
                                           closed too), else elsewhere
    no response head in time               once, elsewhere, if surely     504                           yes
                                           nothing was generated
    the prompt's KV cache did not get      once, with other engines      502                           no: the pair is
    from prefill to decode                                                                              left alone
    broke off, or fell silent, mid-answer  no                             error event, broken end;      yes
                                                                          502/504 before any byte
    429, 503                               elsewhere, always; cool-down   the engine's answer           no
    other 4xx, 5xx                         no                             the engine's answer           5xx only
    the client left                        no                             nothing; logged as 499        no
"""

from __future__ import annotations

import enum

import msgspec

from engines.errors import EngineBroken, EngineClosed, EngineError, EngineTimeout, EngineUnreachable, TransferFailed

COOL_DOWN_S = 1.0
"""How long an engine is left alone that answered 429 or 503 without saying how long."""
MAX_COOL_DOWN_S = 60.0
"""An engine that asks for longer is asked again after this."""


class Answered(msgspec.Struct, frozen=True):
    """The engine did answer, with an error status."""

    status: int
    retry_after_s: float | None = None
    """Its `Retry-After`, where that is a number of seconds."""


class ClientLeft(msgspec.Struct, frozen=True):
    """Nobody is waiting any more."""


class Attempt(msgspec.Struct, frozen=True):
    """What is known of an attempt that has failed."""

    failure: EngineError | Answered | ClientLeft
    reused: bool = False
    """The connection had carried a request before: the engine may have closed it just as this one was written."""
    client_bytes: int = 0
    """Bytes of the answer, its head included, that the client has been sent."""
    repeats: int = 0
    """How often this request has been sent again already after an engine may have seen it (`Verdict.repeats` says when to count)."""
    again: bool = False
    """It was the second try at one engine, on a new connection after a reused one had been closed."""
    may_have_generated: bool = True
    """False only when the engine has certainly not begun to compute this request."""


class Next(enum.StrEnum):
    """What to do about the request."""

    ELSEWHERE = "elsewhere"
    """Decide again without this engine; when no other is left, end as `Verdict.end` says."""
    SAME_ENGINE = "same_engine"
    """Send it to the same engine on a new connection."""
    STOP = "stop"
    """End as `Verdict.end` says."""


class End(enum.StrEnum):
    """How a request ends that is not tried again."""

    ERROR = "error"
    """Our own error answer, with `Verdict.status`."""
    ENGINE_ANSWER = "engine_answer"
    """The engine's answer, bytes and all."""
    BREAK = "break"
    """The answer has begun: an error event where it is a stream, then a connection that visibly breaks; never a clean end."""
    NOTHING = "nothing"
    """Nobody is there."""


class Verdict(msgspec.Struct, frozen=True):
    """What follows from a failed attempt."""

    next: Next
    end: End
    status: int
    """For the client, or for the log where the client gets none of ours."""
    error_type: str = ""
    """`error.type` of the OpenAI error object, in our own answer or in the error event."""
    code: str = ""
    """`error.code` of that object: what happened, in one word."""
    repeats: bool = False
    """Trying again may make an engine compute this request a second time: count it in `Attempt.repeats`."""
    blames_engine: bool = False
    """Counts as a failure of the engine."""
    cool_down_s: float | None = None
    """Send nothing more to this engine for so long."""


_LEFT = Verdict(Next.STOP, End.NOTHING, 499)


def judge(attempt: Attempt) -> Verdict:
    """What to do now: the table of the module's text, row by row.

    >>> judge(Attempt(EngineUnreachable("connection refused"))).next
    <Next.ELSEWHERE: 'elsewhere'>
    """
    match attempt.failure:
        case ClientLeft():
            return _LEFT
        case Answered(status, retry_after_s):
            return _answered(status, retry_after_s)
        case EngineError() as failure if attempt.client_bytes:
            return _engine_failed(Next.STOP, End.BREAK, failure)
        case EngineUnreachable() as failure:
            return _engine_failed(Next.ELSEWHERE, End.ERROR, failure, blames_engine=not failure.ours)
        case EngineClosed() as failure:
            return _closed(attempt, failure)
        case TransferFailed() as failure:
            repeats = not attempt.repeats
            return _engine_failed(Next.ELSEWHERE if repeats else Next.STOP, End.ERROR, failure, repeats=repeats, blames_engine=False)
        case EngineTimeout() as failure if not attempt.may_have_generated and not attempt.repeats:
            return _engine_failed(Next.ELSEWHERE, End.ERROR, failure, repeats=True)
        case failure:
            return _engine_failed(Next.STOP, End.ERROR, failure)


def _closed(attempt: Attempt, failure: EngineClosed) -> Verdict:
    """The connection ended before a response began. A reused one says nothing about the engine's health.

    An engine that is being killed closes the reused connection, and may still take the new one only to close it too: the request then
    has its one try elsewhere all the same. No prompt that kills engines gets further than two.
    """
    if attempt.repeats and not attempt.again:
        return _engine_failed(Next.STOP, End.ERROR, failure, blames_engine=not attempt.reused)
    again = Next.SAME_ENGINE if attempt.reused else Next.ELSEWHERE
    return _engine_failed(again, End.ERROR, failure, repeats=True, blames_engine=not attempt.reused)


def _answered(status: int, retry_after_s: float | None) -> Verdict:
    if status in (429, 503):
        cool_down_s = COOL_DOWN_S if retry_after_s is None else min(max(retry_after_s, 0.0), MAX_COOL_DOWN_S)
        return Verdict(Next.ELSEWHERE, End.ENGINE_ANSWER, status, cool_down_s=cool_down_s)
    return Verdict(Next.STOP, End.ENGINE_ANSWER, status, blames_engine=status >= 500)


def _engine_failed(then: Next, end: End, failure: EngineError, *, repeats: bool = False, blames_engine: bool = True) -> Verdict:
    status, code = _describe(failure)
    return Verdict(then, end, status, "server_error", code, repeats, blames_engine)


def _describe(failure: EngineError) -> tuple[int, str]:
    """The gateway's status for a failure of an engine, and its name."""
    match failure:
        case EngineTimeout():
            return 504, "engine_timeout"
        case EngineUnreachable():
            return 502, "engine_unreachable"
        case EngineClosed():
            return 502, "engine_closed"
        case EngineBroken():
            return 502, "engine_broken"
        case TransferFailed():
            return 502, "kv_transfer_failed"
        case _:
            return 502, "engine_error"
