"""How good are our guesses? What was believed cached where a request was sent, beside what the engine reports to have found there.

Counted per endpoint and by what was believed: KV events, or what was sent there. Only prompts are compared whose tokens both sides count alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engines.types import Endpoint


class Tokens(msgspec.Struct):
    """Prompt tokens of requests that were compared; they never go back."""

    predicted: int = 0
    """Believed cached when the engine was chosen."""
    reported: int = 0
    """Found in its cache, by the engine's own count."""
    missing: int = 0
    """Predicted and not reported."""
    unforeseen: int = 0
    """Reported and not predicted."""


class Calibration:
    """A tally per endpoint.

    >>> calibration = Calibration()
    >>> engine = Endpoint("http://a:8000")
    >>> calibration.compare(engine, by_events=True, predicted=64, reported=48)
    >>> [(tokens.predicted, tokens.reported, tokens.missing) for _, _, tokens in calibration.read()]
    [(64, 48, 16)]
    """

    def __init__(self) -> None:
        self._tokens: dict[tuple[Endpoint, bool], Tokens] = {}

    def compare(self, endpoint: Endpoint, *, by_events: bool, predicted: int, reported: int) -> None:
        """One request's prompt. Runtime complexity: O(1)."""
        tokens = self._tokens.get((endpoint, by_events))
        if tokens is None:
            tokens = self._tokens[endpoint, by_events] = Tokens()
        tokens.predicted += predicted
        tokens.reported += reported
        tokens.missing += max(0, predicted - reported)
        tokens.unforeseen += max(0, reported - predicted)

    def forget(self, endpoint: Endpoint) -> None:
        """`endpoint` has left. Runtime complexity: O(1)."""
        for by_events in (True, False):
            self._tokens.pop((endpoint, by_events), None)

    def read(self) -> Iterator[tuple[Endpoint, bool, Tokens]]:
        """Every tally: whose, whether by events, and what. Runtime complexity: O(endpoints)."""
        for (endpoint, by_events), tokens in self._tokens.items():
            yield endpoint, by_events, tokens
