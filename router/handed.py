"""Does a decode engine take what it is handed, or compute it again?

vLLM that was started without a connector, or cannot reach the prefill engine, answers all the same: it computes the prompt a second time,
and nothing looks wrong. Only its own counters tell, by which it is judged here:

    handed over, says the router     1,000 tokens ───┐
    fetched, says the engine                  + 0    ├──▶ computes again
    computed, says the engine             + 1,000 ───┘

Pure: what engines report comes in, every probe period.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from engines.metrics import EngineWork
    from engines.types import Endpoint


class _Account(msgspec.Struct):
    """One decode endpoint, since it last fetched anything."""

    work: EngineWork
    """Its latest report."""
    base: int
    """What it had computed then."""
    handed: int = 0
    """Tokens handed to it that it must have computed or fetched."""
    due: int = 0
    """Of those, the ones handed before its latest report: the next one shows them."""


class Handed:
    """What decode endpoints were handed, against what they say they did."""

    def __init__(self) -> None:
        self.again: dict[Endpoint, int] = {}
        """Those that compute again, and how many tokens of late."""
        self._accounts: dict[Endpoint, _Account] = {}

    def fetched(self, endpoint: Endpoint) -> int | None:
        """What it had fetched as of its latest report; None where it does not tell."""
        account = self._accounts.get(endpoint)
        return None if account is None else account.work.fetched

    def over(self, endpoint: Endpoint, tokens: int, before: int | None) -> None:
        """A prompt of which it had not cached `tokens` has been handed over, it seems; when it was asked, `fetched` was `before`."""
        account = self._accounts.get(endpoint)
        if account is not None and account.work.fetched == before:
            account.handed += tokens

    def reported(self, endpoint: Endpoint, work: EngineWork) -> int | None:
        """Its counters now; how many tokens it has computed again, when that has just turned out."""
        account = self._accounts.get(endpoint)
        if account is None or work.fetched != account.work.fetched or work.computed < account.work.computed:
            self._accounts[endpoint] = _Account(work, work.computed)
            self.again.pop(endpoint, None)
            return None
        account.work = work
        found = account.due if 0 < account.due <= work.computed - account.base else None
        account.due = account.handed
        if found is None:
            return None
        known = endpoint in self.again
        self.again[endpoint] = found
        return None if known else found

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left."""
        self._accounts.pop(endpoint, None)
        self.again.pop(endpoint, None)
