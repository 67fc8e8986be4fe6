"""What is learned of an endpoint from when its first and last tokens come."""

import doctest
import random

import pytest

from router import work as module
from router.load import REPORT_MOVES_S, LoadBook
from router.work import ASSUMED_S_PER_TOKEN, BUSY_S, FIXED_TOKENS, LEAST_OBSERVED, OBSERVED, Prompt, Work
from tests.choosing import endpoint

A = endpoint("a")
PACE = 50e-6


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted > 3
    assert results.failed == 0


def taught(work: Work, pace: float = PACE, *, until: float = 0.0, prompts: int = OBSERVED) -> None:
    """Prompts that found it idle, the last of them computed at `until`."""
    took = pace * (1000 + FIXED_TOKENS)
    for number in range(prompts, 0, -1):
        prompt = work.sent(1000, until - number * took, streamed=True)
        work.computed(prompt, until - (number - 1) * took)
        work.left(prompt)


def test_the_pace_is_known_after_some_prompts_and_not_before() -> None:
    work = Work()
    taught(work, prompts=LEAST_OBSERVED - 1)
    assert work.s_per_token is None
    taught(work, until=1.0, prompts=1)
    assert work.s_per_token == pytest.approx(PACE)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_queue_does_not_make_an_engine_look_slow(load: float) -> None:
    """A first-come queue with Poisson arrivals: the mean time to the first token doubles and more, the pace learned stays."""
    rng = random.Random(1)
    work, free_at, now, waited = Work(), 0.0, 0.0, []
    pending: list[tuple[float, Prompt]] = []
    for _ in range(400):
        tokens = rng.randint(500, 8000)
        now += rng.expovariate(load / (4250 * PACE))
        while pending and pending[0][0] <= now:
            at, prompt = pending.pop(0)
            work.computed(prompt, at)
        free_at = max(now, free_at) + tokens * PACE
        waited.append((free_at - now) / tokens)
        pending.append((free_at, work.sent(tokens, now, streamed=True)))
    assert sum(waited) / len(waited) > PACE * (1 + load)
    assert work.s_per_token == pytest.approx(PACE, rel=0.15)


def test_prompts_that_wait_for_the_same_prefix_teach_nothing() -> None:
    work = Work()
    for burst in range(20):
        now = float(burst)
        first = work.sent(5000, now, streamed=True)
        rest = [work.sent(50, now + 0.01, streamed=True) for _ in range(15)]
        for prompt in (first, *rest):
            work.computed(prompt, now + 5000 * PACE)
    assert work.s_per_token == pytest.approx(PACE, rel=0.05)


def test_an_engine_that_gets_slower_is_found_out() -> None:
    work = Work()
    taught(work)
    taught(work, 3 * PACE, until=100.0)
    assert work.s_per_token == pytest.approx(3 * PACE)


def test_only_the_head_of_the_queue_makes_progress_and_no_more_than_all_of_it() -> None:
    work = Work()
    taught(work)
    first, second = work.sent(10_000, 1.0, streamed=True), work.sent(10_000, 1.0, streamed=True)
    assert work.done(1.25) == pytest.approx(5000)
    assert work.done(9.0) == 10_000
    work.computed(first, 9.0)
    assert work.done(9.0) == 0
    assert work.done(9.25) == pytest.approx(5000)
    work.left(second)
    assert work.done(9.25) == 0
    assert work.queued == 0


def test_before_anything_is_learned_progress_is_at_an_assumed_pace() -> None:
    work = Work()
    work.sent(10_000, 0.0, streamed=True)
    assert work.done(1000 * ASSUMED_S_PER_TOKEN) == pytest.approx(1000)


def test_a_prompt_whose_answer_is_not_streamed_is_computed_when_its_time_has_passed() -> None:
    work = Work()
    taught(work)
    whole, streamed = work.sent(2000, 1.0, streamed=False), work.sent(2000, 1.0, streamed=True)
    for now, done, computing in ((1.05, 1000, 2), (1.15, 3000, 1), (9.0, 4000, 1)):
        work.settle(now)
        assert work.done(now) == pytest.approx(done)
        assert work.computing == computing
    work.computed(streamed, 9.0)
    assert (work.queued, work.computing, work.done(9.0)) == (0, 0, 2000), "it has been computed, and its answer has not come"
    before, after = work.sent(2000, 10.0, streamed=False), work.sent(2000, 10.0, streamed=True)
    work.computed(after, 10.01)
    assert work.computing == 0, "what was sent before has been computed before"
    work.left(before)
    work.left(after)
    work.computed(whole, 11.0)
    assert work.done(11.0) == 0
    work.ended(whole, 11.0, 100)
    work.left(whole)
    assert (work.queued, work.decoding, work.residence_s) == (0, 1, 0.0)


