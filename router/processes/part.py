"""What does one process have in common with the others, and what do they want of it? The seam between the app and the group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from router.answers import Group
from router.processes.messages import AdminCall, AdminReply, Page, Readiness
from router.processes.pages import page_of

if TYPE_CHECKING:
    from discovery.monitor import Monitor
    from discovery.sharing import Sharing
    from router.admin import Admin
    from router.answers import Answers
    from router.fleet import Fleet
    from router.metrics import Metrics
    from router.ui.parts import Part as UiPart
    from router.ui.view import View


class Inside:
    """A router that is built and runs, as its parent sees it."""

    def __init__(  # noqa: PLR0913  what the parent may ask of
        self, admin: Admin, answers: Answers, metrics: Metrics, view: View, *, sharing: Sharing, monitor: Monitor, fleet: Fleet
    ) -> None:
        self._admin = admin
        self._answers = answers
        self._metrics = metrics
        self._view = view
        self._sharing = sharing
        self._monitor = monitor
        self._fleet = fleet

    async def admin(self, call: AdminCall) -> AdminReply:
        """Do what an operator wants."""
        return await self._admin.answer(call)

    def page(self) -> Page:
        """What it measures."""
        return page_of(self._metrics.registry.collect())

    async def part(self) -> UiPart:
        """What it shows on the live page."""
        return await self._view.part()

    def readiness(self) -> Readiness:
        """What it takes."""
        return self._answers.readiness()

    def gone(self, router: str) -> None:
        """Another process has ended."""
        self._sharing.gone(router)

    @property
    def knows_its_engines(self) -> bool:
        """Whether each engine either serves, or has been asked in vain."""
        members = self._fleet.members
        return all(
            members[engine].serving if engine in members else bool(self._monitor.waiting_for(engine)) for engine in self._monitor.watched
        )


class Part(msgspec.Struct, frozen=True):
    """A process's part in a group."""

    processes: int
    router: str
    """Its name on the bus."""
    nats: str
    port: int
    group: Group
    prepare: Callable[[Inside], Awaitable[None]]
    """Called when everything runs, before it listens."""
