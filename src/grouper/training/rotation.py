"""Rotation of checkpoints: the newest few are kept to resume from, and the best one to use."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from grouper.errors import CheckpointError, RunFolderError
from grouper.files import remove_folder, write_atomic
from grouper.models.folders import BEST_FILE
from grouper.training.run import Run
from grouper.training.saved_state import (
    OPTIMIZER_FOLDER,
    is_complete,
    is_usable,
    numbered,
    read_state,
    write_state,
)
from grouper.training.state import BestScore, TrainState

log = logging.getLogger(__name__)


def rotate(phase: Path, *, step: int, keep: int, best: BestScore) -> None:
    """Remove the checkpoints that are neither among the newest `keep` nor the best one.

    The best one loses its optimizer state once it is not among the newest. Checkpoints after `step`
    are left alone: a run that continues from an earlier one will write them again. May be called at
    any time, and again after a kill; folders that cannot be removed are only reported.

    Args:
        phase: the folder of a phase.
        step: the steps the phase has finished.
        keep: number of resumable checkpoints to keep.
        best: the best evaluation so far.
    """
    try:
        checkpoints = [(number, folder) for number, folder in numbered(phase) if number <= step]
        usable = [number for number, folder in checkpoints if is_usable(folder)]
        newest = usable[-keep:]
        for number, folder in checkpoints:
            if number == best.step and is_complete(folder):
                mark_best(folder, best)
                if number not in newest and (folder / OPTIMIZER_FOLDER).exists():
                    _remove_optimizer(folder)
            elif number in (*newest, best.pending):
                (folder / BEST_FILE).unlink(missing_ok=True)
            else:
                remove_folder(folder)
    except (OSError, CheckpointError, RunFolderError) as error:
        log.warning("Old checkpoints in %s cannot be removed: %s", phase, error)


def _remove_optimizer(folder: Path) -> None:
    """Remove the optimizer state of a checkpoint."""
    state = read_state(folder)
    files = {
        name: checksum
        for name, checksum in state["files"].items()
        if not name.startswith(f"{OPTIMIZER_FOLDER}/")
    }
    # The list is written first: after a kill it must not name files that have been removed.
    write_state(folder, {**state, "files": files})
    shutil.rmtree(folder / OPTIMIZER_FOLDER)


def mark_best(folder: Path, best: BestScore) -> None:
    """Mark a folder as the best one so far."""
    record: dict[str, Any] = {"step": best.step, "validation_accuracy": best.accuracy}
    if best.interval is not None:
        record["low"], record["high"] = best.interval
    if not (folder / BEST_FILE).exists():
        write_atomic(folder / BEST_FILE, f"{json.dumps(record)}\n".encode())


def tidy(run: Run, state: TrainState) -> None:
    """Remove the checkpoints of a phase that are no longer needed."""
    folder = run.path / state.phase
    keep = state.config(run.recipe).keep_checkpoints
    run.processes.on_rank0(lambda: rotate(folder, step=state.step, keep=keep, best=state.best))
