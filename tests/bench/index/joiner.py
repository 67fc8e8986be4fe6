"""A router that joins late: it hears of everything over the bus, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from tests.bench.index.router import Router, infos
from tests.bench.index.watch import process_s, resident_bytes


def _say(answer: object) -> None:
    """To whoever asked."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def serve(url: str, ports: list[int], blocks: int) -> None:
    """Join when told, and then say what is asked."""
    _say("ready")
    router = Router(infos(ports, blocks))
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        running: list[asyncio.Task[None]] = []
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command: dict[str, Any] = json.loads(line)
            answer: object = None
            match command.pop("do"):
                case "join":
                    started, spent, before = time.monotonic(), process_s(), resident_bytes()
                    running += await router.start(tasks, url, relays=False)
                    await router.ready()
                    answer = {
                        "s": time.monotonic() - started,
                        "cpu_s": process_s() - spent,
                        "blocks": router.blocks(),
                        "rss_bytes": resident_bytes() - before,
                        **router.watch.take(),
                    }
                case "state":
                    answer = {"blocks": router.blocks(), "wrong": router.wrong(command["samples"])}
            _say(answer)
        for task in running:
            task.cancel()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
