"""What will be asked for soon? One number's course, carried on.

A forecaster is told values with their times and says what to expect at a later one. Its fields are all it knows, so that a planner that
starts again can go on with them.

    >>> rising = Holt()
    >>> for minute in range(30):
    ...     rising.observe(60.0 * minute, 10.0 + minute)
    >>> round(rising.predict(60.0 * 35))
    45

Times may be uneven: an interval without data is no value, and no reason to forget.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, Protocol

import msgspec

Predictor = Literal["constant", "moving-average", "holt", "daily", "weekly", "kalman", "arima"]

DAY_S: Final = 86_400.0
WEEK_S: Final = 7 * DAY_S
SEASON_BIN_S: Final = 900.0
UNIT_S: Final = 60.0
"""What trends are per."""
REACH: Final = 20
"""A trend is believed for so many units at most: no line goes on for ever."""


class Forecaster(Protocol):
    """One way of going on."""

    def observe(self, at: float, value: float) -> None:
        """It was `value` at `at`; times rise."""
        ...

    def predict(self, at: float) -> float:
        """What to expect then; never negative, 0 before anything was seen."""
        ...


class Constant(msgspec.Struct, tag="constant"):
    """It stays as it was last."""

    value: float = 0.0

    def observe(self, at: float, value: float) -> None:  # noqa: ARG002  it has no use for times
        """See `Forecaster`."""
        self.value = value

    def predict(self, at: float) -> float:  # noqa: ARG002
        """See `Forecaster`."""
        return self.value


class MovingAverage(msgspec.Struct, tag="moving-average"):
    """It returns to the mean of the last few."""

    size: int = 5
    values: list[float] = []

    def observe(self, at: float, value: float) -> None:  # noqa: ARG002
        """See `Forecaster`."""
        self.values = [*self.values[-self.size + 1 :], value]

    def predict(self, at: float) -> float:  # noqa: ARG002
        """See `Forecaster`."""
        return sum(self.values) / len(self.values) if self.values else 0.0


class Holt(msgspec.Struct, tag="holt"):
    """Holt's linear trend: a level and a slope, both smoothed."""

    level_share: float = 0.5
    """How much of a new value goes into the level, after a unit of time."""
    trend_share: float = 0.2
    level: float = 0.0
    trend: float = 0.0
    """Per `UNIT_S`."""
    at: float | None = None
    trended: bool = False

    def observe(self, at: float, value: float) -> None:
        """See `Forecaster`."""
        if self.at is None:
            self.level, self.at = value, at
            return
        units = max(1e-6, (at - self.at) / UNIT_S)
        expected = self.level + self.trend * units
        level = expected + _share(self.level_share, units) * (value - expected)
        slope = (level - self.level) / units
        share = _share(self.trend_share, units)
        self.trend, self.trended = (self.trend + share * (slope - self.trend) if self.trended else share * slope), True
        self.level, self.at = level, at

    def predict(self, at: float) -> float:
        """See `Forecaster`."""
        return 0.0 if self.at is None else max(0.0, self.level + self.trend * _reach(at - self.at))


class Kalman(msgspec.Struct, tag="kalman"):
    """A Kalman filter over a level and its slope, both of which wander; how noisy values are is learned from its own surprises."""

    level_noise: float = 0.02
    trend_noise: float = 0.002
    """Variances per unit of time, as shares of the noise of values."""
    noise: float | None = None
    """Variance of a value around the level; None until two have been seen."""
    level: float = 0.0
    trend: float = 0.0
    p_level: float = 1.0
    p_both: float = 0.0
    p_trend: float = 1.0
    at: float | None = None

    def observe(self, at: float, value: float) -> None:
        """See `Forecaster`."""
        if self.at is None:
            self.level, self.at = value, at
            return
        units = max(1e-6, (at - self.at) / UNIT_S)
        level = self.level + self.trend * units
        surprise = value - level
        if self.noise is None:
            self.noise = max(1e-9, surprise**2, (0.1 * value) ** 2)
            self.p_level = self.p_trend = self.noise
        noise = max(self.noise, 1e-9)
        p_level = self.p_level + units * (2 * self.p_both + units * self.p_trend) + self.level_noise * noise * units
        p_both = self.p_both + units * self.p_trend
        p_trend = self.p_trend + self.trend_noise * noise * units
        seen = p_level + noise
        gain_level, gain_trend = p_level / seen, p_both / seen
        self.level, self.trend, self.at = level + gain_level * surprise, self.trend + gain_trend * surprise, at
        self.p_level, self.p_both, self.p_trend = (1 - gain_level) * p_level, (1 - gain_level) * p_both, p_trend - gain_trend * p_both
        self.noise = max(1e-9, noise + 0.05 * (surprise**2 * noise / seen - noise))

    def predict(self, at: float) -> float:
        """See `Forecaster`."""
        return 0.0 if self.at is None else max(0.0, self.level + self.trend * _reach(at - self.at))


