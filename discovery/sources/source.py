"""What is a source? Whoever can say which engines there are: all of them, whenever that may have changed.

    source.run(tell) ──▶ tell(Found(specs))   tell(Found(specs))   …   raise SourceFailed

It never says what came and what went. So nothing that was not noticed stays wrong for longer than until it looks again.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from discovery.sources.found import Found, Tell


class Source(Protocol):
    """One source."""

    name: str
    """For people: `docker`, `file /etc/engines.toml`."""

    async def run(self, tell: Tell) -> None:
        """Tell at once, and again whenever it may be otherwise, until cancelled. Raises SourceFailed; it is then run again, later."""
        ...


class Polled:
    """A source that is looked at every `period_s`, and at once when it says so itself."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._hint = asyncio.Event()

    def look_again(self) -> None:
        """Something may have changed: do not wait for the next time."""
        self._hint.set()

    async def run(self, tell: Tell) -> None:
        """See `Source`."""
        while True:
            self._hint.clear()
            tell(await self.look())
            try:
                async with asyncio.timeout(self._period_s):
                    await self._hint.wait()
            except TimeoutError:
                pass

    async def look(self) -> Found:
        """Every engine there is. Raises SourceFailed."""
        raise NotImplementedError
