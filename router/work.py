"""What has an endpoint still to compute, and how long will it take? Learned from what it took before, as this router saw it.

    sent ──────── waits ──────── head ──── first token ──── generates ──── ended
                                  │◀─ progress: since it became the head, at the endpoint's pace, and no more than all of it

Engines compute prompts in the order in which they come, so the prompts sent and not answered yet are a queue, of which only the head
makes progress. Its pace is a low quantile of the time to the first token for each token computed: what prompts took that waited for
nothing. A mean would learn the queue as well, and a busy engine would look like a slow one.

An answer that is not streamed shows no first token. Such a prompt is taken for computed when its time has passed, or when a later
one has been.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict, deque
from typing import Final

ASSUMED_S_PER_TOKEN: Final = 1e-4
"""Until anything has been learned: a model of 8 billion parameters on an older card."""
SLOWEST_S_PER_TOKEN: Final = 1e-3
"""Until then, what is not seen is taken to have happened after so long."""
FIXED_TOKENS: Final = 128
"""A step's fixed part takes as long as so many tokens, roughly; so short prompts tell something too."""
LEAST_TOKENS: Final = 32
MOST_AHEAD: Final = 0.5
"""A prompt with less to compute, or with more of others' before it than so many times its own, tells of something else: of the queue, of
the prompt with the same prefix that it waited for, or of another engine."""
OBSERVED: Final = 32
"""So many first tokens count, of the latest."""
LEAST_OBSERVED: Final = 8
"""Before that, chance has too much of a say."""
QUANTILE: Final = 0.125
BUSY_S: Final = 60.0
"""How far back `busy` looks."""
_FORGETTING: Final = 0.05


class Prompt:
    """One prompt at an endpoint, until its request has ended."""

    __slots__ = ("first_token_at", "passed", "sent_at", "streamed", "telling", "tokens")

    def __init__(self, tokens: int, sent_at: float, *, streamed: bool, telling: bool) -> None:
        self.tokens = tokens
        self.telling = telling
        """The time to its first token tells the endpoint's pace."""
        self.sent_at = sent_at
        self.streamed = streamed
        self.first_token_at: float | None = None
        self.passed = False
        """Taken for computed, and not known to be."""


