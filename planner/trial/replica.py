"""How does one engine get on with its requests? Exactly, and in as few steps as there are arrivals, first tokens and ends.

Prompts are computed in order, and streams share every step, so between two events all goes on at an even pace:

    step     = a + b·streams + c·chunk         chunk: what of the waiting prompts fits into a step
    prompts  : chunk tokens a step             streams: one token a step each

A stream that begins when every stream of the replica has got `tick` tokens ends when that is `tick + osl`; so ends wait in one heap.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator

import msgspec

from engines.types import Role


class Speed(msgspec.Struct, frozen=True):
    """How fast an engine is, and how much it holds."""

    prefill_tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.005
    decode_stream_s: float = 0.0001
    batched_tokens: int = 8192
    kv_tokens: int = 400_000
    max_streams: int = 256


class Request(msgspec.Struct):
    """One request, and what its client saw."""

    at: float
    isl: int
    osl: int
    first_token_at: float | None = None
    ended_at: float | None = None
    sent_at: float | None = None

    @property
    def ttft_s(self) -> float:
        """Infinite where it has none yet."""
        return math.inf if self.first_token_at is None else self.first_token_at - self.at

    @property
    def itl_s(self) -> float:
        """The mean between its tokens."""
        if self.ended_at is None or self.first_token_at is None:
            return math.inf
        return (self.ended_at - self.first_token_at) / max(1, self.osl - 1)


class Engine:
    """One replica's queue, prompts and streams."""

    def __init__(self, role: Role, speed: Speed, at: float) -> None:
        self.role = role
        self.waiting: deque[Request] = deque()
        self.prompt: Request | None = None
        """Being computed."""
        self.version = 0
        """Grows whenever the time of its next event changes."""
        self._speed = speed
        self._at = at
        self._left = 0.0
        """Tokens of the prompt that are still to be computed."""
        self._tick = 0.0
        self._ends: list[tuple[float, int, Request]] = []
        self._number = itertools.count()
        self._kv = 0

    @property
    def streams(self) -> int:
        """Being decoded."""
        return len(self._ends)

    @property
    def in_flight(self) -> int:
        """All that it has."""
        return len(self.waiting) + len(self._ends) + (self.prompt is not None)

    @property
    def kv_usage(self) -> float:
        """0..1."""
        return self._kv / self._speed.kv_tokens

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        return 0 if self.role is Role.DECODE else round(self._left) + sum(request.isl for request in self.waiting)

    def take(self, request: Request, now: float) -> list[Request]:
        """A request comes; those that have their first token by that."""
        self._advance(now)
        self.waiting.append(request)
        return self._admit(now)

    def next_at(self) -> float:
        """When something happens next by itself."""
        pace = self._pace()
        if pace is None:
            return math.inf
        step, chunk = pace
        waits = [self._left / chunk * step] if self.prompt is not None else []
        waits += [(self._ends[0][0] - self._tick) * step] if self._ends else []
        return self._at + max(0.0, min(waits))

    def happen(self, now: float) -> tuple[list[Request], list[Request]]:
        """What happens now: prompts that are computed (whose first token is there), and streams that end."""
        self._advance(now)
        computed, ended = [], list(self._ended(now))
        if self.prompt is not None and self._left <= 1e-6:  # rounding
            request, self.prompt, self._left = self.prompt, None, 0.0
            computed.append(request)
            if self.role is Role.PREFILL:
                self._kv -= self._size(request)
            else:
                ended += self._stream(request, now)
        computed += self._admit(now)
        return computed, ended

    # inside

    def _pace(self) -> tuple[float, float] | None:
        """Seconds of a step, and prompt tokens in it."""
        if self.prompt is None and not self._ends:
            return None
        speed, chunk = self._speed, 0.0
        if self.prompt is not None:
            room = speed.batched_tokens - len(self._ends)
            chunk = max(1.0, min(float(room), max(self._left, 1.0) + sum(request.isl for request in itertools.islice(self.waiting, 8))))
        seconds = chunk / speed.prefill_tokens_per_s
        if self._ends:
            seconds += speed.decode_step_s + speed.decode_stream_s * len(self._ends)
        return max(seconds, 1e-9), chunk

    def _advance(self, now: float) -> None:
        pace = self._pace()
        if pace is not None:
            step, chunk = pace
            steps = (now - self._at) / step
            self._tick += steps
            if self.prompt is not None:
                self._left = max(0.0, self._left - steps * chunk)
        self._at = now
        self.version += 1

    def _ended(self, now: float) -> Iterator[Request]:
        while self._ends and self._ends[0][0] <= self._tick + 1e-6:
            _, _, request = heapq.heappop(self._ends)
            self._kv -= self._size(request)
            request.ended_at = now
            yield request

    def _admit(self, now: float) -> list[Request]:
        """Begin with those that wait, as far as there is room; those whose first token follows at once, where prompts come computed."""
        begun = []
        while self.waiting and self.prompt is None and len(self._ends) < self._speed.max_streams:
            request = self.waiting[0]
            size = self._size(request)
            if self._kv + size > self._speed.kv_tokens and self._kv:
                break
            self.waiting.popleft()
            self._kv += size
            if self.role is Role.DECODE:
                begun.append(request)
                self._stream(request, now)
            else:
                self.prompt, self._left = request, float(request.isl)
        return begun

    def _stream(self, request: Request, now: float) -> list[Request]:
        request.first_token_at = now
        if request.osl <= 1:
            self._kv -= self._size(request)
            request.ended_at = now
            return [request]
        heapq.heappush(self._ends, (self._tick + request.osl - 1, next(self._number), request))
        return []

    def _size(self, request: Request) -> int:
        return request.isl + (request.osl if self.role is not Role.PREFILL else 0)
