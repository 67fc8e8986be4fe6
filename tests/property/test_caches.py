"""What endpoints hold, against a set of keys per endpoint and tier; and predictions against a list in order of use."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.blocks import pack_keys
from engines.types import Endpoint, Tier
from router.caches import Caches
from router.scheduling.types import Overlap

ENDPOINTS = [Endpoint("http://a:8000"), Endpoint("http://a:8000", 1), Endpoint("http://b:8000")]
TOTAL_BLOCKS = 15
TTL_S = 50.0
endpoints = st.sampled_from(ENDPOINTS)
tiers = st.sampled_from(list(Tier))
heads = st.one_of(st.just(0), st.integers(0, 29))
families = st.sampled_from([0, 100])
stretches = st.builds(
    lambda family, start, length: [family + key for key in range(start, min(30, start + length))], families, heads, st.integers(1, 30)
)
prompts = st.builds(lambda family, length: list(range(family, family + length)), families, st.integers(1, 30))


def run(keys: list[int], held: set[int], start: int = 0) -> int:
    depth = start
    while depth < len(keys) and keys[depth] in held:
        depth += 1
    return depth - start


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.caches = Caches(predicted_ttl_s=TTL_S)
        self.held: dict[Endpoint, dict[Tier, set[int]]] = {}
        self.predicted: dict[Endpoint, dict[int, float]] = {}
        self.ignored = 0
        self.now = 0.0
        for endpoint in ENDPOINTS[:2]:
            self.add(endpoint)

    @rule(endpoint=endpoints)
    def add(self, endpoint: Endpoint) -> None:
        self.caches.add(endpoint, TOTAL_BLOCKS)
        self.held.setdefault(endpoint, {tier: set() for tier in Tier})
        self.predicted.setdefault(endpoint, {})

    @rule(endpoint=endpoints)
    def discard(self, endpoint: Endpoint) -> None:
        self.caches.discard(endpoint)
        self.held.pop(endpoint, None)
        self.predicted.pop(endpoint, None)

    @rule(endpoint=endpoints, tier=tiers, keys=stretches)
    def store(self, endpoint: Endpoint, tier: Tier, keys: list[int]) -> None:
        chains: list[list[int]] = []
        for key in keys:
            if key in self.held.get(endpoint, {}).get(tier, ()):
                continue
            if chains and chains[-1][-1] == key - 1:
                chains[-1].append(key)
            else:
                chains.append([key])
        self.caches.store(endpoint, tier, map(pack_keys, chains))
        if endpoint in self.held:
            self.held[endpoint][tier] |= set(keys)
        else:
            self.ignored += 1

    @rule(endpoint=endpoints, tier=tiers, keys=stretches)
    def remove(self, endpoint: Endpoint, tier: Tier, keys: list[int]) -> None:
        self.caches.remove(endpoint, tier, pack_keys(keys))
        if endpoint in self.held:
            self.held[endpoint][tier] -= set(keys)
        else:
            self.ignored += 1

    @rule(endpoint=endpoints, keys=stretches, cuts=st.tuples(st.integers(0, 10), st.integers(0, 10)))
    def store_across_tiers(self, endpoint: Endpoint, keys: list[int], cuts: tuple[int, int]) -> None:
        device, host = cuts
        for tier, part in zip(Tier, (keys[:device], keys[device : device + host], keys[device + host :]), strict=True):
            self.store(endpoint, tier, part)

    @rule(endpoint=endpoints, restart=st.booleans())
    def clear(self, endpoint: Endpoint, restart: bool) -> None:
        (self.caches.restart if restart else self.caches.clear)(endpoint)
        if endpoint in self.held:
            self.held[endpoint] = {tier: set() for tier in Tier}
            if restart:
                self.predicted[endpoint] = {}
        else:
            self.ignored += 1

    @rule(endpoint=endpoints, keys=prompts, passed=st.floats(0, 10))
    def sent(self, endpoint: Endpoint, keys: list[int], passed: float) -> None:
        self.now += passed
        self.caches.sent(endpoint, keys, self.now)
        if endpoint in self.predicted:
            used = self.predicted[endpoint]
            for key in reversed(keys[:TOTAL_BLOCKS]):
                used.pop(key, None)
                used[key] = self.now
            for key in list(used)[: max(0, len(used) - TOTAL_BLOCKS)]:
                del used[key]

    @rule(passed=st.floats(0, TTL_S))
    def expire(self, passed: float) -> None:
        self.now += passed
        given_up = self.caches.expire(self.now)
        expected = 0
        for used in self.predicted.values():
            old = [key for key, at in used.items() if at + TTL_S <= self.now]
            expected += len(old)
            for key in old:
                del used[key]
        assert given_up == expected

    @rule(limit=st.integers(0, 60))
    def sweep(self, limit: int) -> None:
        if self.caches.sweep(limit) < limit:
            held = [[tiers[tier] for tiers in self.held.values()] for tier in Tier]
            least, most = sum(len(set[int]().union(*tier)) for tier in held), sum(len(keys) for tier in held for keys in tier)
            assert least <= len(self.caches) - sum(map(len, self.predicted.values())) <= most

    @precondition(lambda self: self.held)
    @rule(keys=prompts, in_flight=st.dictionaries(endpoints, st.integers(1, 30)), believed=st.sets(endpoints))
    def overlaps(self, keys: list[int], in_flight: dict[Endpoint, int], believed: set[Endpoint]) -> None:
        in_flight = {endpoint: min(depth, len(keys)) for endpoint, depth in in_flight.items() if keys}
        unbelieved = [endpoint for endpoint in ENDPOINTS if endpoint not in believed]
        answers = self.caches.overlaps(keys, sorted(believed), unbelieved, in_flight)
        assert set(answers) == set(ENDPOINTS)
        for endpoint, overlap in answers.items():
            started = set(keys[: in_flight.get(endpoint, 0)])
            tiers = self.held.get(endpoint, {tier: set() for tier in Tier})
            if endpoint in believed:
                device = run(keys, tiers[Tier.DEVICE])
                host = run(keys, tiers[Tier.HOST], device)
                disk = run(keys, tiers[Tier.DISK], device + host)
                assert overlap == Overlap(device, host, disk, run(keys, tiers[Tier.DEVICE] | started))
            else:
                predicted = set(self.predicted.get(endpoint, {}))
                assert overlap == Overlap(run(keys, predicted), in_flight=run(keys, predicted | started), predicted=True)

    @invariant()
    def holds(self) -> None:
        self.caches._check()
        assert self.caches.ignored == self.ignored
        for endpoint in ENDPOINTS:
            assert (endpoint in self.caches) == (endpoint in self.held)
            for tier in Tier:
                assert self.caches.size(endpoint, tier) == len(self.held.get(endpoint, {}).get(tier, ()))
            assert self.caches.predicted_size(endpoint) == len(self.predicted.get(endpoint, {}))


TestCaches = Machine.TestCase
TestCaches.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
