"""How does a request wait for its turn? At an `Entrance`, which decides all of it, on a future of the loop.

One that is woken has its place already; one whose client leaves meanwhile gives the place back.

Nothing has to tell the gate that an engine joined, recovered or has cooled down: while anybody waits it looks again at every tick.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.admission import Shed
from router.entrance import TICK_S, Entrance, HeaderNames, Place, Visit

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.admission import QueueLimits
    from router.entrance import Chooses
    from router.intake import Asked


class Gate(Entrance):
    """The entrance, and those who wait before it. `run` must be running for them to be looked after."""

    def __init__(
        self,
        chooser: Chooses,
        limits: QueueLimits,
        names: HeaderNames,
        *,
        waited: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        """See `Entrance`."""
        super().__init__(chooser, limits, names, waited=waited, clock=clock)
        self._somebody = asyncio.Event()

    async def enter(self, asked: Asked, tried: set[str], visit: Visit) -> Place:
        """A place at an engine not in `tried`, at once or after waiting.

        Raises Shed when there is none in time, NoCandidate when waiting would be no use, PolicyError when the policy fails.
        """
        place = self.at_once(asked, tried, visit)
        if place is not None:
            return place
        try:
            return await self._wait(asked, tried, visit)
        except Shed as shed:
            self.shed[shed.reason] += 1
            raise

    async def run(self) -> None:
        """Look after those who wait, until cancelled."""
        while True:
            await self._somebody.wait()
            self._somebody.clear()
            while self.somebody_waits:
                await asyncio.sleep(TICK_S)
                self.pump()

    async def _wait(self, asked: Asked, tried: set[str], visit: Visit) -> Place:
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        queued = self.queue(asked, tried, visit, future)
        self._somebody.set()
        try:
            place = await future
        except asyncio.CancelledError:
            self.gave_up += 1
            if future.done() and not future.cancelled() and future.exception() is None:
                with future.result():
                    pass  # it was let in as its client left: the place is free again
            raise
        finally:
            self.leave(queued)
        self.let_in(queued, visit)
        return place
