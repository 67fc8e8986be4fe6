"""Which prefixes do other routers have in flight, and where? Without it, equal prompts that come to different routers would scatter.

A key names a whole prefix, so a few of a prompt's keys tell nearly all: *marks*, at blocks 1, 2, 4, 8, then every eighth, and the last.

    prompt of 21 blocks    marks at 1 2 4 8 16 21, which stand for 1 1 2 4 8 5 blocks
    one that shares 18     is found to share 16; an equal one, all 21

Each mark stands for the blocks since the mark before it: so blocks that several routers have in flight are counted once.
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from engines.types import Endpoint

FIRST: Final = (1, 2, 4)
STRIDE: Final = 8
MAX_MARKS: Final = 1 << 18
"""Of one router; what is beyond is not known of it."""

Mark = tuple[int, int]
"""A key, and how many blocks it stands for."""


def depths(blocks: int) -> Iterator[int]:
    """Where a prompt of so many blocks is marked, its end aside.

    >>> list(depths(21))
    [1, 2, 4, 8, 16]
    """
    yield from (depth for depth in FIRST if depth <= blocks)
    yield from range(STRIDE, blocks + 1, STRIDE)


def marks(keys: Sequence[int]) -> list[Mark]:
    """A prompt's marks. Runtime complexity: O(len(keys) / 8).

    >>> marks([10, 11, 12])
    [(10, 1), (11, 1), (12, 1)]
    """
    found, before = list[Mark](), 0
    for depth in depths(len(keys)):
        found.append((keys[depth - 1], depth - before))
        before = depth
    if before < len(keys):
        found.append((keys[-1], len(keys) - before))
    return found


class Prefixes:
    """Marks of our own requests, for others to be told, and of theirs.

    >>> ours, e = Prefixes(), Endpoint("http://e:1")
    >>> ours.replace("b", {e: dict(marks([1, 2, 3]))})
    >>> ours.in_flight([1, 2, 9]), ours.blocks(e)
    ({Endpoint(engine='http://e:1', rank=0): 2}, 3)
    >>> ours.step(e, [1, 2, 9], 1)
    >>> ours.blocks(e), [sorted(began) for _, began, ended in ours.changes()]
    (1, [[(1, 1), (2, 1), (9, 1)]])
    """

    def __init__(self) -> None:
        self._own: dict[Endpoint, dict[int, int]] = {}
        """Endpoint → key → how many of our requests have it."""
        self._weights: dict[Endpoint, dict[int, int]] = {}
        """Of those keys."""
        self._told: dict[Endpoint, dict[int, int]] = {}
        """What others have been told: key → weight."""
        self._changed: dict[Endpoint, set[int]] = {}
        self._theirs: dict[str, dict[Endpoint, set[int]]] = {}
        self._holders: dict[int, dict[Endpoint, int]] = {}
        """Key → endpoint → how many other routers have it there."""
        self._held: dict[int, int] = {}
        """What each of those keys stands for, as it was first told."""
        self._blocks: dict[Endpoint, int] = {}
        """What the marks stand for that others have and we have not."""

    # ours

    def step(self, endpoint: Endpoint, keys: Sequence[int], by: int) -> None:
        """A request of ours with these keys has begun (1) or ended (-1)."""
        own = self._own.setdefault(endpoint, {})
        weights = self._weights.setdefault(endpoint, {})
        changed = self._changed.setdefault(endpoint, set())
        for key, weight in marks(keys):
            count = own.get(key, 0) + by
            theirs = self._held[key] if endpoint in self._holders.get(key, ()) else 0
            if count > 0:
                if key not in own:
                    changed.add(key)
                    weights[key] = weight
                    self._add(endpoint, -theirs)
                own[key] = count
            elif key in own:
                del own[key], weights[key]
                changed.add(key)
                self._add(endpoint, theirs)
        if not own:
            del self._own[endpoint], self._weights[endpoint]

    def changes(self) -> Iterator[tuple[Endpoint, list[Mark], list[Mark]]]:
        """What has begun and ended since this was last asked, by endpoint. What did both is not told."""
        changed, self._changed = self._changed, {}
        for endpoint, keys in changed.items():
            weights = self._weights.get(endpoint, {})
            told = self._told.setdefault(endpoint, {})
            began = [(key, weights[key]) for key in keys if key in weights and key not in told]
            ended = [(key, told.pop(key)) for key in keys if key not in weights and key in told]
            told.update(began)
            if not told:
                del self._told[endpoint]
            if began or ended:
                yield endpoint, began, ended

    def told(self) -> dict[Endpoint, dict[int, int]]:
        """Everything that others have been told by now."""
        return self._told

    # theirs

    def began(self, router: str, endpoint: Endpoint, told: Iterable[Mark]) -> None:
        """Another router's requests have these."""
        by_endpoint = self._theirs.setdefault(router, {})
        theirs = by_endpoint.setdefault(endpoint, set())
        room = MAX_MARKS - sum(map(len, by_endpoint.values()))
        for key, weight in told:
            if key in theirs:
                continue
            if room <= 0:
                break
            room -= 1
            theirs.add(key)
            self._held.setdefault(key, weight)
            holders = self._holders.setdefault(key, {})
            holders[endpoint] = holders.get(endpoint, 0) + 1
            if holders[endpoint] == 1 and key not in self._own.get(endpoint, ()):
                self._add(endpoint, self._held[key])
        self._tidy(router, endpoint)

    def ended(self, router: str, endpoint: Endpoint, keys: Iterable[int]) -> None:
        """Its requests have these no more."""
        by_endpoint = self._theirs.get(router, {})
        theirs = by_endpoint.get(endpoint, set())
        for key in keys:
            if key not in theirs:
                continue
            theirs.remove(key)
            holders = self._holders[key]
            holders[endpoint] -= 1
            if holders[endpoint]:
                continue
            del holders[endpoint]
            if key not in self._own.get(endpoint, ()):
                self._add(endpoint, -self._held[key])
            if not holders:
                del self._holders[key], self._held[key]
        self._tidy(router, endpoint)

    def replace(self, router: str, told: dict[Endpoint, dict[int, int]]) -> None:
        """Its requests have these, and nothing else."""
        for endpoint, theirs in list(self._theirs.get(router, {}).items()):
            self.ended(router, endpoint, [key for key in theirs if key not in told.get(endpoint, {})])
        for endpoint, keys in told.items():
            self.began(router, endpoint, keys.items())

    # both

    def in_flight(self, keys: Sequence[int]) -> dict[Endpoint, int]:
        """Endpoint → how many leading `keys` other routers have in flight there, as far as marks tell; at least one.

        Runtime complexity: O(blocks shared / 8 × endpoints that share them).
        """
        found: dict[Endpoint, int] = {}
        if not keys or not self._holders:
            return found
        for depth in depths(len(keys)):
            holders = self._holders.get(keys[depth - 1])
            if holders is None:
                break
            for endpoint in holders:
                found[endpoint] = depth
        for endpoint in self._holders.get(keys[-1], ()):
            found[endpoint] = len(keys)
        return found

    def blocks(self, endpoint: Endpoint) -> int:
        """About how many blocks others have in flight there which we have not. Runtime complexity: O(1)."""
        return self._blocks.get(endpoint, 0)

    def _tidy(self, router: str, endpoint: Endpoint) -> None:
        """Nothing is kept for where there is nothing."""
        by_endpoint = self._theirs.get(router, {})
        if not by_endpoint.get(endpoint, True):
            del by_endpoint[endpoint]
            if not by_endpoint:
                del self._theirs[router]

    def _add(self, endpoint: Endpoint, blocks: int) -> None:
        total = self._blocks.get(endpoint, 0) + blocks
        if total:
            self._blocks[endpoint] = total
        else:
            self._blocks.pop(endpoint, None)

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(everything)."""
        blocks: dict[Endpoint, int] = {}
        holders: dict[int, dict[Endpoint, int]] = {}
        for theirs in self._theirs.values():
            assert theirs
            for endpoint, keys in theirs.items():
                assert keys
                for key in keys:
                    holders.setdefault(key, {})[endpoint] = holders.get(key, {}).get(endpoint, 0) + 1
        assert holders == self._holders
        for key, where in holders.items():
            for endpoint in where:
                if key not in self._own.get(endpoint, ()):
                    blocks[endpoint] = blocks.get(endpoint, 0) + self._held[key]
        assert holders.keys() == self._held.keys()
        assert blocks == self._blocks
        assert all(count > 0 for own in self._own.values() for count in own.values())
        assert {e: own.keys() for e, own in self._own.items()} == {e: weights.keys() for e, weights in self._weights.items()}
