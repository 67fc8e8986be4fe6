"""Which engines can be routed to, and for which models? The router's own list of members.

An engine is *joining* until its tokenizer has been checked and its cache is known, then *serving*; a *draining* one finishes what
it has, and stays so through restarts until somebody says otherwise. Engines of one model may differ in everything else: kind, block
size, adapters, the ids they go by.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, cast

from engines.types import Endpoint, EngineInfo, EngineKind, Model, Role
from router.scheduling.types import Rejection

GROWTH_PER_S: Final = 4.0
"""By how much the room of an engine that had said it was full grows with every second after it was left alone."""
NO_LIMIT: Final = 1 << 30
MAX_LOST: Final = 1000
"""Engines remembered that have left."""


class Member:
    """One engine and what the router holds against it."""

    __slots__ = (
        "_full_at",
        "asleep",
        "cooling_until",
        "draining",
        "endpoints",
        "failures",
        "info",
        "serving",
        "suspected",
        "tokenizer_line",
    )

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.endpoints = info.endpoints
        self.serving = False
        self.draining = False
        self.asleep = False
        self.suspected = False
        """A connection to it failed, and it has not been seen alive since."""
        self.cooling_until = 0.0
        """It answered 429 or 503: left alone until then, monotonic seconds."""
        self.failures: Counter[str] = Counter()
        """Attempts that failed here, by what did."""
        self._full_at = 0
        """What an endpoint of it had in flight when it said so."""
        self.tokenizer_line = ""

    def refused(self, now: float, cool_down_s: float, in_flight: int) -> None:
        """It has answered 429 or 503, with so many requests of ours in flight on the endpoint that did."""
        self._full_at = min(self._full_at, in_flight) if self.cooling_until > now else in_flight
        self.cooling_until = max(self.cooling_until, now + cool_down_s)

    def room(self, now: float, most: int) -> int:
        """How many requests each endpoint of it may have in flight: `most`, in good times.

        After it has been left alone for being full, it begins with as many as it had then, at least one, and more with every second:
        those who wait for it must not fall upon it all at once.

        >>> from engines.types import EngineSpec
        >>> member = Member(EngineInfo("http://a:1", EngineSpec("http://a:1"), EngineKind.VLLM, "1", ()))
        >>> member.refused(100.0, 5.0, in_flight=3)
        >>> [member.room(now, 1000) for now in (105.0, 106.0, 107.0, 110.0)]
        [3, 12, 48, 1000]
        """
        if not self.cooling_until:
            return most
        growth = math.pow(GROWTH_PER_S, min(20.0, max(0.0, now - self.cooling_until)))
        return min(most, int(max(1, self._full_at) * growth))

    def rejection(self, now: float) -> Rejection | None:
        """Why nothing new may be sent here, or None."""
        if self.draining:
            return Rejection.DRAINING
        if self.asleep:
            return Rejection.ASLEEP
        if self.suspected:
            return Rejection.EJECTED
        if self.cooling_until > now:
            return Rejection.COOLING
        return None

    @property
    def takes_requests(self) -> bool:
        """Whether clients' requests are meant to come here, in good times."""
        return self.serving and not self.draining and not self.asleep and self.info.role is not Role.PREFILL

    @property
    def only_paired(self) -> bool:
        """Whether it can only go on from a prompt computed elsewhere: an SGLang engine started for decode refuses all else."""
        return self.info.role is Role.DECODE and self.info.kind is EngineKind.SGLANG


