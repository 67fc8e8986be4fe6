"""What can be wrong with a configuration, and how it is said: the key, where it came from, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec


class ConfigError(Exception):
    """The configuration cannot be used. Its text has one line for each thing wrong."""


class Complaint(msgspec.Struct, frozen=True):
    """What a settings Struct's own `check` has against one of its keys."""

    key: str
    message: str


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
