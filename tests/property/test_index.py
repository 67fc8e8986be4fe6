"""The prefix index against a model too simple to be wrong: a set of keys per slot."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.blocks import pack_keys
from router.index import PrefixIndex

BRANCHES = {0: 0, 1: 0, 2: 40, 3: 200}
"""A branch → where it leaves branch 0; the first two have no beginning in common."""
LONGEST = 300


def prompt(branch: int, length: int) -> list[int]:
    """The first keys of a branch. A key has one parent, as keys do that are hashes of all that is before them."""
    return [(branch if depth >= BRANCHES[branch] else 0) * 1000 + depth for depth in range(length)]


branches = st.sampled_from(sorted(BRANCHES))
prompts = st.builds(prompt, branches, st.integers(1, LONGEST))
chains = st.builds(
    lambda branch, start, length: prompt(branch, min(LONGEST, start + length))[start:],
    branches,
    st.one_of(st.just(0), st.integers(0, LONGEST - 1)),
    st.integers(1, LONGEST),
)
"""Stretches of a few chains, so that stores overlap, part and join one another's runs, and cross the bound of a run."""
jumbles = st.lists(st.builds(lambda branch, depth: prompt(branch, 45)[depth], branches, st.integers(30, 44)), min_size=1, max_size=12)
"""Any order, repeats included."""
some_keys = st.one_of(chains, jumbles, chains.map(lambda keys: keys[::-1]), chains.map(lambda keys: keys[::2]))


def stretches(keys: list[int]) -> list[list[int]]:
    """The same keys, in chains."""
    found: list[list[int]] = []
    parents = {key: before for branch in BRANCHES for before, key in itertools.pairwise(prompt(branch, LONGEST))}
    for key in keys:
        if found and parents.get(key) == found[-1][-1]:
            found[-1].append(key)
        else:
            found.append([key])
    return found


def naive_match(held: dict[int, set[int]], keys: list[int]) -> dict[int, int]:
    depths = {}
    for slot, mine in held.items():
        depth = 0
        while depth < len(keys) and keys[depth] in mine:
            depth += 1
        if depth:
            depths[slot] = depth
    return depths


class Machine(RuleBasedStateMachine):
    max_blocks: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.max_blocks)
        self.held: dict[int, set[int]] = {}

    def pick(self, choice: int) -> int:
        return sorted(self.held)[choice % len(self.held)]

    @precondition(lambda self: len(self.held) < 70)
    @rule(count=st.sampled_from([1, 1, 1, 2, 40]))
    def add(self, count: int) -> None:
        for _ in range(count):  # that a number is not used again before its sweep has ended, `_check` sees: its bits would count
            slot = self.index.add_slot()
            assert slot not in self.held
            if self.index.swept:
                assert slot == min(set(range(len(self.held) + 1)) - set(self.held)), "not the smallest that is free"
            self.held[slot] = set()

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0), keys=some_keys)
    def store(self, choice: int, keys: list[int]) -> None:
        slot = self.pick(choice)
        for part in stretches([key for key in dict.fromkeys(keys) if key not in self.held[slot]]):
            self._store(slot, part, set(part))

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0), keys=prompts)
    def store_behind_what_is_held(self, choice: int, keys: list[int]) -> None:
        slot = self.pick(choice)
        depth = naive_match({slot: self.held[slot]}, keys).get(slot, 0)
        if self.held[slot].isdisjoint(keys[depth:]):
            self._store(slot, keys, set(keys[depth:]))

    def _store(self, slot: int, keys: list[int], wanted: set[int]) -> None:
        added = self.index.store(slot, pack_keys(keys))
        taken = wanted
        if self.max_blocks is not None and added < len(wanted):
            assert len(self.index) == self.max_blocks, "refused although there was room"
            taken = {key for key in wanted if self.index._holds(slot, key)}
        assert added == len(taken)
        self.held[slot] |= taken

    @precondition(lambda self: self.held)
    @rule(choices=st.lists(st.integers(0), max_size=8), keys=some_keys)
    def store_in_many(self, choices: list[int], keys: list[int]) -> None:
        for choice in choices:
            self.store(choice, keys)

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0), keys=some_keys)
    def remove(self, choice: int, keys: list[int]) -> None:
        slot = self.pick(choice)
        assert self.index.remove(slot, pack_keys(keys)) == len(self.held[slot] & set(keys))
        self.held[slot] -= set(keys)

    @precondition(lambda self: any(self.held.values()))
    @rule(choice=st.integers(0), blocks=st.integers(1, LONGEST), tail_first=st.booleans(), one_by_one=st.booleans())
    def evict(self, choice: int, blocks: int, tail_first: bool, one_by_one: bool) -> None:
        holders = sorted(slot for slot, held in self.held.items() if held)
        slot = holders[choice % len(holders)]
        gone = sorted(self.held[slot], reverse=tail_first)[:blocks]
        for keys in [[key] for key in gone] if one_by_one else [gone]:
            assert self.index.remove(slot, pack_keys(keys)) == len(keys)
        self.held[slot] -= set(gone)

    @precondition(lambda self: len(self.held) > 1)
    @rule(choice=st.integers(0))
    def drop(self, choice: int) -> None:
        slot = self.pick(choice)
        self.index.drop_slot(slot)
        del self.held[slot]

    @rule(limit=st.integers(0, 200))
    def sweep(self, limit: int) -> None:
        visited = self.index.sweep(limit)
        assert visited <= limit
        if visited < limit:
            assert self.index.swept
            assert len(self.index) >= len(set().union(*self.held.values()))

    @rule(keys=prompts, within=st.integers(-1, 1 << 70))
    def match(self, keys: list[int], within: int) -> None:
        expected = naive_match(self.held, keys)
        assert self.index.match(keys) == expected
        assert self.index.match(tuple(keys)) == expected
        assert self.index.match(keys, within) == {slot: depth for slot, depth in expected.items() if within >> slot & 1}

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0), keys=prompts, start=st.integers(0, LONGEST))
    def extent(self, choice: int, keys: list[int], start: int) -> None:
        slot = self.pick(choice)
        expected = naive_match({slot: self.held[slot]}, keys[start:]).get(slot, 0)
        assert self.index.extent(slot, keys, start) == expected

    @invariant()
    def holds(self) -> None:
        self.index._check()
        for slot, held in self.held.items():
            assert self.index.size(slot) == len(held)


class BoundedMachine(Machine):
    max_blocks = 150


TestIndex = Machine.TestCase
TestBoundedIndex = BoundedMachine.TestCase
TestIndex.settings = TestBoundedIndex.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
