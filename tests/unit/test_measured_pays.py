"""`--disagg measured` follows the better of `always` and `never`, whatever the link and whether or not answers are streamed: in virtual time.

What is better is what all clients wait, together: long prompts for their first tokens, running streams for their next ones.
"""

from __future__ import annotations

from statistics import fmean, median

import pytest

from router.disagg import RELEARN_SHARE, Mode
from tests.virtual_pair import Felt, Load, VirtualPair

FAST, SLOW = 10e9, 100e6
LONG = Load(seconds=10, prompt_tokens=4000, every_s=0.5)
SHORT = Load(seconds=30, prompt_tokens=1000, every_s=2.0)
LEARNING = 10.0
"""Seconds that do not count."""
AS_GOOD = 1.1


def felt(mode: Mode, link: float, load: Load) -> Felt:
    pair = VirtualPair(mode, link)
    pair.run(load._replace(seconds=LEARNING))
    return pair.run(load)


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def cost(felt: Felt, load: Load) -> float:
    """Seconds, in each, that clients wait for first tokens, and for further ones beyond their usual step."""
    usual = sorted(felt.gaps)[len(felt.gaps) // 2]
    return (sum(felt.waits) + sum(felt.starts) + sum(gap - usual for gap in felt.gaps if gap > 2 * usual)) / load.seconds


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize(("link", "load"), [(FAST, LONG), (SLOW, SHORT)], ids=["fast", "slow"])
def test_measured_costs_no_more_than_the_better_of_always_and_never(link: float, load: Load, whole: bool) -> None:
    load = load._replace(whole=whole)
    always, measured, never = (felt(mode, link, load) for mode in (Mode.ALWAYS, Mode.MEASURED, Mode.NEVER))
    costs = [cost(one, load) for one in (always, measured, never)]
    better, worse = sorted((costs[0], costs[2]))
    assert costs[1] <= AS_GOOD * better
    assert worse > 2 * better, "it matters"
    if link == FAST:
        assert p99(never.gaps) > 10 * p99(always.gaps)
        assert p99(measured.gaps) < 1.2 * p99(always.gaps)  # a sixth more, 0.7 ms, where a short prompt is computed here
        assert fmean(measured.gaps) < AS_GOOD * fmean(always.gaps)
        assert fmean(measured.waits) < AS_GOOD * fmean(always.waits)
    else:
        assert median(always.waits) > 10 * median(never.waits)
        assert median(measured.waits) < AS_GOOD * median(never.waits)
        assert fmean(measured.gaps) < AS_GOOD * fmean(never.gaps)


def test_a_link_that_recovers_is_found_at_a_twentieth_of_the_waiting() -> None:
    load = Load(seconds=300, prompt_tokens=4000, every_s=1.0, streams=0)
    pair = VirtualPair(Mode.MEASURED, SLOW * 4)
    slow = pair.run(load)
    tries = [wait for wait, remote in zip(slow.waits, slow.remote, strict=True) if remote]
    rest = [wait for wait, remote in zip(slow.waits, slow.remote, strict=True) if not remote]
    assert len(tries) > 1, "it looks again"
    assert sum(tries[1:]) <= 2 * RELEARN_SHARE * sum(rest)
    pair.link_bytes_per_s = FAST
    assert all(pair.run(load._replace(seconds=160, streams=2)).remote[-10:])


def test_a_link_that_breaks_down_is_left_before_the_first_transfer_is_through() -> None:
    load = Load(seconds=30, prompt_tokens=4000, every_s=1.0)
    pair = VirtualPair(Mode.MEASURED, FAST)
    assert pair.run(load).remote[-10:] == [True] * 10
    pair.link_bytes_per_s = SLOW / 2
    broken = pair.run(load)
    assert max(broken.waits) > 10
    assert sum(broken.remote) <= 3
