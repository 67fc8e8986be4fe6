"""How is an engine addressed? One spelling per engine, and the arithmetic of ZMQ endpoints.

Engines write their KV endpoints as they bind or connect them (`tcp://*:5557`); a reader needs a host it can reach and, with data
parallelism, rank r's port, which is rank 0's plus r.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

WILDCARDS = frozenset({"*", "0.0.0.0", "::", ""})  # noqa: S104 - recognised in what an engine says, never bound here
_PORTS = {"http": 80, "https": 443}


def normalise(url: str) -> str:
    """The one spelling of an engine's URL: `scheme://host:port`, lower case, port always written, no trailing slash.

    Raises ValueError, naming the URL, when it is not http(s), or has a path, a query or user information.
    """
    parts = _split(url, url)
    if parts.scheme not in _PORTS:
        raise ValueError(f"engine URL {url!r}: must start with http:// or https://")
    if not parts.hostname:
        raise ValueError(f"engine URL {url!r}: has no host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("engine URL: must not hold a user or password (give the key as api-key)")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"engine URL {url!r}: must be scheme://host:port, without a path")
    port = parts.port if parts.port is not None else _PORTS[parts.scheme]
    return f"{parts.scheme}://{_bracket(parts.hostname)}:{port}"


def host_of(url: str) -> str:
    """The URL's host, without the brackets of IPv6."""
    return urlsplit(url).hostname or ""


def split_tcp(endpoint: str) -> tuple[str, int] | None:
    """Host (no brackets) and port of `tcp://host:port`; None for anything else (ipc, inproc, no port)."""
    rest = endpoint.removeprefix("tcp://")
    host, colon, port = rest.rpartition(":")
    if rest == endpoint or not colon or not port.isascii() or not port.isdigit():
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def tcp(host: str, port: int) -> str:
    """`tcp://host:port`, with brackets round an IPv6 host."""
    return f"tcp://{_bracket(host)}:{port}"


def reachable(endpoint: str, host: str) -> str:
    """`endpoint` with a wildcard host replaced by `host`; unchanged when it names one."""
    parts = split_tcp(endpoint)
    return tcp(host, parts[1]) if parts is not None and parts[0] in WILDCARDS else endpoint


def at_rank(endpoint: str, rank: int) -> str:
    """Rank `rank`'s endpoint, given rank 0's."""
    parts = split_tcp(endpoint)
    return tcp(parts[0], parts[1] + rank) if parts is not None and rank else endpoint


def _split(url: str, shown: str) -> SplitResult:
    try:
        parts = urlsplit(url.strip())
        _ = parts.port  # read here: it is what raises on a port that is no number
    except ValueError as error:
        raise ValueError(f"engine URL {shown!r}: {error}") from error
    return parts


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
