"""What have operators changed since the parent began? What a worker that starts later has to be told, to be as the others are.

Of each engine only what still has an effect is kept: the last word of its naming, whether it drains, whether it is removed.
"""

from __future__ import annotations

from typing import Final

import msgspec

from router.processes.messages import AdminCall

MAX_REMOVED: Final = 1000
"""Engines remembered as removed that no configuration names: they matter only while a removal waits for what is in flight."""


class Journal:
    """Calls that were done, by engine.

    >>> journal = Journal()
    >>> journal.done("http://a:1", AdminCall("POST", b"/admin/engines/http://a:1/drain"))
    >>> journal.done("http://a:1", AdminCall("POST", b"/admin/engines/http://a:1/undrain"))
    >>> [call.path for call in journal.calls()], journal.version
    ([b'/admin/engines/http://a:1/undrain'], 2)
    """

    def __init__(self) -> None:
        self.version = 0
        """Grows with every change."""
        self._calls: dict[str, list[AdminCall]] = {}

    def calls(self) -> list[AdminCall]:
        """All that a new worker has to do, in order."""
        return [call for calls in self._calls.values() for call in calls]

    def done(self, engine: str, call: AdminCall) -> None:
        """The group has done this to the engine."""
        self.version += 1
        calls = self._calls.pop(engine, [])
        if call.method == "DELETE":
            call = msgspec.structs.replace(call, query=b"now=1")  # a worker that has just begun has nothing in flight there
        elif not call.path.endswith((b"/drain", b"/undrain")):
            calls = []
        else:
            calls = [one for one in calls if one.method != "DELETE" and not one.path.endswith((b"/drain", b"/undrain"))]
        self._calls[engine] = [*calls, call]  # what changed last comes last: `_forget` lets go of the oldest
        self._forget()

    def _forget(self) -> None:
        removed = [engine for engine, calls in self._calls.items() if calls[-1].method == "DELETE"]
        for engine in removed[:-MAX_REMOVED]:
            del self._calls[engine]
