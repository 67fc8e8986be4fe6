"""What does a ZMQ publisher say on one connection? ZMTP 3.0 (RFC 23) as a subscriber reads it: bytes in, messages and answers out.

    we ── greeting ──▶ publisher        then READY both ways, and our subscription; from there on:
    we ◀── frames ──                    [flags|size|body] …, the last of a message without the MORE flag
    we ◀── PING ── PONG ──▶             a command is a frame with the COMMAND flag

Only the NULL mechanism is spoken, which is what engines offer. No socket here, so it is tested byte by byte.
"""

from __future__ import annotations

import re

import msgspec

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.0, mechanism, and that we are no server, of which NULL has none. The peer's is as long."""
PING = b"\x04\x07\x04PING\x00\x00"
"""Its two bytes say that silence on our side is no reason to hang up."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
_SOCKET_TYPE = re.compile(rb"\x0bSocket-Type\0\0\0([\x01-\x10])", re.IGNORECASE)
_MECHANISM = slice(12, 32)
_MOST_FRAMES = 1024


class NotAPublisher(Exception):
    """What came is not ZMTP as a publisher speaks it."""


class Heard(msgspec.Struct, gc=False):
    """What came of some bytes."""

    messages: list[list[bytes]]
    """Whole ones, each as its frames."""
    answer: bytes = b""
    """To be sent back at once."""


class FrameReader:
    """One connection's incoming side, from its first byte on."""

    def __init__(self, topic: bytes, max_message_bytes: int) -> None:
        """Subscribe to what begins with `topic`; a message of more than `max_message_bytes` ends the connection."""
        self.ready = False
        """Whether the peer has said that it is a publisher: messages may come from now on."""
        self._topic = topic
        self._max_message_bytes = max_message_bytes
        self._greeted = False
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._needed = len(GREETING)
        self._frames: list[bytes] = []
        self._message_bytes = 0

    def feed(self, data: bytes) -> Heard:
        """Take in what the socket gave. Raises NotAPublisher, and must not be fed after that. O(bytes), however they are cut."""
        if self._pending:
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes < self._needed:
                return Heard([])
            data = b"".join(self._pending)
            self._pending.clear()
        heard = Heard([])
        taken = self._read(data, heard)
        if taken < len(data):
            self._pending.append(data[taken:] if taken else data)
            self._pending_bytes = len(data) - taken
        return heard

    def _read(self, data: bytes, heard: Heard) -> int:
        """Read all that is whole; how many bytes that was."""
        at, end = 0, len(data)
        if not self._greeted:
            if end < len(GREETING):
                self._check_greeting(data)
                return 0
            self._check_greeting(data[: len(GREETING)])
            self._greeted, at = True, len(GREETING)
            heard.answer += _frame(_READY, _COMMAND)
        frames, more = self._frames, self._max_message_bytes - self._message_bytes
        while True:
            head = 9 if at < end and data[at] & _LONG else 2
            if end - at < head:
                self._needed = head
                break
            flags = data[at]
            size = data[at + 1] if head == 2 else int.from_bytes(data[at + 1 : at + 9], "big")
            if size > more or flags > _MORE | _LONG | _COMMAND or len(frames) >= _MOST_FRAMES:
                raise NotAPublisher(f"a frame of {size} bytes with flags {flags:#x}")
            stop = at + head + size
            if stop > end:
                self._needed = head + size
                break
            body = data[at + head : stop]
            at = stop
            if flags & _COMMAND or not self.ready:
                self._command(body, flags, heard)
                continue
            frames.append(body)
            if flags & _MORE:
                more -= size
                continue
            if frames[0].startswith(self._topic):
                heard.messages.append(frames)
            frames, more = [], self._max_message_bytes
        self._frames, self._message_bytes = frames, self._max_message_bytes - more
        return at

    def _check_greeting(self, greeting: bytes) -> None:
        """Raise as soon as it cannot be one any more."""
        if greeting[0] != 0xFF or (len(greeting) > 9 and greeting[9] & 1 == 0) or (len(greeting) > 10 and greeting[10] < 3):
            raise NotAPublisher(f"a greeting that is not ZMTP 3: {greeting[:12]!r}")
        if len(greeting) >= _MECHANISM.stop and greeting[_MECHANISM].rstrip(b"\0") != b"NULL":
            raise NotAPublisher(f"the security mechanism {greeting[_MECHANISM]!r}")

    def _command(self, body: bytes, flags: int, heard: Heard) -> None:
        name = body[1 : 1 + body[0]] if body else b""
        if not self.ready:
            kind = socket_type(body)
            if not flags & _COMMAND or name != b"READY" or kind not in {"PUB", "XPUB"}:
                raise NotAPublisher(f"a handshake of {kind or body[:20]!r}")
            self.ready = True
            heard.answer += _frame(b"\x01" + self._topic)
        elif name == b"PING":
            heard.answer += _frame(b"\x04PONG" + body[7:], _COMMAND)


def socket_type(ready: bytes) -> str | None:
    """What a READY command says its sender is, such as `PUB` or `SUB`; None when it says nothing."""
    found = _SOCKET_TYPE.search(ready)
    return ready[found.end() : found.end() + found[1][0]].decode("ascii", "replace") if found is not None else None


def _frame(body: bytes, flags: int = 0) -> bytes:
    """A frame that is its message's last, or a command."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body
