"""Remote or local: the rules by numbers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.disagg import RELEARN_S, Facts, Measured, Mode, Pace, Paces, StaticRule, Tried, Why, decide

BYTES_A_TOKEN = 100_000


def facts(prompt: int, cached_at_decode: int = 0, **others: int) -> Facts:
    return Facts(prompt, cached_at_decode, carried=max(0, prompt - cached_at_decode) * BYTES_A_TOKEN, **others)


def measured(*, prefill_s: float = 1e-4, link_s: float = 1e-9, local_s: float | None = 1e-4, now: float = 0.0) -> Measured:
    """Paces learned from amounts of two sizes, per token or byte."""
    paces = {"prefill": Pace(), "link": Pace(), "local": Pace()}
    for name, per_unit, unit in (("prefill", prefill_s, 1), ("link", link_s, BYTES_A_TOKEN), ("local", local_s, 1)):
        if per_unit is not None:
            for tokens in (1000, 5000):
                paces[name].took(tokens * unit, tokens * unit * per_unit, now)
    return Measured(paces["prefill"], paces["link"], paces["local"])


@pytest.mark.parametrize(
    ("prompt", "cached", "remote"),
    [
        (2047, 0, True),  # all of it is new
        (10_000, 7953, False),  # 2,047 tokens, a fifth
        (10_000, 7952, True),  # 2,048
        (1000, 301, False),  # 0.699
        (1000, 300, True),  # 0.7
        (1000, 1000, False),
        (0, 0, False),
    ],
)
def test_static_is_dynamos_rule(prompt: int, cached: int, remote: bool) -> None:
    split = decide(Mode.STATIC, StaticRule(), Facts(prompt, cached), measured(), 0.0)
    assert (split.remote, split.why) == (remote, Why.LONG if remote else Why.SHORT)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_always_and_never_need_no_numbers(prompt: int, cached: int) -> None:
    nothing = Measured(Pace(), Pace(), Pace())
    assert decide(Mode.ALWAYS, StaticRule(), Facts(prompt, cached), nothing, 0.0).remote
    assert not decide(Mode.NEVER, StaticRule(), Facts(prompt, cached), nothing, 0.0).remote


def test_measured_takes_the_faster_way_and_says_both_numbers() -> None:
    slow_link = measured(link_s=1e-8)  # 100 MB/s: 1 ms a token, ten times what computing it takes
    split = decide(Mode.MEASURED, StaticRule(), facts(4000), slow_link, 0.0)
    assert split.why is Why.SLOWER
    assert [split.remote_s, split.local_s] == pytest.approx([4.4, 0.4])

    fast_link = measured(link_s=1e-11)
    split = decide(Mode.MEASURED, StaticRule(), facts(4000, decoding=3), fast_link, 0.0)
    assert split.why is Why.FASTER
    assert [split.remote_s, split.local_s] == pytest.approx([0.404, 1.6])


def test_what_counts_besides_the_prompt() -> None:
    paces = measured(link_s=1e-11)
    alone = paces.split(facts(4000, decoding=1), 0.0)
    assert alone.why is Why.FASTER
    queued = paces.split(facts(4000, decoding=1, queued_at_prefill=8000), 0.0)
    assert queued.why is Why.SLOWER
    cached_there = paces.split(facts(4000, cached_at_prefill=3900), 0.0)
    assert cached_there.why is Why.FASTER
    cached_here = paces.split(facts(4000, cached_at_decode=3999, queued_at_prefill=100), 0.0)
    assert cached_here.why is Why.SLOWER


def test_a_way_that_has_not_been_tried_is_tried() -> None:
    assert Measured(Pace(), Pace(), Pace()).split(facts(4000), 0.0).why is Why.UNMEASURED
    assert Measured(Pace(), Pace(), Pace(), Tried(at=0.0)).split(facts(4000), 1.0).why is Why.BEING_MEASURED
    assert Measured(Pace(), Pace(), Pace(), Tried(at=0.0)).split(facts(4000), 1.0 + RELEARN_S).why is Why.UNMEASURED


def test_a_slow_way_is_tried_again_after_a_while() -> None:
    """When others have waited twenty times as long in the faster one."""
    paces = msgspec.structs.replace(measured(link_s=1e-8, now=100.0), tried=Tried(waited_s=100.0))
    assert paces.split(facts(4000), 100.0 + RELEARN_S).why is Why.SLOWER
    assert paces.split(facts(4000), 100.1 + RELEARN_S).why is Why.UNMEASURED
    for tried in (Tried(waited_s=50.0), Tried(at=101.0, waited_s=100.0)):
        assert msgspec.structs.replace(paces, tried=tried).split(facts(4000), 100.1 + RELEARN_S).why is Why.SLOWER


def test_a_prompt_longer_than_any_that_was_handed_over_is_tried() -> None:
    paces = measured(link_s=1e-8)
    assert paces.split(facts(10_000), 1.0).why is Why.SLOWER
    assert paces.split(facts(10_001), 1.0).why is Why.UNMEASURED
    assert msgspec.structs.replace(paces, tried=Tried(at=0.5)).split(facts(10_001), 1.0).why is Why.SLOWER, "one at a time"


def test_what_is_under_way_for_long_tells_before_it_has_come() -> None:
    paces = measured(link_s=1e-11)
    assert paces.split(facts(4000, decoding=3), 0.0).why is Why.FASTER
    assert msgspec.structs.replace(paces, overdue_s=1.7).split(facts(4000, decoding=3), 0.0).why is Why.SLOWER


def test_what_was_seen_long_ago_gives_way_and_what_is_only_rough_too() -> None:
    pace = Pace()
    pace.took(1000, 9.0, 0.0)
    pace.took(1000, 1.0, 0.1 + RELEARN_S)
    assert pace.seconds(1000) == pytest.approx(1.0)
    pace.took(1000, 5.0, RELEARN_S, rough=True)
    assert pace.seconds(1000) == pytest.approx(1.0), "better is known"
    pace.took(1000, 5.0, 0.2 + 2 * RELEARN_S, rough=True)
    assert pace.seconds(1000) == pytest.approx(5.0)
    pace.took(1000, 2.0, 0.3 + 2 * RELEARN_S)
    assert pace.seconds(1000) == pytest.approx(2.0)


def test_a_long_prompt_is_not_forgotten_over_short_ones() -> None:
    pace = Pace()
    pace.took(4000, 1.0, 0.0)
    for number in range(1000):
        pace.took(16, 0.01, number * 0.01)
    assert pace.seconds(4000) == pytest.approx(1.0)
    assert pace.seconds(16) == pytest.approx(0.01)


def test_without_a_local_measurement_prefill_stands_in() -> None:
    split = measured(local_s=None, link_s=1e-8).split(facts(4000), 0.0)
    assert split.why is Why.SLOWER
    assert split.local_s == pytest.approx(0.4)


@given(st.floats(0, 10), st.floats(1e-9, 1e-2), st.lists(st.integers(1, 10**6), min_size=2, max_size=30, unique=True))
def test_a_pace_finds_the_line_it_was_shown(fixed: float, per_unit: float, amounts: list[int]) -> None:
    pace = Pace()
    for amount in amounts:
        pace.took(amount, fixed + per_unit * amount, 0.0)
    for amount in amounts:
        wanted = fixed + per_unit * amount
        spread = max(amounts) > 2 * min(amounts)
        assert not spread or pace.seconds(amount) == pytest.approx(wanted, rel=0.05, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 100)), max_size=30), st.integers(0, 10**6))
def test_a_pace_never_expects_less_than_nothing(seen: list[tuple[int, float]], amount: int) -> None:
    pace = Pace()
    for tokens, seconds in seen:
        pace.took(tokens, seconds, 0.0)
    assert pace.seconds(amount) >= 0
    assert 0 <= pace.rise(amount) <= pace.seconds(amount)


def test_a_pace_follows_a_link_that_changes() -> None:
    pace = Pace()
    for _ in range(50):
        pace.took(1000, 1.0, 0.0)
    for _ in range(50):
        pace.took(1000, 0.1, 1.0)
    assert pace.seconds(1000) == pytest.approx(0.1, rel=0.8)
    assert pace.latest_at == 1.0


def test_what_is_not_known_of_one_is_taken_from_all() -> None:
    paces = Paces()
    paces.took("a", 1000, 1.0, 0.0)
    assert paces.of("b").seconds(1000) == pytest.approx(1.0)
    paces.took("b", 1000, 9.0, 0.0)
    assert paces.of("a").seconds(1000) == pytest.approx(1.0)
    paces.forget(lambda key: key == "a")
    assert paces.of("a").seconds(1000) > 1.0
