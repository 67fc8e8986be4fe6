"""What does an engine call its blocks? A chain of SHA-256 digests, shortened as each kind of engine shortens its own.

    digest(i) = SHA-256(digest(i-1) + tokens of block i as little-endian u32)

A router must treat these names as opaque. Under vLLM they depend on a seed, so that two engines here never agree on one by accident;
SGLang's depend on the tokens and the salt alone, and are equal on every engine.
"""

from __future__ import annotations

import hashlib
from array import array

from engines.types import EngineKind


class BlockNamer:
    """Starts the chains of one engine."""

    __slots__ = ("_kind", "_root", "block_size")

    def __init__(self, kind: EngineKind, block_size: int, seed: int = 0) -> None:
        self._kind = kind
        self._root = hashlib.sha256(f"simulated-none-hash-{seed}".encode()).digest()
        self.block_size = block_size

    def chain(self, salt: str | None = None, adapter: str | None = None) -> Chain:
        """A chain for one sequence; different salts and adapters share no name."""
        signed = self._kind is EngineKind.SGLANG
        root = b"" if signed else self._root
        if salt:
            root = hashlib.sha256((b"" if signed else root) + b"sglang-cache-salt-v1\0" + salt.encode()).digest()
        if adapter:
            root = hashlib.sha256(root + b"adapter\0" + adapter.encode()).digest()
        return Chain(root, self.block_size, signed=signed)


class Chain:
    """The names of one sequence's full blocks, growing as its tokens come."""

    __slots__ = ("_block_size", "_digest", "_signed", "names")

    def __init__(self, root: bytes, block_size: int, *, signed: bool) -> None:
        self._digest = root
        self._block_size = block_size
        self._signed = signed
        self.names: list[int] = []

    def extend(self, tokens: array[int]) -> None:
        """Name every full block of `tokens` that has no name yet. Runtime complexity: O(new tokens)."""
        size = self._block_size
        new = len(tokens) // size - len(self.names)
        if new <= 0:
            return
        start = len(self.names) * size
        data = memoryview(tokens[start : start + new * size].tobytes())
        width = tokens.itemsize * size
        digest = self._digest
        for offset in range(0, new * width, width):
            digest = hashlib.sha256(digest + data[offset : offset + width]).digest()
            self.names.append(int.from_bytes(digest[:8], "big", signed=True) if self._signed else int.from_bytes(digest[-8:], "big"))
        self._digest = digest
