"""How is an answer read that may be anything? What does not fit is None, never an exception."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def read_json(answer: bytes | str, shape: type[T]) -> T | None:
    """The answer in this shape, unknown fields skipped; None when it is not JSON or does not fit."""
    try:
        return msgspec.json.decode(answer, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def whole(text: str | None) -> int | None:
    """A number written in plain digits (at most 18, as a 64-bit integer holds), else None."""
    return int(text) if text is not None and len(text) <= 18 and text.isascii() and text.isdigit() else None
