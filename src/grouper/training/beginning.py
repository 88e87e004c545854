"""How a phase begins: at its first step or where its last checkpoint is, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from grouper.errors import CheckpointError, RunFolderError
from grouper.models.policy import Policy
from grouper.runs.identity import CONTENTS, LENGTHS, Changes, describe_changes, that_differ
from grouper.training.checkpoint import (
    OPTIMIZER_FOLDER,
    STATE_FILE,
    TrainState,
    is_complete,
    is_finished,
    latest_checkpoint,
    load_optimizer,
    read_state,
)
from grouper.training.curriculum import DifficultyBand, ProblemStream, total_steps
from grouper.training.metrics import StepClock
from grouper.training.optimizers import make_optimizer
from grouper.training.run import Run, describe_versions
from grouper.types import StepReport

log = logging.getLogger(__name__)


def begin(run: Run, phase: str, policy: Policy | None) -> TrainState:
    """A phase where its last checkpoint is, or at its first step.

    Args:
        run: the open run.
        phase: `sft` or `grpo`.
        policy: what the phase before, or the measurement of the base, has left in memory, if
            anything.

    Raises:
        CheckpointError: there are only damaged ones, or the last one does not fit the recipe.
        RunFolderError: SFT would come after the GRPO of this run.
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
        # Of the record, what lies before this phase stays; nothing does before SFT but the base.
        run.folder.truncate_to("base" if phase == "sft" else phase, 0)
        run.folder.changes_begin_at(phase, 0)
        state = fresh_state(run, phase, start, path)
    if reference is not None:
        state.reference = state.replica.shard(reference)
    return state


def phase_is_finished(run: Run, phase: str) -> bool:
    """Whether a phase is finished, as rank 0 sees the file system."""
    _, total = _lengths(run, phase)
    return run.processes.on_rank0(lambda: is_finished(run.path, phase, total))


def _lengths(run: Run, phase: str) -> tuple[int, int]:
    """Items that a phase has, and its steps."""
    recipe, prepared = run.recipe, run.prepared
    if phase == "sft":
        size, per_step = len(prepared.demonstrations), recipe.sft.batch_size
        return size, total_steps(recipe.sft, size=size, per_step=per_step)
    size, per_step = len(prepared.train), recipe.grpo.prompts_per_step
    return size, total_steps(recipe.grpo, size=size, per_step=per_step)


def _refuse_sft_after_grpo(run: Run) -> None:
    """A run whose GRPO went without SFT cannot be given an SFT afterwards."""
    begun = sorted((run.path / "grpo").glob("*/" + STATE_FILE))
    if not begun:
        return
    final, checkpoint = run.path / "sft" / "final", begun[0].parent
    if Path(read_state(checkpoint)["started_from"]).parts[-3:] == final.parts[-3:]:
        raise RunFolderError(
            f"{final}, which the GRPO of this run began from, is missing",
            where=str(checkpoint),
            fix="Restore it from a backup, go on with GRPO alone (--skip-sft), or delete "
            f"{run.path / 'grpo'} to go on from the last checkpoint of SFT.",
        )
    raise RunFolderError(
        "the GRPO of this run did not start from its SFT, which has not been run",
        where=str(checkpoint),
        fix="Go on with --skip-sft, or give the run with SFT another name.",
    )


def _starting_policy(run: Run, phase: str, policy: Policy | None) -> tuple[Policy, str]:
    """What a phase starts from, and its folder. SFT starts from the base; GRPO from the model of
    the recipe, else from what SFT left, else from the base.
    """
    start, sft = run.recipe.grpo.start_from, run.path / "sft" / "final"
    if phase == "sft":
        return policy or run.load(run.base_path), run.base_path
    if start is not None:
        run.display.say(f"GRPO starts from {start}.")
        return run.load(start), start
    # What this run has just trained or looked through needs no second look.
    if not run.recipe.skip_sft or phase_is_finished(run, "sft"):
        run.display.say(f"GRPO starts from {sft}.")
        trained = None if run.recipe.skip_sft else policy
        return trained or run.load(str(sft)), str(sft)
    run.display.say(
        f"GRPO starts from the base model {run.base_path}: there is no {sft} and no "
        "grpo.start_from."
    )
    return policy or run.load(run.base_path), run.base_path


def fresh_state(run: Run, phase: str, policy: Policy, path: str) -> TrainState:
    """The state at the beginning of a phase.

    Args:
        run: the open run.
        phase: `sft` or `grpo`.
        policy: what it starts with.
        path: the model folder that was loaded from.
    """
    config = run.recipe.sft if phase == "sft" else run.recipe.grpo
    band = run.recipe.grpo.difficulty if phase == "grpo" else None
    size, total = _lengths(run, phase)
    replica = run.replica(policy)
    # After the replica: it may have put other parameters in the place of the policy's.
    optimizer = make_optimizer(policy, config.optimizer)
    return TrainState(
        phase=phase,
        step=0,
        replica=replica,
        optimizer=optimizer,
        total=total,
        stream=ProblemStream(size=size, seed=run.recipe.seed, phase=phase),
        clock=StepClock(policy, run.processes.size),
        started_from=path,
        difficulty=None if band is None else DifficultyBand(band),
    )


