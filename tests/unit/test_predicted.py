import doctest

import pytest

from router import predicted as module
from router.predicted import ASSUMED_BLOCKS, PredictedBlocks
from tests.choosing import chain


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted > 5
    assert results.failed == 0


def test_what_was_sent_is_believed_for_the_ttl_after_its_last_use() -> None:
    predicted = PredictedBlocks(ttl_s=10.0)
    slot = predicted.add_slot()
    predicted.sent(slot, chain(1, 4), now=0.0)
    predicted.sent(slot, chain(1, 2), now=6.0)
    assert predicted.expire(now=9.9) == 0
    assert predicted.expire(now=10.0) == 2
    assert predicted.match(chain(1, 4)) == {slot: 2}
    assert predicted.expire(now=16.0) == 2
    assert len(predicted) == 0


def test_the_longest_unused_is_given_up_first_and_the_tail_of_a_prompt_before_its_head() -> None:
    predicted = PredictedBlocks()
    slot = predicted.add_slot(total_blocks=10)
    predicted.sent(slot, chain(1, 4), now=0.0)
    predicted.sent(slot, chain(2, 4), now=1.0)
    predicted.sent(slot, chain(1, 3), now=2.0)
    predicted.sent(slot, chain(3, 5), now=3.0)
    assert predicted.match(chain(1, 4)) == {slot: 3}
    assert predicted.match(chain(2, 4)) == {slot: 2}
    assert predicted.match(chain(3, 5)) == {slot: 5}
    predicted._check()


@pytest.mark.parametrize(("total", "kept"), [(0, 0), (1, 1), (50, 50), (None, 100)])
def test_a_prompt_longer_than_the_cache_keeps_its_head(total: int | None, kept: int) -> None:
    predicted = PredictedBlocks()
    slot = predicted.add_slot(total)
    predicted.sent(slot, chain(1, 100), now=0.0)
    assert predicted.match(chain(1, 100)) == ({slot: kept} if kept else {})
    predicted._check()


def test_M1_a_million_blocks_sent_hold_no_more_than_the_engine_has() -> None:
    predicted = PredictedBlocks()
    slot = predicted.add_slot()
    for name in range(2000):
        predicted.sent(slot, chain(name, 500), now=0.0)
    assert predicted.size(slot) == ASSUMED_BLOCKS
    assert len(predicted) == ASSUMED_BLOCKS
    assert predicted.memory_bytes() < 100 * ASSUMED_BLOCKS
    predicted._check()


def test_expiry_can_be_done_in_slices() -> None:
    predicted = PredictedBlocks(ttl_s=1.0)
    slots = [predicted.add_slot() for _ in range(3)]
    for slot in slots:
        predicted.sent(slot, chain(1, 5), now=0.0)
    assert [predicted.expire(5.0, limit=7) for _ in range(4)] == [7, 7, 1, 0]
    predicted._check()


def test_a_dropped_slot_is_forgotten() -> None:
    predicted = PredictedBlocks()
    slot = predicted.add_slot()
    predicted.sent(slot, chain(1, 5), now=0.0)
    predicted.drop_slot(slot)
    assert predicted.match(chain(1, 5)) == {}
    assert len(predicted) == 0
    assert predicted.add_slot() == slot
    assert predicted.match(chain(1, 5)) == {}
