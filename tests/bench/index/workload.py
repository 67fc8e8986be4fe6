"""What do the engines of the bench hold? The same for every table it is asked of; the standard library alone, for peers' interpreters.

16 heads of 32 blocks, held by every engine        then, until an engine is full, chains of 128 blocks of its own behind one of them
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import NamedTuple

HEADS = 16
HEAD = 32
OWN = 128
PROMPT = 256


class Chain(NamedTuple):
    """Blocks that follow each other."""

    parent: int | None
    keys: list[int]


def fresh_keys(rng: random.Random, count: int) -> list[int]:
    """Keys that nobody has."""
    return array("Q", rng.randbytes(8 * count)).tolist()


class Workload:
    """Which chains each of `engines` holds, of `blocks` in all."""

    def __init__(self, engines: int, blocks: int, seed: int = 1) -> None:
        self.engines = engines
        self.chains = (blocks - HEADS * HEAD) // OWN
        """An engine's own."""
        self._seed = seed
        rng = random.Random(seed)
        self._heads = [fresh_keys(rng, HEAD) for _ in range(HEADS)]
        self._rng = random.Random(seed + 1)

    @property
    def held(self) -> int:
        """Blocks that one engine holds."""
        return HEADS * HEAD + self.chains * OWN

    def stored(self, part: int, parts: int) -> Iterator[tuple[int, Chain]]:
        """A part of all there is to store, in order: every engine stores a chain, then every engine the next, as in a fleet at work."""
        if part == 0:
            yield from ((engine, Chain(None, head)) for head in self._heads for engine in range(self.engines))
        for number in range(self.chains * part // parts, self.chains * (part + 1) // parts):
            parent = self._heads[number % HEADS][-1]
            for engine in range(self.engines):
                yield engine, Chain(parent, self._own(engine, number))

    def own(self, engine: int, number: int) -> list[int]:
        """One of its own chains, without the head."""
        return self._own(engine, number)

    def prompt(self, kind: str) -> list[int]:
        """`PROMPT` blocks, as objects of their own: `warm` has a head and one engine's chain, `cold` nothing that anybody holds."""
        if kind == "cold":
            return fresh_keys(self._rng, PROMPT)
        number = self._rng.randrange(self.chains)
        known = self._heads[number % HEADS] + self._own(self._rng.randrange(self.engines), number)
        return array("Q", known).tolist() + fresh_keys(self._rng, PROMPT - len(known))

    def _own(self, engine: int, number: int) -> list[int]:
        return fresh_keys(random.Random(self._seed << 60 | engine << 30 | number), OWN)
