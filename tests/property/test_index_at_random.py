"""The prefix index against sets of keys, through long random lives: keys that are removed all over, slots that are dropped in mid-sweep."""

from __future__ import annotations

import random

import pytest

from engines.blocks import pack_keys
from router.index import PrefixIndex

STEPS = 220


class Life:
    """One index and what it should hold."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.index = PrefixIndex()
        self.held: dict[int, set[int]] = {self.index.add_slot(): set() for _ in range(self.rng.choice([1, 2, 3, 10]))}
        self._branches = self.rng.choice([1, 2, 3])
        self._longest = self.rng.choice([6, 20, 200])

    def prompt(self) -> list[int]:
        """Mostly along one chain, from which it may turn off anywhere."""
        turns: list[int] = []
        keys = []
        for _ in range(self.rng.randint(1, self._longest)):
            turns.append(self.rng.randrange(self._branches) if self.rng.random() < 0.1 else 0)
            keys.append(hash(tuple(turns)) & (2**64 - 1))
        return keys

    def step(self) -> None:
        slot = self.rng.choice(list(self.held))
        what = self.rng.random()
        if what < 0.5:
            self.store(slot)
        elif what < 0.8:
            self.remove(slot)
        elif what < 0.83:
            self.drop(slot)
        elif what < 0.86:
            self.index.sweep(self.rng.randint(1, 60))

    def store(self, slot: int) -> None:
        keys = self.prompt()
        keys = keys[self.rng.randrange(len(keys)) if self.rng.random() < 0.3 else 0 :]
        chain: list[int] = []
        for key in [*keys, None]:
            if key is not None and key not in self.held[slot]:
                chain.append(key)
            elif chain:
                assert self.index.store(slot, pack_keys(chain)) == len(chain)
                self.held[slot].update(chain)
                chain = []

    def remove(self, slot: int) -> None:
        held = self.held[slot]
        if self.rng.random() < 0.4:
            keys = self.prompt()
            keys = (keys[::-1] if self.rng.random() < 0.7 else keys)[: self.rng.randint(1, len(keys))]
        else:
            keys = self.rng.sample(sorted(held), min(len(held), self.rng.randint(1, 8)))
        assert self.index.remove(slot, pack_keys(keys)) == len(held.intersection(keys))
        held.difference_update(keys)

    def drop(self, slot: int) -> None:
        self.index.drop_slot(slot)
        del self.held[slot]
        while self.rng.random() < 0.3 and not self.index.swept:
            self.index.sweep(50)
        self.held[self.index.add_slot()] = set()

    def check(self) -> None:
        keys = self.prompt()
        wanted = {slot: depth for slot, held in self.held.items() if (depth := _depth(held, keys))}
        assert self.index.match(keys) == wanted
        slot, start = self.rng.choice(list(self.held)), self.rng.randrange(len(keys))
        assert self.index.extent(slot, keys, start) == _depth(self.held[slot], keys[start:])


def _depth(held: set[int], keys: list[int]) -> int:
    return next((depth for depth, key in enumerate(keys) if key not in held), len(keys))


@pytest.mark.parametrize("seed", range(40))
def test_after_every_step_the_answers_are_those_of_sets(seed: int) -> None:
    life = Life(seed)
    for number in range(STEPS):
        life.step()
        life.check()
        if number % 20 == 0:
            life.index._check()
    life.index._check()
