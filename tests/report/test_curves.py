"""The pictures of a run: complete, in pieces, and the same twice; where the seconds went."""

from __future__ import annotations

from pathlib import Path

import pytest

from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.report import curves
from grouper.report.curves import Series, draw_curves, draw_times
from grouper.runs.folder import RunFolder
from grouper.types import FinishReason, StepReport, Tally, Verdict

GRPO = {
    "reward/total": 1.1,
    "reward/correctness": 0.5,
    "reward/format": 0.9,
    "groups/all_wrong": 0.25,
    "groups/mixed": 0.5,
    "groups/all_right": 0.25,
    "completion/tokens": 20.0,
    "completion/truncated": 0.1,
    "policy/entropy": 0.4,
}


def report(phase: str, step: int, values: dict[str, float]) -> StepReport:
    tallies = {name: Tally.of([value * (1 + step / 100)]) for name, value in values.items()}
    return StepReport(phase=phase, step=step, tallies=tallies, status="learning")


def result(name: str, phase: str, step: int, split: str, solved: int) -> EvaluationResult:
    items = tuple(
        EvaluationItem(
            problem_id=f"p/{i}",
            subject=None,
            level=None,
            sample=0,
            prompt="",
            completion="",
            answer="1",
            extracted=None,
            verdict=Verdict.CORRECT if i < solved else Verdict.INCORRECT,
            reason="",
            stage="",
            finish_reason=FinishReason.STOP_TOKEN,
            tokens=5,
        )
        for i in range(20)
    )
    return EvaluationResult(
        name=name, phase=phase, step=step, split=split, items=items, samples=1, confidence=0.95
    )


def make_run(path: Path, *, grpo: dict[str, float] | None = None, sft: bool = True) -> RunFolder:
    run = RunFolder.create(path, recipe_yaml="", recipe_hash="a", versions={}, fingerprints={})
    if sft:
        for step in range(1, 41):
            run.append_metrics(report("sft", step, {"loss": 2.0}))
        run.write_evaluation(result("base", "base", 0, "test", 0))
        run.write_evaluation(result("sft", "sft", 40, "test", 8))
        run.write_evaluation(result("validation-sft-000020", "sft", 20, "validation", 5))
    for step in range(1, 6):
        run.append_metrics(report("grpo", step, GRPO if grpo is None else grpo))
    run.write_evaluation(result("validation-grpo-000005", "grpo", 5, "validation", 17))
    run.write_evaluation(result("grpo", "grpo", 5, "test", 18))
    return run


def titles(run: RunFolder) -> list[str]:
    return [t for axes in curves._curves(curves._read(run)).axes if (t := axes.get_title("left"))]


def test_a_whole_run_has_six_panels_and_a_headline(tmp_path):
    run = make_run(tmp_path / "demo")
    assert titles(run) == [
        "Held-out accuracy",
        "Reward by component",
        "Groups: how many samples are right",
        "Completion length and cut-off share",
        "Policy entropy (0: always the same answer)",
        "SFT loss",
    ]
    figure = curves._curves(curves._read(run))
    headline = "demo: base 0% → SFT 40% → GRPO 90% of 20 test problems solved"
    assert figure.get_suptitle() == headline
    names = [text.get_text() for text in figure.axes[0].texts]
    assert {"base 0%", "SFT 40%", "GRPO 90%"} <= set(names)


