"""Does the planner do better than a fixed fleet of the same GPU-hours, and than Kubernetes' rule? On bursts, ramps, a day, and without metrics.

python -m planner.trial.compare [FOLDER]      a table; with a folder, a plot of each scenario as SVG too
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from planner.plot import Series, chart
from planner.policy import Policy
from planner.rules import Rules
from planner.trial.fleet import Outcome, Scaler, Setting, Trial
from planner.trial.replica import Speed
from planner.trial.scalers import Clairvoyant, Fixed, Hpa, Planned
from planner.trial.scenarios import Shape, burst, day, drawn, ramps
from planner.types import Pool, Slo

SPEED: Final = Speed(prefill_tokens_per_s=4000, decode_step_s=0.02, decode_stream_s=0.0008)
SLO: Final = Slo(4.0, 0.1)
ONE: Final = 1.25
"""Requests a second of one replica, within the targets 98 of 100 times: found by trying."""
HPA_TARGETS: Final = (0.5, 0.7, 0.9)
"""Of the requests in flight of a replica that is as full as its targets allow."""
FULL: Final = 20.0
SEED: Final = 7


class Scenario(msgspec.Struct, frozen=True):
    """What comes, and how long a replica takes to start."""

    name: str
    rate: Callable[[float], float]
    most: float
    until: float
    startup_s: float
    blind: tuple[tuple[float, float], ...] = ()


SCENARIOS: Final = (
    Scenario("burst ×10", burst(0.7 * ONE, 10, 600, 1200), 7 * ONE, 3000, 15),
    Scenario("ramps", ramps(0.7 * ONE, 6 * ONE, 1800), 6 * ONE, 3600, 60),
    Scenario("day (in 2 h)", day(0.5 * ONE, 6 * ONE, 7200), 6 * ONE, 7200, 60),
    Scenario("ramps, blind 10 min", ramps(0.7 * ONE, 6 * ONE, 1800), 6 * ONE, 3600, 60, ((600, 1200),)),
)


def tried(scenario: Scenario, scaler: Scaler, begin: int = 1) -> Outcome:
    """One run; the same requests for everybody."""
    setting = Setting((pool_of(scenario),), SPEED, SLO, {"pool": begin}, max_active=64, blind=scenario.blind)
    requests = drawn(scenario.rate, scenario.until, Shape(), random.Random(SEED), scenario.most)
    return Trial(setting, scaler).run(requests, scenario.until)


def pool_of(scenario: Scenario) -> Pool:
    """The one pool."""
    return Pool("pool", max=20, startup_s=scenario.startup_s)


def compared(scenario: Scenario) -> Iterator[tuple[str, Outcome]]:
    """Everybody's run."""
    pool = pool_of(scenario)
    pools = {pool.name: pool}
    planned = tried(scenario, Planned(Policy((pool,), Rules(slo=SLO))))
    yield "planner", planned
    for number in sorted({int(planned.gpu_hours * 3600 / scenario.until), int(planned.gpu_hours * 3600 / scenario.until) + 1}):
        yield f"fixed, {number}", tried(scenario, Fixed({"pool": number}), begin=number)
    for target in HPA_TARGETS:
        yield f"HPA at {target:.0%}", tried(scenario, Hpa(pools, {"pool": target * FULL}))
    yield "clairvoyant", tried(scenario, Clairvoyant(pools, scenario.rate, {"pool": ONE}))


def main() -> None:
    """Print the table."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    out = sys.stdout
    out.write("| scenario | who | attainment | GPU-hours | steps |\n| --- | --- | --- | --- | --- |\n")
    for scenario in SCENARIOS:
        lines = [Series("arrivals, in replicas", [])]
        for who, outcome in compared(scenario):
            steps = len(outcome.changes("pool"))
            out.write(f"| {scenario.name} | {who} | {outcome.attainment:.1%} | {outcome.gpu_hours:.2f} | {steps} |\n")
            out.flush()
            if who in {"planner", "clairvoyant", "HPA at 70%"}:
                lines.append(Series(who, [(point.at / 60, float(point.replicas["pool"])) for point in outcome.points], steps=True))
                lines[0] = Series("arrivals, in replicas", [(point.at / 60, point.rate / ONE) for point in outcome.points])
        if folder is not None:
            name = "".join(letter if letter.isalnum() else "-" for letter in scenario.name.split(",")[0])
            text = chart(f"Replicas: {scenario.name}", lines, x="minutes", y="replicas")
            (folder / f"{name}{'-blind' if scenario.blind else ''}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
