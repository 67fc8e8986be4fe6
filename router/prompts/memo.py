"""Which prompts' ids has an engine told already? Least recently used ones are forgotten first, by size."""

from __future__ import annotations

from collections import OrderedDict


class Memo:
    """A bounded map from digests to packed ids. All operations are O(1)."""

    def __init__(self, max_bytes: int = 16 * 1024 * 1024) -> None:
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._max_bytes = max_bytes

    def get(self, key: bytes) -> bytes | None:
        """The ids, which now are the most recently used."""
        if (packed := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return packed

    def put(self, key: bytes, packed: bytes) -> None:
        """Afterwards the ids are kept, unless they alone are larger than all room there is."""
        self._bytes -= len(self._kept.pop(key, b""))
        if len(packed) > self._max_bytes:
            return
        self._kept[key] = packed
        self._bytes += len(packed)
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest)

    def __len__(self) -> int:
        return len(self._kept)
