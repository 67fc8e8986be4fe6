import doctest
import random
from collections import OrderedDict

import pytest

from router import predicted as module
from router.predicted import ASSUMED_BLOCKS, MOST_GROWTH, PredictedBlocks
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


class Cache:
    """What an engine keeps: the blocks used last on the device, and a copy of each in a tier behind it."""

    def __init__(self, device: int, host: int = 0, generates: int = 0) -> None:
        self.tiers = [OrderedDict[int, None]() for _ in range(2)]
        self.sizes = [device, host]
        self.generates = generates
        self.rng = random.Random(7)

    def serve(self, keys: list[int]) -> int:
        """Compute a prompt, and up to `generates` blocks behind it that nobody asks for; how many of its leading blocks were there."""
        found = next((depth for depth, key in enumerate(keys) if not any(key in tier for tier in self.tiers)), len(keys))
        generated = [self.rng.getrandbits(64) for _ in range(self.rng.randint(0, self.generates))]
        for tier, size in zip(self.tiers, self.sizes, strict=True):
            for key in reversed(keys + generated):
                tier[key] = None
                tier.move_to_end(key)
            while len(tier) > size:
                tier.popitem(last=False)
        return found


def calibrated(predicted: PredictedBlocks, slot: int, cache: Cache, requests: int, *, seed: int = 1) -> float:
    """How far predictions are from reports, as a part of the latter, over the second half of conversations that take turns and die out."""
    rng = random.Random(seed)
    lengths = {0: 8}
    wrong = reported = 0
    for number in range(requests):
        if rng.random() < 0.1:
            lengths[max(lengths) + 1] = rng.randint(1, 12)
        name = max(lengths) - min(int(rng.expovariate(1 / 15)), len(lengths) - 1)
        lengths[name] = min(60, lengths[name] + rng.randint(0, 3))
        keys = chain(name, lengths[name])
        trail = predicted.trail(slot, keys)
        predicted.sent(slot, keys, now=float(number))
        found = cache.serve(keys)
        predicted.found(slot, keys, trail, found)
        if number >= requests // 2:
            wrong += abs((trail[-1][0] if trail else 0) - found)
            reported += found
    return wrong / max(1, reported)


@pytest.mark.parametrize("seed", range(3))
def test_R32_with_a_tier_ten_times_the_device_s_predictions_are_within_a_tenth_of_reports(seed: int) -> None:
    predicted = PredictedBlocks(ttl_s=1e9)
    slot = predicted.add_slot(total_blocks=640)
    assert calibrated(predicted, slot, Cache(64, host=640), 4000, seed=seed) < 0.01


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("generates", [0, 6])
def test_R32_a_tier_that_the_engine_says_nothing_of_is_learned_from_its_reports(seed: int, generates: int) -> None:
    predicted = PredictedBlocks(ttl_s=1e9)
    slot = predicted.add_slot(total_blocks=64)
    assert calibrated(predicted, slot, Cache(64, 640, generates), 4000, seed=seed) < 0.1


@pytest.mark.parametrize("size", [20, 160, 640])
def test_a_cache_smaller_than_it_says_is_learned_too(size: int) -> None:
    predicted = PredictedBlocks(ttl_s=1e9)
    slot = predicted.add_slot(total_blocks=640)
    assert calibrated(predicted, slot, Cache(size), 4000) < 0.1


def test_an_engine_that_reports_nothing_for_what_it_has_just_computed_is_predicted_nothing() -> None:
    predicted = PredictedBlocks()
    slot = predicted.add_slot(total_blocks=100)
    for name in range(3):
        predicted.sent(slot, chain(name, 10), now=float(name))
    trail = predicted.trail(slot, chain(2, 10))
    predicted.sent(slot, chain(2, 10), now=3.0)
    predicted.found(slot, chain(2, 10), trail, 0)
    assert predicted.size(slot) == 0
    predicted.sent(slot, chain(4, 10), now=4.0)
    assert predicted.size(slot) == 0
    predicted.found(slot, chain(4, 10), (), 10)
    predicted.sent(slot, chain(4, 10), now=5.0)
    assert predicted.match(chain(4, 10)) == {slot: 10}
    predicted._check()


def test_what_was_used_after_what_is_gone_is_believed_on() -> None:
    predicted = PredictedBlocks()
    slot = predicted.add_slot(total_blocks=100)
    for name in range(4):
        predicted.sent(slot, chain(name, 10), now=float(name))
    trail = predicted.trail(slot, chain(1, 10))
    predicted.sent(slot, chain(1, 10), now=5.0)
    predicted.found(slot, chain(1, 10), trail, 4)
    assert [predicted.match(chain(name, 10)).get(slot, 0) for name in range(4)] == [0, 10, 4, 10]
    predicted._check()


def test_no_report_makes_a_memory_without_bounds() -> None:
    predicted = PredictedBlocks()
    slot = predicted.add_slot(total_blocks=10)
    for name in range(1000):
        predicted.sent(slot, chain(name, 10), now=float(name))
        predicted.found(slot, chain(name, 10), (), 10)
    assert predicted.size(slot) == 10 * MOST_GROWTH
