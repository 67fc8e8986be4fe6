"""Who answers clients, and for how long? Accepts their sockets and owns one errand per request in progress.

Bytes of an answer are written from the engine connection's own callbacks, so nothing wakes per chunk.

    socket ──▶ ClientConnection ──▶ Exchange ──errand──▶ handler(exchange) ── begin · write · end ──▶ socket
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from router.clients import ClientConnection
from router.errand import Errand
from router.exchange import Exchange
from router.sockets import CLIENT_PROBES, watch_for_dead_peer

if TYPE_CHECKING:
    import ssl

    from router.keys import Door

SWEEP_PERIOD_S: Final = 1.0

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


class Server:
    """Serves until it is stopped, in three steps.

    No new connections; idle ones closed and requests in progress given `grace_period_s`; the rest cancelled.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        max_body_bytes: int,
        keep_alive_s: float = 75.0,
        stall_timeout_s: float = 300.0,
        grace_period_s: float = 30.0,
        door: Door | None = None,
    ) -> None:
        """`stall_timeout_s`: how long a client may take nothing of what is there for it. `door` None: everybody may come in."""
        self.loop = asyncio.get_running_loop()
        self.max_body_bytes = max_body_bytes
        self.door = door
        self.connections: set[ClientConnection] = set()
        self.stopping = False
        self.refusals: dict[int, int] = {}
        """Requests answered before they reached a handler, by status."""
        self.stalled = 0
        """Clients dropped because they did not take their answers."""
        self._handler = handler
        self._keep_alive_s = keep_alive_s
        self._stall_timeout_s = stall_timeout_s
        self._grace_period_s = grace_period_s
        self._errands: set[Errand] = set()
        self._quiet = asyncio.Event()
        """No request is in progress, as of the last that ended."""
        self._listener: asyncio.Server | None = None

    @property
    def in_progress(self) -> int:
        """Requests being handled."""
        return len(self._errands)

    async def listen(self, host: str, port: int, ssl_context: ssl.SSLContext | None = None, *, shared: bool = False) -> int:
        """Bind, and return the port bound: the kernel's choice when `port` is 0. Raises OSError.

        `shared`: other processes listen there too (`router.processes.port`).
        """
        self._listener = await self.loop.create_server(
            lambda: ClientConnection(self), host, port, backlog=4096, ssl=ssl_context, reuse_port=shared or None
        )
        for listener in self._listener.sockets:  # accepted sockets inherit it
            watch_for_dead_peer(listener, CLIENT_PROBES)
        return int(self._listener.sockets[0].getsockname()[1])

    async def run(self) -> None:
        """Keep house until cancelled: end connections that have been silent too long."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self.sweep(self.loop.time())

    def sweep(self, now: float) -> None:
        """One look at every connection."""
        for connection in list(self.connections):
            if connection.sweep(now, self._keep_alive_s, self._stall_timeout_s):
                self.stalled += 1
                log.warning("a client took nothing of its answer and was dropped (client_stall_timeout_s)")

    async def stop(self) -> None:
        """Accept nothing more, let requests in progress finish within the grace period, cancel the rest."""
        self.stopping = True
        if self._listener is not None:
            self._listener.close()
        for connection in [c for c in self.connections if c.current is None and not c.receiving]:
            connection.close()
        if self._errands:
            log.info("stopping: waiting for requests in progress", extra={"fields": {"requests": len(self._errands)}})
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._grace_period_s):
                    await self._quiet.wait()
        for errand in list(self._errands):
            errand.cancel()
        if self._errands:
            self._quiet.clear()
            await self._quiet.wait()
        for connection in list(self.connections):
            connection.close()

    def start(self, exchange: Exchange) -> Errand:
        """Handle one request, now and for as long as it takes."""
        errand = Errand(self._handler(exchange), functools.partial(self._ended, exchange))
        self._errands.add(errand)
        errand.step()
        return errand

    def refused(self, status: int) -> None:
        """Count a request that was answered before it reached the handler."""
        self.refusals[status] = self.refusals.get(status, 0) + 1

    def _ended(self, exchange: Exchange, errand: Errand, raised: BaseException | None) -> None:
        """A handler has come to its end: whatever that was, so does its exchange."""
        self._errands.discard(errand)
        exchange.errand = None  # they hold each other
        if not self._errands:
            self._quiet.set()
        if raised is None:
            if exchange.ended:
                return
            log.error("a request was left without an answer", extra={"fields": {"path": exchange.path.decode("latin-1")}})
        elif not isinstance(raised, asyncio.CancelledError):
            told = {"fields": {"path": exchange.path.decode("latin-1")}}
            log.error("a request failed inside the router", exc_info=raised, extra=told)
            if not exchange.started:
                exchange.error(500, "the router failed to handle this request; its log says why")
                return
        exchange.abort()
