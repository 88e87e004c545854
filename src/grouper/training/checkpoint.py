"""Checkpoints: whole or absent. The folder appears under its name only when all of it is on disk.

    <run>/<phase>/checkpoint-<step>/   weights or adapter, tokenizer, template, generation config,
                                       optimizer.pt, trainer_state.json
    <run>/<phase>/final/               the same without optimizer.pt

`trainer_state.json` is written last and is the mark that the folder is complete.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from grouper.errors import CheckpointError
from grouper.model_files import save_policy
from grouper.policy import Policy
from grouper.tracking.files import whole_folder, write_atomic
from grouper.training.difficulty import DifficultyBand
from grouper.training.optimizers import Optimizer
from grouper.training.replica import Replica

__all__ = [
    "TrainState",
    "is_complete",
    "latest_checkpoint",
    "load_optimizer",
    "read_state",
    "restore_counters",
    "save_checkpoint",
    "save_final",
]

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"


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
    """Updates in a row whose loss or gradient was not finite."""
    position: int = 0
    """GRPO: problems of the stream met so far, those passed over or replaced among them."""
    difficulty: DifficultyBand | None = None

    @property
    def policy(self) -> Policy:
        return self.replica.policy


def save_checkpoint(
    run: Path, state: TrainState, tokenizer: Any, *, recipe_hash: str, keep: int
) -> Path:
    """Save `checkpoint-<step>` of a phase and remove all but the newest `keep`.

    Every process of a team calls it; rank 0 writes, in the same form as a run of one process.

    Raises:
        RunFolderError: the disk is full or not writable; nothing is left half-written.
    """
    target = run / state.phase / f"checkpoint-{state.step}"
    weights = state.replica.whole_weights()
    optimizer = state.optimizer.state_dict(state.replica.whole)

    def write() -> None:
        with whole_folder(target) as folder:
            save_policy(state.policy, tokenizer, folder, weights)
            torch.save(optimizer, folder / OPTIMIZER_FILE)
            _mark(folder, {**_readable(state, recipe_hash), **_counters(state)})
        for _, old in _checkpoints(run, state.phase)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    state.replica.team.lead(write)
    return target


def save_final(run: Path, state: TrainState, tokenizer: Any, *, recipe_hash: str) -> Path:
    """Save `<phase>/final`, the model a phase hands on."""
    target = run / state.phase / "final"
    weights = state.replica.whole_weights()

    def write() -> None:
        with whole_folder(target) as folder:
            save_policy(state.policy, tokenizer, folder, weights)
            _mark(folder, _readable(state, recipe_hash))

    state.replica.team.lead(write)
    return target


def _mark(folder: Path, state: dict[str, Any]) -> None:
    """Write the readable state, whose presence says that the folder is complete."""
    write_atomic(folder / STATE_FILE, (json.dumps(state, indent=2) + "\n").encode())


def _readable(state: TrainState, recipe_hash: str) -> dict[str, Any]:
    return {
        "phase": state.phase,
        "step": state.step,
        "policy_version": state.policy.version,
        "started_from": state.started_from,
        "recipe_hash": recipe_hash,
    }


def _counters(state: TrainState) -> dict[str, Any]:
    band = None if state.difficulty is None else state.difficulty.state_dict()
    return {"skipped": state.skipped, "position": state.position, "difficulty": band}


def restore_counters(state: TrainState, saved: dict[str, Any]) -> None:
    """Put what `trainer_state.json` holds back into a fresh state."""
    state.step = int(saved["step"])
    state.skipped, state.position = int(saved["skipped"]), int(saved["position"])
    if state.difficulty is not None:
        state.difficulty.load_state_dict(saved["difficulty"])


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint or final folder was written to its end."""
    return (folder / STATE_FILE).is_file()


def _checkpoints(run: Path, phase: str) -> list[tuple[int, Path]]:
    """Complete checkpoints of a phase, oldest first; broken ones are named and skipped."""
    found = []
    for folder in (run / phase).glob("checkpoint-*"):
        number = folder.name.removeprefix("checkpoint-")
        if not number.isdigit():
            continue
        if is_complete(folder):
            found.append((int(number), folder))
        else:
            log.warning("%s is incomplete and is skipped.", folder)
    return sorted(found)


def latest_checkpoint(
    run: Path, phase: str, *, recipe_hash: str
) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete checkpoint of a phase and its readable state, or None.

    Raises:
        CheckpointError: it belongs to another recipe.
    """
    found = _checkpoints(run, phase)
    if not found:
        return None
    folder = found[-1][1]
    state = read_state(folder)
    if state["recipe_hash"] != recipe_hash:
        raise CheckpointError(
            f"this checkpoint was written by recipe {state['recipe_hash'][:12]}, this is "
            f"{recipe_hash[:12]}",
            where=str(folder),
            fix="Continue with the recipe.yaml of that run, or use another name or output_dir.",
        )
    return folder, state


def read_state(folder: Path) -> dict[str, Any]:
    """The readable state of a complete checkpoint or final folder.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
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
        CheckpointError: the file is missing or damaged.
    """
    file = folder / OPTIMIZER_FILE
    try:
        saved = torch.load(file, weights_only=True, map_location="cpu")
        optimizer.load_state_dict(saved, replica.as_held)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        raise CheckpointError(
            f"the optimizer state cannot be read: {str(error).splitlines()[0]}",
            where=str(file),
            fix="Delete this checkpoint; --resume then uses the one before it.",
        ) from error
