"""What does an engine compute next? Continuous batching in first-come order, over a block cache, without a clock.

    submit ──▶ waiting ──plan──▶ running ──complete──▶ a token each ──▶ finished ──▶ kept ──forget──▶ gone
                │ ▲                 │                                        (only where another engine is to fetch its KV)
                │ └── preempted ────┘  (no block left: the youngest gives its blocks up and starts again)
                │ ▲
     fetching ◀─┘ └── fetched, unfetched  (blocks are there, and KV for them is on its way from another engine)

The owner asks for a step (`plan`), lets its time pass, and says that it is over (`complete`). Whoever drives it decides what time is:
a server sleeps, a replay in virtual time only adds.
"""

# ruff: noqa: S101 - `_check` asserts its invariants; nothing else here asserts
from __future__ import annotations

import itertools
from collections import deque

import msgspec

from engines.simulator.cache import BlockCache, Stored
from engines.simulator.handover import Contents, Keep
from engines.simulator.sequences import Sequence
from engines.simulator.timing import Timing


class Step(msgspec.Struct, frozen=True):
    """One pass of the model: how many tokens of each sequence, and how long it takes."""

    work: tuple[tuple[Sequence, int], ...]
    duration_s: float
    decoding: int
    """How many of them have computed their prompt."""
    steady: bool
    """Whether all do, by one token each, and all that could be let in have been."""


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
    fetched: int = 0
    """Prompt tokens whose KV came from another engine."""
    generated: int = 0
    steps: int = 0
    """Tokens generated, less the first of each sequence."""
    steps_s: float = 0.0
    """The times between them: of the steps that made them."""
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

    def __init__(
        self,
        cache: BlockCache,
        timing: Timing,
        limits: Limits,
        *,
        stores_generated_at_end: bool = False,
        prefix_caching: bool = True,
    ) -> None:
        self.cache = cache
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.fetching: dict[Sequence, None] = {}
        self.kept: dict[Sequence, None] = {}
        self._to_fetch: list[Sequence] = []
        self._timing = timing
        self._limits = limits
        self._stores_generated_at_end = stores_generated_at_end
        self._prefix_caching = prefix_caching

    @property
    def queued(self) -> int:
        """Sequences that wait, for their turn or for KV."""
        return len(self.waiting) + len(self.fetching)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """Forget a sequence at once, freeing its blocks; False when it was over already."""
        if sequence.done:
            return False
        self._drop(sequence)
        self.counters.aborted += 1
        return True

    def fail(self, sequence: Sequence) -> None:
        """End a sequence in an error."""
        self._drop(sequence)
        self.counters.finished["error"] = self.counters.finished.get("error", 0) + 1

    def take_to_fetch(self) -> list[Sequence]:
        """Those that have been given blocks for KV from another engine since the last call."""
        taken, self._to_fetch = self._to_fetch, []
        return [sequence for sequence in taken if not sequence.done]

    def missing(self, sequence: Sequence) -> int:
        """How many of the blocks of its prompt another engine has to send: the last ones."""
        return len(sequence.blocks) - sequence.stored

    def fetched(self, sequence: Sequence, given: Contents, cached: int | None = None) -> None:
        """The missing KV has come, with these contents; all but the last token is computed then. `cached`: what the other engine had cached."""
        self._count(sequence)
        length = sequence.prompt_length
        if spoiled := sequence.difference(given, self.cache.block_size):
            sequence.spoiled = spoiled
            self.cache.spoil(sequence.blocks[sequence.stored :], spoiled)
        self.counters.fetched += length - sequence.computed
        sequence.cached = length if cached is None else cached
        sequence.computed = length
        self._announce(sequence, length)
        sequence.computed = length - 1
        self._go_on(sequence)

    def unfetched(self, sequence: Sequence) -> None:
        """The missing KV will not come: it is computed here."""
        self._count(sequence)
        self._go_on(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Give up the blocks of a finished sequence that have been kept for another engine."""
        if sequence in self.kept:
            del self.kept[sequence]
            self._release(sequence)

    def plan(self) -> Step | None:
        """Admit what fits and say what the next step computes; None when there is nothing to do."""
        budget = self._limits.tokens
        work: list[tuple[Sequence, int]] = []
        preemptions = self.counters.preemptions
        for sequence in list(self.running):
            count = min(sequence.length - sequence.computed, budget)
            if count and sequence in self.running and self._grow(sequence, count):
                work.append((sequence, count))
                budget -= count
        if preemptions == self.counters.preemptions:
            while self.waiting and budget and len(self.running) < self._limits.sequences:
                count = self._admit(self.waiting[0], budget)
                if not count:
                    break
                sequence = self.waiting.popleft()
                if sequence.fetches:
                    self.fetching[sequence] = None
                    self._to_fetch.append(sequence)
                    continue
                self.running[sequence] = None
                work.append((sequence, count))
                budget -= count
        work = [(sequence, count) for sequence, count in work if sequence in self.running]
        if not work:
            return None
        prefill = decoding = read = 0
        for sequence, count in work:
            read += sequence.computed
            if sequence.computed >= sequence.prompt_length:
                decoding += 1
            else:
                prefill += count
        # One that was preempted may compute several tokens again; and after a preemption nobody has been let in who might be now.
        steady = len(work) == decoding == sum(count for _, count in work) and preemptions == self.counters.preemptions
        return Step(tuple(work), self._timing.step_s(prefill, decoding, read), decoding, steady)

    def alike(self, step: Step) -> int:
        """How many steps will be like this one, itself included, if nothing is submitted or aborted meanwhile.

        Such steps only decode. Nobody ends and no block is taken before the last one is over, so nobody who waits could be let in either.
        Runtime complexity: O(sequences).
        """
        if not step.steady:
            return 1
        size = self.cache.block_size
        return min(
            min(sequence.prompt.limit - sequence.length + sequence.prompt_length, len(sequence.blocks) * size - sequence.computed)
            for sequence, _ in step.work
        )

    def skip(self, step: Step, times: int) -> None:
        """The step has been done `times` times; less often than they are `alike`. Runtime complexity: O(sequences)."""
        for sequence, _ in step.work:
            sequence.computed += times
            sequence.length += times
        self.counters.generated += times * len(step.work)

    def complete(self, step: Step) -> list[tuple[Sequence, int]]:
        """Note that a step is over: blocks stored, and the token each sequence that reached its end gained."""
        gained: list[tuple[Sequence, int]] = []
        for sequence, count in step.work:
            if sequence.done:
                continue
            sequence.computed += count
            self._store(sequence)
            if sequence.computed == sequence.length:
                token = sequence.gain()
                self.counters.generated += 1
                if sequence.generated > 1:
                    self.counters.steps += 1
                    self.counters.steps_s += step.duration_s
                if sequence.generated >= sequence.prompt.limit:
                    self._finish(sequence)
                gained.append((sequence, token))
        return gained

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Give a waiting sequence its blocks for a first chunk, or for all it is to fetch; returns its tokens, 0 when there is no room."""
        size = self.cache.block_size
        if sequence.blocks:  # that was fetched, or failed to be
            return min(sequence.length - sequence.computed, budget)
        # The last token is always computed: its logits are what the first new token is sampled from.
        findable = (sequence.length - 1) // size if self._prefix_caching else 0
        hits = self.cache.match(sequence.names[:findable])
        found = len(hits) * size
        count = sequence.length - found
        if not sequence.fetches:
            count = min(count, budget)
        fresh = -(-(found + count) // size) - len(hits)
        if not self.cache.fits(hits, fresh):
            return 0
        if sequence.prompt.tells_hits and hits:
            self.cache.changes.append(self._run(sequence, 0, len(hits)))
        self.cache.hold(hits)
        sequence.blocks = hits + self.cache.take(fresh)
        sequence.computed = found
        sequence.stored = len(hits)
        sequence.spoiled = self.cache.spoiled(hits)
        if not sequence.preempted and not sequence.fetches:
            self._count(sequence)
        return count

    def _count(self, sequence: Sequence) -> None:
        """Count what of a prompt was found in the cache."""
        sequence.cached = sequence.computed
        self.counters.queries += sequence.prompt_length
        self.counters.hits += sequence.computed

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
            self._announce(sequence, sequence.prompt_length)

    def _announce(self, sequence: Sequence, tokens: int) -> None:
        """Name the full blocks among the first `tokens` that have no name yet."""
        first, last = sequence.stored, tokens // self.cache.block_size
        if first >= last or not self._prefix_caching:
            return
        self.cache.store(sequence.blocks[first:last], self._run(sequence, first, last))
        sequence.stored = last

    def _run(self, sequence: Sequence, first: int, last: int) -> Stored:
        """A sequence's blocks from `first` to before `last`, as they are announced."""
        size, names = self.cache.block_size, sequence.names
        return Stored(
            names=tuple(names[first:last]),
            parent=names[first - 1] if first else None,
            tokens=sequence.told(first * size, last * size),
            salt=sequence.prompt.salt,
            adapter=sequence.prompt.adapter,
            session=sequence.prompt.session,
        )

    def _finish(self, sequence: Sequence) -> None:
        self._announce(sequence, sequence.computed)
        reason = sequence.prompt.ending
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        del self.running[sequence]
        sequence.done = True
        match sequence.prompt.handover:
            case Keep(after_stop=after_stop) if after_stop or reason != "stop":
                self.kept[sequence] = None
            case _:
                self._release(sequence)

    def _go_on(self, sequence: Sequence) -> None:
        """Let a sequence run that has waited for KV: before those that have waited for their turn only."""
        del self.fetching[sequence]
        sequence.fetches = False
        self.waiting.appendleft(sequence)

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self.running:
            del self.running[sequence]
        elif sequence in self.fetching:
            del self.fetching[sequence]
        else:
            self.waiting.remove(sequence)
        self._release(sequence)
        sequence.done = True

    def _release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        sequence.blocks = []

    def _check(self) -> None:
        """Assert every invariant; for tests."""
        self.cache._check()  # noqa: SLF001 - one structure, checked from its top
        holding = itertools.chain(self.running, self.waiting, self.fetching, self.kept)
        held = set(itertools.chain.from_iterable(sequence.blocks for sequence in holding))
        assert len(held) == self.cache.used
        assert not any(sequence.blocks and (sequence.fetches or isinstance(sequence.prompt.handover, Keep)) for sequence in self.waiting)
        assert not any(sequence.done for sequence in itertools.chain(self.running, self.waiting, self.fetching))
        assert all(sequence.done for sequence in self.kept)
