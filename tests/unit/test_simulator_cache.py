"""The block cache: tail-first eviction, pinned blocks, names held more than once, and an account of every change."""

from __future__ import annotations

import random
from collections import Counter

from engines.simulator.cache import BlockCache, Cleared, Removed, Stored


def stored(cache: BlockCache, names: list[int], parent: int | None = None) -> list[int]:
    """Blocks taken, named and still in use."""
    blocks = cache.take(len(names))
    cache.store(blocks, run(cache, names, parent))
    return blocks


def run(cache: BlockCache, names: list[int], parent: int | None = None) -> Stored:
    return Stored(tuple(names), parent, tuple(range(len(names) * cache.block_size)))


def test_a_chain_loses_its_deepest_block_first() -> None:
    cache = BlockCache(4, 2)
    cache.release(stored(cache, [1, 2, 3, 4]))
    cache.take_changes()
    cache.take(2)
    assert cache.take_changes() == [Removed(4), Removed(3)]
    assert cache.match([1, 2, 3, 4]) == cache.match([1, 2])
    assert len(cache.match([1, 2, 3, 4])) == 2


def test_the_longest_unused_chain_goes_first_and_a_hit_renews_it() -> None:
    cache = BlockCache(4, 2)
    cache.release(stored(cache, [1, 2]))
    cache.release(stored(cache, [3, 4]))
    hits = cache.match([1, 2])
    cache.hold(hits)
    cache.release(hits)
    cache.take_changes()
    cache.take(2)
    assert cache.take_changes() == [Removed(4), Removed(3)]


def test_nameless_free_blocks_are_taken_before_any_name_is_lost() -> None:
    cache = BlockCache(4, 2)
    cache.release(stored(cache, [1, 2]))
    cache.release(cache.take(2))
    cache.take_changes()
    cache.take(2)
    assert cache.take_changes() == []


def test_blocks_in_use_are_never_taken() -> None:
    cache = BlockCache(4, 2)
    stored(cache, [1, 2, 3])
    assert cache.fits((), 1)
    assert not cache.fits((), 2)
    assert cache.used == 3
    assert not cache.clear()


def test_holding_a_free_hit_leaves_one_block_less_for_others() -> None:
    cache = BlockCache(3, 2)
    cache.release(stored(cache, [1, 2]))
    hits = cache.match([1, 2])
    assert cache.fits(hits, 1)
    assert not cache.fits(hits, 2)


def test_a_name_stored_twice_is_announced_and_removed_twice() -> None:
    cache = BlockCache(2, 2)
    first, second = stored(cache, [7]), stored(cache, [7])
    assert [change.names for change in cache.take_changes() if isinstance(change, Stored)] == [(7,), (7,)]
    cache.release(first)
    cache.release(second)
    cache.take(1)
    assert cache.take_changes() == [Removed(7)]
    assert 7 in cache
    cache.take(1)
    assert cache.take_changes() == [Removed(7)]
    assert 7 not in cache


def test_without_duplicates_a_second_copy_stays_nameless_and_only_what_is_new_is_announced() -> None:
    cache = BlockCache(8, 2, duplicates=False)
    stored(cache, [1, 2])
    cache.take_changes()
    blocks = cache.take(4)
    cache.store(blocks, Stored((1, 2, 3, 4), None, (0, 0, 0, 0, 5, 6, 7, 8)))
    assert cache.take_changes() == [Stored((3, 4), 2, (5, 6, 7, 8))]
    cache._check()


def test_clearing_takes_every_name_away_and_says_so() -> None:
    cache = BlockCache(4, 2)
    cache.release(stored(cache, [1, 2]))
    cache.take_changes()
    assert cache.clear()
    assert cache.take_changes() == [Cleared()]
    assert cache.names == frozenset()
    cache._check()


def test_the_announced_changes_account_for_what_is_held_whatever_happens() -> None:
    for seed in range(20):
        _play(random.Random(seed), duplicates=bool(seed % 2))


def _play(chance: random.Random, *, duplicates: bool) -> None:
    """Many sequences over few prefixes in a small cache, checked after every operation."""
    cache = BlockCache(24, 1, duplicates=duplicates)
    in_use: list[list[int]] = []
    told: Counter[int] = Counter()
    for _ in range(300):
        match chance.random():
            case draw if draw < 0.6:
                family = chance.randrange(4)
                names = [family * 100 + depth for depth in range(chance.randint(1, 8))]
                hits = cache.match(names[:-1])
                if cache.fits(hits, len(names) - len(hits)):
                    cache.hold(hits)
                    fresh = cache.take(len(names) - len(hits))
                    cache.store(fresh, run(cache, names[len(hits) :], names[len(hits) - 1] if hits else None))
                    in_use.append(hits + fresh)
            case draw if draw < 0.98 and in_use:
                cache.release(in_use.pop(chance.randrange(len(in_use))))
            case _:
                cache.clear()
        cache._check()
        for change in cache.take_changes():
            match change:
                case Stored(stored_names):
                    told.update(stored_names)
                case Removed(name):
                    told[name] -= 1
                case Cleared():
                    told.clear()
        assert {name for name, count in told.items() if count} == cache.names
        assert min(told.values(), default=0) >= 0
