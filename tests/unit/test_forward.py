"""What is sent to an engine of what a client sent."""

from __future__ import annotations

import pytest

from engines.types import EngineInfo, EngineKind, EngineSpec
from router.clients import ClientConnection
from router.exchange import ONE_WRITE_BYTES, Exchange, Headers
from router.forward import Line
from router.server import Server
from router.upstream import Timeouts


async def never(_: Exchange) -> None:
    raise AssertionError


def line(
    url: str = "http://engine:8000", *, api_key: str | None = None, ranks: tuple[int, ...] = (0,), kind: EngineKind = EngineKind.VLLM
) -> Line:
    info = EngineInfo(id=url, spec=EngineSpec(url=url, api_key=api_key), kind=kind, version="0", models=(), ranks=ranks)
    return Line(info, Timeouts())


def sent(
    target: Line, headers: Headers, *, path: bytes = b"/v1/completions", body: bytes = b"{}", rank: int = 0, upgrade: bool = False
) -> list[bytes]:
    exchange = Exchange(ClientConnection(Server(never, max_body_bytes=1)), "GET" if upgrade else "POST", path, headers, body)
    exchange.upgrade = upgrade
    return target.request(exchange, body, rank)


def lines(request: list[bytes]) -> list[bytes]:
    return b"".join(request).partition(b"\r\n\r\n")[0].split(b"\r\n")


async def test_a_request_keeps_its_path_query_headers_and_body() -> None:
    request = sent(
        line(), [(b"accept", b"*/*"), (b"authorization", b"Bearer k"), (b"x-a", b"1"), (b"x-a", b"2")], path=b"/v1/messages?beta=true"
    )
    assert lines(request) == [
        b"POST /v1/messages?beta=true HTTP/1.1",
        b"host: engine:8000",
        b"content-length: 2",
        b"accept: */*",
        b"authorization: Bearer k",
        b"x-a: 1",
        b"x-a: 2",
    ]
    assert request[0].endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize(
    "header",
    [
        (b"connection", b"keep-alive"),
        (b"keep-alive", b"timeout=5"),
        (b"te", b"trailers"),
        (b"trailer", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
        (b"proxy-authorization", b"Basic x"),
        (b"proxy-connection", b"keep-alive"),
        (b"content-length", b"999"),
        (b"expect", b"100-continue"),
        (b"host", b"elsewhere"),
        (b"x-data-parallel-rank", b"7"),
        (b"x-prefiller-host-port", b"10.0.0.1:1"),
        (b"x-worker-instance-id", b"1"),
        (b"x-gateway-destination-endpoint", b"10.0.0.1:1"),
        (b"x-override-anything", b"1"),
        (b"x-commutator-engine", b"1"),
    ],
)
async def test_headers_of_the_connection_and_of_routing_do_not_pass(header: tuple[bytes, bytes]) -> None:
    assert lines(sent(line(), [header, (b"x-b", b"2")])) == [
        b"POST /v1/completions HTTP/1.1",
        b"host: engine:8000",
        b"content-length: 2",
        b"x-b: 2",
    ]


async def test_headers_that_any_connection_header_names_do_not_pass() -> None:
    headers = [(b"x-a", b"1"), (b"connection", b"close, X-A"), (b"x-b", b"1"), (b"connection", b"x-b"), (b"x-c", b"1")]
    assert lines(sent(line(), headers))[3:] == [b"x-c: 1"]


async def test_an_engine_with_a_key_of_its_own_gets_only_that() -> None:
    request = sent(line(api_key="secret"), [(b"authorization", b"Bearer k"), (b"x-api-key", b"k"), (b"x-b", b"2")])
    assert lines(request)[1:] == [b"host: engine:8000", b"authorization: Bearer secret", b"content-length: 2", b"x-b: 2"]


async def test_the_chosen_rank_is_the_only_one_named() -> None:
    request = sent(line(ranks=(4, 5)), [(b"x-data-parallel-rank", b"9")], rank=5)
    assert [text for text in lines(request) if b"rank" in text.lower()] == [b"X-data-parallel-rank: 1"]


async def test_a_small_body_goes_with_its_head_and_a_large_one_is_not_copied() -> None:
    assert len(sent(line(), [], body=b"x" * (ONE_WRITE_BYTES - 1))) == 1
    body = b"x" * ONE_WRITE_BYTES
    head, same = sent(line(), [], body=body)
    assert head.endswith(b"\r\n\r\n")
    assert same is body


async def test_a_websocket_is_asked_for_with_the_clients_own_handshake() -> None:
    headers = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket"), (b"sec-websocket-key", b"k"), (b"sec-websocket-version", b"13")]
    request = sent(line(), headers, path=b"/v1/realtime?model=m", body=b"", upgrade=True)
    assert lines(request) == [
        b"GET /v1/realtime?model=m HTTP/1.1",
        b"host: engine:8000",
        b"connection: Upgrade",
        b"upgrade: websocket",
        b"sec-websocket-key: k",
        b"sec-websocket-version: 13",
    ]
    assert request[0].endswith(b"13\r\n\r\n")


async def test_an_ipv6_engine_is_named_in_brackets() -> None:
    assert lines(sent(line("http://[::1]:8000"), []))[1] == b"host: [::1]:8000"


async def test_R28_sglangs_own_route_is_told_its_rank_in_the_body_and_no_other_route_is() -> None:
    two = line(kind=EngineKind.SGLANG, ranks=(0, 1))
    request = sent(two, [], path=b"/generate", body=b'{"text":"hi"}', rank=1)
    assert b"".join(request).endswith(b'\r\n\r\n{"text":"hi","routed_dp_rank":1}')
    assert b"content-length: 32" in lines(request)
    assert b"".join(sent(two, [], path=b"/v1/completions", body=b"{}", rank=1)).endswith(b"\r\n\r\n{}")
    assert b"".join(sent(line(kind=EngineKind.SGLANG), [], path=b"/generate", body=b"{}")).endswith(b"\r\n\r\n{}")
