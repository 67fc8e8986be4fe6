"""How do numbers become a picture? Lines over time, as SVG, without a library."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 320, 60, 34, 20, 46
COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#555555")


class Series(msgspec.Struct, frozen=True):
    """One line."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    """Each value stays until the next."""


def chart(title: str, series: Sequence[Series], *, x: str, y: str) -> str:
    """A picture of them; values begin at 0."""
    points = [point for one in series for point in one.points]
    low = min((at for at, _ in points), default=0.0)
    high = max((at for at, _ in points), default=1.0)
    top = _round_up(max((value for _, value in points), default=1.0))
    span = (high - low) or 1.0

    def place(at: float, value: float) -> tuple[float, float]:
        across = LEFT + (at - low) / span * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{html.escape(title)}</text>',
    ]
    for step in range(5):
        value = top * step / 4
        _, down = place(low, value)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}" stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{down + 4}" text-anchor="end">{value:.3g}</text>',
        ]
        at = low + span * step / 4
        across, _ = place(at, 0)
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{at:.4g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{html.escape(x)}</text>')
    parts.append(f'<text x="8" y="{TOP - 6}">{html.escape(y)}</text>')
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{across},{down}" for across, down in _placed(one, place))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
        key = LEFT + 150 * number
        parts.append(f'<line x1="{key}" x2="{key + 18}" y1="{HEIGHT - 12}" y2="{HEIGHT - 12}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{key + 24}" y="{HEIGHT - 8}">{html.escape(one.name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _placed(one: Series, place: object) -> Iterator[tuple[float, float]]:
    assert callable(place)  # noqa: S101  the chart's own
    last: float | None = None
    for at, value in one.points:
        if one.steps and last is not None:
            yield place(at, last)
        yield place(at, value)
        last = value


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 2, 2.5, 4, 5, 8, 10, 20) if unit * step >= value)
