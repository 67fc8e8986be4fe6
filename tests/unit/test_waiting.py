from __future__ import annotations

import asyncio

import blockbuster
import pytest
import uvloop

import discovery.signal
from tests.waiting import alongside, until


async def test_waiting_ends_as_soon_as_the_condition_holds() -> None:
    seen: list[int] = []

    def third_time() -> bool:
        seen.append(1)
        return len(seen) == 3

    await until(third_time)
    assert len(seen) == 3


async def test_waiting_awaits_an_async_condition() -> None:
    async def always() -> bool:
        return True

    await until(always)


async def test_a_condition_that_never_holds_fails_the_test_and_is_named() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.02 s: the bell to ring"):
        await until(lambda: False, deadline_s=0.02, what="the bell to ring")


async def test_tests_run_on_uvloop() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


async def test_a_blocking_call_from_a_room_raises(alarm_on_blocking_calls: blockbuster.BlockBuster) -> None:
    code = compile("import time; time.sleep(0)", discovery.signal.__file__, "exec")
    with pytest.raises(blockbuster.BlockingError):
        exec(code, {})  # noqa: S102  a frame that looks as if it came from the room


async def test_what_runs_alongside_a_block_is_cancelled_at_its_end() -> None:
    async with alongside(asyncio.Event().wait()) as task:
        assert not task.done()
    assert task.cancelled()


async def test_what_failed_alongside_a_block_fails_the_test() -> None:
    async def fail() -> None:
        raise OSError("it broke")

    with pytest.raises(OSError, match="it broke"):
        async with alongside(fail()) as task:
            await until(task.done)