def test_busy_is_the_share_of_the_last_minute() -> None:
    work = Work()
    assert work.busy(0.0) == 0
    prompt = work.sent(1000, 0.0, streamed=True)
    assert 0.6 < work.busy(BUSY_S) < 0.7
    work.computed(prompt, 10 * BUSY_S)
    assert work.busy(10 * BUSY_S) == pytest.approx(1.0, abs=1e-3)
    assert 0.3 < work.busy(11 * BUSY_S) < 0.4
    assert work.busy(30 * BUSY_S) < 1e-6


def test_what_answers_have_generated_follows_from_their_pace() -> None:
    work = Work()
    first = work.sent(100, 0.0, streamed=True)
    work.computed(first, 1.0)
    assert work.generated(2.0) == 0, "no answer has ended yet"
    work.ended(first, 3.0, 101)
    work.left(first)
    assert work.itl_s == pytest.approx(0.02)
    assert work.residence_s == pytest.approx(2.0)
    assert work.generated(3.0) == 0
    for at in (4.0, 5.0):
        work.computed(work.sent(100, at, streamed=True), at)
    assert work.generated(6.0) == pytest.approx(3.0 / 0.02)


def test_everything_is_given_back_in_whatever_order_requests_end() -> None:
    rng = random.Random(3)
    work, there = Work(), list[Prompt]()
    for step in range(2000):
        now = step / 10
        if rng.random() < 0.5 or not there:
            there.append(work.sent(rng.randint(0, 5000), now, streamed=rng.random() < 0.7))
        else:
            prompt = there.pop(rng.randrange(len(there)))
            if rng.random() < 0.7:
                work.computed(prompt, now)
            if rng.random() < 0.5:
                work.computed(prompt, now)
                work.ended(prompt, now + 0.05, rng.choice([None, 0, 1, 50]))
            work.left(prompt)
        work.settle(now)
        assert 0 <= work.done(now) <= sum(prompt.tokens for prompt in there if prompt.first_token_at is None)
        assert work.generated(now) >= 0
        assert 0 <= work.busy(now) <= 1
    for prompt in there:
        work.left(prompt)
    assert (work.queued, work.decoding, work.done(1e6), work.generated(1e6)) == (0, 0, 0, 0)


# -- in the load book


def test_the_book_learns_from_reservations_that_know_the_time() -> None:
    book = LoadBook()
    for number in range(LEAST_OBSERVED):
        at = float(number)
        with book.reserve(A, [], 1000, at) as reservation:
            reservation.first_token(at + (1000 + FIXED_TOKENS) * PACE)
            reservation.ended(at + 0.9, 100)
    load = book.load(A, 100.0)
    assert load.s_per_token == pytest.approx(PACE)
    assert load.residence_s == pytest.approx(0.9 - (1000 + FIXED_TOKENS) * PACE)
    with book.reserve(A, [], 8000, 100.0), book.reserve(A, [], 100):
        load = book.load(A, 100.2)
        assert load.active_prefill_tokens == 8100
        assert load.prefill_done == pytest.approx(4000)
    assert book.load(A, 101.0).prefill_done == 0


def test_R26_a_queue_that_the_engine_reports_counts_only_while_its_report_moves() -> None:
    book = LoadBook()
    with book.reserve(A, [], 1000, 0.0):
        book.report(A, running=10, waiting=5, kv_usage=0.5, now=0.0)
        assert book.load(A, 0.0).unknown_tokens == 0, "it may always have said so"
        book.report(A, running=10, waiting=6, kv_usage=0.5, now=1.0)
        assert book.load(A, 1.0).unknown_tokens == 6 * 1000
        book.report(A, running=0, waiting=3, kv_usage=0.5, now=2.0)
        assert book.load(A, 2.0).unknown_tokens == 2 * 1000, "one of them is ours"
        for second in range(3, 10):
            book.report(A, running=0, waiting=3, kv_usage=0.5, now=float(second))
        assert book.load(A, 2.0 + REPORT_MOVES_S).unknown_tokens == 2 * 1000
        assert book.load(A, 2.1 + REPORT_MOVES_S).unknown_tokens == 0, "stuck"


def test_requests_of_ours_that_ended_after_the_engine_counted_them_are_not_taken_for_those_of_others() -> None:
    book = LoadBook()
    book.report(A, running=0, waiting=0, kv_usage=0.0, now=0.0)
    with book.reserve(A, [], 1000, 0.0), book.reserve(A, [], 1000, 0.0):
        pass
    book.report(A, running=1, waiting=1, kv_usage=0.0, now=1.0)
    assert book.load(A, 1.0).unknown_tokens == 0
    book.report(A, running=1, waiting=2, kv_usage=0.0, now=2.0)
    assert book.load(A, 2.0).unknown_tokens == 2 * 1000, "those two had ended before the report before"
    with book.reserve(A, [], 1000, 2.0):
        assert book.load(A, 2.0).unknown_tokens == 2 * 1000, "whom it counted then is not whom we send now"
