"""Checkpoints: whole or absent. The folder appears under its name only when all of it is on disk.

    <run>/<phase>/checkpoint-<step>/   weights or adapter, tokenizer, template, generation config,
                                       optimizer.pt, trainer_state.json; best.json in the best one;
                                       optimizer-shards/ where the weights were split over processes
    <run>/<phase>/final/               the same without the optimizer

`trainer_state.json` is written last, is the mark that the folder is complete, and holds the
checksums by which a damaged one is found.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch

from grouper.algorithms.batching import TrainBatch
from grouper.errors import CheckpointError, RunFolderError
from grouper.files import whole_folder, write_atomic
from grouper.models.model_files import save_policy
from grouper.models.policy import Policy
from grouper.models.team import Team
from grouper.rewards import RewardStack
from grouper.tracking.run_folder import RunFolder
from grouper.training.difficulty import DifficultyBand
from grouper.training.disk_space import optimizer_bytes, require_room, weight_bytes
from grouper.training.integrity import STATE_FILE, contents, damage, is_complete
from grouper.training.optimizers import Optimizer
from grouper.training.replica import Replica
from grouper.training.retention import (
    OPTIMIZER_FILE,
    SHARDS_FOLDER,
    BestScore,
    crown,
    numbered,
)
from grouper.training.sharded_optimizer import load_shards, save_shards

__all__ = [
    "OPTIMIZER_FILE",
    "STATE_FILE",
    "TrainState",
    "is_complete",
    "is_finished",
    "latest_checkpoint",
    "load_optimizer",
    "read_state",
    "restore_counters",
    "save_checkpoint",
    "save_final",
]

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Everything a checkpoint holds: the only mutable record.

    The schedule and SFT's problem stream are functions of `step`, so they need no entry.
    """

    phase: str
    step: int
    """Steps finished in this phase."""
    replica: Replica
    """The policy, as this process runs it."""
    optimizer: Optimizer
    started_from: str = ""
    """The model folder the phase began with."""
    skipped: int = 0
    """Updates in a row that were skipped because something was not finite."""
    position: int = 0
    """GRPO: problems of the stream met so far, those passed over or replaced among them."""
    epoch_ended: bool = False
    """Whether the last step met the last item of an epoch."""
    difficulty: DifficultyBand | None = None
    rewards: RewardStack | None = None
    """GRPO: counts the groups that a reward function failed on."""
    best: BestScore = field(default_factory=BestScore)
    alarms: dict[str, Any] = field(default_factory=dict)
    """What the live checks remember of the last steps, as JSON values."""
    asked: dict[str, str] = field(default_factory=dict)
    """What hooks ask for after the last step, and which one does."""
    total: int = 0
    """Steps that the phase was to have when that was asked."""
    suspect: TrainBatch | None = None
    """The last step that was skipped; not saved."""

    def count_update(self, *, applied: bool, batch: TrainBatch | None) -> None:
        """Count one update, applied or skipped.

        Args:
            applied: whether the optimizer was stepped.
            batch: the step, where it was not.
        """
        self.skipped = 0 if applied else self.skipped + 1
        self.suspect = batch

    @property
    def policy(self) -> Policy:
        return self.replica.policy


def save_checkpoint(
    run: Path, state: TrainState, tokenizer: Any, *, recipe_hash: str, resumable: bool = True
) -> Path:
    """Save `checkpoint-<step>` of a phase.

    Every process of a team calls it. Rank 0 writes, in the same form as a run of one process; only
    an optimizer state that is split over processes is written by each of them.

    Args:
        run: the run folder.
        state: what to save.
        tokenizer: saved beside the weights.
        recipe_hash: of the run.
        resumable: with the optimizer state, so that training can go on from it.

    Raises:
        RunFolderError: on every process: the disk is full or not writable. Nothing is left
            half-written, and what was there before still is.
    """
    folder = run / state.phase / f"checkpoint-{state.step}"
    record = {**_readable(state, recipe_hash), **_counters(state)}
    if not resumable:
        _save(folder, state, tokenizer, record)
        return folder
    needed = weight_bytes(state.policy) + optimizer_bytes(state.policy, state.optimizer)
    _together(state.replica.team, lambda: require_room(folder, needed))
    if not state.replica.split:
        _save(folder, state, tokenizer, record, optimizer=state.optimizer.state_dict())
        return folder
    shards = folder.with_name(f".{SHARDS_FOLDER}.tmp")
    try:
        save_shards(state.optimizer, shards, state.replica.team)
        _save(folder, state, tokenizer, record, optimizer=[], shards=shards)
    finally:
        if state.replica.team.rank == 0:
            shutil.rmtree(shards, ignore_errors=True)
    return folder


