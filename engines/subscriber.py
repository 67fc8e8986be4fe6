"""How does one rank's KV event stream reach us complete, in order, and without mixing two lives of the engine?

    subscribe ──handshake──▶ same life as before? ──▶ replay what was missed ──▶ live messages ──disconnected──▶ close, subscribe again
                                   └─ no: restarted

The ideas. The next message in order is delivered in the callback that read it; anything else, and all that comes after it, waits in line
for a task that may ask the replay. Each life has fresh connections, so nothing a dead process left can be taken for the next one's. And
since a publisher does not say who it is, a reconnect asks the replay for the latest message seen: only the same process still has that
payload. A number that goes back within one connection is put to the same question, since a message that comes late looks like a restart.

What is given up as lost need not stay lost: the replay is asked a little later whether it has everything after all, and then all is read anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec
import zmq.asyncio

from engines.events import KvBatch, UndecodableBatch, decode
from engines.replay import Message, read_frames, replay
from engines.stream import Accept, Duplicate, Gap, Restart, SequenceTracker
from engines.subscription import BadAddress, Subscription, subscribed
from engines.turns import MESSAGE_BYTES, Turns
from engines.types import KvSource

_LOG = logging.getLogger(__name__)

_LINE_BYTES = 64 << 10
"""So much waits in line, for a turn or while a replay is read; beyond it the connection is not read, and the publisher keeps what comes."""
_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_MOST_VERDICTS = 5
"""Gap, restart, gap, accept: no honest message needs more judgements than that."""
_LONGEST_WAIT_S = 60.0
"""Between two questions to a replay that does not answer."""
_LONGEST_MEND_S = 2.0
"""Between two questions whether it has everything after all."""
_QUESTIONS = 3
"""To a replay that does not answer, before live messages are listened to without it."""


class FollowTimes(msgspec.Struct, frozen=True):
    """How long to wait for what. What is not answered is asked again, each time after twice as long."""

    replay_silence_s: float = 2.0
    """For a replay that says nothing."""
    quiet_s: float = 1.0
    """Without a live message: the replay is then asked once whether one was lost, since that otherwise shows only when the next comes."""
    mend_s: float = 0.5
    """After a loss: the replay is then asked whether it has everything after all."""


class SubscriberCounts(msgspec.Struct):
    """Plain numbers for the metrics page; they never go back."""

    gaps: int = 0
    """Times that a number was not the next."""
    replays: int = 0
    """Questions to the replay."""
    unanswered: int = 0
    """Of them, those that it did not answer, or not to the end."""
    replayed: int = 0
    """Batches that came from it."""
    connects: int = 0
    """Connections to a publisher."""


class KvSink(Protocol):
    """Who is told. Its methods are called in the order things happened, never from two tasks, and must not block."""

    def restarted(self, reason: str) -> None:
        """A new life of the engine's cache begins: nothing known of it holds any more. Called once at the very start, with "joined"."""
        ...

    def batch(self, batch: KvBatch) -> None:
        """The next batch of this life; none before it is missing that `lost` did not name."""
        ...

    def lost(self, first: int, last: int) -> None:
        """Batches `first` … `last` cannot be had any more: what is known is no longer complete."""
        ...

    def undecodable(self, kind: str, seq: int | None = None) -> None:
        """A message came that could not be read, and was passed over; `kind` is one of a few fixed words.

        `seq`: it was the next batch of this life, so what is known is no longer complete.
        """
        ...

    def caught_up(self) -> None:
        """What was published before we listened has been told, as far as it can be had; again on every connection."""
        ...

    def unreachable(self, reason: str) -> None:
        """There is no publisher to listen to. It is tried again for ever; `caught_up` says that there is one."""
        ...


