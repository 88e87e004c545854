"""The values of charts: short, whole, and with the time and the tokens of their steps."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_runs import GRPO, make_run, new_run, report

from grouper.report.charts import Charts
from grouper.report.panels import Panel, RunView, Series, overview, panels_of


def curve(values, **more):
    values = np.asarray(values, dtype=float)
    steps = np.arange(1.0, len(values) + 1)
    return Series(name="x", color="blue", steps=steps, values=values, **more)


def charts_of(run, most=400):
    return Charts({"demo": RunView.of(run)}, most)


def line_of(series, run, most=400):
    panel = Panel(title="t", unit="u", phase="grpo", series=(series,))
    (facet,) = charts_of(run, most).chart([panel])["facets"]
    (line,) = facet["lines"]
    return line


@pytest.mark.parametrize("values", [[0.0], [-3.0, -2.0], [1e-7, 2e-7], [1e12, 2e12]])
def test_values_of_any_size_keep_four_digits(tmp_path, values):
    assert line_of(curve(values), new_run(tmp_path / "run"))["values"] == values


def test_long_curves_are_thinned(tmp_path):
    line = line_of(curve(np.ones(5000)), new_run(tmp_path / "run"))
    assert len(line["steps"]) == len(line["values"]) <= 400


def test_a_clock_counts_time_and_tokens_from_the_beginning_of_a_phase(tmp_path):
    run = new_run(tmp_path / "run")
    for step in (1, 2):
        run.append_metrics(report("sft", step, {"tokens": 100 / (1 + step / 100)}))
    run.append_metrics(report("grpo", 1, {"completion/tokens": 20 / 1.01}))
    view = RunView.of(run)
    sft = view.clock("sft")
    assert list(sft.steps) == [0, 1, 2]
    assert sft.tokens == pytest.approx([0, 100, 200])
    assert list(sft.seconds) == sorted(sft.seconds)
    grpo = view.clock("grpo")
    assert grpo.tokens == pytest.approx([0, 20])
    assert grpo.seconds[-1] == pytest.approx(view.seconds[-1] - view.seconds[-2])


def test_a_long_clock_is_thinned_and_keeps_its_end(tmp_path):
    run = new_run(tmp_path / "run")
    for step in range(1, 1002):
        run.append_metrics(report("grpo", step, {}))
    clock = RunView.of(run).clock("grpo").thinned(200)
    assert len(clock["steps"]) <= 202
    assert (clock["steps"][0], clock["steps"][-1]) == (0, 1001)


def test_every_line_has_a_clock_of_its_run_and_phase(tmp_path):
    run = make_run(tmp_path / "demo")
    charts = charts_of(run)
    for panel in panels_of(RunView.of(run)):
        for facet in charts.chart([panel])["facets"]:
            for line in facet["lines"]:
                last_step = 40 if facet["phase"] == "sft" else 5
                assert charts.clocks[line["clock"]]["steps"][-1] == last_step
    assert len(charts.clocks) == 2


def test_the_overview_shows_each_model_once_with_its_interval(tmp_path):
    run = make_run(tmp_path / "demo", grpo={**GRPO, "solve_rate": 0.5})
    sft, grpo = overview({"demo": RunView.of(run)})
    assert [line.labels for line in sft.series if line.labels] == [("base", "SFT")]
    assert [line.labels for line in grpo.series if line.labels] == [("GRPO",)]
    assert grpo.series[-1].name == "rollouts in training"
    assert grpo.series[-1].bounds is None


def test_without_held_out_problems_the_overview_shows_the_reward_or_the_loss(tmp_path):
    run = new_run(tmp_path / "run")
    assert overview({"run": RunView.of(run)}) == []
    run.append_metrics(report("sft", 1, {"loss": 2.0}))
    (loss,) = overview({"run": RunView.of(run)})
    assert loss.title == "Loss"
    run.append_metrics(report("grpo", 1, {"reward/total": 1.0}))
    (reward,) = overview({"run": RunView.of(run)})
    assert reward.title == "Reward by weighted component"
