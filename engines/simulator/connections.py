"""How does a simulated engine misbehave on a socket? It writes what it is told to, and ends the connection as it is told to."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import NoReturn

from aiohttp import web

from engines.simulator.faults import End, Raw

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# SO_LINGER on, zero seconds: closing then sends a reset instead of a proper end.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


async def write_raw(request: web.Request, fault: Raw) -> NoReturn:
    """Write the fault's bytes past the HTTP server, then end."""
    for number, part in enumerate(fault.parts):
        if number and fault.pause_s:
            await asyncio.sleep(fault.pause_s)
        if request.transport is not None:
            request.transport.write(part)
    await end(request, fault.end)


async def end(request: web.Request, how: End) -> NoReturn:
    """End a request's connection; the server cancels the caller when the connection is gone."""
    transport = request.transport
    if transport is not None:
        match how:
            case End.CLOSE:
                transport.close()
            case End.RESET:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                transport.abort()
            case End.HANG:
                pass
    await asyncio.get_running_loop().create_future()
    raise AssertionError  # a future nobody resolves
