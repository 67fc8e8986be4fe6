import doctest
import errno

import pytest

from engines.errors import EngineBroken, EngineClosed, EngineConnectTimeout, EngineError, EngineTimeout, EngineUnreachable, NotAnEngine
from router import retry as module
from router.retry import MAX_COOL_DOWN_S, Answered, Attempt, ClientLeft, End, Next, Verdict, judge

UNREACHABLE = EngineUnreachable("refused")
NO_SOCKET = EngineUnreachable("too many open files", number=errno.EMFILE)
NO_CONNECTION = EngineConnectTimeout(5.0)
CLOSED = EngineClosed("reset")
NO_HEAD = EngineTimeout("response head", 600.0)
SILENT = EngineTimeout("stream", 300.0)
BROKEN = EngineBroken("reset")


def test_the_example_in_its_text_is_true() -> None:
    results = doctest.testmod(module)
    assert (results.attempted, results.failed) == (1, 0)


@pytest.mark.parametrize(
    ("attempt", "then", "end", "status", "blames"),
    [
        (Attempt(UNREACHABLE), Next.ELSEWHERE, End.ERROR, 502, True),
        (Attempt(NO_CONNECTION), Next.ELSEWHERE, End.ERROR, 502, True),
        (Attempt(NO_SOCKET), Next.ELSEWHERE, End.ERROR, 502, False),
        (Attempt(UNREACHABLE, repeats=5), Next.ELSEWHERE, End.ERROR, 502, True),
        (Attempt(CLOSED), Next.ELSEWHERE, End.ERROR, 502, True),
        (Attempt(CLOSED, reused=True), Next.SAME_ENGINE, End.ERROR, 502, False),
        (Attempt(CLOSED, repeats=1), Next.STOP, End.ERROR, 502, True),
        (Attempt(CLOSED, reused=True, repeats=1), Next.STOP, End.ERROR, 502, False),
        (Attempt(CLOSED, repeats=1, again=True), Next.ELSEWHERE, End.ERROR, 502, True),
        (Attempt(NO_HEAD), Next.STOP, End.ERROR, 504, True),
        (Attempt(NO_HEAD, may_have_generated=False), Next.ELSEWHERE, End.ERROR, 504, True),
        (Attempt(NO_HEAD, may_have_generated=False, repeats=1), Next.STOP, End.ERROR, 504, True),
        (Attempt(BROKEN, client_bytes=100), Next.STOP, End.BREAK, 502, True),
        (Attempt(BROKEN), Next.STOP, End.ERROR, 502, True),
        (Attempt(SILENT, client_bytes=100), Next.STOP, End.BREAK, 504, True),
        (Attempt(SILENT, client_bytes=1, may_have_generated=False), Next.STOP, End.BREAK, 504, True),
        (Attempt(EngineError("odd")), Next.STOP, End.ERROR, 502, True),
        (Attempt(NotAnEngine("nginx")), Next.STOP, End.ERROR, 502, True),
        (Attempt(Answered(429)), Next.ELSEWHERE, End.ENGINE_ANSWER, 429, False),
        (Attempt(Answered(503), repeats=3), Next.ELSEWHERE, End.ENGINE_ANSWER, 503, False),
        (Attempt(Answered(400)), Next.STOP, End.ENGINE_ANSWER, 400, False),
        (Attempt(Answered(404)), Next.STOP, End.ENGINE_ANSWER, 404, False),
        (Attempt(Answered(422)), Next.STOP, End.ENGINE_ANSWER, 422, False),
        (Attempt(Answered(499)), Next.STOP, End.ENGINE_ANSWER, 499, False),
        (Attempt(Answered(500)), Next.STOP, End.ENGINE_ANSWER, 500, True),
        (Attempt(Answered(502)), Next.STOP, End.ENGINE_ANSWER, 502, True),
        (Attempt(ClientLeft()), Next.STOP, End.NOTHING, 499, False),
        (Attempt(ClientLeft(), client_bytes=100), Next.STOP, End.NOTHING, 499, False),
    ],
)
def test_each_failure_has_its_verdict(attempt: Attempt, then: Next, end: End, status: int, blames: bool) -> None:
    verdict = judge(attempt)
    assert (verdict.next, verdict.end, verdict.status, verdict.blames_engine) == (then, end, status, blames)


@pytest.mark.parametrize("failure", [UNREACHABLE, CLOSED, NO_HEAD, SILENT, BROKEN, EngineError("odd")])
@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("may_have_generated", [False, True])
def test_nothing_is_tried_again_once_a_byte_has_reached_the_client(failure: EngineError, reused: bool, may_have_generated: bool) -> None:
    verdict = judge(Attempt(failure, reused=reused, client_bytes=1, may_have_generated=may_have_generated))
    assert verdict.next is Next.STOP
    assert verdict.end is End.BREAK


@pytest.mark.parametrize("failure", [CLOSED, NO_HEAD])
@pytest.mark.parametrize("reused", [False, True])
def test_a_request_that_an_engine_may_have_seen_is_sent_again_once_at_most(failure: EngineError, reused: bool) -> None:
    repeats = 0
    sent = 1
    while True:
        verdict = judge(Attempt(failure, reused=reused, repeats=repeats, may_have_generated=False))
        if verdict.next is Next.STOP:
            break
        sent += 1
        repeats += verdict.repeats
    assert sent == 2


@pytest.mark.parametrize(("retry_after_s", "cool_down_s"), [(None, 1.0), (0.0, 0.0), (7.0, 7.0), (1e9, MAX_COOL_DOWN_S), (-3.0, 0.0)])
def test_an_engine_that_says_it_is_full_is_left_alone_for_as_long_as_it_asks(retry_after_s: float | None, cool_down_s: float) -> None:
    for status in (429, 503):
        assert judge(Attempt(Answered(status, retry_after_s))).cool_down_s == cool_down_s
    assert judge(Attempt(Answered(500, retry_after_s))).cool_down_s is None


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (UNREACHABLE, "engine_unreachable"),
        (CLOSED, "engine_closed"),
        (NO_HEAD, "engine_timeout"),
        (BROKEN, "engine_broken"),
        (EngineError("odd"), "engine_error"),
    ],
)
def test_our_own_answer_is_a_server_error_that_says_what_happened(failure: EngineError, code: str) -> None:
    verdict = judge(Attempt(failure))
    assert (verdict.error_type, verdict.code) == ("server_error", code)


def test_the_engines_own_answer_needs_no_words_of_ours() -> None:
    assert judge(Attempt(Answered(400))) == Verdict(Next.STOP, End.ENGINE_ANSWER, 400)
