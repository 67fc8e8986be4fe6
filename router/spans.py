"""What did a traced request spend its time on? Its spans, told to an OpenTelemetry collector by OTLP over HTTP.

    request   ├─────────────────────────────────────────────────────────────────────────┤   server; its parent is the client's span
    route     ├────────────────┤  until an engine was chosen                                  the engine's parent is the one above
    tokenize  ├───────┤
    queue             ├────────┤  for room at an engine
    prefill                    ├───────────────┤  from sending it to the first token, of the last try
    stream                                     ├───────────────────────────────────────────┤

Spans are made once a request is over, of times that it has noted, and sent in batches by a task; a collector that is away costs spans, never
a request. Times are monotonic until they are encoded.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from discovery.config import ConfigError
from discovery.logs import event
from router.tracing import Trace

PERIOD_S: Final = 1.0
TIMEOUT_S: Final = 10.0
MAX_WAITING: Final = 20_000
"""Spans kept for a collector that is slow; beyond, the newest are dropped and counted."""
BATCH: Final = 2_000
PATH: Final = "/v1/traces"
NAME: Final = "commutator"

Attributes = Mapping[str, str | int | bool | float]
log = logging.getLogger(__name__)


class OtelMissing(ConfigError):
    """Traces cannot be told without the package that knows their shape."""


class Span(msgspec.Struct, frozen=True):
    """One of a trace's spans; ids in hexadecimal."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    began: float
    ended: float
    attributes: Attributes = {}
    failure: str = ""
    serves: bool = False
    """Of the kind SERVER; all others are internal."""


class Times(msgspec.Struct, frozen=True):
    """When a request was where, in monotonic seconds; None: it never was."""

    started: float
    read_at: float | None
    chosen_at: float | None
    sent_at: float | None
    first_token_at: float | None
    ended: float


def spans_of(trace: Trace, times: Times, attributes: Attributes, failure: str, bits: Callable[[int], int]) -> list[Span]:
    """A request's spans, its own first; `bits` as `Trace` has it. Pure."""
    trace_id, span_id = trace.trace_id, trace.span_id
    found = [Span(trace_id, span_id, trace.parent_id, "request", times.started, times.ended, attributes, failure, serves=True)]

    def add(name: str, parent: str, began: float | None, ended: float | None) -> str:
        made = f"{bits(64) or 1:016x}"
        if began is not None:
            found.append(Span(trace_id, made, parent, name, began, times.ended if ended is None else ended))
        return made

    route = add("route", span_id, times.started, times.chosen_at)
    add("tokenize", route, times.started, times.read_at)
    add("queue", route, times.read_at, times.chosen_at)
    if times.chosen_at is not None:
        add("prefill", span_id, times.sent_at, times.first_token_at)
        add("stream", span_id, times.first_token_at, None)
    return found


_ATTRIBUTES: Final = {
    "path": "url.path",
    "status": "http.response.status_code",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "commutator.cached_tokens",
    "overlap_tokens": "commutator.overlap_tokens",
    "engine": "commutator.engine",
    "rank": "commutator.rank",
    "reason": "commutator.reason",
    "prefill_engine": "commutator.prefill_engine",
    "tries": "commutator.tries",
    "request_id": "commutator.request_id",
}
"""Field of the log line → attribute of the span: OpenTelemetry's names where it has them."""


class Exporter:
    """Sends what it is told, while `run` runs."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: str, version: str, *, clock: Callable[[], float]) -> None:
        """`endpoint` is the collector's URL, without a path. Raises OtelMissing."""
        self.sent = 0
        self.dropped = 0
        self._session = session
        self._url = endpoint.rstrip("/") + PATH
        self._clock = clock
        self._bits = random.Random().getrandbits
        self._encode = encoder(version)
        self._waiting: deque[Span] = deque()
        self._away = ""

    def tell(self, trace: Trace, times: Times, fields: Mapping[str, object], failure: str) -> None:
        """A request is over, of which the log says these fields. Its spans are sent soon, if its trace is one that is kept."""
        if not trace.sampled:
            return
        told = {_ATTRIBUTES[name]: value for name, value in fields.items() if name in _ATTRIBUTES and isinstance(value, str | int)}
        for span in spans_of(trace, times, told, failure, self._bits):
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(span)
            else:
                self.dropped += 1

    async def run(self) -> None:
        """Ends only by cancellation; then `close` sends what is left."""
        while True:
            await asyncio.sleep(PERIOD_S)
            while await self._send():
                pass

    async def close(self) -> None:
        """What is left is sent, if it can be at once."""
        await self._send()

    async def _send(self) -> bool:
        """One batch; whether there is more, and somebody to take it."""
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        if not batch:
            return False
        offset = time.time() - self._clock()  # noqa: TID251  a span's times are the world's
        body = await asyncio.to_thread(self._encode, batch, offset)
        try:
            async with self._session.post(
                self._url, data=body, headers={"content-type": "application/x-protobuf"}, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            ) as response:
                why = "" if response.status < 300 else f"it answered {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or "no answer in time"
        if why:
            self.dropped += len(batch)
        else:
            self.sent += len(batch)
        if why != self._away:
            event(log, logging.WARNING if why else logging.INFO, "trace collector", away=why)
            self._away = why
        return not why and bool(self._waiting)


def encoder(version: str) -> Callable[[Iterable[Span], float], bytes]:
    """Makes OTLP's message of spans and the seconds between the clock and the epoch. Raises OtelMissing."""
    try:
        service = importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        trace = importlib.import_module("opentelemetry.proto.trace.v1.trace_pb2")
        common = importlib.import_module("opentelemetry.proto.common.v1.common_pb2")
    except ImportError:
        raise OtelMissing("otlp_endpoint: traces need the package `opentelemetry-proto`: pip install 'commutator[otel]'") from None

    def value(of: str | float | bool) -> Any:  # noqa: ANN401, FBT001  a message
        match of:
            case bool():
                return common.AnyValue(bool_value=of)
            case int():
                return common.AnyValue(int_value=of)
            case float():
                return common.AnyValue(double_value=of)
            case _:
                return common.AnyValue(string_value=of)

    def pairs(of: Attributes) -> list[Any]:
        return [common.KeyValue(key=key, value=value(told)) for key, told in of.items()]

    def one(span: Span, offset: float) -> Any:  # noqa: ANN401  a message
        made = trace.Span(
            trace_id=bytes.fromhex(span.trace_id),
            span_id=bytes.fromhex(span.span_id),
            parent_span_id=bytes.fromhex(span.parent_id),
            name=span.name,
            kind=trace.Span.SPAN_KIND_SERVER if span.serves else trace.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=int((span.began + offset) * 1e9),
            end_time_unix_nano=int((span.ended + offset) * 1e9),
            attributes=pairs(span.attributes),
        )
        if span.failure:
            made.status.code = trace.Status.STATUS_CODE_ERROR
            made.status.message = span.failure
        return made

    def encode(spans: Iterable[Span], offset: float) -> bytes:
        request = service.ExportTraceServiceRequest()
        told = request.resource_spans.add()
        told.resource.attributes.extend(pairs({"service.name": NAME, "service.version": version}))
        scope = told.scope_spans.add()
        scope.scope.name, scope.scope.version = NAME, version
        scope.spans.extend(one(span, offset) for span in spans)
        made: bytes = request.SerializeToString()
        return made

    return encode
