"""What has an engine done by a given time? The simulator's scheduler, whose steps last as long as its timing says, and no longer.

    submit ──▶ [ step ][ step ][ alike alike alike alike … ][ step ] ──▶ gained tokens, changed blocks
               t0      t1      t2                           t3

Whoever drives it asks when it is `due`, and has it `advance` then; nothing happens in between. Steps that only decode are alike until a
sequence ends or needs a block: they are one *run*, which a submission cuts short after the step that is under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from engines.simulator.cache import BlockCache, Change
from engines.simulator.scheduler import Limits, Scheduler, Step
from engines.simulator.sequences import Sequence
from engines.simulator.timing import Timing


class Pace(msgspec.Struct, frozen=True):
    """So many steps of one run, one after another."""

    steps: int
    sequences: int
    """How many gained a token in each, other than their first."""
    seconds: float
    """Of all of them."""


class VirtualEngine:
    """One engine; its time is that of whoever drives it, in seconds from any beginning."""

    def __init__(
        self, timing: Timing, limits: Limits, cache: BlockCache, *, paced: Callable[[Pace], None] | None = None, prefix_caching: bool = True
    ) -> None:
        """`paced` is told how fast tokens came, after the first ones."""
        self.scheduler = Scheduler(cache, timing, limits, prefix_caching=prefix_caching)
        self.due = math.inf
        """When something will have happened; infinite while there is nothing to do."""
        self.busy_s = 0.0
        """How long it has computed, so far."""
        self._timing = timing
        self._paced = paced
        self._step: Step | None = None
        self._began = 0.0
        self._run = 0
        """How many steps like it are done at `due`."""
        self._growth_s = 0.0

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence at `now`, which is not later than `due`."""
        self.scheduler.submit(sequence)
        self.nudge(now)

    def abort(self, sequence: Sequence, now: float) -> None:
        """Forget a sequence at once."""
        self.settle(now)
        self.scheduler.abort(sequence)
        self.nudge(now)

    def nudge(self, now: float) -> None:
        """Something is new: look at it as soon as the step under way is over, or at once if none is."""
        if self._step is None:
            self._plan(now)
        elif self._run > 1:
            self._run = min(self._run, self._done_by(now) + 1)
            self.due = self._began + self._seconds(self._run)

    def settle(self, now: float) -> None:
        """Have done the steps of a run that are over at `now`."""
        if self._step is not None and self._run > 1 and (done := min(self._done_by(now), self._run - 1)):
            self._skip(self._step, done)

    def advance(self) -> list[tuple[Sequence, int]]:
        """What is due is done: the sequences that gained a token. Blocks that changed are in `take_changes`."""
        step, now = self._step, self.due
        if step is None:
            return []
        if self._run > 1:
            self._skip(step, self._run - 1)
        self.busy_s += now - self._began
        if self._paced is not None and step.decoding:
            self._paced(Pace(1, step.decoding, now - self._began))
        gained = self.scheduler.complete(step)
        self._plan(now)
        return gained

    def take_changes(self) -> list[Change]:
        """What has changed in the cache since the last call."""
        return self.scheduler.cache.take_changes()

    def _plan(self, now: float) -> None:
        step = self._step = self.scheduler.plan()
        self._began = now
        if step is None:
            self.due = math.inf
            return
        self._run = self.scheduler.alike(step)
        self._growth_s = self._timing.growth_s(step.decoding)
        self.due = now + (step.duration_s if self._run == 1 else self._seconds(self._run))

    def _skip(self, step: Step, times: int) -> None:
        """Do the first steps of the run."""
        seconds = self._seconds(times)
        self.scheduler.skip(step, times)
        if self._paced is not None:
            self._paced(Pace(times, step.decoding, seconds))
        self.busy_s += seconds
        self._began += seconds
        self._run -= times
        self._step = msgspec.structs.replace(step, duration_s=step.duration_s + times * self._growth_s)

    def _seconds(self, steps: int) -> float:
        """How long so many steps of the run take: each is longer than the one before by the same."""
        first = 0.0 if self._step is None else self._step.duration_s
        return steps * first + self._growth_s * (steps * (steps - 1) / 2)

    def _done_by(self, now: float) -> int:
        """How many steps of the run are over at `now`."""
        first, growth, passed = 0.0 if self._step is None else self._step.duration_s, self._growth_s, now - self._began
        if growth > 0:
            slope = first - growth / 2
            done = int((math.sqrt(slope * slope + 2 * growth * passed) - slope) / growth)
        else:
            done = int(passed / first) if first else self._run
        while done > 0 and self._seconds(done) > passed:  # what rounding made of it
            done -= 1
        while done < self._run and self._seconds(done + 1) <= passed:
            done += 1
        return min(done, self._run)
