"""Learning: GRPO must raise held-out accuracy, and must not when the rewards are shuffled."""

from __future__ import annotations

from pathlib import Path

import pytest

from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.evaluation.statistics import PairedComparison
from grouper.runs.progress import Progress
from grouper.training.run import Run

# The seed is none of those whose results are reported, so nothing here is tuned on them.
SHORT = ["seed=11", "sft.steps=300", "sft.evaluate_every=0", "grpo.steps=30"]
SHORT += ["grpo.evaluate_every=0"]
# A little faster than the recipe, since there are half as many steps; the same for the control.
SHORT += ["grpo.optimizer.learning_rate=1e-4"]


def gain(tmp_path: Path, *overrides: str) -> PairedComparison:
    recipe = load_recipe("demo", [*SHORT, f"output_dir={tmp_path}", *overrides])
    with Run(recipe, Progress(quiet=True)) as run:
        result = train(run)
    assert result.comparison is not None
    _, difference, _ = result.comparison.differences
    return difference.paired


@pytest.mark.slow
@pytest.mark.timeout(900)  # Muon is slow where a processor has no bfloat16 products
def test_grpo_raises_held_out_accuracy(tmp_path: Path) -> None:
    paired = gain(tmp_path)
    assert paired.interval.low > 0.2
    assert paired.verdict == "better"
    assert paired.after > 0.8


@pytest.mark.slow
@pytest.mark.timeout(900)  # Muon is slow where a processor has no bfloat16 products
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    paired = gain(tmp_path, "grpo.shuffle_rewards=true")
    assert paired.difference < 0.05
