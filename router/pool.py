"""Which connections to one engine are there to use? As many as there are requests in flight, and idle ones for a short while.

An engine's server closes a connection that has been idle for a few seconds (uvicorn: 5). A request sent at that very moment is lost
without having been seen. So an idle connection is dropped before the engine would drop it: the engine says when (`Keep-Alive:
timeout=5`), or shows it by closing, or is taken for uvicorn. What is lost all the same is for `retry` to judge, by `reused`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from engines.errors import EngineConnectTimeout, EngineUnreachable
from router.errand import in_task
from router.sockets import ENGINE_PROBES, watch_for_dead_peer
from router.upstream import EngineConnection, Timeouts

if TYPE_CHECKING:
    import ssl

IDLE_LIMIT_S: Final = 4.0
"""Below uvicorn's 5 s, which both engines keep by default."""
MARGIN: Final = 0.8
"""Of the time after which an engine closes an idle connection, so much is used."""
LEAST_IDLE_S: Final = 0.5
"""An engine that closes sooner is closing for another reason, or is not worth keeping connections to."""
HEARD_WITHIN_S: Final = 5.0
LEARNED_FOR_S: Final = 600.0
"""An engine that closed connections because it was stopping teaches nothing that lasts."""


class EnginePool:
    """Connections to one engine."""

    def __init__(self, host: str, port: int, timeouts: Timeouts, ssl_context: ssl.SSLContext | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.host = host
        self.port = port
        self.timeouts = timeouts
        self.idle_limit_s = IDLE_LIMIT_S
        """How long an idle connection is kept."""
        self.heard_at = float("-inf")
        """When something last came, as of the last sweep; loop time."""
        self._learned_at = 0.0
        self._ssl = ssl_context
        self._idle: deque[EngineConnection] = deque()
        self._open: set[EngineConnection] = set()

    @property
    def open(self) -> int:
        """Sockets open, idle ones included."""
        return len(self._open)

    @property
    def idle(self) -> int:
        """Sockets that wait for a request."""
        return sum(not connection.closed for connection in self._idle)

    @property
    def streaming(self) -> bool:
        """Whether bytes of an answer have come in lately. Answers that have begun and say nothing more are no sign of life."""
        lately = self.loop.time() - self.heard_at < HEARD_WITHIN_S
        return lately and any(connection.stage == "idle stream" for connection in self._open)

    def take_idle(self) -> EngineConnection | None:
        """The most recently used idle connection that is still fresh, or None."""
        limit = self.loop.time() - self.idle_limit_s
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.idle_since >= limit:
                return connection
            connection.abandon()
        return None

    async def connect(self) -> EngineConnection:
        """A new connection. Raises EngineUnreachable."""
        return await in_task(self._connect(), EngineConnection.abandon)

    async def _connect(self) -> EngineConnection:
        connection = EngineConnection(self)
        established = False
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                transport, _ = await self.loop.create_connection(
                    lambda: connection, self.host, self.port, ssl=self._ssl, server_hostname=self.host if self._ssl else None
                )
            established = True
        except TimeoutError:
            raise EngineConnectTimeout(self.timeouts.connect_s) from None
        except OSError as error:
            raise EngineUnreachable(f"cannot connect to {self.host}:{self.port}: {error.strerror or error}", number=error.errno) from error
        finally:
            if not established:
                connection.abandon()  # it may be there already
        sock = transport.get_extra_info("socket")
        if sock is not None:
            watch_for_dead_peer(sock, ENGINE_PROBES)
        return connection

    # for connections

    def opened(self, connection: EngineConnection) -> None:
        """A connection is there."""
        self._open.add(connection)

    def put_back(self, connection: EngineConnection) -> None:
        """A connection whose answer is complete may serve another request."""
        connection.idle_since = self.loop.time()
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """A connection is closed, or has become something else."""
        self._open.discard(connection)

    def closed_by_engine(self, idle_s: float) -> None:
        """The engine closed a connection that had been idle so long: it keeps none longer."""
        if idle_s * MARGIN < self.idle_limit_s and idle_s >= LEAST_IDLE_S:
            self.idle_limit_s = idle_s * MARGIN
            self._learned_at = self.loop.time()

    def told(self, keep_alive: bytes) -> None:
        """The engine has said how long it keeps an idle connection: `timeout=5, max=100`."""
        for part in keep_alive.split(b","):
            name, _, value = part.strip().partition(b"=")
            if name.lower() == b"timeout" and value.isdigit():
                self.idle_limit_s = min(IDLE_LIMIT_S, int(value) * MARGIN)
                self._learned_at = self.loop.time()

    # for the app

    def sweep(self, now: float) -> None:
        """End what has taken too long, and close what has been idle too long."""
        for connection in list(self._open):
            connection.expire(now)
        if self.idle_limit_s < IDLE_LIMIT_S and now - self._learned_at > LEARNED_FOR_S:
            self.idle_limit_s = IDLE_LIMIT_S
        while self._idle and (self._idle[0].closed or self._idle[0].idle_since < now - self.idle_limit_s):
            self._idle.popleft().abandon()

    def close(self) -> None:
        """Close the idle connections; those in use close when their answers end."""
        while self._idle:
            self._idle.pop().abandon()