class KvSubscriber:
    """Follows one source for ever and tells one sink."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KvSource,
        sink: KvSink,
        times: FollowTimes | None = None,
        counts: SubscriberCounts | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Follow `source` on sockets of `context`; nothing happens before `run`. Those who follow others on the same loop share `turns`."""
        times = FollowTimes() if times is None else times
        self.counts = counts if counts is not None else SubscriberCounts()
        self._context = context
        self._source = source
        self._sink = sink
        self._turns = turns or Turns()
        self._replay_silence_s = times.replay_silence_s
        self._quiet_s = times.quiet_s
        self._mend_s = self._mend_wait_s = times.mend_s
        self._mend_at: float | None = None
        """When the replay is to be asked for what was lost; None: nothing is missing that it could have."""
        self._tracker = SequenceTracker()
        self._told = False
        """Whether it has been said on this connection that we have caught up."""

    async def run(self) -> None:
        """Never returns; cancellation closes every socket."""
        self._sink.restarted("joined")
        pause_s, complaint = _SHORTEST_PAUSE_S, ""
        while True:
            line = _Line(self._at_once, self._turns)
            try:
                async with subscribed(self._source, line, self._turns) as subscription:
                    await self._follow(line, subscription)
                if subscription.wrong and not subscription.listens:
                    if not line.connected:
                        self._sink.unreachable(f"what is at {self._source.events} is no ZMQ publisher: {subscription.wrong}")
                    if subscription.wrong != complaint:
                        complaint = subscription.wrong
                        self._complain("what is at the KV event address is no ZMQ publisher", complaint)
            except (BadAddress, OSError, TimeoutError) as error:
                self._sink.unreachable(f"no connection to {self._source.events}: {str(error) or 'it does not answer'}")
                # Mostly an engine that is not up yet. Said once where it is something else: an address in use, or one that is none.
                if str(error) != complaint and not isinstance(error, ConnectionError | TimeoutError):
                    complaint = str(error)
                    self._complain("no connection to the KV event address", complaint)
            pause_s = _SHORTEST_PAUSE_S if line.connected else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _complain(self, what: str, why: str) -> None:
        _LOG.warning(what, extra={"fields": {"events": self._source.events, "reason": why}})

    async def _check_life(self) -> None:
        """Called on every connection: afterwards this life's known batches have been delivered, of whichever life it now is."""
        self.counts.connects += 1
        if self._tracker.expected:
            if self._source.replay is None:
                self._restart("reconnected, and no replay socket to tell whether it is the same process")
            elif not await self._is_same_life(self._source.replay):
                self._restart("reconnected, and the replay does not know the latest batch")
        self._told = False
        for _ in range(_QUESTIONS):
            if await self._catch_up():
                self._tell_if_known(answered=True)
                return
        self._tell_if_known(answered=False)

    def _tell_if_known(self, *, answered: bool) -> None:
        """Say that we have caught up, once on each connection: when the replay has said so, or what came since shows what there was before.

        An engine too busy to answer may hold anything: to take its silence for an empty cache would be to forget what others know of it.
        """
        if not self._told and (answered or self._tracker.expected):
            self._told = True
            self._sink.caught_up()

    async def _is_same_life(self, endpoint: str) -> bool:
        last = self._tracker.last
        if last is None:
            return False
        for _ in range(2):
            try:
                async with contextlib.aclosing(self._ask(endpoint, last[0])) as messages:
                    async for message in messages:
                        return (message.seq, message.fingerprint) == last
                return False
            except TimeoutError:
                self.counts.unanswered += 1
        return False

    async def _follow(self, line: _Line, subscription: Subscription) -> None:
        """Returns when the connection ends."""
        asked, wait_s = False, self._quiet_s
        """Whether the replay has answered since the last live message, and how long after it to ask."""
        while True:
            heard = line.heard
            happened = await line.something(wait_s, self._mend_at)
            if heard != line.heard:
                asked, wait_s = False, self._quiet_s
            if line.over:
                line.check()
                return
            if line.newcomer:  # before any message: a second one is an engine that came back before its old connection was found dead
                line.newcomer = False
                await self._check_life()
            elif not happened and not asked:
                asked = await self._catch_up()
                self._tell_if_known(answered=asked)
                wait_s = self._quiet_s if asked else min(2 * wait_s, max(self._quiet_s, _LONGEST_WAIT_S))
            await self._work_off(line, subscription)
            self._tell_if_known(answered=False)
            if self._mend_at is not None and line.now >= self._mend_at:
                await self._mend()

    async def _work_off(self, line: _Line, subscription: Subscription) -> None:
        """Take what waits in line, until something happens to the connection: what comes after that may be another process's."""
        while not line.over and not line.newcomer:
            frames = line.next()
            if frames is None:
                subscription.resume()
                return
            if self._turns.spent:
                await self._turns.mine()
            await self._take(frames)
            self._turns.take(len(frames[-1]))

    def _at_once(self, frames: list[bytes]) -> bool:
        """Deliver a live message where that needs no waiting; whether it did."""
        message = read_frames(frames)
        if message is None:
            return False
        match self._tracker.feed(message.seq, message.fingerprint):
            case Accept():
                self._deliver(message)
                return True
            case Duplicate():
                return True
            case _:
                return False

    async def _take(self, frames: list[bytes]) -> None:
        message = read_frames(frames)
        if message is None:
            self._sink.undecodable("frames")
            return
        for _ in range(_MOST_VERDICTS):
            match self._tracker.feed(message.seq, message.fingerprint):
                case Accept():
                    self._deliver(message)
                    return
                case Duplicate():
                    return
                case Gap(last=last):
                    self.counts.gaps += 1
                    await self._catch_up()
                    self._give_up(last + 1)
                case Restart(expected=expected, got=got):
                    latest = self._tracker.last
                    if self._source.replay is not None and await self._is_same_life(self._source.replay):
                        if latest is not None and latest[0] == got:
                            self._sink.undecodable("sequence")  # two batches of one number
                        return  # else it was overtaken on its way
                    self._restart(f"the next number was to be {expected} and is {got}")
        self._sink.undecodable("sequence")

    async def _catch_up(self) -> bool:
        """Deliver what the replay has from the next batch on; whether it has answered to the end, or there is none to ask."""
        if self._source.replay is None:
            return True
        while True:
            moved, ended = await self._catch_up_once(self._source.replay)
            if ended or not moved:
                return ended

    async def _catch_up_once(self, endpoint: str) -> tuple[bool, bool]:
        """Ask once: whether the answer brought something, and whether it came to its end."""
        moved = False
        try:
            async with contextlib.aclosing(self._ask(endpoint, self._tracker.expected)) as messages:
                async for message in messages:
                    verdict = self._tracker.feed_replayed(message.seq, message.fingerprint)
                    if isinstance(verdict, Gap):
                        if moved:
                            return True, False
                        self._give_up(message.seq)
                        verdict = self._tracker.feed_replayed(message.seq, message.fingerprint)
                    if isinstance(verdict, Accept):
                        moved = True
                        self.counts.replayed += 1
                        self._deliver(message)
                    await asyncio.sleep(0)
        except TimeoutError:
            self.counts.unanswered += 1
            return moved, False
        return moved, True

    async def _mend(self) -> None:
        """Something was given up. Read all anew if the replay has it from the first batch on; if it has forgotten that, that is final."""
        endpoint = self._source.replay
        self._mend_at = None
        if endpoint is None:
            return
        try:
            async with contextlib.aclosing(self._ask(endpoint, 0)) as messages:
                first = await anext(messages, None)
        except TimeoutError:
            self.counts.unanswered += 1
            self._mend_wait_s = min(2 * self._mend_wait_s, max(self._mend_s, _LONGEST_MEND_S))
            self._mend_soon()
            return
        self._mend_wait_s = self._mend_s
        if first is not None and first.seq == 0:
            self._restart("the replay has everything from the first batch on")
            await self._catch_up()
            self._sink.caught_up()

    def _mend_soon(self) -> None:
        if self._mend_at is None:
            self._mend_at = asyncio.get_running_loop().time() + self._mend_wait_s

    def _give_up(self, upto: int) -> None:
        first = self._tracker.expected
        if first < upto:
            self._tracker.skip_to(upto)
            self._sink.lost(first, upto - 1)
            self._mend_soon()

    def _deliver(self, message: Message) -> None:
        try:
            batch = decode(message.payload)
        except UndecodableBatch as error:
            self._sink.undecodable(error.kind, message.seq)
        else:
            self._sink.batch(batch)

    def _restart(self, reason: str) -> None:
        self._tracker.restart()
        self._mend_at = None
        self._sink.restarted(reason)

    def _ask(self, endpoint: str, first: int) -> AsyncGenerator[Message, None]:
        self.counts.replays += 1
        return replay(self._context, endpoint, first, silence_s=self._replay_silence_s)


