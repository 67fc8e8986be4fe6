import doctest

import pytest

from engines.blocks import pack_keys
from engines.types import Endpoint, Tier
from router import caches as module
from router.caches import Caches
from router.scheduling.types import Overlap
from tests.choosing import chain, endpoint

A, B = endpoint("a"), endpoint("b")
PROMPT = chain(1, 10)


def caches(*endpoints: Endpoint) -> Caches:
    made = Caches()
    for end in endpoints:
        made.add(end, total_blocks=100)
    return made


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted > 10
    assert results.failed == 0


@pytest.mark.parametrize(
    ("device", "host", "disk", "in_flight", "overlap"),
    [
        (range(0), range(0), range(0), 0, Overlap()),
        (range(3), range(0), range(0), 0, Overlap(device=3, in_flight=3)),
        (range(3), range(3, 5), range(5, 6), 0, Overlap(device=3, host=2, disk=1, in_flight=3)),
        (range(3), range(6), range(8), 0, Overlap(device=3, host=3, disk=2, in_flight=3)),
        (range(3), range(4, 6), range(0), 0, Overlap(device=3, in_flight=3)),
        (range(0), range(5), range(0), 0, Overlap(host=5)),
        (range(0), range(0), range(5), 0, Overlap(disk=5)),
        (range(3), range(0), range(3, 5), 0, Overlap(device=3, disk=2, in_flight=3)),
        (range(1, 9), range(0), range(0), 0, Overlap()),
        (range(3), range(0), range(0), 2, Overlap(device=3, in_flight=3)),
        (range(3), range(0), range(0), 7, Overlap(device=3, in_flight=7)),
        (range(0), range(0), range(0), 10, Overlap(in_flight=10)),
        ([0, 1, 4, 5, 6], range(0), range(0), 4, Overlap(device=2, in_flight=7)),
        (range(2), range(2, 6), range(0), 4, Overlap(device=2, host=4, in_flight=4)),
    ],
)
def test_a_block_counts_once_in_its_fastest_tier(
    device: range | list[int], host: range, disk: range, in_flight: int, overlap: Overlap
) -> None:
    held = caches(A)
    for tier, depths in zip(Tier, (device, host, disk), strict=True):
        held.store(A, tier, [pack_keys([PROMPT[depth]]) for depth in depths])
    assert held.overlaps(PROMPT, [A], (), {A: in_flight} if in_flight else {}) == {A: overlap}


def test_an_endpoint_that_is_not_believed_is_answered_for_from_what_was_sent_there() -> None:
    held = caches(A, B)
    held.store(A, Tier.DEVICE, [pack_keys(PROMPT)])
    held.sent(A, PROMPT[:4], now=0.0)
    held.sent(B, PROMPT[:2], now=0.0)
    assert held.overlaps(PROMPT, [B], [A], {A: 6}) == {A: Overlap(device=4, in_flight=6, predicted=True), B: Overlap()}
    held.expire(now=1000.0)
    assert held.overlaps(PROMPT, [], [A]) == {A: Overlap(predicted=True)}


def test_R4_what_was_sent_while_events_were_live_is_known_when_they_die() -> None:
    held = caches(A)
    held.store(A, Tier.DEVICE, [pack_keys(PROMPT)])
    held.sent(A, PROMPT, now=0.0)
    assert held.overlaps(PROMPT, [A])[A] == Overlap(device=10, in_flight=10)
    assert held.overlaps(PROMPT, [], [A])[A] == Overlap(device=10, in_flight=10, predicted=True)


def test_R7_after_a_restart_nothing_old_survives_neither_events_nor_predictions() -> None:
    held = caches(A, B)
    for end in (A, B):
        held.store(end, Tier.DEVICE, [pack_keys(PROMPT)])
        held.store(end, Tier.HOST, [pack_keys(PROMPT)])
        held.sent(end, PROMPT, now=0.0)
    held.restart(A)
    assert held.overlaps(PROMPT, [A, B]) == {A: Overlap(), B: Overlap(device=10, in_flight=10)}
    assert held.overlaps(PROMPT, [], [A]) == {A: Overlap(predicted=True)}
    held.store(A, Tier.DEVICE, [pack_keys(PROMPT[:2])])
    assert held.overlaps(PROMPT, [A])[A] == Overlap(device=2, in_flight=2)
    held._check()


def test_clear_forgets_what_events_said_and_keeps_what_was_sent() -> None:
    held = caches(A)
    held.store(A, Tier.DEVICE, [pack_keys(PROMPT)])
    held.sent(A, PROMPT, now=0.0)
    held.clear(A)
    assert held.size(A) == 0
    assert held.predicted_size(A) == 10


def test_R8_events_that_arrive_after_an_endpoint_has_left_are_ignored_and_counted() -> None:
    held = caches(A, B)
    held.store(B, Tier.DEVICE, [pack_keys(PROMPT)])
    held.discard(A)
    for depth in range(50):
        held.store(A, Tier.DEVICE, [pack_keys([depth])])
    held.remove(A, Tier.DEVICE, pack_keys([3]))
    held.clear(A)
    held.restart(A)
    held.sent(A, PROMPT, now=0.0)
    assert held.size(A) == 0
    assert held.ignored == 53
    assert A not in held
    assert held.overlaps(PROMPT, [A], (), {A: 2}) == {A: Overlap(in_flight=2)}
    assert held.size(B) == 10
    held.discard(A)


def test_R8_an_endpoint_that_comes_back_starts_empty_before_and_after_the_sweep() -> None:
    held = caches(A)
    for tier in Tier:
        held.store(A, tier, [pack_keys(PROMPT)])
    held.sent(A, PROMPT, now=0.0)
    held.discard(A)
    held.add(A)
    assert held.overlaps(PROMPT, [A]) == {A: Overlap()}
    while held.sweep(3) == 3:
        held._check()
    assert len(held) == 0
    assert held.overlaps(PROMPT, [A]) == {A: Overlap()}
    assert held.overlaps(PROMPT, [], [A]) == {A: Overlap(predicted=True)}


def test_R29_a_block_that_one_rank_drops_is_still_held_by_the_other() -> None:
    ranks = [endpoint("a", 0), endpoint("a", 1)]
    held = caches(*ranks)
    for rank in ranks:
        held.store(rank, Tier.DEVICE, [pack_keys(PROMPT)])
    held.remove(ranks[1], Tier.DEVICE, pack_keys(PROMPT))
    assert held.overlaps(PROMPT, ranks) == {ranks[0]: Overlap(device=10, in_flight=10), ranks[1]: Overlap()}


def test_adding_an_endpoint_again_keeps_what_it_holds() -> None:
    held = caches(A)
    held.store(A, Tier.DEVICE, [pack_keys(PROMPT)])
    held.add(A, total_blocks=5)
    assert held.size(A) == 10


def test_a_bound_refuses_and_counts_and_leaves_the_head_of_the_prompt_known() -> None:
    held = Caches(max_blocks=4)
    held.add(A)
    held.store(A, Tier.DEVICE, [pack_keys(PROMPT)])
    assert held.refused == 6
    assert held.overlaps(PROMPT, [A])[A].device == 4
    assert held.memory_bytes() > 0
