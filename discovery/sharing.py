"""How do routers hear of each other? What this one carries goes to the bus as it changes; what others say goes into `Peers`.

    LoadBook ── every 20 ms, what changed ──▶ bus ──▶ Peers of the others ──▶ their LoadBook
    KV events: follow(engine) ──▶ Peers: whose turn? ──▶ Take ──▶ relay.follow        Yield ──▶ relay.unfollow

Nothing of it is on the path of a request. A message that is lost is made good by the next beat, which tells everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from discovery.logs import event
from discovery.peers import (
    BEAT_S,
    NO_LOAD,
    Change,
    Counts,
    Farewell,
    Hello,
    Marks,
    PeerMessage,
    Presence,
    Take,
    Told,
    Update,
    Yield,
    packed,
)
from discovery.subjects import Subjects

if TYPE_CHECKING:
    from discovery.bus import Bus
    from discovery.peers import Carried, Others, Peers
    from engines.types import Endpoint, EngineInfo

TELL_S: Final = 0.02
"""Changes are gathered for so long: a message for each step of each request would cost as much as the request."""

MARKS_EVERY: Final = 4
"""Beats between two that tell all marks too: what was lost of them is made good then."""

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_messages: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


class Book(Protocol):
    """Where what is in flight is counted."""

    others: Others | None
    """Asked for what others carry, and told which prompts begin and end; None: there are none."""

    def carried(self) -> Iterable[tuple[Endpoint, Carried]]:
        """What this router has in flight, where it has anything."""
        ...


class Follower(Protocol):
    """Who reads engines' KV events: the relay."""

    def follow(self, info: EngineInfo) -> None:
        """Read them."""
        ...

    def unfollow(self, engine_id: str) -> None:
        """Read them no more. Idempotent."""
        ...


class Sharing:
    """Stands before the relay: an engine followed here is relayed by this router only when it is its turn."""

    def __init__(
        self, bus: Bus, namespace: str, peers: Peers, book: Book, relay: Follower, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rejected = 0
        """Messages that could not be read."""
        self._bus = bus
        self._subject = Subjects(namespace).routers
        self._peers = peers
        self._book = book
        self._relay = relay
        self._clock = clock
        self._infos: dict[str, EngineInfo] = {}
        self._told: dict[Endpoint, Counts] = {}
        self._beats = 0
        book.others = peers

    def follow(self, info: EngineInfo) -> None:
        """Have this engine's events relayed, by whichever router's turn it is."""
        self._infos[info.id] = info
        if info.id in self._peers.relays:
            self._relay.follow(info)
        self._act(self._peers.follow(info.id, self._clock()))
        self._present()

    def unfollow(self, engine_id: str) -> None:
        """The engine is none of ours any more. Idempotent."""
        if self._infos.pop(engine_id, None) is not None:
            self._peers.unfollow(engine_id)
            self._relay.unfollow(engine_id)
            self._present()

    def gone(self, router: str) -> None:
        """A router is known to have ended: nobody need wait for its silence."""
        self._act(self._peers.gone(router, self._clock()))

    async def run(self) -> None:
        """Ends only by cancellation, and then says so to the others."""
        subscription = self._bus.subscribe(self._subject, self._on_message)
        self._bus.watch(self._peers.lost, self._greet)
        self._greet()
        try:
            beat_at = self._clock()
            while True:
                await asyncio.sleep(TELL_S)
                now = self._clock()
                if now >= beat_at:
                    beat_at = now + BEAT_S
                    self._beats += 1
                    if self._bus.connected:
                        self._act(self._peers.tick(now))
                    self._present(marks=self._beats % MARKS_EVERY == 0)
                else:
                    if self._peers.undecided and self._bus.connected:
                        self._act(self._peers.tick(now))
                    self._tell()
        finally:
            self._bus.unwatch(self._peers.lost, self._greet)
            subscription.cancel()
            self._publish(Farewell(self._peers.router))

    def _greet(self) -> None:
        self._peers.restart(self._clock())
        self._publish(Hello(self._peers.router))
        self._present(marks=True)

    def _present(self, *, marks: bool = False) -> None:
        """Say everything, and of the marks all or none."""
        self._tell()
        told = [packed(endpoint, list(known.items())) for endpoint, known in self._peers.prefixes.told().items()] if marks else None
        carries = [Told(endpoint.engine, endpoint.rank, *load) for endpoint, load in self._told.items()]
        self._publish(Presence(self._peers.router, carries, self._peers.follows, self._peers.relays, told, self._peers.only_relays))

    def _tell(self) -> None:
        """Say what has changed."""
        began, ended = list[Marks](), list[Marks]()
        for endpoint, new, old in self._peers.prefixes.changes():
            began += [packed(endpoint, new)] if new else []
            ended += [packed(endpoint, old)] if old else []
        now = {endpoint: carried[:3] for endpoint, carried in self._book.carried()}  # which blocks, marks tell
        if now == self._told and not began and not ended:
            return
        changed = [endpoint for endpoint in now.keys() | self._told.keys() if now.get(endpoint) != self._told.get(endpoint)]
        self._told = now
        carries = [Told(endpoint.engine, endpoint.rank, *now.get(endpoint, NO_LOAD)) for endpoint in changed]
        self._publish(Update(self._peers.router, carries, began, ended))

    def _publish(self, message: PeerMessage) -> None:
        if self._bus.connected:
            self._bus.publish(self._subject, _encode(message))

    def _on_message(self, subject: str, payload: bytes, reply: str) -> None:
        del subject, reply
        try:
            message = _messages.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.rejected += 1
            return
        self._act(self._peers.hear(message, self._clock()))
        if isinstance(message, Hello) and message.router != self._peers.router:
            self._present(marks=True)

    def _act(self, changes: Iterable[Change]) -> None:
        acted = False
        for change in changes:
            acted = True
            info = self._infos[change.engine]
            match change:
                case Take():
                    event(_log, logging.INFO, "relaying KV events", engine=info.id)
                    self._relay.unfollow(info.id)
                    self._relay.follow(info)
                case Yield():
                    event(_log, logging.INFO, "another router relays KV events", engine=info.id)
                    self._relay.unfollow(info.id)
        if acted:
            self._present()
