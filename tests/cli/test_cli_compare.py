"""`grouper compare`: what is compared with what, and what cannot be."""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from grouper.evaluation.items import StoredItems
from grouper.runs.folder import RunFolder
from grouper.runs.lock import LOCK_FILE
from grouper.types import Verdict


@pytest.fixture
def run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may write into, and a folder for what is written elsewhere."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, tmp_path / "outputs" / "demo")
    return tmp_path / "outputs" / "demo"


@pytest.mark.slow
def test_compare_reads_a_run_or_an_earlier_evaluation_and_measures_a_model(grouper, run):
    grouper("eval", run, "--model", run / "base")
    called = grouper("compare", run / "eval_runs" / "demo-base", run)
    assert "demo - demo-base" in called.out
    called = grouper("eval", run, "--model", run / "base", "--model", run / "sft" / "final")
    assert "demo-sft-final - demo-base" in called.out


def test_recorded_evaluations_are_compared_problem_by_problem(grouper, run, tmp_path):
    other = tmp_path / "outputs" / "other"
    shutil.copytree(run, other)
    called = grouper("compare", run, other)
    assert called.code == 0, called.err
    assert "no evidence of a change" in called.out
    assert "0 problems won and 0 lost" in called.out
    called = grouper("compare", run)
    for text in ("SFT - base", "GRPO - SFT", "GRPO - base"):
        assert text in called.out
    base = run / "evaluations" / "base.json"
    found = json.loads(grouper("compare", base, f"{run},{other}", "--json").out)
    (difference,) = found["differences"]
    assert set(difference["causes"]) == {"format", "extraction", "truncation", "reasoning"}
    total = difference["paired"]["difference"]
    assert sum(difference["causes"].values()) == pytest.approx(total)
    assert found["left_out"] == 0
    seeds = grouper("compare", f"{run},{other}")
    assert "Over 2 seeds" in seeds.out
    assert "phase" not in called.err


def test_a_run_that_was_stopped_is_not_compared_in_silence(grouper, run, tmp_path):
    """Its SFT stood against the GRPO of another."""
    other = tmp_path / "outputs" / "other"
    shutil.copytree(run, other)
    for file in (other / "evaluations").glob("grpo.*"):
        file.unlink()
    said = grouper("compare", run, other).err
    phases = f"{run} after grpo, {other} after sft"
    assert f"these runs were not measured after the same phase: {phases}." in said
    summary = other / "evaluations" / "sft.json"
    assert "phase" not in grouper("compare", run, summary).err
    summary.with_suffix(".jsonl.gz").unlink()
    grouper("compare", run, summary).refused("the items of this evaluation are lost")


def test_what_has_the_same_name_elsewhere_is_compared_too(grouper, run, tmp_path):
    """The second took the place of the first, and nothing was compared."""
    other = tmp_path / "elsewhere" / run.name
    shutil.copytree(run, other)
    found = json.loads(grouper("compare", run, other, "--json").out)
    assert [result["name"] for result in found["results"]] == [str(run), str(other)]
    summaries = [run / "evaluations" / f"{phase}.json" for phase in ("base", "grpo")]
    found = json.loads(grouper("compare", *summaries, "--json").out)
    names = [f"{run.name}-{phase}" for phase in ("base", "grpo")]
    assert [result["name"] for result in found["results"]] == names
    found = json.loads(
        grouper("compare", other / "evaluations/grpo.json", summaries[1], "--json").out
    )
    assert len(found["differences"]) == 1


def test_answers_in_brackets_are_printed_as_they_are(grouper, run):
    folder = RunFolder(run)
    for name, wrong in (("base", "[/b]"), ("grpo", "[a, b]")):
        result = folder.read_evaluation(name)
        verdict = Verdict.CORRECT if name == "grpo" else Verdict.INCORRECT
        items = [replace(item, extracted=wrong, verdict=verdict) for item in result.items]
        folder.write_evaluation(replace(result, items=items))
    called = grouper("compare", run)
    assert called.code == 0, called.err
    assert "[/b]" in called.out
    assert "[a, b]" in called.out


def test_a_single_run_is_compared_on_the_problems_that_were_named(grouper, run):
    stored = {r.name: r for r in RunFolder(run).read_evaluations()}
    found = json.loads(grouper("compare", run, "--on", "validation", "--json").out)
    last = [stored[f"validation-{phase}-000002"] for phase in ("sft", "grpo")]
    assert [row["problems"] for row in found["results"]] == [r.overall.problems for r in last]
    assert [row["mean_tokens"] for row in found["results"]] == [r.mean_tokens for r in last]
    grouper("compare", run, "--on", "gsm8k").refused("the gsm8k problems were not measured")


def test_a_run_that_goes_on_is_compared_as_far_as_it_is(grouper, run, monkeypatch):
    folder = run / "evaluations"
    later = {path: path.read_bytes() for path in folder.glob("*grpo*")}
    for path in later:
        path.unlink()
    # What is being drawn, and items whose summary is not there yet.
    (folder / ".grpo.part").mkdir()
    (folder / ".grpo.part" / "0.jsonl").write_text('{"place":0,"tok')
    (folder / "grpo.jsonl.gz").write_bytes(later[folder / "grpo.jsonl.gz"])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "grpo", "st')
    holder = {"pid": os.getppid(), "host": platform.node()}
    (run / LOCK_FILE).write_text(json.dumps(holder))
    called = grouper("compare", run)
    assert called.code == 0, called.err
    assert "SFT - base" in called.out
    assert "GRPO" not in called.out
    assert f"the run in {run} is still in progress; these are its results so far." in called.err
    # One is taken back while it is read, as by a run that is resumed from a checkpoint.
    read = StoredItems.read

    def taken_back(path: Path) -> StoredItems:
        found = read(path)
        if path.name == "sft.jsonl.gz":
            (folder / "sft.json").unlink()
        return found

    monkeypatch.setattr(StoredItems, "read", taken_back)
    called = grouper("compare", run)
    assert called.code == 0, called.err
    assert "SFT" not in called.out
    for path in folder.glob("*.json"):
        path.unlink()
    grouper("compare", run).refused("the test problems were not measured", "--resume")


def test_what_cannot_be_compared_is_refused(grouper, run, tmp_path):
    grouper("compare", run, tmp_path / "nowhere").refused("there is nothing here")
    called = grouper("compare", f"{run},{run}", run)
    assert called.code == 2
    assert "the same run cannot be two seeds" in called.err
    assert "nor two arms" in grouper("compare", run, f"{run.parent}/./{run.name}").err
    assert "missing next to a comma" in grouper("compare", ",", run).err
    grouper("compare", run, tmp_path).refused("no evaluation on test problems")
    grouper("compare", run, run / "run.json").refused("no evaluation on test problems")
    other = tmp_path / "other"
    shutil.copytree(run, other)
    grouper("compare", run, other, "--on", "gsm8k").refused("no evaluation on gsm8k problems")
    called = grouper("compare", tmp_path)
    assert called.code == 2
    assert "at least two" in called.err
    summary = run / "evaluations" / "grpo.json"
    summary.write_text(summary.read_text()[:-30])
    grouper("compare", other, run).refused("the summary of the evaluation is damaged")
