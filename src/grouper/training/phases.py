"""A whole run: base -> SFT -> GRPO, measured after each on the same problems.

Also how a phase starts: at its first step, or at its last checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grouper.errors import CheckpointError, DataError, RunFolderError
from grouper.evaluation.compare import Comparison, compare
from grouper.evaluation.result import EvaluationResult
from grouper.models.allocator import prefer_expandable_segments
from grouper.models.folders import STATE_FILE, read_adapter
from grouper.models.policy import Policy
from grouper.runs.folder import PHASES
from grouper.runs.records import NOT_THERE, Changes, RunInfo, describe_changes, that_differ
from grouper.training.checkpoint import load_optimizer, save_checkpoint
from grouper.training.curriculum import DifficultyBand, ProblemStream, total_steps
from grouper.training.disk_room import check_room_for_run
from grouper.training.hooks import Hook
from grouper.training.loop import run_phase
from grouper.training.measure import measure_policy
from grouper.training.metrics import StepClock
from grouper.training.observe import take_step
from grouper.training.optimizers import make_optimizer
from grouper.training.rollouts import RolloutSource, read_rollouts
from grouper.training.rotation import tidy
from grouper.training.run import Run, describe_versions
from grouper.training.save_path import check_save_path, export_to_save_path
from grouper.training.saved_state import (
    OPTIMIZER_FOLDER,
    is_complete,
    is_finished,
    latest_checkpoint,
    read_state,
)
from grouper.training.state import TrainState

log = logging.getLogger(__name__)

# Settings that the accuracy in validation depends on.
_MEASURED_BY = ("data.validation", "evaluation.", "grading.")
# Settings of the model that a phase begins with.
_START = ("model.path", "model.revision", "model.new.", "model.lora.", "grpo.start_from")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves behind."""

    path: Path
    results: tuple[EvaluationResult, ...]
    """Test results in the order base, SFT, GRPO, as far as there are any."""
    comparison: Comparison | None
    """None with fewer than two of them, or where they share no problem."""


@torch.inference_mode(False)  # with gradients, whatever the caller has switched off
def train(run: Run, hooks: Sequence[Hook] = ()) -> RunResult:
    """Run every phase of the recipe that is not finished yet, and compare.

    Args:
        run: the open run.
        hooks: called around the steps of each phase; `api.train` puts the usual ones together.

    Raises:
        GrouperError: see the phases. What was finished before is kept, and `--resume` continues.
    """
    prefer_expandable_segments()
    recipe, on_rank0 = run.recipe, run.processes.on_rank0
    on_rank0(lambda: check_save_path(recipe, run.path))
    policy = None
    if run.prepared.test and run.folder.read_evaluation("base") is None:
        policy = run.models.load(run.base_path)
        for hook in hooks:
            hook.run_begins(run, policy)
        _measure(run, policy, "base", 0)
    if not recipe.skip_sft:
        policy = _phase(run, "sft", policy, hooks)
    if not recipe.skip_grpo:
        if recipe.grpo.start_from is not None:
            # The SFT model is released before another one is loaded.
            policy = None
            run.models.forget()
        _phase(run, "grpo", policy, hooks)
    results = tuple(r for name in PHASES if (r := run.folder.read_evaluation(name)) is not None)
    try:
        comparison = compare(results) if len(results) > 1 else None
    except DataError as error:  # data.test has changed since the first of them
        comparison = None
        log.warning("%s", error.paragraph())
    on_rank0(run.folder.redraw)
    saved = on_rank0(lambda: export_to_save_path(recipe, run.path))
    if saved is not None:
        run.display.say(saved)
    for hook in hooks:
        hook.run_ends(run)
    return RunResult(path=run.path, results=results, comparison=comparison)


def _measure(run: Run, policy: Policy, name: str, step: int) -> None:
    """Measure on the test problems, unless the model of this step has been measured."""
    before = run.folder.read_evaluation(name)
    if run.prepared.test and (before is None or before.step != step):
        measure_policy(run, policy, phase=name, step=step, split="test")


def _phase(run: Run, name: str, policy: Policy | None, hooks: Sequence[Hook]) -> Policy | None:
    """Run and measure what is left of a phase; returns its policy if that is loaded."""
    final = run.path / name / "final"
    if phase_is_finished(run, name):
        if run.folder.read_evaluation(name) is not None or not run.prepared.test:
            return None
        policy = run.models.load(str(final))
    else:
        state = begin(run, name, policy)
        policy, recipe = state.replica.policy, run.recipe
        left = {name: state.config(recipe)}
        if name == "sft" and not recipe.skip_grpo:
            left["grpo"] = recipe.grpo
        run.processes.on_rank0(lambda: check_room_for_run(run.path, state.replica.policy, left))
        run_phase(run, state, take_step, hooks)
        # First: once the final folder exists, nothing else of the phase is looked at.
        tidy(run, state)
        save_checkpoint(run.path, state, run.prepared.tokenizer, recipe_hash=run.hash, final=True)
        run.display.say(f"{name} is finished: {final}")
    _measure(run, policy, name, int(read_state(final)["step"]))
    return policy


