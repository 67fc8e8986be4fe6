"""The benches that measure parts of the router run, and say something of each part."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        (("bench-path", "--rounds", "1"), 11),
        (("bench-path", "--rounds", "1", "--policy", "kv"), 11),
        (("bench-events", "--blocks", "10", "--seconds", "0.3"), 10),
    ],
)
async def test_a_bench_of_parts_runs(command: tuple[str, ...], rows: int) -> None:
    name, *options = command
    process = await asyncio.create_subprocess_exec(sys.executable, SCRIPTS / name, *options, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    measured = re.findall(r"^\|.*\| *[\d.]+", output.decode(), re.MULTILINE)
    assert len(measured) >= rows, output.decode()