class Fleet:
    """The members, and an index of them by model."""

    def __init__(self, max_active_requests: int = NO_LIMIT) -> None:
        """No endpoint may have more than `max_active_requests` of ours in flight."""
        self.max_active_requests = max_active_requests
        self.splits = False
        """Whether any engine takes a part of a request only."""
        self.members: dict[str, Member] = {}
        self._by_model: dict[str, list[Member]] = {}
        self._able: dict[tuple[str, frozenset[EngineKind]], list[Member]] = {}
        """Answers of `able` that have been asked for."""
        self._partners: dict[tuple[str, str], list[Member]] = {}
        """Answers of `partners`, likewise."""
        self._adapters: dict[str, str | None] = {}
        self._draining: set[str] = set()
        self._lost: dict[str, tuple[str, ...]] = {}
        """Engine id → models of those that have left and not come back."""

    def add(self, info: EngineInfo) -> Member:
        """An engine has joined; it takes no requests before `serve`."""
        self._lost.pop(info.id, None)
        member = Member(info)
        member.draining = info.id in self._draining
        self.members[info.id] = member
        return member

    def serve(self, engine_id: str) -> None:
        """The engine may be chosen from now on."""
        self.members[engine_id].serving = True
        self._rebuild()

    def update(self, info: EngineInfo) -> None:
        """The engine tells something new about itself, such as another list of models; its cache is what it was."""
        self.members[info.id].info = info
        self._rebuild()

    def remove(self, engine_id: str) -> None:
        """The engine is gone; its models are remembered until it comes back, or is forgotten."""
        member = self.members.pop(engine_id, None)
        if member is not None:
            self._lost[engine_id] = tuple(model.id for model in member.info.models)
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]
            self._rebuild()

    def forget(self, engine_id: str) -> None:
        """The engine is not expected back."""
        self._lost.pop(engine_id, None)

    def drain(self, engine_id: str) -> None:
        """Nothing new goes to the engine, whether it is a member now or comes to be one, until `undrain`."""
        self._draining.add(engine_id)
        if (member := self.members.get(engine_id)) is not None:
            member.draining = True

    def undrain(self, engine_id: str) -> None:
        """The engine takes requests again."""
        self._draining.discard(engine_id)
        if (member := self.members.get(engine_id)) is not None:
            member.draining = False

    def is_draining(self, engine_id: str) -> bool:
        """Whether nothing new goes there because somebody said so."""
        return engine_id in self._draining

    def of_model(self, model: str) -> list[Member]:
        """Serving engines that offer the model; empty when none does."""
        return self._by_model.get(model, [])

    def able(self, model: str, kinds: frozenset[EngineKind]) -> list[Member]:
        """Those of them that are of one of these kinds, prefill engines included."""
        able = self._able.get((model, kinds))
        if able is None:
            able = [member for member in self.of_model(model) if member.info.kind in kinds]
            if able:  # what clients ask for in vain is not remembered
                self._able[model, kinds] = able
        return able

    def partners(self, member: Member, model: str) -> list[Member]:
        """Prefill engines that can hand the model's KV to this decode engine."""
        exchange = member.info.exchange
        key = (member.info.id, model)
        partners = self._partners.get(key)
        if partners is None:
            partners = [
                other
                for other in self.of_model(model)
                if other.info.role is Role.PREFILL and exchange is not None and other.info.exchange == exchange
            ]
            self._partners[key] = partners
        return partners

    def lost_models(self) -> set[str]:
        """Models that no engine serves any more, although it was not said that they are to go."""
        return {model for models in self._lost.values() for model in models} - self._by_model.keys()

    def adapter(self, model: str) -> str | None:
        """The LoRA adapter that a model id stands for, or None for a base model."""
        return self._adapters.get(model)

    def models(self) -> Iterator[Model]:
        """Every model that a request could be sent to, once each: the first engine's entry."""
        for model, members in self._by_model.items():
            if self.takers(model):
                yield next(entry for entry in members[0].info.models if entry.id == model)

    def takers(self, model: str) -> int:
        """How many engines take new requests for the model."""
        return sum(member.takes_requests for member in self.of_model(model))

    @property
    def model_ids(self) -> Iterable[str]:
        """Ids of all models served now."""
        return self._by_model.keys()

    def eligible(self, members: list[Member], tried: set[str], now: float) -> tuple[list[Member], list[tuple[Endpoint, Rejection]]]:
        """Members that may be chosen for a request that has already been to `tried`, and the others with the reason.

        When all that are left are suspected, they are eligible after all: a try is better than a sure refusal. Not so where one is
        left that has only asked for a pause.
        """
        eligible = []
        doubtful = []
        rejected = []
        cooling = False
        for member in members:
            if tried and member.info.id in tried:
                rejection = Rejection.EXCLUDED
            elif member.draining or member.asleep or member.suspected or member.cooling_until > now:
                rejection = cast("Rejection", member.rejection(now))
            else:
                eligible.append(member)
                continue
            cooling = cooling or rejection is Rejection.COOLING
            if rejection is Rejection.EJECTED:
                doubtful.append(member)
            rejected += [(endpoint, rejection) for endpoint in member.endpoints]
        if doubtful and not eligible and not cooling:
            endpoints = {endpoint for member in doubtful for endpoint in member.endpoints}
            return doubtful, [(endpoint, rejection) for endpoint, rejection in rejected if endpoint not in endpoints]
        return eligible, rejected

    def _rebuild(self) -> None:
        self._by_model = {}
        self._able = {}
        self._partners = {}
        self._adapters = {}
        self.splits = any(member.info.role is not Role.AGGREGATED for member in self.members.values())
        for member in self.members.values():
            if member.serving:
                for model in member.info.models:
                    self._by_model.setdefault(model.id, []).append(member)
                    self._adapters[model.id] = model.id if model.parent is not None else None
