"""Panels inside an HTML page: its style has the colors, its script shows the values."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from grouper.report.curves import draw
from grouper.report.panels import COLORS, STYLES, Array, Panel, Series

# Size in inches; the page scales a drawing to its width.
WIDTH = 4.2
HEIGHT = 2.1
# Start and end of the curves, as shares of the width and of the height.
INNER = (0.12, 0.97)
UPRIGHT = (0.12, 0.91)
# Ids of groups of shapes, the same in every drawing.
_IDS = re.compile(r' id="[a-z0-9.]+_\d+"')


def chart(panel: Panel, most: int) -> dict[str, Any]:
    """Draw a panel for the page.

    Args:
        panel: the curves.
        most: points of a curve; neighboring steps share one where there are more.

    Returns:
        `svg`, the drawing, and `values`, the numbers that its script shows on hover.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    thinned_series = tuple(series.thinned(most) for series in panel.series)
    panel = replace(panel, series=thinned_series)
    file = io.StringIO()
    # The ids of shapes that others refer to differ between the drawings of a page.
    salt = f"{panel.title} {panel.phase}"
    with mpl.rc_context({**STYLES["style"], "svg.fonttype": "none", "svg.hashsalt": salt}):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        left, right = INNER
        bottom, top = UPRIGHT
        figure.subplots_adjust(left=left, bottom=bottom, right=right, top=top)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes, panel)
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    _, tag, content = file.getvalue().partition("<svg")
    svg = _IDS.sub("", tag + content)
    variables = {**COLORS, **STYLES["parts"]}
    for name, color in variables.items():
        svg = svg.replace(color.lower(), f"var(--{name})")
    values = {
        "phase": panel.phase,
        "span": [float(limit) for limit in axes.get_xlim()],
        "lines": [_hover_values(series) for series in panel.series],
    }
    return {"svg": Markup(svg), "values": values}  # noqa: S704 - shapes and numbers alone


def _hover_values(series: Series) -> dict[str, Any]:
    """Return the values of a curve that the script of the page shows on hover."""
    bounds = None
    if series.bounds:
        bounds = [_short(bound) for bound in series.bounds]
    return {
        "name": series.name,
        "color": series.color,
        "steps": series.steps.astype(int).tolist(),
        "values": _short(series.values),
        "bounds": bounds,
    }


def _short(values: Array) -> list[float]:
    """Round values to four digits, which are enough on hover."""
    return [float(f"{value:.4g}") for value in values]
