from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from router.errand import Bell, Errand, in_task
from tests.waiting import until


class Run:
    """An errand, and what became of it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.ended: list[BaseException | None] = []
        self.errand = Errand(coroutine, lambda _, raised: self.ended.append(raised))
        self.errand.step()

    @property
    def cancelled(self) -> bool:
        return len(self.ended) == 1 and isinstance(self.ended[0], asyncio.CancelledError)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_it_begins_at_once_and_goes_on_in_the_call_that_rings() -> None:
    told = []
    bell = Bell()

    async def work() -> None:
        told.append("began")
        await bell
        told.append("went on")
        await bell  # has rung: no wait

    run = Run(work())
    assert (told, run.ended) == (["began"], [])
    bell.ring()
    assert (told, run.ended) == (["began", "went on"], [None])
    assert run.errand.over
    bell.ring()
    assert run.ended == [None]


async def test_futures_sleeps_and_tasks_are_awaited_as_in_a_task() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    got: list[object] = []

    async def timed() -> str:
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
        return "timed"

    async def work() -> None:
        got.append(await future)
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        got.append(await in_task(timed()))

    run = Run(work())
    future.set_result(7)
    await until(lambda: run.ended)
    assert got == [7, "timed"]


async def test_what_it_raises_is_told_to_its_owner() -> None:
    async def fail(wait: Bell | None) -> None:
        if wait is not None:
            await wait
        raise ValueError("no")

    assert isinstance(Run(fail(None)).ended[0], ValueError)
    bell = Bell()
    run = Run(fail(bell))
    bell.ring()
    assert isinstance(run.ended[0], ValueError)


@pytest.mark.parametrize("wait_for", [Bell, lambda: asyncio.get_running_loop().create_future(), lambda: asyncio.sleep(0)])
async def test_cancelling_raises_where_it_waits_and_lets_it_clean_up(wait_for: Callable[[], Any]) -> None:
    cleaned = []

    async def work() -> None:
        try:
            await wait_for()
        finally:
            cleaned.append(True)

    run = Run(work())
    run.errand.cancel()
    await turns()
    assert run.cancelled
    assert cleaned == [True]


async def test_cancelling_one_whose_future_has_just_ended_still_cancels_it() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await future
        raise AssertionError("went on")

    run = Run(work())
    future.set_result(None)
    run.errand.cancel()
    await turns()
    assert run.cancelled


async def test_cancelled_from_within_it_ends_at_its_next_wait() -> None:
    bells = [Bell(), Bell()]
    held: list[Errand] = []

    async def work() -> None:
        await bells[0]
        held[0].cancel()
        await bells[1]
        raise AssertionError("went on")

    run = Run(work())
    held.append(run.errand)
    bells[0].ring()
    assert run.cancelled


async def test_an_errand_that_swallows_its_cancellation_goes_on() -> None:
    first, second = Bell(), Bell()

    async def work() -> None:
        try:
            await first
        except asyncio.CancelledError:
            await second

    run = Run(work())
    run.errand.cancel()
    assert run.ended == []
    first.ring()
    assert run.ended == [], "it does not wait for that any more"
    second.ring()
    assert run.ended == [None]


async def test_a_result_that_comes_after_the_cancellation_is_undone() -> None:
    undone: list[str] = []
    done = asyncio.Event()

    async def make() -> str:
        done.set()
        return "made"

    async def work() -> None:
        await in_task(make(), undone.append)

    run = Run(work())
    await done.wait()
    run.errand.cancel()
    await turns()
    assert run.cancelled
    assert undone == ["made"]
