"""What can be set about where engines are found? The same for routers and relays: `[discover]` in the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from discovery.config.errors import Complaint
from engines.types import EngineSpec

Text = Annotated[str, Meta(min_length=1)]
Seconds = Annotated[float, Meta(gt=0)]
Server = Annotated[str, Meta(pattern=r"^[0-9A-Fa-f.:]+$")]
Daemon = Annotated[str, Meta(pattern=r"^(default|(unix|tcp|http|https)://.+)$")]


class DiscoverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sources that say which engines there are, beside those that are named. An engine that leaves them drains."""

    file: Annotated[
        Text | None, Meta(description="TOML file of engines, `[[engine]]` tables or lines in `engine = […]`; read again when it changes.")
    ] = None
    dns: Annotated[
        tuple[EngineSpec, ...],
        Meta(
            description="A name whose every address is an engine, written as one: `http://vllm:8000,role=prefill`; with a name like "
            "`http://_http._tcp.vllm`, every target of its SRV records. Repeatable."
        ),
    ] = ()
    dns_server: Annotated[
        Server | None, Meta(description="Address of the DNS server to ask, `IP` or `IP:PORT`, instead of the system's.")
    ] = None
    docker: Annotated[
        Daemon | None,
        Meta(
            description="Docker daemon whose containers labelled `commutator.port` are engines: `unix:///var/run/docker.sock`, or `default`."
        ),
    ] = None
    kubernetes: Annotated[
        Text | None, Meta(description="Label selector of the pods, or endpoint slices, that are engines: `app=vllm`.")
    ] = None
    kubernetes_kind: Annotated[Literal["pods", "endpointslices"], Meta(description="What the selector selects.")] = "pods"
    kubernetes_namespace: Annotated[Text | None, Meta(description="Their namespace, `*` for all; the router's own by default.")] = None
    kubeconfig: Annotated[
        Text | None, Meta(description="File that says how to reach Kubernetes; by default the pod's own account, else KUBECONFIG.")
    ] = None
    announced: Annotated[bool, Meta(description="Follow engines that are announced on the bus; needs `nats`.")] = False
    announced_key: Annotated[
        Text | None, Meta(description="API key of engines that are announced: keys never pass over the bus.", extra={"secret": True})
    ] = None
    period_s: Annotated[Seconds, Meta(description="Time between two looks at DNS and Docker; its events are acted on at once.")] = 5.0

    @property
    def used(self) -> bool:
        """Whether there is any source."""
        return bool(self.file or self.dns or self.docker or self.kubernetes or self.announced)


def complaints(settings: DiscoverSettings, given: frozenset[str], *, nats: str | None) -> Iterator[Complaint]:
    """What is wrong with them in combination; keys are those of the command's settings."""
    if settings.announced and nats is None:
        yield Complaint("discover.announced", "needs `nats`: nobody else can reach a router's private server")
    names = [spec.url for spec in settings.dns]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Complaint("discover.dns", f"{name} is named twice")
    needs = {
        "dns_server": ("dns", settings.dns),
        "kubernetes_kind": ("kubernetes", settings.kubernetes),
        "kubernetes_namespace": ("kubernetes", settings.kubernetes),
        "kubeconfig": ("kubernetes", settings.kubernetes),
        "announced_key": ("announced", settings.announced),
        "period_s": ("dns or discover.docker", settings.dns or settings.docker),
    }
    for key, (other, there) in needs.items():
        if f"discover.{key}" in given and getattr(settings, key) != getattr(DiscoverSettings(), key) and not there:
            yield Complaint(f"discover.{key}", f"has no effect without discover.{other}")
