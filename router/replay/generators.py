"""What traffic is there when there is no trace? Five kinds, drawn at random, each a caricature of something that engines are really sent.

    shared     many questions, each behind one of some long system prompts
    chat       conversations: every turn's prompt is the one before, its answer, and a new question
    agents     the same with long instructions and tools in common, quick short turns, and tools' results in between
    bursts     many equal prompts at once, then other ones
    unshared   no two prompts have anything in common

At speed 1 each asks of eight engines of the default model about half of what they can do. Turns come at times of their own, whatever the
engines do: a slow fleet is not asked less, as it would be by people.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Final

from router.replay.texts import Text
from router.replay.workload import Arrival, Workload

BLOCK_SIZE: Final = 64


class _Draw:
    """Random numbers of the kinds needed, and names for new pieces of text."""

    def __init__(self, seed: int, block_size: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self._pieces = itertools.count(1)

    def piece(self) -> int:
        return next(self._pieces)

    def tokens(self, median: int, sigma: float = 0.6, most: int = 32_000) -> int:
        """A length: lognormal, as lengths of texts nearly are."""
        return max(1, min(most, round(median * math.exp(self.rng.gauss(0.0, sigma)))))

    def moments(self, per_s: float) -> Iterator[float]:
        """A Poisson process."""
        now = 0.0
        while True:
            now += self.rng.expovariate(per_s)
            yield now

    def text(self) -> Text:
        return Text(self.block_size)


def _shared(draw: _Draw) -> Iterator[Arrival]:
    prompts = [(draw.piece(), draw.tokens(3000, 0.5)) for _ in range(24)]
    weights = [1 / rank for rank in range(1, len(prompts) + 1)]
    for at in draw.moments(16.0):
        (system, length), tail = draw.rng.choices(prompts, weights)[0], draw.tokens(500)
        yield _arrival(at, draw.text().add(system, length), draw.piece(), tail, draw.piece(), draw.tokens(200))


def _chat(draw: _Draw) -> Iterator[Arrival]:
    systems = [(draw.piece(), draw.tokens(800)) for _ in range(8)]

    def conversation(began: float, session: str) -> Iterator[Arrival]:
        text, at = draw.text().add(*draw.rng.choice(systems)), began
        for _ in range(1 + int(draw.rng.expovariate(1 / 5))):
            yield _arrival(at, text, draw.piece(), draw.tokens(400, 1.0), draw.piece(), draw.tokens(250), session)
            at += 8 + draw.rng.expovariate(1 / 20)

    yield from _merged(draw, 3.0, conversation)


def _agents(draw: _Draw) -> Iterator[Arrival]:
    kinds = [(draw.piece(), draw.tokens(7000, 0.3)) for _ in range(6)]

    def task(began: float, session: str) -> Iterator[Arrival]:
        text, at = draw.text().add(*draw.rng.choice(kinds)), began
        for _ in range(2 + int(draw.rng.expovariate(1 / 8))):
            yield _arrival(at, text, draw.piece(), draw.tokens(700, 0.8), draw.piece(), draw.tokens(80), session)
            at += 3 + draw.rng.expovariate(1 / 3)

    yield from _merged(draw, 1.4, task)


def _bursts(draw: _Draw) -> Iterator[Arrival]:
    for at in draw.moments(0.8):
        text = draw.text().add(draw.piece(), draw.tokens(5000, 0.5))
        question, length = draw.piece(), draw.tokens(50)
        for moment in sorted(at + draw.rng.expovariate(1 / 0.1) for _ in range(16)):
            yield _arrival(moment, text.copy(), question, length, draw.piece(), draw.tokens(150))


def _unshared(draw: _Draw) -> Iterator[Arrival]:
    for at in draw.moments(8.0):
        yield _arrival(at, draw.text(), draw.piece(), draw.tokens(4000, 1.0), draw.piece(), draw.tokens(200))


def _arrival(at: float, text: Text, question: int, asked: int, answer: int, answered: int, session: str | None = None) -> Arrival:  # noqa: PLR0913, PLR0917
    """A request; `text` is then the conversation with its answer."""
    prompt = text.add(question, asked).tokens
    text.add(answer, answered)
    return Arrival(at, prompt, answered, tuple(text.keys), session)


def _merged(draw: _Draw, per_s: float, session: Callable[[float, str], Iterator[Arrival]]) -> Iterator[Arrival]:
    """Sessions that begin at random, in order of their requests."""
    waiting: list[Arrival] = []
    for number, began in enumerate(draw.moments(per_s)):
        ready = [arrival for arrival in waiting if arrival.at_s < began]
        yield from sorted(ready, key=lambda arrival: arrival.at_s)
        waiting = [arrival for arrival in waiting if arrival.at_s >= began]
        waiting += session(began, f"session-{number}")


GENERATORS: Final[dict[str, Callable[[_Draw], Iterator[Arrival]]]] = {
    "shared": _shared,
    "chat": _chat,
    "agents": _agents,
    "bursts": _bursts,
    "unshared": _unshared,
}


def generate(kind: str, requests: int, *, seed: int = 0, block_size: int = BLOCK_SIZE) -> Workload:
    """The first `requests` of such traffic; the same for the same seed."""
    arrivals = sorted(itertools.islice(GENERATORS[kind](_Draw(seed, block_size)), requests), key=lambda arrival: arrival.at_s)
    return Workload(kind, block_size, tuple(arrivals))
