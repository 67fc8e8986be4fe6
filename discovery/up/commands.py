"""How is another command of ours run beside this one? A process of its own, with a configuration file that only we can read.

    Beside("serve", {...}) ──▶ checked() ──▶ start() ──▶ its first line ──▶ ended() or stop()

What is wrong with its configuration is found by itself, before anything else is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from discovery.children import die_with_parent
from discovery.config import ConfigError

STOP_WITHIN_S: Final = 60.0
_OURS: Final = ("COMMUTATOR_ENGINE", "COMMUTATOR_CONFIG", "COMMUTATOR_POOL", "COMMUTATOR_HOST", "COMMUTATOR_PORT")
"""Variables that would replace what the file says on our word; all others are read by it as they are by us."""


class CommandFailed(Exception):
    """The command has ended by itself, or did not begin; it has said why."""


class Beside:
    """One command, from `start` to `stop`."""

    def __init__(self, name: str, table: Mapping[str, object], folder: Path) -> None:
        """Its configuration is written to `folder`, which must be ours alone."""
        self.name = name
        self.table = table
        self._file = folder / f"{name}.toml"
        self._process: Process | None = None

    async def check(self) -> None:
        """Raises ConfigError in the command's own words when it could not be started so."""
        await asyncio.to_thread(self._write)
        process = await asyncio.create_subprocess_exec(
            *self._argv(), "--check-config", stdout=PIPE, stderr=PIPE, env=_environment(), preexec_fn=die_with_parent()
        )
        _, said = await process.communicate()
        if process.returncode:
            lines = said.decode(errors="replace").replace(f"commutator {self.name}: error: ", "").splitlines()
            raise ConfigError("\n".join(line.replace(f"{self._file}: ", f"[{self.name}] ") for line in lines))

    async def start(self) -> dict[str, Any]:
        """It runs; the line that it prints once it is ready. Raises CommandFailed when it ends before."""
        await asyncio.to_thread(self._write)
        self._process = await asyncio.create_subprocess_exec(
            *self._argv(),
            stdout=PIPE,
            env=_environment(),
            preexec_fn=die_with_parent(),
            start_new_session=True,  # a terminal's Ctrl-C is ours to act on: engines go after the router
        )
        assert self._process.stdout is not None  # noqa: S101  it is a pipe
        line = await self._process.stdout.readline()
        if not line:
            raise CommandFailed(f"commutator {self.name} ended with code {await self._process.wait()}")
        told: dict[str, Any] = msgspec.json.decode(line)
        return told

    async def ended(self) -> str:
        """Returns when it has ended by itself: how."""
        if self._process is None:
            return f"commutator {self.name} was not started"
        return f"commutator {self.name} ended with code {await self._process.wait()}"

    async def stop(self) -> None:
        """It has ended: in order where it does so in time, killed where not."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def _argv(self) -> list[str]:
        return [sys.executable, "-P", "-m", "commutator", self.name, "--config", str(self._file)]

    def _write(self) -> None:
        self._file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in self.table.items()), encoding="utf-8")


def toml(value: object) -> str:
    """A TOML value, as it is: what `discovery.config.render` shows people has its secrets masked.

    >>> toml({"a": [1, True, "x"]})
    '{ "a" = [1, true, "x"] }'
    """
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return "{ " + ", ".join(f"{json.dumps(str(key))} = {toml(item)}" for key, item in value.items()) + " }"
        case msgspec.Struct():
            fields = msgspec.structs.fields(value)
            return toml({field.name: item for field in fields if (item := getattr(value, field.name)) != field.default})
        case _:
            return json.dumps(str(value), ensure_ascii=False)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OURS}
