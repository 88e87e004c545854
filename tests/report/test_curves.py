"""The pictures of a run: complete, in pieces, and the same twice."""

from __future__ import annotations

import pytest
from drawn_runs import make_run, new_run

from grouper.report import curves
from grouper.report.curves import draw_curves
from grouper.report.panels import RunView, panels_of


def figure_of(run):
    view = RunView.of(run)
    panels = panels_of(view)
    return panels, curves.compose(panels, curves.headline(view))


def test_a_figure_has_every_panel_with_its_own_steps(tmp_path):
    panels, figure = figure_of(make_run(tmp_path / "demo"))
    assert [axes.get_title("left") for axes in figure.axes] == [panel.title for panel in panels]
    assert figure.axes[0].get_xlabel() == "SFT step"
    assert figure.axes[1].get_xlabel() == "GRPO step"
    headline = "demo: base 0% → SFT 40% → GRPO 90% of 20 test problems solved"
    assert figure.get_suptitle() == headline
    lines = [(tuple(n.get_xdata()), tuple(n.get_ydata())) for n in figure.axes[1].get_lines()]
    assert ((0.0, 5.0), (40.0, 90.0)) in lines


def test_the_group_mix_is_stacked_from_wrong_to_right(tmp_path):
    panels, figure = figure_of(make_run(tmp_path / "demo"))
    groups = figure.axes[[panel.stacked for panel in panels].index(True)]
    names = [text.get_text() for text in groups.get_legend().get_texts()]
    assert names == ["all wrong 25%", "mixed: can teach 50%", "all right 25%"]


@pytest.mark.slow
@pytest.mark.parametrize("sft", [True, False])
def test_the_picture_is_written(tmp_path, sft):
    assert draw_curves(make_run(tmp_path / "r", sft=sft)).read_bytes().startswith(b"\x89PNG")


def test_an_empty_run_has_a_picture_too(tmp_path):
    run = new_run(tmp_path / "r")
    assert draw_curves(run).exists()


@pytest.mark.slow
def test_equal_runs_give_equal_pictures_wherever_they_are_written(tmp_path):
    first = draw_curves(make_run(tmp_path / "a" / "demo"))
    second = draw_curves(make_run(tmp_path / "b" / "demo"), tmp_path / "picture.png")
    assert second == tmp_path / "picture.png"
    assert first.read_bytes() == second.read_bytes()
