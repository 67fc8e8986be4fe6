"""How far can what we know of an endpoint's cache be believed?

KV routing fails silently when events stop: every prompt then looks uncached. So the health of the signal is itself state:

    live      events arrive and are complete
    blind     it serves prompts longer than a block and has never published an event (or publishes none by configuration)
    stale     it published before and no longer does, or the bus or relay between is gone
    mismatch  its blocks cannot be compared with ours (block size, token ids)
    partial   some of its blocks were stored before we listened and cannot be replayed

An endpoint that is not `live` (or `partial`) is scored from what was sent there.
"""

from __future__ import annotations

import enum

import msgspec


class SignalState(enum.StrEnum):
    """See the module's text."""

    LIVE = "live"
    PARTIAL = "partial"
    BLIND = "blind"
    STALE = "stale"
    MISMATCH = "mismatch"


class Signal(msgspec.Struct, frozen=True):
    """A state with its reason in words; the reason is empty when live."""

    state: SignalState
    reason: str = ""

    @property
    def believed(self) -> bool:
        """Whether the index is used for this endpoint."""
        return self.state in (SignalState.LIVE, SignalState.PARTIAL)


LIVE = Signal(SignalState.LIVE)