class Seasonal(msgspec.Struct, tag="seasonal"):
    """What it was at this time of the day or week, as high as it has been of late; Holt's trend until a whole period has been seen.

    A time of the period has an index, its share of the period's mean, and the level is what those shares are of.
    """

    period_s: float
    season_share: float = 0.3
    """How much a new period changes the index of a time."""
    level_share: float = 0.1
    totals: dict[int, tuple[int, float, int]] = {}
    """By bin of the period: of which period the last values were, their sum and their number."""
    indices: dict[int, float] = {}
    """By bin: what is usual then."""
    level: float = 1.0
    """Of late, as a share of what is usual."""
    first: float | None = None
    at: float | None = None
    short: Holt = msgspec.field(default_factory=Holt)

    def observe(self, at: float, value: float) -> None:
        """See `Forecaster`."""
        self.first = at if self.first is None else self.first
        usual = self._usual(at) if self._whole(at) else None
        if usual is not None and usual > 0:
            units = 1.0 if self.at is None else max(1e-6, (at - self.at) / UNIT_S)
            self.level += _share(self.level_share, units) * (min(value / usual, 10.0) - self.level)
        self._note(at, value)
        self.short.observe(at, value)
        self.at = at

    def predict(self, at: float) -> float:
        """See `Forecaster`."""
        usual = self._usual(at) if self.at is not None and self._whole(self.at) else None
        return self.short.predict(at) if usual is None else max(0.0, usual * self.level)

    def _whole(self, at: float) -> bool:
        return self.first is not None and at - self.first >= self.period_s

    def _note(self, at: float, value: float) -> None:
        bin_, period = int(at % self.period_s // SEASON_BIN_S), int(at // self.period_s)
        of, total, count = self.totals.get(bin_, (period, 0.0, 0))
        if of != period:
            mean, usual = total / count, self.indices.get(bin_)
            self.indices[bin_] = mean if usual is None else usual + self.season_share * (mean - usual)
            total, count = 0.0, 0
        self.totals[bin_] = (period, total + value, count + 1)

    def _usual(self, at: float) -> float | None:
        """Between the middles of two bins, what lies between."""
        place = (at % self.period_s) / SEASON_BIN_S - 0.5
        left = math.floor(place)
        bins = round(self.period_s / SEASON_BIN_S)
        values = [self._of_bin(bin_ % bins) for bin_ in (left, left + 1)]
        if values[0] is None or values[1] is None:
            return values[0] if values[1] is None else values[1]
        return values[0] + (place - left) * (values[1] - values[0])

    def _of_bin(self, bin_: int) -> float | None:
        if bin_ in self.indices:
            return self.indices[bin_]
        _, total, count = self.totals.get(bin_, (0, 0.0, 0))
        return total / count if count else None


class Arima(msgspec.Struct, tag="arima"):
    """AutoARIMA of `statsforecast` (an extra), over the last values; they are taken to be evenly spaced."""

    size: int = 240
    least: int = 10
    """Before so many values, the last one stands."""
    times: list[float] = []
    values: list[float] = []
    ahead: list[float] = []
    """What is expected at each step from now on, as far as somebody has asked: to fit a model takes up to a second."""

    def observe(self, at: float, value: float) -> None:
        """See `Forecaster`."""
        self.times = [*self.times[-self.size + 1 :], at]
        self.values = [*self.values[-self.size + 1 :], value]
        self.ahead = []

    def predict(self, at: float) -> float:
        """See `Forecaster`."""
        if len(self.values) < self.least:
            return self.values[-1] if self.values else 0.0
        spacing = (self.times[-1] - self.times[0]) / (len(self.times) - 1)
        steps = max(1, min(self.size, round((at - self.times[-1]) / spacing)))
        if len(self.ahead) < steps:
            self.ahead = auto_arima(self.values, max(steps, REACH))
        return max(0.0, self.ahead[steps - 1])


AnyForecaster = Constant | MovingAverage | Holt | Kalman | Seasonal | Arima


class PredictorMissing(Exception):
    """The predictor asked for needs a package that is not installed; the message says how to get it."""


def forecaster(name: Predictor) -> AnyForecaster:
    """A fresh one. Raises PredictorMissing for `arima` without its extra."""
    match name:
        case "constant":
            return Constant()
        case "moving-average":
            return MovingAverage()
        case "holt":
            return Holt()
        case "daily":
            return Seasonal(DAY_S)
        case "weekly":
            return Seasonal(WEEK_S)
        case "kalman":
            return Kalman()
        case "arima":
            _model()
            return Arima()


def alike(one: AnyForecaster, other: AnyForecaster) -> bool:
    """Whether both are the same predictor, whatever they have seen."""
    periods = (found.period_s if isinstance(found, Seasonal) else None for found in (one, other))
    return type(one) is type(other) and len(set(periods)) == 1


def auto_arima(values: list[float], steps: int) -> list[float]:
    """The `steps` values after these. Raises PredictorMissing."""
    import numpy as np  # noqa: PLC0415  it comes with the extra

    model = _model()(season_length=1)
    return [float(value) for value in model.forecast(np.asarray(values), h=steps)["mean"]]


def _model() -> Any:  # noqa: ANN401  it ships no types
    try:
        from statsforecast.models import AutoARIMA  # noqa: PLC0415  half a second, and an extra
    except ImportError:
        raise PredictorMissing("the arima predictor needs statsforecast: pip install 'commutator[arima]'") from None
    return AutoARIMA


def _share(share: float, units: float) -> float:
    """What a share per unit of time is after `units`."""
    return 1 - (1 - share) ** units if share < 1 else 1.0


def _reach(seconds: float) -> float:
    """How many units a trend is followed."""
    return min(seconds / UNIT_S, REACH)
