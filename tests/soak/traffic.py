"""What do clients do, and what came of it? Prompts that share prefixes, streamed and whole, three in ten given up on the way."""

from __future__ import annotations

import asyncio
import enum
import random
from array import array
from collections import Counter, deque

import aiohttp
import msgspec

from engines.simulator.engine import SimulatedEngine
from engines.simulator.hashes import BlockNamer

CANCELLED = 0.3
GIVEN_UP_WITHIN_S = 0.1
PATIENCE_S = 60.0
"""A request that has not ended by then has hung."""
REMEMBERED = 200
BLOCK = 16
DONE = b"data: [DONE]"


class Outcome(enum.StrEnum):
    """How a request ended for its client."""

    WHOLE = "whole"
    CANCELLED = "cancelled by the client"
    REFUSED = "answered with an error"
    BROKEN = "broken off, visibly"
    TRUNCATED = "cut short, and looking whole"
    HUNG = "without an end"


GOOD = frozenset({Outcome.WHOLE, Outcome.CANCELLED, Outcome.REFUSED, Outcome.BROKEN})


class Traffic:
    """All clients, what became of their requests, and the latest prompts."""

    def __init__(self, seed: int) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        self.statuses: Counter[int] = Counter()
        self.prompts: deque[list[int]] = deque(maxlen=REMEMBERED)
        self.in_progress = 0
        self._random = random.Random(seed)

    async def client(self, url: str, pause_s: float) -> None:
        """One after the other, until cancelled, or until nobody listens there any more."""
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as session:
            while True:
                self.in_progress += 1
                try:
                    outcome = await self._ask(session)
                finally:
                    self.in_progress -= 1
                if outcome is None:
                    return
                self.outcomes[outcome] += 1
                await asyncio.sleep(self._random.random() * 2 * pause_s)

    async def _ask(self, session: aiohttp.ClientSession) -> Outcome | None:
        rng = self._random
        prompt, streamed, tokens = self._prompt(), rng.random() < 0.7, rng.randrange(4, 64)
        body = {"model": "sim", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": streamed}
        given_up = rng.random() * GIVEN_UP_WITHIN_S if rng.random() < CANCELLED else None
        try:
            async with asyncio.timeout(given_up if given_up is not None else PATIENCE_S):
                return await self._answered(session, body, tokens)
        except TimeoutError:
            return Outcome.HUNG if given_up is None else Outcome.CANCELLED
        except aiohttp.ClientConnectorError:
            return None
        except aiohttp.ClientError:
            return Outcome.BROKEN

    async def _answered(self, session: aiohttp.ClientSession, body: dict[str, object], tokens: int) -> Outcome:
        async with session.post("/v1/completions", json=body) as answer:
            content = await answer.read()
            self.statuses[answer.status] += 1
            if answer.status != 200:
                return Outcome.REFUSED
            if body["stream"]:
                return Outcome.WHOLE if DONE in content and content.count(b"data: {") >= tokens else Outcome.TRUNCATED
            whole = msgspec.json.decode(content)["usage"]["completion_tokens"] == tokens
            return Outcome.WHOLE if whole else Outcome.TRUNCATED

    def _prompt(self) -> list[int]:
        """Up to 40 blocks, along one of many branches, and a tail of its own."""
        pick = self._random.randrange
        branch, tokens = pick(6), list[int]()
        for depth in range(pick(2, 40)):
            branch = branch * 2 + (pick(2) if depth % 8 == 7 else 0)
            tokens += [(branch * 31 + depth * 7 + at) % 900 + 50 for at in range(BLOCK)]
        tokens += [pick(50, 950) for _ in range(pick(BLOCK))]
        self.prompts.append(tokens)
        return tokens


def held(engine: SimulatedEngine, prompt: list[int]) -> int:
    """Leading blocks of the prompt that the engine itself holds."""
    settings = engine.settings
    chain = BlockNamer(settings.kind, settings.block_size, settings.hash_seed).chain()
    chain.extend(array("I", prompt))
    names = set(engine.cache.names)
    return next((depth for depth, name in enumerate(chain.names) if name not in names), len(chain.names))
