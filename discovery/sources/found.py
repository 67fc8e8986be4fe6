"""What does a source say? Which engines there are, all of them; or that it cannot say."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engines.types import EngineSpec


class SourceFailed(Exception):
    """The source cannot say now which engines there are; the message says why. What it said last stands."""


class Found(msgspec.Struct, frozen=True):
    """Every engine that a source knows."""

    specs: tuple[EngineSpec, ...]
    """URLs normalised."""
    faults: tuple[str, ...] = ()
    """What is there and cannot be followed, and why: a label with a wrong value."""


Tell = Callable[[Found], None]
