import doctest
import random

import pytest

from engines.blocks import pack_keys
from router import index as module
from router.index import PrefixIndex
from tests.choosing import chain


def filled(*holdings: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for keys in holdings:
        index.store(index.add_slot(), pack_keys(keys))
    return index


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted > 20
    assert results.failed == 0


@pytest.mark.parametrize(
    ("holdings", "keys", "depths"),
    [
        ([[1, 2, 3]], [1, 2, 3], {0: 3}),
        ([[1, 2, 3]], [1, 2, 3, 4], {0: 3}),
        ([[1, 2, 3]], [1, 9, 3], {0: 1}),
        ([[1, 2, 3]], [9, 2, 3], {}),
        ([[1, 2, 3]], [], {}),
        ([[], [1]], [1, 2], {1: 1}),
        ([[1, 2, 3], [1, 2, 3, 4, 5], [1]], [1, 2, 3, 4, 5, 6], {0: 3, 1: 5, 2: 1}),
        ([[1, 2, 4, 5]], [1, 2, 3, 4, 5], {0: 2}),
        ([[2, 3], [1]], [1, 2, 3], {1: 1}),
        ([list(range(500))], list(range(600)), {0: 500}),
    ],
)
def test_a_match_ends_where_a_slot_first_lacks_a_block(holdings: list[list[int]], keys: list[int], depths: dict[int, int]) -> None:
    assert filled(*holdings).match(keys) == depths


@pytest.mark.parametrize("hole", [0, 1, 63, 64, 127, 128, 200, 254, 255])
def test_a_block_evicted_out_of_the_middle_ends_the_match_there_however_much_deeper_ones_remain(hole: int) -> None:
    keys = chain(1, 256)
    index = filled(keys, keys)
    index.remove(0, pack_keys([keys[hole]]))
    assert index.match(keys) == {slot: depth for slot, depth in {0: hole, 1: 256}.items() if depth}
    index.store(0, pack_keys([keys[hole]]))
    assert index.match(keys) == {0: 256, 1: 256}
    index._check()


def test_256_slots_that_end_at_256_depths_are_all_told_apart() -> None:
    keys = chain(1, 300)
    index = filled(*(keys[: slot + 1] for slot in range(256)))
    assert index.match(keys) == {slot: slot + 1 for slot in range(256)}
    index._check()


def test_the_list_that_was_stored_stays_the_callers() -> None:
    keys = chain(1, 10)
    index = filled(keys)
    keys.clear()
    assert index.match(chain(1, 10)) == {0: 10}
    index._check()


def test_a_dropped_slot_is_out_of_all_answers_at_once() -> None:
    index = filled([1, 2, 3, 4, 5], [1, 2])
    index.drop_slot(0)
    assert index.match([1, 2, 3, 4, 5]) == {1: 2}
    assert index.extent(0, [1, 2], 0) == 0
    for use in (
        lambda: index.store(0, pack_keys([1])),
        lambda: index.remove(0, pack_keys([1])),
        lambda: index.size(0),
        lambda: index.drop_slot(0),
    ):
        with pytest.raises(KeyError):
            use()


def test_a_slots_number_is_used_again_only_after_its_last_entry_is_gone() -> None:
    index = filled([], [])
    for slot in (0, 1):
        for key in chain(slot + 1, 40):
            index.store(slot, pack_keys([key]))
    index.drop_slot(0)
    assert index.add_slot() == 2
    assert index.sweep(50) == 50
    assert index.add_slot() == 3, "the sweep has not ended"
    assert index.sweep(50) == 30
    assert index.swept
    assert index.add_slot() == 0
    assert index.match(chain(1, 40)) == {}
    assert len(index) == 40
    index._check()


def test_a_slot_dropped_during_a_sweep_has_a_sweep_of_its_own() -> None:
    index = filled(chain(1, 10), chain(2, 10))
    index.drop_slot(0)
    index.sweep(15)
    index.drop_slot(1)
    while index.sweep(7) == 7:
        index._check()
    assert len(index) == 0
    assert index.add_slot() == 0
    assert index.add_slot() == 1


def test_nothing_is_listed_and_nothing_visited_while_no_slot_was_dropped() -> None:
    assert filled(chain(1, 1000)).sweep(100) == 0


def test_new_blocks_beyond_the_bound_are_refused_and_counted_and_known_ones_are_not() -> None:
    index = PrefixIndex(max_blocks=6)
    first, second = index.add_slot(), index.add_slot()
    assert index.store(first, pack_keys(chain(1, 10))) == 6
    assert index.refused == 4
    assert index.store(second, pack_keys(chain(1, 10))) == 6
    assert index.refused == 8
    assert index.match(chain(1, 10)) == {first: 6, second: 6}
    index.remove(first, pack_keys(chain(1, 10)))
    index.remove(second, pack_keys(chain(1, 10)))
    assert index.store(second, pack_keys(chain(2, 3))) == 3
    index._check()


def test_M3_a_long_prefix_with_ten_thousand_branches_churned_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    base = chain(0, 400)
    keeper = index.add_slot()
    index.store(keeper, pack_keys(base))
    sizes = []
    for branch in range(1, 10_001):
        slot = index.add_slot()
        index.store(slot, pack_keys(base[: branch % 400] + chain(branch, 8)))
        if branch % 2:
            index.remove(slot, pack_keys([*base, *chain(branch, 8)]))
        index.drop_slot(slot)
        while index.sweep(1000) == 1000:
            pass
        if branch % 5000 == 0:
            sizes.append(index.memory_bytes())
    assert len(index) == 400
    assert index.match(base) == {keeper: 400}
    assert sizes[1] <= 1.1 * sizes[0]
    index._check()


def test_engines_that_evict_tail_first_under_pressure_are_followed_exactly() -> None:
    rng = random.Random(5)
    index = PrefixIndex()
    model: dict[int, dict[int, None]] = {index.add_slot(): {} for _ in range(8)}
    prompts = [chain(0, 20) + chain(10 + family % 5, 40) + chain(100 + family, 60) for family in range(30)]
    for _ in range(600):
        slot = rng.randrange(8)
        keys = rng.choice(prompts)[: rng.randrange(1, 120)]
        for key in reversed(keys):
            model[slot].pop(key, None)
            model[slot][key] = None
        index.store(slot, pack_keys(keys))
        while len(model[slot]) > 400:
            oldest = next(iter(model[slot]))
            del model[slot][oldest]
            index.remove(slot, pack_keys([oldest]))
    for keys in prompts:
        expected = {}
        for slot, held in model.items():
            depth = next((depth for depth, key in enumerate(keys) if key not in held), len(keys))
            if depth:
                expected[slot] = depth
        assert index.match(keys) == expected
    index._check()


def test_the_memory_of_those_who_left_is_given_back() -> None:
    index = PrefixIndex()
    empty = index.memory_bytes()
    rng = random.Random(3)
    for _ in range(3):
        slot = index.add_slot()
        index.store(slot, pack_keys([rng.getrandbits(64) for _ in range(10_000)]))
    assert index.memory_bytes() > 10 * empty
    for slot in range(3):
        index.drop_slot(slot)
    while index.sweep(500) == 500:
        pass
    assert len(index) == 0
    assert index.memory_bytes() <= 2 * empty
    index._check()


def test_a_slice_of_a_sweep_frees_no_more_than_it_may() -> None:
    index = PrefixIndex()
    slot = index.add_slot()
    rng = random.Random(4)
    for _ in range(200):
        index.store(slot, pack_keys([rng.getrandbits(64) for _ in range(128)]))
    index.drop_slot(slot)
    while not index.swept:
        before = len(index)
        index.sweep(100)
        assert before - len(index) <= 100 + 128, "a run is freed whole, and no more"
