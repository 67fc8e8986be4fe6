"""Predictions of prompts that part anywhere, against a list of single blocks in order of use."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.predicted import MOST_GROWTH, PredictedBlocks

TTL_S = 50.0
CAPACITIES = [0, 1, 7, 40]
turns = st.lists(st.integers(0, 1), max_size=14)
"""Which way a prompt goes at each block; what leads there is its key, as a hash would be."""


def chain(way: list[int]) -> list[int]:
    """Keys that name whole prefixes: 1, then its children 2 and 3, then theirs."""
    keys, key = [], 1
    for turn in way:
        key = 2 * key + turn
        keys.append(key)
    return keys


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.predicted = PredictedBlocks(TTL_S)
        self.now = 0.0
        self.used: dict[int, dict[int, float]] = {self.predicted.add_slot(capacity): {} for capacity in CAPACITIES}
        self.reach = dict(enumerate(CAPACITIES))
        self.filled = dict.fromkeys(self.reach, False)

    @rule(slot=st.sampled_from(range(len(CAPACITIES))), way=turns, passed=st.floats(0, 10))
    def sent(self, slot: int, way: list[int], passed: float) -> None:
        self.now += passed
        keys = chain(way)
        self.predicted.sent(slot, keys, self.now)
        assert keys == chain(way), "the caller's list is the caller's"
        used = self.used[slot]
        for key in reversed(keys[: self.reach[slot]]):
            used.pop(key, None)
            used[key] = self.now
        self.shrink(slot)

    def shrink(self, slot: int) -> None:
        used = self.used[slot]
        for key in list(used)[: max(0, len(used) - self.reach[slot])]:
            del used[key]
            self.filled[slot] = True

    def held(self, slot: int, keys: list[int]) -> int:
        return next((depth for depth, key in enumerate(keys) if key not in self.used[slot]), len(keys))

    @rule(slot=st.sampled_from(range(len(CAPACITIES))), way=turns, passed=st.floats(0, 10), part=st.floats(0, 1))
    def found(self, slot: int, way: list[int], passed: float, part: float) -> None:
        keys = chain(way)
        blocks, before, used = round(part * len(keys)), self.held(slot, keys), self.used[slot]
        trail = self.predicted.trail(slot, keys)
        assert (trail[-1][0] if trail else 0) == before
        lost_at = used[keys[blocks]] if blocks < before else None
        self.sent(slot, way, passed)
        self.predicted.found(slot, keys, trail, blocks)
        if lost_at is not None:
            for key in [key for key, at in used.items() if at <= lost_at]:
                del used[key]
            self.reach[slot] = min(self.reach[slot], len(used) - self.held(slot, keys) + blocks)
            self.shrink(slot)
        elif blocks > before and (self.filled[slot] or self.reach[slot] < CAPACITIES[slot]):
            self.reach[slot] = min(MOST_GROWTH * CAPACITIES[slot], max(2 * self.reach[slot], blocks))
            self.filled[slot] = False

    @rule(passed=st.floats(0, TTL_S), limit=st.none() | st.integers(0, 20))
    def expire(self, passed: float, limit: int | None) -> None:
        self.now += passed
        given_up = self.predicted.expire(self.now, limit)
        expected = 0
        for used in self.used.values():
            old = [key for key, at in used.items() if at + TTL_S <= self.now]
            for key in old if limit is None else old[: limit - expected]:
                del used[key]
                expected += 1
        assert given_up == expected

    @rule(slot=st.sampled_from(range(len(CAPACITIES))))
    def clear(self, slot: int) -> None:
        self.predicted.clear(slot)
        self.used[slot] = {}
        self.reach[slot], self.filled[slot] = CAPACITIES[slot], False

    @rule(way=turns, within=st.integers(-1, 15), start=st.integers(0, 14))
    def match(self, way: list[int], within: int, start: int) -> None:
        keys = chain(way)
        depths = {}
        for slot, used in self.used.items():
            depth = 0
            while depth < len(keys) and keys[depth] in used:
                depth += 1
            depths[slot] = depth
            assert self.predicted.extent(slot, keys, start) == max(0, depth - start)
        assert self.predicted.match(keys) == {slot: depth for slot, depth in depths.items() if depth}
        assert self.predicted.match(tuple(keys), within) == {slot: depth for slot, depth in depths.items() if depth and within >> slot & 1}

    @invariant()
    def holds(self) -> None:
        self.predicted._check()
        assert len(self.predicted) == sum(map(len, self.used.values()))
        for slot, used in self.used.items():
            assert self.predicted.size(slot) == len(used)


TestPredicted = Machine.TestCase
TestPredicted.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
