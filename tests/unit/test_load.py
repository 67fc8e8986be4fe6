import doctest

import pytest

from discovery.peers import Carried, Peers, Presence, Told
from router import load as module
from router.load import LoadBook
from router.scheduling.types import Load
from router.work import SLOWEST_S_PER_TOKEN
from tests.choosing import chain, endpoint

A, B = endpoint("a"), endpoint("b")


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted > 15
    assert results.failed == 0


def test_a_request_is_prefill_until_its_first_token_and_active_until_its_end() -> None:
    book = LoadBook()
    with book.reserve(A, chain(1, 3), uncached_tokens=50) as reservation:
        assert book.load(A, 0.0) == Load(active_requests=1, active_prefill_tokens=50, active_blocks=3, last_assigned=1, computing=1)
        reservation.first_token()
        assert book.load(A, 0.0) == Load(active_requests=1, active_prefill_tokens=0, active_blocks=3, last_assigned=1)
    assert book.load(A, 0.0) == Load(last_assigned=1)
    book._check()


def test_a_block_that_two_requests_share_is_counted_once_until_both_have_ended() -> None:
    book = LoadBook()
    first = book.reserve(A, chain(1, 5), 80)
    second = book.reserve(A, chain(1, 3) + chain(2, 4), 64)
    assert book.load(A, 0.0).active_blocks == 9
    assert book.in_flight(chain(1, 9)) == {A: 5}
    first.release()
    assert book.load(A, 0.0).active_blocks == 7
    assert book.in_flight(chain(1, 9)) == {A: 3}
    second.release()
    assert book.in_flight(chain(1, 9)) == {}


def test_a_request_that_raises_is_given_back() -> None:
    book = LoadBook()
    with pytest.raises(RuntimeError), book.reserve(A, chain(1, 3), 48):
        raise RuntimeError
    assert len(book) == 0
    assert book.load(A, 0.0) == Load(last_assigned=1)


def test_releasing_twice_or_after_the_with_takes_nothing_from_others() -> None:
    book = LoadBook()
    other = book.reserve(A, chain(1, 3), 48)
    with book.reserve(A, chain(1, 3), 48) as reservation:
        reservation.release()
        reservation.first_token()
    reservation.release()
    assert book.load(A, 0.0).active_requests == 1
    assert book.load(A, 0.0).active_prefill_tokens == 48
    assert book.in_flight(chain(1, 3)) == {A: 3}
    other.release()
    book._check()


def test_a_reservation_of_a_forgotten_endpoint_is_harmless_even_when_the_endpoint_is_back() -> None:
    book = LoadBook()
    old = book.reserve(A, chain(1, 3), 48)
    book.forget(A)
    assert book.load(A, 0.0) == Load()
    assert book.in_flight(chain(1, 3)) == {}
    new = book.reserve(A, chain(1, 2), 32)
    old.first_token()
    old.release()
    assert book.load(A, 0.0) == Load(active_requests=1, active_prefill_tokens=32, active_blocks=2, last_assigned=2, computing=1)
    new.release()
    book.forget(B)
    book._check()


def test_the_endpoint_assigned_longest_ago_has_the_smallest_ordinal() -> None:
    book = LoadBook()
    for end in (A, B, A):
        book.reserve(end, [], 0).release()
    assert [book.load(end, 0.0).last_assigned for end in (A, B, endpoint("c"))] == [3, 2, 0]


def test_what_an_engine_reported_is_told_while_it_is_fresh_and_not_after() -> None:
    book = LoadBook(report_fresh_s=15.0)
    book.report(A, running=3, waiting=None, kv_usage=0.25, now=100.0)
    assert book.load(A, 115.0) == Load(running=3, kv_usage=0.25)
    assert book.load(A, 115.1) == Load()
    book.report(A, running=0, waiting=2, kv_usage=0.0, now=116.0)
    assert book.load(A, 116.0) == Load(running=0, waiting=2, kv_usage=0.0)


def test_what_is_told_to_others_tells_prompts_that_wait_from_those_that_are_computed() -> None:
    book = LoadBook()
    with book.reserve(A, chain(0, 2), 100, 0.0) as streamed, book.reserve(A, chain(1, 2), 50, 0.0, streamed=False), book.reserve(A, [], 7):
        assert book.own(A) == Carried(requests=3, prefill_tokens=157, computing=3, blocks=4)
        streamed.first_token(1.0)
        assert book.own(A) == Carried(requests=3, prefill_tokens=57, computing=2, blocks=4)
        book.load(A, 1.0 + 51 * SLOWEST_S_PER_TOKEN)
        assert book.own(A) == Carried(requests=3, prefill_tokens=7, computing=1, blocks=4), "its time has passed"
    assert book.own(A) == Carried()


def test_R36_prompts_that_others_have_computed_there_count_as_those_of_our_own() -> None:
    book, others = LoadBook(), Peers("b", 0.0)
    book.others = others
    others.hear(Presence("c", [Told(A.engine, 0, 3, 100, 2)], [], {}, None), 0.0)
    assert book.load(A, 0.0) == Load(active_requests=3, active_prefill_tokens=100, computing=2)
    with book.reserve(A, [], 50, 0.0):
        load = book.load(A, 0.0)
        assert (load.active_requests, load.active_prefill_tokens, load.computing) == (4, 150, 3)


def test_R23_time_takes_no_count_away() -> None:
    book = LoadBook()
    streams = [book.reserve(A, chain(number, 4), 64) for number in range(50)]
    for cycle in range(20):
        now = cycle * 3600.0
        book.report(A, running=0, waiting=0, kv_usage=0.0, now=now)
        book.sweep(1000)
        load = book.load(A, now)
        assert (load.active_requests, load.active_blocks, load.active_prefill_tokens) == (50, 200, 3200)
    for stream in streams:
        stream.release()
    assert len(book) == 0


def test_M2_twenty_thousand_requests_of_which_a_third_fail_leave_nothing_behind() -> None:
    book = LoadBook()
    held = []
    for number in range(20_000):
        reservation = book.reserve((A, B)[number % 2], chain(0, 5) + chain(1 + number, 3), 100)
        if number % 3:
            reservation.first_token()
        held.append(reservation)
        if len(held) > 100:
            held.pop(number % 100).release()
    for reservation in held:
        reservation.release()
    assert len(book) == 0
    for end in (A, B):
        load = book.load(end, 0.0)
        assert (load.active_requests, load.active_blocks, load.active_prefill_tokens) == (0, 0, 0)
    assert book.in_flight(chain(0, 5)) == {}
    book._check()