def save_final(
    run: Path, state: TrainState, tokenizer: Any, *, recipe_hash: str, total: int
) -> Path:
    """Save `<phase>/final`, the model a phase hands on.

    Args:
        run: the run folder.
        state: what to save.
        tokenizer: saved beside the weights.
        recipe_hash: of the run.
        total: steps that the phase was to have; fewer where its target was reached.

    Raises:
        RunFolderError: as `save_checkpoint`.
    """
    folder = run / state.phase / "final"
    _save(folder, state, tokenizer, {**_readable(state, recipe_hash), "total": total})
    return folder


def _save(
    target: Path,
    state: TrainState,
    tokenizer: Any,
    record: dict[str, Any],
    *,
    optimizer: list[dict[str, Any]] | None = None,
    shards: Path | None = None,
) -> None:
    weights = state.replica.whole_weights()

    def write() -> None:
        if optimizer is None:
            require_room(target, weight_bytes(state.policy))
        with whole_folder(target) as folder:
            save_policy(state.policy, tokenizer, folder, weights)
            if optimizer is not None:
                torch.save(optimizer, folder / OPTIMIZER_FILE)
            if shards is not None:
                shards.rename(folder / SHARDS_FOLDER)
            if state.best.step == state.step:
                crown(folder, state.best)
            # A checkpoint never knows of steps that the record could still lose.
            RunFolder(target.parent.parent).flush_metrics()
            _mark(folder, {**record, "files": contents(folder)})

    _together(state.replica.team, write)


def _together(team: Team, act: Callable[[], None]) -> None:
    """Do something on rank 0; what the disk refuses is raised on all, so that all can go on."""

    def attempt() -> RunFolderError | None:
        try:
            act()
        except RunFolderError as error:
            return error
        return None

    problem = team.lead(attempt)
    if problem is not None:
        raise problem


def _mark(folder: Path, record: dict[str, Any]) -> None:
    """Write the readable state, whose presence says that the folder is complete."""
    write_atomic(folder / STATE_FILE, (json.dumps(record, indent=2) + "\n").encode())


def _readable(state: TrainState, recipe_hash: str) -> dict[str, Any]:
    return {
        "phase": state.phase,
        "step": state.step,
        "policy_version": state.policy.version,
        "started_from": state.started_from,
        "recipe_hash": recipe_hash,
    }


def _counters(state: TrainState) -> dict[str, Any]:
    return {
        "skipped": state.skipped,
        "position": state.position,
        "epoch_ended": state.epoch_ended,
        "difficulty": None if state.difficulty is None else state.difficulty.state_dict(),
        "reward_failures": None if state.rewards is None else state.rewards.state(),
        "best": state.best.state_dict(),
        "alarms": state.alarms,
        "asked": state.asked,
        "total": state.total,
    }


def restore_counters(state: TrainState, saved: dict[str, Any]) -> None:
    """Put what `trainer_state.json` holds back into a fresh state.

    What the recipe has only had since (`--allow-changes`) starts anew.
    """
    state.step = int(saved["step"])
    state.skipped, state.position = int(saved["skipped"]), int(saved["position"])
    state.epoch_ended = bool(saved["epoch_ended"])
    if state.difficulty is not None and saved["difficulty"] is not None:
        state.difficulty.load_state_dict(saved["difficulty"])
    if state.rewards is not None:
        state.rewards.load_state(saved["reward_failures"])
    state.best.load_state_dict(saved["best"])
    state.alarms = saved["alarms"] or {}
    state.asked, state.total = dict(saved.get("asked", {})), int(saved.get("total", 0))


