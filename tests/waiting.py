"""How does a test wait? For a condition, with a deadline; never for a length of time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from inspect import isawaitable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01


async def until(condition: Callable[[], object] | Callable[[], Awaitable[object]], *, deadline_s: float = 30.0, what: str = "") -> None:
    """Return once `condition()` (or what it awaits) is true; fail the test, saying `what` never came, after `deadline_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    while True:
        result = condition()
        if isawaitable(result):
            result = await result
        if result:
            return
        if loop.time() >= deadline:
            name = what or getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"not within {deadline_s:g} s: {name}")
        await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def alongside(coroutine: Coroutine[object, object, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run something that does not end by itself for as long as the block lasts; what it failed with fails the test."""
    task = asyncio.create_task(coroutine)  # noqa: TID251  owned by the block
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
