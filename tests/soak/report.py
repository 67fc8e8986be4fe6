"""What has the soak found? Counts, and how memory went, in a page for docs/ and a list of what was wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from tests.soak.traffic import GOOD, Outcome

MAX_GROWTH: Final = 0.05
"""Of a router's memory, by the slope of the second half of the run, were it to go on for as long as it took."""
LONG_S: Final = 600.0
"""What grows in less is warming up."""


class Report(msgspec.Struct, frozen=True):
    """A soak that is over."""

    seconds: float
    seed: int
    outcomes: Counter[Outcome]
    statuses: Counter[int]
    chaos: Counter[str]
    left_over: list[str]
    """Counters that are not zero although nothing is in flight."""
    wrong_overlaps: list[str]
    """Prompts for which a router believes other than the engine holds, once all is calm."""
    checked_overlaps: int
    memory_kb: dict[str, list[tuple[float, float]]]
    """By process: seconds since the beginning, and its own memory (USS)."""

    @property
    def complaints(self) -> list[str]:
        """What must not be; empty when all is well."""
        found = [f"{count} requests ended {outcome.value}" for outcome, count in self.outcomes.items() if outcome not in GOOD]
        found += self.left_over
        if not self.outcomes[Outcome.WHOLE]:
            found.append("no request was answered")
        if self.wrong_overlaps:
            found.append(
                f"{len(self.wrong_overlaps)} of {self.checked_overlaps} overlaps are not what the engine holds: {self.wrong_overlaps[0]}"
            )
        for name, samples in self.memory_kb.items():
            late = samples[len(samples) // 2 :]
            if self.seconds >= LONG_S and slope(late) * self.seconds > MAX_GROWTH * late[0][1]:
                found.append(f"{name} grows by {slope(late) * 3600:.0f} kB an hour")
        return found

    def page(self, command: str) -> str:
        """As Markdown."""
        total = sum(self.outcomes.values())
        rows = [f"| requests, {outcome.value} | {count} ({count / max(1, total):.1%}) |" for outcome, count in self.outcomes.most_common()]
        rows += [f"| answers with status {status} | {count} |" for status, count in sorted(self.statuses.items())]
        rows += [f"| {name} | {count} |" for name, count in self.chaos.most_common()]
        rows.append(
            f"| overlaps compared with what the engine holds, at the end | {self.checked_overlaps}, {len(self.wrong_overlaps)} wrong |"
        )
        rows.append(f"| counters left over | {', '.join(self.left_over) or 'none'} |")
        for name, samples in self.memory_kb.items():
            late = samples[len(samples) // 2 :]
            eighths = [samples[at * (len(samples) - 1) // 8][1] / 1024 for at in range(9)]
            rows.append(f"| memory of {name}, MB: at each eighth of the time | {', '.join(f'{one:.1f}' for one in eighths)} |")
            if self.seconds < LONG_S:
                continue
            rows.append(f"| its slope over the second half | {slope(late) * 3600:+.0f} kB an hour |")
        verdict = "; ".join(self.complaints) or "nothing"
        return "\n".join(
            [f"`{command}`, seed {self.seed}, {self.seconds:.0f} s. What was wrong: {verdict}.", "", "| | |", "| --- | --- |", *rows, ""]
        )


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Growth per second, by least squares.

    >>> slope([(0, 100.0), (1, 102.0), (2, 104.0)])
    2.0
    """
    count = len(samples)
    if count < 2:
        return 0.0
    mean_x, mean_y = sum(x for x, _ in samples) / count, sum(y for _, y in samples) / count
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0
