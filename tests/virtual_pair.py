"""A prefill engine, a decode engine and the router's own judgement of them, on a clock of their own: what clients felt, to the microsecond.

The schedulers are those of the simulated engines, and time only passes where their steps and the link between them take it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from engines.metrics import EngineWork
from engines.simulator.cache import BlockCache
from engines.simulator.handover import Fetch, contents
from engines.simulator.hashes import BlockNamer
from engines.simulator.scheduler import Limits, Scheduler, Step
from engines.simulator.sequences import Prompt, Sequence, Spoken
from engines.simulator.settings import SimulateSettings
from engines.simulator.timing import Timing
from engines.simulator.words import Words
from engines.types import Endpoint, EngineKind
from router.disagg import Facts, Mode
from router.pairing import Awaited, DisaggRules, Pairing

PREFILL, DECODE = Endpoint("http://p:8000"), Endpoint("http://d:8000")
PAIR = PREFILL, DECODE
REPORT_S = 2.0


class Load(NamedTuple):
    """What is asked, all the while."""

    seconds: float
    prompt_tokens: int
    every_s: float
    """Between two long prompts."""
    streams: int = 6
    """That run all the time, of 100 tokens each."""
    long_answer: int = 4
    """Tokens of the answers to long prompts."""
    whole: bool = False
    """Answers come whole."""


class Felt(NamedTuple):
    """What clients felt, in seconds."""

    waits: list[float]
    """Of each long prompt for its first token, in the order they were asked."""
    starts: list[float]
    """Of each running stream for its first token."""
    gaps: list[float]
    """Between two tokens of running streams."""
    remote: list[bool]
    """Whether each long prompt was computed elsewhere."""


class Clock:
    """Does what is due, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._count), act))

    def run(self, seconds: float) -> None:
        while self._due and self._due[0][0] <= seconds:
            self.now, _, act = heapq.heappop(self._due)
            act()


class Engine:
    """One scheduler, step by step."""

    def __init__(self, clock: Clock, settings: SimulateSettings) -> None:
        self.scheduler = Scheduler(
            BlockCache(settings.kv_blocks, settings.block_size),
            Timing.of(settings),
            Limits(settings.max_num_seqs, settings.max_num_batched_tokens),
            prefix_caching=False,
        )
        self._words = Words({1: "a", 2: "b"})
        self.fetch: Callable[[Sequence], None] = lambda _: None
        self._clock = clock
        self._namer = BlockNamer(EngineKind.VLLM, settings.block_size)
        self._told: dict[Sequence, Callable[[], None]] = {}
        self._busy = False

    def submit(self, prompt: Prompt, told: Callable[[], None]) -> None:
        """`told` is called for each token."""
        sequence = Spoken(prompt, self._namer.chain(), self._words)
        self._told[sequence] = told
        self.scheduler.submit(sequence)
        self.nudge()

    def nudge(self) -> None:
        if self._busy:
            return
        step = self.scheduler.plan()
        for sequence in self.scheduler.take_to_fetch():
            self.fetch(sequence)
        if step is not None:
            self._busy = True
            self._clock.after(step.duration_s, lambda: self._complete(step))

    def _complete(self, step: Step) -> None:
        self._busy = False
        for sequence, _ in self.scheduler.complete(step):
            self._told[sequence]()
            if sequence.done:
                del self._told[sequence]
        self.nudge()


class VirtualPair:
    """Requests come, and are computed where the router's judgement says."""

    def __init__(self, mode: Mode, link_bytes_per_s: float) -> None:
        self.pairing = Pairing(DisaggRules(mode))
        self.link_bytes_per_s = link_bytes_per_s
        """May change while it runs."""
        self.settings = SimulateSettings(kv_blocks=16_384)
        self.clock = Clock()
        self.prefill, self.decode = Engine(self.clock, self.settings), Engine(self.clock, self.settings)
        self.decode.fetch = self._fetch
        self._link_free = 0.0
        self.queued = {PREFILL: 0, DECODE: 0}
        """Prompt tokens to compute."""
        self.active = 0
        self.prompts = itertools.count(1)

    def run(self, load: Load) -> Felt:
        """So much of it, behind what ran before."""
        felt, end = Felt([], [], [], []), self.clock.now + load.seconds

        def stream() -> None:
            if self.clock.now < end:
                _Stream(self, felt, 16, 100, whole=load.whole).over = stream

        def long_prompt() -> None:
            if self.clock.now < end:
                _LongPrompt(self, felt, load.prompt_tokens, load.long_answer, whole=load.whole)
                self.clock.after(load.every_s, long_prompt)

        for number in range(load.streams):
            self.clock.after(0.001 * number, stream)
        self.clock.after(0.1, long_prompt)
        for number in range(int(load.seconds / REPORT_S)):
            self.clock.after(REPORT_S * (number + 1), self._report)
        self.clock.run(math.inf)
        return felt

    def _fetch(self, sequence: Sequence) -> None:
        size = len(sequence.prompt.tokens) * self.settings.kv_bytes_per_token
        self._link_free = max(self.clock.now, self._link_free) + size / self.link_bytes_per_s

        def fetched() -> None:
            self.decode.scheduler.fetched(sequence, contents(sequence.prompt.tokens, self.settings.block_size))
            self.decode.nudge()

        self.clock.after(self._link_free - self.clock.now, fetched)

    def _report(self) -> None:
        counters = self.decode.scheduler.counters
        computed = counters.queries - counters.fetched
        self.pairing.reported(DECODE, EngineWork(computed, counters.fetched, counters.steps, counters.steps_s))


