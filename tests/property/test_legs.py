"""What a decode engine says before its first token is held back, however the network cuts it; and nothing is lost or changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from engines.errors import EngineBroken, EngineClosed, EngineError
from router.exchange import Exchange
from router.legs import PrefillLeg, Proof
from router.relay import Relay
from router.upstream import ResponseHead
from tests.raw_engine import DONE, token

STREAM = ResponseHead(200, [(b"content-type", b"text/event-stream")])
ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
ERROR = b'data: {"error":{"message":"KV load failed","code":500}}\n\n'


class Bell:
    rung = False

    def ring(self) -> None:
        self.rung = True


class Noting:
    """A relay's place."""

    def __init__(self) -> None:
        self.heads: list[ResponseHead] = []
        self.given = b""
        self.ends: list[EngineError | None] = []
        self.done = Bell()

    def head(self, head: ResponseHead) -> None:
        self.heads.append(head)

    def body(self, data: bytes, *, last: bool = False) -> None:
        self.given += data

    def finished(self, error: EngineError | None) -> None:
        self.ends.append(error)
        self.done.ring()

    def waits(self) -> None:
        pass


def proof_of(relay: Noting, first_token: Callable[[], None]) -> Proof:
    return Proof(cast("Relay", relay), first_token)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges) if start < end]


def fed(relay: Noting, head: ResponseHead, pieces: list[bytes], end: EngineError | None = None) -> tuple[Proof, int]:
    tokens = []
    proof = proof_of(relay, lambda: tokens.append(1))
    proof.head(head)
    for piece in pieces:
        proof.body(piece)
    proof.finished(end)
    return proof, len(tokens)


@given(st.lists(st.integers(0, 10**6), max_size=8), st.integers(0, 3), st.integers(1, 4))
def test_with_a_token_everything_comes_through(places: list[int], roles: int, tokens: int) -> None:
    stream = ROLE * roles + b"".join(token(number) for number in range(tokens)) + DONE
    relay = Noting()
    proof, told = fed(relay, STREAM, cut(stream, places))
    assert (relay.given, relay.heads, relay.ends) == (stream, [STREAM], [None])
    assert proof.proven
    assert told == 1


@given(st.lists(st.integers(0, 10**6), max_size=8), st.integers(0, 3), st.sampled_from([ERROR, ERROR + DONE]))
def test_before_a_token_an_error_leaves_the_client_untouched(places: list[int], roles: int, error: bytes) -> None:
    relay = Noting()
    proof, told = fed(relay, STREAM, cut(ROLE * roles + error, places))
    assert (relay.given, relay.heads, relay.ends, told) == (b"", [], [], 0)
    assert relay.done.rung
    assert "KV load failed" in str(proof.failure)


@given(st.lists(st.integers(0, 10**6), max_size=8))
def test_after_a_token_an_error_is_the_clients(places: list[int]) -> None:
    relay = Noting()
    fed(relay, STREAM, cut(token(1) + ERROR, places))
    assert relay.given == token(1) + ERROR


@given(st.lists(st.integers(0, 10**6), max_size=8), st.integers(0, 3))
def test_a_stream_that_breaks_before_a_token_can_be_saved_and_one_after_it_cannot(places: list[int], roles: int) -> None:
    broken = EngineBroken("reset")
    relay = Noting()
    proof, _ = fed(relay, STREAM, cut(ROLE * roles, places), broken)
    assert (relay.heads, relay.ends) == ([], [])
    assert "reset" in str(proof.failure)
    relay = Noting()
    proof, _ = fed(relay, STREAM, cut(ROLE * roles + token(1), places), broken)
    assert (proof.failure, relay.ends) == (None, [broken])


def test_an_answer_that_ends_without_a_token_and_without_an_error_is_one() -> None:
    relay = Noting()
    proof, _ = fed(relay, STREAM, [ROLE + DONE])
    assert (relay.given, relay.ends, proof.failure) == (ROLE + DONE, [None], None)


def test_a_refusal_is_for_the_relay_to_judge_and_a_failure_is_not() -> None:
    for status, held in ((400, False), (429, False), (503, False), (500, True), (502, True)):
        relay = Noting()
        proof, _ = fed(relay, ResponseHead(status, []), [b"why"])
        assert (relay.heads == []) is held
        assert ("why" in str(proof.failure)) is held


def test_what_comes_too_late_changes_nothing() -> None:
    relay = Noting()
    proof = proof_of(relay, lambda: None)
    proof.head(STREAM)
    proof.fail("no token in time")
    assert relay.done.rung
    proof.finished(EngineBroken("closed by us"))
    assert (relay.heads, relay.ends) == ([], [])
    late = proof_of(relay, lambda: None)
    late.head(STREAM)
    late.body(token(1))
    late.fail("too late")
    assert late.failure is None


def test_who_asks_too_late_for_the_end_of_a_prefill_is_told_at_once() -> None:
    """The connection may have been lost between its being made and its being used."""
    leg, ends = PrefillLeg(cast("Exchange", None)), []
    leg.finished(EngineClosed("the connection was already closed"))
    leg.when_over(lambda: ends.append(leg.failed))
    assert ends == [True]
