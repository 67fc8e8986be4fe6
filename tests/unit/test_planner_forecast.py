"""Each forecaster against courses whose continuation is known."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import random
import sys
import types
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from planner.forecast import (
    DAY_S,
    AnyForecaster,
    Constant,
    Forecaster,
    Holt,
    Kalman,
    MovingAverage,
    PredictorMissing,
    Seasonal,
    forecaster,
)

ALL: list[Callable[[], AnyForecaster]] = [Constant, MovingAverage, Holt, Kalman, lambda: Seasonal(DAY_S)]


def told(one: Forecaster, course: Callable[[float], float], until: float, every: float = 60.0) -> None:
    at = 0.0
    while at < until:
        one.observe(at, course(at))
        at += every


@pytest.mark.parametrize("make", ALL)
def test_what_stays_the_same_is_expected_to(make: Callable[[], AnyForecaster]) -> None:
    one = make()
    told(one, lambda _: 7.0, 3600.0)
    assert one.predict(3600.0 + 300.0) == pytest.approx(7.0, rel=0.01)


@pytest.mark.parametrize("make", ALL)
def test_before_anything_was_seen_nothing_is_expected_and_never_less(make: Callable[[], AnyForecaster]) -> None:
    one = make()
    assert one.predict(0.0) == 0.0
    told(one, lambda at: max(0.0, 60.0 - at / 10), 600.0)
    assert one.predict(5000.0) >= 0.0


@pytest.mark.parametrize("make", [Holt, Kalman])
def test_a_trend_is_followed_though_values_are_noisy_and_some_are_missing(make: Callable[[], AnyForecaster]) -> None:
    draw, one = random.Random(5), make()
    for minute in range(60):
        if minute % 7:
            one.observe(60.0 * minute, 20 + minute + draw.gauss(0, 1))
    assert one.predict(60.0 * 65) == pytest.approx(85, rel=0.1)


def test_a_trend_is_not_followed_for_ever() -> None:
    one = Holt()
    told(one, lambda at: at / 60, 1800.0)
    assert one.predict(1800.0 + 7 * DAY_S) < 60


def test_moving_average_forgets() -> None:
    one = MovingAverage(size=3)
    for at, value in enumerate((100.0, 1.0, 2.0, 3.0)):
        one.observe(at, value)
    assert one.predict(10.0) == 2.0


def test_a_day_is_expected_to_be_like_the_days_before_and_as_busy_as_this_one() -> None:
    def course(at: float) -> float:
        busier = 1.5 if at >= 3 * DAY_S else 1.0
        return busier * (10 - 8 * math.cos(2 * math.pi * at / DAY_S))

    one = Seasonal(DAY_S)
    told(one, course, 3.3 * DAY_S, every=300.0)
    for ahead in (0.05, 0.1, 0.2):
        at = (3.3 + ahead) * DAY_S
        assert one.predict(at) == pytest.approx(course(at), rel=0.1)
    trend = Holt()
    told(trend, course, 3.3 * DAY_S, every=300.0)
    late = 3.5 * DAY_S
    assert abs(one.predict(late) - course(late)) < abs(trend.predict(late) - course(late))


@pytest.mark.parametrize("name", ["constant", "moving-average", "holt", "daily", "weekly", "kalman"])
def test_what_a_forecaster_knows_can_be_kept(name: str) -> None:
    one = forecaster(name)  # type: ignore[arg-type]
    told(one, lambda at: 5 + at / 1000, 2 * DAY_S, every=600.0)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=AnyForecaster)
    assert kept == one
    assert kept.predict(2.1 * DAY_S) == one.predict(2.1 * DAY_S)


class AutoARIMA:
    """Stands in for that of `statsforecast` 2.1, which is half a gigabyte with what it needs: its signatures, and a line through the last two."""

    fits = 0

    def __init__(self, d: int | None = None, *, season_length: int = 1) -> None:
        """Two of its many parameters."""
        self.season_length = season_length

    def forecast(
        self,
        y: Any,  # noqa: ANN401  a numpy array
        h: int,
        X: Any = None,  # noqa: ANN401, N803
        X_future: Any = None,  # noqa: ANN401, N803
        level: list[int] | None = None,
        fitted: bool = False,
    ) -> dict[str, Any]:
        assert not isinstance(y, list), "it takes an array"
        AutoARIMA.fits += 1
        return {"mean": [y[-1] + (step + 1) * (y[-1] - y[-2]) for step in range(h)]}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    models = types.ModuleType("statsforecast.models")
    models.AutoARIMA = AutoARIMA  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "statsforecast", types.ModuleType("statsforecast"))
    monkeypatch.setitem(sys.modules, "statsforecast.models", models)
    if importlib.util.find_spec("numpy") is None:
        numpy = types.ModuleType("numpy")
        numpy.asarray = functools.partial(array, "d")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "numpy", numpy)
    monkeypatch.setattr(AutoARIMA, "fits", 0)


@pytest.mark.usefixtures("stand_in")
def test_arima_goes_on_step_by_step_and_fits_once_for_each_value() -> None:
    one = forecaster("arima")
    assert one.predict(0.0) == 0.0
    told(one, lambda at: 10.0 + at / 60, 540.0)
    assert one.predict(3600.0) == 18.0, "of so few values, the last one stands"
    assert AutoARIMA.fits == 0
    told_until = 30 * 60.0
    told(one := forecaster("arima"), lambda at: 10.0 + at / 60, told_until)
    last = told_until - 60.0
    assert [one.predict(last + 60.0 * step) for step in range(6)] == [40.0, 40.0, 41.0, 42.0, 43.0, 44.0]
    assert AutoARIMA.fits == 1
    assert one.predict(last + 60.0 * 50) == 89.0
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=AnyForecaster)
    assert kept == one
    kept.observe(told_until, 0.0)
    assert kept.predict(told_until + 60.0) == 0.0, "never less than nothing"


needs_statsforecast = pytest.mark.skipif(
    importlib.util.find_spec("statsforecast") is None, reason="statsforecast is not here: pip install 'commutator[arima]'"
)


@needs_statsforecast
def test_the_stand_in_takes_what_statsforecast_takes() -> None:
    from statsforecast.models import AutoARIMA as Real  # noqa: PLC0415

    theirs, ours = (inspect.signature(one.forecast).parameters.values() for one in (Real, AutoARIMA))
    assert [(one.name, one.kind, one.default) for one in ours] == [(one.name, one.kind, one.default) for one in theirs]
    assert inspect.signature(Real).parameters["season_length"].default == 1


@needs_statsforecast
def test_arima_with_its_extra_follows_a_trend_and_what_stays() -> None:
    for slope in (0.0, 1.0):
        one = forecaster("arima")
        told(one, lambda at, slope=slope: 7.0 + slope * at / 60, 3600.0)  # type: ignore[misc]
        assert one.predict(3540.0 + 300.0) == pytest.approx(7.0 + 64 * slope, rel=0.01)


def test_arima_without_its_extra_says_how_to_get_it() -> None:
    if importlib.util.find_spec("statsforecast") is not None:
        pytest.skip("statsforecast is installed")
    with pytest.raises(PredictorMissing, match=r"pip install 'commutator\[arima\]'"):
        forecaster("arima")
