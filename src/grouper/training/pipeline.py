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
from grouper.training.rollouts import RolloutSource
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

# Prefixes of settings that the validation accuracy depends on.
_MEASURED_BY = ("data.validation", "evaluation.", "grading.")
# Prefixes of settings of the model that a phase begins with.
_START = ("model.path", "model.revision", "model.new.", "model.lora.", "grpo.start_from")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The results of a run."""

    path: Path
    """The run folder."""
    results: tuple[EvaluationResult, ...]
    """Test results in the order base, SFT, GRPO, as far as there are any."""
    comparison: Comparison | None
    """None with fewer than two results, or if no problem was scored in all of them."""


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
    recipe = run.recipe
    run.processes.on_rank0(lambda: check_save_path(recipe, run.path))
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
    results = _read_results(run)
    comparison = None
    if len(results) > 1:
        try:
            comparison = compare(results)
        except DataError as error:  # data.test has changed since the first, or nothing was scored
            log.warning("%s", error.paragraph())
    run.processes.on_rank0(run.folder.redraw)
    save_message = run.processes.on_rank0(lambda: export_to_save_path(recipe, run.path))
    if save_message is not None:
        run.display.say(save_message)
    for hook in hooks:
        hook.run_ends(run)
    return RunResult(path=run.path, results=results, comparison=comparison)


def _read_results(run: Run) -> tuple[EvaluationResult, ...]:
    """Read the test results of base, SFT and GRPO, without those that are missing."""
    results = []
    for name in PHASES:
        result = run.folder.read_evaluation(name)
        if result is not None:
            results.append(result)
    return tuple(results)


def _measure(run: Run, policy: Policy, name: str, step: int) -> None:
    """Measure on the test problems, unless the model of this step has been measured."""
    earlier = run.folder.read_evaluation(name)
    if run.prepared.test and (earlier is None or earlier.step != step):
        measure_policy(run, policy, phase=name, step=step, split="test")


def _phase(run: Run, name: str, policy: Policy | None, hooks: Sequence[Hook]) -> Policy | None:
    """Run the remaining steps of a phase and measure it; return its policy if that is loaded."""
    final = run.path / name / "final"
    if phase_is_finished(run, name):
        if run.folder.read_evaluation(name) is not None or not run.prepared.test:
            return None
        policy = run.models.load(str(final))
    else:
        state = begin(run, name, policy)
        policy = state.replica.policy
        remaining = {name: state.config(run.recipe)}
        if name == "sft" and not run.recipe.skip_grpo:
            remaining["grpo"] = run.recipe.grpo
        run.processes.on_rank0(
            lambda: check_room_for_run(run.path, state.replica.policy, remaining)
        )
        run_phase(run, state, take_step, hooks)
        # Tidy before saving: once the final folder exists, a resumed run does not tidy the phase.
        tidy(run, state)
        save_checkpoint(run.path, state, run.prepared.tokenizer, recipe_hash=run.hash, final=True)
        run.display.say(f"{name} is finished: {final}")
    _measure(run, policy, name, int(read_state(final)["step"]))
    return policy


# --- how a phase starts --------------------------------------------------------------------------


def begin(run: Run, phase: str, policy: Policy | None) -> TrainState:
    """Return the state of a phase at its last checkpoint, or at its first step, with its teachers.

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
    state = _first_state(run, phase, policy)
    state.teachers = run.models.teachers(phase)
    return state


def _first_state(run: Run, phase: str, policy: Policy | None) -> TrainState:
    """Return the state that `begin` returns, without teachers."""
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
    """Return whether a phase is finished, as rank 0 sees the file system."""
    total = 0  # a phase that is skipped is not extended
    if phase in run.recipe.phases:
        _, total = _lengths(run, phase)
    return run.processes.on_rank0(lambda: is_finished(run.path, phase, total))


def _lengths(run: Run, phase: str) -> tuple[int, int]:
    """Return the number of items that a phase trains on, and the number of its steps."""
    if phase == "sft":
        size = len(run.prepared.demonstrations)
        per_step = run.recipe.sft.batch_size
    else:
        size = len(run.prepared.train)
        per_step = run.recipe.grpo.prompts_per_step
    return size, total_steps(getattr(run.recipe, phase), size=size, per_step=per_step)


def _refuse_sft_after_grpo(run: Run) -> None:
    """Refuse SFT if the GRPO of this run has started without it."""
    state_files = sorted((run.path / "grpo").glob("*/" + STATE_FILE))
    if not state_files:
        return
    checkpoint = state_files[0].parent
    sft_final = run.path / "sft" / "final"
    started_from = Path(read_state(checkpoint)["started_from"])
    # Run, phase and checkpoint are compared: the run folder may have been moved.
    if started_from.parts[-3:] == sft_final.parts[-3:]:
        raise RunFolderError(
            f"{sft_final}, which the GRPO of this run began from, is missing",
            where=str(checkpoint),
            fix="Restore it from a backup, continue with GRPO alone (--skip-sft), or delete "
            f"{run.path / 'grpo'} to continue from the last checkpoint of SFT.",
        )
    raise RunFolderError(
        "the GRPO of this run did not start from its SFT, which has not been run",
        where=str(checkpoint),
        fix="Go on with --skip-sft, or give the run with SFT another name.",
    )


