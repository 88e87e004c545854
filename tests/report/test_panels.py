"""Which curves a run has, and what they are of."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_runs import GRPO, make_run, new_run, report

from grouper.report.panels import COLORS, RunView, Series, overlaid, panels_of


def panels(run):
    return {panel.title: panel for panel in panels_of(RunView.of(run))}


def test_a_whole_run_has_accuracy_first_and_time_last(tmp_path):
    found = panels(make_run(tmp_path / "demo"))
    assert list(found) == [
        "Held-out accuracy, SFT",
        "Held-out accuracy, GRPO",
        "Reward by weighted component",
        "Groups: how many samples are right",
        "Completion length",
        "Truncated, repetitive",
        "Policy entropy (0: always the same answer)",
        "KL to the reference",
        "Probability ratio",
        "Clipped tokens",
        "Loss",
        "Gradient norm, GRPO",
        "Learning rate, GRPO",
        "Where the time of a step goes, GRPO",
    ]
    assert {series.color for panel in found.values() for series in panel.series} <= COLORS.keys()


def test_components_are_times_their_weights_and_add_up(tmp_path):
    lines = panels(make_run(tmp_path / "demo"))["Reward by weighted component"].series
    recipe = RunView.of(make_run(tmp_path / "again")).recipe
    weights = {reward.name: reward.weight for reward in recipe.rewards}
    assert weights["format"] not in (0, 1)
    named = {line.name: line.values[0] for line in lines}
    shown = f"{weights['format']:g} x format"
    assert named[shown] == pytest.approx(weights["format"] * GRPO["reward/format"] * 1.01)
    assert list(named)[-1] == "total"


def test_each_phase_starts_from_what_the_one_before_left(tmp_path):
    found = panels(make_run(tmp_path / "demo"))
    sft, grpo = (found[f"Held-out accuracy, {name}"] for name in ("SFT", "GRPO"))
    lines = {s.name.split()[0]: (s.steps.tolist(), s.values.tolist()) for s in sft.series}
    assert lines == {"test": ([0, 40], [0, 40]), "validation": ([20], [25])}
    lines = {s.name.split()[0]: (s.steps.tolist(), s.values.tolist()) for s in grpo.series}
    assert lines == {"test": ([0, 5], [40, 90]), "validation": ([5], [85])}
    bounds = grpo.series[0].bounds
    assert bounds is not None
    assert bounds[0][1] < 90 < bounds[1][1] <= 100


@pytest.mark.parametrize("missing", list(GRPO))
def test_a_missing_metric_leaves_out_its_panel_alone(tmp_path, missing):
    whole = panels(make_run(tmp_path / "whole"))
    left = panels(make_run(tmp_path / "demo", grpo={k: v for k, v in GRPO.items() if k != missing}))
    assert len(whole.keys() - left.keys()) <= 1
    assert left.keys() <= whole.keys()


def test_parts_of_a_stack_that_a_step_did_not_have_are_nothing(tmp_path):
    run = new_run(tmp_path / "run")
    for step in (1, 2, 3):
        run.append_metrics(
            report("grpo", step, {"time.decode": 3.0, **({"time.update": 1.0} if step > 1 else {})})
        )
    (panel,) = panels_of(RunView.of(run))
    decode, update = panel.series
    assert update.values[0] == 0
    assert (decode.steps == update.steps).all()
    assert (decode.name, update.name) == ("decode 82%", "update 18%")


def test_nothing_recorded_and_a_single_step(tmp_path):
    run = new_run(tmp_path / "run")
    assert panels(run) == {}
    run.append_metrics(report("sft", 1, {"loss": float("nan")}))
    assert panels(run) == {}


def test_several_runs_have_a_panel_of_each_curve(tmp_path):
    runs = {n: panels_of(RunView.of(make_run(tmp_path / n, sft=n == "a"))) for n in ("a", "b")}
    found = {panel.title: panel for panel in overlaid(runs)}
    both = found["Reward by weighted component: total"]
    assert [(line.name, line.color) for line in both.series] == [("a", "blue"), ("b", "red")]
    assert not found["Groups: how many samples are right: all wrong"].stacked
    assert [line.name for line in found["Loss"].series] == ["a"]


def test_a_curve_lies_over_the_same_curve_of_a_run_that_has_no_other(tmp_path):
    """The test accuracy of a run without validation was in a chart of its own."""
    both, alone = (make_run(tmp_path / name) for name in ("a", "b"))
    for file in (alone.path / "evaluations").glob("validation-*"):
        file.unlink()
    found = overlaid({run.path.name: panels_of(RunView.of(run)) for run in (both, alone)})
    lines = {panel.title: [line.name for line in panel.series] for panel in found}
    assert lines["Held-out accuracy, GRPO: test (95% interval)"] == ["a", "b"]
    assert lines["Held-out accuracy, GRPO: validation (95% interval)"] == ["a"]
    assert lines["Completion length"] == ["a", "b"]


def test_the_running_mean_is_a_mean_and_keeps_constants():
    steps = np.arange(1.0, 61.0)
    values = np.sin(steps)
    smooth = Series(name="", color="blue", steps=steps, values=values).smooth
    assert smooth[30] == pytest.approx(values[27:34].mean())
    assert smooth[0] == pytest.approx(values[:4].mean())


def test_many_steps_share_a_point():
    steps = np.arange(1.0, 1001.0)
    thin = Series(name="", color="blue", steps=steps, values=steps).thinned(300)
    assert len(thin.steps) == 250
    assert (thin.steps[0], thin.values[0]) == (4, 2.5)
    assert thin.steps[-1] == 1000
