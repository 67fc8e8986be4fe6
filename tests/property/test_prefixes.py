"""Marks of prompts in flight, against sets of whole prompts."""

from __future__ import annotations

import doctest

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from discovery import prefixes as module
from discovery.prefixes import STRIDE, Prefixes, depths, marks
from engines.types import Endpoint

ENDPOINTS = [Endpoint("http://a:1"), Endpoint("http://b:1")]
ROUTERS = ["me", "b", "c"]


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted > 5
    assert results.failed == 0


def chain(path: str) -> list[int]:
    """Keys of a prompt: each names all letters up to it."""
    return [hash(path[: end + 1]) for end in range(len(path))]


prompts = st.text("ab", min_size=1, max_size=30).map(lambda text: text.ljust(len(text), "a"))


class Machine(RuleBasedStateMachine):
    """Three routers tell each other everything; each must then know what the model knows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {name: Prefixes() for name in ROUTERS}
        self.running: dict[str, list[tuple[Endpoint, str]]] = {name: [] for name in ROUTERS}

    @rule(router=st.sampled_from(ROUTERS), endpoint=st.sampled_from(ENDPOINTS), prompt=prompts)
    def begin(self, router: str, endpoint: Endpoint, prompt: str) -> None:
        self.running[router].append((endpoint, prompt))
        self.tables[router].step(endpoint, chain(prompt), 1)

    @rule(router=st.sampled_from(ROUTERS), which=st.integers(0, 30))
    def end(self, router: str, which: int) -> None:
        if self.running[router]:
            endpoint, prompt = self.running[router].pop(which % len(self.running[router]))
            self.tables[router].step(endpoint, chain(prompt), -1)

    @rule(router=st.sampled_from(ROUTERS))
    def tell_changes(self, router: str) -> None:
        for endpoint, began, ended in self.tables[router].changes():
            for name, table in self.tables.items():
                if name != router:
                    table.ended(router, endpoint, [key for key, _ in ended])
                    table.began(router, endpoint, began)

    @rule(router=st.sampled_from(ROUTERS), to=st.sampled_from(ROUTERS))
    def tell_everything(self, router: str, to: str) -> None:
        self.tell_changes(router)
        if to != router:
            self.tables[to].replace(router, {endpoint: dict(known) for endpoint, known in self.tables[router].told().items()})

    @rule(router=st.sampled_from(ROUTERS), prompt=prompts)
    def ask(self, router: str, prompt: str) -> None:
        for name in ROUTERS:
            self.tell_changes(name)
        found = self.tables[router].in_flight(chain(prompt))
        for endpoint in ENDPOINTS:
            others = [other for name in ROUTERS if name != router for where, other in self.running[name] if where == endpoint]
            longest = max((shared(prompt, other) for other in others), default=0)
            assert found.get(endpoint, 0) <= longest
            at_least = max((depth for depth in depths(longest)), default=0)
            assert found.get(endpoint, 0) >= (len(prompt) if prompt in others else at_least)
            blocks = self.tables[router].blocks(endpoint)
            ours = {key for where, other in self.running[router] if where == endpoint for key in chain(other)}
            distinct = {key for other in others for key in chain(other)} - ours
            ends = len(others) + len(self.running[router])
            assert abs(blocks - len(distinct)) <= STRIDE * ends, "each prompt's end is told to within a stride"

    @invariant()
    def holds_together(self) -> None:
        for table in self.tables.values():
            table._check()

    def teardown(self) -> None:
        for router in ROUTERS:
            while self.running[router]:
                self.end(router, 0)
        for router in ROUTERS:
            self.tell_changes(router)
        for table in self.tables.values():
            table._check()
            assert not table._own
            assert not table._holders
            assert not table._held
            assert not table._theirs
            assert not table._told
            assert not table._blocks


def shared(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


TestPrefixes = Machine.TestCase
TestPrefixes.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_prompt_s_marks_stand_for_all_its_blocks() -> None:
    for blocks in range(200):
        assert sum(weight for _, weight in marks(list(range(blocks)))) == blocks
        assert all(0 < weight <= STRIDE for _, weight in marks(list(range(blocks))))
