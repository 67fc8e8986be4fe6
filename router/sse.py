"""What routing wants to know of an answer as it passes: when the first token came, how many tokens, whether it failed.

A `Scanner` looks at the bytes beside the stream and never holds them back. It reads server-sent events and plain JSON alike, in
constant memory, and however the network cuts the bytes, it finds the same.

    data: {"choices":[{"delta":{"role":"assistant","content":""}}]}       not a token yet
    data: {"choices":[{"delta":{"content":"Hel"}}]}                       the first token
    data: {"choices":[],"usage":{"prompt_tokens":7,…}}                    usage
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

MAX_LINE_BYTES: Final = 16 * 1024
"""What is looked at of a line; a usage object is found behind that too."""
MAX_USAGE_BYTES: Final = 4 * 1024
LINE_FEED: Final = 0x0A
FEW: Final = 4

_USAGE: Final = b'"usage"'
_USAGE_OBJECT: Final = re.compile(rb'"usage"\s*+:\s*+(\{(?:[^{}]++|\{[^{}]*+\})*+\})')
_USAGE_CUT_OFF: Final = re.compile(rb'"usage"\s*+(?::\s*+(?:\{(?:[^{}]++|\{[^{}]*+\})*+(?:\{[^{}]*+)?)?)?\Z')
_LINE_END: Final = re.compile(rb"[\r\n]")
_EVENT_NAME: Final = re.compile(rb"event:\s*([^\r\n]*)")
_NOTHING: Final = re.compile(rb"data:\s*(?:\[DONE\]|\Z)")
_ERROR: Final = re.compile(rb'data:\s*\{\s*"(?:error"|object"\s*:\s*"error"|type"\s*:\s*"(?:error|response\.failed)")')
_ERROR_NAMES: Final = frozenset({b"error", b"response.failed"})
_TYPE: Final = re.compile(rb'data:\s*\{\s*"type"\s*:\s*"([^"]*)"')
_CHUNK: Final = b'data: {"id":'
_SOME_CHOICE: Final = b'"choices":[{'
_ROLE_NAME: Final = b'"role"'
_USUAL_BEGINNING: Final = b'{"role":"assistant","content":""'
_ROLE: Final = re.compile(rb'"role"\s*:\s*"assistant"')
_NO_CONTENT: Final = re.compile(rb'"content"\s*:\s*""')
_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\]')
_MESSAGES_API: Final = frozenset(
    {b"ping", b"message_start", b"message_delta", b"message_stop", b"content_block_start", b"content_block_delta", b"content_block_stop"}
)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    # The responses and messages APIs:
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    """Beside `input_tokens`, not among them; so are those below."""
    cache_creation_input_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the engine reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that came from the engine's cache; None when it does not say."""


_usage_decoder = msgspec.json.Decoder(_Usage)


