"""The state a phase begins or goes on with, and what is said about a run that goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from grouper.errors import CheckpointError
from grouper.models.device import find_device
from grouper.models.policy import Policy
from grouper.tracking.identity import CONTENTS, LENGTHS, Changes, describe_changes, that_differ
from grouper.training.checkpoint import (
    OPTIMIZER_FOLDER,
    TrainState,
    is_complete,
    latest_checkpoint,
    load_optimizer,
    read_state,
)
from grouper.training.curriculum import DifficultyBand, ProblemStream, total_steps
from grouper.training.metrics import StepClock
from grouper.training.optimizers import make_optimizer
from grouper.training.run import Run, describe_versions
from grouper.types import StepReport

__all__ = ["banner_lines", "fresh_state", "resumed_state"]

log = logging.getLogger(__name__)


def fresh_state(run: Run, phase: str, policy: Policy, path: str) -> TrainState:
    """The state at the beginning of a phase.

    Args:
        run: the open run.
        phase: `sft` or `grpo`.
        policy: what it starts with.
        path: the model folder that was loaded from.
    """
    recipe, prepared = run.recipe, run.prepared
    config = recipe.sft if phase == "sft" else recipe.grpo
    size = len(prepared.demonstrations if phase == "sft" else prepared.train)
    per_step = recipe.sft.batch_size if phase == "sft" else recipe.grpo.prompts_per_step
    band = recipe.grpo.difficulty if phase == "grpo" else None
    replica = run.replica(policy)
    # After the replica: it may have put other parameters in the place of the policy's.
    optimizer = make_optimizer(policy, config.optimizer)
    return TrainState(
        phase=phase,
        step=0,
        replica=replica,
        optimizer=optimizer,
        total=total_steps(config, size=size, per_step=per_step),
        stream=ProblemStream(size=size, seed=recipe.seed, phase=phase),
        clock=StepClock(policy, run.processes.size),
        started_from=path,
        difficulty=None if band is None else DifficultyBand(band),
        rewards=run.rewards if phase == "grpo" else None,
    )


def resumed_state(run: Run, phase: str) -> TrainState | None:
    """The state of the newest whole checkpoint, everything after it cut off; None without one.

    Raises:
        CheckpointError: there are only damaged ones, or it does not fit the recipe.
    """
    hashes = run.processes.on_rank0(run.folder.recipe_hashes)
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
        config = getattr(run.recipe, phase)
        state.optimizer = make_optimizer(state.policy, config.optimizer)
    state.restore(saved)
    # What a hook asked for goes with it.
    state.asked = {word: who for word, who in state.asked.items() if who in run.recipe.hooks}
    run.folder.truncate_to(phase, state.step)
    run.processes.on_rank0(lambda: _warn_of_holes(run, phase, state.step))
    changes = run.processes.on_rank0(lambda: run.folder.changes_begin_at(phase, state.step))
    run.display.say(f"Resuming {phase} at step {state.step} from {folder}.")
    for line in banner_lines(
        run.folder.read_info(),
        changes,
        versions=describe_versions(find_device(run.recipe.device)),
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
    for hole in run.folder.holes(steps):
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
