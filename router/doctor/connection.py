"""How long does an engine keep an idle connection, and what time is it there? One request of a few bytes, and then waiting.

The router keeps idle connections for a while (`router.pool`). One that an engine closes first costs the request sent at that moment a second
try; the router learns from it, and meanwhile this is what it learns.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit

import msgspec

from engines import sglang, vllm
from engines.types import EngineInfo, EngineKind
from router.doctor.findings import Finding, ok, unknown, warning, wrong
from router.pool import IDLE_LIMIT_S, LEAST_IDLE_S

ANSWER_WITHIN_S: Final = 5.0
SKEW_S: Final = 2.0
"""`Date` has whole seconds, and the answer takes a while too."""
MAX_HEAD_BYTES: Final = 64 * 1024
_PATHS: Final = {EngineKind.VLLM: vllm.VERSION, EngineKind.SGLANG: sglang.MODELS}


class Kept(msgspec.Struct, frozen=True):
    """What was seen of one connection."""

    closed_after_s: float | None
    """None: it was still open when the router would have dropped it."""
    told: str
    """Its `Keep-Alive` header."""
    skew_s: float | None
    """Its clock less ours, by its `Date` header."""


async def look(info: EngineInfo) -> Kept:
    """One connection's life. Raises OSError, TimeoutError or ValueError."""
    where = urlsplit(info.id)
    key = "" if info.spec.api_key is None else f"authorization: Bearer {info.spec.api_key}\r\n"
    context = ssl.create_default_context() if where.scheme == "https" else None
    async with asyncio.timeout(ANSWER_WITHIN_S):
        reader, writer = await asyncio.open_connection(where.hostname, where.port, ssl=context, limit=MAX_HEAD_BYTES)
    try:
        writer.write(f"GET {_PATHS[info.kind]} HTTP/1.1\r\nhost: {where.netloc}\r\n{key}\r\n".encode())
        async with asyncio.timeout(ANSWER_WITHIN_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            headers = dict(_header(line) for line in head.split("\r\n")[1:-2])
            await reader.readexactly(int(headers.get("content-length", "0")))
        now = time.time()  # noqa: TID251  compared with the engine's
        date = headers.get("date")
        skew = None if date is None else parsedate_to_datetime(date).timestamp() - now
        return Kept(await _closed_after(reader), headers.get("keep-alive", ""), skew)
    except asyncio.IncompleteReadError as error:
        raise ValueError("it closed the connection within its answer") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _closed_after(reader: asyncio.StreamReader) -> float | None:
    began = time.perf_counter()
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(IDLE_LIMIT_S):
            await reader.read(1)
        return time.perf_counter() - began
    return None


async def connection(info: EngineInfo) -> list[Finding]:
    """What it means."""
    try:
        kept = await look(info)
    except (OSError, TimeoutError, ValueError) as error:
        return [unknown("keep-alive", info.id, f"it could not be seen how long it keeps connections: {error or 'no answer'}")]
    return [_keep_alive(info, kept), _clock(info, kept)]


def _keep_alive(info: EngineInfo, kept: Kept) -> Finding:
    after = kept.closed_after_s
    if after is None:
        return ok("keep-alive", info.id, f"it keeps idle connections longer than the {IDLE_LIMIT_S:g} s that the router does")
    mend = (
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=60"
        if info.kind is EngineKind.VLLM
        else "a longer keep-alive of its server, or of the proxy before it"
    )
    told = f"it closes idle connections after {after:.1f} s, before the router does ({IDLE_LIMIT_S:g} s until it has learned)"
    if after < LEAST_IDLE_S:
        return warning("keep-alive", info.id, f"{told}: every request needs a new one", mend)
    return warning("keep-alive", info.id, f"{told}: requests sent at that moment are sent twice", mend)


def _clock(info: EngineInfo, kept: Kept) -> Finding:
    if kept.skew_s is None:
        return unknown("clock", info.id, "it does not say what time it is")
    if abs(kept.skew_s) > SKEW_S:
        which = "ahead of" if kept.skew_s > 0 else "behind"
        told = f"its clock is {abs(kept.skew_s):.0f} s {which} this machine's: event lag and traces are wrong by that"
        return wrong("clock", info.id, told, "synchronise the clocks (chrony, systemd-timesyncd)")
    return ok("clock", info.id, f"its clock agrees with this machine's to {SKEW_S:g} s")


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()
