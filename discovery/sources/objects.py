"""What does a Kubernetes object say of engines? A pod is one; a slice of a service's endpoints has several.

metadata.annotations, metadata.labels:   commutator.io/port: "8000"   commutator.io/role: prefill   …       see `labels`
no port named:                           the one called `http`, or the only one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from discovery.config.errors import ConfigError
from discovery.sources.found import Found
from discovery.sources.labels import KUBERNETES, own, spec_of
from engines.types import EngineSpec

Object = Mapping[str, Any]


class Kind(msgspec.Struct, frozen=True):
    """What is listed."""

    api: str
    resource: str
    places: Callable[[Object], Iterator[tuple[str, int | None]]]
    """Host and port of each engine that an object stands for; a port that is not clear is None."""

    def path(self, namespace: str) -> str:
        """Where they are listed; `*` for all namespaces."""
        within = "" if namespace == "*" else f"/namespaces/{namespace}"
        return f"{self.api}{within}/{self.resource}"


def found_in(kind: Kind, objects: Iterable[Object], environ: Mapping[str, str]) -> Found:
    """The engines that these objects stand for."""
    specs: dict[str, EngineSpec] = {}
    faults = []
    for item in objects:
        meta = item.get("metadata", {})
        keys = own(meta.get("labels") or {}, KUBERNETES) | own(meta.get("annotations") or {}, KUBERNETES)
        try:
            for host, port in kind.places(item):
                spec = spec_of(host, port, keys, environ)
                specs.setdefault(spec.url, spec)  # while a slice is exchanged for others, an endpoint may be in two
        except ConfigError as error:
            faults.append(f"{kind.resource} {meta.get('namespace', '')}/{meta.get('name', '')}: {error}")
    return Found(tuple(specs[url] for url in sorted(specs)), tuple(sorted(faults)))


def _pod(item: Object) -> Iterator[tuple[str, int | None]]:
    status = item.get("status", {})
    if item["metadata"].get("deletionTimestamp") or status.get("phase") != "Running" or not status.get("podIP"):
        return
    ports = [port for container in item.get("spec", {}).get("containers") or () for port in container.get("ports") or ()]
    yield status["podIP"], _port([(port.get("name"), port.get("containerPort")) for port in ports])


def _slice(item: Object) -> Iterator[tuple[str, int | None]]:
    port = _port([(port.get("name"), port.get("port")) for port in item.get("ports") or ()])
    for endpoint in item.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        if not conditions.get("terminating") and endpoint.get("addresses"):
            yield endpoint["addresses"][0], port  # the others are the same endpoint's: the API says to use the first


def _port(ports: list[tuple[str | None, int | None]]) -> int | None:
    named = [port for name, port in ports if name == "http"]
    if named:
        return named[0]
    return ports[0][1] if len(ports) == 1 else None


KINDS = {
    "pods": Kind("/api/v1", "pods", _pod),
    "endpointslices": Kind("/apis/discovery.k8s.io/v1", "endpointslices", _slice),
}
