"""How long does an engine take? A step costs a part of its own, its prefill tokens, the sequences that decode, and the KV cache it reads.

step = base + prefill tokens / rate + (decode base + per sequence x decoding sequences, if something decodes) + per KV token x tokens read
"""

from __future__ import annotations

import msgspec

from engines.simulator.settings import SimulateSettings


class Timing(msgspec.Struct, frozen=True):
    """The speed of one engine."""

    prefill_tokens_per_s: float
    decode_step_s: float
    decode_sequence_s: float
    speedup: float
    """Engine seconds per clock second; 0 means that no step takes any time."""
    step_base_s: float = 0.0
    """Of every step, whatever it computes."""
    kv_token_s: float = 0.0
    """For each token whose KV a step reads: those that its sequences had before it."""

    @classmethod
    def of(cls, settings: SimulateSettings) -> Timing:
        """The speed the settings ask for."""
        return cls(
            settings.prefill_tokens_per_s,
            settings.decode_step_ms / 1000,
            settings.decode_sequence_ms / 1000,
            settings.speedup,
            settings.step_ms / 1000,
            settings.kv_token_ns / 1e9,
        )

    def step_s(self, prefill_tokens: int, decoding: int, kv_tokens: int = 0) -> float:
        """Clock seconds one step takes."""
        if not self.speedup:
            return 0.0
        engine_s = self.step_base_s + prefill_tokens / self.prefill_tokens_per_s + self.kv_token_s * kv_tokens
        if decoding:
            engine_s += self.decode_step_s + self.decode_sequence_s * decoding
        return engine_s / self.speedup

    def growth_s(self, decoding: int) -> float:
        """By how much each decode step is longer than the one before it, since every sequence has one more token to read."""
        return self.kv_token_s * decoding / self.speedup if self.speedup else 0.0
