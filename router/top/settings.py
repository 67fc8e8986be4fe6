"""What can be set about `commutator top`?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from discovery.config import Complaint
from router.settings import Seconds, Text, Token


class TopSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A router's live page in a terminal: what is wrong, latencies, the fleet, and the latest decisions."""

    admin: Annotated[str, Meta(pattern=r"^https?://[^/]+/?$", description="The router's admin address, as its ready line tells it.")] = (
        "http://127.0.0.1:8081"
    )
    admin_token: Annotated[
        Token | None, Meta(description="The router's admin token. Better in the environment or in a file.", extra={"secret": True})
    ] = None
    admin_token_file: Annotated[Text | None, Meta(description="File that holds it.")] = None
    tls_ca: Annotated[Text | None, Meta(description="PEM file of the authority of its certificate, where the system does not know it.")] = (
        None
    )
    period_s: Annotated[Seconds, Meta(description="Time between two looks.")] = 2.0
    once: Annotated[bool, Meta(description="Print what there is, and end.")] = False

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        """What is wrong in combination."""
        if self.admin_token is None and self.admin_token_file is None:
            yield Complaint("admin_token", "the router shows nothing without its admin token; give it, or admin_token_file")
        if self.admin_token is not None and self.admin_token_file is not None:
            yield Complaint("admin_token_file", "`admin_token` is given too; there is one admin token")
        if self.tls_ca is not None and self.admin.startswith("http:"):
            yield Complaint("tls_ca", "has no effect with an http:// address")
        if self.once and "period_s" in given:
            yield Complaint("period_s", "has no effect with once")
