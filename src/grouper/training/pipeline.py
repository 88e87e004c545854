"""A whole run: base -> SFT -> GRPO, measured at each stop on the same problems."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grouper.config.schema import GRPOConfig, SFTConfig
from grouper.evaluation.compare import Comparison, compare
from grouper.evaluation.result import EvaluationResult
from grouper.models.allocator import prefer_expandable_segments
from grouper.models.policy import Policy
from grouper.report.curves import draw_curves
from grouper.report.timing import draw_times
from grouper.training.beginning import begin, phase_is_finished
from grouper.training.checkpoint import (
    TrainState,
    check_room_for_run,
    check_save_path,
    export_to_save_path,
    read_state,
    save_checkpoint,
)
from grouper.training.grpo import grpo_step
from grouper.training.loop import Hook, run_phase, tidy
from grouper.training.run import Run
from grouper.training.sft import sft_step

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves behind."""

    path: Path
    results: tuple[EvaluationResult, ...]
    """Test results in order: base, SFT, GRPO, as far as they were made."""
    comparison: Comparison | None
    """None with fewer than two of them."""


def train(run: Run, hooks: Sequence[Hook] = ()) -> RunResult:
    """Run every phase of the recipe that is not finished yet, compare, and draw the pictures.

    Args:
        run: the open run.
        hooks: called around the steps of each phase; `api.train` puts the usual ones together.

    Raises:
        GrouperError: see the phases. Everything finished before stays and `--resume` goes on.
    """
    prefer_expandable_segments()
    recipe = run.recipe
    run.processes.on_rank0(lambda: check_save_path(recipe, run.path))
    policy = _measure_base(run)
    if not recipe.skip_sft:
        policy = _phase(run, "sft", policy, hooks)
    if not recipe.skip_grpo:
        if recipe.grpo.start_from is not None:
            # What SFT left goes before another model comes, not after.
            policy = None
            run.forget_policy()
        policy = _phase(run, "grpo", policy, hooks)
    names = ("base", "sft", "grpo")
    results = tuple(r for name in names if (r := run.folder.read_evaluation(name)) is not None)
    comparison = None
    if len(results) > 1:
        comparison = compare(results)
    run.processes.on_rank0(lambda: (draw_curves(run.folder), draw_times(run.folder)))
    saved = run.processes.on_rank0(lambda: export_to_save_path(recipe, run.path))
    if saved is not None:
        run.display.say(saved)
    return RunResult(path=run.path, results=results, comparison=comparison)


def _measure(run: Run, policy: Policy, name: str, step: int) -> None:
    """Measure on the test problems, unless that has been done with the model of this step."""
    before = run.folder.read_evaluation(name)
    if run.prepared.test and (before is None or before.step != step):
        run.evaluate(policy, phase=name, step=step, split="test")


def _measure_base(run: Run) -> Policy | None:
    """Measure the untrained model; returns it for the first phase to go on with."""
    wanted = run.recipe.evaluation.base and run.prepared.test
    if not wanted or run.folder.read_evaluation("base") is not None:
        return None
    policy = run.load(run.base_path)
    _measure(run, policy, "base", 0)
    return policy


def _phase(run: Run, name: str, policy: Policy | None, hooks: Sequence[Hook]) -> Policy | None:
    """Run and measure a phase as far as that is not done; returns its policy if it is loaded."""
    final = run.path / name / "final"
    if phase_is_finished(run, name):
        if run.folder.read_evaluation(name) is not None or not run.prepared.test:
            return None
        policy = run.load(str(final))
    else:
        state = begin(run, name, policy)
        policy = state.policy
        _check_room(run, state)
        run_phase(run, state, sft_step if name == "sft" else grpo_step, hooks)
        _finish(run, state)
    _measure(run, policy, name, int(read_state(final)["step"]))
    return policy


def _check_room(run: Run, state: TrainState) -> None:
    recipe = run.recipe
    left: dict[str, SFTConfig | GRPOConfig] = {state.phase: getattr(recipe, state.phase)}
    if state.phase == "sft" and not recipe.skip_grpo:
        left["grpo"] = recipe.grpo
    run.processes.on_rank0(lambda: check_room_for_run(run.path, state.policy, left))


def _finish(run: Run, state: TrainState) -> None:
    # First: whoever finds the final folder looks at nothing else of the phase any more.
    tidy(run, state)
    tokenizer = run.prepared.tokenizer
    path = save_checkpoint(run.path, state, tokenizer, recipe_hash=run.hash, final=True)
    run.display.say(f"{state.phase} is finished: {path}")
