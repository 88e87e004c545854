"""Panels as SVG inside an HTML page: its style has the colours, its script shows the values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from grouper.report.panels import FEW, NICE, Array, Panel, Series

# In units of the drawing, which is scaled to the width that there is.
WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 8, 22
# A curve of more measurements has no dots.
MOST_DOTS = 50
# The part of the width that the curves have.
INNER = (LEFT / WIDTH, 1 - RIGHT / WIDTH)


def chart(panel: Panel, most: int) -> dict[str, Any]:
    """A panel as the page takes it.

    Args:
        panel: what to draw.
        most: points of a curve; neighbouring steps share one where there are more.

    Returns:
        `svg`, the drawing, and `values`, what its script shows on hover.
    """
    series = [one.thinned(most) for one in panel.series]
    tops = [one.smooth for one in series]
    if panel.stacked:
        tops = list(np.cumsum(tops, axis=0))
    scale = _Scale(panel, series, tops)
    if panel.stacked:
        floors = [np.zeros_like(tops[0]), *tops[:-1]]
        drawn = [
            scale.area(one.steps, low, high, f"area {one.color}")
            for one, low, high in zip(series, floors, tops, strict=True)
        ]
    else:
        drawn = [part for one in series for part in _line(scale, one)]
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{scale.grid}{"".join(drawn)}</svg>'
    )
    lines = [
        {
            "name": one.name,
            "color": one.color,
            "steps": one.steps.astype(int).tolist(),
            "values": _short(one.values),
            "bounds": [_short(bound) for bound in one.bounds] if one.bounds else None,
        }
        for one in series
    ]
    span = [float(end) for end in scale.across]
    values = {"phase": panel.phase, "span": span, "lines": lines}
    return {"svg": Markup(svg), "values": values}  # noqa: S704 - numbers and our own names alone


class _Scale:
    """From steps and values to places in the drawing, with the grid that shows them."""

    def __init__(self, panel: Panel, series: Sequence[Series], tops: Sequence[Array]) -> None:
        ends = [values for one in series for values in (one.values, *(one.bounds or ()))]
        if panel.stacked:
            ends = [*tops, np.zeros(1)]
        low, high = (float(f([f(values) for values in ends])) for f in (np.min, np.max))
        low, high = min(low, 0.0), panel.top or high
        high = high if high > low else low + 1.0
        ticks = _ticks(low, high)
        high = max(high, ticks[-1])
        self.up = low, high
        steps = np.concatenate([one.steps for one in series])
        self.across = float(steps.min()), max(float(steps.max()), float(steps.min()) + 1)
        self.grid = "".join(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{tick:.4g}</text>'
            for tick in ticks
            for y in self.y([tick])
        ) + "".join(
            f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{tick:.0f}</text>'
            for tick in dict.fromkeys(map(round, _ticks(*self.across)))
            for x in self.x([tick])
            if LEFT - 1 <= x <= WIDTH - RIGHT + 1
        )

    def x(self, steps: Sequence[float] | Array) -> Array:
        low, high = self.across
        return LEFT + (np.asarray(steps) - low) * ((WIDTH - LEFT - RIGHT) / (high - low))

    def y(self, values: Sequence[float] | Array) -> Array:
        low, high = self.up
        return (
            HEIGHT - BOTTOM - (np.asarray(values) - low) * ((HEIGHT - TOP - BOTTOM) / (high - low))
        )

    def points(self, steps: Array, values: Array) -> str:
        pairs = zip(self.x(steps), self.y(values), strict=True)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)

    def area(self, steps: Array, low: Array, high: Array, name: str) -> str:
        around = f"{self.points(steps, high)} {self.points(steps[::-1], low[::-1])}"
        return f'<polygon class="{name}" points="{around}"/>'


def _line(scale: _Scale, series: Series) -> Iterable[str]:
    """Measurements with their intervals; else every step faintly and their running mean clearly."""
    points = scale.points(series.steps, series.values)
    if series.bounds is None:
        yield f'<polyline class="faint {series.color}" points="{points}"/>'
        points = scale.points(series.steps, series.smooth)
    elif len(series.steps) > FEW:
        yield scale.area(series.steps, *series.bounds, f"band {series.color}")
    else:
        low, high = map(scale.y, series.bounds)
        for x, bottom, top in zip(scale.x(series.steps), low, high, strict=True):
            yield (
                f'<line class="line {series.color}" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" '
                f'y2="{top:.1f}"/>'
            )
    few = " few" if series.bounds is not None and len(series.steps) <= FEW else ""
    yield f'<polyline class="line{few} {series.color}" points="{points}"/>'
    if len(series.steps) == 1 or (series.bounds is not None and len(series.steps) < MOST_DOTS):
        for pair in points.split():
            x, _, y = pair.partition(",")
            yield f'<circle class="dot {series.color}" cx="{x}" cy="{y}" r="3"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Some round numbers from `low` on, the last one at or after `high`.

    >>> _ticks(0.0, 97.0)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    # A tenth of a second of imports that only a picture needs.
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=5, steps=NICE).tick_values(low, high)
    return [float(tick) for tick in ticks if tick >= low]


def _short(values: Array) -> list[float]:
    """Four digits say enough on hover."""
    return [float(f"{value:.4g}") for value in values]
