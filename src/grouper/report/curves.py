"""The picture of a run: `curves.png`, all its curves on one page."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grouper.evaluation.compare import label
from grouper.files import write_atomic
from grouper.report.panels import COLORS, STYLES, Panel, RunView, Series, panels_of
from grouper.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distances between ticks, times a power of ten.
NICE = [1, 2, 5, 10]


def are_current(folder: RunFolder) -> bool:
    """Return whether nothing was recorded since `curves.png` was drawn."""
    picture = folder.path / "curves.png"
    if not picture.exists():
        return False
    records = [folder.path / "metrics.jsonl", *(folder.path / "evaluations").glob("*.json")]
    times = [file.stat().st_mtime_ns for file in records if file.exists()]
    return picture.stat().st_mtime_ns > max(times, default=0)


def draw_curves(run: RunFolder | RunView, path: Path | None = None) -> Path:
    """Draw the curves of a run so far; those without values are left out.

    Args:
        run: a run, finished or not.
        path: the PNG to write; `curves.png` in the run folder by default.

    Returns:
        The path written.

    Raises:
        RunFolderError: the run cannot be read or the picture not written.
    """
    view = run if isinstance(run, RunView) else RunView.of(run)
    panels = [panel for panel in panels_of(view) if not panel.costs]
    figure = compose(panels, headline(view))
    picture = io.BytesIO()
    # Without the version of matplotlib inside, equal runs give equal pictures.
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    target = path or view.folder.path / "curves.png"
    write_atomic(target, picture.getvalue())
    return target


def headline(run: RunView) -> str:
    """Return the name of a run, with its test results."""
    results = [result for result in run.evaluations if result.split == "test"]
    if not results:
        return run.name
    accuracies = [f"{label(result.name)} {100 * result.accuracy:.0f}%" for result in results]
    path = " → ".join(accuracies)
    problems = results[-1].overall.problems
    return f"{run.name}: {path} of {problems} test problems solved"


def compose(panels: Sequence[Panel], title: str) -> Figure:
    """Draw a page of panels, at most four in a row, or a note that there are none."""
    # Half a second of imports that only a picture needs; no pyplot, so no global state.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    most_columns = 4 if len(panels) > 9 else 3
    columns = min(most_columns, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    width = 4.6 * columns + 0.4
    height = 3.3 * rows + 0.7
    with mpl.rc_context(STYLES["style"]):
        figure = Figure(figsize=(width, height))
        # Margins that fit every panel: to measure them would take as long as to draw.
        figure.subplots_adjust(
            left=0.75 / width,
            right=1 - 0.2 / width,
            bottom=0.6 / height,
            top=1 - 0.95 / height,
            wspace=0.25,
            hspace=0.5,
        )
        FigureCanvasAgg(figure)
        for position, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, columns, position)
            draw(axes, panel)
            axes.set(xlabel=f"{label(panel.phase)} step", ylabel=panel.unit, title=panel.title)
            if any(series.name for series in panel.series):
                axes.legend(loc="best", handlelength=1.2)
        if not panels:
            figure.text(0.5, 0.4, "Nothing has been recorded yet.", ha="center")
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def draw(axes: Axes, panel: Panel) -> None:
    """Draw the curves of a panel; ticks are at whole steps."""
    from matplotlib.ticker import MaxNLocator

    if panel.stacked:
        heights = [series.smooth for series in panel.series]
        axes.stackplot(
            panel.series[0].steps,
            *heights,
            labels=[series.name for series in panel.series],
            colors=[COLORS[series.color] for series in panel.series],
            alpha=0.8,
            linewidth=0,
        )
    else:
        for series in panel.series:
            _line(axes, series)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=NICE))
    axes.margins(x=0 if panel.stacked else 0.02)
    if axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0, top=100 if panel.unit.endswith("(%)") else None)


def _line(axes: Axes, series: Series) -> None:
    """Draw values with their intervals; else each step faintly and the running mean clearly."""
    color = COLORS[series.color]
    if series.bounds is None:
        axes.plot(series.steps, series.values, color=color, alpha=0.25, linewidth=1)
        marker = "o" if len(series.steps) == 1 else None
        axes.plot(series.steps, series.smooth, color=color, label=series.name, marker=marker)
        return
    low, high = series.bounds
    axes.vlines(series.steps, low, high, color=color, linewidth=1.5, alpha=0.6)
    # Test points are measurements of different models, and no line leads from one to the next.
    line_format = "o-" if series.joined else "o"
    axes.plot(
        series.steps,
        series.values,
        line_format,
        color=color,
        linewidth=1,
        markersize=4,
        label=series.name,
    )
