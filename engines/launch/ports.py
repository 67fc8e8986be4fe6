"""Which ports does an engine get? Those that the kernel says are free, kept for it from then on.

A bound socket that never listens keeps anyone else from being given the number, while the engine, which sets SO_REUSEADDR as we do, can
listen on it. So nothing can take the port of an engine that is just starting, or starting again.
"""

from __future__ import annotations

import errno
import socket

from engines.launch.plan import Ports

RENDEZVOUS = 14
"""Ports in a row of which SGLang's DP attention takes some (0.5.23: the first seven, and the last); by default it reckons them from its HTTP
port, and they may be anybody's."""


class Held:
    """Ports that nobody else is given, until `close`."""

    def __init__(self, ranks: int = 1) -> None:
        """Raises OSError where there are none."""
        ranges = []
        self._sockets: list[socket.socket] = []
        try:
            for name in Ports._fields:
                ranges.append(hold(RENDEZVOUS if name == "rendezvous" else ranks))
                self._sockets += ranges[-1]
        except OSError:
            self.close()
            raise
        self.ports = Ports(*(range_[0].getsockname()[1] for range_ in ranges))

    def close(self) -> None:
        """Give them back. Idempotent."""
        for held in self._sockets:
            held.close()
        self._sockets.clear()


def hold(count: int) -> list[socket.socket]:
    """So many ports in a row: where the next one is somebody's, it is tried from another first one."""
    while True:
        held: list[socket.socket] = []
        try:
            for _ in range(count):
                held.append(_hold(held[-1].getsockname()[1] + 1 if held else 0))
        except (OSError, OverflowError) as error:
            for one in held:
                one.close()
            if isinstance(error, OSError) and error.errno != errno.EADDRINUSE:
                raise
        else:
            return held


def _hold(port: int) -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("0.0.0.0", port))  # noqa: S104  never listened on; engines publish KV events on every interface
    except (OSError, OverflowError):
        held.close()
        raise
    return held
