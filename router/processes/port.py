"""How do several processes listen on one port, and nobody else with them? The parent holds it; each worker listens there itself.

    parent   bind, exclusively · then allow sharing · never listen       the port is ours, and the kernel sends nothing here
    worker   bind, sharing     · listen                                  SO_REUSEPORT: the kernel spreads connections over these

A second group on the same port is refused, since its parent's bind is exclusive as well; workers that die and come back find the port
still ours. Sharing is allowed after binding, so that there is no moment in which another program could slip in.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

SHARES_PORTS = sys.platform.startswith("linux")
"""Elsewhere SO_REUSEPORT does not spread connections, or is missing."""


@contextlib.contextmanager
def held(host: str, port: int) -> Iterator[int]:
    """The port, the kernel's choice for 0, on every address that `host` stands for, kept while inside. Raises OSError. Blocks."""
    with contextlib.ExitStack() as stack:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in {(family, address) for family, _, _, _, address in found}:
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family is socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((address[0], port or address[1], *address[2:]))
            except OSError as error:
                raise OSError(error.errno, f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}") from None
            port = port or int(sock.getsockname()[1])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield port
