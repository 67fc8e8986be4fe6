"""Trace context and request ids, by the standard and past it."""

from __future__ import annotations

import random

import pytest

from router.tracing import Trace

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
PARENT = b"00-" + TRACE + b"-" + SPAN + b"-01"


def trace(*headers: tuple[bytes, bytes], seed: int = 1) -> Trace:
    return Trace(list(headers), random.Random(seed).getrandbits)


def test_O4_a_trace_goes_on_with_a_new_parent_and_the_same_flags_and_state() -> None:
    made = trace((b"traceparent", PARENT), (b"tracestate", b"a=1"), (b"tracestate", b"b=2"))
    assert made.lines.splitlines()[1:] == [b"traceparent: 00-" + TRACE + b"-" + made.span_id.encode() + b"-01", b"tracestate: a=1,b=2"]
    assert len(made.span_id) == 16
    assert made.span_id != SPAN.decode()
    assert made.fields == {"request_id": made.request_id.decode(), "trace_id": TRACE.decode(), "span_id": made.span_id}
    assert trace((b"traceparent", PARENT), seed=2).span_id != made.span_id


@pytest.mark.parametrize(
    "parent",
    [
        b"",
        b"canary",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + b"0",
        PARENT + b"-00",
        b"ff" + PARENT[2:],
        b"00-" + b"0" * 32 + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + b"0" * 16 + b"-01",
        b"00" + TRACE + b"--" + SPAN + b"-01",
        PARENT.replace(b"-", b"0"),
        PARENT[:-3] + b"-0g",
    ],
)
def test_a_parent_that_is_none_is_dropped_with_its_state(parent: bytes) -> None:
    made = trace((b"traceparent", parent), (b"tracestate", b"a=1"))
    assert made.lines == b"x-request-id: " + made.request_id + b"\r\n"
    assert set(made.fields) == {"request_id"}


def test_two_parents_are_none_and_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert trace((b"traceparent", PARENT), (b"traceparent", PARENT)).trace_id == ""
    assert trace((b"traceparent", b"01" + PARENT[2:] + b"-more")).trace_id == TRACE.decode()
    assert b"traceparent: 00-" + TRACE in trace((b"traceparent", b"01" + PARENT[2:] + b"-more")).lines
    assert trace((b"traceparent", b"01" + PARENT[2:] + b"more")).trace_id == ""


def test_no_trace_is_begun_where_there_is_none() -> None:
    assert b"traceparent" not in trace().lines


@pytest.mark.parametrize("request_id", [b"abc", b"req_01.a:b-c/d=e~f", b"a" * 128])
def test_an_id_that_is_usable_is_the_clients(request_id: bytes) -> None:
    assert trace((b"x-request-id", request_id)).lines == b"x-request-id: " + request_id + b"\r\n"


@pytest.mark.parametrize(
    "request_id",
    [b"", b"a" * 129, b"with space", b"caf\xc3\xa9", b"a\tb", b'"quoted"', b"cmpl-___prefill_addr_10.0.0.1:5000___decode_addr_x_1"],
)
def test_another_id_is_made_where_it_is_not(request_id: bytes) -> None:
    made = trace((b"x-request-id", request_id))
    assert len(made.request_id) == 32
    int(made.request_id, 16)
