"""Which files do we go by that may change while we run? Keys and certificates: read again when they have changed, or when we are told to.

A file that cannot be used when it is read again changes nothing: what was read last stays in force, and a log line says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from discovery.logs import event

LOOK_PERIOD_S: Final = 1.0
MAX_BYTES: Final = 16 * 1024 * 1024

T = TypeVar("T")
log = logging.getLogger(__name__)

Look = tuple[tuple[int, int, int], ...]


class Source(Generic[T]):
    """Something made of one or more files. `make` may block and is called outside the loop; `take` is told of what it made, in the loop."""

    def __init__(self, paths: tuple[str, ...], make: Callable[[], T], take: Callable[[T], None]) -> None:
        self.paths = paths
        self._make = make
        self._take = take
        self._seen: Look = ()

    async def read(self) -> None:
        """Take in the files as they are. Raises OSError or ValueError."""
        self._seen = await asyncio.to_thread(look, self.paths)  # before reading: a change meanwhile is then seen as one
        self._take(await asyncio.to_thread(self._make))

    async def read_again(self, *, told: bool) -> None:
        """Take the files in if they have changed, or if `told` to."""
        try:
            if not told and await asyncio.to_thread(look, self.paths) == self._seen:
                return
            await self.read()
        except (OSError, ValueError) as error:
            event(
                log, logging.ERROR, "files could not be read again; what was read last stays in force", files=self.paths, reason=str(error)
            )
        else:
            event(log, logging.INFO, "files read again", files=self.paths)


class Files:
    """All sources; `run` looks at them until cancelled."""

    def __init__(self) -> None:
        self._sources: list[Source[object]] = []
        self._told = asyncio.Event()

    async def follow(self, paths: tuple[str, ...], make: Callable[[], T], take: Callable[[T], None]) -> None:
        """Read files now and whenever they change. Raises OSError or ValueError when they cannot be used now."""
        source = Source(paths, make, take)
        await source.read()
        self._sources.append(source)  # type: ignore[arg-type]  # each is only ever asked to read

    def __bool__(self) -> bool:
        """Whether there is anything to follow."""
        return bool(self._sources)

    def read_again(self) -> None:
        """Read everything now, changed or not."""
        self._told.set()

    async def run(self) -> None:
        """Look once a second until cancelled."""
        while True:
            told = await self._was_told()
            for source in self._sources:
                await source.read_again(told=told)

    async def _was_told(self) -> bool:
        try:
            async with asyncio.timeout(LOOK_PERIOD_S):
                await self._told.wait()
        except TimeoutError:
            return False
        self._told.clear()
        return True


def look(paths: tuple[str, ...]) -> Look:
    """What changes when a file does: by being written, or by being replaced."""
    stats = [Path(path).stat() for path in paths]
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def read_text(path: str) -> str:
    """A file's text. Raises OSError or ValueError, neither with anything of what is in it."""
    with Path(path).open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} is longer than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
