"""Which engines run in Docker's containers? Those that are labelled, asked of Docker's own API and looked at again on its events.

    labels:
      commutator.port: "8000"           makes a container an engine
      commutator.role: prefill          and the other keys of an engine: see `labels`
      commutator.network: backend       which of its networks is meant, where it is in several

A container that is on the host's network is at 127.0.0.1. One that has been told to stop is gone from the list: it drains.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from discovery.config.errors import ConfigError
from discovery.sources.found import Found, SourceFailed, Tell
from discovery.sources.labels import DOCKER, own, spec_of
from discovery.sources.source import Polled
from engines.types import EngineSpec

if TYPE_CHECKING:
    from aiodocker import Docker

INSTALL: Final = "aiodocker is not installed: pip install 'commutator[docker]'"
FILTERS: Final = {"label": [f"{DOCKER}port"], "status": ["running"]}
EVENT_FILTERS: Final = {"type": ["container"], "label": [f"{DOCKER}port"]}
TIMEOUT_S: Final = 10.0


class DockerSource(Polled):
    """One Docker daemon."""

    def __init__(self, address: str, period_s: float, environ: Mapping[str, str] | None = None) -> None:
        """`address` as DOCKER_HOST has it: `unix:///var/run/docker.sock`, `tcp://HOST:2375`; empty for Docker's own default."""
        super().__init__(period_s)
        self.name = f"docker {address}".strip()
        self._address = address
        self._environ = os.environ if environ is None else environ
        self._docker: Docker | None = None

    async def run(self, tell: Tell) -> None:
        """See `Source`."""
        make = await asyncio.to_thread(_client)
        try:
            self._docker = make(url=self._address or None, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        except ValueError as error:
            raise SourceFailed(str(error)) from None
        try:
            async with asyncio.TaskGroup() as group:
                hearing = group.create_task(self._hear(self._docker), name="docker events")
                group.create_task(_forever(super().run(tell), hearing), name="docker containers")
        except BaseExceptionGroup as failed:
            raise _first(failed) from None
        finally:
            await self._docker.close()

    async def look(self) -> Found:
        """See `Polled`."""
        assert self._docker is not None  # noqa: S101  `run` has made it
        try:
            listed = await self._docker.containers.list(filters=msgspec.json.encode(FILTERS).decode())
        except (_docker_error(), aiohttp.ClientError, OSError, TimeoutError) as error:
            raise SourceFailed(_words(error)) from None
        return found_in([container._container for container in listed], self._environ)  # noqa: SLF001  what it was told, as it was told

    async def _hear(self, docker: Docker) -> None:
        """Each event is a reason to look; ends when Docker does."""
        heard = docker.events.subscribe(create_task=False)  # type: ignore[no-untyped-call]  # theirs
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(docker.events.run(filters=msgspec.json.encode(EVENT_FILTERS).decode()), name="docker event stream")
                while await heard.get() is not None:
                    self.look_again()
        except BaseExceptionGroup as failed:
            raise SourceFailed(_words(_first(failed))) from None
        raise SourceFailed("it ended the stream of its events")


def found_in(containers: list[dict[str, Any]], environ: Mapping[str, str]) -> Found:
    """The engines among containers as Docker lists them."""
    specs: dict[str, EngineSpec] = {}
    faults = []
    for container in containers:
        name = next(iter(container.get("Names") or ()), container.get("Id", ""))[:80].lstrip("/")
        keys = own(container.get("Labels") or {}, DOCKER)
        try:
            spec = spec_of(_host(container, keys.pop("network", None)), None, keys, environ)
        except ConfigError as error:
            faults.append(f"container {name}: {error}")
            continue
        if spec.url in specs:
            faults.append(f"container {name}: {spec.url} is another container's too")
        specs.setdefault(spec.url, spec)
    return Found(tuple(specs.values()), tuple(faults))


def _host(container: Mapping[str, Any], wanted: str | None) -> str:
    networks: Mapping[str, Any] = (container.get("NetworkSettings") or {}).get("Networks") or {}
    if "host" in networks or (container.get("HostConfig") or {}).get("NetworkMode") == "host":
        return "127.0.0.1"
    if wanted is not None and wanted not in networks:
        raise ConfigError(f"it is not in the network {wanted!r}; it is in {', '.join(sorted(networks)) or 'none'}")
    for name in [wanted] if wanted is not None else sorted(networks):
        address = networks[name].get("IPAddress") or networks[name].get("GlobalIPv6Address")
        if address:
            return str(address)
    raise ConfigError("it has no address in any network")


async def _forever(looking: Any, hearing: asyncio.Task[None]) -> None:  # noqa: ANN401  a coroutine
    """Ends with what it does; the stream of events then ends too."""
    try:
        await looking
    finally:
        hearing.cancel()


def _client() -> Callable[..., Docker]:
    try:
        from aiodocker import Docker  # noqa: PLC0415  an extra
    except ImportError:
        raise SourceFailed(INSTALL) from None
    return Docker


def _docker_error() -> type[Exception]:
    from aiodocker.exceptions import DockerError  # noqa: PLC0415  an extra

    return DockerError


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _words(error: BaseException) -> str:
    message = getattr(error, "message", "")
    return str(message or error) or type(error).__name__
