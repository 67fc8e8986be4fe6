"""How long does a loop keep everything else waiting, and how long does a match take meanwhile?"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 0.001


class Watch:
    """Wakes every millisecond, and matches a prompt if it has any."""

    def __init__(self, match: Callable[[list[int]], object]) -> None:
        self.prompts: list[list[int]] = []
        self._match = match
        self._matches: list[float] = []
        self._match_walls: list[float] = []
        self._answers: list[float] = []
        self._turns: list[float] = []
        self._late_s = 0.0

    async def run(self) -> None:
        """Ends only by cancellation."""
        loop = asyncio.get_running_loop()
        number = 0
        while True:
            due, spent = loop.time() + PERIOD_S, time.thread_time()
            await asyncio.sleep(PERIOD_S)
            late_s = max(0.0, loop.time() - due)
            self._turns.append(time.thread_time() - spent)
            self._late_s = max(self._late_s, late_s)
            if self.prompts:
                number += 1
                prompt = [key + 1 - 1 for key in self.prompts[number % len(self.prompts)]]  # objects of its own
                started, spent = time.perf_counter(), time.thread_time()
                self._match(prompt)
                self._matches.append(time.thread_time() - spent)
                self._match_walls.append(time.perf_counter() - started)
                self._answers.append(late_s + self._match_walls[-1])

    def take(self) -> dict[str, float]:
        """What was seen since the last time.

        `match_…`: processor time; `match_wall_…`: by the clock, whoever had the processor; `answer_…`: from when a match is wanted, the loop
        being at something else, to its end, by the clock. `turn_…`: processor time of the loop's thread between two wakings, so at least what
        it did without a break; `late_ms`: the longest wait for a waking, by the clock.
        """
        seen = {"late_ms": self._late_s * 1e3}
        self._late_s = 0.0
        for name, values in (
            ("match", self._matches),
            ("match_wall", self._match_walls),
            ("answer", self._answers),
            ("turn", self._turns),
        ):
            if values:
                values.sort()
                seen |= {f"{name}_p50_us": _at(values, 0.5), f"{name}_p99_us": _at(values, 0.99), f"{name}_ms": values[-1] * 1e3}
                values.clear()
        return seen


def _at(ordered: list[float], share: float) -> float:
    """Microseconds."""
    return ordered[int(share * len(ordered))] * 1e6


def process_s() -> float:
    """Processor seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
