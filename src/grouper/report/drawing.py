"""How every picture of a run looks: colours, type, metrics as lines or areas, a page of panels."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grouper.evaluation.compare import label
from grouper.files import write_atomic
from grouper.types import StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
Reports = Sequence[StepReport]

# Okabe and Ito's palette: told apart with every common kind of colour blindness.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#6B6B6B"
_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9A9A9A",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
}
# Distances between ticks, times a power of ten.
NICE = [1, 2, 5, 10]


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one phase: its mean in every step that has it."""

    steps: Array
    values: Array

    @classmethod
    def of(cls, reports: Reports, name: str, scale: float = 1.0) -> Series:
        found = [
            (report.step, scale * report.tallies[name].mean)
            for report in reports
            if name in report.tallies and math.isfinite(report.tallies[name].mean)
        ]
        table = np.asarray(found, dtype=np.float64).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1])

    def __bool__(self) -> bool:
        return len(self.steps) > 0

    @property
    def smooth(self) -> Array:
        """Running mean over about a tenth of the steps, narrower at both ends."""
        half = len(self.values) // 20
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        index = np.arange(len(self.values))
        low, high = np.maximum(0, index - half), np.minimum(len(self.values), index + half + 1)
        means: Array = (sums[high] - sums[low]) / (high - low)
        return means


def draw_line(axes: Axes, series: Series, color: str, name: str | None = None) -> None:
    """Every step faintly, their running mean clearly."""
    axes.plot(series.steps, series.values, color=color, alpha=0.25, linewidth=1)
    marker = "o" if len(series.steps) == 1 else None
    axes.plot(series.steps, series.smooth, color=color, label=name, marker=marker)


def draw_areas(axes: Axes, parts: Sequence[tuple[str, Series, str]], **legend: Any) -> None:
    """Running means on top of each other.

    Args:
        axes: where.
        parts: (name, series, colour) from the lowest to the highest, all of the same steps.
        legend: where it stands.
    """
    axes.stackplot(
        parts[0][1].steps,
        *(series.smooth for _, series, _ in parts),
        labels=[name for name, _, _ in parts],
        colors=[color for _, _, color in parts],
        alpha=0.8,
        linewidth=0,
    )
    axes.margins(x=0)
    axes.legend(**legend, ncols=3, handlelength=1, handleheight=1, columnspacing=1.2)


def count_steps(axes: Axes, phase: str) -> None:
    """Name and tick the horizontal axis in whole steps of a phase."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=NICE))
    axes.set_xlabel(f"{label(phase)} step")
    axes.margins(x=0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A panel of metrics, as lines over the steps of a phase."""

    title: str
    unit: str
    metrics: Sequence[tuple[str, str, str | None]]
    """(metric, colour, name in the legend), as far as the steps have them."""
    phase: str = "grpo"
    scale: float = 1.0
    pad: float | None = None
    """Points above the panel; left out: as always."""

    def draw(self, axes: Axes, reports: Reports) -> None:
        for metric, color, name in self.metrics:
            if found := Series.of(reports, metric, self.scale):
                draw_line(axes, found, color, name)
        count_steps(axes, self.phase)
        if not axes.lines:
            axes.set_ylim(0, 1)
        elif axes.dataLim.y0 >= 0:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(self.unit)
        axes.set_title(self.title, pad=self.pad)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")


def compose(panels: Sequence[Callable[[Axes], None]], headline: str) -> Figure:
    """A page of panels, at most three in a row; without any, it says so."""
    # Half a second of imports that only a picture needs; no pyplot, so no global state.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(3, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    with mpl.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04)
        figure = Figure(figsize=(4.6 * columns + 0.4, 3.3 * rows + 0.7), layout=layout)
        FigureCanvasAgg(figure)
        for place, panel in enumerate(panels, start=1):
            panel(figure.add_subplot(rows, columns, place))
        if not panels:
            figure.text(0.5, 0.4, "Nothing has been recorded yet.", ha="center")
        figure.suptitle(headline, x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG and return its path.

    Raises:
        RunFolderError: it cannot be written.
    """
    picture = io.BytesIO()
    # Without the version of matplotlib inside, equal runs give equal pictures.
    figure.savefig(picture, format="png", dpi=130, metadata={"Software": None})
    write_atomic(path, picture.getvalue())
    return path
