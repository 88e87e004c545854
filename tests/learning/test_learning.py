"""Learning: GRPO must raise held-out accuracy, and must not when the rewards are shuffled."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.evaluation.statistics import PairedComparison
from grouper.runs.progress import Progress
from grouper.training.pipeline import RunResult
from grouper.training.run import Run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# The seed is none of those whose results are reported, so nothing here is tuned on them.
SHORT = ["seed=11", "sft.steps=300", "sft.evaluate_every=0", "grpo.steps=30"]
SHORT += ["grpo.evaluate_every=0"]
# A little faster than the recipe, since there are half as many steps; the same for the control.
SHORT += ["grpo.optimizer.learning_rate=1e-4"]


def run(folder: Path, *overrides: str) -> RunResult:
    recipe = load_recipe("demo", [*SHORT, f"output_dir={folder}", *overrides])
    with Run(recipe, Progress(quiet=True)) as open_run:
        return train(open_run)


def gain(result: RunResult) -> PairedComparison:
    assert result.comparison is not None
    _, difference, _ = result.comparison.differences
    return difference.paired


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(tmp_path_factory.mktemp("learning"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # Muon is slow where a processor has no bfloat16 products
def test_grpo_raises_held_out_accuracy(whole_run: RunResult) -> None:
    paired = gain(whole_run)
    assert paired.interval.low > 0.2
    assert paired.verdict == "better"
    assert paired.after > 0.8


@pytest.mark.slow
@pytest.mark.long  # docs/results/demo.md has it on three seeds
@pytest.mark.timeout(900)  # Muon is slow where a processor has no bfloat16 products
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    assert gain(run(tmp_path, "grpo.shuffle_rewards=true")).difference < 0.05


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_grpo_in_200_lines_learns_the_demonstration(
    whole_run: RunResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example begins where GRPO began, and is as good after as many steps."""
    model = whole_run.path / "sft" / "final"
    monkeypatch.setattr("sys.argv", ["grpo_in_200_lines.py", str(model), "--steps", "30"])
    runpy.run_path(str(EXAMPLES / "grpo_in_200_lines.py"), run_name="__main__")
    measured = re.search(r"validation: ([\d.]+)% before, ([\d.]+)% after", capsys.readouterr().out)
    assert measured is not None
    before, after = map(float, measured.groups())
    assert before < 70
    assert after > 80
