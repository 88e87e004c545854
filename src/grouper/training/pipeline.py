"""A whole run: base -> SFT -> GRPO, measured at each stop on the same problems."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from grouper.config.schema import GRPOConfig, SFTConfig
from grouper.errors import RunFolderError
from grouper.evaluation.compare import Comparison, compare
from grouper.evaluation.evaluate import EvaluationResult
from grouper.models.allocator import prefer_expandable_segments
from grouper.models.policy import Policy
from grouper.report.curves import draw_curves
from grouper.report.timing import draw_times
from grouper.training.checkpoint import (
    STATE_FILE,
    TrainState,
    check_room_for_run,
    check_save_path,
    export_to_save_path,
    is_finished,
    read_state,
    save_checkpoint,
)
from grouper.training.curriculum import total_steps
from grouper.training.grpo import grpo_step
from grouper.training.loop import Hook, run_phase, tidy
from grouper.training.resuming import fresh_state, resumed_state
from grouper.training.run import Run
from grouper.training.sft import sft_step

__all__ = ["RunResult", "begin_grpo", "train"]

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
    results = tuple(r for name in names if (r := run.recorded(name)) is not None)
    comparison = None
    if len(results) > 1:
        comparison = compare(results, confidence=recipe.evaluation.confidence)
    run.processes.on_rank0(lambda: (draw_curves(run.folder), draw_times(run.folder)))
    saved = run.processes.on_rank0(lambda: export_to_save_path(recipe, run.path))
    if saved is not None:
        run.display.say(saved)
    return RunResult(path=run.path, results=results, comparison=comparison)


def _measure(run: Run, policy: Policy, name: str, step: int) -> None:
    """Measure on the test problems, unless that has been done with the model of this step."""
    before = run.recorded(name)
    if run.prepared.test and (before is None or before.step != step):
        run.evaluate(policy, phase=name, step=step, split="test")


def _measure_base(run: Run) -> Policy | None:
    """Measure the untrained model; returns it for the first phase to go on with."""
    wanted = run.recipe.evaluation.base and run.prepared.test
    if not wanted or run.recorded("base") is not None:
        return None
    policy = run.load(run.base_path)
    _measure(run, policy, "base", 0)
    return policy


def _phase(run: Run, name: str, policy: Policy | None, hooks: Sequence[Hook]) -> Policy | None:
    """Run and measure a phase as far as that is not done; returns its policy if it is loaded."""
    final = run.path / name / "final"
    if _is_there(run, name):
        if run.recorded(name) is not None or not run.prepared.test:
            return None
        policy = run.load(str(final))
    else:
        begin = _begin_sft if name == "sft" else begin_grpo
        state = begin(run, policy)
        policy = state.policy
        _check_room(run, state)
        run_phase(run, state, sft_step if name == "sft" else grpo_step, hooks)
        _finish(run, state)
    _measure(run, policy, name, int(read_state(final)["step"]))
    return policy


def _begin_sft(run: Run, policy: Policy | None) -> TrainState:
    run.processes.on_rank0(lambda: _refuse_sft_behind_grpo(run))
    state = resumed_state(run, "sft")
    if state is None:
        policy = policy or run.load(run.base_path)
        state = _first_state(run, "sft", policy, run.base_path, kept="base")
    return state


def _refuse_sft_behind_grpo(run: Run) -> None:
    """A run whose GRPO went without SFT cannot be given an SFT afterwards."""
    begun = sorted((run.path / "grpo").glob("*/" + STATE_FILE))
    final = run.path / "sft" / "final"
    if begun and Path(read_state(begun[0].parent)["started_from"]).parts[-3:] == final.parts[-3:]:
        raise RunFolderError(
            f"{final}, which the GRPO of this run began from, is missing",
            where=str(begun[0].parent),
            fix="Restore it from a backup, go on with GRPO alone (--skip-sft), or delete "
            f"{run.path / 'grpo'} to go on from the last checkpoint of SFT.",
        )
    if begun:
        raise RunFolderError(
            "the GRPO of this run did not start from its SFT, which has not been run",
            where=str(begun[0].parent),
            fix="Go on with --skip-sft, or give the run with SFT another name.",
        )


def begin_grpo(run: Run, policy: Policy | None) -> TrainState:
    """GRPO where its last checkpoint is, or at its first step.

    Args:
        run: the open run.
        policy: what SFT or the measurement of the base has left in memory, if anything.
    """
    state = resumed_state(run, "grpo")
    # The reference is where GRPO started, so it is needed after a resume, too.
    reference: dict[str, Tensor] | None = None
    if state is None or run.recipe.grpo.beta > 0:
        start, path = _starting_policy(run, policy)
        if run.recipe.grpo.beta > 0:
            reference = start.snapshot()
        state = state or _first_state(run, "grpo", start, path, kept="grpo")
    state.reference = None if reference is None else state.replica.shard(reference)
    return state


def _first_state(run: Run, phase: str, policy: Policy, path: str, *, kept: str) -> TrainState:
    """The state before the first step; of the record, what lies before that of `kept` stays."""
    run.folder.truncate_to(kept, 0)
    run.processes.on_rank0(lambda: run.folder.changes_begin_at(phase, 0))
    return fresh_state(run, phase, policy, path)


def _starting_policy(run: Run, policy: Policy | None) -> tuple[Policy, str]:
    """What GRPO starts from, and its folder: of the recipe, else what SFT left, else the base."""
    start = run.recipe.grpo.start_from
    sft = run.path / "sft" / "final"
    if start is not None:
        run.display.say(f"GRPO starts from {start}.")
        return run.load(start), start
    # What this run has just trained or looked through needs no second look.
    if not run.recipe.skip_sft or _is_there(run, "sft"):
        run.display.say(f"GRPO starts from {sft}.")
        trained = policy if not run.recipe.skip_sft else None
        return trained or run.load(str(sft)), str(sft)
    run.display.say(
        f"GRPO starts from the base model {run.base_path}: there is no {sft} and no "
        "grpo.start_from."
    )
    return policy or run.load(run.base_path), run.base_path


def _is_there(run: Run, phase: str) -> bool:
    """Whether a phase is finished, as rank 0 sees the file system."""
    recipe, prepared = run.recipe, run.prepared
    total = (
        total_steps(recipe.sft, size=len(prepared.demonstrations), per_step=recipe.sft.batch_size)
        if phase == "sft"
        else total_steps(
            recipe.grpo, size=len(prepared.train), per_step=recipe.grpo.prompts_per_step
        )
    )
    return run.processes.on_rank0(lambda: is_finished(run.path, phase, total))


def _check_room(run: Run, state: TrainState) -> None:
    recipe = run.recipe
    left: dict[str, SFTConfig | GRPOConfig] = {state.phase: getattr(recipe, state.phase)}
    if state.phase == "sft" and not recipe.skip_grpo:
        left["grpo"] = recipe.grpo
    run.processes.on_rank0(lambda: check_room_for_run(run.path, state.policy, left))


def _finish(run: Run, state: TrainState) -> None:
    # First: whoever finds the final folder looks at nothing else of the phase any more.
    run.processes.on_rank0(lambda: tidy(run, state))
    tokenizer = run.prepared.tokenizer
    path = save_checkpoint(run.path, state, tokenizer, recipe_hash=run.hash, final=True)
    run.display.say(f"{state.phase} is finished: {path}")
