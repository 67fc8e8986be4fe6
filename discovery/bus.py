"""How do rooms and processes reach each other? The one door to NATS.

Nothing that decides may wait for a broker, so `publish` and `subscribe` are plain calls: what they ask for is put in line, and one
task sends it, in order. While the bus is away, what is published is dropped and counted, never queued: every stream on it can
be asked for again, and what is old by then would only be in the way.

    publish ──▶ outbox ──▶ [one task: connection ⟶ lost ⟶ reconnect for ever] ──▶ NATS ──▶ callback(subject, payload, reply)

The client's own reconnecting is not used: it ends for good on some of the server's errors, and swallows cancellation while it
waits. Here each connection is a fresh client, and every subscription is made again on it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from discovery.access import Access, AccessUnusable, Pass, read, shown, split
from discovery.logs import event
from discovery.redact import redact_text

Callback = Callable[[str, bytes, str], None]
"""Called with subject, payload and reply subject ("" when none is wanted); must not block, and may publish."""

OUTBOX_BYTES = 64 * 1024 * 1024
ROOM_BYTES = 4 * 1024 * 1024
"""Bulk senders wait until less than this is in line, so that what is live never stands behind much of it."""
INBOX_MESSAGES = 1024 * 1024
INBOX_BYTES = 256 * 1024 * 1024
"""Per subscription; what overflows is counted, and its loss found by sequence numbers."""
TURN_BYTES = 64 * 1024
MESSAGE_COST = 512
"""After callbacks have taken in so much, everything else on the loop gets a turn: below 5 ms of work on keys, measured."""
CONNECT_TIMEOUT_S = 2
FLUSH_TIMEOUT_S = 10
RECONNECT_MIN_S = 0.05
RECONNECT_MAX_S = 1.0
PING_INTERVAL_S = 5
"""A peer that vanished without closing is noticed after three of these."""
MAX_DISCOVERED = 64
_ADVICE = "check {shows}"
_NOTHING_SHOWN = "it wants to know who we are: give nats_user and nats_password, nats_token, nats_creds or nats_nkey"
LOOK_S = 0.5
"""The client closes without calling back when a write fails at the wrong moment; so the connection is also looked at."""

_log = logging.getLogger(__name__)


class BusError(Exception):
    """The bus could not do what was asked."""


class BusUnreachable(BusError):
    """No NATS server can be talked to at the URLs given; the message names them, without credentials."""


class BusNoAnswer(BusError):
    """Nobody answered a request in time, or nobody is there to."""


class BusCounts(msgspec.Struct):
    """Plain numbers for the metrics page."""

    reconnects: int = 0
    unsent: int = 0
    """Published while the bus was away, or beyond what the outbox holds."""
    overflowed: int = 0
    """Arrived faster than they could be taken in, and dropped."""
    failed: int = 0
    """Messages whose callback raised."""
    errors: int = 0
    """Other errors that the connection reported."""


class BusOptions(msgspec.Struct, frozen=True):
    """What a connection is to be like, beyond what the URL says."""

    access: Access = Access()
    echo: bool = True
    """Whether subscriptions of this connection hear what is published on it."""


class Subscription:
    """One callback on one subject; ends with `cancel`."""

    def __init__(self, bus: Bus, subject: str, callback: Callback) -> None:
        self.subject = subject
        self.callback = callback
        self.active = True
        self._bus = bus
        self._client: Client | None = None
        self._nats: NatsSubscription | None = None

    def cancel(self) -> None:
        """From now on the callback is not called. Idempotent."""
        self._bus._cancel(self)  # noqa: SLF001  the two are one: a subscription is a handle on its bus


class _Message(msgspec.Struct, frozen=True):
    subject: str
    payload: bytes
    reply: str

    @property
    def cost(self) -> int:
        return MESSAGE_COST + len(self.payload)


class _Subscribe(msgspec.Struct, frozen=True):
    to: Subscription


class _Unsubscribe(msgspec.Struct, frozen=True):
    nats: NatsSubscription


class _Flush(msgspec.Struct, frozen=True):
    done: asyncio.Future[None]


_Errand = _Message | _Subscribe | _Unsubscribe | _Flush


class Bus:
    """One connection, kept for ever. All methods belong to the loop that called `connect`."""

    def __init__(self, options: BusOptions | None = None) -> None:
        self.counts = BusCounts()
        self._options = options or BusOptions()
        self._servers: list[str] = []
        self._access = self._options.access
        self._discovered: list[str] = []
        """Servers of the same cluster that a server has told of."""
        self._name = ""
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._outbox: deque[_Errand] = deque()
        self._outbox_bytes = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._subscriptions: list[Subscription] = []
        self._lost: list[Callable[[], None]] = []
        self._back: list[Callable[[], None]] = []
        self._turn_bytes = 0
        self._flushing: asyncio.Timeout | None = None
        self._last_error: Exception | None = None

    @property
    def connected(self) -> bool:
        """Whether what is published now is sent."""
        return self._client is not None and self._client.is_connected

    @property
    def servers(self) -> str:
        """Where it connects to, without credentials."""
        return redact_text(", ".join(self._servers))

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the server takes; 0 while it is away."""
        return 0 if self._client is None else self._client.max_payload

    @property
    def complaint(self) -> str:
        """What the server last reported as wrong on this connection, without secrets; empty when nothing was."""
        return redact_text(str(self._last_error or ""))

    async def connect(self, servers: str | Sequence[str], *, name: str) -> None:
        """Connected when this returns, and from then on kept so; `name` shows in the server's own monitoring.

        Raises BusUnreachable, or AccessUnusable for a file that cannot be used.
        """
        self._servers, self._access = split(servers, self._options.access)
        self._name = name
        client = await self._open()
        self._task = asyncio.create_task(self._keep(client), name=f"bus {name}")  # noqa: TID251  ended by close()
        for back in self._back:
            back()

    async def close(self) -> None:
        """What was published is sent, if that takes less than a second; then nothing is any more."""
        if self._task is None:
            return
        with suppress(BusError, TimeoutError):
            async with asyncio.timeout(1):
                await self.flush()
        self._closing = True  # the client swallows a cancellation that comes while it flushes; so the loop also looks at this
        self._work.set()
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        await self._drop_client()

    def watch(self, lost: Callable[[], None], back: Callable[[], None]) -> None:
        """`lost` is called whenever the connection ends, `back` once it stands again with all its subscriptions."""
        self._lost.append(lost)
        self._back.append(back)

    def unwatch(self, lost: Callable[[], None], back: Callable[[], None]) -> None:
        """Take back `watch`."""
        self._lost.remove(lost)
        self._back.remove(back)

    def publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Send, in the order of calls. False when it was dropped: the bus is away, or too much is in line. O(1), never waits."""
        if not self.connected or self._outbox_bytes + len(payload) > OUTBOX_BYTES:
            self.counts.unsent += 1
            return False
        message = _Message(subject, payload, reply)
        self._outbox_bytes += message.cost
        if self._outbox_bytes > ROOM_BYTES:
            self._room.clear()
        self._add(message)
        return True

    async def room(self) -> None:
        """Returns when little is in line, or the bus is away: for senders of much, who can wait."""
        await self._room.wait()

    def subscribe(self, subject: str, callback: Callback) -> Subscription:
        """From now on, through every reconnect, `callback` gets what is published there; a request sent after this finds it in place."""
        subscription = Subscription(self, subject, callback)
        self._subscriptions.append(subscription)
        if self.connected:
            self._add(_Subscribe(subscription))
        return subscription

    async def flush(self) -> None:
        """Everything published and subscribed so far has reached the server. Raises BusUnreachable while it is away."""
        if not self.connected:
            raise BusUnreachable(f"NATS at {self.servers} is away")
        done = asyncio.get_running_loop().create_future()
        self._add(_Flush(done))
        await done

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The first answer to `payload`. Raises BusNoAnswer, or BusUnreachable while the bus is away."""
        client = self._client
        if client is None or not client.is_connected:
            raise BusUnreachable(f"NATS at {self.servers} is away")
        try:
            async with asyncio.timeout(timeout_s):
                return (await client.request(subject, payload, timeout=timeout_s)).data
        except (errors.NoRespondersError, TimeoutError) as error:
            raise BusNoAnswer(f"no answer on {subject} within {timeout_s:g} s") from error
        except errors.Error as error:
            raise BusUnreachable(f"NATS at {self.servers} went away") from error

    def _add(self, errand: _Errand) -> None:
        self._outbox.append(errand)
        self._work.set()

    def _cancel(self, subscription: Subscription) -> None:
        if subscription.active:
            subscription.active = False
            self._subscriptions.remove(subscription)
            if subscription._nats is not None:  # noqa: SLF001  see Subscription.cancel
                self._add(_Unsubscribe(subscription._nats))  # noqa: SLF001

    async def _open(self) -> Client:
        """A client with every subscription made. Raises BusUnreachable or AccessUnusable."""
        client = Client()
        given = await asyncio.to_thread(read, self._access)
        self._last_error = None

        def check() -> None:
            if self._access.wants_tls and not client._server_info.get("tls_required"):  # noqa: SLF001  it tells of its TLS nowhere else
                raise errors.SecureConnRequiredError

        try:
            await client.connect(
                [*self._servers, *self._discovered],
                name=self._name,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=CONNECT_TIMEOUT_S,
                ping_interval=PING_INTERVAL_S,
                no_echo=not self._options.echo,
                error_cb=self._on_error,
                closed_cb=self._on_closed,
                tls=given.tls,
                **shown(self._access, given, check),
            )
            check()
            self._client = client
            self._discover(client, given)
            for subscription in tuple(self._subscriptions):
                await self._attach(client, subscription)
            await _settle(client, CONNECT_TIMEOUT_S)
        except (
            Exception
        ) as error:  # beyond its own errors and the socket's, the client raises what its parser meets in a stranger's greeting
            self._client = None
            await _close(client)
            raise BusUnreachable(f"no NATS at {self.servers}: {self._cause(error)}") from error
        return client

    async def _keep(self, client: Client) -> None:
        """The bus's whole life: one connection after the other."""
        while True:
            await self._serve(client)
            if self._closing:
                return
            await self._drop_client()
            event(_log, logging.WARNING, "bus lost", servers=self.servers, error=str(self._last_error or ""))
            for lost in self._lost:
                lost()
            client = await self._reopen()
            self.counts.reconnects += 1
            event(_log, logging.INFO, "bus is back", servers=self.servers)
            for back in self._back:
                back()

    async def _reopen(self) -> Client:
        wait_s, said = RECONNECT_MIN_S, ""
        while True:
            await asyncio.sleep(wait_s)
            try:
                return await self._open()
            except (BusUnreachable, AccessUnusable) as error:
                if str(error) != said:
                    said = str(error)
                    event(_log, logging.WARNING, "bus is still away", error=said)
                wait_s = min(2 * wait_s, RECONNECT_MAX_S)

    async def _serve(self, client: Client) -> None:
        """Run errands until the connection ends."""
        while not client.is_closed and not self._closing:
            while self._outbox and not client.is_closed:
                try:
                    await self._run_errand(client, self._outbox.popleft())
                except Exception as error:  # noqa: BLE001  a connection that ends while we write to it shows itself in many ways
                    self.counts.errors += 1
                    self._last_error = error
            if not self._outbox:
                self._work.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._work.wait()

    async def _run_errand(self, client: Client, errand: _Errand) -> None:
        match errand:
            case _Message(subject, payload, reply):
                self._outbox_bytes -= errand.cost
                if self._outbox_bytes <= ROOM_BYTES:
                    self._room.set()
                await client.publish(subject, payload, reply)
            case _Subscribe(subscription):
                await self._attach(client, subscription)
            case _Unsubscribe(nats):
                await nats.unsubscribe()
            case _Flush(done):
                await self._flush(client, done)

    async def _flush(self, client: Client, done: asyncio.Future[None]) -> None:
        """The client waits its whole time for an answer on a connection that has ended; so `_on_closed` ends this."""
        error: BusUnreachable | None = BusUnreachable(f"NATS at {self.servers} went away")
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S) as self._flushing:
                await _settle(client, FLUSH_TIMEOUT_S)
            error = None
        finally:
            self._flushing = None
            if done.done():
                pass  # whoever waited has given up
            elif error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    async def _attach(self, client: Client, subscription: Subscription) -> None:
        if subscription._client is client or not subscription.active:  # noqa: SLF001  see Subscription.cancel
            return
        subscription._client = client  # noqa: SLF001

        async def deliver(message: Msg) -> None:
            if not subscription.active:
                return
            try:
                subscription.callback(message.subject, message.data, message.reply)
            except Exception:  # noqa: BLE001  whatever a message does to its reader, the next one is still read
                self.counts.failed += 1
                _log.exception("bus message could not be used")
            # The client hands over all it has read without a pause; a burst must not hold up requests meanwhile.
            self._turn_bytes += MESSAGE_COST + len(message.data)
            if self._turn_bytes >= TURN_BYTES:
                self._turn_bytes = 0
                await asyncio.sleep(0)

        subscription._nats = await client.subscribe(  # noqa: SLF001  see Subscription.cancel
            subscription.subject, cb=deliver, pending_msgs_limit=INBOX_MESSAGES, pending_bytes_limit=INBOX_BYTES
        )

    async def _drop_client(self) -> None:
        """Nothing of the connection is left; whoever waits for it is told."""
        client, self._client = self._client, None
        if client is not None:
            await _close(client)
        for errand in self._outbox:
            match errand:
                case _Flush(done) if not done.done():
                    done.set_exception(BusUnreachable(f"NATS at {self.servers} went away"))
                case _Message():
                    self.counts.unsent += 1
                case _:
                    pass
        self._outbox.clear()
        self._outbox_bytes = 0
        self._room.set()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, errors.SlowConsumerError):
            self.counts.overflowed += 1
            return
        self.counts.errors += 1
        self._last_error = error
        event(_log, logging.DEBUG, "bus error", error=redact_text(str(error)) or type(error).__name__)

    async def _on_closed(self) -> None:
        self._work.set()
        if self._flushing is not None:
            self._flushing.reschedule(0)

    def _discover(self, client: Client, given: Pass) -> None:
        """Remember the rest of the cluster, for when this server is gone. By address alone a certificate's name cannot be checked."""
        named = {urlsplit(server).netloc for server in self._servers}
        found = [url for url in client.discovered_servers if url.netloc not in named]
        self._discovered = [url.geturl() for url in found if given.tls is None or not _is_address(url.hostname or "")][:MAX_DISCOVERED]

    def _cause(self, error: Exception) -> str:
        """What went wrong in connecting, and what to do: when all servers failed, the client says only that, and told us why before."""
        cause = self._last_error or error
        said, shows = redact_text(str(cause)) or type(cause).__name__, self._access.shows
        match cause:
            case errors.SecureConnRequiredError():
                return "it offers no TLS, which tls://, nats_ca or nats_cert ask for; nothing was shown to it"
            case ssl.SSLCertVerificationError():
                return f"its certificate is not to be trusted ({cause.verify_message}); name the authority that signed it as nats_ca"
            case ssl.SSLError() if "ALERT" in (cause.reason or ""):
                return f"it refuses our certificate ({cause.reason}); give one that it knows as nats_cert and nats_key"
            case ssl.SSLError():
                return f"no TLS with it: {cause.reason or said}"
            case errors.AuthorizationError() | errors.Error() if "authorization" in said.lower() or "authentication" in said.lower():
                return f"it refuses what it was shown ({said}): {_ADVICE.format(shows=shows) if shows else _NOTHING_SHOWN}"
            case ConnectionRefusedError():
                return said
            case ConnectionError() | errors.UnexpectedEOF():
                why = "as NATS does to wrong credentials (Authorization) or a missing certificate (nats_cert and nats_key)"
                return f"{said}; it was there and hung up, {why}: {_ADVICE.format(shows=shows) if shows else _NOTHING_SHOWN}"
            case _:
                return said


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _settle(client: Client, timeout_s: int) -> None:
    """The server has acted on all that the client was told.

    Twice, because the client writes the ping of a flush past what it still has in line: the first answer says that
    the line has been written, the second that it has been read.
    """
    await client.flush(timeout=timeout_s)
    await client.flush(timeout=timeout_s)


async def _close(client: Client) -> None:
    with suppress(Exception):  # it is being left; what it still has to say about that helps nobody
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await client.close()
