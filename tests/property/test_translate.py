"""The translator against a model too simple to be wrong, and everything it tells against what it says it holds."""

from __future__ import annotations

import itertools
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from discovery.messages import Clear, Op, Remove, Store
from discovery.translate import Translator
from engines.blocks import pack_tokens, unpack_keys
from engines.events import BlockHash, Cleared, KvEvent, Removed, Skipped, SkipReason, Stored
from engines.types import Tier

SIZE = 2
TIERS = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK])
GROUPS = st.sampled_from([0, 0, 0, 1])
# Few tokens and few names, so that repetitions, aliases and unknown parents are common.
BLOCKS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE)
NAMES: st.SearchStrategy[BlockHash] = st.sampled_from([-1, 0, 1, 2, 3, b"a"])
LORAS = st.sampled_from([None, None, None, "ad"])

Prefix = tuple[object, ...]
"""What a key stands for, spelled out: the root, then each block's tokens and extra."""


class Model:
    """Holds every copy on a list of its own. No hashing, no counting, no shortcuts."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tier, int, BlockHash, Prefix]] = []

    def store(self, event: Stored) -> None:
        prefix = self._start(event)
        if prefix is None:
            return
        for index, name in enumerate(event.hashes):
            extra = event.extras[index] if event.extras else None
            prefix = (*prefix, tuple(event.tokens[index * SIZE : (index + 1) * SIZE]), extra)
            known = [found for tier, group, other, found in self.copies if (tier, group, other) == (event.tier, event.group, name)]
            self.copies.append((event.tier, event.group, name, known[0] if known else prefix))

    def _start(self, event: Stored) -> Prefix | None:
        if event.parent is None:
            return (event.lora, event.salt)
        same = [prefix for tier, group, name, prefix in self.copies if (tier, group, name) == (event.tier, event.group, event.parent)]
        return same[0] if same else None

    def remove(self, event: Removed) -> None:
        for name in event.hashes:
            for copy in self.copies:
                if copy[:3] == (event.tier, event.group, name):
                    self.copies.remove(copy)
                    break

    def held(self) -> set[tuple[Tier, Prefix]]:
        return {(tier, prefix) for tier, _group, _name, prefix in self.copies}


class Translating(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.translator = Translator()
        self.model = Model()
        self.told: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self.pending: list[KvEvent] = []
        self.parents: dict[int, int | None] = {}

    @initialize()
    def learn_block_size(self) -> None:
        self.store([9], None, [[1, 1]], Tier.DEVICE, 0, None, None)

    @rule(
        names=st.lists(NAMES, max_size=4),
        parent=st.none() | NAMES,
        blocks=st.lists(BLOCKS, min_size=4, max_size=4),
        tier=TIERS,
        group=GROUPS,
        lora=LORAS,
        extra=st.sampled_from([None, None, b"img"]),
    )
    def store(
        self,
        names: list[BlockHash],
        parent: BlockHash | None,
        blocks: list[list[int]],
        tier: Tier,
        group: int,
        lora: str | None,
        extra: bytes | None,
    ) -> None:
        tokens = [token for block in blocks[: len(names)] for token in block]
        extras = [extra, *[None] * (len(names) - 1)] if extra and names else None
        event = Stored(names, parent, tokens, SIZE, tier, lora, None, group, extras)
        if parent is not None and self.model._start(event) is None and any(name == parent for _, _, name, _ in self.model.copies):
            return  # a parent held elsewhere only: which copy's prefix it gets is not the model's to say
        self.pending.append(event)
        self.model.store(event)
        for _, _, _, prefix in self.model.copies:
            if len(prefix) > 4:  # lora, salt, and two things a block
                self.parents[key_of(prefix)] = key_of(prefix[:-2])
            else:
                self.parents[key_of(prefix)] = None

    @rule(names=st.lists(NAMES, max_size=4), tier=TIERS, group=GROUPS)
    def remove(self, names: list[BlockHash], tier: Tier, group: int) -> None:
        event = Removed(names, tier, group)
        self.pending.append(event)
        self.model.remove(event)

    @rule(data=st.data(), times=st.integers(1, 3))
    def remove_what_is_held(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            if self.model.copies:
                tier, group, name, _prefix = data.draw(st.sampled_from(self.model.copies))
                self.remove([name], tier, group)

    @rule(tokens=st.lists(st.integers(-1, 2**32), max_size=3), size=st.integers(-1, 3))
    def store_what_does_not_add_up(self, tokens: list[int], size: int) -> None:
        if len(tokens) != 2 * size or any(token in {-1, 2**32} for token in tokens):
            self.pending.append(Stored([1, 2], None, tokens, size))

    @rule(group=st.integers(2, 5))
    def skip(self, group: int) -> None:
        self.pending.append(Skipped("BlockStored", SkipReason.NOT_FULL_ATTENTION, group))

    @rule(how=st.sampled_from(["not", "not", "not", "cleared", "new life", "one by one"]))
    def everything_goes(self, how: str) -> None:
        match how:
            case "cleared":
                self.pending.append(Cleared())
            case "new life":
                self.flush()
                self._tell(self.translator.clear())
            case "one by one":
                for tier, group, name, _prefix in list(self.model.copies):
                    self.remove([name], tier, group)
            case _:
                return
        self.model.copies.clear()

    @rule()
    def flush(self) -> None:
        """One batch: everything since the last."""
        self._tell(self.translator.apply(self.pending))
        self.pending = []

    def _tell(self, ops: list[Op]) -> None:
        for before, after in itertools.pairwise(ops):
            assert isinstance(before, Clear) or isinstance(after, Clear) or (type(before), before.tier) != (type(after), after.tier)
        for op in ops:
            match op:
                case Store(tier=tier, keys=packed):
                    self._follow(op)
                    for key in unpack_keys(packed):
                        assert key not in self.told[tier]  # only real changes
                        self.told[tier].add(key)
                case Remove(tier=tier, keys=packed):
                    for key in unpack_keys(packed):
                        self.told[tier].remove(key)
                case Clear():
                    assert any(self.told.values())
                    for keys in self.told.values():
                        keys.clear()

    def _follow(self, store: Store) -> None:
        """Each block of a chain follows the one before it, and chains are as long as they can be."""
        assert store.whole
        chains = [unpack_keys(chain) for chain in store.chains()]
        keys = [key for chain in chains for key in chain]
        assert keys == unpack_keys(store.keys)
        ends = set(itertools.accumulate(map(len, chains)))
        for place, (before, after) in enumerate(itertools.pairwise(keys), 1):
            assert (self.parents[after] == before) == (place not in ends)

    @rule()
    def agrees(self) -> None:
        self.flush()
        self.translator._check()
        held = self.model.held()
        pairs = {(tier, key) for tier, keys in self.told.items() for key in keys}
        assert Counter(tier for tier, _ in held) == Counter(tier for tier, _ in pairs)
        assert self.translator.blocks == len(held)
        stored = [held.stored(0, len(held.keys)) for held in self.translator.held()]
        for store in stored:
            self._follow(store)
        snapshot = [(store.tier, key) for store in stored for key in unpack_keys(store.keys)]
        assert len(snapshot) == len(pairs)
        assert set(snapshot) == pairs
        assert pairs == {(tier, key_of(prefix)) for tier, prefix in held}

    def teardown(self) -> None:
        self.agrees()


def key_of(prefix: Prefix) -> int:
    """The key of a spelled-out prefix, made by storing it in an empty translator."""
    lora, salt, *rest = prefix
    blocks, extras = rest[0::2], rest[1::2]
    tokens = [token for block in blocks for token in block]  # type: ignore[attr-defined]
    assert pack_tokens(tokens)
    (change,) = Translator().apply([Stored(list(range(len(blocks))), None, tokens, SIZE, Tier.DEVICE, lora, salt, 0, extras)])  # type: ignore[arg-type]
    assert isinstance(change, Store)
    return unpack_keys(change.keys)[-1]


Translating.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTranslating = Translating.TestCase