# --- how a phase starts --------------------------------------------------------------------------


def begin(run: Run, phase: str, policy: Policy | None) -> TrainState:
    """The state of a phase at its last checkpoint, or at its first step.

    Args:
        run: the open run.
        phase: `sft` or `grpo`.
        policy: the model that the previous phase, or the evaluation of the base, left in memory,
            if any.

    Raises:
        CheckpointError: all are damaged, or the last one does not fit the recipe.
        RunFolderError: SFT would run after the GRPO of this run.
        ModelError: what the phase starts from cannot be loaded.
    """
    if phase == "sft":
        run.processes.on_rank0(lambda: _refuse_sft_after_grpo(run))
    state = _resumed_state(run, phase)
    # The reference is where GRPO started, so it is needed after a resume, too.
    has_reference = phase == "grpo" and run.recipe.grpo.beta > 0
    if state is not None and not has_reference:
        return state
    start, path = _starting_policy(run, phase, policy)
    reference = start.snapshot() if has_reference else None
    if state is None:
        # The record of earlier phases is kept: before SFT there is only the base.
        run.folder.truncate_to("base" if phase == "sft" else phase, 0)
        run.folder.changes_begin_at(phase, 0)
        state = fresh_state(run, phase, start, path)
    if reference is not None:
        state.reference = state.replica.shard(reference)
    return state


def phase_is_finished(run: Run, phase: str) -> bool:
    """Whether a phase is finished, as rank 0 sees the file system."""
    # A phase that is skipped is not made longer.
    _, total = _lengths(run, phase) if phase in run.recipe.phases else (0, 0)
    return run.processes.on_rank0(lambda: is_finished(run.path, phase, total))


def _lengths(run: Run, phase: str) -> tuple[int, int]:
    """Items that a phase has, and its steps."""
    recipe, prepared = run.recipe, run.prepared
    size, per_step = len(prepared.train), recipe.grpo.prompts_per_step
    if phase == "sft":
        size, per_step = len(prepared.demonstrations), recipe.sft.batch_size
    return size, total_steps(getattr(recipe, phase), size=size, per_step=per_step)


def _refuse_sft_after_grpo(run: Run) -> None:
    """Refuse SFT if the GRPO of this run has started without it."""
    begun = sorted((run.path / "grpo").glob("*/" + STATE_FILE))
    if not begun:
        return
    final, checkpoint = run.path / "sft" / "final", begun[0].parent
    what = "the GRPO of this run did not start from its SFT, which has not been run"
    fix = "Go on with --skip-sft, or give the run with SFT another name."
    if Path(read_state(checkpoint)["started_from"]).parts[-3:] == final.parts[-3:]:
        what = f"{final}, which the GRPO of this run began from, is missing"
        fix = "Restore it from a backup, go on with GRPO alone (--skip-sft), or delete "
        fix += f"{run.path / 'grpo'} to go on from the last checkpoint of SFT."
    raise RunFolderError(what, where=str(checkpoint), fix=fix)


def _starting_policy(run: Run, phase: str, policy: Policy | None) -> tuple[Policy, str]:
    """The model that a phase starts from, and its folder.

    SFT starts from the base; GRPO from `grpo.start_from`, else from the result of SFT, else from
    the base.
    """
    recipe, path, why = run.recipe, run.base_path, ""
    if phase == "grpo":
        sft = str(run.path / "sft" / "final")
        why = f"the base model {path}: there is no {sft} and no grpo.start_from"
        if recipe.grpo.start_from is not None:
            path = why = recipe.grpo.start_from
            policy = None
        # What this run has just trained or verified is not loaded again.
        elif not recipe.skip_sft or phase_is_finished(run, "sft"):
            path = why = sft
            policy = None if recipe.skip_sft else policy
        run.display.say(f"GRPO starts from {why}.")
    return policy or run.models.load(path), path


def fresh_state(run: Run, phase: str, policy: Policy, path: str) -> TrainState:
    """The state at the beginning of a phase.

    Args:
        run: the open run.
        phase: `sft` or `grpo`.
        policy: the model it starts with.
        path: the folder of that model.
    """
    size, total = _lengths(run, phase)
    replica = run.models.replica(policy)
    # After the replica, which may have replaced the policy's parameters.
    optimizer = make_optimizer(policy, getattr(run.recipe, phase).optimizer)
    stream = ProblemStream(size=size, seed=run.recipe.seed, phase=phase)
    return TrainState(
        phase=phase,
        step=0,
        replica=replica,
        optimizer=optimizer,
        total=total,
        stream=stream,
        clock=StepClock(policy, run.processes.size),
        started_from=path,
        rollouts=_rollout_source(run, stream) if phase == "grpo" else None,
    )


