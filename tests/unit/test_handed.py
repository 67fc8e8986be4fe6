"""A decode engine that computes what it is handed is found out by its own counters, and no other one is."""

from __future__ import annotations

from engines.metrics import EngineWork
from engines.types import Endpoint
from router.handed import Handed

DECODE = Endpoint("http://d:8000")


def after(handed: Handed, *reports: tuple[int, int]) -> list[int | None]:
    """What each report of (computed, fetched) tokens shows."""
    return [handed.reported(DECODE, EngineWork(computed, fetched)) for computed, fetched in reports]


def hand(handed: Handed, tokens: int) -> None:
    handed.over(DECODE, tokens, handed.fetched(DECODE))


def test_one_that_computes_again_is_told_once() -> None:
    handed = Handed()
    assert after(handed, (500, 0)) == [None]
    hand(handed, 1000)
    assert after(handed, (1500, 0), (1500, 0), (1500, 0)) == [None, 1000, None]
    assert handed.again == {DECODE: 1000}
    hand(handed, 1000)
    assert after(handed, (2500, 0), (2500, 0)) == [None, None]
    assert handed.again == {DECODE: 2000}


def test_what_it_fetches_from_then_on_clears_it() -> None:
    handed = Handed()
    after(handed, (0, 0))
    hand(handed, 1000)
    after(handed, (1000, 0), (1000, 0))
    assert handed.again
    after(handed, (1000, 500))
    assert not handed.again


def test_a_fetch_that_is_reported_before_its_answer_has_come_is_no_fault() -> None:
    handed = Handed()
    after(handed, (0, 0))
    before = handed.fetched(DECODE)
    after(handed, (0, 1000))
    handed.over(DECODE, 1000, before)
    assert after(handed, (1000, 1000), (2000, 1000)) == [None, None]


def test_a_page_that_was_written_before_the_answer_does_not_count() -> None:
    handed = Handed()
    after(handed, (0, 0))
    hand(handed, 1000)
    assert after(handed, (1000, 0), (1000, 1000), (9000, 1000)) == [None, None, None]


def test_what_it_had_cached_without_our_knowledge_it_need_not_fetch() -> None:
    handed = Handed()
    after(handed, (0, 0))
    hand(handed, 1000)
    assert after(handed, (1, 0), (1, 0), (900, 0)) == [None, None, None]


def test_an_engine_that_does_not_tell_is_not_judged_and_one_that_restarts_begins_anew() -> None:
    handed = Handed()
    hand(handed, 1000)
    assert after(handed, (1000, 0), (5000, 0), (5000, 0)) == [None, None, None]
    hand(handed, 1000)
    assert after(handed, (10, 0), (1010, 0)) == [None, None]
    handed.forget(DECODE)
    assert handed.fetched(DECODE) is None
