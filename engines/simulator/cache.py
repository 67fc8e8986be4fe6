"""Which blocks does an engine hold? A pool of physical blocks, some of them named, the longest unused given away first.

    free queue   [ never named | freed long ago ........ freed just now ]      takes from the left
    in use       every block some sequence references; never taken

A sequence's blocks are freed tail first, so that a chain loses its deepest block first and what is left is always a prefix. A named
block stays findable while it waits in the free queue. As in vLLM, one name may lie in several physical blocks (two sequences computed
it side by side, or the last block of a prompt was computed again, since the last token is never a hit); it is then announced, and
later removed, once for each. With `duplicates=False`, as in SGLang, the later copy stays nameless.

Every change is noted in `changes`, in order, for the engine to publish.

A block whose KV is not that of its name's tokens (another engine sent something else) is *spoiled*, until it is taken again.
"""

# ruff: noqa: S101 - `_check` asserts its invariants; nothing else here asserts
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many

import msgspec


class Stored(msgspec.Struct, frozen=True):
    """A run of blocks that came to hold the tokens of the chain `names`."""

    names: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    """Empty where nobody is to be told them."""
    salt: str | None = None
    adapter: str | None = None
    session: str | None = None


class Removed(msgspec.Struct, frozen=True):
    """One block lost its name."""

    name: int


class Cleared(msgspec.Struct, frozen=True):
    """Every block lost its name."""


Change = Stored | Removed | Cleared


class BlockCache:
    """The physical blocks of one engine."""

    def __init__(self, capacity: int, block_size: int, *, duplicates: bool = True) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.changes: list[Change] = []
        self._duplicates = duplicates
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity))
        self._references = [0] * capacity
        self._names: list[int | None] = [None] * capacity
        self._holders: dict[int, dict[int, None]] = {}
        self._spoiled: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks no sequence is using, named or not."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that sequences are using."""
        return self.capacity - len(self._free)

    @property
    def names(self) -> frozenset[int]:
        """What a prompt could hit."""
        return frozenset(self._holders)

    def __contains__(self, name: int) -> bool:
        return name in self._holders

    def match(self, names: Many[int]) -> list[int]:
        """The physical blocks of the longest held prefix of a chain."""
        found: list[int] = []
        for name in names:
            holders = self._holders.get(name)
            if holders is None:
                break
            found.append(next(iter(holders)))
        return found

    def spoil(self, blocks: Many[int], how: int) -> None:
        """Note that the KV in `blocks` is not that of their tokens; `how` says what it is instead."""
        self._spoiled.update(dict.fromkeys(blocks, how))

    def spoiled(self, blocks: Many[int]) -> int:
        """How the last spoiled one of `blocks` is spoiled; 0 where none is."""
        if not self._spoiled:
            return 0
        return next((self._spoiled[block] for block in reversed(blocks) if block in self._spoiled), 0)

    def fits(self, hits: Many[int], fresh: int) -> bool:
        """Whether `fresh` blocks can be taken once `hits` are held."""
        held = sum(1 for block in hits if not self._references[block])
        return len(self._free) - held >= fresh

    def hold(self, hits: Many[int]) -> None:
        """Reference blocks that are already there."""
        for block in hits:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """Reference `count` nameless blocks, taking names away from the longest unused; the caller has asked `fits`."""
        taken: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._spoiled.pop(block, None)
            self._references[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Many[int]) -> None:
        """Give up a sequence's blocks, listed from root to tail."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._free[block] = None
            if self._names[block] is None:
                self._free.move_to_end(block, last=False)

    def store(self, blocks: Many[int], run: Stored) -> None:
        """Give the names of `run` to `blocks`, and note it (in pieces, where blocks in between are held already and no copies are kept)."""
        size, parent = self.block_size, run.parent
        piece: list[int] = []
        piece_start, piece_parent = 0, parent
        for index, (block, name) in enumerate(zip(blocks, run.names, strict=True)):
            holders = self._holders.setdefault(name, {})
            if holders and (not self._duplicates or block in holders):
                self._note(run, piece, piece_start, piece_parent)
                piece, piece_start, piece_parent = [], index + 1, name
                continue
            holders[block] = None
            self._names[block] = name
            piece.append(name)
        self._note(run, piece, piece_start, piece_parent)
        if run.tokens and len(run.tokens) != len(run.names) * size:
            msg = f"{len(run.names)} blocks of {size} cannot hold {len(run.tokens)} tokens"
            raise ValueError(msg)

    def _note(self, run: Stored, names: list[int], start: int, parent: int | None) -> None:
        if names:
            size = self.block_size
            tokens = run.tokens[start * size : (start + len(names)) * size]
            self.changes.append(Stored(tuple(names), parent, tokens, run.salt, run.adapter, run.session))

    def clear(self) -> bool:
        """Take every name away; refuses (False) while a sequence uses a block."""
        if self.used:
            return False
        self._holders.clear()
        self._names = [None] * self.capacity
        self.changes.append(Cleared())
        return True

    def take_changes(self) -> list[Change]:
        """Everything noted since the last call."""
        changes, self.changes = self.changes, []
        return changes

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is None:
            return
        self._names[block] = None
        holders = self._holders[name]
        del holders[block]
        if not holders:
            del self._holders[name]
        self.changes.append(Removed(name))

    def _check(self) -> None:
        """Assert every invariant; for tests."""
        assert all(count >= 0 for count in self._references)
        assert set(self._free) == {block for block, count in enumerate(self._references) if not count}
        named = {(block, name) for block, name in enumerate(self._names) if name is not None}
        assert named == {(block, name) for name, holders in self._holders.items() for block in holders}
        assert all(self._holders.values())
        assert self._duplicates or all(len(holders) == 1 for holders in self._holders.values())
