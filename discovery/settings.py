"""What can be set about `commutator relay`? As with `serve`, field paths are keys, variables and flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from discovery.access import (
    NatsCa,
    NatsCert,
    NatsCreds,
    NatsKey,
    NatsNkey,
    NatsPassword,
    NatsToken,
    NatsUrl,
    NatsUser,
    complaints,
)
from discovery.config import Complaint
from discovery.logs import LogFormat, LogLevel
from discovery.sources import settings as sources
from discovery.sources.settings import DiscoverSettings
from engines.types import EngineSpec

Seconds = Annotated[float, Meta(gt=0)]


class RelaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV event relay alone: reads engines' events where routers cannot, and puts them on the bus."""

    engine: Annotated[
        tuple[EngineSpec, ...],
        Meta(
            description="An engine, written as for `commutator serve`, with the URL by which routers know it: "
            "`http://h:8000,kv-events=tcp://h:5557,kv-replay=tcp://h:5558,api-key=…`. Repeatable."
        ),
    ] = ()
    discover: DiscoverSettings = DiscoverSettings()
    announce: Annotated[
        bool, Meta(description="Tell routers of these engines on the bus, as long as they answer: for routers with `discover.announced`.")
    ] = False
    host: Annotated[str, Meta(min_length=1, description="Address that /metrics, /health and /ready listen on.")] = "0.0.0.0"  # noqa: S104  as `serve`
    port: Annotated[int, Meta(ge=0, le=65535, description="Their port; 0 takes a free one and prints it.")] = 8082
    nats: NatsUrl = None
    nats_user: NatsUser = None
    nats_password: NatsPassword = None
    nats_token: NatsToken = None
    nats_creds: NatsCreds = None
    nats_nkey: NatsNkey = None
    nats_ca: NatsCa = None
    nats_cert: NatsCert = None
    nats_key: NatsKey = None
    namespace: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_-]+$", description="First part of every subject on the bus: that of the routers it relays for.")
    ] = "commutator"
    probe_period_s: Annotated[Seconds, Meta(description="Time between two looks at each engine.")] = 2.0
    probe_timeout_s: Annotated[Seconds, Meta(description="Time an engine has to answer a look.")] = 5.0
    log_level: Annotated[LogLevel, Meta(description="Least severity that is logged.")] = "info"
    log_format: Annotated[LogFormat, Meta(description="`auto` is text on a terminal and JSON lines elsewhere.")] = "auto"

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        """What is wrong in combination; `given` holds the keys that somebody set."""
        if not self.engine and not self.discover.used:
            yield Complaint("engine", "no engine is named; name at least one: --engine http://HOST:PORT")
        for url, count in Counter(spec.url for spec in self.engine).items():
            if count > 1:
                yield Complaint("engine", f"{url} is named {count} times")
        if self.nats is None:
            yield Complaint("nats", "a relay needs the NATS server that its routers use: --nats nats://HOST:4222")
            return
        yield from complaints(self, given)
        yield from sources.complaints(self.discover, given, nats=self.nats)
        if self.announce and self.discover.announced:
            yield Complaint("announce", "together with discover.announced, engines that are gone would announce each other for ever")
