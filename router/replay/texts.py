"""Which blocks do two texts share that do not exist? A text is pieces of known lengths; those that begin with equal pieces have equal keys so far.

system prompt (piece 7, 40 tokens) + question (piece 8, 30 tokens), in blocks of 16
[ 7:0-16 ][ 7:16-32 ][ 7:32-40 8:0-8 ][ 8:8-24 ]  8:24-30      each key is the hash of the key before it and what is in the block
"""

from __future__ import annotations

from typing import Self

_MASK = (1 << 64) - 1


class Text:
    """A text that grows.

    >>> one, other = Text(16).add(7, 40).add(8, 30), Text(16).add(7, 40).add(9, 30)
    >>> one.keys[:2] == other.keys[:2], one.keys[2] == other.keys[2], len(one.keys), one.tokens
    (True, False, 4, 70)
    """

    __slots__ = ("_block_size", "_open", "_room", "keys", "tokens")

    def __init__(self, block_size: int) -> None:
        self.keys: list[int] = []
        """Of its full blocks."""
        self.tokens = 0
        self._block_size = block_size
        self._open: tuple[int, ...] = ()
        """What is in the block that is not full."""
        self._room = block_size

    def add(self, piece: int, tokens: int) -> Self:
        """Append the first `tokens` of a piece; equal pieces have equal tokens."""
        self.tokens += tokens
        start = 0
        while tokens - start >= self._room:
            # Of integers, so equal in every process.
            key = hash((self.keys[-1] if self.keys else 0, *self._open, piece, start, self._room)) & _MASK
            self.keys.append(key)
            start, self._open, self._room = start + self._room, (), self._block_size
        if start < tokens:
            self._open += (piece, start, tokens - start)
            self._room -= tokens - start
        return self

    def copy(self) -> Text:
        """Another that goes on from here."""
        other = Text(self._block_size)
        other.keys, other.tokens, other._open, other._room = list(self.keys), self.tokens, self._open, self._room
        return other
