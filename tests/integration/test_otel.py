"""Spans of traced requests reach a collector as OTLP says, and nobody's request waits for one that is away."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from engines.simulator.faults import Break
from router import spans
from router.spans import Exporter, OtelMissing
from tests.rig import asked, fleet, prompt, routing
from tests.waiting import until

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CANARY = "sk-canary-of-a-client"


class Collector:
    """Takes what comes on OTLP's own path, and decodes it."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.status = 200
        self.url = ""

    @property
    def spans(self) -> list[Span]:
        return [span for request in self.requests for told in request.resource_spans for scope in told.scope_spans for span in scope.spans]

    async def take(self, request: web.Request) -> web.Response:
        assert request.headers["content-type"] == "application/x-protobuf"
        if self.status == 200:
            self.requests.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(status=self.status)


@pytest.fixture
async def collector() -> Any:  # noqa: ANN401  an async generator
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "PERIOD_S", 0.05)


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


async def test_O4_a_traced_stream_has_spans_for_what_its_time_went_on(collector: Collector) -> None:
    async with fleet(1) as (engine,), routing([engine], otlp_endpoint=collector.url) as router:
        headers = {"traceparent": PARENT, "x-request-id": "mine", "authorization": f"Bearer {CANARY}"}
        answer = await router.chat(prompt("x", 50), stream=True, stream_options={"include_usage": True}, headers=headers)
        assert answer.status == 200
        await until(lambda: len(collector.spans) == 6, what="the spans have come")
        assert (await router.chat("untraced")).status == 200
        assert (await router.chat("not sampled", headers={"traceparent": PARENT[:-2] + "00"})).status == 200
        assert await router.metric("router_spans_total", outcome="sent") == 6
    found = {span.name: span for span in collector.spans}
    assert found.keys() == {"request", "route", "tokenize", "queue", "prefill", "stream"}
    assert {span.trace_id.hex() for span in found.values()} == {PARENT.split("-")[1]}
    request, route = found["request"], found["route"]
    assert request.parent_span_id.hex() == PARENT.split("-")[2]
    assert (asked(engine)[0].header("traceparent") or "").split("-")[2] == request.span_id.hex(), "the engine's spans are children of ours"
    assert {found[name].parent_span_id for name in ("route", "prefill", "stream")} == {request.span_id}
    assert {found[name].parent_span_id for name in ("tokenize", "queue")} == {route.span_id}
    assert (request.kind, route.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL)
    order = [found["tokenize"], found["queue"], found["prefill"], found["stream"]]
    assert all(one.end_time_unix_nano <= other.start_time_unix_nano + 1000 for one, other in itertools.pairwise(order))
    assert all(
        request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= request.end_time_unix_nano
        for span in found.values()
    )
    told = attributes(request)
    assert told["http.response.status_code"] == 200
    assert told["commutator.engine"] == engine.url
    assert told["gen_ai.request.model"] == "sim"
    assert told["gen_ai.usage.input_tokens"] > 50
    assert {attribute.key: attribute.value.string_value for attribute in collector.requests[0].resource_spans[0].resource.attributes}[
        "service.name"
    ] == "commutator"
    assert CANARY.encode() not in b"".join(request.SerializeToString() for request in collector.requests), "A7"


async def test_a_request_that_failed_says_so_and_of_those_without_a_trace_a_share_begins_one(collector: Collector) -> None:
    async with fleet(1) as (engine,), routing([engine], otlp_endpoint=collector.url, trace_ratio=1.0) as router:
        engine.faults.add(Break(after_chunks=2))
        with pytest.raises(aiohttp.ClientPayloadError):
            await router.chat("x", stream=True, max_tokens=20)
        await until(lambda: any(span.name == "request" for span in collector.spans), what="its spans have come")
        (request,) = [span for span in collector.spans if span.name == "request"]
        assert request.status.code == Status.STATUS_CODE_ERROR
        assert request.parent_span_id == b""
        parent = (asked(engine)[0].header("traceparent") or "").split("-")
        assert parent == ["00", request.trace_id.hex(), request.span_id.hex(), "01"]


async def test_a_collector_that_is_away_costs_spans_and_no_request(collector: Collector) -> None:
    collector.status = 503
    async with fleet(1) as engines, routing(engines, otlp_endpoint=collector.url) as router:

        async def dropped() -> bool:
            assert (await router.chat("x", headers={"traceparent": PARENT})).status == 200
            return await router.metric("router_spans_total", outcome="dropped") > 0

        await until(dropped, what="spans are dropped and counted")
        assert await router.metric("router_spans_total", outcome="sent") == 0


async def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.collector.trace.v1.trace_service_pb2", None)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(OtelMissing, match=r"pip install 'commutator\[otel\]'"):
            Exporter(session, "http://h:4318", "1", clock=lambda: 0.0)
