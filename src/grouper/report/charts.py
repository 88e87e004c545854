"""Panels inside an HTML page: its style has the colours, its script shows the values."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from grouper.report.curves import draw
from grouper.report.panels import COLORS, STYLES, Array, Panel

# In inches, of a drawing that is scaled to the width that there is.
WIDTH, HEIGHT = 4.2, 2.1
# The part of the width and of the height that the curves have.
INNER, UPRIGHT = (0.12, 0.97), (0.12, 0.91)
# Of groups of shapes, the same in every drawing.
_IDS = re.compile(r' id="[a-z0-9.]+_\d+"')


def chart(panel: Panel, most: int) -> dict[str, Any]:
    """A panel as the page takes it.

    Args:
        panel: what to draw.
        most: points of a curve; neighbouring steps share one where there are more.

    Returns:
        `svg`, the drawing, and `values`, what its script shows on hover.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    panel = replace(panel, series=tuple(one.thinned(most) for one in panel.series))
    file = io.StringIO()
    salt = f"{panel.title} {panel.phase}"  # what is referred to has a name of its own in each
    with mpl.rc_context({**STYLES["style"], "svg.fonttype": "none", "svg.hashsalt": salt}):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        figure.subplots_adjust(*(end for ends in zip(INNER, UPRIGHT, strict=True) for end in ends))
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes, panel)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = _IDS.sub("", "<svg" + file.getvalue().partition("<svg")[2])
    for name, color in (*COLORS.items(), *STYLES["parts"].items()):
        svg = svg.replace(color.lower(), f"var(--{name})")
    lines = [
        {
            "name": one.name,
            "color": one.color,
            "steps": one.steps.astype(int).tolist(),
            "values": _short(one.values),
            "bounds": [_short(bound) for bound in one.bounds] if one.bounds else None,
        }
        for one in panel.series
    ]
    values = {"phase": panel.phase, "span": [*map(float, axes.get_xlim())], "lines": lines}
    return {"svg": Markup(svg), "values": values}  # noqa: S704 - shapes and numbers alone


def _short(values: Array) -> list[float]:
    """Four digits say enough on hover."""
    return [float(f"{value:.4g}") for value in values]
