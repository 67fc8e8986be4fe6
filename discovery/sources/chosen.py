"""Which sources are set? One for each setting that names one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from discovery.sources.announced import AnnouncedSource
from discovery.sources.dns import DnsSource
from discovery.sources.docker import DockerSource
from discovery.sources.file import FileSource
from discovery.sources.kubernetes import KubernetesSource

if TYPE_CHECKING:
    from discovery.bus import Bus
    from discovery.sources.settings import DiscoverSettings
    from discovery.sources.source import Source


def chosen(settings: DiscoverSettings, bus: Bus, namespace: str) -> list[Source]:
    """The sources of these settings, in the order in which one goes before another."""
    found: list[Source] = []
    if settings.file is not None:
        found.append(FileSource(settings.file))
    found += [DnsSource(spec, settings.period_s, settings.dns_server) for spec in settings.dns]
    if settings.docker is not None:
        found.append(DockerSource("" if settings.docker == "default" else settings.docker, settings.period_s))
    if settings.kubernetes is not None:
        source = KubernetesSource(
            settings.kubernetes, kind=settings.kubernetes_kind, namespace=settings.kubernetes_namespace, kubeconfig=settings.kubeconfig
        )
        found.append(source)
    if settings.announced:
        found.append(AnnouncedSource(bus, namespace, api_key=settings.announced_key))
    return found
