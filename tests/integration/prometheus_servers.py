"""A real Prometheus, where there is one: as Debian has it (`scripts/setup-prometheus`)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from tests.waiting import until

PROMETHEUS = shutil.which("prometheus")
NONE_HERE = "prometheus is not here: Debian has it (scripts/setup-prometheus)"


@contextlib.asynccontextmanager
async def prometheus(folder: Path, session: aiohttp.ClientSession) -> AsyncIterator[str]:
    """One with the folder's configuration, once it answers; its URL."""
    log = folder / "log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            str(PROMETHEUS),
            *(f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"),
            stdout=stderr,
            stderr=stderr,
        )

    def listens() -> bool:
        assert process.returncode is None, log.read_text()
        return re.search(r"Listening on.*?address=(\S+)", log.read_text()) is not None

    try:
        await until(listens, what="Prometheus listens")
        found = re.search(r"Listening on.*?address=(\S+)", log.read_text())
        assert found is not None

        async def ready() -> bool:
            async with session.get(f"http://{found[1]}/-/ready") as response:
                return response.status == 200

        await until(ready, what="Prometheus is ready")
        yield f"http://{found[1]}"
    finally:
        process.terminate()
        await process.wait()


async def asked(session: aiohttp.ClientSession, url: str, query: str) -> list[float]:
    """What a query's series have now."""
    async with session.get(f"{url}/api/v1/query", params={"query": query}) as response:
        assert response.status == 200, await response.text()
        return [float(result["value"][1]) for result in (await response.json())["data"]["result"]]
