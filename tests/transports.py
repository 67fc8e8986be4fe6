"""What stands in for a socket where a test cuts the bytes itself? A transport that only remembers."""

from __future__ import annotations

import asyncio


class FakeTransport(asyncio.Transport):
    """Takes everything, sends nothing."""

    def __init__(self, unsent: int = 0) -> None:
        super().__init__()
        self.written = b""
        self.ended = ""
        """`eof`, `close` or `abort`, once it has been told so."""
        self.paused = False
        self.unsent = unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self.ended in ("", "eof"), data
        self.written += bytes(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = "eof"

    def is_closing(self) -> bool:
        return self.ended in ("close", "abort")

    def close(self) -> None:
        self.ended = "close"

    def abort(self) -> None:
        self.ended = "abort"

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol
