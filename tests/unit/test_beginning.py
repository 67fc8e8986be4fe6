"""A router is ready once its engines are known, and waits for none that says nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from discovery.monitor import Monitor
from discovery.sources.finder import Finder
from router.beginning import LEARNED_WITHIN_S, SILENT_S, TOLD_WITHIN_S, Beginning
from router.fleet import Fleet


class World:
    """Engines as the monitor and the fleet have them, and the time."""

    def __init__(self, *watched: str) -> None:
        self.now = 100.0
        self.watched = watched
        self.members: dict[str, SimpleNamespace] = {}
        self.refused: set[str] = set()
        self.complete = True
        self.beginning = Beginning(cast("Monitor", self), cast("Fleet", self), cast("Finder", self), clock=lambda: self.now)

    def waiting_for(self, engine: str) -> str:
        return "connection refused" if engine in self.refused else ""

    def is_over(self, later: float = 0.0) -> bool:
        self.now += later
        return self.beginning.over


def test_sources_are_waited_for_but_not_for_ever() -> None:
    world = World()
    world.complete = False
    assert not world.is_over()
    assert not world.is_over(TOLD_WITHIN_S - 0.1)
    assert world.is_over(0.1)


def test_it_lasts_until_every_engine_serves_or_was_asked_in_vain() -> None:
    world = World("a", "b")
    assert not world.is_over()
    world.members["a"] = SimpleNamespace(serving=False)
    world.refused = {"b"}
    assert not world.is_over(SILENT_S)
    world.members["a"].serving = True
    assert world.is_over()


def test_an_engine_that_says_nothing_is_waited_for_a_moment_and_one_that_never_gets_there_not_for_ever() -> None:
    silent, slow = World("a"), World("a")
    assert not silent.is_over(SILENT_S - 0.1)
    assert silent.is_over(0.1)
    slow.members["a"] = SimpleNamespace(serving=False)
    assert not slow.is_over(LEARNED_WITHIN_S - 0.1)
    assert slow.is_over(0.1)


def test_once_over_it_is_over_whatever_joins_later() -> None:
    world = World()
    assert world.is_over()
    world.watched = ("a",)
    assert world.is_over()