def _starting_policy(run: Run, phase: str, policy: Policy | None) -> tuple[Policy, str]:
    """Return the model that a phase starts from, and its folder.

    SFT starts from the base; GRPO from `grpo.start_from`, else from the result of SFT, else from
    the base. A model that is in memory already is not loaded again.
    """
    recipe = run.recipe
    path = run.base_path
    if phase == "grpo":
        sft_final = str(run.path / "sft" / "final")
        if recipe.grpo.start_from is not None:
            path = recipe.grpo.start_from
            description = path
            policy = None
        elif not recipe.skip_sft or phase_is_finished(run, "sft"):
            path = sft_final
            description = path
            if recipe.skip_sft:
                policy = None
        else:
            description = f"the base model {path}: there is no {sft_final} and no grpo.start_from"
        run.display.say(f"GRPO starts from {description}.")
    if policy is None:
        policy = run.models.load(path)
    return policy, path


def fresh_state(run: Run, phase: str, policy: Policy, path: str) -> TrainState:
    """Return the state at the beginning of a phase.

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
    """Return the state at the newest intact checkpoint, and remove later records; None without one.

    Raises:
        CheckpointError: the checkpoint does not fit the recipe.
    """
    hashes = run.folder.recipe_hashes()
    checkpoint = run.processes.on_rank0(
        lambda: latest_checkpoint(run.path, phase, recipe_hashes=hashes)
    )
    if checkpoint is None:
        return None
    folder, saved = checkpoint
    same_recipe = saved["recipe_hash"] == run.hash
    if run.recipe.model.lora is not None and read_adapter(str(folder)) is None:
        raise CheckpointError(
            "model.lora would make an adapter of these weights, which are removed at a later step",
            where=str(folder),
            fix="Continue without model.lora (--resume --allow-changes), or train the adapter in a "
            "run of its own, with a copy of this folder as its model.path.",
        )
    state = fresh_state(run, phase, run.models.load(str(folder)), saved["started_from"])
    try:
        load_optimizer(state.optimizer, folder / OPTIMIZER_FOLDER)
        state.replica.policy.reserved_bytes = 0
    except CheckpointError as error:
        if same_recipe:
            raise
        log.warning("The optimizer starts anew, since the recipe changed: %s", error.what)
        state.optimizer = make_optimizer(state.replica.policy, state.config(run.recipe).optimizer)
    state.restore(saved)
    # The requests of a hook are dropped with it.
    state.asked = {
        request: hook_name
        for request, hook_name in state.asked.items()
        if hook_name in run.recipe.hooks
    }
    run.folder.truncate_to(phase, state.step)
    _warn_of_missing_records(run, phase, state.step)
    changes = run.folder.changes_begin_at(phase, state.step)
    changes_at_step = [
        change
        for change in run.folder.read_info().changes
        if change.phase == phase and change.step == state.step
    ]
    changed_settings = [key for change in changes_at_step for key in change.changes]
    if any(key.startswith(_MEASURED_BY) for key in changed_settings):
        # The old score was measured in another way, so the next evaluation is the best one.
        state.best.accuracy = -1.0
    # Changes are checked as well: the hash does not cover the data and reward functions.
    if state.rollouts is not None and same_recipe and not changes_at_step:
        state.rollouts.read_next(folder)
    run.display.say(f"Resuming {phase} at step {state.step} from {folder}.")
    versions = {
        **describe_versions(run.recipe),
        "CPU threads": torch.get_num_threads(),
        "processes": run.processes.size,
    }
    for line in banner_lines(run.folder.read_info(), changes, versions):
        run.display.say(line)
    if state.total != saved["total"]:
        run.display.say("  schedule: the learning rate follows the new number of steps from now on")
    return state


def _warn_of_missing_records(run: Run, phase: str, step: int) -> None:
    """Warn of gaps in the record of the steps that are not run again."""
    steps = {}
    sft_final = run.path / "sft" / "final"
    if phase == "grpo" and is_complete(sft_final):
        steps["sft"] = int(read_state(sft_final)["step"])
    steps[phase] = step
    # Called on every process: they wait for each other.
    missing_records = run.folder.missing_records(steps)
    if run.processes.rank != 0:
        return
    for missing in missing_records:
        log.warning(
            "The record of this run has lost %s. Training continues: the weights do not need these "
            "records, but curves and `grouper diagnose` do. Restore the files in %s from a backup, "
            "or start again with --overwrite.",
            missing,
            run.path,
        )


def banner_lines(info: RunInfo, changes: Changes, versions: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that a resumed run prints about itself; log differences as warnings.

    Args:
        info: `run.json`, which lists all changes ever allowed.
        changes: in recipe, data and code, allowed by the user for this resume.
        versions: current versions of packages and kernels, CPU threads and number of processes.
    """
    if changes:
        yield f"  recipe: changed, as allowed: {describe_changes(changes, limit=50)}"
    else:
        yield f"  recipe: unchanged (hash {info.recipe_hash})"
    first_versions = {
        **info.versions,
        "CPU threads": info.host["threads"],
        "processes": info.host["processes"],
    }
    version_changes = that_differ(first_versions, versions)
    if version_changes:
        log.warning(
            "The run began with other versions, kernels or threads (%s): results will not be the "
            "same bit for bit.",
            describe_changes(version_changes),
        )
    # An adapter removed from the recipe is merged, which does have an effect: changes between a
    # setting and none are not listed.
    without_effect = {
        key: values
        for key, values in changes.items()
        if key.startswith(_START) and NOT_THERE not in values
    }
    if without_effect:
        log.warning(
            "This phase continues with its current weights; this has no effect on them: %s",
            describe_changes(without_effect),
        )
