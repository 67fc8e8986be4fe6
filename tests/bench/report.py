"""What do the numbers say? Medians with their spread, and ours as a ratio to each peer's, round by round."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from pathlib import Path

import msgspec

from tests.bench.contenders import REPOSITORY, peer
from tests.bench.processes import BenchError
from tests.bench.rows import Measured, Row

OURS = "commutator"
NOT_COMPARED = frozenset({"others_share", "chunks_per_s"})
BUSY = 0.25


class Conditions(msgspec.Struct, frozen=True):
    """Where and when."""

    cpu: str
    cores: int
    kernel: str
    python: str
    commit: str
    peers: dict[str, str]
    load_average: float
    """Of the minute before."""

    @property
    def busy(self) -> bool:
        """Whether somebody else was using the machine."""
        return self.load_average > BUSY * self.cores


def conditions() -> Conditions:
    """As they are now."""
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ""
    )
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return Conditions(
        cpu=cpu or platform.processor(),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        python=platform.python_version(),
        commit=commit.stdout.strip(),
        peers={name: version for name in ("vllm-router", "sglang-router", "dynamo") if (version := _version(name))},
        load_average=os.getloadavg()[0],
    )


def _version(name: str) -> str:
    package = {"dynamo": "ai_dynamo-"}.get(name, name.replace("-", "_") + "-")
    try:
        found = next(peer(name).glob(f"lib/*/site-packages/{package}*.dist-info"), None)
    except BenchError:
        return ""
    return "" if found is None else found.name.removeprefix(package).removesuffix(".dist-info")


def described(where: Conditions) -> str:
    """The conditions in a few lines."""
    peers = ", ".join(f"{name} {version}" for name, version in where.peers.items())
    lines = [
        f"{where.cores} cores of {where.cpu}, Linux {where.kernel}, Python {where.python}",
        f"commutator {where.commit}; {peers}; load average before: {where.load_average:.2f}",
    ]
    if where.busy:
        lines.append(
            "WARNING: the machine was busy with something else; absolute numbers are too high, ratios are noisier than they need be"
        )
    return "\n".join(lines)


def table(row: Row, found: dict[str, list[Measured]]) -> str:
    """A row's results as a Markdown table."""
    columns = list(next(iter(found.values()))[0])
    if "direct" in found:
        found = {name: _added(rounds, found["direct"]) if name != "direct" else rounds for name, rounds in found.items()}
    lines = [
        f"### {row.name}: {row.title}",
        "",
        "| | " + " | ".join(_heading(column, added="direct" in found) for column in columns) + " |",
    ]
    lines.append("| --- |" + " ---: |" * len(columns))
    for name, rounds in found.items():
        cells = [_cell(row, name, column, [measured[column] for measured in rounds], found) for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _added(rounds: list[Measured], base: list[Measured]) -> list[Measured]:
    """What a router adds to the engine's own time, in each round."""
    return [{column: value - beneath[column] for column, value in measured.items()} for measured, beneath in zip(rounds, base, strict=True)]


def _heading(column: str, *, added: bool) -> str:
    return ("added " if added else "") + column.replace("_", " ").replace("cpu us", "CPU µs").replace(" us ", " µs ").replace(" mb", " MB")


def _cell(row: Row, name: str, column: str, values: list[float], found: dict[str, list[Measured]]) -> str:
    """Median (lowest–highest), and for a peer how much of it ours is, with the target where there is one."""
    digits = 2 if column == "others_share" else 1 if max(values) < 100 else 0
    text = f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
    if name in (OURS, "direct") or column in NOT_COMPARED or OURS not in found:
        return text
    ratio = statistics.median(ours[column] / value for ours, value in zip(found[OURS], values, strict=True) if value > 0)
    target = row.targets.get(column, {}).get(name)
    mark = "" if target is None else f", target ≤ {target:g}: {'met' if ratio <= target else 'missed'}"
    return f"{text}<br>ours ×{ratio:.2f}{mark}"