class _Line:
    """Messages that cannot be delivered at once, and what has happened to the connections (a subscription's `Reader`)."""

    def __init__(self, at_once: Callable[[list[bytes]], bool], turns: Turns) -> None:
        self.connected = False
        """Whether there has been a publisher."""
        self.newcomer = False
        """Whether there is one whose life has to be looked into."""
        self.over = False
        self.heard = 0
        """How often messages came."""
        self._at_once = at_once
        self._turns = turns
        self._failure: Exception | None = None
        self._waiting: deque[list[bytes]] = deque()
        self._bytes = 0
        self._busy = True
        """Whether the task has yet to see to what came before."""
        self._woken = asyncio.Event()
        self._time = asyncio.get_running_loop().time
        self._heard_at = 0.0

    def joined(self) -> None:
        self.connected = self.newcomer = self._busy = True
        self._woken.set()

    def ended(self) -> None:
        self.over = True
        self._woken.set()

    def messages(self, messages: list[list[bytes]]) -> bool:
        self.heard += 1
        self._heard_at = self._time()
        delivered = 0 if self._busy else self._deliver(messages)
        if delivered < len(messages):
            rest = messages[delivered:]
            self._waiting += rest
            self._bytes += sum(map(_size, rest))
            self._busy = True
            self._woken.set()
        return self._bytes < _LINE_BYTES

    def next(self) -> list[bytes] | None:
        """The message that has waited longest. With none left, what comes is delivered at once again."""
        if not self._waiting:
            self._busy = False
            return None
        frames = self._waiting.popleft()
        self._bytes -= _size(frames)
        return frames

    @property
    def now(self) -> float:
        return self._time()

    async def something(self, quiet_s: float, until: float | None) -> bool:
        """Returns when there is something to do or it is `until`, or, with False, when no message has come for `quiet_s`."""
        began = self._time()
        while not self._woken.is_set():
            quiet_at = max(began, self._heard_at) + quiet_s
            try:
                async with asyncio.timeout_at(quiet_at if until is None else min(quiet_at, until)):
                    await self._woken.wait()
            except TimeoutError:
                now = self._time()
                if now >= max(began, self._heard_at) + quiet_s:
                    return False
                if until is not None and now >= until:
                    return True
        self._woken.clear()
        return True

    def check(self) -> None:
        """Raise what delivering has raised."""
        if self._failure is not None:
            raise self._failure

    def _deliver(self, messages: list[list[bytes]]) -> int:
        """As many as there is time for; how many."""
        for number, frames in enumerate(messages):
            try:
                if self._turns.spent or not self._at_once(frames):
                    return number
            except Exception as error:  # noqa: BLE001  it is raised again in the task, which its owner watches
                self._failure = error
                self.ended()
                return number
            self._turns.take(len(frames[-1]))
        return len(messages)


def _size(frames: list[bytes]) -> int:
    return MESSAGE_BYTES + len(frames[-1])
