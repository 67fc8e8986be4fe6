"""The load book against a list of the requests in flight."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.types import Endpoint
from router.load import LoadBook, Reservation

ENDPOINTS = [Endpoint("http://a:8000"), Endpoint("http://a:8000", 1), Endpoint("http://b:8000")]
endpoints = st.sampled_from(ENDPOINTS)
prompts = st.builds(
    lambda shared, tail, length: [*range(shared), *(1000 * (4 * shared + tail) + depth for depth in range(length))],
    st.integers(0, 20),
    st.integers(1, 3),
    st.integers(0, 20),
)
"""Keys name whole prefixes, so the same head may be followed by different tails, never the other way round."""


@dataclass
class Request:
    endpoint: Endpoint
    keys: list[int]
    prefill: int
    reservation: Reservation
    counted: bool = True


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = LoadBook(report_fresh_s=10.0)
        self.requests: list[Request] = []
        self.ended: list[Reservation] = []
        self.assigned = 0
        self.last: Counter[Endpoint] = Counter()

    def on(self, endpoint: Endpoint) -> list[Request]:
        return [request for request in self.requests if request.counted and request.endpoint == endpoint]

    @rule(endpoint=endpoints, keys=prompts, tokens=st.integers(0, 500))
    def reserve(self, endpoint: Endpoint, keys: list[int], tokens: int) -> None:
        self.assigned += 1
        self.last[endpoint] = self.assigned
        self.requests.append(Request(endpoint, keys, tokens, self.book.reserve(endpoint, keys, tokens)))

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0))
    def first_token(self, choice: int) -> None:
        request = self.requests[choice % len(self.requests)]
        request.reservation.first_token()
        request.prefill = 0

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0))
    def release(self, choice: int) -> None:
        request = self.requests.pop(choice % len(self.requests))
        request.reservation.release()
        self.ended.append(request.reservation)

    @precondition(lambda self: self.ended)
    @rule(choice=st.integers(0))
    def touch_what_has_ended(self, choice: int) -> None:
        reservation = self.ended[choice % len(self.ended)]
        reservation.release()
        reservation.first_token()

    @rule(endpoint=endpoints)
    def forget(self, endpoint: Endpoint) -> None:
        self.book.forget(endpoint)
        del self.last[endpoint]
        for request in self.on(endpoint):
            request.counted = False

    @rule(limit=st.integers(0, 50))
    def sweep(self, limit: int) -> None:
        self.book.sweep(limit)

    @rule(keys=prompts)
    def in_flight(self, keys: list[int]) -> None:
        expected = {}
        for endpoint in ENDPOINTS:
            held = {key for request in self.on(endpoint) for key in request.keys}
            depth = 0
            while depth < len(keys) and keys[depth] in held:
                depth += 1
            if depth:
                expected[endpoint] = depth
            before = self.book.load(endpoint, 0.0).active_blocks
            with self.book.reserve(endpoint, keys, 0):
                assert self.book.load(endpoint, 0.0).active_blocks - before == len(keys) - depth, "new blocks are those not in flight"
            self.assigned += 1
            self.last[endpoint] = self.assigned
        assert self.book.in_flight(keys) == expected

    @invariant()
    def holds(self) -> None:
        self.book._check()
        for endpoint in ENDPOINTS:
            load = self.book.load(endpoint, 0.0)
            requests = self.on(endpoint)
            assert load.active_requests == len(requests)
            assert load.active_prefill_tokens == sum(request.prefill for request in requests)
            assert load.active_blocks == len({key for request in requests for key in request.keys})
            assert load.last_assigned == self.last[endpoint]
        assert len(self.book) == sum(request.counted for request in self.requests)

    def teardown(self) -> None:
        for request in self.requests:
            request.reservation.release()
        self.book._check()
        assert len(self.book) == 0
        assert all(self.book.load(endpoint, 0.0).active_blocks == 0 for endpoint in ENDPOINTS)


TestLoadBook = Machine.TestCase
TestLoadBook.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
