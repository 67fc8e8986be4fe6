"""What does an engine compute next? Continuous batching in first-come order, over a block cache, without a clock.

    submit ──▶ waiting ──plan──▶ running ──complete──▶ a token each ──▶ finished
                  ▲                 │
                  └── preempted ────┘  (no block left: the youngest gives its blocks up and starts again)

The owner asks for a step (`plan`), lets its time pass, and says that it is over (`complete`). Whoever drives it decides what time is:
a server sleeps, a replay in virtual time only adds.
"""

# ruff: noqa: S101 - `_check` asserts its invariants; nothing else here asserts
from __future__ import annotations

import itertools
from array import array
from collections import deque

import msgspec

from engines.simulator.cache import BlockCache, Stored
from engines.simulator.hashes import Chain
from engines.simulator.timing import Timing
from engines.simulator.words import Words


class Prompt(msgspec.Struct, frozen=True):
    """What is to be continued, and how far."""

    tokens: list[int]
    limit: int
    """Tokens to generate."""
    ending: str = "length"
    """The finish reason once they are generated."""
    seed: int = 0
    salt: str | None = None
    adapter: str | None = None
    session: str | None = None
    tells_hits: bool = False
    """Blocks found in the cache are announced again (vLLM's `kv_cache_report_mode: full`)."""


class Sequence:
    """One prompt under way: its tokens, its blocks, and how far it has come."""

    __slots__ = ("blocks", "cached", "chain", "computed", "done", "preempted", "prompt", "stored", "tokens")

    def __init__(self, prompt: Prompt, chain: Chain) -> None:
        self.prompt = prompt
        self.chain = chain
        self.tokens = array("I", prompt.tokens)
        """The prompt and what has been generated."""
        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose KV is there."""
        self.stored = 0
        """Leading blocks that were hits or have been announced."""
        self.cached = 0
        """Prompt tokens found in the cache when it was first scheduled."""
        self.preempted = False
        self.done = False

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt.tokens)

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has been computed."""
        return self.computed >= len(self.prompt.tokens)


class Step(msgspec.Struct, frozen=True):
    """One pass of the model: how many tokens of each sequence, and how long it takes."""

    work: tuple[tuple[Sequence, int], ...]
    duration_s: float


class Token(msgspec.Struct, frozen=True):
    """One generated token of one of a request's sequences."""

    index: int
    id: int
    last: bool


class Counters(msgspec.Struct):
    """What an engine counts about itself since it started."""

    queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    hits: int = 0
    """Prompt tokens found there."""
    generated: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: dict[str, int] = {}
    """Sequences that reached their end, by finish reason."""


class Limits(msgspec.Struct, frozen=True):
    """How much one step may hold."""

    sequences: int
    tokens: int


