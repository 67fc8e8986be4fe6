"""What has the planner decided of late, and why? For its page, its metrics, and whoever asks on its port."""

from __future__ import annotations

import html
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from discovery.readings import Reading, Readings
from planner.types import Decision, Observation, ReplicaState

if TYPE_CHECKING:
    from planner.policy import Policy

MOST: Final = 200
"""Ticks that are kept; and as many that changed something."""
MAX_GAP_S: Final = 300.0

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>commutator plan</title>
<style>body{{font:14px/1.4 system-ui,sans-serif;margin:2em}}table{{border-collapse:collapse}}
td,th{{padding:.3em .8em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}}.changed{{background:#fff4d6}}
.number{{text-align:right}}</style></head>
<body><h1>Recent decisions</h1><p>{summary}</p><table><tr><th>time</th><th>pool</th><th>was</th><th>is to be</th><th>why</th><th>from</th></tr>
{rows}</table></body></html>
"""


class Entry(msgspec.Struct, frozen=True):
    """One tick, as it is told."""

    at: float
    decision: Decision
    rate: float | None
    """Requests a second; None: nobody told."""
    replicas: dict[str, dict[str, int]]
    """By pool and state."""


class Record:
    """Keeps the last ticks, and those that changed something."""

    def __init__(self, policy: Policy) -> None:
        self.failures = 0
        self.last_failure = ""
        self._policy = policy
        self._recent: deque[Entry] = deque(maxlen=MOST)
        self._changes: deque[Entry] = deque(maxlen=MOST)
        self._ticks = self._held = 0
        self._gpu_s = 0.0
        self._steps: dict[tuple[str, str], int] = {}
        self._registry = CollectorRegistry()
        self._registry.register(Readings(self._readings))

    def decided(self, seen: Observation, decision: Decision) -> None:
        """Take in a tick."""
        self._ticks += 1
        self._held += bool(decision.held)
        replicas = {
            name: {state.value: sum(one.state is state for one in found) for state in ReplicaState} for name, found in seen.replicas.items()
        }
        if self._recent:
            elapsed = min(MAX_GAP_S, max(0.0, seen.at - self._recent[-1].at))
            self._gpu_s += elapsed * sum(len(found) * self._policy.pools[name].gpus for name, found in seen.replicas.items())
        entry = Entry(seen.at, decision, None if seen.traffic is None else seen.traffic.rate, replicas)
        self._recent.append(entry)
        if decision.changes:
            self._changes.append(entry)
            for decided in decision.pools:
                if decided.target != decided.current:
                    step = (decided.pool, "up" if decided.target > decided.current else "down")
                    self._steps[step] = self._steps.get(step, 0) + 1

    def failed(self, error: Exception) -> None:
        """A tick could not do what it should."""
        self.failures += 1
        self.last_failure = str(error) or type(error).__name__

    def as_json(self) -> bytes:
        """What there is to know, for programs: the newest first."""
        return msgspec.json.encode(
            {
                "ticks": self._ticks,
                "held": self._held,
                "failures": self.failures,
                "last_failure": self.last_failure,
                "gpu_hours": self._gpu_s / 3600,
                "changes": list(map(_shown, reversed(self._changes))),
                "recent": list(map(_shown, reversed(self._recent))),
            }
        )

    def as_html(self) -> str:
        """The same for people: what changed something, and the last few ticks."""
        last = list(reversed(self._recent))[:20]
        entries = last + [entry for entry in reversed(self._changes) if not last or entry.at < last[-1].at]
        summary = f"{self._ticks} ticks, {self._held} without data, {self._gpu_s / 3600:.2f} GPU-hours, {self.failures} failures"
        if self.last_failure:
            summary += f"; the last: {self.last_failure}"
        return _PAGE.format(summary=html.escape(summary), rows="\n".join(row for entry in entries for row in _rows(entry)))

    def page(self) -> bytes:
        """The metrics page."""
        return generate_latest(self._registry)

    def _readings(self) -> Iterator[Reading]:
        last = self._recent[-1] if self._recent else None
        decided = () if last is None else last.decision.pools
        yield (
            "planner_replicas_wanted",
            "Replicas that each pool is to have.",
            ("pool",),
            [((one.pool,), float(one.target)) for one in decided],
        )
        there = [] if last is None else [((name, state), float(n)) for name, states in last.replicas.items() for state, n in states.items()]
        yield "planner_replicas", "Replicas that there are, by state.", ("pool", "state"), there
        inputs = [((one.pool, name), value) for one in decided for name, value in one.inputs.items()]
        yield "planner_input", "The numbers that the last decision came from.", ("pool", "name"), inputs
        rate = [((), last.rate)] if last is not None and last.rate is not None else []
        yield "planner_requests_per_second", "Arrivals, as observed; absent without data.", (), rate
        yield "planner_ticks_total", "Ticks.", (), [((), float(self._ticks))]
        yield "planner_held_total", "Ticks that changed nothing for want of data.", (), [((), float(self._held))]
        yield "planner_failures_total", "Ticks, or plans, that failed.", (), [((), float(self.failures))]
        yield "planner_gpu_seconds_total", "GPUs of all replicas, times seconds.", (), [((), self._gpu_s)]
        steps = [(step, float(count)) for step, count in self._steps.items()]
        yield "planner_steps_total", "Decisions to make a pool larger or smaller.", ("pool", "direction"), steps
        known = self._policy.memory
        floors = [((name,), float(floor.replicas)) for name, floor in known.floors.items()]
        yield "planner_floor_replicas", "Least number of replicas, by what is expected to come.", ("pool",), floors
        expected = [((name,), floor.rate) for name, floor in known.floors.items()]
        yield "planner_expected_requests_per_second", "Most arrivals expected until the next look ahead.", ("pool",), expected


def _shown(entry: Entry) -> dict[str, Any]:
    return {"at": entry.at, "requests_per_second": entry.rate, "replicas": entry.replicas, "held": entry.decision.held} | {
        "pools": msgspec.to_builtins(entry.decision.pools)
    }


def _rows(entry: Entry) -> Iterator[str]:
    for decided in entry.decision.pools:
        inputs = ", ".join(f"{name} {value:.4g}" for name, value in decided.inputs.items())
        cells = (f"<time>{entry.at:.0f}</time>", html.escape(decided.pool), decided.current, decided.target)
        changed = " class=changed" if decided.target != decided.current or decided.victims else ""
        rest = (html.escape("; ".join(decided.reasons)), html.escape(inputs))
        yield f"<tr{changed}>" + "".join(f"<td>{cell}</td>" for cell in (*cells, *rest)) + "</tr>"
