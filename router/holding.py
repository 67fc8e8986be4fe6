"""What becomes of requests for a model that has no engine at the moment, and will have one? They are held until it serves, up to a deadline.

A planner that has emptied a pool says on the bus that it will fill it again (`comes_within_s`), as long as it is there. Without its word
nobody waits: the answer is 503 at once, as ever.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from router.admission import Reason, Shed

if TYPE_CHECKING:
    from router.fleet import Fleet

BELIEVED_S: Final = 30.0
"""A planner's word counts for so long after it was last heard."""
SLACK_S: Final = 5.0
"""Between an engine's being there and its being known."""


class _Word(msgspec.Struct, frozen=True):
    within_s: float
    until: float


class Holding:
    """Holds requests. `sweep` lets them go on."""

    def __init__(self, fleet: Fleet, most: int, *, clock: Callable[[], float]) -> None:
        """`most` are held of each model; further ones are turned away at once."""
        self._fleet = fleet
        self._most = most
        self._clock = clock
        self._words: dict[str, _Word] = {}
        self._held: dict[str, list[tuple[float, asyncio.Future[None]]]] = {}

    def expect(self, model: str, within_s: float, now: float) -> None:
        """A planner says that an engine of `model` will be there so soon after somebody asks; 0: it says so no more."""
        if within_s > 0:
            self._words[model] = _Word(within_s, now + BELIEVED_S)
        else:
            self._words.pop(model, None)

    def comes(self, model: str) -> bool:
        """Whether one may be waited for."""
        word = self._words.get(model)
        return word is not None and word.until > self._clock()

    async def enter(self, model: str) -> None:
        """Returns once the model has an engine. Raises Shed when it has none in time, or too many wait."""
        word = self._words[model]
        held = self._held.setdefault(model, [])
        if len(held) >= self._most:
            raise self._refusal(model, word.within_s)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (self._clock() + word.within_s + SLACK_S, place)
        held.append(entry)
        try:
            await place
        finally:
            if entry in held:
                held.remove(entry)

    def waiting(self) -> Iterable[tuple[str, int]]:
        """How many are held, by model."""
        return [(model, len(held)) for model, held in self._held.items()]

    def sweep(self) -> None:
        """Let those go on whose model has an engine, and turn away those whose time is up."""
        now = self._clock()
        for model, held in list(self._held.items()):
            if self._fleet.of_model(model):
                for _, place in held:
                    _settle(place, None)
                held.clear()
            late = [entry for entry in held if entry[0] <= now]
            for entry in late:
                held.remove(entry)
                _settle(entry[1], self._refusal(model, 1.0))
            if not held:
                del self._held[model]

    def _refusal(self, model: str, wait_s: float) -> Shed:
        return Shed(Reason.NO_ENGINE, f"no engine serves `{model}` at the moment; one is being started", max(1, math.ceil(wait_s)))


def _settle(place: asyncio.Future[None], error: Shed | None) -> None:
    if place.done():
        return  # its client has just left
    if error is None:
        place.set_result(None)
    else:
        place.set_exception(error)
