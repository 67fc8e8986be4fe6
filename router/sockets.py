"""What is asked of sockets beyond reading and writing? That a vanished peer is noticed, and that a broken answer looks broken."""

from __future__ import annotations

import socket
import struct
from typing import Final

CLIENT_PROBES: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""A client whose machine vanished is noticed after two minutes, also while it only waits."""
ENGINE_PROBES: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""An engine whose machine vanished is noticed after 40 s, also during a prefill of ten minutes."""

_NO_LINGER: Final = struct.pack("ii", 1, 0)


def watch_for_dead_peer(sock: socket.socket, probes: dict[str, int]) -> None:
    """Let the kernel ask a silent peer whether it is still there; sockets accepted on a listening one inherit this."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in probes.items():
        option = getattr(socket, name, None)
        if option is not None:  # not every system can be told how often
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def reset_when_closed(sock: socket.socket) -> None:
    """Let closing send a reset, which no peer takes for a proper end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
