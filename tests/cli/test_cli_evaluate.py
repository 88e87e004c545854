"""`grouper eval`: what is measured, where it goes, and what is compared with what."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grouper.runs.folder import RunFolder


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may write into."""
    shutil.copytree(finished_run, tmp_path / "outputs" / "demo")
    return tmp_path / "outputs" / "demo"


def test_a_run_folder_measures_what_it_trained_as_training_did(grouper, run):
    called = grouper("eval", run)
    assert called.code == 0, called.err
    label = "demo-grpo-final"
    folder = run / "eval_runs" / label
    (result,) = RunFolder(folder).read_evaluations()
    trained = RunFolder(run).read_evaluation("grpo")
    assert trained is not None
    assert result.items == trained.items
    assert (result.phase, result.step, result.name) == ("grpo", 2, "test-greedy-8x1")
    assert result.card["model"].endswith("grpo/final")
    assert (folder / "recipe.yaml").read_text() == (run / "recipe.yaml").read_text()
    parts = ("subject", "level", "2 steps", "reasoning %", f"rewards of {label}", "tag_count")
    for text in ("accuracy % [95 %]", "no answer", "cut off", *parts):
        assert text in called.out
    # What was measured afterwards does not disturb the run.
    names = [r.name for r in RunFolder(run).read_evaluations()]
    assert "base" in names
    assert label not in names


def test_rewards_are_left_out_where_they_are_not_wanted(grouper, run, tmp_path):
    called = grouper("eval", run, "evaluation.rewards=false", "--output-dir", tmp_path / "plain")
    assert called.code == 0, called.err
    assert "tag_count" not in called.out
    (summary,) = (tmp_path / "plain").rglob("evaluations/*.json")
    assert json.loads(summary.read_text())["metrics"] is None


def test_without_a_grpo_model_it_is_sft_and_then_the_recipe_s_own(grouper, run):
    shutil.rmtree(run / "grpo")
    assert "demo-sft-final" in grouper("eval", run).out
    shutil.rmtree(run / "sft")
    assert "demo-base" in grouper("eval", run).out
    shutil.rmtree(run / "base")
    grouper("eval", run).refused("there is nothing to measure", "--model")


def test_several_models_are_compared_item_by_item_with_pass_at_k(grouper, run, tmp_path):
    called = grouper(
        "eval",
        run,
        "--model",
        run / "base",
        "--model",
        run / "sft" / "final",
        "--output-dir",
        tmp_path / "mine",
        "evaluation.samples=4",
        "evaluation.temperature=1.0",
    )
    assert called.code == 0, called.err
    assert "demo-sft-final - demo-base" in called.out
    assert "no evidence of a change" in called.out
    assert "pass@4" in called.out
    assert "pass@k % of demo-base: 1: 0.0, 2: 0.0, 4: 0.0" in called.out
    assert not (run / "eval_runs").exists()
    summary = json.loads((tmp_path / "mine/demo-base/evaluations/test-t1-8x4.json").read_text())
    assert summary["samples"] == 4
    assert summary["card"]["sampling"]["temperature"] == 1.0


def test_compare_reads_a_run_or_an_earlier_evaluation_and_measures_a_model(grouper, run):
    grouper("eval", run, "--model", run / "base")
    called = grouper("eval", run, "--compare", run / "eval_runs" / "demo-base", "--quiet")
    assert "demo-grpo-final - demo-base" in called.out
    called = grouper("eval", run, "--model", run / "sft" / "final", "--compare", run)
    assert "demo-sft-final - demo-grpo" in called.out
    called = grouper("eval", run, "--compare", run / "base")
    assert "demo-grpo-final - demo-base" in called.out


def test_other_problems_and_other_sampling_are_not_compared_in_silence(grouper, run):
    called = grouper("eval", run, "--compare", run, "data.test.options.count=6")
    called.refused("not of the same items")
    # The measurement itself was made and is kept.
    assert (run / "eval_runs" / "demo-grpo-final" / "evaluations").is_dir()
    called = grouper("eval", run, "--compare", run, "evaluation.temperature=0.5")
    assert called.code == 0, called.err
    assert "not measured with the same sampling settings" in called.err


def test_results_of_other_settings_lie_beside_each_other(grouper, run):
    """U8."""
    assert "same settings" not in grouper("eval", run).err
    assert grouper("eval", run, "evaluation.temperature=0.5").code == 0
    assert grouper("eval", run, "evaluation.max_new_tokens=9").code == 0
    called = grouper("eval", run)
    assert "had the same settings, and is replaced" in " ".join(called.err.split())
    folder = run / "eval_runs" / "demo-grpo-final" / "evaluations"
    names = {path.stem for path in folder.glob("*.json")}
    assert names == {"test-greedy-8x1", "test-greedy-8x1-2", "test-t0.5-8x1"}


def test_the_validation_split_is_kept_apart(grouper, run):
    assert grouper("eval", run).code == 0
    called = grouper("eval", run, "--split", "validation")
    assert called.code == 0, called.err
    names = {path.name for path in (run / "eval_runs/demo-grpo-final/evaluations").glob("*.json")}
    assert len(names) == 2
    assert "test-greedy-8x1.json" in names
    called = grouper("eval", run, "--split", "validation", "data.validation=null")
    called.refused("data.validation", "no validation problems")


def test_a_run_made_with_another_prompt_is_a_warning(grouper, run, tmp_path):
    called = grouper("eval", "demo", f"output_dir={run.parent}", "prompt.format=xml", "--dry-run")
    assert "other `prompt` settings" in called.err
    assert f"grouper eval {run}" in called.err


def test_a_dry_run_writes_nothing(grouper, run):
    called = grouper("eval", run, "--dry-run")
    assert called.code == 0, called.err
    assert "8 test problems x 1 = 8 completions" in called.out
    assert not (run / "eval_runs").exists()


def test_a_model_can_be_measured_before_anything_is_trained(grouper, small, finished_run, tmp_path):
    arguments = ["demo", *small, f"output_dir={tmp_path}"]
    called = grouper("eval", *arguments, "--model", finished_run / "base")
    assert called.code == 0, called.err
    assert (tmp_path / "demo" / "eval_runs").is_dir()
    assert grouper("run", *arguments, "--dry-run").code == 0


def test_nothing_is_written_into_a_folder_that_was_handed_over(grouper, run, tmp_path):
    """The next run with its `save_path` replaces it."""
    handed = tmp_path / "handed-over"
    shutil.copytree(run / "grpo" / "final", handed)
    shutil.copyfile(run / "recipe.yaml", handed / "recipe.yaml")
    before = sorted(handed.iterdir())
    called = grouper("eval", handed, f"output_dir={tmp_path / 'elsewhere'}")
    assert called.code == 0, called.err
    assert sorted(handed.iterdir()) == before
    found = RunFolder(tmp_path / "elsewhere" / "demo" / "eval_runs" / "handed-over")
    assert [r.name for r in found.read_evaluations()] == ["test-greedy-8x1"]
