"""From a request that has been read to an endpoint that is counted: what every engine holds and carries, put to the policy.

Nothing here waits, so what was decided still holds when it is reserved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from discovery.signal import Signal, SignalState
from engines.types import Endpoint, Role
from engines.vllm import tells_again
from router.caches import Caches
from router.calibration import Calibration
from router.disagg import Facts, Split, Why
from router.divisible import SPLIT_PATHS
from router.fleet import Fleet, Member
from router.intake import Asked
from router.load import LoadBook, Reservation
from router.pairing import DisaggRules, Pairing
from router.predicted import Trail
from router.scheduling.explain import reused_blocks
from router.scheduling.scheduler import Scheduler
from router.scheduling.types import Candidate, Decision, Load, Overlap, Rejection
from router.sse import Usage

NOTHING: Final = Overlap()
ASSUMED_BLOCK_SIZE: Final = 16
"""For counting load on an engine that has not said its block size; nothing is believed cached there meanwhile."""


class Signals(Protocol):
    """What discovery knows of each endpoint's events: the mirror."""

    def signal(self, endpoint: Endpoint, now: float) -> Signal:
        """How far its part of the index can be believed."""
        ...

    def block_size(self, endpoint: Endpoint) -> int | None:
        """Tokens per block, as its events show it."""
        ...

    def served(self, endpoint: Endpoint, now: float, new_blocks: int, *, sent_at: float | None = None) -> None:
        """A prompt with so many blocks not known to be cached, sent at `sent_at`, has got its first token: events should follow."""
        ...

    def hit(self, endpoint: Endpoint, blocks: int, *, known: int, new: int, sent_at: float) -> None:
        """It had `blocks` of a prompt in its cache, by its own count; `known` by events. `new` ones had to be computed."""
        ...


class _View(msgspec.Struct, frozen=True):
    """An endpoint, with the prompt as it counts it."""

    member: Member
    endpoint: Endpoint
    block_size: int
    keys: list[int]
    load: Load
    signal: Signal


_Able = tuple[Member, Endpoint, Load]
"""An endpoint that may be chosen."""


class Choice(msgspec.Struct, frozen=True):
    """Where a request goes, and what follows from that."""

    asked: Asked
    decision: Decision
    member: Member
    keys: list[int]
    """The prompt's blocks, in the chosen endpoint's block size."""
    indexed: int = 0
    """Of those, the leading ones that it holds by events."""
    trail: Trail | None = None
    """And those that it should hold by what was sent there; None where events are all there is to go by."""
    split: Split | None = None
    """Where the prompt is computed, and why; None on an engine that takes whole requests."""
    prefill: Choice | None = None
    """Who computes the prompt, where that is another engine."""

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint chosen."""
        return self.decision.chosen.endpoint

    @property
    def overlap_tokens(self) -> int:
        """Prompt tokens believed to be in the endpoint's cache, in any tier."""
        chosen = self.decision.chosen
        return _cached(chosen.overlap) * chosen.block_size

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that this request adds to what the endpoint has to compute: not those being computed for another one."""
        return 0 if self.prefill is not None else self.prompt_left

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that the endpoint neither has nor is computing."""
        chosen = self.decision.chosen
        return max(0, self.asked.request.prompt_tokens - reused_blocks(chosen.overlap) * chosen.block_size)

    @property
    def wants_telling(self) -> bool:
        """Whether the engine is to tell what it finds cached of this prompt: it may hold more than is known, and can be had to say so."""
        signal = self.decision.chosen.signal
        return signal.state is SignalState.PARTIAL and self.indexed < max(1, len(self.keys)) and tells_again(self.member.info)

    @property
    def new_blocks(self) -> int:
        """Blocks that the endpoint should announce once it has computed this prompt."""
        return len(self.keys) - self.decision.chosen.overlap.device


