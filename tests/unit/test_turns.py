"""Whose turn it is among those who share a loop."""

import asyncio
import functools

from engines.turns import LITTLE_BYTES, PASS_BYTES, PASS_READ_BYTES, READ_BYTES, Turns


async def test_a_pass_is_spent_and_the_next_one_is_whole_again() -> None:
    turns = Turns()
    spent = [turns.spent]
    for _ in range(2):
        turns.take(PASS_BYTES // 2)
        spent.append(turns.spent)
    await asyncio.sleep(0)
    assert [*spent, turns.spent] == [False, False, True, False]


async def test_when_much_was_read_in_a_pass_others_read_little_and_on_in_a_later_one() -> None:
    turns, went_on = Turns(), list[int]()
    for _ in range(PASS_READ_BYTES // READ_BYTES - 1):
        assert turns.room == READ_BYTES
        assert turns.read(READ_BYTES, went_on.clear)
    for number in range(6):
        assert not turns.read(turns.room, functools.partial(went_on.append, number))
        assert turns.room == LITTLE_BYTES
    await asyncio.sleep(0)
    assert (turns.room, went_on) == (READ_BYTES, [0, 1, 2, 3]), "as many as have a share in the next pass"
    await asyncio.sleep(0)
    assert went_on == [0, 1, 2, 3, 4, 5]


async def test_who_waits_has_a_whole_pass_each_in_the_order_of_asking() -> None:
    turns = Turns()
    had: list[tuple[str, int]] = []
    passes = 0

    async def count_passes() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    async def source(name: str, messages: int) -> None:
        while messages:
            if turns.spent:
                await turns.mine()
                assert not turns.spent, "somebody else was before"
            while messages and not turns.spent:
                had.append((name, passes))
                turns.take(PASS_BYTES // 3)
                messages -= 1

    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count_passes())
        sources = [tasks.create_task(source(name, 6)) for name in "abc"]
        await asyncio.wait(sources)
        counting.cancel()
    assert [name for name, _ in had] == [*"aaa", *"aaa", *"bbb", *"ccc", *"bbb", *"ccc"]
    taken = [sum(of == number for _, of in had) for number in range(passes + 1)]
    assert max(taken) == 3, "more in one pass than there is time for"


async def test_who_gives_up_waiting_holds_up_nobody() -> None:
    turns = Turns()
    turns.take(PASS_BYTES)
    async with asyncio.TaskGroup() as tasks:
        first, second = (tasks.create_task(turns.mine()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await second
    assert first.cancelled()
