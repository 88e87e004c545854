"""The state a phase begins or goes on with, and what is said about a run that goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from grouper.errors import CheckpointError
from grouper.models.policy import Policy
from grouper.tracking.identity import CONTENTS, LENGTHS, Changes, describe_changes, that_differ
from grouper.training.checkpoint import (
    TrainState,
    is_complete,
    latest_checkpoint,
    load_optimizer,
    read_state,
    restore_counters,
)
from grouper.training.grpo import difficulty_band
from grouper.training.inputs import describe_versions
from grouper.training.optimizers import make_optimizer
from grouper.training.session import Session
from grouper.types import StepReport

__all__ = ["banner_lines", "fresh_state", "resumed_state"]

log = logging.getLogger(__name__)


def fresh_state(session: Session, phase: str, policy: Policy, path: str) -> TrainState:
    """The state at the beginning of a phase.

    Args:
        session: the open run.
        phase: `sft` or `grpo`.
        policy: what it starts with.
        path: the model folder that was loaded from.
    """
    config = session.recipe.sft if phase == "sft" else session.recipe.grpo
    replica = session.replica(policy)
    # After the replica: it may have put other parameters in the place of the policy's.
    optimizer = make_optimizer(policy, config.optimizer)
    return TrainState(
        phase=phase,
        step=0,
        replica=replica,
        optimizer=optimizer,
        started_from=path,
        difficulty=difficulty_band(session.recipe.grpo) if phase == "grpo" else None,
        rewards=session.rewards if phase == "grpo" else None,
    )


def resumed_state(session: Session, phase: str) -> TrainState | None:
    """The state of the newest whole checkpoint, everything after it cut off; None without one.

    Raises:
        CheckpointError: there are only damaged ones, or it does not fit the recipe.
    """
    hashes = session.team.lead(session.folder.recipe_hashes)
    found = session.team.lead(lambda: latest_checkpoint(session.path, phase, recipe_hashes=hashes))
    if found is None:
        return None
    folder, saved = found
    state = fresh_state(session, phase, session.load(str(folder)), saved["started_from"])
    try:
        load_optimizer(folder, state.optimizer, state.replica)
    except CheckpointError as error:
        if saved["recipe_hash"] == session.hash:
            raise
        log.warning("The optimizer starts anew, since the recipe changed: %s", error.what)
        config = getattr(session.recipe, phase)
        state.optimizer = make_optimizer(state.policy, config.optimizer)
    restore_counters(state, saved)
    session.folder.truncate_to(phase, state.step)
    session.team.lead(lambda: _tell_of_holes(session, {phase: state.step}))
    changes = session.team.lead(lambda: session.folder.changes_begin_at(phase, state.step))
    session.display.say(f"Resuming {phase} at step {state.step} from {folder}.")
    for line in banner_lines(
        session.folder.read_info(),
        changes,
        versions=describe_versions(session.device),
        threads=torch.get_num_threads(),
        processes=session.team.size,
        reports=[r for r in session.folder.read_metrics() if r.phase == phase],
    ):
        session.display.say(line)
    return state


def _tell_of_holes(session: Session, steps: dict[str, int]) -> None:
    """Warn of what was lost from the record of the steps that are not done again."""
    sft = session.path / "sft" / "final"
    if "grpo" in steps and is_complete(sft):
        steps = {"sft": int(read_state(sft)["step"]), **steps}
    for hole in session.folder.holes(steps):
        log.warning(
            "The record of this run has lost %s. Training goes on without: the weights do not need "
            "them, but curves and `grouper diagnose` do. Restore the files in %s from a backup, or "
            "start again with --overwrite.",
            hole,
            session.path,
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
    for change in info.get("changes", [])[: -1 if changes else None]:
        told = describe_changes(change["changes"])
        yield f"  changed before, at {change['phase']} step {change['step']}: {told}"
    for kind, key in CONTENTS.items():
        if info.get(key):
            marks = (f"{name} {mark[:12]}" for name, mark in sorted(info[key].items()))
            yield f"  {kind}: {', '.join(marks)}"
    began = info["host"]
    now: dict[str, Any] = {**versions, "CPU threads": threads, "processes": processes}
    before: dict[str, Any] = {
        **info["versions"],
        "CPU threads": began.get("threads", threads),
        "processes": began.get("processes", processes),
    }
    differ = that_differ(before, now)
    if differ:
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
