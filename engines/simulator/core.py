"""Who lets an engine's time pass? One task that plans a step, waits as long as it takes, and hands out what it gave.

request ──generate──▶ scheduler ──step──▶ Feed ──take──▶ request
                          ├── changes of the cache ──▶ publish
                          └── KV for and from other engines ──▶ exchange
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from engines.simulator.cache import Change
from engines.simulator.hashes import BlockNamer
from engines.simulator.scheduler import Scheduler, Token
from engines.simulator.sequences import Prompt, Sequence, Spoken
from engines.simulator.words import Words

# A timer that fires late is caught up with, so that rates hold over a second; a loop that stood still longer is not.
_CATCH_UP_S = 0.02


class Exchange(Protocol):
    """Whoever brings KV to other engines and from them: see `engines.simulator.transfer`."""

    def arrived(self, sequence: Sequence) -> bool:
        """Hear of a new sequence; False where it is to be queued later only, by `Core.queue`."""
        ...

    def fetch(self, sequence: Sequence) -> None:
        """Have KV brought for a sequence that has been given blocks for it."""
        ...

    def finished(self, sequence: Sequence) -> bool:
        """Hear of a sequence that has ended; False where its last token is to be told later only, by `Core.tell`."""
        ...

    def left(self, sequence: Sequence) -> None:
        """Hear that nobody waits for a sequence any more."""
        ...

    def handle(self, sequence: Sequence) -> dict[str, Any] | None:
        """What the answer tells about a sequence's KV, where it tells anything."""
        ...


class RequestFailed(Exception):
    """The engine could not answer, for a reason of its own; the message is the engine's."""


class Feed:
    """The tokens of one request, from the core to whoever answers it."""

    __slots__ = ("_arrived", "_failure", "_waiting", "left", "sequences")

    def __init__(self, sequences: list[Spoken]) -> None:
        self.sequences = sequences
        self.left = len(sequences)
        """Sequences that have not ended."""
        self._arrived: list[Token] = []
        self._failure: str | None = None
        self._waiting: asyncio.Future[None] | None = None

    def put(self, token: Token) -> None:
        """Add a token and wake the reader."""
        self._arrived.append(token)
        self._wake()

    def fail(self, message: str) -> None:
        """End it in an error."""
        self._failure = message
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[Token]:
        """Wait for tokens; all that have come. Empty once every sequence has ended. Raises RequestFailed."""
        if not self._arrived and self.left and self._failure is None:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if self._failure is not None:
            raise RequestFailed(self._failure)
        arrived, self._arrived = self._arrived, []
        self.left -= sum(token.last for token in arrived)
        return arrived


class Core:
    """One engine's scheduler, driven by the loop's clock."""

    def __init__(self, scheduler: Scheduler, namer: BlockNamer, words: Words, publish: Callable[[list[Change]], None]) -> None:
        self.scheduler = scheduler
        self.asleep = False
        self.exchange: Exchange | None = None
        """None for an engine that takes whole requests."""
        self._namer = namer
        self._words = words
        self._publish = publish
        self._feeds: dict[Sequence, tuple[Feed, int]] = {}
        self._work = asyncio.Event()

    @contextlib.contextmanager
    def generate(self, prompts: list[Prompt]) -> Iterator[Feed]:
        """Queue prompts; whatever has not ended when the block is left is aborted at once."""
        sequences = [Spoken(prompt, self._namer.chain(prompt.salt, prompt.adapter), self._words) for prompt in prompts]
        feed = Feed(sequences)
        for index, sequence in enumerate(sequences):
            self._feeds[sequence] = (feed, index)
            if self.exchange is None or self.exchange.arrived(sequence):
                self.queue(sequence)
        try:
            yield feed
        finally:
            for sequence in sequences:
                if self.exchange is not None:
                    self.exchange.left(sequence)
                self.scheduler.abort(sequence)
                self._feeds.pop(sequence, None)

    def queue(self, sequence: Sequence) -> None:
        """Let a sequence be computed."""
        self.scheduler.submit(sequence)
        self.nudge()

    def tell(self, sequence: Sequence) -> None:
        """Tell the last token of a sequence to whoever waits for it."""
        if sequence in self._feeds:
            feed, index = self._feeds[sequence]
            feed.put(Token(index, feed.sequences[index].tokens[-1], last=sequence.done))

    def fail(self, sequence: Sequence, message: str) -> None:
        """End a sequence, and its request, in an error."""
        if not sequence.done:
            self.scheduler.fail(sequence)
        if sequence in self._feeds:
            self._feeds[sequence][0].fail(message)

    def nudge(self) -> None:
        """Look again for something to compute: there is more to do, or more room."""
        self._work.set()

    def sleep(self) -> None:
        """Compute nothing until woken; the cache is lost, which the first batch afterwards says."""
        self.asleep = True
        self.scheduler.cache.clear()

    def wake(self) -> None:
        """Go on."""
        self.asleep = False
        self._work.set()

    def publish_changes(self) -> None:
        """Publish what has changed in the cache since the last time."""
        if changes := self.scheduler.cache.take_changes():
            self._publish(changes)

    async def run(self) -> None:
        """Compute until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            step = None if self.asleep else self.scheduler.plan()
            if self.exchange is not None:
                for sequence in self.scheduler.take_to_fetch():
                    self.exchange.fetch(sequence)
            if step is None:
                self._work.clear()
                await self._work.wait()
                due = loop.time()
                continue
            due = max(due, loop.time() - _CATCH_UP_S) + step.duration_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            gained = self.scheduler.complete(step)
            self.publish_changes()
            for sequence, token in gained:
                if sequence.done and self.exchange is not None and not self.exchange.finished(sequence):
                    continue
                feed, index = self._feeds[sequence]
                feed.put(Token(index, token, sequence.done))
