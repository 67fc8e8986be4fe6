"""What does a process that serves do besides serving? It listens, hears signals, says that it is ready, and ends everything it began."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from discovery.lifetime import cancelled_at_exit, stopped_by_signals

if TYPE_CHECKING:
    from router.files import Files
    from router.guards import Guards
    from router.server import Server


__all__ = ["Listening", "cancelled_at_exit", "listen", "say_ready", "stopped_by_signals", "told_by_hangup", "url_of"]


class Listening(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a running router is reached."""

    url: str
    admin: str = ""
    """The admin API's address; empty without one."""


def say_ready(listening: Listening) -> None:
    """The one line on standard output."""
    sys.stdout.write(msgspec.json.encode({"ready": True, **msgspec.to_builtins(listening)}).decode() + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def told_by_hangup(files: Files, *others: Callable[[], None]) -> Iterator[None]:
    """SIGHUP has all files read again, and whoever else is named does what it does then."""
    loop = asyncio.get_running_loop()

    def hang_up() -> None:
        files.read_again()
        for other in others:
            other()

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def listen(server: Server, host: str, port: int, guards: Guards, *, shared: bool = False) -> str:
    """Listen, with the certificate there is; the URL. Raises OSError."""
    try:
        port = await server.listen(host, port, guards.certificate.listener, shared=shared)
    except OSError as error:
        why = os.strerror(error.errno).lower() if error.errno is not None and error.errno > 0 else (error.strerror or str(error))
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {why}") from error
    return url_of(host, port, guards)


def url_of(host: str, port: int, guards: Guards) -> str:
    """Where a client on this host reaches a listener."""
    return f"{'http' if guards.certificate.listener is None else 'https'}://{_shown(host)}:{port}"


def _shown(host: str) -> str:
    """An address that a client on this host can use."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104  compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
