"""The tables of a run, as docs/python.md shows them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import grouper
from grouper.errors import RunFolderError
from grouper.runs.folder import RunFolder


def test_tables_and_items_are_read_after_a_change_of_folder(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`%cd` in a notebook: tables were empty then, without a word."""
    monkeypatch.chdir(lora_run.parent)
    run = grouper.load_run(lora_run.name)
    measured = RunFolder(lora_run.name).read_evaluation("grpo")
    monkeypatch.chdir(tmp_path)
    assert run.metrics == grouper.load_run(lora_run).metrics != []
    assert measured is not None
    assert measured.items[0].completion == run.completions[-4]["completion"]


def test_metrics_rollouts_and_evaluations_are_flat_tables(lora_run: Path) -> None:
    run = grouper.load_run(lora_run)
    metrics, rollouts = pd.DataFrame(run.metrics), pd.DataFrame(run.rollouts)
    assert list(metrics["phase"].unique()) == ["sft", "grpo"]
    assert metrics["elapsed_s"].is_monotonic_increasing
    one = rollouts[rollouts["step"] == 1]
    mean = metrics.loc[(metrics["phase"] == "grpo") & (metrics["step"] == 1), "reward/total"]
    assert one["reward"].mean() == pytest.approx(mean.item())
    assert rollouts["rewards/correctness"].dtype.kind == "f"
    evaluations = pd.DataFrame(run.evaluations).set_index("name")
    completions = pd.DataFrame(run.completions)
    for name, items in completions.groupby("evaluation"):
        assert evaluations.loc[name, "accuracy"] == (items["verdict"] == "correct").mean()
    shared = {"completion", "answer", "extracted", "verdict", "stage", "reason", "reward"}
    assert shared <= {*rollouts.columns} & {*completions.columns}


def test_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder of Grouper"):
        grouper.load_run(tmp_path)
