"""What is a simulated engine made of, and what of it outlives a restart?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from engines.simulator.core import Core
from engines.simulator.faults import Faults
from engines.simulator.load_feed import LoadPublisher
from engines.simulator.publisher import Publisher
from engines.simulator.settings import SimulateSettings
from engines.simulator.text import ModelText
from engines.simulator.transfer import KvExchange


class Recorded:
    """One request as it arrived, and what became of it."""

    __slots__ = ("body", "chunks", "headers", "method", "outcome", "path")

    def __init__(self, method: str, path: str, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.method = method
        self.path = path
        """With its query, as sent."""
        self.headers = headers
        self.body = b""
        self.chunks = 0
        """Stream events sent."""
        self.outcome = "open"
        """`done`, `refused`, `failed`, `faulted`, or `aborted` where the client left."""

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)


class History:
    """What an engine remembers over its restarts. `record` is how many requests (None: all)."""

    def __init__(self, record: int | None = None) -> None:
        self.requests: deque[Recorded] = deque(maxlen=record)
        self.aborts = 0
        """Requests whose client left before the answer's end."""
        self.adapters: dict[str, str] = {}
        """LoRA adapters: name → path."""


class Parts(msgspec.Struct, frozen=True):
    """What the routes of an engine work with, from one start to the next."""

    settings: SimulateSettings
    text: ModelText
    core: Core
    exchange: KvExchange | None
    """Hands KV over; None in an engine that takes whole requests."""
    publisher: Publisher
    loads: LoadPublisher
    faults: Faults
    history: History
    clock: Callable[[], float]
    """Wall clock, in seconds."""
    started: float

    @property
    def context(self) -> int:
        """Tokens a sequence may have: what the model allows, and what fits into the cache."""
        return min(self.text.context, self.settings.kv_blocks * self.settings.block_size)
