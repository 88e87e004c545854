"""Panels as SVG: well-formed, inside the drawing, and with the values that a pointer reads."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import numpy as np
import pytest
from drawn_runs import make_run

from grouper.report.charts import HEIGHT, WIDTH, chart
from grouper.report.panels import Panel, RunView, Series, panels_of


def curve(values, *, steps=None, **more):
    values = np.asarray(values, dtype=float)
    steps = np.arange(1.0, len(values) + 1) if steps is None else np.asarray(steps, dtype=float)
    return Series(name="x", color="blue", steps=steps, values=values, **more)


def places(svg):
    """Every point of an SVG."""
    for node in ET.fromstring(svg).iter():
        for pair in node.get("points", "").split():
            yield tuple(map(float, pair.split(",")))
        for x, y in (("x1", "y1"), ("x2", "y2"), ("cx", "cy")):
            if x in node.attrib and y in node.attrib:
                yield float(node.get(x)), float(node.get(y))


def test_every_panel_of_a_run_stays_inside_its_drawing(tmp_path):
    for panel in panels_of(RunView.of(make_run(tmp_path / "demo"))):
        drawn = chart(panel, 400)
        points = list(places(drawn["svg"]))
        assert points, panel.title
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points), panel.title


@pytest.mark.parametrize(
    "values", [[0.0], [5.0], [0.0, 0.0], [-3.0, -2.0], [1e-7, 2e-7], [1e12, 2e12], [-1.0, 1.0]]
)
def test_any_range_of_values_can_be_drawn(values):
    panel = Panel(title="t", unit="u", phase="grpo", series=(curve(values),))
    drawn = chart(panel, 400)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places(drawn["svg"]))
    assert drawn["values"]["lines"][0]["values"] == values


def test_higher_values_are_higher_and_later_ones_further_right():
    series = curve([0.0, 10.0], bounds=(np.array([0.0, 8.0]), np.array([1.0, 12.0])))
    panel = Panel(title="t", unit="u", phase="grpo", series=(series,))
    circles = [n for n in ET.fromstring(chart(panel, 9)["svg"]) if n.tag == "circle"]
    (low, high) = ((float(n.get("cx")), float(n.get("cy"))) for n in circles)
    assert low[0] < high[0]
    assert low[1] > high[1]


def test_long_curves_are_thinned():
    panel = Panel(title="t", unit="u", phase="grpo", series=(curve(np.ones(5000)),))
    drawn = chart(panel, 400)
    assert len(drawn["values"]["lines"][0]["steps"]) <= 400
    assert len(drawn["svg"]) < 20_000
