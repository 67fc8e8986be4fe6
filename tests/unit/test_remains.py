"""What is given up is freed in slices, and nothing of it is kept."""

import asyncio

from discovery.remains import SLICE, Remains


async def test_large_dicts_are_freed_a_slice_in_each_pass_of_the_loop() -> None:
    remains = Remains()
    remains.add([dict.fromkeys(range(2 * SLICE + 1)), dict.fromkeys(range(SLICE + 1))])
    left = [len(remains)]
    while len(remains):
        await asyncio.sleep(0)
        left.append(len(remains))
    assert left == [3 * SLICE + 2, 2 * SLICE + 2, SLICE + 2, SLICE + 1, 1, 0]


async def test_small_ones_are_not_kept_and_more_may_be_added_meanwhile() -> None:
    remains = Remains()
    remains.add([dict.fromkeys(range(SLICE))])
    assert len(remains) == 0
    remains.add([dict.fromkeys(range(SLICE + 1))])
    remains.add([dict.fromkeys(range(SLICE + 1))])
    for _ in range(4):
        await asyncio.sleep(0)
    assert len(remains) == 0
