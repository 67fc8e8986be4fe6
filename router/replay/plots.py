"""How does it look? Goodput and TTFT against load, a line for each policy, as SVG, and a page that shows them with the table."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from router.replay.measure import Run
from router.replay.report import Group, grouped, rows, ttft

_WIDTH: Final = 640
_HEIGHT: Final = 400
_LEFT: Final = 64
_RIGHT: Final = 16
_TOP: Final = 36
_BOTTOM: Final = 48
_COLOURS: Final = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#e08e0b", "#5b6770", "#00a3a3", "#b05a2c")


class Plot(msgspec.Struct, frozen=True):
    """One figure."""

    name: str
    title: str
    unit: str
    of: Callable[[Run], float]
    logarithmic: bool = False


PLOTS: Final = (
    Plot("goodput", "Requests per second within the targets", "requests/s", lambda run: run.goodput),
    Plot("ttft", "Mean time to first token", "s", ttft, logarithmic=True),
)


class _Scale(msgspec.Struct, frozen=True):
    """Values to pixels, along one axis."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log10(one) if self.logarithmic else one for one in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
            return [tick for tick in every if self.low <= tick <= self.high]
        step = 10 ** math.floor(math.log10((self.high - self.low) or 1))
        step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if (self.high - self.low) / (step * part) <= 8)
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def svg(plot: Plot, runs: Sequence[Run]) -> str:
    """The figure; where there are several seeds, medians, with a bar from the least to the most."""
    groups = grouped(runs)
    policies = list(dict.fromkeys(group.policy for group in groups))
    x, y = _scales(plot, groups)
    drawn = [_frame(plot, x, y)]
    for number, policy in enumerate(policies):
        own = sorted((group for group in groups if group.policy == policy), key=lambda group: group.speed)
        drawn.append(_line(plot, own, x, y, _COLOURS[number % len(_COLOURS)]))
        drawn.append(_legend(policy, number))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>{"".join(drawn)}</svg>\n'
    )


def page(runs: Sequence[Run], title: str) -> str:
    """The figures and the table, as one file that needs no other."""
    head, *body = rows(runs)
    table = _row(head, "th") + "".join(_row(row, "td") for row in body)
    figures = "".join(f"<figure>{svg(plot, runs)}</figure>" for plot in PLOTS)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>body{{font:15px sans-serif;margin:2em;color:#222}}figure{{display:inline-block;"
        "width:min(640px,95vw);margin:0 1em 1em 0}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
        "td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #ddd}.wide{overflow-x:auto}</style>"
        f'<h1>{html.escape(title)}</h1>{figures}<div class="wide"><table>{table}</table></div></html>\n'
    )


def _scales(plot: Plot, groups: Sequence[Group]) -> tuple[_Scale, _Scale]:
    speeds = [group.speed for group in groups]
    values = [value for group in groups for value in group.extremes(plot.of)]
    low = min((value for value in values if value > 0), default=0.1) if plot.logarithmic else 0.0
    high = max(*values, low * 1.1 if plot.logarithmic else 1e-9)
    return (
        _Scale(min(speeds), max(speeds), _LEFT + 12, _WIDTH - _RIGHT - 12),
        _Scale(low, high, _HEIGHT - _BOTTOM, _TOP + 8, plot.logarithmic),
    )


def _frame(plot: Plot, x: _Scale, y: _Scale) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{html.escape(plot.title)} ({plot.unit})</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">load (× the traffic’s own clock)</text>',
    ]
    parts += [f'<text x="{x.at(tick)}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>' for tick in _marks(x)]
    for tick in y.ticks():
        parts.append(f'<path d="M{_LEFT} {y.at(tick)}H{right}" stroke="#eee"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y.at(tick) + 4}" text-anchor="end">{tick:g}</text>')
    return "".join(parts)


def _marks(x: _Scale) -> list[float]:
    return [x.low] if x.high <= x.low else [round(tick, 6) for tick in x.ticks()]


def _line(plot: Plot, groups: Sequence[Group], x: _Scale, y: _Scale, colour: str) -> str:
    points = [(x.at(group.speed), y.at(max(group.median(plot.of), y.low))) for group in groups]
    parts = [f'<polyline points="{" ".join(f"{across},{up}" for across, up in points)}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for group, (across, up) in zip(groups, points, strict=True):
        low, high = (y.at(max(value, y.low)) for value in group.extremes(plot.of))
        told = f"{group.policy}, load {group.speed:g}: {group.median(plot.of):.4g} {plot.unit}"
        parts.append(f'<path d="M{across} {low}V{high}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{across}" cy="{up}" r="3.5" fill="{colour}"><title>{html.escape(told)}</title></circle>')
    return "".join(parts)


def _legend(policy: str, number: int) -> str:
    up, colour = _TOP + 14 + 17 * number, _COLOURS[number % len(_COLOURS)]
    return f'<rect x="{_LEFT + 10}" y="{up - 9}" width="10" height="10" fill="{colour}"/><text x="{_LEFT + 26}" y="{up}">{html.escape(policy)}</text>'


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