class Scanner:
    """Watches one answer go by.

    `feed` returns True exactly once: for the piece that completes the first token's line (of a stream), or never for plain JSON.
    """

    __slots__ = ("_cut_off", "_in_long_line", "_line", "_name", "_settled", "_streamed", "_usage", "failed", "first_token")

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._line = b""
        """The beginning of a line whose end has not come."""
        self._in_long_line = False
        self._name = b""
        """The event that the lines belong to."""
        self._usage = b""
        self._cut_off = b""
        """What may be the beginning of a usage object."""
        self._settled = False
        """The first token is known, and no line or usage object is cut off: whole lines can only bring usage or an error."""
        self.first_token = False
        self.failed = False
        """An error event went by."""

    def feed(self, data: bytes) -> bool:
        """Look at the next piece, which is not empty."""
        if self._settled and data[-1] == LINE_FEED and b"error" not in data and (_USAGE not in data or _only_null(data)):
            return False  # as nearly all pieces are
        if self._cut_off or _USAGE in data or data[-1] in _USAGE:
            self._look_for_usage(data)
        if not self._streamed:
            return False
        first = self._look_for_events(data)
        self._settled = self.first_token and not (self._line or self._in_long_line or self._cut_off)
        return first

    def usage(self) -> Usage | None:
        """The last usage object that went by, or None."""
        try:
            found = _usage_decoder.decode(self._usage) if self._usage else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if found is None:
            return None
        details = found.prompt_tokens_details or found.input_tokens_details
        told = found.prompt_tokens or found.input_tokens or 0
        return Usage(
            prompt_tokens=told + (found.cache_read_input_tokens or 0) + (found.cache_creation_input_tokens or 0),
            completion_tokens=found.completion_tokens or found.output_tokens or 0,
            cached_tokens=details.cached_tokens if details is not None else found.cache_read_input_tokens,
        )

    # inside

    def _look_for_events(self, data: bytes) -> bool:
        if self._line or self._in_long_line or data[-1] != LINE_FEED:
            data = self._whole_lines(data)
        if not self.failed and b"error" in data:
            self.failed = any(_tells_failure(line) for line in data.splitlines())
        if self.first_token:
            return False
        self.first_token = any(map(self._carries_token, _lines(data)))
        return self.first_token

    def _look_for_usage(self, data: bytes) -> None:
        data = self._cut_off + data
        at = last = data.find(_USAGE)
        while at >= 0:
            found = _USAGE_OBJECT.match(data, at)
            if found and _USAGE not in found[1]:  # cut within, it would be forgotten for the inner one: so it never counts
                self._usage = found[1]
            last, at = at, data.find(_USAGE, at + 1)
        at = last
        if at >= 0 and len(data) - at < MAX_USAGE_BYTES and _USAGE_CUT_OFF.match(data, at):
            self._cut_off = data[at:]
        else:
            self._cut_off = _prefix_at_end(data)

    def _whole_lines(self, data: bytes) -> bytes:
        """The lines that end in this piece. Of a line too long to keep, only the beginning is one; its rest is nothing."""
        if self._in_long_line:
            ended = _LINE_END.search(data)
            if ended is None:
                return b""
            self._in_long_line = False
            data = b":" + data[ended.start() :]  # as a comment
        data = self._line + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1  # a last CR may be half of a line's end
        self._line = data[end:]
        data = data[:end]
        if len(self._line) > MAX_LINE_BYTES:
            data += self._line[:MAX_LINE_BYTES]
            self._line = b""
            self._in_long_line = True
        return data

    def _carries_token(self, line: bytes) -> bool:
        """Whether an event line carries generated output, rather than a role, a comment, an error or the end."""
        if not line:
            self._name = b""
            return False
        if not self._name and line.startswith(_CHUNK) and _SOME_CHOICE in line:  # the usual two; asked below, the answer is the same
            if _ROLE_NAME not in line:
                return True
            if _USUAL_BEGINNING in line:
                return False
        named = _EVENT_NAME.match(line)
        if named:
            self._name = named[1].rstrip()
            return False
        if not line.startswith(b"data:"):
            return False
        line = line[:MAX_LINE_BYTES]
        typed = _TYPE.match(line)
        name = self._name or (typed[1] if typed else b"")
        if name.startswith(b"response.") or name in _MESSAGES_API:
            return name.endswith(b"delta") and name != b"message_delta"
        if name in _ERROR_NAMES or _ERROR.match(line) or _NOTHING.match(line) or _NO_CHOICES.search(line):
            return False
        return not (_ROLE.search(line) and _NO_CONTENT.search(line))


def _lines(data: bytes) -> Iterator[bytes]:
    """Like `splitlines`; but of a piece of many lines, the rest is not split before it is asked for: the first token is soon found."""
    if not data or b"\r" in data:
        yield from data.splitlines()
        return
    rest: bytes | None = data.removesuffix(b"\n")
    while rest is not None:
        lines = rest.split(b"\n", FEW)
        rest = lines.pop() if len(lines) > FEW else None
        yield from lines


def _tells_failure(line: bytes) -> bool:
    named = _EVENT_NAME.match(line)
    return named[1].rstrip() in _ERROR_NAMES if named else _ERROR.match(line) is not None


def _only_null(data: bytes) -> bool:
    """Whether every usage here is null, as in each of SGLang's events but the last."""
    return data.count(_USAGE) == data.count(b'"usage":null')


def _prefix_at_end(data: bytes) -> bytes:
    """The longest end of `data` that is a beginning of `"usage"`."""
    for length in range(min(len(_USAGE) - 1, len(data)), 0, -1):
        if data.endswith(_USAGE[:length]):
            return data[-length:]
    return b""
