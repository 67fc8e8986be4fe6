"""What does `commutator replay` do? It reads the traffic, runs every policy at every load, and says how it went."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

from discovery.config import ConfigError
from engines.links import parse_link
from engines.types import Role
from router.admission import QueueLimits
from router.pairing import DisaggRules
from router.replay.engines import Hardware
from router.replay.generators import GENERATORS, generate
from router.replay.measure import Run, Targets
from router.replay.plots import PLOTS, page, svg
from router.replay.replay import Failure, Member, Replay, Setting
from router.replay.report import as_json, as_text
from router.replay.scaling import Scaler
from router.replay.settings import MAX_SEEDS, ReplaySettings
from router.replay.traces import read_mooncake, read_table
from router.replay.workload import Workload, timed
from router.scheduling.table import load_policy

GENERATED: Final = 4000
SATURATED: Final = 3.0
"""A load at which prompts take so many times as long as they would on an idle fleet: small differences in time make large ones then."""

NewScaler = Callable[[], Scaler]
"""Each run has its own."""


async def run(settings: ReplaySettings, scaler: NewScaler | None = None) -> None:
    """Run them all and print the table. Raises BadTrace, OSError and ConfigError."""
    await asyncio.to_thread(_prepare, settings)
    progress = Progress(sys.stderr)
    runs: list[Run] = []
    for speed in settings.speeds:
        seeds = settings.seeds or 1
        seed = 0
        while seed < seeds:
            traffic = await asyncio.to_thread(traffic_of, settings, seed)
            here = [await _run(settings, traffic, policy, speed, seed, progress, scaler) for policy in settings.names]
            runs += here
            if settings.seeds is None and settings.jitter and max(one.slowdown for one in here) >= SATURATED:
                seeds = MAX_SEEDS
            seed += 1
    progress.over()
    await asyncio.to_thread(_write, settings, runs)


def _prepare(settings: ReplaySettings) -> None:
    """What would fail when all has been played fails now: policies load, and what comes of it can be written. Raises ConfigError."""
    for policy in settings.names:
        load_policy(policy)
    file, folder = settings.json, settings.page
    try:
        if file is not None and file != "-":
            Path(file).open("ab").close()
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from None


async def _run(  # noqa: PLR0913, PLR0917  a run is told apart by all of these
    settings: ReplaySettings, traffic: Workload, policy: str, speed: float, seed: int, progress: Progress, scaler: NewScaler | None
) -> Run:
    name, made = await asyncio.to_thread(load_policy, policy)  # it may import a user's module
    replay = Replay(setting_of(settings), made, name, seed=seed, scaler=None if scaler is None else scaler())
    jitter = random.Random(seed) if settings.jitter else None
    for came in replay.run(timed(traffic, speed, jitter=jitter)):
        progress.show(f"{name}, load {speed:g}, seed {seed}", came / len(traffic.arrivals))
        await asyncio.sleep(0)  # for Ctrl-C
    targets = Targets(settings.ttft_target_s, settings.itl_target_ms / 1e3)
    return replay.tally.run(traffic.name, name, speed, seed, targets, settings.engine.built())


def traffic_of(settings: ReplaySettings, seed: int) -> Workload:
    """What is replayed. Raises BadTrace and OSError."""
    trace, size = settings.trace or "", settings.blocks_of
    if trace in GENERATORS:
        return generate(trace, settings.requests or GENERATED, seed=seed, block_size=size)
    path = Path(trace)
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as rows:
            return read_table(rows, path.name, size).first(settings.requests)
    with path.open("rb") as lines:
        return read_mooncake(lines, path.name, size).first(settings.requests)


def setting_of(settings: ReplaySettings) -> Setting:
    """What every run is of."""
    slower = settings.engine.slower()
    speeds = [1.0] * (settings.engines - len(slower)) + slower
    prefill = settings.prefill_engines
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * (settings.engines - prefill) if prefill else [Role.AGGREGATED] * settings.engines
    return Setting(
        Hardware(
            settings.engine.built(),
            settings.blocks_of,
            settings.kv_events,
            settings.event_delay_ms / 1e3,
            kv_bytes_per_token=settings.kv_bytes_per_token,
            link_bytes_per_s=parse_link(settings.link).bytes_per_s,
        ),
        tuple(Member(role, speed) for role, speed in zip(roles, speeds, strict=True)),
        tuple(Failure(at, engine, back) for engine, at, back in settings.failures),
        settings.max_active_requests,
        QueueLimits(settings.max_waiting, settings.max_wait_s),
        DisaggRules(settings.disagg),
        settings.router_temperature,
    )


class Progress:
    """A bar on a terminal; nothing elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shows = out.isatty()
        self._width = 30
        self._last = ""

    def show(self, what: str, share: float) -> None:
        """So much of this run has been done."""
        if not self._shows:
            return
        full = int(self._width * share)
        line = f"{'█' * full}{'·' * (self._width - full)} {share:4.0%} {what}"
        if line != self._last:
            self._out.write(f"\r\x1b[K{line}")
            self._out.flush()
            self._last = line

    def over(self) -> None:
        """Leave the line to others."""
        if self._shows:
            self._out.write("\r\x1b[K")
            self._out.flush()


def _write(settings: ReplaySettings, runs: list[Run]) -> None:
    sys.stdout.write(as_json(runs).decode() if settings.json == "-" else as_text(runs))
    if settings.json is not None and settings.json != "-":
        Path(settings.json).write_bytes(as_json(runs))
    if settings.page is not None:
        folder = Path(settings.page)
        folder.mkdir(parents=True, exist_ok=True)
        for plot in PLOTS:
            (folder / f"{plot.name}.svg").write_text(svg(plot, runs), encoding="utf-8")
        title = f"{runs[0].workload} on {settings.engines} engines"
        (folder / "index.html").write_text(page(runs, title), encoding="utf-8")
