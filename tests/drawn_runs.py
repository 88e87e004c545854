"""Run folders made by hand, for tests of what is drawn of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grouper.config.loading import load_recipe, resolved_yaml
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.files import write_lines
from grouper.runs.folder import RunFolder
from grouper.runs.records import RunInfo
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
    "policy/kl": 0.01,
    "policy/ratio": 1.0,
    "policy/clip_fraction": 0.02,
    "grad_norm": 0.3,
    "learning_rate": 1e-5,
    "time.decode": 3.0,
    "time.update": 1.0,
    "time.other": 0.5,
    "time.step": 4.5,
}
"""Metric -> its value in the first step."""

NASTY = (
    "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)> &amp; "
    "\x1b[31mred\x00 \u202egnp.exe\u2066 \ud83d and \u05e9\u05dc\u05d5\u05dd"
)
"""What no page and no terminal may take for its own."""


def report(phase: str, step: int, values: dict[str, float]) -> StepReport:
    """A step whose metrics rise slowly from these values."""
    tallies = {
        name: Tally.of([value if name.startswith("groups/") else value * (1 + step / 100)])
        for name, value in values.items()
    }
    return StepReport(phase=phase, step=step, tallies=tallies, status="learning")


def result(
    name: str,
    phase: str,
    step: int,
    split: str,
    solved: int,
    *,
    text: str = "so 1",
    problem: str = "p",
) -> EvaluationResult:
    """An evaluation of twenty problems of which the first `solved` are right."""
    items = tuple(
        EvaluationItem(
            problem_id=f"{problem}/{i}",
            subject=["algebra", "<b>geometry</b>"][i % 2],
            level=None,
            sample=0,
            prompt=f"Question {i}?",
            completion=f"{name} {text}",
            answer="1",
            extracted="1",
            verdict=Verdict.CORRECT if i < solved else Verdict.INCORRECT,
            reason="",
            stage="",
            finish_reason=FinishReason.STOP_TOKEN,
            tokens=5,
        )
        for i in range(20)
    )
    return EvaluationResult(name=name, phase=phase, step=step, split=split, items=items, samples=1)


def rollout(step: int, number: int, *, text: str = "so 2", traced: bool = False) -> dict[str, Any]:
    """A row of the rollouts of a step, in a group of four."""
    tokens = {
        "token_texts": ["so", " 2", "<eos>"],
        "logprobs": [-0.5, -1.0, -0.1],
        "trainer_logprobs": [-0.5, -1.25, -0.1],
        "entropies": [1.0, 2.0, 0.5],
        "clipped": [1],
    }
    return {
        "phase": "grpo",
        "step": step,
        "group": number // 4,
        "sample": number % 4,
        "problem_id": f"train/{number // 4}",
        "prompt": f"Question {number // 4}?",
        "completion": text,
        "answer": "2",
        "extracted": "2",
        "verdict": "correct" if number % 2 else "incorrect",
        "stage": "number",
        "reason": "2 = 2",
        "finish_reason": "stop_token",
        "tokens": 3,
        "policy_version": step,
        "rewards": {"correctness": float(number % 2), "format": 0.5},
        "reward": number % 2 + 0.1 * number,
        "advantage": 1.0 if number % 2 else -1.0,
        **(tokens if traced else {}),
    }


def new_run(path: Path, overrides: Sequence[str] = ()) -> RunFolder:
    """A run folder in which nothing has been recorded."""
    recipe = load_recipe("demo", overrides)
    info = RunInfo(recipe_hash="a", versions={"torch": "2.13.0"}, fingerprints={"train": "f00d"})
    return RunFolder.create(path, info, recipe_yaml=resolved_yaml(recipe))


def make_run(
    path: Path,
    *,
    grpo: dict[str, float] | None = None,
    sft: bool = True,
    steps: int = 5,
    rollouts: int = 8,
    text: str = "so 2",
) -> RunFolder:
    """A run of forty SFT steps and a few GRPO steps, with evaluations and rollouts."""
    run = new_run(path)
    if sft:
        for step in range(1, 41):
            run.append_metrics(report("sft", step, {"loss": 2.0}))
        run.write_evaluation(result("base", "base", 0, "test", 0, text=text))
        run.write_evaluation(result("sft", "sft", 40, "test", 8, text=text))
        run.write_evaluation(result("validation-sft-000020", "sft", 20, "validation", 5))
    for step in range(1, steps + 1):
        run.append_metrics(report("grpo", step, GRPO if grpo is None else grpo))
        rows = [rollout(step, n, text=text, traced=n < 4) for n in range(rollouts)]
        write_lines(path / "rollouts" / f"grpo-{step:06d}.jsonl.gz", rows)
    run.write_evaluation(result("validation-grpo-000005", "grpo", 5, "validation", 17))
    run.write_evaluation(result("grpo", "grpo", steps, "test", 18, text=text))
    return run