def _rollout_source(run: Run, stream: ProblemStream) -> RolloutSource:
    """Make the source of rollouts at the beginning of GRPO."""
    difficulty = run.recipe.grpo.difficulty
    band = None if difficulty is None else DifficultyBand(difficulty)
    return RolloutSource(run, stream, band)


def _resumed_state(run: Run, phase: str) -> TrainState | None:
    """The state at the newest intact checkpoint, with later records removed; None without one."""
    hashes = run.folder.recipe_hashes()
    found = run.processes.on_rank0(lambda: latest_checkpoint(run.path, phase, recipe_hashes=hashes))
    if found is None:
        return None
    folder, saved = found
    if run.recipe.model.lora is not None and read_adapter(str(folder)) is None:
        raise CheckpointError(
            "model.lora would make an adapter of these weights, which are removed at a later step",
            where=str(folder),
            fix="Go on without model.lora (--resume --allow-changes), or train the adapter in a "
            "run of its own, with a copy of this folder as its model.path.",
        )
    state = fresh_state(run, phase, run.models.load(str(folder)), saved["started_from"])
    try:
        load_optimizer(state.optimizer, folder / OPTIMIZER_FOLDER)
    except CheckpointError as error:
        if saved["recipe_hash"] == run.hash:
            raise
        log.warning("The optimizer starts anew, since the recipe changed: %s", error.what)
        state.optimizer = make_optimizer(state.replica.policy, state.config(run.recipe).optimizer)
    state.restore(saved)
    # The requests of a hook are dropped with it.
    state.asked = {word: who for word, who in state.asked.items() if who in run.recipe.hooks}
    run.folder.truncate_to(phase, state.step)
    _warn_of_holes(run, phase, state.step)
    changes = run.folder.changes_begin_at(phase, state.step)
    here = [c for c in run.folder.read_info().changes if (c.phase, c.step) == (phase, state.step)]
    if any(key.startswith(_MEASURED_BY) for change in here for key in change.changes):
        state.best.accuracy = -1.0  # measured in another way: the next one measured is better
    # `here` may be the data or a reward function.
    if state.rollouts is not None and saved["recipe_hash"] == run.hash and not here:
        state.rollouts.next_rollouts = read_rollouts(folder)
    run.display.say(f"Resuming {phase} at step {state.step} from {folder}.")
    host = {"CPU threads": torch.get_num_threads(), "processes": run.processes.size}
    now = {**describe_versions(run.recipe), **host}
    for line in banner_lines(run.folder.read_info(), changes, now):
        run.display.say(line)
    if state.total != saved["total"]:
        run.display.say("  schedule: the learning rate follows the new number of steps from now on")
    return state


def _warn_of_holes(run: Run, phase: str, step: int) -> None:
    """Warn of gaps in the record of the steps that are not run again."""
    steps, sft = {phase: step}, run.path / "sft" / "final"
    if phase == "grpo" and is_complete(sft):
        steps = {"sft": int(read_state(sft)["step"]), **steps}
    holes = run.folder.holes(steps)  # every process asks
    for hole in holes if run.processes.rank == 0 else ():
        log.warning(
            "The record of this run has lost %s. Training goes on without: the weights do not need "
            "them, but curves and `grouper diagnose` do. Restore the files in %s from a backup, or "
            "start again with --overwrite.",
            hole,
            run.path,
        )


def banner_lines(info: RunInfo, changes: Changes, now: Mapping[str, Any]) -> Iterator[str]:
    """What a resumed run prints about itself; what makes it differ is also a warning.

    Args:
        info: `run.json`, which lists all changes ever allowed.
        changes: in recipe, data and code, allowed by the user for this resume.
        now: current versions of packages and kernels, CPU threads and number of processes.
    """
    changed = f"changed, as allowed: {describe_changes(changes, limit=50)}"
    yield "  recipe: " + (changed if changes else f"unchanged (hash {info.recipe_hash})")
    host = {"CPU threads": info.host["threads"], "processes": info.host["processes"]}
    if differ := that_differ({**info.versions, **host}, now):
        log.warning(
            "The run began with other versions, kernels or threads (%s): results will not be the "
            "same bit for bit.",
            describe_changes(differ),
        )
    # An adapter that is no longer wanted is merged: only what both recipes have is without effect.
    kept = {k: v for k, v in changes.items() if k.startswith(_START) and NOT_THERE not in v}
    if kept:
        text = "This phase goes on with the weights it has; this has no effect on them: %s"
        log.warning(text, describe_changes(kept))
