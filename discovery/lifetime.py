"""When does a process that serves end, and what ends with it? Signals, and the one task group that everything runs in."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator


def stopped_by_signals(*numbers: signal.Signals) -> asyncio.Event:
    """Set by SIGINT or SIGTERM. The first one stops in order; a second one ends at once: SIGINT cancels the task that asks for this."""
    stop = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    numbers = numbers or (signal.SIGINT, signal.SIGTERM)

    def stop_once() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
        if signal.SIGINT in numbers and task is not None:
            # Python's own answer, an exception wherever it happens to be, is lost where that is a socket's callback.
            loop.add_signal_handler(signal.SIGINT, task.cancel)

    for number in numbers:
        loop.add_signal_handler(number, stop_once)
    return stop


class _Leaving(Exception):
    """Ends the task group from inside."""


@contextlib.asynccontextmanager
async def cancelled_at_exit() -> AsyncIterator[asyncio.TaskGroup]:
    """The one task group of the process: leaving ends every task in it, and a task that fails ends the process."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
            raise _Leaving  # noqa: TRY301  the only way to end a task group from inside
    except* _Leaving:
        pass
