"""What does one process tell of itself? All that the page shows, in a shape that can be sent to another process and added to others'."""

from __future__ import annotations

from typing import Any

import msgspec

from router.ui.recent import Slot


class Index(msgspec.Struct, frozen=True):
    """The prefix tables."""

    blocks: int = 0
    """Entries that KV events fill."""
    bytes: int = 0
    """Of all tables, estimated."""
    refused: int = 0
    """Blocks not taken in because a table was full."""


class Link(msgspec.Struct, frozen=True):
    """A pair of engines that has handed KV over."""

    prefill: str
    decode: str
    bytes_per_s: float
    slow: str = ""
    """Why it is held to be slow; empty when it is not."""


class Part(msgspec.Struct, frozen=True):
    """One process, now."""

    now: float
    """Monotonic seconds, by the clock of the machine."""
    policy: str
    engines: list[dict[str, Any]]
    """As the admin API tells of them."""
    slots: list[Slot]
    decisions: list[dict[str, Any]]
    """The latest first; `at` is by `now`'s clock."""
    index: Index
    in_progress: int
    connections: int
    waiting: dict[str, int]
    """Requests that wait for room, by model."""
    models: dict[str, int]
    """Engines that take requests, by model; 0 for one that has lost its last."""
    bus: str
    """Where the NATS server is that cannot be reached; empty when all is well."""
    peers: int
    links: list[Link]
    transfers: dict[str, int]
    """Handovers since the process began, by outcome."""
    disagg: str
    plans: list[dict[str, Any]] = []
    """What planners on the bus last said, the latest of each; `at` is by `now`'s clock."""
