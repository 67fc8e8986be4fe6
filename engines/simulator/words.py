"""What does a model that is none say? Words of its vocabulary, each one following from all tokens before it.

So equal prompts get equal answers on every engine with the same seed, and a text that is continued elsewhere from the tokens already
given goes on as it would have. Only words that encode to themselves are said: a conversation that quotes an answer quotes its tokens.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping


class Words:
    """A vocabulary to speak with: token id → its text."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        if not texts:
            msg = "a vocabulary without a single plain word"
            raise ValueError(msg)
        self.texts = dict(texts)
        self._ids = tuple(sorted(self.texts))

    def following(self, tokens: array[int], seed: int) -> int:
        """The token that follows `tokens`. Runtime complexity: O(tokens), at the speed of crc32 (about 2 us for 1,600)."""
        # crc32 combines its start with the first token by XOR: spread over all bits, no seed makes one token look like another.
        start = (seed + 1) * 0x9E3779B1 & 0xFFFFFFFF
        mixed = zlib.crc32(memoryview(tokens).cast("B"), start) * 0x9E3779B97F4A7C15
        return self._ids[(mixed >> 32) % len(self._ids)]