def latest_checkpoint(
    run: Path, phase: str, *, recipe_hashes: Collection[str]
) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint to go on from and its readable state, or None.

    Damaged ones are named and skipped.

    Args:
        run: the run folder.
        phase: `sft` or `grpo`.
        recipe_hashes: of the run, and of what it was before changes that the user allowed.

    Raises:
        CheckpointError: it belongs to another recipe, or there are only damaged ones.
    """
    found = [folder for _, folder in reversed(numbered(run / phase)) if _is_to_go_on_from(folder)]
    for folder in found:
        problem = damage(folder)
        if problem is not None:
            log.warning("%s is skipped: %s.", folder, problem)
            continue
        state = read_state(folder)
        if state["recipe_hash"] not in recipe_hashes:
            _refuse_other_recipe(folder, state["recipe_hash"], recipe_hashes)
        return folder, state
    if found:
        raise CheckpointError(
            f"no checkpoint of {phase} can be used: {found[0].name}: {damage(found[0])}",
            where=str(run / phase),
            fix=f"Restore one from a backup, or delete {run / phase} to train {phase} again.",
        )
    return None


def is_finished(run: Path, phase: str, total: int) -> bool:
    """Whether the final folder of a phase is there and whole; a damaged one is made again.

    One of which only small files were edited is reported and used: its weights are still whole.
    A phase that has been given more steps since is not finished, unless GRPO has begun from it.

    Args:
        run: the run folder.
        phase: `sft` or `grpo`.
        total: steps that the phase is to have now.

    Raises:
        CheckpointError: `sft/final` is damaged while a GRPO that began from it is not finished.
    """
    final = run / phase / "final"
    if not is_complete(final):
        return False
    problem = damage(final)
    begun = phase == "sft" and any(is_complete(folder) for _, folder in numbered(run / "grpo"))
    if problem is not None and phase == "sft" and is_complete(run / "grpo" / "final"):
        return True
    if problem is not None and damage(final, only_tensors=True) is None:
        log.warning("%s: %s. It is used as it is.", final, problem)
        problem = None
    if problem is None:
        before = int(read_state(final)["total"])
        if total > before and begun:
            log.warning("SFT stays at %d steps of %d: GRPO has begun from it.", before, total)
        return total <= before or begun
    if begun:
        raise CheckpointError(
            f"{problem}, and GRPO has begun from it",
            where=str(final),
            fix=f"Restore it from a backup, or delete it and {run / 'grpo'} to go on from the last "
            "checkpoint of SFT.",
        )
    log.warning("%s is skipped: %s. It is made again.", final, problem)
    return False


def _is_to_go_on_from(folder: Path) -> bool:
    """Whether it was saved to go on from; the best one keeps its weights alone after a while."""
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        return OPTIMIZER_FILE in state["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return True  # damaged: to be named


def _refuse_other_recipe(folder: Path, theirs: str, ours: Collection[str]) -> None:
    raise CheckpointError(
        f"this checkpoint was written by recipe {theirs[:12]}, this is {', '.join(sorted(ours))}",
        where=str(folder),
        fix="Continue with the recipe.yaml of that run, or use another name or output_dir.",
    )


class _Readable(dict[str, Any]):
    """A part of `trainer_state.json`, which says so where it lacks a key."""

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        super().__init__(content)
        self._file = file

    def __missing__(self, key: str) -> NoReturn:
        raise CheckpointError(
            f"the state has no {key!r}",
            where=str(self._file),
            fix="Delete this folder; --resume then uses what is before it.",
        )


def read_state(folder: Path) -> dict[str, Any]:
    """The readable state of a complete checkpoint or final folder.

    Raises:
        CheckpointError: the file is damaged; later, when a key is asked for that it lacks.
    """
    file = folder / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(
            file.read_text(encoding="utf-8"), object_hook=partial(_Readable, file)
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the state cannot be read ({error})",
            where=str(folder / STATE_FILE),
            fix="Delete this folder; --resume then uses what is before it.",
        ) from error
    return state


def load_optimizer(folder: Path, optimizer: Optimizer, replica: Replica) -> None:
    """Put a checkpoint's optimizer state into `optimizer`, split as the replica's weights are.

    Raises:
        CheckpointError: it is of another optimizer, or of other weights.
    """
    file = folder / OPTIMIZER_FILE
    try:
        if (folder / SHARDS_FOLDER).exists():
            load_shards(optimizer, folder / SHARDS_FOLDER)
        else:
            saved = torch.load(file, weights_only=True, map_location="cpu")
            optimizer.load_state_dict(saved, replica.as_held)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        raise CheckpointError(
            f"the optimizer state does not fit: {str(error).splitlines()[0]}",
            where=str(file),
            fix="Go on with the optimizer and the model of that run, or start this phase again.",
        ) from error
