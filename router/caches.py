"""What does each endpoint already have of this prompt? One table per tier, from events; one of guesses, from what was sent.

    prompt          b0 b1 b2 b3 b4 b5 b6
    device tier     ██ ██ ██                     device = 3
    host tier             ██ ██ ██               host = 2         what follows the device's part
    disk tier                      ██            disk = 1         what follows the host's part
    in flight       ██ ██ ██ ██                  in_flight = 4    cached on the device, or being computed there now

An endpoint whose events cannot be believed is answered for from what was sent to it instead, and the answer says so.
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engines.blocks import pack_keys  # noqa: F401  in examples
from engines.types import Endpoint, Tier
from router.index import PrefixIndex
from router.predicted import TTL_S, PredictedBlocks, Trail
from router.scheduling.types import Overlap

_NOTHING = Overlap()
_NONE_IN_FLIGHT: Mapping[Endpoint, int] = {}


class _Places:
    """The slots that stand for one endpoint in each table."""

    __slots__ = ("predicted", "tiers")

    def __init__(self, tiers: list[int], predicted: int) -> None:
        self.tiers = tiers
        self.predicted = predicted


class Caches:
    """What every endpoint holds. The mirror writes here what events say (it is the mirror's `IndexSink`); the router reads.

    >>> caches = Caches()
    >>> engine = Endpoint("http://a:8000")
    >>> caches.add(engine, total_blocks=100)
    >>> caches.store(engine, Tier.DEVICE, [pack_keys([11, 12])])
    >>> caches.store(engine, Tier.HOST, [pack_keys([12, 13])])
    >>> overlap = caches.overlaps([11, 12, 13, 14], [engine])[engine]
    >>> overlap.device, overlap.host
    (2, 1)
    """

    def __init__(self, max_blocks: int | None = None, predicted_ttl_s: float = TTL_S) -> None:
        """Hold at most `max_blocks` distinct blocks per tier: what comes beyond is refused, counted, and looks uncached."""
        self._tiers = [PrefixIndex(max_blocks) for _ in Tier]
        self._device, self._host, self._disk = self._tiers
        self._predicted = PredictedBlocks(predicted_ttl_s)
        self._places: dict[Endpoint, _Places] = {}
        self.ignored = 0
        """Changes that were for endpoints not added (or gone already)."""

    def __contains__(self, endpoint: Endpoint) -> bool:
        """Whether `endpoint` has been added and not discarded since. Runtime complexity: O(1)."""
        return endpoint in self._places

    def add(self, endpoint: Endpoint, total_blocks: int | None = None) -> None:
        """From now on `endpoint` is known, and holds nothing; `total_blocks` bounds what is predicted for it.

        Adding it again changes nothing. Runtime complexity: O(1).
        """
        if endpoint not in self._places:
            self._places[endpoint] = _Places([tier.add_slot() for tier in self._tiers], self._predicted.add_slot(total_blocks))

    def discard(self, endpoint: Endpoint) -> None:
        """`endpoint` is gone: it holds nothing at once, and what still arrives for it is ignored. Runtime complexity: O(1).

        >>> caches = Caches()
        >>> engine = Endpoint("http://a:8000")
        >>> caches.add(engine)
        >>> caches.discard(engine)
        >>> caches.store(engine, Tier.DEVICE, [pack_keys([11])])
        >>> caches.size(engine), caches.ignored
        (0, 1)
        """
        places = self._places.pop(endpoint, None)
        if places is None:
            return
        for tier, slot in zip(self._tiers, places.tiers, strict=True):
            tier.drop_slot(slot)
        self._predicted.drop_slot(places.predicted)

    def store(self, endpoint: Endpoint, tier: Tier, chains: Iterable[bytes]) -> None:
        """`endpoint` now holds these in `tier`, and did not: see `PrefixIndex.store`, also for what it costs."""
        places = self._places.get(endpoint)
        if places is None:
            self.ignored += 1
        else:
            slot, index = places.tiers[tier], self._tiers[tier]
            for chain in chains:
                index.store(slot, chain)

    def remove(self, endpoint: Endpoint, tier: Tier, keys: bytes) -> None:
        """`endpoint` no longer holds these in `tier`: see `PrefixIndex.remove`, also for what it costs."""
        places = self._places.get(endpoint)
        if places is None:
            self.ignored += 1
        else:
            self._tiers[tier].remove(places.tiers[tier], keys)

    def clear(self, endpoint: Endpoint) -> None:
        """`endpoint` holds nothing in any tier, going by events. What was sent there stays as a prediction: see `restart`.

        Runtime complexity: O(1), and `sweep` afterwards.
        """
        places = self._places.get(endpoint)
        if places is None:
            self.ignored += 1
            return
        for number, tier in enumerate(self._tiers):
            if tier.size(places.tiers[number]):
                tier.drop_slot(places.tiers[number])
                places.tiers[number] = tier.add_slot()

    def restart(self, endpoint: Endpoint) -> None:
        """The engine itself has started afresh: it holds nothing, and nothing that was sent there before counts.

        Runtime complexity: O(blocks predicted there), to free them, and `sweep` afterwards.
        """
        self.clear(endpoint)
        places = self._places.get(endpoint)
        if places is not None:
            self._predicted.clear(places.predicted)

    def sent(self, endpoint: Endpoint, keys: Sequence[int], now: float) -> None:
        """A prompt with the full blocks `keys`, from the root, has been computed at `endpoint`.

        Call it at the first token, not when the prompt is sent: until then its blocks are in flight, and `overlaps` tells the two
        apart. Runtime complexity: O(len(keys)).
        """
        places = self._places.get(endpoint)
        if places is not None:
            self._predicted.sent(places.predicted, keys, now)

    def trail(self, endpoint: Endpoint, keys: Sequence[int]) -> Trail:
        """What was sent there of `keys`, for `found`. Runtime complexity: see `PredictedBlocks.trail`."""
        places = self._places.get(endpoint)
        return () if places is None else self._predicted.trail(places.predicted, keys)

    def found(self, endpoint: Endpoint, keys: Sequence[int], trail: Trail, blocks: int) -> None:
        """The engine has found `blocks` of `keys` cached, by its own count: see `PredictedBlocks.found`."""
        places = self._places.get(endpoint)
        if places is not None:
            self._predicted.found(places.predicted, keys, trail, blocks)

    def overlaps(
        self,
        keys: Sequence[int],
        believed: Sequence[Endpoint],
        unbelieved: Sequence[Endpoint] = (),
        in_flight: Mapping[Endpoint, int] = _NONE_IN_FLIGHT,
    ) -> dict[Endpoint, Overlap]:
        """What every endpoint given has of the prompt whose full blocks are `keys`.

        `believed` are answered for from events, `unbelieved` from what was sent to them (`Overlap.predicted` is then True).
        `in_flight` is `LoadBook.in_flight(keys)`. An endpoint that was not added has nothing.
        Runtime complexity: O(endpoints), and one `PrefixIndex.match` of the device tier (of the predictions too, if any are asked).
        """
        answers: dict[Endpoint, Overlap] = {}
        if believed:
            found = self._device.match(keys)
            for endpoint in believed:
                answers[endpoint] = self._cached(endpoint, keys, found, in_flight)
        if unbelieved:
            found = self._predicted.match(keys)
            for endpoint in unbelieved:
                answers[endpoint] = self._guessed(endpoint, keys, found, in_flight)
        return answers

    def size(self, endpoint: Endpoint, tier: Tier = Tier.DEVICE) -> int:
        """How many blocks `endpoint` holds in `tier`, going by events; 0 when it was not added. Runtime complexity: O(1)."""
        places = self._places.get(endpoint)
        return 0 if places is None else self._tiers[tier].size(places.tiers[tier])

    def predicted_size(self, endpoint: Endpoint) -> int:
        """How many blocks `endpoint` should hold, going by what was sent there. Runtime complexity: O(1)."""
        places = self._places.get(endpoint)
        return 0 if places is None else self._predicted.size(places.predicted)

    @property
    def refused(self) -> int:
        """Blocks that were not taken in because a tier was full. Runtime complexity: O(1)."""
        return sum(tier.refused for tier in self._tiers)

    @property
    def indexed(self) -> int:
        """Entries in the tables that events fill, those not swept yet included. Runtime complexity: O(1)."""
        return sum(map(len, self._tiers))

    def __len__(self) -> int:
        """Entries in all tables, those not swept yet included. Runtime complexity: O(1)."""
        return self.indexed + len(self._predicted)

    def memory_bytes(self) -> int:
        """About how much memory all tables take. Runtime complexity: O(endpoints)."""
        return sum(tier.memory_bytes() for tier in self._tiers) + self._predicted.memory_bytes()

    def sweep(self, limit: int) -> int:
        """Visit up to `limit` entries for what is left of endpoints discarded or cleared; less than `limit`: all is clean.

        Runtime complexity: O(limit): see `PrefixIndex.sweep`.
        """
        visited = 0
        for tier in self._tiers:
            visited += tier.sweep(limit - visited)
        return visited

    def expire(self, now: float, limit: int | None = None) -> int:
        """Give up predictions that are too old: see `PredictedBlocks.expire`."""
        return self._predicted.expire(now, limit)

    def _cached(self, endpoint: Endpoint, keys: Sequence[int], found: dict[int, int], in_flight: Mapping[Endpoint, int]) -> Overlap:
        places = self._places.get(endpoint)
        started = in_flight.get(endpoint, 0)
        if places is None:
            return Overlap(in_flight=started) if started else _NOTHING
        device = found.get(places.tiers[Tier.DEVICE], 0)
        run = device if started <= device else started + self._device.extent(places.tiers[Tier.DEVICE], keys, started)
        host = self._host.extent(places.tiers[Tier.HOST], keys, device) if len(self._host) else 0
        disk = self._disk.extent(places.tiers[Tier.DISK], keys, device + host) if len(self._disk) else 0
        return Overlap(device, host, disk, run) if run or host or disk else _NOTHING

    def _guessed(self, endpoint: Endpoint, keys: Sequence[int], found: dict[int, int], in_flight: Mapping[Endpoint, int]) -> Overlap:
        places = self._places.get(endpoint)
        started = in_flight.get(endpoint, 0)
        if places is None:
            return Overlap(in_flight=started, predicted=True)
        device = found.get(places.predicted, 0)
        run = device if started <= device else started + self._predicted.extent(places.predicted, keys, started)
        return Overlap(device, in_flight=run, predicted=True)

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(everything)."""
        self._predicted._check()  # noqa: SLF001 - invariants of a part are invariants of the whole
        for tier in self._tiers:
            tier._check()  # noqa: SLF001 - as above
        for number, tier in enumerate(self._tiers):
            slots = [places.tiers[number] for places in self._places.values()]
            assert len(set(slots)) == len(slots)
            for slot in slots:
                tier.size(slot)
