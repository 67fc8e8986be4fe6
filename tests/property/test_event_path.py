"""From an engine's cache to a router's index: whatever the engine does and whatever is lost, the index is the truth or is known not to be."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from discovery.feed import Feed
from discovery.messages import StreamMessage
from discovery.mirror import Mirror
from discovery.signal import SignalState
from discovery.subjects import Subjects
from engines.blocks import block_keys, pack_tokens, root_seed, unpack_keys
from engines.events import UndecodableBatch, decode
from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec, KvSource, Tier
from router.caches import Caches

ENCODE = msgspec.msgpack.encode
NAMESPACE = "test"
ENGINE = "http://e:1"
ENDPOINT = Endpoint(ENGINE)
INFO = EngineInfo(ENGINE, EngineSpec(ENGINE), EngineKind.VLLM, "0", (), kv_sources=(KvSource(0, "tcp://e:2"),))
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
TOKENS = 6
PROMPTS = [[branch if at >= 3 else 7 for at in range(TOKENS)] for branch in range(2)]
NOISE: list[dict[str, Any]] = [
    {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": 999, "medium": "GPU"},
    {"type": "BlockRemoved", "block_hashes": [999], "medium": "GPU"},
    {"type": "BlockRemoved", "block_hashes": [999], "medium": "TAPE"},
    {"type": "BlocksPondered", "block_hashes": [999]},
]
"""Under a parent never seen, of blocks never seen, of what nobody knows: true of any engine that we do not understand wholly."""

FATES = st.sampled_from(["wait", "read", "read", "read", "read", "lost", "garbage", "odd removals"])

Root = tuple[str | None, str | None]
Block = tuple[Root, tuple[int, ...]]
"""What a block stands for: adapter and salt, and all tokens up to its end."""


class Engine:
    """One life of a cache, and what it says of itself. Any copy may go at any time, in whichever tier and order."""

    def __init__(self, life: int, block_size: int, *, hybrid: bool) -> None:
        self.size = block_size
        self.hybrid = hybrid
        self.copies: list[tuple[Tier, Block]] = []
        self.events: list[dict[str, Any]] = []
        """Not published yet."""
        self._computed = False
        """Whether anything was, since all was last cleared."""
        self._life = life
        self._names: dict[Block, int] = {}

    def store(self, tier: Tier, root: Root, tokens: list[int], first: int, count: int) -> None:
        blocks = [(root, tuple(tokens[:end])) for end in range(self.size, TOKENS + 1, self.size)]
        held = next((at for at, block in enumerate(blocks) if (tier, block) not in self.copies), len(blocks))
        first = min(first, held)
        added = blocks[first : first + count]
        if not added or not (self._computed or tier is Tier.DEVICE):
            return  # whatever is offloaded, was computed before
        self._computed = True
        self.copies += [(tier, block) for block in added]
        stored = {
            "type": "BlockStored",
            "block_hashes": [self._name(block) for block in added],
            "parent_block_hash": self._name(blocks[first - 1]) if first else None,
            "token_ids": tokens[first * self.size : (first + len(added)) * self.size],
            "block_size": self.size,
            "medium": MEDIA[tier],
            "lora_name": root[0],
            "extra_keys": [[*filter(None, (root[0], root[1] if first + at == 0 else None))] or None for at in range(len(added))],
        }
        if self.hybrid:  # as vLLM tells of a group with a window: odd numbers of tokens, and the names that the other group has too
            self.events.append(stored | {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "token_ids": tokens, "extra_keys": None})
            stored |= {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
        self.events.append(stored)

    def remove(self, at: int, *, window: bool) -> None:
        tier, block = self.copies[at]
        removed: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [self._name(block)], "medium": MEDIA[tier]}
        if self.hybrid:
            self.events.append(removed | {"group_idx": 0})
            removed["group_idx"] = 1
        if not (self.hybrid and window):  # else it left the window only
            del self.copies[at]
            self.events.append(removed)

    def clear(self) -> None:
        self.copies.clear()
        self._computed = False
        self.events.append({"type": "AllBlocksCleared"})

    @property
    def truth(self) -> set[tuple[Tier, int]]:
        return {(tier, block_keys(pack_tokens(tokens), self.size, root_seed(*root))[-1]) for tier, (root, tokens) in self.copies}

    def _name(self, block: Block) -> int:
        return self._names.setdefault(block, 100 * self._life + len(self._names))


class Wire:
    """The bus as a mirror sees it."""

    connected = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        del subject, payload
        self.asked.append(reply)
        return True


class EventPath(RuleBasedStateMachine):
    """Engine → wire shapes → feed → bus → mirror → index."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lives = 0
        self.relays = 0
        self.engine = Engine(0, 2, hybrid=True)
        self.seq = self.expected = 0
        """What the next batch is numbered, and what its reader waits for."""
        self.sent: list[StreamMessage] = []
        self.wire = Wire()
        self.caches = Caches()
        self.caches.add(ENDPOINT)
        self.mirror = Mirror(self.wire, NAMESPACE, self.caches, clock=lambda: self.now)  # type: ignore[arg-type]  # all that it asks of a bus
        self.mirror.expect(INFO)
        self.feed = self.follow(replays=True)

    def follow(self, *, replays: bool) -> Feed:
        self.relays += 1
        life, numbers = f"r{self.relays}", itertools.count()
        feed = Feed(ENDPOINT, None, lambda: f"{life}.{next(numbers)}", self.sent.append, replays=replays)
        feed.restarted("joined")
        feed.caught_up()
        return feed

    @rule(
        tier=st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK]),
        root=st.sampled_from([(None, None), (None, None), ("ad", None), (None, "ad"), ("ad", "s")]),
        tokens=st.sampled_from(PROMPTS),
        first=st.integers(0, 2),
        count=st.integers(1, 3),
        fate=FATES,
    )
    def the_engine_stores(self, tier: Tier, root: Root, tokens: list[int], first: int, count: int, fate: str) -> None:
        self.engine.store(tier, root, tokens, first, count)
        self.publish(fate)

    @precondition(lambda self: self.engine.copies)
    @rule(data=st.data(), times=st.integers(1, 3), window=st.booleans(), fate=FATES)
    def the_engine_removes(self, data: st.DataObject, times: int, window: bool, fate: str) -> None:
        for _ in range(min(times, len(self.engine.copies))):
            self.engine.remove(data.draw(st.integers(0, len(self.engine.copies) - 1)), window=window)
        self.publish(fate)

    @rule(fate=FATES)
    def the_engine_clears_its_cache(self, fate: str) -> None:
        self.engine.clear()
        self.publish(fate)

    @rule(event=st.sampled_from(NOISE), fate=FATES)
    def the_engine_says_what_nobody_understands(self, event: dict[str, Any], fate: str) -> None:
        if event["type"] == "BlockStored":  # of blocks as long as all others
            event = event | {"token_ids": [5] * self.engine.size, "block_size": self.engine.size}
        self.engine.events.append(event)
        self.publish(fate)

    def publish(self, fate: str) -> None:
        """All that has happened is one batch."""
        if fate == "wait":
            return
        events, self.engine.events = self.engine.events, []
        seq, self.seq = self.seq, self.seq + 1
        if fate == "odd removals":
            events = [event | {"block_hashes": "?"} if event["type"] == "BlockRemoved" else event for event in events]
        payload = b"?" if fate == "garbage" else ENCODE([0.0, events, 0])
        if fate == "lost":
            return  # which shows with the next one
        if self.expected < seq:
            self.feed.lost(self.expected, seq - 1)
        self.expected = self.seq
        try:
            batch = decode(payload)
        except UndecodableBatch as error:
            self.feed.undecodable(error.kind, seq)
        else:
            self.feed.batch(batch)

    @rule(block_size=st.sampled_from([2, 3]))
    def the_engine_is_started_again_with_another_model(self, block_size: int) -> None:
        """And serves a first prompt."""
        self.lives += 1
        self.engine = Engine(self.lives, block_size, hybrid=not self.engine.hybrid)
        self.seq = self.expected = 0
        self.feed.restarted("the number went back")
        self.engine.store(Tier.DEVICE, (None, None), PROMPTS[0], 0, 3)
        self.publish("read")

    @precondition(lambda self: not self.engine.events)
    @rule()
    def a_relay_takes_over_that_cannot_ask_what_was(self) -> None:
        self.feed.end()
        self.feed = self.follow(replays=False)
        self.expected = 0

    @rule(fate=st.sampled_from(["heard", "heard", "heard", "lost"]), later=st.floats(0.0, 1.0))
    def the_bus_carries_what_was_sent(self, fate: str, later: float) -> None:
        self.now += later
        messages, self.sent[:] = tuple(self.sent), []
        for message in messages if fate == "heard" else messages[1:]:
            self.mirror._on_stream(Subjects(NAMESPACE).stream(ENDPOINT), ENCODE(message), "")
        self.mirror._tick(self.mirror._copies[ENDPOINT], self.now)

    @rule(most=st.sampled_from([0, 1, 100]))
    def the_relay_answers(self, most: int) -> None:
        asked, self.wire.asked = self.wire.asked, []
        for reply in asked[-1:]:
            for chunk in itertools.islice(self.feed.snapshot(), most):
                self.mirror._on_reply(reply, ENCODE(chunk), "")

    @invariant()
    def what_the_relay_holds_is_the_truth_or_a_part_of_it_and_it_says_so(self) -> None:
        if self.engine.events or self.expected < self.seq:
            return  # what is not published yet, nobody can know
        held = {(store.tier, key) for piece in self.feed.held() for store in [piece()] for key in unpack_keys(store.keys)}
        match self.feed.signal.state:
            case SignalState.LIVE:
                assert held == self.engine.truth
            case SignalState.PARTIAL:
                assert held <= self.engine.truth

    def teardown(self) -> None:
        """Once the bus loses nothing any more, the index holds what the relay does."""
        self.now += 60.0
        for _ in range(6):
            self.now += 2.0
            self.feed.beacon()
            self.the_bus_carries_what_was_sent("heard", 0.0)
            self.the_relay_answers(100)
        self.what_the_relay_holds_is_the_truth_or_a_part_of_it_and_it_says_so()
        assert self.mirror.signal(ENDPOINT, self.now).state is self.feed.signal.state
        held = {(store.tier, key) for piece in self.feed.held() for store in [piece()] for key in unpack_keys(store.keys)}
        for tier in Tier:
            keys = [key for where, key in held if where is tier]
            assert self.caches.size(ENDPOINT, tier) == len(keys)
            index, slot = self.caches._tiers[tier], self.caches._places[ENDPOINT].tiers[tier]
            assert all(index._holds(slot, key) for key in keys)
        self.caches._check()


EventPath.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None, report_multiple_bugs=False)
TestEventPath: Any = EventPath.TestCase
