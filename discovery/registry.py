"""Who is a member? Announcements and leases in, changes out.

    announce(A) ──▶ Joined(A)        announce(B) ──▶ Changed(A, B)       leave(id) or an expired lease ──▶ Left(B)
    announce(A) ──▶ None             (A, B: what is announced at one URL)

An engine's id is its URL, so what is announced last at a URL is what is there: it replaces what was there before, whole. Leases
are ended by our own clock, never by a broker's: a bucket's TTL removes a key without telling anybody.
"""

from __future__ import annotations

import msgspec

from engines.types import EngineInfo


class Joined(msgspec.Struct, frozen=True):
    """An engine that was not a member is one."""

    info: EngineInfo


class Changed(msgspec.Struct, frozen=True):
    """A member is announced differently than before."""

    old: EngineInfo
    new: EngineInfo

    @property
    def same_life(self) -> bool:
        """Whether only the adapters changed: the same process serves, and its cache still holds what it held."""
        return _life(self.old) == _life(self.new) and self.old.boot == self.new.boot


class Left(msgspec.Struct, frozen=True):
    """A member is one no more."""

    info: EngineInfo
    reason: str


Change = Joined | Changed | Left


class Registry:
    """The members, by id. State changes only here, and every change is returned for the caller to act on."""

    def __init__(self) -> None:
        self._members: dict[str, EngineInfo] = {}
        self._deadlines: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self._members

    @property
    def members(self) -> tuple[EngineInfo, ...]:
        """Every member, longest first."""
        return tuple(self._members.values())

    def get(self, engine_id: str) -> EngineInfo | None:
        """The member of this id."""
        return self._members.get(engine_id)

    def announce(self, info: EngineInfo, now: float, *, lease_s: float | None = None) -> Joined | Changed | None:
        """`info` is what is at its URL from now on, for `lease_s` (None: until it leaves); an equal announcement renews the lease."""
        old = self._members.get(info.id)
        self._members[info.id] = info
        if lease_s is None:
            self._deadlines.pop(info.id, None)
        else:
            self._deadlines[info.id] = now + lease_s
        if old is None:
            return Joined(info)
        return None if old == info else Changed(old, info)

    def leave(self, engine_id: str, reason: str) -> Left | None:
        """The engine is no member; None when it was none."""
        info = self._members.pop(engine_id, None)
        self._deadlines.pop(engine_id, None)
        return None if info is None else Left(info, reason)

    def expire(self, now: float) -> list[Left]:
        """Members whose lease has ended leave. O(leases)."""
        over = [engine_id for engine_id, deadline in self._deadlines.items() if deadline <= now]
        return [left for engine_id in over if (left := self.leave(engine_id, "its lease ran out")) is not None]


def _life(info: EngineInfo) -> EngineInfo:
    """What stays the same as long as one process serves there: everything but adapters, and the base models' cards."""
    base = tuple(msgspec.structs.replace(model, card=msgspec.Raw(b"{}")) for model in info.models if model.parent is None)
    return msgspec.structs.replace(info, models=base, boot=None)
