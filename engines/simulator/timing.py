"""How long does an engine take? A step costs its prefill tokens, plus one decode pass that grows with the batch.

step = prefill tokens / rate + (base + per sequence x decoding sequences), the second part only when something decodes
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

    @classmethod
    def of(cls, settings: SimulateSettings) -> Timing:
        """The speed the settings ask for."""
        return cls(settings.prefill_tokens_per_s, settings.decode_step_ms / 1000, settings.decode_sequence_ms / 1000, settings.speedup)

    def step_s(self, prefill_tokens: int, decoding: int) -> float:
        """Clock seconds one step takes."""
        if not self.speedup:
            return 0.0
        engine_s = prefill_tokens / self.prefill_tokens_per_s
        if decoding:
            engine_s += self.decode_step_s + self.decode_sequence_s * decoding
        return engine_s / self.speedup
