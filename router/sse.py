"""What routing wants to know of an answer as it passes: when the first token came, how many tokens, whether it failed.

A `Scanner` looks at the bytes beside the stream and never holds them back. It reads server-sent events and plain JSON alike, and
survives any split: an event cut in two by the network is completed from a bounded tail.
"""

from __future__ import annotations

from typing import Final

import msgspec

MAX_TAIL_BYTES: Final = 16 * 1024
USAGE: Final = b'"usage"'


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts as the engine reports them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from the engine's cache; None when it does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


_usage_decoder = msgspec.json.Decoder(Usage)


class Scanner:
    """Watches one answer go by.

    `feed` returns True exactly once: for the piece that carries the first token (of a stream), or never for plain JSON.
    """

    __slots__ = ("_streamed", "_tail", "_usage_event", "failed", "first_token")

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._tail = b""
        self._usage_event = b""
        self.first_token = False
        self.failed = False
        """An error event went by."""

    def feed(self, data: bytes) -> bool:
        """Look at the next piece."""
        if not self._streamed:
            self._tail = (self._tail + data)[-MAX_TAIL_BYTES:]
            return False
        if self._tail:
            data = self._tail + data
        end = _last_boundary(data)
        if end == len(data):
            self._tail = b""
        else:
            self._tail = data[end:][-MAX_TAIL_BYTES:]
            data = data[:end]
        if USAGE in data:
            self._usage_event = data
        if b'"error"' in data and not self.failed:
            self.failed = any(line.startswith((b'data: {"error"', b'data:{"error"')) for line in data.splitlines())
        if self.first_token or not data:
            return False
        self.first_token = any(_carries_token(line) for line in data.splitlines())
        return self.first_token

    def usage(self) -> Usage | None:
        """The last usage object that went by, or None."""
        data = self._usage_event if self._streamed else self._tail
        at = data.rfind(USAGE)
        while at >= 0:
            usage = _decode_usage(data, data.find(b":", at) + 1)
            if usage is not None:
                return usage
            at = data.rfind(USAGE, 0, at)
        return None


def _last_boundary(data: bytes) -> int:
    """Where the last complete event ends: after the last empty line, of either line ending; 0 when there is none."""
    if data.endswith(b"\n\n"):
        return len(data)
    line_feed, carriage = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    if carriage > line_feed:
        return carriage + 4
    return line_feed + 2 if line_feed >= 0 else 0


def _carries_token(line: bytes) -> bool:
    """Whether an event line carries generated output, rather than a role, a comment, an error or the end."""
    if not line.startswith(b"data:"):
        return False
    if b"[DONE]" in line[:16] or line[5:15].lstrip().startswith(b'{"error'):
        return False
    return not (b'"role":"assistant"' in line and b'"content":""' in line)


def _decode_usage(data: bytes, start: int) -> Usage | None:
    """The JSON object at `start`, found by counting braces: a usage object has no strings with braces in them."""
    if not data[start : start + 2].lstrip().startswith(b"{"):
        return None
    depth = 0
    for at in range(start, min(len(data), start + 4096)):
        if data[at] == 0x7B:
            depth += 1
        elif data[at] == 0x7D:
            depth -= 1
            if depth == 0:
                try:
                    return _usage_decoder.decode(data[start : at + 1])
                except msgspec.DecodeError:
                    return None
    return None
