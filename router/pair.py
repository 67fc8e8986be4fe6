"""How do two engines serve one request? As one unit: the first failure ends both legs, and a client that leaves closes both.

in turn (NIXL)       prefill ──answer: handshake──▶ decode ──first token──▶ client
at once (Mooncake,   prefill ────────────┐
SGLang)     decode ─────────────┴──first token──▶ client
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from discovery.logs import event
from engines.errors import EngineClosed, EngineError, EngineUnreachable, TransferFailed
from engines.handover import (
    PREFILL_PATH,
    BadHandshake,
    check_computed,
    decode_leg,
    decode_leg_as_asked,
    handshake_for,
    prefill_leg,
    prefill_leg_as_asked,
)
from router.disagg import Facts
from router.legs import PrefillLeg, Proof
from router.retry import Answered, Attempt
from router.token_ids import Outcome, is_only_ids, judged

if TYPE_CHECKING:
    from router.chooser import Choice, Chooser
    from router.entrance import Place
    from router.forward import Line
    from router.metrics import Metrics
    from router.pairing import Awaited
    from router.prompts.book import PromptBook
    from router.relay import Relay
    from router.sse import Usage
    from router.upstream import EngineConnection

LEASE_USED: Final = 2 / 3
"""A handshake is not used behind so much of its lease: past the end, wrong tokens wait, and decode has to look at it first."""

log = logging.getLogger(__name__)
_random = random.SystemRandom()


class Setback(msgspec.Struct, frozen=True):
    """A leg has failed."""

    choice: Choice
    """Of the engine that is to answer for it."""
    attempt: Attempt
    relay: Relay | None = None
    """Where the engine's own words are, if it said any."""


class PairSender(msgspec.Struct, frozen=True):
    """Sends requests to two engines each."""

    lines: Mapping[str, Line]
    chooser: Chooser
    prompts: PromptBook
    metrics: Metrics
    transfer_timeout_s: float
    """From the prompt's last token computed to the first one generated elsewhere."""
    lease_s: float
    """How long a prefill engine keeps what nobody fetches, by NIXL."""
    clock: Callable[[], float]

    async def send(self, place: Place, relay: Relay, body: bytes, repeats: int) -> Setback | None:
        """Both legs, the answer going to `relay`; None when that is over, else which leg failed before it began, and how."""
        prefill = _prefill_of(place.choice)
        there, here = (self.lines.get(choice.endpoint.engine) for choice in (prefill, place.choice))
        if there is None or here is None:
            left = prefill if there is None else place.choice
            return Setback(left, Attempt(EngineUnreachable("the engine has just left"), repeats=repeats))
        legs = _Legs(self, place, relay, there, here, repeats)
        try:
            return await legs.run(body)
        finally:
            legs.close()


