"""Which engines does a name stand for? Every address that DNS knows for it: compose services, headless services, Consul.

    http://vllm:8000,role=prefill       A: each address is an engine at port 8000. AAAA only where there is no A: a host that has both is one
    http://_http._tcp.vllm.default.svc  SRV: each target is one, at the port of its record

What else is written there holds for each of them; `kv-events=tcp://*:5557` is at the engine's own address. A name that does not exist has no
engines; a server that does not answer says nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from discovery.sources.found import Found, SourceFailed
from discovery.sources.source import Polled
from engines.types import EngineSpec
from engines.urls import WILDCARDS, normalise, reachable

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

INSTALL: Final = "dnspython is not installed: pip install 'commutator[dns]'"
LIFETIME_S: Final = 5.0


class DnsSource(Polled):
    """One name."""

    def __init__(self, spec: EngineSpec, period_s: float, server: str | None = None) -> None:
        """`server` is asked instead of those of the system: `HOST` or `HOST:PORT`."""
        super().__init__(period_s)
        self.name = f"dns {urlsplit(spec.url).hostname}"
        self._spec = spec
        self._server = server
        self._resolver: Resolver | None = None

    async def look(self) -> Found:
        """See `Polled`."""
        if self._resolver is None:
            self._resolver = await asyncio.to_thread(_resolver, self._server)
        parts = urlsplit(self._spec.url)
        name, port = parts.hostname or "", parts.port or 80
        if name.startswith("_"):
            places = [(host, at) for target, at in await self._targets(name) for host in await self._addresses(target)]
        else:
            places = [(host, port) for host in await self._addresses(name)]
        return Found(tuple(engine_at(self._spec, host, at) for host, at in sorted(set(places))))

    async def _addresses(self, name: str) -> list[str]:
        return await self._records(name, "A") or await self._records(name, "AAAA")

    async def _targets(self, name: str) -> list[tuple[str, int]]:
        found = []
        for record in await self._records(name, "SRV"):
            _, _, port, target = record.split()
            if target != ".":  # RFC 2782: the service is decidedly not available
                found.append((target, int(port)))
        return found

    async def _records(self, name: str, kind: str) -> list[str]:
        from dns.exception import DNSException  # noqa: PLC0415  an extra
        from dns.resolver import NXDOMAIN, NoAnswer  # noqa: PLC0415

        assert self._resolver is not None  # noqa: S101  `look` has made it
        try:
            answer = await self._resolver.resolve(name, kind, search=True, lifetime=LIFETIME_S)
        except (NXDOMAIN, NoAnswer):
            return []
        except DNSException as error:
            raise SourceFailed(f"{name} {kind}: {error}") from None
        except OSError as error:
            raise SourceFailed(f"{name} {kind}: {error.strerror or error}") from None
        return [record.to_text() for record in answer]


def engine_at(spec: EngineSpec, host: str, port: int) -> EngineSpec:
    """The engine of a name at one of its addresses.

    >>> engine_at(EngineSpec("http://vllm:8000", kv_events="tcp://*:5557"), "10.0.0.7", 8000).kv_events
    'tcp://10.0.0.7:5557'
    """
    shown = f"[{host}]" if ":" in host else host
    bootstrap = spec.bootstrap
    if bootstrap is not None and urlsplit(bootstrap).hostname in WILDCARDS:
        bootstrap = f"http://{shown}:{urlsplit(bootstrap).port}"
    return msgspec.structs.replace(
        spec,
        url=normalise(f"{urlsplit(spec.url).scheme}://{shown}:{port}"),
        bootstrap=bootstrap,
        kv_events=None if spec.kv_events is None else reachable(spec.kv_events, host),
        kv_replay=None if spec.kv_replay is None else reachable(spec.kv_replay, host),
    )


def _resolver(server: str | None) -> Resolver:
    try:
        from dns.asyncresolver import Resolver  # noqa: PLC0415  an extra
        from dns.resolver import NoResolverConfiguration  # noqa: PLC0415
    except ImportError:
        raise SourceFailed(INSTALL) from None
    try:
        resolver = Resolver(configure=server is None)
    except NoResolverConfiguration as error:
        raise SourceFailed(f"the system names no DNS server: {error}") from None
    if server is not None:
        host, colon, port = server.rpartition(":")
        resolver.nameservers = [host if colon else server]
        resolver.port = int(port) if colon else 53
    return resolver
