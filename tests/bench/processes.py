"""What did a program cost? Programs started for the bench, with the processor time and memory of their whole process trees.

From the kernel's own accounting, `/proc/PID/stat`: user and system time of every process in the tree, and of its children that ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STOPPED_WITHIN_S = 5.0


class BenchError(Exception):
    """The bench cannot go on; the message says why."""


class Program(msgspec.Struct, frozen=True):
    """One program that runs."""

    pid: int
    first_line: str
    """What it printed first, for programs that say where they listen."""
    log: Path


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str | Path],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    says_where: bool = False,
    within_s: float = 60,
) -> AsyncIterator[Program]:
    """Run a program until the context ends; its output goes to `log`, less the first line where `says_where`. Raises BenchError."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if says_where else output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            line = b""
            if process.stdout is not None:
                with contextlib.suppress(TimeoutError):
                    line = await asyncio.wait_for(process.stdout.readline(), within_s)
                if not line:
                    raise BenchError(f"{command[0]} did not start:\n{tail(log)}")
            yield Program(process.pid, line.decode(), log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOPPED_WITHIN_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its session: whatever it started and left behind
            await process.wait()


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def cpu_s(root: int) -> float:
    """Processor seconds of a process and its descendants so far."""
    return sum(_stat(pid)[1] for pid in tree(root)) / TICKS_PER_S


def memory_bytes(root: int) -> int:
    """Memory of a process and its descendants, shared pages divided among those who share them."""
    return sum(_proportional_kib(pid) for pid in tree(root)) * 1024


def machine_s() -> tuple[float, float]:
    """Seconds that all processors together have been (busy, available) so far."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / TICKS_PER_S, sum(fields) / TICKS_PER_S


def tree(root: int) -> list[int]:
    """A process and all its descendants, as they are now."""
    children: dict[int, list[int]] = {}
    for pid in _all():
        children.setdefault(_stat(pid)[0], []).append(pid)
    found, left = [], [root]
    while left:
        pid = left.pop()
        found.append(pid)
        left += children.get(pid, [])
    return found


def _all() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _stat(pid: int) -> tuple[int, int]:
    """The parent's id, and the ticks spent by the process and its children that ended; nothing when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return int(fields[1]), sum(map(int, fields[11:15]))


def _proportional_kib(pid: int) -> int:
    try:
        page = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(int(line.split()[1]) for line in page.splitlines() if line.startswith("Pss:"))