class Chooser:
    """Puts requests to the policy, and counts what it chose."""

    def __init__(  # noqa: PLR0913  a decision is made of what all of these know
        self,
        fleet: Fleet,
        caches: Caches,
        load: LoadBook,
        scheduler: Scheduler,
        signals: Signals,
        calibration: Calibration,
        *,
        pairing: Pairing | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._load = load
        self._scheduler = scheduler
        self._signals = signals
        self._calibration = calibration
        self._clock = clock
        self.pairing = Pairing(DisaggRules()) if pairing is None else pairing

    def decide(self, asked: Asked, tried: set[str]) -> Choice:
        """Choose an endpoint among engines not in `tried`, and for one that decodes, who computes the prompt.

        Raises NoCandidate when none is left, PolicyError when the policy fails.
        """
        now = self._clock()
        able, rejected = self._able(asked, tried, now)
        choice = self._choose(asked, able, rejected, now)
        return choice if choice.member.info.role is not Role.DECODE else self._pair(choice, tried, now)

    def _choose(self, asked: Asked, able: list[_Able], rejected: list[tuple[Endpoint, Rejection]], now: float) -> Choice:
        """What the policy takes of these."""
        if not self._scheduler.uses_cache:
            return self._decide_by_load(asked, able, rejected, now)
        seen = [self._see(member, endpoint, load, asked, now) for member, endpoint, load in able]
        overlaps, indexed, in_flight = self._match(asked, seen)
        candidates = [
            Candidate(
                endpoint=view.endpoint,
                block_size=view.block_size,
                prompt_blocks=len(view.keys),
                new_blocks=len(view.keys) - in_flight.get(view.endpoint, 0),
                overlap=overlaps.get(view.endpoint, NOTHING),
                load=view.load,
                signal=view.signal,
                total_blocks=view.member.info.total_blocks,
            )
            for view in seen
        ]
        decision = self._scheduler.decide(asked.request, candidates, rejected, now)
        chosen = seen[decision.position]
        endpoint = chosen.endpoint
        if chosen.signal.state is SignalState.LIVE or not chosen.keys:
            return Choice(asked, decision, chosen.member, chosen.keys, _cached(decision.chosen.overlap))
        return Choice(asked, decision, chosen.member, chosen.keys, indexed.get(endpoint, 0), self._caches.trail(endpoint, chosen.keys))

    def _decide_by_load(self, asked: Asked, able: list[_Able], rejected: list[tuple[Endpoint, Rejection]], now: float) -> Choice:
        """The same for a policy that does not look at caches: nobody is asked about them."""
        candidates = [
            Candidate(endpoint, member.info.block_size or ASSUMED_BLOCK_SIZE, 0, 0, NOTHING, load, total_blocks=member.info.total_blocks)
            for member, endpoint, load in able
        ]
        decision = self._scheduler.decide(asked.request, candidates, rejected, now)
        return Choice(asked, decision, able[decision.position][0], [])

    def _pair(self, choice: Choice, tried: set[str], now: float) -> Choice:
        """The same choice of who decodes, with who computes the prompt."""
        asked, decode = choice.asked, choice.endpoint
        able = self._partners(choice.member, decode, asked, tried, now)
        if not able:
            return msgspec.structs.replace(choice, split=Split(_undivided(asked, choice.member) or Why.NO_PARTNER))
        prefill = self._choose(asked, able, [], now)
        at_decode, at_prefill = choice.decision.chosen.load, prefill.decision.chosen.load
        facts = Facts(
            prompt_tokens=asked.request.prompt_tokens,
            cached_at_decode=asked.request.prompt_tokens - choice.prompt_left,
            cached_at_prefill=asked.request.prompt_tokens - prefill.prompt_left,
            queued_at_decode=at_decode.active_prefill_tokens,
            queued_at_prefill=at_prefill.active_prefill_tokens,
            decoding=max(0, at_decode.active_requests - self.pairing.awaiting(decode)),
            carried=self.pairing.carried(asked.request.model, choice.prompt_left),
        )
        split = self.pairing.split(facts, (prefill.endpoint, decode), now, must=choice.member.only_paired)
        return msgspec.structs.replace(choice, split=split, prefill=prefill if split.remote else None)

    def _partners(self, member: Member, decode: Endpoint, asked: Asked, tried: set[str], now: float) -> list[_Able]:
        """Endpoints that can compute the prompt for `decode` now.

        Where it is of no use without one, and all that are left are being left alone, a try is better than a sure refusal.
        """
        if _undivided(asked, member) is not None:
            return []
        partners, _ = self._with_room(self._fleet.partners(member, asked.request.model), tried, now)
        tokens = asked.tokens.get(decode.engine)  # the blocks of other ids would not be those that decode wants
        partners = [able for able in partners if asked.tokens.get(able[1].engine) is tokens]
        usable = [able for able in partners if self.pairing.usable((able[1], decode), now)]
        return usable if usable or not self._needs_partner(member, asked) else partners

    def reserve(self, choice: Choice) -> Reservation:
        """Count the request on its endpoint, and on the one that computes its prompt, until the reservation is released."""
        now, prefill = self._clock(), choice.prefill
        reservation = self._load.reserve(choice.endpoint, choice.keys, choice.uncached_tokens, now, streamed=choice.asked.streamed)
        if choice.split is not None:
            self.pairing.chosen(choice.split, choice.endpoint, now)
        if prefill is not None:
            reservation.prefill = self._load.reserve(prefill.endpoint, prefill.keys, prefill.uncached_tokens, now)
        return reservation

    def rejections(self, asked: Asked, tried: set[str]) -> list[tuple[Endpoint, Rejection]] | None:
        """Why no endpoint can take the request now, or None when one can. One that is suspected cannot: who waits can wait for it."""
        able, rejected = self._able(asked, tried, self._clock())
        if any(not member.suspected for member, _, _ in able):
            return None
        return rejected + [(endpoint, Rejection.EJECTED) for _, endpoint, _ in able]

    def cooled_in(self, asked: Asked, tried: set[str]) -> float | None:
        """Seconds until the first engine that is being left alone may be asked again; None when there is none."""
        now = self._clock()
        cooling = [
            member.cooling_until - now for member in self._members(asked) if member.info.id not in tried and member.cooling_until > now
        ]
        return min(cooling, default=None)

    def stays(self, choice: Choice) -> bool:
        """Whether the engines chosen are still there: nothing is learned of those that have left, since nobody would forget it."""
        here = self._fleet.members.get(choice.member.info.id) is choice.member
        return here and (choice.prefill is None or self.stays(choice.prefill))

    def serves(self, model: str) -> bool:
        """Whether there is an engine that serves the model."""
        return bool(self._fleet.of_model(model))

    def refused(self, choice: Choice, cool_down_s: float) -> None:
        """The engine has refused the request, which is still counted: it is left alone, and then begins with what it could carry."""
        now = self._clock()
        others = self._load.own(choice.endpoint).requests - 1
        choice.member.refused(now, cool_down_s, max(0, others))

    def first_token(self, choice: Choice, reservation: Reservation, sent_at: float, *, streamed: bool = True) -> None:
        """The prompt has been computed: it is in the endpoint's cache now, and events should say so.

        Not `streamed`, the answer came whole: what that tells of how long the prompt took, `ended` makes of it.
        """
        now = self._clock()
        reservation.first_token(now)
        if streamed:
            self._computed(choice, now - sent_at, now)
        if choice.keys and not choice.member.only_paired:  # which caches no prefixes
            self._caches.sent(choice.endpoint, choice.keys, now)
            self._signals.served(choice.endpoint, now, choice.new_blocks, sent_at=sent_at)

    def answered(self, reservation: Reservation, tokens: int | None) -> None:
        """The whole answer has come, of so many `tokens` where the engine has told: how long answers take there is learned from it."""
        reservation.ended(self._clock(), tokens)

    def ended(self, choice: Choice, usage: Usage, sent_at: float, *, streamed: bool = True) -> None:
        """The engine has told how much of the prompt it found cached: that is the truth which guesses are held against.

        A decode engine tells what the one had cached that computed its prompt.
        """
        if not streamed:
            now = self._clock()
            first_s = self.pairing.until_first(choice.endpoint, now - sent_at, usage.completion_tokens)
            if first_s is not None:
                self._computed(choice, first_s, now, rough=True)
        choice = choice.prefill or choice
        chosen, prompt_tokens = choice.decision.chosen, choice.asked.request.prompt_tokens
        if usage.cached_tokens is None or not choice.keys or usage.prompt_tokens != prompt_tokens:
            return
        size, overlap = chosen.block_size, chosen.overlap
        most = (prompt_tokens - 1) // size  # the last token is always computed
        blocks, predicted = min(usage.cached_tokens // size, most), min(_cached(overlap), most)
        by_events = chosen.signal.believed and not overlap.predicted
        if self.stays(choice):
            self._calibration.compare(choice.endpoint, by_events=by_events, predicted=predicted * size, reported=usage.cached_tokens)
        if choice.trail is not None and not predicted <= blocks <= max(predicted, overlap.in_flight):
            self._caches.found(choice.endpoint, choice.keys, choice.trail, blocks if blocks < most else len(choice.keys))
        known = max(choice.indexed, overlap.in_flight) if by_events else choice.indexed
        self._signals.hit(choice.endpoint, blocks, known=known, new=len(choice.keys) - blocks, sent_at=sent_at)

    def _computed(self, choice: Choice, seconds: float, now: float, *, rough: bool = False) -> None:
        """A prompt took so long on a decode engine that computed it itself, though another one could have."""
        split = choice.split
        if split is not None and not split.remote and split.facts is not None and self.stays(choice):
            tokens = split.facts.queued_at_decode + split.facts.new_at_decode
            self.pairing.computed(choice.endpoint, tokens, seconds, now, rough=rough)

    def _members(self, asked: Asked) -> list[Member]:
        """Engines for the request as they are now: some may have left since it was read, others joined."""
        able = self._fleet.able(asked.request.model, asked.route.engines)
        if asked.kept_at is None:
            return able
        return [member for member in able if member.info.id == asked.kept_at] or able  # it has left: another one says what it knows

    def _able(self, asked: Asked, tried: set[str], now: float) -> tuple[list[_Able], list[tuple[Endpoint, Rejection]]]:
        """Endpoints that may be chosen to answer, and the others with the reason."""
        members = self._members(asked)
        if not self._fleet.splits:
            return self._with_room(members, tried, now)
        answering = [member for member in members if member.info.role is not Role.PREFILL]
        if not answering:
            return [], [(endpoint, Rejection.PREFILLS) for member in members for endpoint in member.endpoints]
        able, rejected = self._with_room(answering, tried, now)
        kept = []
        for one in able:
            if self._needs_partner(one[0], asked) and not self._partners(one[0], one[1], asked, tried, now):
                rejected.append((one[1], Rejection.NO_PARTNER if _undivided(asked, one[0]) is None else Rejection.INDIVISIBLE))
            else:
                kept.append(one)
        return kept, rejected

    def _needs_partner(self, member: Member, asked: Asked) -> bool:
        """Whether the engine is of no use to the request without another one that computes its prompt."""
        if member.info.role is not Role.DECODE:
            return False
        return member.only_paired or (self.pairing.rules.enforce and _undivided(asked, member) is None)

    def _with_room(self, members: list[Member], tried: set[str], now: float) -> tuple[list[_Able], list[tuple[Endpoint, Rejection]]]:
        """Endpoints of these members that can take one more request, and the others with the reason."""
        members, rejected = self._fleet.eligible(members, tried, now)
        able = []
        most = self._fleet.max_active_requests
        for member in members:
            room = member.room(now, most) if member.cooling_until else most
            for endpoint in member.endpoints:
                load = self._load.load(endpoint, now)
                # By our own requests, which are no more than all: one that fills its places from its own queue would else leave none to others.
                if load.active_requests < room or self._load.own(endpoint).requests < room:
                    able.append((member, endpoint, load))
                else:
                    rejected.append((endpoint, Rejection.SATURATED))
        return able, rejected

    def _see(self, member: Member, endpoint: Endpoint, load: Load, asked: Asked, now: float) -> _View:
        block_size = self._signals.block_size(endpoint) or member.info.block_size
        keys = asked.keys(member.info.id, block_size) if block_size else []
        return _View(member, endpoint, block_size or ASSUMED_BLOCK_SIZE, keys, load, self._signals.signal(endpoint, now))

    def _match(self, asked: Asked, seen: list[_View]) -> tuple[dict[Endpoint, Overlap], dict[Endpoint, int], dict[Endpoint, int]]:
        """What each endpoint has of the prompt; how many blocks partial ones have by events; and how many are in flight at each.

        One look-up serves all endpoints whose keys are the same list: normally all of them.
        """
        overlaps: dict[Endpoint, Overlap] = {}
        indexed: dict[Endpoint, int] = {}
        in_flight: dict[Endpoint, int] = {}
        if not asked.tokens:
            return overlaps, indexed, in_flight
        groups: dict[int, list[_View]] = {}
        for view in seen:
            if view.keys:
                groups.setdefault(id(view.keys), []).append(view)
        for views in groups.values():
            keys = views[0].keys
            running = self._load.in_flight(keys)
            believed: list[Endpoint] = []
            unbelieved: list[Endpoint] = []
            partial: list[Endpoint] = []
            for view in views:
                signal, endpoint = view.signal, view.endpoint
                (believed if signal.believed else unbelieved).append(endpoint)
                if signal.state is SignalState.PARTIAL:
                    partial.append(endpoint)
                if endpoint in running:
                    in_flight[endpoint] = running[endpoint]
            overlaps |= self._caches.overlaps(keys, believed, unbelieved, running)
            if partial:  # of what is not known from events, something may be known from use
                indexed |= {endpoint: _cached(overlaps[endpoint]) for endpoint in partial}
                guessed = self._caches.overlaps(keys, (), partial, running)
                overlaps |= {endpoint: guess for endpoint, guess in guessed.items() if guess.device > reused_blocks(overlaps[endpoint])}
        return overlaps, indexed, in_flight


def _cached(overlap: Overlap) -> int:
    """Leading blocks believed cached, in any tier."""
    return overlap.device + overlap.host + overlap.disk


def _undivided(asked: Asked, member: Member) -> Why | None:
    """Why the request cannot be shared between two engines; None when it can."""
    if asked.route.path not in SPLIT_PATHS:
        return Why.ROUTE
    if not asked.tokens and not member.only_paired:  # media, for one: nobody knows how long it is
        return Why.UNTOKENIZED
    return asked.split_barrier()
