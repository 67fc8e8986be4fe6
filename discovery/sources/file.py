"""Which engines does a file name? A TOML file that somebody else writes: read again when it changes.

    [[engine]]                               engine = ["http://h:8000,role=prefill", …]
    url = "http://h:8000"            or
    role = "prefill"

A file that is not there, or cannot be understood, says nothing: what it said before stands. Write another one and rename it.
"""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Final

from discovery.config.errors import ConfigError
from discovery.config.specs import build_engine_spec, parse_engine_spec
from discovery.sources.found import Found, SourceFailed, Tell
from discovery.sources.static import static_specs
from engines.types import EngineSpec

LOOK_PERIOD_S: Final = 0.5
MAX_BYTES: Final = 16 * 1024 * 1024

Stat = tuple[int, int, int]


class FileSource:
    """One file."""

    def __init__(self, path: str) -> None:
        self.name = f"file {path}"
        self._path = Path(path)

    async def run(self, tell: Tell) -> None:
        """See `Source`."""
        seen: Stat | None = None
        while True:
            now = await asyncio.to_thread(self._stat)
            if now != seen:
                seen = now
                tell(Found(await asyncio.to_thread(self._read)))
            await asyncio.sleep(LOOK_PERIOD_S)

    def _stat(self) -> Stat:
        try:
            told = self._path.stat()
        except OSError as error:
            raise SourceFailed(f"cannot be read: {(error.strerror or str(error)).lower()}") from None
        return told.st_mtime_ns, told.st_size, told.st_ino

    def _read(self) -> tuple[EngineSpec, ...]:
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise SourceFailed(f"is longer than {MAX_BYTES} bytes")
            return read_engines(text.decode())
        except OSError as error:
            raise SourceFailed(f"cannot be read: {(error.strerror or str(error)).lower()}") from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SourceFailed(f"is not TOML: {error}") from None
        except (ConfigError, ValueError) as error:
            raise SourceFailed(str(error)) from None


def read_engines(text: str) -> tuple[EngineSpec, ...]:
    """The engines of such a file. Raises tomllib.TOMLDecodeError, ConfigError, or ValueError for one that is named twice."""
    table = tomllib.loads(text)
    if unknown := sorted(table.keys() - {"engine"}):
        raise ConfigError(f"unknown key {unknown[0]}; the file holds `engine`, and nothing else")
    items = table.get("engine", [])
    if not isinstance(items, list):
        raise ConfigError("engine: a list of engines is wanted")
    return static_specs(map(_engine, items))


def _engine(item: object) -> EngineSpec:
    match item:
        case str():
            return parse_engine_spec(item)
        case dict():
            return build_engine_spec(item, strict=True)
        case _:
            raise ConfigError(f"{item!r} is neither a line nor a table that describes an engine")
