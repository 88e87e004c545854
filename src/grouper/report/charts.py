"""The values of charts, which the script of the page draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grouper.evaluation.compare import label
from grouper.report.panels import Array, Panel, RunView, Series

# Points of a clock; between them the page interpolates.
CLOCK_POINTS = 200


@dataclass
class Charts:
    """Charts of one or several runs, with the time and the tokens of their steps.

    Args:
        runs: by their names.
        most_points: points of a curve; neighboring steps share one where there are more.
    """

    runs: Mapping[str, RunView]
    most_points: int
    clocks: list[dict[str, Any]] = field(default_factory=list)
    """Steps of a phase of a run, with the seconds and the tokens up to each of them."""
    _clock_of: dict[tuple[str, str], int] = field(default_factory=dict)
    """(run, phase) -> its position in `clocks`."""

    def chart(self, panels: Sequence[Panel]) -> dict[str, Any]:
        """Return a chart: its panels, of one phase each, stand side by side on one scale."""
        first = panels[0]
        facets = []
        for panel in panels:
            lines = [self._line(series, panel) for series in panel.series]
            facets.append({"phase": panel.phase, "name": label(panel.phase), "lines": lines})
        return {
            "title": first.title,
            "unit": first.unit,
            "stacked": first.stacked,
            "facets": facets,
        }

    def _line(self, series: Series, panel: Panel) -> dict[str, Any]:
        # A line of an overlay has the name of its run.
        run_name = series.run or next(iter(self.runs))
        thinned = series.thinned(self.most_points)
        line: dict[str, Any] = {
            "name": series.name,
            "color": series.color,
            "clock": self._clock(run_name, panel.phase),
            "steps": thinned.steps.astype(int).tolist(),
            "values": _short(thinned.values),
            "exact": series.exact,
        }
        if series.bounds is not None:
            line["bounds"] = [_short(bound) for bound in series.bounds]
            line["joined"] = series.joined
        if series.labels:
            line["labels"] = list(series.labels)
        return line

    def _clock(self, run_name: str, phase: str) -> int:
        """Return the position of a clock, which is made once."""
        key = (run_name, phase)
        if key not in self._clock_of:
            self._clock_of[key] = len(self.clocks)
            self.clocks.append(self.runs[run_name].clock(phase).thinned(CLOCK_POINTS))
        return self._clock_of[key]


def _short(values: Array) -> list[float | None]:
    """Round values to four digits, which are enough for a drawing."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
