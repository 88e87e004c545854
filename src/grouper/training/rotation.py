"""Which checkpoints are kept: the newest few, to continue from, and the best one, to use."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from grouper.errors import CheckpointError, RunFolderError
from grouper.files import (
    remove_folder,
    write_atomic,
)
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
    """Remove what is neither among the newest `keep` checkpoints nor the best one.

    The best one loses its optimizer state once it is not among the newest. Checkpoints after `step`
    are left alone: a run that continues from an earlier one will write them again. May be called at
    any time, and again after a kill; what cannot be removed is only reported.

    Args:
        phase: the folder of a phase.
        step: the steps the phase has finished.
        keep: how many resumable checkpoints to keep.
        best: the best evaluation so far.
    """
    try:
        there = [(number, folder) for number, folder in numbered(phase) if number <= step]
        newest = [number for number, folder in there if is_usable(folder)][-keep:]
        for number, folder in there:
            if number == best.step and is_complete(folder):
                mark_best(folder, best)
                if number not in newest and (folder / OPTIMIZER_FOLDER).exists():
                    state = read_state(folder)
                    ours = f"{OPTIMIZER_FOLDER}/"
                    files = {f: crc for f, crc in state["files"].items() if not f.startswith(ours)}
                    # The list first, so that after a kill it names nothing that is gone.
                    write_state(folder, {**state, "files": files})
                    shutil.rmtree(folder / OPTIMIZER_FOLDER)
            elif number in (*newest, best.pending):
                (folder / BEST_FILE).unlink(missing_ok=True)
            else:
                remove_folder(folder)
    except (OSError, CheckpointError, RunFolderError) as error:
        log.warning("Old checkpoints in %s cannot be removed: %s", phase, error)


def mark_best(folder: Path, best: BestScore) -> None:
    """Mark a folder as the best one so far."""
    found: dict[str, Any] = {"step": best.step, "validation_accuracy": best.accuracy}
    if best.interval is not None:
        found |= dict(zip(("low", "high"), best.interval, strict=True))
    if not (folder / BEST_FILE).exists():
        write_atomic(folder / BEST_FILE, f"{json.dumps(found)}\n".encode())


def tidy(run: Run, state: TrainState) -> None:
    """Remove the checkpoints of a phase that are no longer needed."""
    folder, keep = run.path / state.phase, state.config(run.recipe).keep_checkpoints
    run.processes.on_rank0(lambda: rotate(folder, step=state.step, keep=keep, best=state.best))
