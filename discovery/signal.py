"""How far can what we know of an endpoint's cache be believed?

KV routing fails silently when events stop: every prompt then looks uncached. So the health of the signal is itself state:

    live      events arrive and are complete
    blind     it serves prompts longer than a block and has never published an event (or publishes none by configuration)
    stale     it published before and no longer does, or the bus or relay between is gone
    mismatch  its blocks cannot be compared with ours (block size, token ids)
    partial   some of its blocks were stored before we listened and cannot be replayed

An endpoint that is not `live` (or `partial`) is scored from what was sent there; one that is `partial`, from whichever of the two knows
more. It is live again when nothing unknown can be left (`discovery.feed`), or when its own counts show that nothing is:

    hit of 40 blocks, 12 known ──▶ partial ── a hit of no more than was known, AGREEMENTS times in a row ──▶ live
                                      ▲                                                                       │
                                      └────────────── a hit of more than was known ──────────────────────────┘
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


UNPUBLISHED = Signal(SignalState.BLIND, "it publishes no KV events (start vLLM or SGLang with --kv-events-config)")
AGREEMENTS = 16
"""So many hits in a row of which all was known: of what is still used, next to nothing can be unknown."""
BEACONS_MISSED = 3
"""After so many periods without a beacon, its relay counts as gone."""


class SignalTracker:
    """One endpoint's signal, judged from what arrived against what should have.

    Silence alone says nothing: an idle engine, or one whose prompts are all cached, publishes nothing. It becomes evidence
    once a prompt with new full blocks has got its first token and no event was heard between then and when it was sent:

        sent ─────── first token ────────────── blind_after_s ──▶ blind (never heard) or stale (heard before)
          └── any event from here on: live ──┘
    """

    def __init__(self, *, publishes: bool, now: float, blind_after_s: float = 5.0, beacon_period_s: float = 2.0) -> None:
        self.publishes = publishes
        """Whether the engine says where its events are to be read."""
        self._blind_after_s = blind_after_s
        self._beacon_timeout_s = BEACONS_MISSED * beacon_period_s
        self._relay = LIVE
        self._agreements = 0
        self._beacon_at = now
        self._quiet: int | None = None
        self._ever_heard = False
        self._heard_at: float | None = None
        self._unanswered_since: float | None = None
        self._bus_lost_at: float | None = None

    def restarted(self) -> None:
        """A new epoch began: what was heard before was heard from another life of the engine or of its relay."""
        self._relay = LIVE
        self._agreements = 0
        self._quiet = None
        self._ever_heard = False
        self._heard_at = None
        self._unanswered_since = None

    def heard(self, now: float) -> None:
        """Events of the engine arrived."""
        self._ever_heard = True
        self._heard_at = now
        self._unanswered_since = None

    def beacon(self, relay: Signal, now: float, *, quiet: int = 0, published: bool = False) -> None:
        """The relay said how it sees the signal, and what the engine does in this epoch.

        `published`: anything at all. `quiet`: how many batches changed nothing, and so reach us in no other way.
        """
        self._relay = relay
        self._beacon_at = now
        self._ever_heard = self._ever_heard or published
        if self._quiet is not None and quiet > self._quiet:
            self.heard(now)
        self._quiet = quiet

    def served(self, now: float, new_blocks: int, sent_at: float | None = None) -> None:
        """A prompt with `new_blocks` full blocks not known to be cached has got its first token there.

        `sent_at` is when it was sent; without it, an event heard up to `blind_after_s` before its first token counts as its own.
        """
        if new_blocks <= 0 or self._unanswered_since is not None:
            return
        asked_at = now - self._blind_after_s if sent_at is None else sent_at
        if self._heard_at is None or self._heard_at < asked_at:
            self._unanswered_since = now

    def hit(self, blocks: int, known: int, new: int, sent_at: float) -> None:
        """A prompt sent at `sent_at` found `blocks` cached there, by the engine's own count; `known` were, going by events.

        None prove nothing. With no `new` ones to compute, there was no event to wait for.
        """
        if blocks > known:
            self._agreements = 0
        elif blocks:
            self._agreements += 1
        if new <= 0 and self._unanswered_since is not None and self._unanswered_since >= sent_at:
            self._unanswered_since = None

    def bus_lost(self, now: float) -> None:
        """Nothing can arrive any more. Idempotent."""
        if self._bus_lost_at is None:
            self._bus_lost_at = now

    def bus_back(self, now: float) -> None:
        """Messages arrive again; what was missed meanwhile is for `discovery.sync`. The silence was the bus's, not the engine's."""
        self._bus_lost_at = None
        self._beacon_at = now
        self._unanswered_since = None

    def state(self, now: float) -> Signal:
        """The signal as of `now`; the gravest reason wins. O(1)."""
        if not self.publishes:
            return UNPUBLISHED
        if self._bus_lost_at is not None:
            return Signal(SignalState.STALE, f"the bus has been gone for {now - self._bus_lost_at:.0f} s")
        if now - self._beacon_at > self._beacon_timeout_s:
            return Signal(SignalState.STALE, f"its relay has said nothing for {now - self._beacon_at:.0f} s")
        if not self._relay.believed:
            return self._relay
        if self._unanswered_since is not None and now - self._unanswered_since >= self._blind_after_s:
            return self._silent(now)
        return LIVE if self._relay.state is SignalState.PARTIAL and self._agreements >= AGREEMENTS else self._relay

    def _silent(self, now: float) -> Signal:
        if not self._ever_heard:
            return Signal(SignalState.BLIND, "it serves prompts and has never published a KV event (is its KV event address right?)")
        since = self._unanswered_since if self._heard_at is None else self._heard_at
        return Signal(SignalState.STALE, f"its events stopped {now - since if since is not None else 0:.0f} s ago")