def test_the_points_stand_at_their_steps_and_heights(tmp_path):
    axes = curves._curves(curves._read(make_run(tmp_path / "demo"))).axes[0]
    lines = [(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axes.get_lines()]
    border = curves.SFT_SHARE
    assert ((0.0, border, 1.0), (0.0, 40.0, 90.0)) in lines
    assert ((border / 2,), (25.0,)) in lines
    assert ((1.0,), (85.0,)) in lines


def test_the_group_mix_is_stacked_from_wrong_to_right(tmp_path):
    groups = curves._curves(curves._read(make_run(tmp_path / "demo"))).axes[2]
    names = [text.get_text() for text in groups.get_legend().get_texts()]
    assert names == ["all wrong", "mixed: can teach", "all right"]


@pytest.mark.parametrize("missing", list(GRPO))
def test_a_missing_metric_leaves_out_its_panel_alone(tmp_path, missing):
    run = make_run(tmp_path / "demo", grpo={k: v for k, v in GRPO.items() if k != missing})
    lost = {
        "reward/total": 1,
        "groups/all_wrong": 1,
        "groups/mixed": 1,
        "groups/all_right": 1,
        "completion/tokens": 1,
        "policy/entropy": 1,
    }
    assert len(titles(run)) == 6 - lost.get(missing, 0)


def test_only_grpo(tmp_path):
    run = make_run(tmp_path / "demo", sft=False)
    assert "SFT loss" not in titles(run)
    assert draw_curves(run).read_bytes().startswith(b"\x89PNG")


def test_an_empty_run_and_one_step(tmp_path):
    run = RunFolder.create(
        tmp_path / "r", recipe_yaml="", recipe_hash="a", versions={}, fingerprints={}
    )
    assert titles(run) == []
    assert draw_curves(run).exists()
    run.append_metrics(report("sft", 1, {"loss": float("nan")}))
    run.append_metrics(report("grpo", 1, GRPO))
    assert len(titles(run)) == 4
    draw_curves(run)


def test_the_running_mean_is_a_mean_and_keeps_constants():
    import numpy as np

    steps = np.arange(1.0, 61.0)
    values = np.sin(steps)
    smooth = Series(steps, values).smooth
    assert smooth[30] == pytest.approx(values[27:34].mean())
    assert smooth[0] == pytest.approx(values[:4].mean())
    assert Series(steps, np.ones(60)).smooth == pytest.approx(np.ones(60))


def test_equal_runs_give_equal_pictures_wherever_they_are_written(tmp_path):
    first = draw_curves(make_run(tmp_path / "a" / "demo"))
    second = draw_curves(make_run(tmp_path / "b" / "demo"), tmp_path / "picture.png")
    assert second == tmp_path / "picture.png"
    assert first.read_bytes() == second.read_bytes()


# --- times.png ------------------------------------------------------------------------------------

TIMES = {
    "prefill": 0.5,
    "decode": 6.0,
    "grade": 0.5,
    "update": 2.5,
    "other": 0.5,
    "step": 10.0,
    "sampled_tokens_per_second": 7000.0,
    "trained_tokens_per_second": 9000.0,
    "mfu": 0.2,
    "mfu_sample": 0.1,
    "mfu_update": 0.4,
}
SFT_TIMES = {name: TIMES[name] for name in ("update", "other", "step", "mfu", "mfu_update")}


def timed(phase: str, values: dict[str, float], count: int = 30) -> list[StepReport]:
    tallies = {f"time.{name}": Tally.of([value]) for name, value in values.items()}
    return [
        StepReport(phase=phase, step=step, tallies=tallies, status="learning")
        for step in range(1, count + 1)
    ]


def words(found: list[StepReport]) -> tuple[str, list[str]]:
    """The headline, and the legend of the split."""
    figure = curves._times(found, "demo")
    assert figure is not None
    legend = figure.axes[0].get_legend()
    assert legend is not None
    return figure._suptitle.get_text(), [text.get_text() for text in legend.get_texts()]


def test_every_part_has_its_share_in_the_legend() -> None:
    headline, legend = words([*timed("sft", SFT_TIMES), *timed("grpo", TIMES)])
    assert headline == "demo: 5.0 min of GRPO steps"
    assert legend == ["prefill 5%", "decode 60%", "grade 5%", "update 25%", "other 5%"]


def test_a_run_of_sft_alone_shows_that() -> None:
    headline, legend = words([*timed("sft", SFT_TIMES, count=9), *timed("grpo", TIMES, count=2)])
    assert headline == "demo: 90.0 s of SFT steps"
    assert legend == ["update 83%", "other 17%"]


def test_steps_without_an_update_have_no_gap() -> None:
    silent = {name: value for name, value in TIMES.items() if "update" not in name}
    figure = curves._times([*timed("grpo", TIMES, 5), timed("grpo", silent, 6)[-1]], "demo")
    assert figure is not None
    areas = [area.get_paths()[0].vertices for area in figure.axes[0].collections]
    assert len(areas) == 5
    for corners in areas:
        assert {float(x) for x in corners[:, 0]} == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}


def test_what_has_no_times_has_no_picture(tmp_path: Path) -> None:
    run = RunFolder.create(
        tmp_path / "run", recipe_yaml="", recipe_hash="a", versions={}, fingerprints={}
    )
    assert draw_times(run) is None
    for step in timed("grpo", {"step": 1.0}, count=9):  # of a run before there was a split
        run.append_metrics(step)
    assert draw_times(run) is None
    for step in timed("grpo", TIMES, count=9):
        run.append_metrics(step)
    written = draw_times(run)
    assert written == run.path / "times.png"
    assert written.stat().st_size > 10_000


@pytest.mark.parametrize("missing", ["mfu", "sampled_tokens_per_second", "prefill"])
def test_a_missing_metric_stops_nothing(missing: str) -> None:
    left = {name: value for name, value in TIMES.items() if name != missing}
    assert curves._times(timed("grpo", left), "demo") is not None
