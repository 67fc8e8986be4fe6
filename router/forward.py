"""What is sent to an engine: the client's request, less what must not pass, plus what only the router may say.

Headers pass unless they belong to the connection, name a destination or a rank, or are the client's key where the engine has its own
or where the router is who checks it. What tells the request's trace is written anew (`tracing`). The body passes as it is, with
its length: a chunked one has been read whole. SGLang's `/generate` reads its rank there, so it gets one more field.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from engines import sglang, vllm
from engines.types import EngineInfo, EngineKind
from router.exchange import ONE_WRITE_BYTES
from router.pool import EnginePool
from router.relay import HOP_BY_HOP
from router.token_ids import with_field
from router.tracing import TRACE_HEADERS
from router.upstream import Timeouts

if TYPE_CHECKING:
    from router.exchange import Exchange, Headers

NOT_FORWARDED: Final = (
    HOP_BY_HOP
    | TRACE_HEADERS
    | {
        b"host",
        b"content-length",
        b"expect",
        b"x-data-parallel-rank",
        b"x-data-parallel-host-port",
        b"x-prefiller-host-port",
        b"x-prefill-host-port",
        b"x-worker-instance-id",
        b"x-prefill-instance-id",
        b"x-decode-instance-id",
        b"x-dp-rank",
        b"x-prefill-dp-rank",
        b"x-target-worker",
        b"x-smg-target-worker",
        b"x-gateway-destination-endpoint",
        b"x-gateway-destination-endpoint-served",
        b"x-envoy-original-dst-host",
        b"x-commutator-explain",
    }
)
"""Set by the router if at all: clients choose neither engine nor rank."""
NOT_FORWARDED_PREFIXES: Final = (b"x-override-", b"x-commutator-")
KEYS: Final = frozenset({b"authorization", b"x-api-key"})
GENERATE: Final = b"/generate"
"""SGLang's own route, which takes a rank in its body."""
USUAL_CONNECTION: Final = frozenset({b"keep-alive", b"close"})
ASK_FOR_WEBSOCKET: Final = b"connection: Upgrade\r\nupgrade: websocket\r\n"


class EngineHead:
    """Builds request heads for one engine; what does not change per request is made once."""

    __slots__ = ("_drops_key", "_fixed")

    def __init__(self, host: str, port: int, api_key: str | None, *, pass_clients_key: bool = True) -> None:
        host = f"[{host}]" if ":" in host else host
        self._fixed = f" HTTP/1.1\r\nhost: {host}:{port}\r\n".encode("latin-1")
        self._drops_key = api_key is not None or not pass_clients_key
        if api_key is not None:
            self._fixed += b"authorization: Bearer " + api_key.encode("latin-1") + b"\r\n"

    def build(self, target: bytes, headers: Headers, own: bytes) -> bytes:
        """A request head. `target` is the method with path and query; `own`, whole header lines that only the router may write."""
        parts = [target, self._fixed, own]
        named: tuple[bytes, ...] = ()
        for name, value in headers:
            if name in NOT_FORWARDED:
                if name == b"connection" and value not in USUAL_CONNECTION:
                    named += tuple(token.strip().lower() for token in value.split(b","))
            elif not (name.startswith(NOT_FORWARDED_PREFIXES) or (self._drops_key and name in KEYS)):
                parts.append(b"%b: %b\r\n" % (name, value))
        if named:  # headers that `Connection:` itself names as belonging to this hop
            parts[3:] = [line for line in parts[3:] if line.partition(b":")[0] not in named]
        parts.append(b"\r\n")
        return b"".join(parts)


class Line:
    """How requests reach one engine: its connections, its head, its way of naming a rank."""

    __slots__ = ("_head", "_rank_fields", "_rank_headers", "pool")

    def __init__(self, info: EngineInfo, timeouts: Timeouts, *, pass_clients_key: bool = True) -> None:
        """`pass_clients_key`: clients' keys are for engines to check, unless an engine has a key of its own."""
        url = urlsplit(info.id)
        host, port = url.hostname or "", url.port or 80
        self.pool = EnginePool(host, port, timeouts, ssl.create_default_context() if url.scheme == "https" else None)
        self._head = EngineHead(host, port, info.spec.api_key, pass_clients_key=pass_clients_key)
        pin_headers = vllm.pin_headers if info.kind is EngineKind.VLLM else sglang.pin_headers
        self._rank_headers = {
            rank: b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in pin_headers(info, rank).items())
            for rank in info.ranks
        }
        self._rank_fields = {
            rank: b"".join(b'"%b":%d' % (name.encode(), value) for name, value in sglang.pin_fields(info, rank).items())
            for rank in (info.ranks if info.kind is EngineKind.SGLANG else ())
        }
        """By rank, for `GENERATE`."""

    def request(self, exchange: Exchange, body: bytes, rank: int, *, path: bytes | None = None) -> list[bytes]:
        """A whole request, as the pieces to write; to the client's own path unless it is another one."""
        if path is not None:
            return self._request(exchange, b"POST " + path, body, rank)
        query = b"?" + exchange.query if exchange.query else b""
        if exchange.upgrade:
            own = ASK_FOR_WEBSOCKET + self._own(exchange, rank)
            return [self._head.build(b"GET %b%b" % (exchange.path, query), exchange.headers, own)]
        if exchange.path == GENERATE and (field := self._rank_fields.get(rank)):
            body = with_field(body, field)
        return self._request(exchange, b"POST %b%b" % (exchange.path, query), body, rank)

    def _own(self, exchange: Exchange, rank: int) -> bytes:
        own = self._rank_headers[rank]
        return own if exchange.trace is None else own + exchange.trace.lines

    def _request(self, exchange: Exchange, target: bytes, body: bytes, rank: int) -> list[bytes]:
        head = self._head.build(target, exchange.headers, b"%bcontent-length: %d\r\n" % (self._own(exchange, rank), len(body)))
        return [head + body] if len(body) < ONE_WRITE_BYTES else [head, body]
