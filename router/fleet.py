"""Which engines can be routed to, and for which models? The router's own list of members.

An engine is *joining* until its tokenizer has been checked and its cache is known, then *serving*; a *draining* one finishes what
it has, and stays so through restarts until somebody says otherwise. Engines of one model may differ in everything else: kind, block size, adapters, the ids they go by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engines.types import Endpoint, EngineInfo, Model
from router.scheduling.types import Rejection


class Member:
    """One engine and what the router holds against it."""

    __slots__ = ("asleep", "cooling_until", "draining", "endpoints", "info", "serving", "suspected", "tokenizer_line")

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
        self.tokenizer_line = ""

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
        """Whether new requests are meant to come here, in good times."""
        return self.serving and not self.draining and not self.asleep


class Fleet:
    """The members, and an index of them by model."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._by_model: dict[str, list[Member]] = {}
        self._adapters: dict[str, str | None] = {}
        self._draining: set[str] = set()

    def add(self, info: EngineInfo) -> Member:
        """An engine has joined; it takes no requests before `serve`."""
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
        """The engine is gone."""
        if self.members.pop(engine_id, None) is not None:
            self._rebuild()

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

        When all that are left are suspected or cooling, they are eligible after all: a try is better than a sure refusal.
        """
        eligible = []
        doubtful = []
        rejected = []
        for member in members:
            rejection = Rejection.EXCLUDED if member.info.id in tried else member.rejection(now)
            if rejection is None:
                eligible.append(member)
                continue
            if rejection in (Rejection.EJECTED, Rejection.COOLING):
                doubtful.append(member)
            rejected += [(endpoint, rejection) for endpoint in member.endpoints]
        if doubtful and not eligible:
            endpoints = {endpoint for member in doubtful for endpoint in member.endpoints}
            return doubtful, [(endpoint, rejection) for endpoint, rejection in rejected if endpoint not in endpoints]
        return eligible, rejected

    def _rebuild(self) -> None:
        self._by_model = {}
        self._adapters = {}
        for member in self.members.values():
            if member.serving:
                for model in member.info.models:
                    self._by_model.setdefault(model.id, []).append(member)
                    self._adapters[model.id] = model.id if model.parent is not None else None