class _Legs:
    """The two legs of one attempt."""

    def __init__(self, sender: PairSender, place: Place, relay: Relay, there: Line, here: Line, repeats: int) -> None:
        self._sender = sender
        self._place = place
        self._relay = relay
        self._there = there
        self._here = here
        self._repeats = repeats
        self._choice = place.choice
        self._prefill = _prefill_of(place.choice)
        self._facts = place.choice.split.facts if place.choice.split is not None and place.choice.split.facts is not None else Facts(0)
        self._pair = (self._prefill.endpoint, place.choice.endpoint)
        self._leg = PrefillLeg(relay.exchange)
        self._proof = Proof(relay, self._first_token)
        self._open: list[tuple[EngineConnection, PrefillLeg | Proof]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._handshake = handshake_for(self._prefill.member.info, self._prefill.endpoint.rank, _random.getrandbits(128))
        self._ids = _certain_ids(place.choice, sender.prompts)
        self._streams = bytes(place.choice.asked.fields().get("stream", b"")) == b"true"
        self._began = self._decode_began = sender.clock()
        self._fetched_before: int | None = None
        self._awaited: Awaited | None = None

    async def run(self, body: bytes) -> Setback | None:
        """Both, in the order that the handshake asks for; see `PairSender.send`."""
        if not self._handshake.at_once:
            return await self._in_turn(body)
        return await (self._refused() if self._too_long else self._both_at_once(body))

    @property
    def _too_long(self) -> bool:
        """Whether the prompt alone is more than the prefill engine takes."""
        longest = max((model.max_model_len or 0 for model in self._prefill.member.info.models), default=0)
        return 0 < longest < self._facts.prompt_tokens

    async def _refused(self) -> Setback:
        """Only the prefill engine is asked, since it will refuse: its words are the client's answer, and decode need not be told."""
        try:
            await self._ask_prefill()
        except EngineUnreachable as error:
            return self._setback(self._prefill, error)
        await self._leg.done
        return self._prefill_failed() if self._leg.failed else self._transfer_failed("it took a prompt that is longer than its model takes")

    async def _in_turn(self, body: bytes) -> Setback | None:
        """Prefill, then decode with what its answer says."""
        try:
            await self._ask_prefill()
        except EngineUnreachable as error:
            return self._setback(self._prefill, error)
        await self._leg.done
        if self._leg.failed:
            return self._prefill_failed()
        computed_at = self._computed()
        try:
            told = self._handshake.decode(self._leg.answer)
        except BadHandshake as error:
            return self._transfer_failed(str(error))
        try:
            connection = await self._connection(self._here)
        except BaseException as error:  # a client may leave now, too
            self._sender.metrics.stranded()
            if isinstance(error, EngineUnreachable):
                return self._setback(self._choice, error)
            raise
        if self._sender.clock() - computed_at > LEASE_USED * self._sender.lease_s:
            connection.abandon()
            self._sender.metrics.stranded()
            return self._transfer_failed("the handshake grew too old before the decode engine could be reached")
        self._ask_decode(connection, body, told)
        self._expect_a_token()
        await self._relay.done
        return self._outcome()

    async def _both_at_once(self, body: bytes) -> Setback | None:
        """Both together: the engines wait for each other by themselves."""
        try:
            connection = await self._connection(self._here)
        except EngineUnreachable as error:
            return self._setback(self._choice, error)
        try:
            await self._ask_prefill()
        except BaseException as error:
            connection.abandon()
            if isinstance(error, EngineUnreachable):
                return self._setback(self._prefill, error)
            raise
        self._ask_decode(connection, body, self._handshake.decode(b""))
        self._leg.when_over(self._prefill_over)
        await self._relay.done
        if self._leg.failed and not self._proof.proven:
            return self._prefill_failed()
        return self._outcome()

    def close(self) -> None:
        """Nobody wants what has not come yet."""
        self._relay.exchange.flow = None
        self._through()
        if self._timer is not None:
            self._timer.cancel()
        for connection, sink in self._open:
            if not sink.over:
                connection.abandon()
        self._open.clear()
        del self._leg, self._proof  # they call back to this: without these cycles, the request is freed at once

    # inside

    async def _connection(self, line: Line) -> EngineConnection:
        return (None if self._repeats else line.pool.take_idle()) or await line.pool.connect()

    async def _ask_prefill(self) -> None:
        asked = self._choice.asked
        if self._ids is None:
            path, body = None, prefill_leg_as_asked(self._choice.member.info.kind, asked.fields(), self._handshake.prefill())
        else:
            path, body = PREFILL_PATH, prefill_leg(asked.request.model, self._ids, asked.fields(), self._handshake.prefill())
        connection = await self._connection(self._there)
        self._began = self._sender.clock()
        self._open.append((connection, self._leg))
        connection.send(self._there.request(self._relay.exchange, body, self._prefill.endpoint.rank, path=path), self._leg)

    def _ask_decode(self, connection: EngineConnection, body: bytes, told: Mapping[str, object]) -> None:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
        body = (
            decode_leg_as_asked(fields, told) if self._ids is None else decode_leg(self._choice.member.info.kind, self._ids, fields, told)
        )
        self._decode_began = self._sender.clock()
        pairing = self._sender.chooser.pairing
        self._fetched_before = pairing.fetched(self._choice.endpoint)
        if self._streams:
            self._awaited = pairing.awaits(self._pair, self._facts, self._decode_began)
        self._open.append((connection, self._proof))
        self._relay.exchange.flow = connection
        connection.send(self._here.request(self._relay.exchange, body, self._choice.endpoint.rank), self._proof)

    def _prefill_over(self) -> None:
        if self._leg.failed:
            self._proof.fail("its prompt could not be computed")
            return
        try:
            check_computed(self._leg.answer)
        except BadHandshake as error:
            self._proof.fail(str(error))
            return
        if not self._proof.over:
            self._computed()
            self._expect_a_token()

    def _computed(self) -> float:
        """The prompt is in the prefill engine's cache: that engine is free of it. When that was."""
        now = self._sender.clock()
        reservation, facts = self._place.reservation.prefill, self._facts
        if reservation is not None:
            self._sender.chooser.first_token(self._prefill, reservation, self._began)
            reservation.release()
        if not self._handshake.at_once and self._sender.chooser.stays(self._choice):
            self._sender.chooser.pairing.prefilled(self._pair, facts.queued_at_prefill + facts.new_at_prefill, now - self._began, now)
        return now

    def _expect_a_token(self) -> None:
        """Of a stream. Nothing is seen of another answer before it is whole, however long that takes, so nothing can be expected of it."""
        if self._proof.proven or self._timer is not None or not self._streams:
            return
        timeout_s = self._sender.transfer_timeout_s
        why = f"no token came within {timeout_s:g} s of the prompt's being computed (kv_transfer_timeout_s)"
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._proof.fail, why)

    def _first_token(self) -> None:
        """The KV cache has arrived."""
        now = self._sender.clock()
        self._through()
        self._handed()
        self._arrived(now)
        self._sender.metrics.transfer_took(now - self._decode_began)
        if self._choice.split is not None and self._choice.split.remote_s is not None:
            self._sender.metrics.remote_prefill_took(now - self._began, self._choice.split.remote_s)

    def _whole(self, usage: Usage) -> None:
        """So it had, of an answer that came whole: when, can only be reckoned from the pace of its tokens."""
        self._handed()
        whole_s = self._sender.clock() - self._decode_began
        first_s = self._sender.chooser.pairing.until_first(self._choice.endpoint, whole_s, usage.completion_tokens)
        if first_s is None:
            self._sender.chooser.pairing.untold(self._pair, self._facts)
        else:
            self._arrived(self._decode_began + first_s, rough=True)

    def _through(self) -> None:
        """Nothing is under way any more."""
        if self._awaited is not None:
            self._sender.chooser.pairing.came(self._awaited)

    def _handed(self) -> None:
        """Decode goes on from it, or seems to. Of less than two blocks, it may rightly say that it fetched nothing."""
        new, chooser = self._facts.new_at_decode, self._sender.chooser
        if new >= 2 * self._choice.decision.chosen.block_size and chooser.stays(self._choice):
            chooser.pairing.handed(self._choice.endpoint, new, self._fetched_before)

    def _arrived(self, at: float, *, rough: bool = False) -> None:
        """Where both legs went out at once, the transfer overlaps the prefill and is timed with it."""
        pairing, facts = self._sender.chooser.pairing, self._facts
        if not self._sender.chooser.stays(self._choice):
            return
        if self._handshake.at_once:
            pairing.prefilled(self._pair, facts.queued_at_prefill + facts.new_at_prefill, at - self._began, at, rough=rough)
            pairing.transferred(self._pair, facts, 0.0, at, rough=rough)
        elif (slow := pairing.transferred(self._pair, facts, at - self._decode_began, at, rough=rough)) is not None:
            event(log, logging.WARNING, "slow KV transfers", prefill=str(self._pair[0]), decode=str(self._pair[1]), found=str(slow))

    def _prefill_failed(self) -> Setback:
        leg = self._leg
        if leg.head_seen is None or leg.error is not None:
            return self._setback(self._prefill, leg.error or EngineClosed("it said nothing"))
        if leg.head_seen.status < 400:
            return self._transfer_failed(f"the prefill engine answered {leg.head_seen.status}")
        return Setback(self._prefill, Attempt(Answered(leg.head_seen.status, leg.head_seen.retry_after_s), repeats=self._repeats), leg)

    def _outcome(self) -> Setback | None:
        if self._proof.failure is not None:
            return self._transfer_failed(str(self._proof.failure))
        if self._relay.error is not None and self._relay.head_seen is None:
            return self._setback(self._choice, self._relay.error)
        if self._relay.accepted:
            self._sender.metrics.transferred(self._facts.carried)
            if not self._streams and self._relay.usage is not None:
                self._whole(self._relay.usage)
        return None

    def _transfer_failed(self, why: str) -> Setback:
        event(log, logging.WARNING, "KV transfer failed", prefill=str(self._pair[0]), decode=str(self._pair[1]), reason=why)
        self._sender.metrics.transfer_failed()
        if self._sender.chooser.stays(self._choice):
            self._sender.chooser.pairing.failed(self._pair, self._sender.clock())
        return self._setback(self._prefill, TransferFailed(f"from {self._prefill.endpoint} to {self._choice.endpoint}: {why}"))

    def _setback(self, choice: Choice, error: EngineError) -> Setback:
        engine = choice.endpoint.engine
        reused = any(
            connection.reused for connection, sink in self._open if (sink is self._leg) == (engine == self._prefill.endpoint.engine)
        )
        return Setback(choice, Attempt(error, reused=reused, repeats=self._repeats))


def _certain_ids(choice: Choice, prompts: PromptBook) -> Raw | None:
    """The prompt's ids, where they are certainly those that the engine would make of it."""
    asked, info = choice.asked, choice.member.info
    tokens, status = asked.tokens.get(info.id), prompts.status(info.id)
    if tokens is None or not is_only_ids(asked.fields()):
        return None
    certain = judged(asked.route.form, info, tokens, checked=status is not None and status.checked) is Outcome.FORWARDED
    return Raw(msgspec.json.encode(tokens.ids)) if certain or asked.ids_barrier is Outcome.GIVEN else None


def _prefill_of(choice: Choice) -> Choice:
    if choice.prefill is None:
        raise AssertionError
    return choice.prefill
