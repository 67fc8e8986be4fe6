"""Which kind of ZMQ socket listens at an address? One greeting (ZMTP 3, RFC 23), no socket of ours.

    we ── signature, version 3.0, NULL ──▶ peer
    we ◀── the same, then READY { Socket-Type: PUB } ── peer

Needed where a configuration does not tell whether the engine bound its address or connects to it: a PUB socket there is the
engine's; a SUB socket is a reader's (perhaps our own), waiting for the engine to connect; nothing there is ours to bind.
"""

from __future__ import annotations

import asyncio

from engines import frames
from engines.urls import split_tcp

_READY = 4
"""Flags of a short command frame."""


async def socket_type(endpoint: str, *, timeout_s: float) -> str | None:
    """`PUB`, `SUB`, `ROUTER`, … of the ZMQ socket listening at `tcp://host:port`; None when none is found in time."""
    address = split_tcp(endpoint)
    if address is None:
        return None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(frames.GREETING)
                await reader.readexactly(len(frames.GREETING))
                flags, size = await reader.readexactly(2)
                return frames.socket_type(await reader.readexactly(size)) if flags == _READY else None
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None