class _Request:
    """One request's way through the pair."""

    def __init__(self, pair: VirtualPair, felt: Felt, tokens: int, limit: int, *, whole: bool) -> None:
        self.over: Callable[[], None] = lambda: None
        self.felt = felt
        self.began = self._decode_began = pair.clock.now
        self._pair = pair
        self._limit = limit
        self._whole = whole
        self._got: list[float] = []
        self._awaited: Awaited | None = None
        self._facts = Facts(
            tokens,
            queued_at_decode=pair.queued[DECODE],
            queued_at_prefill=pair.queued[PREFILL],
            decoding=pair.active - pair.pairing.awaiting(DECODE),
            carried=tokens * pair.settings.kv_bytes_per_token,
        )
        self.split = pair.pairing.split(self._facts, PAIR, pair.clock.now, must=False)
        pair.pairing.chosen(self.split, DECODE, pair.clock.now)
        number = next(pair.prompts)
        self._ids = [2 + (number * 7919 + place) % 30_000 for place in range(tokens)]
        pair.queued[self._computes] += tokens
        pair.active += 1
        if self.split.remote:
            pair.prefill.submit(Prompt(self._ids, 1), self._computed)
        else:
            pair.decode.submit(Prompt(self._ids, limit), self._token)

    @property
    def _computes(self) -> Endpoint:
        return PREFILL if self.split.remote else DECODE

    def _computed(self) -> None:
        """The prompt has been, elsewhere."""
        pair, now = self._pair, self._pair.clock.now
        pair.queued[PREFILL] -= len(self._ids)
        pair.pairing.prefilled(PAIR, self._facts.queued_at_prefill + len(self._ids), now - self.began, now)
        self._decode_began = now
        if not self._whole:
            self._awaited = pair.pairing.awaits(PAIR, self._facts, now)
        pair.decode.submit(Prompt(self._ids, self._limit, handover=Fetch("", "")), self._token)

    def _token(self) -> None:
        pair, now = self._pair, self._pair.clock.now
        self._got.append(now)
        if len(self._got) == 1:
            self.first(now)
            if not self.split.remote:
                pair.queued[DECODE] -= len(self._ids)
            if not self._whole:
                self._learn(now)
        else:
            self.further(self._got[-1] - self._got[-2])
        if len(self._got) == self._limit:
            pair.active -= 1
            if self._whole:
                self._learn_whole(now)
            self.over()

    def _learn(self, first_at: float, *, rough: bool = False) -> None:
        pairing, now = self._pair.pairing, self._pair.clock.now
        if self._awaited is not None:
            pairing.came(self._awaited)
        if self.split.remote:
            pairing.transferred(PAIR, self._facts, first_at - self._decode_began, now, rough=rough)
        else:
            pairing.computed(DECODE, self._facts.queued_at_decode + len(self._ids), first_at - self.began, now, rough=rough)

    def _learn_whole(self, now: float) -> None:
        first_s = self._pair.pairing.until_first(DECODE, now - self._decode_began, self._limit)
        if first_s is not None:
            self._learn(self._decode_began + first_s, rough=True)
        elif self.split.remote:
            self._pair.pairing.untold(PAIR, self._facts)

    def first(self, now: float) -> None:
        """A first token has come."""

    def further(self, gap: float) -> None:
        """Another one."""


class _Stream(_Request):
    def first(self, now: float) -> None:
        self.felt.starts.append(now - self.began)

    def further(self, gap: float) -> None:
        self.felt.gaps.append(gap)


class _LongPrompt(_Request):
    def __init__(self, pair: VirtualPair, felt: Felt, tokens: int, limit: int, *, whole: bool) -> None:
        self._place = len(felt.waits)
        felt.waits.append(math.nan)
        super().__init__(pair, felt, tokens, limit, whole=whole)
        felt.remote.append(self.split.remote)

    def first(self, now: float) -> None:
        self.felt.waits[self._place] = now - self.began
