"""What a folder in nan_dump holds is enough to look at the step again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_batch
from tiny_states import SavedTokenizer

from grouper.algorithms.batching import broken_rows
from grouper.runs.folder import RunFolder
from grouper.training.nan_dump import LAST_METRICS, write_nan_dump
from grouper.types import StepReport, Tally


def report(step: int) -> StepReport:
    return StepReport(
        phase="grpo", step=step, status="learning", tallies={"loss": Tally.of([float("nan")])}
    )


def test_finite_batches_are_fine() -> None:
    assert broken_rows(make_batch()) == {}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_the_tensor_and_the_row_are_named(poison: float) -> None:
    batch = make_batch()
    advantages = batch.advantages.clone()
    advantages[3] = advantages[5] = poison
    poisoned = replace(batch, advantages=advantages)
    (name, rows), *others = broken_rows(poisoned).items()
    assert (name, rows.nonzero().flatten().tolist(), others) == ("advantages", [3, 5], [])


def test_the_folder_tells_the_whole_story(tmp_path: Path) -> None:
    batch = make_batch()
    old = torch.zeros_like(batch.weights)
    old[2, 0] = float("inf")
    batch = replace(batch, old_logprobs=old)
    for step in range(1, 31):
        RunFolder(tmp_path).append_metrics(report(step))
    folder = write_nan_dump(tmp_path, "grpo-000030", batch, SavedTokenizer())
    tensors = load_file(folder / "batch.safetensors")
    assert torch.equal(tensors["completion_ids"], batch.completion_ids)
    assert torch.equal(tensors["old_logprobs"], old)
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    assert len(rows) == batch.rows
    assert [row["not_finite"] for row in rows] == [
        ["old_logprobs"] if number == 2 else [] for number in range(batch.rows)
    ]
    length = int(batch.completion_lengths[2])
    assert rows[2]["completion"] == " ".join(map(str, batch.completion_ids[2, :length].tolist()))
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    assert steps == list(range(31 - LAST_METRICS, 31))
