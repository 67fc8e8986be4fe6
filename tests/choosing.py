"""A router's pure core put together, without prompts, engines or a clock: for tests of how choices add up."""

import random
from collections import Counter
from collections.abc import Sequence

from discovery.signal import LIVE, Signal
from engines.blocks import pack_keys
from engines.types import Endpoint, Tier
from router.caches import Caches
from router.load import LoadBook, Reservation
from router.scheduling.scheduler import Scheduler
from router.scheduling.types import Candidate, Context, Decision, Load, Overlap, Policy, RoutingRequest

BLOCK_SIZE = 16
NOTHING_CACHED = Overlap()
IDLE = Load()


def endpoint(name: str, rank: int = 0) -> Endpoint:
    return Endpoint(f"http://{name}:8000", rank)


def candidate(
    name: str,
    prompt_blocks: int = 10,
    *,
    new_blocks: int | None = None,
    overlap: Overlap = NOTHING_CACHED,
    load: Load = IDLE,
    signal: Signal = LIVE,
    block_size: int = BLOCK_SIZE,
) -> Candidate:
    new = prompt_blocks if new_blocks is None else new_blocks
    return Candidate(endpoint(name), block_size, prompt_blocks, new, overlap, load, signal)


def request(prompt_blocks: int = 10, *, session: str | None = None, untokenizable: str = "") -> RoutingRequest:
    return RoutingRequest("m", prompt_blocks * BLOCK_SIZE, untokenizable, session)


def context(seed: int = 0) -> Context:
    return Context(0.0, random.Random(seed))


def chain(name: int, length: int) -> list[int]:
    """The keys of a prompt of `length` blocks; the same name and depth are the same key."""
    return [(name << 32) + depth for depth in range(length)]


class Core:
    """Engines that compute prompts when told to, and the router's view of them."""

    def __init__(self, policy: Policy, names: Sequence[str], *, blind: Sequence[str] = (), signal: Signal = LIVE, seed: int = 0) -> None:
        """The engines in `blind` publish no events, and have the signal `signal`."""
        self.caches = Caches()
        self.book = LoadBook()
        self.scheduler = Scheduler(policy, "p", 0.0, random.Random(seed))
        self.endpoints = [endpoint(name) for name in names]
        self.signals = dict.fromkeys(self.endpoints, LIVE) | {endpoint(name): signal for name in blind}
        for end in self.endpoints:
            self.caches.add(end, total_blocks=10_000)
        self.sent: Counter[Endpoint] = Counter()

    def decide(self, keys: list[int], now: float = 0.0) -> Decision:
        in_flight = self.book.in_flight(keys)
        believed = [end for end in self.endpoints if self.signals[end].believed]
        unbelieved = [end for end in self.endpoints if not self.signals[end].believed]
        overlaps = self.caches.overlaps(keys, believed, unbelieved, in_flight)
        candidates = [
            Candidate(
                end, BLOCK_SIZE, len(keys), len(keys) - in_flight.get(end, 0), overlaps[end], self.book.load(end, now), self.signals[end]
            )
            for end in self.endpoints
        ]
        return self.scheduler.decide(request(len(keys)), candidates, (), now)

    def send(self, keys: list[int], now: float = 0.0) -> tuple[Decision, Reservation]:
        decision = self.decide(keys, now)
        overlap = decision.chosen.overlap
        cached = max(overlap.in_flight, overlap.device + overlap.host + overlap.disk)
        self.sent[decision.chosen.endpoint] += 1
        return decision, self.book.reserve(decision.chosen.endpoint, keys, (len(keys) - cached) * BLOCK_SIZE)

    def computed(self, decision: Decision, reservation: Reservation, keys: list[int], now: float = 0.0) -> None:
        """The first token has come, and the engine's events with it."""
        end = decision.chosen.endpoint
        reservation.first_token()
        self.caches.sent(end, keys, now)
        if self.signals[end].believed:
            self.caches.store(end, Tier.DEVICE, [pack_keys(keys)])