class Scheduler:
    """The queue, the batch and the cache of one engine."""

    def __init__(self, cache: BlockCache, timing: Timing, limits: Limits, words: Words, *, stores_generated_at_end: bool = False) -> None:
        self.cache = cache
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self._timing = timing
        self._limits = limits
        self._words = words
        self._stores_generated_at_end = stores_generated_at_end

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.chain.extend(sequence.tokens)
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """Forget a sequence at once, freeing its blocks; False when it was over already."""
        if sequence.done:
            return False
        if sequence in self.running:
            del self.running[sequence]
        else:
            self.waiting.remove(sequence)
        self._release(sequence)
        sequence.done = True
        self.counters.aborted += 1
        return True

    def plan(self) -> Step | None:
        """Admit what fits and say what the next step computes; None when there is nothing to do."""
        budget = self._limits.tokens
        work: list[tuple[Sequence, int]] = []
        preemptions = self.counters.preemptions
        for sequence in list(self.running):
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count and sequence in self.running and self._grow(sequence, count):
                work.append((sequence, count))
                budget -= count
        if preemptions == self.counters.preemptions:
            while self.waiting and budget and len(self.running) < self._limits.sequences:
                count = self._admit(self.waiting[0], budget)
                if not count:
                    break
                sequence = self.waiting.popleft()
                self.running[sequence] = None
                work.append((sequence, count))
                budget -= count
        work = [(sequence, count) for sequence, count in work if sequence in self.running]
        if not work:
            return None
        prefill = sum(count for sequence, count in work if not sequence.prefilled)
        decoding = sum(1 for sequence, _ in work if sequence.prefilled)
        return Step(tuple(work), self._timing.step_s(prefill, decoding))

    def complete(self, step: Step) -> list[tuple[Sequence, int]]:
        """Note that a step is over: blocks stored, and the token each sequence that reached its end gained."""
        gained: list[tuple[Sequence, int]] = []
        for sequence, count in step.work:
            if sequence.done:
                continue
            sequence.computed += count
            self._store(sequence)
            if sequence.computed == len(sequence.tokens):
                token = self._words.following(sequence.tokens, sequence.prompt.seed)
                sequence.tokens.append(token)
                sequence.chain.extend(sequence.tokens)
                self.counters.generated += 1
                if sequence.generated >= sequence.prompt.limit:
                    self._finish(sequence)
                gained.append((sequence, token))
        return gained

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Give a waiting sequence its blocks for a first chunk; returns its tokens, 0 when there is no room."""
        size = self.cache.block_size
        # The last token is always computed: its logits are what the first new token is sampled from.
        findable = (len(sequence.tokens) - 1) // size
        hits = self.cache.match(sequence.chain.names[:findable])
        found = len(hits) * size
        count = min(len(sequence.tokens) - found, budget)
        fresh = -(-(found + count) // size) - len(hits)
        if not self.cache.fits(hits, fresh):
            return 0
        if sequence.prompt.tells_hits and hits:
            self.cache.changes.append(self._run(sequence, 0, len(hits)))
        self.cache.hold(hits)
        sequence.blocks = hits + self.cache.take(fresh)
        sequence.computed = found
        sequence.stored = len(hits)
        if not sequence.preempted:
            sequence.cached = found
            self.counters.queries += len(sequence.prompt.tokens)
            self.counters.hits += found
        return count

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Give a running sequence room for `count` more tokens, preempting the youngest; False when it had to go itself."""
        fresh = -(-(sequence.computed + count) // self.cache.block_size) - len(sequence.blocks)
        while not self.cache.fits((), fresh):
            youngest = next(reversed(self.running))
            del self.running[youngest]
            self._release(youngest)
            youngest.computed, youngest.preempted = 0, True
            self.waiting.appendleft(youngest)
            self.counters.preemptions += 1
            if youngest is sequence:
                return False
        sequence.blocks += self.cache.take(fresh)
        return True

    def _store(self, sequence: Sequence) -> None:
        """Announce the blocks that have filled, where this kind of engine does so now."""
        if not self._stores_generated_at_end:
            self._announce(sequence, sequence.computed)
        elif sequence.prefilled:
            self._announce(sequence, len(sequence.prompt.tokens))

    def _announce(self, sequence: Sequence, tokens: int) -> None:
        """Name the full blocks among the first `tokens` that have no name yet."""
        first, last = sequence.stored, tokens // self.cache.block_size
        if first >= last:
            return
        self.cache.store(sequence.blocks[first:last], self._run(sequence, first, last))
        sequence.stored = last

    def _run(self, sequence: Sequence, first: int, last: int) -> Stored:
        """A sequence's blocks from `first` to before `last`, as they are announced."""
        size, names = self.cache.block_size, sequence.chain.names
        return Stored(
            names=tuple(names[first:last]),
            parent=names[first - 1] if first else None,
            tokens=tuple(sequence.tokens[first * size : last * size]),
            salt=sequence.prompt.salt,
            adapter=sequence.prompt.adapter,
            session=sequence.prompt.session,
        )

    def _finish(self, sequence: Sequence) -> None:
        self._announce(sequence, sequence.computed)
        reason = sequence.prompt.ending
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        del self.running[sequence]
        self._release(sequence)
        sequence.done = True

    def _release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        sequence.blocks = []

    def _check(self) -> None:
        """Assert every invariant; for tests."""
        self.cache._check()  # noqa: SLF001 - one structure, checked from its top
        held = set(itertools.chain.from_iterable(sequence.blocks for sequence in self.running))
        assert len(held) == self.cache.used
        assert not any(sequence.blocks for sequence in self.waiting)
        assert not any(sequence.done for sequence in itertools.chain(self.running, self.waiting))