def _resumed_state(run: Run, phase: str) -> TrainState | None:
    """The state of the newest whole checkpoint, everything after it cut off; None without one."""
    hashes = run.folder.recipe_hashes()
    found = run.processes.on_rank0(lambda: latest_checkpoint(run.path, phase, recipe_hashes=hashes))
    if found is None:
        return None
    folder, saved = found
    state = fresh_state(run, phase, run.load(str(folder)), saved["started_from"])
    try:
        load_optimizer(state.optimizer, folder / OPTIMIZER_FOLDER)
    except CheckpointError as error:
        if saved["recipe_hash"] == run.hash:
            raise
        log.warning("The optimizer starts anew, since the recipe changed: %s", error.what)
        state.optimizer = make_optimizer(state.policy, getattr(run.recipe, phase).optimizer)
    state.restore(saved)
    # What a hook asked for goes with it.
    state.asked = {word: who for word, who in state.asked.items() if who in run.recipe.hooks}
    run.folder.truncate_to(phase, state.step)
    _warn_of_holes(run, phase, state.step)
    changes = run.folder.changes_begin_at(phase, state.step)
    run.display.say(f"Resuming {phase} at step {state.step} from {folder}.")
    for line in banner_lines(
        run.folder.read_info(),
        changes,
        versions=describe_versions(run.recipe),
        threads=torch.get_num_threads(),
        processes=run.processes.size,
        reports=[r for r in run.folder.read_metrics() if r.phase == phase],
    ):
        run.display.say(line)
    return state


def _warn_of_holes(run: Run, phase: str, step: int) -> None:
    """Warn of what was lost from the record of the steps that are not done again."""
    steps, sft = {phase: step}, run.path / "sft" / "final"
    if phase == "grpo" and is_complete(sft):
        steps = {"sft": int(read_state(sft)["step"]), **steps}
    holes = run.folder.holes(steps)
    for hole in holes if run.processes.rank == 0 else ():
        log.warning(
            "The record of this run has lost %s. Training goes on without: the weights do not need "
            "them, but curves and `grouper diagnose` do. Restore the files in %s from a backup, or "
            "start again with --overwrite.",
            hole,
            run.path,
        )


def banner_lines(
    info: Mapping[str, Any],
    changes: Changes,
    *,
    versions: Mapping[str, str],
    threads: int,
    processes: int,
    reports: Sequence[StepReport] = (),
) -> Iterator[str]:
    """What a run that goes on says of itself; what makes it differ is also a warning.

    Args:
        info: `run.json`.
        changes: in recipe, data and code, allowed by the user for this resume.
        versions: of the packages and kernels now.
        threads: CPU threads now.
        processes: of the run now.
        reports: steps of the phase up to where it goes on.
    """
    if changes:
        yield f"  recipe: changed, as allowed: {describe_changes(changes, limit=50)}"
        if changes.keys() & {*LENGTHS}:
            yield "  schedule: the learning rate follows the new number of steps from here on"
    else:
        yield f"  recipe: unchanged (hash {info['recipe_hash']})"
    for change in info["changes"][: -1 if changes else None]:
        what = describe_changes(change["changes"])
        yield f"  changed before, at {change['phase']} step {change['step']}: {what}"
    for kind, key in CONTENTS.items():
        if info.get(key):
            marks = (f"{name} {mark[:12]}" for name, mark in sorted(info[key].items()))
            yield f"  {kind}: {', '.join(marks)}"
    began = info["host"]
    now: dict[str, Any] = {**versions, "CPU threads": threads, "processes": processes}
    before = {"CPU threads": began["threads"], "processes": began["processes"]}
    if differ := that_differ({**info["versions"], **before}, now):
        log.warning(
            "The run began with other versions, kernels or threads (%s): results will not be the "
            "same bit for bit.",
            describe_changes(differ),
        )
    else:
        yield (
            f"  versions and kernels: as before; {threads} CPU threads, {processes} processes, as "
            "before"
        )
    if reports:
        yield f"  last step: {_last(reports[-1])}"


_SHOWN = {"reward/total": "reward {:.3f}", "solve_rate": "solved {:.1%}", "loss": "loss {:.4f}"}


def _last(report: StepReport) -> str:
    found = [
        form.format(report.tallies[name].mean)
        for name, form in _SHOWN.items()
        if name in report.tallies and report.tallies[name].count
    ]
    return ", ".join([report.status, *found])
