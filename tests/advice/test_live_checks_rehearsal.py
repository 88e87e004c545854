"""The rehearsal: the largest slice is tried, and nothing of it remains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grouper.advice.live_checks import Rehearsal
from grouper.api import train
from grouper.config.loading import load_recipe
from grouper.models.policy import Policy
from grouper.runs.progress import Progress
from grouper.training.run import Run

SMALL = [
    "skip_grpo=true",
    "model.new.hidden_size=32",
    "model.new.intermediate_size=64",
    "data.sft.options.count=40",
    "data.train.options.count=12",
    "data.validation=null",
    "data.test=null",
    "sft.batch_size=16",
    "sft.steps=2",
    "sft.tokens_per_micro_batch=200",
    "sampling.max_new_tokens=12",
    "grading.symbolic=false",
]


class Forwards:
    """The tokens of every forward with a gradient; `torch.OutOfMemoryError` above a limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int | None = None) -> None:
        self.tokens: list[int] = []
        honest: Callable[..., Any] = Policy.forward

        @functools.wraps(honest)
        def forward(policy: Policy, batch: Any, **asked: bool) -> Any:
            if torch.is_grad_enabled():
                tokens = int(batch.prompt_lengths.sum() + batch.completion_lengths.sum())
                self.tokens.append(tokens)
                if limit is not None and tokens > limit:
                    raise torch.OutOfMemoryError("injected")
            return honest(policy, batch, **asked)

        monkeypatch.setattr(Policy, "forward", forward)


def run(folder: Path, *overrides: str, phase: str = "sft") -> dict[str, torch.Tensor]:
    recipe = load_recipe("demo", [*SMALL, f"output_dir={folder}", *overrides])
    with Run(recipe, Progress(quiet=True)) as open_run:
        path = train(open_run).path
    return load_file(path / phase / "final" / "model.safetensors")


def rehearse(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, phase: str = "sft"
) -> dict[str, torch.Tensor]:
    """A run that rehearses, as it would on a GPU."""
    with monkeypatch.context() as patched:
        patched.setattr(Rehearsal, "devices", ("cpu",))
        return run(folder, *overrides, phase=phase)


@pytest.mark.slow
def test_a_rehearsed_run_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(monkeypatch)
    plain = run(tmp_path / "plain")
    steps, forwards.tokens = forwards.tokens, []
    rehearsed = rehearse(monkeypatch, tmp_path / "rehearsed")
    first = len(forwards.tokens) - len(steps)
    assert forwards.tokens[first:] == steps
    # Two slices, the second of which meets a gradient, of the longest rows that fill the budget.
    assert first == 2
    assert 200 >= min(forwards.tokens[:first]) > 160
    assert plain.keys() == rehearsed.keys()
    for name, weight in plain.items():
        assert torch.equal(weight, rehearsed[name])


@pytest.mark.slow
def test_what_does_not_fit_is_known_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = Forwards(monkeypatch, limit=120)
    rehearse(monkeypatch, tmp_path, "sft.steps=1")
    failed = [number for number, tokens in enumerate(forwards.tokens) if tokens > 120]
    assert failed == [0]


def test_on_the_cpu_nothing_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grouper.advice import live_checks

    monkeypatch.setattr(live_checks, "accumulate_gradient", None)
    run(tmp_path, "sft.steps=1", "device=cpu")


@pytest.mark.slow
@pytest.mark.parametrize("bonus", [0.0, 0.01])
def test_it_asks_for_the_gradient_that_the_phase_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bonus: float
) -> None:
    """T8: with an entropy bonus the backward of the head holds more."""
    asked: list[bool] = []
    honest: Callable[..., Any] = Policy.forward

    def forward(policy: Policy, batch: Any, *, entropy_gradient: bool = False, **rest: Any) -> Any:
        if torch.is_grad_enabled():
            asked.append(entropy_gradient)
        return honest(policy, batch, entropy_gradient=entropy_gradient, **rest)

    monkeypatch.setattr(Policy, "forward", forward)
    settings = ["skip_grpo=false", "skip_sft=true", f"grpo.entropy_bonus={bonus}"]
    settings += ["grpo.steps=1", "grpo.prompts_per_step=2"]
    rehearse(monkeypatch, tmp_path, *settings, "grpo.allow_truncation=true", phase="grpo")
    assert asked
    assert set(asked) == {bonus > 0}
