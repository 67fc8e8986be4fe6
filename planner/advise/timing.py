"""How long do a prefill and a decode step take? A roofline: what they compute over the peak, what they read over the bandwidth.

    prefill(n)        = max(flops(n) / compute, read_bytes(n) / memory)
    decode step(c, t) = (read_bytes(c) + c · kv_bytes(t)) / memory           c streams of t tokens: weights once, each stream's KV cache
    flops(n)          = 2 · active weights · n + 2 · output head + Σ layers 2 · heads · (head_dim + v_head_dim) · pairs(n)
    pairs(n)          = Σ i ≤ n: min(i, window)                              who looks at whom; n (n + 1) / 2 without a window

The two factors 2 are a multiplication and an addition (Kaplan et al., arXiv:2001.08361, section 2.1). Sparse and linear attention: the
former is counted as if it were dense, the latter by its projections only.
"""

from __future__ import annotations

import math

import msgspec

from engines.kv_bytes import KvShape
from engines.model_config import Attention, LatentAttention, Model
from planner.advise.weights import Weights


class Hardware(msgspec.Struct, frozen=True):
    """What an engine's GPUs reach together."""

    flops: float
    """Operations per second."""
    bytes_per_s: float
    """Of memory."""


class Work(msgspec.Struct, frozen=True):
    """A model as work: what a prompt takes to compute and what a step takes to read."""

    model: Model
    weights: Weights
    kv: KvShape

    def flops(self, tokens: int) -> float:
        """Operations to prefill `tokens` tokens."""
        attention = sum(_per_pair(layer.attention) * _pairs(tokens, _window(layer.attention)) for layer in self.model.layers)
        return 2.0 * self.weights.active * tokens + 2.0 * self.weights.head + attention

    def prefill_s(self, tokens: int, hardware: Hardware) -> float:
        """Seconds to prefill `tokens` tokens with nothing else going on."""
        return max(self.flops(tokens) / hardware.flops, self.weights.read_bytes(tokens) / hardware.bytes_per_s)

    def decode_step_s(self, streams: int, tokens: int, hardware: Hardware) -> tuple[float, float]:
        """Seconds of a decode step of `streams` streams of `tokens` tokens each: for the weights, and for the streams' KV caches."""
        return (
            self.weights.read_bytes(max(1, streams)) / hardware.bytes_per_s,
            streams * self.kv.bytes(tokens) / hardware.bytes_per_s,
        )


class Local(msgspec.Struct, frozen=True):
    """A prefill where streams are being decoded."""

    steps: int
    """Steps that it takes."""
    prefill_s: float
    """From its first step to its last one's end."""
    delay_s: float
    """By how much each stream falls behind."""


def beside(prefill_s: float, weights_s: float, caches_s: float, steps: int) -> Local:
    """A prefill in chunks that share their steps with the streams (chunked prefill).

    A step reads the weights anyway, for the streams: a chunk that takes no longer than that delays nobody. What it computes beyond that,
    each stream waits for; and each step reads the streams' KV caches, which the prefill waits for.
    """
    taken_s = max(prefill_s, steps * weights_s)
    return Local(steps, taken_s + steps * caches_s, taken_s - steps * weights_s)


def before(prefill_s: float) -> Local:
    """A prefill that goes first, whole or chunk after chunk: every stream waits for all of it."""
    return Local(1, prefill_s, prefill_s)


def steps_of(tokens: int, batched_tokens: int, streams: int) -> int:
    """Steps of a chunked prefill: each stream's token takes a place in the step. Raises ValueError where none is left."""
    if batched_tokens <= streams:
        raise ValueError(f"{streams} streams leave no token of {batched_tokens} in a step for a prefill")
    return math.ceil(tokens / (batched_tokens - streams))


def _per_pair(attention: Attention | LatentAttention | None) -> int:
    match attention:
        case Attention(heads, _, head_dim, v_head_dim):
            return 2 * heads * (head_dim + v_head_dim)
        case LatentAttention(heads, _, rope, nope, v_head_dim):
            return 2 * heads * (rope + nope + v_head_dim)
        case None:
            return 0


def _window(attention: Attention | LatentAttention | None) -> int | None:
    return attention.window if isinstance(attention, Attention) else None


def _pairs(tokens: int, window: int | None) -> int:
    near = tokens if window is None else min(tokens, window)
    return near * (near + 1) // 2 + (tokens - near) * near