class Work:
    """One endpoint's.

    >>> work = Work()
    >>> for second in range(8):
    ...     prompt = work.sent(872, float(second), streamed=True)
    ...     work.computed(prompt, second + 0.1)
    >>> round(work.s_per_token, 6)
    0.0001
    >>> prompt = work.sent(10_000, 10.0, streamed=True)
    >>> round(work.done(10.5))
    5000
    """

    __slots__ = (
        "_busy",
        "_busy_at",
        "_head_since",
        "_latest",
        "_queue",
        "_sorted",
        "_started",
        "decoding",
        "itl_s",
        "passed",
        "prompt_tokens",
        "queued",
        "residence_s",
        "s_per_token",
    )

    def __init__(self) -> None:
        self.s_per_token: float | None = None
        """Seconds for each prompt token that it computes; None until it is known."""
        self.residence_s = 0.0
        """How long answers take from their first token to their last, of late; 0 until one has."""
        self.itl_s = 0.0
        """Seconds between two tokens of an answer, of late; 0 until it is known."""
        self.prompt_tokens = 0.0
        """What a prompt leaves to compute, on the average of late."""
        self.queued = 0
        """Tokens of the prompts in the queue."""
        self.passed = 0
        """And of those taken for computed since, whose answers have not come."""
        self.decoding = 0
        """Answers of which a token has come, and not the last."""
        self._started = 0.0
        """The sum of when."""
        self._queue: OrderedDict[Prompt, None] = OrderedDict()
        self._head_since = 0.0
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._busy = 0.0
        self._busy_at = 0.0

    def sent(self, tokens: int, now: float, *, streamed: bool) -> Prompt:
        """A prompt is on its way that leaves so many tokens to compute. Runtime complexity: O(1)."""
        self.settle(now)
        ahead = self.queued + self.passed - self.done(now)
        telling = streamed and tokens >= LEAST_TOKENS and ahead <= tokens * MOST_AHEAD
        prompt = Prompt(tokens, now, streamed=streamed, telling=telling)
        if not self._queue:
            self._look(now)
            self._head_since = now
        self._queue[prompt] = None
        self.queued += tokens
        self.prompt_tokens += _FORGETTING * (tokens - self.prompt_tokens) if self.prompt_tokens else tokens
        return prompt

    def computed(self, prompt: Prompt, now: float) -> None:
        """Its first token has come; or, where that cannot be seen, all of its answer.

        Runtime complexity: O(OBSERVED), and one step for each prompt before it whose first token nobody will see.
        """
        if prompt.first_token_at is not None:
            return
        prompt.first_token_at = now
        if prompt.telling:
            self._observe((now - prompt.sent_at) / (prompt.tokens + FIXED_TOKENS))
        if prompt.streamed:
            self.decoding += 1
            self._started += now
        if prompt in self._queue:
            while not (head := next(iter(self._queue))).streamed and head is not prompt:
                self._pass(head, now)
            self._leave(prompt, now)
        self._known(prompt)

    def ended(self, prompt: Prompt, now: float, tokens: int | None) -> None:
        """The last token of its answer has come; there were `tokens`, where that is known. Runtime complexity: O(1)."""
        if prompt.first_token_at is None or not prompt.streamed:
            return
        took = now - prompt.first_token_at
        self.residence_s += _FORGETTING * (took - self.residence_s) if self.residence_s else took
        if tokens is not None and tokens > 1:
            itl_s = took / (tokens - 1)
            self.itl_s += _FORGETTING * (itl_s - self.itl_s) if self.itl_s else itl_s

    def left(self, prompt: Prompt) -> None:
        """It is not there any more, however it ended. Runtime complexity: O(1)."""
        self._known(prompt)
        if prompt in self._queue:
            self._leave(prompt, self._busy_at)
        elif prompt.streamed and prompt.first_token_at is not None:
            self.decoding -= 1
            self._started = self._started - prompt.first_token_at if self.decoding else 0.0

    def settle(self, now: float) -> None:
        """Take prompts for computed whose answers are not streamed and whose time has passed. Runtime complexity: one step for each."""
        pace = self.s_per_token or SLOWEST_S_PER_TOKEN
        while self._queue and not (head := next(iter(self._queue))).streamed:
            until = self._head_since + head.tokens * pace
            if until > now:
                break
            self._pass(head, until)

    def done(self, now: float) -> float:
        """How many tokens should have been computed by now of prompts not known to be, as last settled. Runtime complexity: O(1)."""
        if not self._queue:
            return float(self.passed)
        progress = (now - self._head_since) / (self.s_per_token or ASSUMED_S_PER_TOKEN)
        return self.passed + min(max(progress, 0.0), next(iter(self._queue)).tokens)

    @property
    def computing(self) -> int:
        """How many prompts are in the queue."""
        return len(self._queue)

    def generated(self, now: float) -> float:
        """How many tokens of answers have come by now, at the usual pace. Runtime complexity: O(1)."""
        return (self.decoding * now - self._started) / self.itl_s if self.itl_s and self.decoding else 0.0

    def busy(self, now: float) -> float:
        """The share of the time of late that there was something to compute, 0 to 1. Runtime complexity: O(1)."""
        faded = math.exp((self._busy_at - now) / BUSY_S) if now > self._busy_at else 1.0
        return self._busy * faded + (1.0 - faded if self._queue else 0.0)

    def _look(self, now: float) -> None:
        self._busy, self._busy_at = self.busy(now), max(now, self._busy_at)

    def _leave(self, prompt: Prompt, now: float) -> None:
        self._look(now)
        if next(iter(self._queue)) is prompt:
            self._head_since = now
        del self._queue[prompt]
        self.queued -= prompt.tokens

    def _pass(self, prompt: Prompt, now: float) -> None:
        self._leave(prompt, now)
        prompt.passed = True
        self.passed += prompt.tokens

    def _known(self, prompt: Prompt) -> None:
        if prompt.passed:
            prompt.passed = False
            self.passed -= prompt.tokens

    def _observe(self, s_per_token: float) -> None:
        latest, ordered = self._latest, self._sorted
        if len(latest) == OBSERVED:
            ordered.remove(latest.popleft())
        latest.append(s_per_token)
        insort(ordered, s_per_token)
        if len(ordered) >= LEAST_OBSERVED:
            self.s_per_token = ordered[int(QUANTILE * len(ordered))]
