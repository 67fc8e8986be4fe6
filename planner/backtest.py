"""How well would each predictor have foretold a trace? Told its arrivals bin by bin, each says what the next look ahead should have known."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import msgspec

from planner.forecast import Forecaster, Predictor, PredictorMissing, forecaster
from planner.plot import Series, chart
from planner.settings import PlanSettings

ALL: Final[tuple[Predictor, ...]] = get_args(Predictor)
LEAST_BINS: Final = 4


class BadTrace(Exception):
    """A trace cannot be used; the message says why."""


class Score(msgspec.Struct, frozen=True):
    """One predictor's record."""

    predictor: str
    mean_error: float
    """Mean of |forecast − actual| as a share of the mean arrivals."""
    short: float
    """Mean shortfall: where too little was expected, as such a share. It is what clients notice."""
    forecasts: tuple[tuple[float, float], ...]
    """For which time, and how much."""


class _Line(msgspec.Struct):
    timestamp: float


async def backtest(settings: PlanSettings) -> None:
    """Print the table, and write the plot where that is asked for. Raises BadTrace."""
    assert settings.backtest is not None  # noqa: S101  its caller's condition
    arrivals = read_trace(await asyncio.to_thread(_read, settings.backtest))
    rules = settings.rules
    ahead_s = settings.limits(settings.roles[0]).startup_s
    bins = binned(arrivals, rules.bin_s)
    if len(bins) < LEAST_BINS:
        raise BadTrace(f"{settings.backtest} covers {len(bins)} bins of {rules.bin_s:g} s; at least {LEAST_BINS} are needed")
    scores = scored(bins, rules.bin_s, ahead_s)
    sys.stdout.write(table(scores, bins, rules.bin_s, ahead_s, settings.predictor))
    if settings.backtest_plot is not None:
        text = plot(scores, bins, rules.bin_s, settings.predictor)
        await asyncio.to_thread(Path(settings.backtest_plot).write_text, text, encoding="utf-8")


def read_trace(text: bytes) -> list[float]:
    """Seconds at which requests came. Raises BadTrace."""
    try:
        found = [msgspec.json.decode(line, type=_Line).timestamp / 1e3 for line in text.splitlines() if line.strip()]
    except msgspec.MsgspecError as error:
        raise BadTrace(f"a line of the trace is not an object with `timestamp`: {error}") from error
    if not found:
        raise BadTrace("the trace is empty")
    return sorted(found)


def binned(arrivals: Sequence[float], bin_s: float) -> list[float]:
    """Requests a second in each bin; the last, which is not whole, left out."""
    first = arrivals[0]
    counts = [0] * (int((arrivals[-1] - first) / bin_s) + 1)
    for at in arrivals:
        counts[int((at - first) / bin_s)] += 1
    return [count / bin_s for count in counts[:-1]]


def scored(bins: Sequence[float], bin_s: float, ahead_s: float) -> list[Score]:
    """Every predictor that can be had, the best first."""
    found = []
    for name in ALL:
        try:
            found.append(_score(name, forecaster(name), bins, bin_s, ahead_s))
        except PredictorMissing:
            continue
    return sorted(found, key=lambda score: score.mean_error)


def _score(name: str, one: Forecaster, bins: Sequence[float], bin_s: float, ahead_s: float) -> Score:
    ahead = max(1, round(ahead_s / bin_s))
    forecasts = []
    for index, value in enumerate(bins):
        one.observe((index + 0.5) * bin_s, value)
        if index + ahead < len(bins):
            forecasts.append((index + ahead, one.predict((index + ahead + 0.5) * bin_s)))
    mean = sum(bins) / len(bins) or 1.0
    errors = [forecast - bins[index] for index, forecast in forecasts]
    count = max(1, len(errors))
    return Score(
        name,
        sum(map(abs, errors)) / count / mean,
        sum(max(0.0, -error) for error in errors) / count / mean,
        tuple(((index + 0.5) * bin_s, forecast) for index, forecast in forecasts),
    )


def table(scores: Sequence[Score], bins: Sequence[float], bin_s: float, ahead_s: float, chosen: str) -> str:
    """For a terminal."""
    spread = math.sqrt(sum((value - sum(bins) / len(bins)) ** 2 for value in bins) / len(bins))
    lines = [
        f"{len(bins)} bins of {bin_s:g} s, {sum(bins) / len(bins):.3g} requests/s (±{spread:.2g}); forecasts {ahead_s:g} s ahead",
        "",
        f"{'predictor':<18}{'error':>8}{'short':>8}",
        *(
            f"{score.predictor:<18}{score.mean_error:>8.1%}{score.short:>8.1%}{'  (chosen)' if score.predictor == chosen else ''}"
            for score in scores
        ),
        "",
        "error: mean of |forecast − actual|; short: mean of what was not expected; both as a share of the mean arrivals.",
    ]
    return "\n".join(lines) + "\n"


def plot(scores: Sequence[Score], bins: Sequence[float], bin_s: float, chosen: str) -> str:
    """What came, and what the chosen predictor and the best one said."""
    actual = Series("actual", [((index + 0.5) * bin_s / 60, value) for index, value in enumerate(bins)])
    wanted = {chosen, scores[0].predictor}
    told = [Series(score.predictor, [(at / 60, value) for at, value in score.forecasts]) for score in scores if score.predictor in wanted]
    return chart("Arrivals, and as they were expected", [actual, *told], x="minutes", y="requests/s")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from error
