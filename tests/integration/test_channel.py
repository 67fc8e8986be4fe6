"""The channel between the parent and a worker, where one of them ends."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.processes.channel import Channel, ChannelClosed
from router.processes.messages import PeerGone, Readiness, Request, Up
from tests.waiting import alongside, until


async def nothing(request: Request) -> object:
    del request
    return None


async def test_what_is_told_to_one_that_has_ended_is_nothing_and_what_is_asked_fails() -> None:
    """Also before its end has been read: a write tells of it first."""
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours, nothing)
    theirs.close()
    for _ in range(100):
        channel.tell(PeerGone("b"))
        await asyncio.sleep(0)
    await channel.flush()
    with pytest.raises(ChannelClosed):
        await channel.ask(Up(), Readiness, timeout_s=30)
    async with alongside(channel.run()) as running:
        await until(running.done, what="the end is read")


async def test_who_waits_for_an_answer_hears_of_the_end() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    channel = await Channel.over(ours, nothing)

    async def ask_in_vain() -> None:
        with pytest.raises(ChannelClosed):
            await channel.ask(Up(), Readiness, timeout_s=30)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(channel.run())
        tasks.create_task(ask_in_vain())
        with theirs:
            assert await asyncio.get_running_loop().sock_recv(theirs, 1)
