"""What can `commutator doctor` be asked? One frozen struct: its options."""

from __future__ import annotations

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
from engines.types import EngineSpec

Text = Annotated[str, Meta(min_length=1)]


class DoctorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wrong with a fleet, one line each, with the mend. Engines are sent a few short prompts. Exit code 1 when something is wrong."""

    router: Annotated[
        Text | None,
        Meta(description="A router's URL, `http://HOST:8080`. Its engines are looked at too, at the URLs by which it knows them."),
    ] = None
    engine: Annotated[
        tuple[EngineSpec, ...],
        Meta(
            description="An engine, written as for `commutator serve`: without a router, or to give the keys of a router's engines. Repeatable."
        ),
    ] = ()
    router_key: Annotated[
        Text | None,
        Meta(description="A key of the router's clients, where it asks for one; better in the environment.", extra={"secret": True}),
    ] = None
    tokenizer: Annotated[Text | None, Meta(description="Folder or hub name of the tokenizer, where the router is given one.")] = None
    nats: NatsUrl = None
    nats_user: NatsUser = None
    nats_password: NatsPassword = None
    nats_token: NatsToken = None
    nats_creds: NatsCreds = None
    nats_nkey: NatsNkey = None
    nats_ca: NatsCa = None
    nats_cert: NatsCert = None
    nats_key: NatsKey = None
    namespace: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]+$", description="First part of the routers' subjects on the bus.")] = (
        "commutator"
    )
    timeout_s: Annotated[float, Meta(gt=0, description="Time that an engine has for one answer.")] = 30.0
    json: Annotated[bool, Meta(description="Print one JSON object instead of lines.")] = False

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        """What is missing, and what is wrong in combination; `given` holds the keys that somebody set."""
        if self.router is None and not self.engine and self.nats is None:
            yield Complaint(
                "router", "name what to look at: --router http://HOST:8080, --engine http://HOST:PORT, or --nats nats://HOST:4222"
            )
        if self.router is not None and not self.router.startswith(("http://", "https://")):
            yield Complaint("router", f"{self.router!r} must begin with http:// or https://")
        if self.router_key is not None and self.router is None:
            yield Complaint("router_key", "has no effect without router")
        if "namespace" in given and self.nats is None:
            yield Complaint("namespace", "has no effect without nats")
        yield from complaints(self, given)
