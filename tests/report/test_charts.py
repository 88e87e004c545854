"""Panels as SVG: well-formed, inside the drawing, and with the values that a pointer reads."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from drawn_runs import make_run

from grouper.report.charts import chart
from grouper.report.panels import Panel, RunView, Series, panels_of


def curve(values, *, steps=None, **more):
    values = np.asarray(values, dtype=float)
    steps = np.arange(1.0, len(values) + 1) if steps is None else np.asarray(steps, dtype=float)
    return Series(name="x", color="blue", steps=steps, values=values, **more)


SVG = "{http://www.w3.org/2000/svg}"


def places(svg):
    """Every point of the curves of an SVG, with the size of the drawing."""
    tree = ET.fromstring(svg)
    width, height = map(float, tree.get("viewBox").split()[2:])
    drawn = [n for n in tree.iter(f"{SVG}path") if "url(" in n.get("clip-path", "")]
    points = [pair for n in drawn for pair in re.findall(r"([-\d.]+) ([-\d.]+)", n.get("d"))]
    return width, height, [tuple(map(float, pair)) for pair in points]


def inside(svg):
    width, height, points = places(svg)
    return points and all(0 <= x <= width and 0 <= y <= height for x, y in points)


def test_every_panel_of_a_run_stays_inside_its_drawing(tmp_path):
    for panel in panels_of(RunView.of(make_run(tmp_path / "demo"))):
        drawn = chart(panel, 400)
        assert inside(drawn["svg"]), panel.title
        assert "#" not in re.sub(r"[(\"]#\w+", "", drawn["svg"]), "a colour that no theme has"


@pytest.mark.parametrize(
    "values", [[0.0], [5.0], [0.0, 0.0], [-3.0, -2.0], [1e-7, 2e-7], [1e12, 2e12], [-1.0, 1.0]]
)
def test_any_range_of_values_can_be_drawn(values):
    panel = Panel(title="t", unit="u", phase="grpo", series=(curve(values),))
    drawn = chart(panel, 400)
    assert inside(drawn["svg"])
    assert drawn["values"]["lines"][0]["values"] == values


def test_higher_values_are_higher_and_later_ones_further_right():
    series = curve([0.0, 10.0], bounds=(np.array([0.0, 8.0]), np.array([1.0, 12.0])))
    panel = Panel(title="t", unit="u", phase="grpo", series=(series,))
    dots = ET.fromstring(chart(panel, 9)["svg"]).iter(f"{SVG}use")
    blue = [n for n in dots if "var(--blue)" in n.get("style", "")]
    (low, high) = ((float(n.get("x")), float(n.get("y"))) for n in blue)
    assert low[0] < high[0]
    assert low[1] > high[1]


def test_long_curves_are_thinned():
    panel = Panel(title="t", unit="u", phase="grpo", series=(curve(np.ones(5000)),))
    drawn = chart(panel, 400)
    assert len(drawn["values"]["lines"][0]["steps"]) <= 400
    assert len(drawn["svg"]) < 20_000
