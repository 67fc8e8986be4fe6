"""What is there to say about runs? A table for people, an array of objects for programs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from router.replay.measure import Run

COLUMNS: tuple[tuple[str, Callable[[Run], float], str], ...] = (
    ("TTFT s", lambda run: run.ttft_s.mean, ".3f"),
    ("p50", lambda run: run.ttft_s.p50, ".3f"),
    ("p95", lambda run: run.ttft_s.p95, ".3f"),
    ("p99", lambda run: run.ttft_s.p99, ".3f"),
    ("ITL ms", lambda run: run.itl_s.mean * 1e3, ".1f"),
    ("p99", lambda run: run.itl_s.p99 * 1e3, ".1f"),
    ("E2E s", lambda run: run.e2e_s.mean, ".2f"),
    ("p99", lambda run: run.e2e_s.p99, ".2f"),
    ("hits", lambda run: run.hit_rate, ".1%"),
    ("good/s", lambda run: run.goodput, ".2f"),
    ("good", lambda run: run.good, ".1%"),
    ("shed", lambda run: run.shed, ".1%"),
    ("failed", lambda run: run.failed, ".1%"),
    ("balance", lambda run: run.balance, ".2f"),
)


class Group(msgspec.Struct, frozen=True):
    """Runs that differ by their seed only."""

    policy: str
    speed: float
    runs: tuple[Run, ...]

    def median(self, of: Callable[[Run], float]) -> float:
        """Over the seeds."""
        return statistics.median(map(of, self.runs))

    def extremes(self, of: Callable[[Run], float]) -> tuple[float, float]:
        """Over the seeds."""
        values = list(map(of, self.runs))
        return min(values), max(values)


def grouped(runs: Sequence[Run]) -> list[Group]:
    """By speed and policy, in the order in which they were first met."""
    found: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.speed, run.policy), []).append(run)
    return [Group(policy, speed, tuple(group)) for (speed, policy), group in found.items()]


def ttft(run: Run) -> float:
    """The mean."""
    return run.ttft_s.mean


def against(group: Group, groups: Sequence[Group]) -> float:
    """Mean TTFT over that of the last policy at the same load: the median of the ratios of runs with equal seeds."""
    last = groups[-1].policy
    other = next(one for one in groups if one.policy == last and one.speed == group.speed)
    theirs = {run.seed: ttft(run) for run in other.runs}
    return statistics.median(ttft(run) / theirs[run.seed] if theirs[run.seed] else 1.0 for run in group.runs)


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """The table, its head first. Several seeds: medians, with the least and the most of the mean TTFT."""
    groups = grouped(runs)
    several = any(len(group.runs) > 1 for group in groups)
    head = ["speed", "policy", *(name for name, _, _ in COLUMNS), f"TTFT/{groups[-1].policy}"]
    table = [head + ["TTFT from–to", "seeds"] * several]
    for group in groups:
        row = [f"{group.speed:g}", group.policy, *(format(group.median(of), form) for _, of, form in COLUMNS)]
        row.append(f"{against(group, groups):.3f}")
        if several:
            low, high = group.extremes(ttft)
            row += [f"{low:.3f}–{high:.3f}", str(len(group.runs))]
        table.append(row)
    return table


def as_text(runs: Sequence[Run]) -> str:
    """The table, in columns."""
    table = rows(runs)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines) + "\n"


def as_json(runs: Sequence[Run]) -> bytes:
    """An array of one object for each run, a line each."""
    return b"[\n" + b",\n".join(map(msgspec.json.encode, runs)) + b"\n]\n"
