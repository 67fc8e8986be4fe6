"""The benches that measure parts of the router run, and say something of each part."""

from __future__ import annotations

import asyncio
import json
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


@pytest.mark.timeout(300)
async def test_the_bench_of_the_index_runs_and_what_it_follows_is_the_truth(tmp_path: Path) -> None:
    """It ends with an error where an index is not what its engines hold, so that it ends well says more than its numbers."""
    small = ["--engines", "4", "--blocks", "1000", "--burst", "200", "--per-second", "100", "--seconds", "0.5"]
    out = tmp_path / "out.json"
    process = await asyncio.create_subprocess_exec(
        SCRIPTS / "bench-index", *small, "--json", out, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    parts = json.loads(out.read_text())["parts"]
    assert {"memory", "bus", "direct"} <= parts.keys()
    assert "tables" in parts or "tables: left out" in output.decode()
    for part in ("bus", "direct"):
        phases = {name: phase["blocks"] for name, phase in parts[part].items() if name in ("fill", "steady", "burst")}
        assert phases == {"fill": 4 * 896, "steady": 50 * 64, "burst": 200 * 64}
        assert parts[part]["leave"]["entries"] == 0
        assert not any(parts[part]["faults"].values())
    assert parts["bus"]["join"]["blocks"] == 4 * 896
    assert len(re.findall(r"^\|.*\| *[\d.,]+", output.decode(), re.MULTILINE)) >= 25
