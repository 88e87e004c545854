"""Which checkpoints stay: the newest few, to go on from, and the best one, to use."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grouper.errors import RunFolderError
from grouper.files import remove_folder, write_atomic
from grouper.training.integrity import BEST_FILE, STATE_FILE, is_complete

__all__ = ["BEST_FILE", "OPTIMIZER_FILE", "BestScore", "crown", "last_good", "numbered", "thin_out"]

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.pt"
SHARDS_FOLDER = "optimizer-shards"
"""Where the optimizer state lies that is split over processes; `optimizer.pt` then is empty."""


@dataclass(slots=True)
class BestScore:
    """The best strict accuracy on the validation problems so far; of equal ones the earliest.

    >>> best = BestScore()
    >>> [best.offer(2, 0.5), best.offer(4, 0.5), best.offer(6, 0.75), best.step]
    [True, False, True, 6]
    """

    step: int | None = None
    accuracy: float = -math.inf

    def offer(self, step: int, accuracy: float) -> bool:
        """Take note of an evaluation; whether it beats all before it."""
        if not accuracy > self.accuracy:  # NaN beats nothing
            return False
        self.step, self.accuracy = step, accuracy
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "accuracy": None if self.step is None else self.accuracy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.accuracy = -math.inf if self.step is None else float(state["accuracy"])


def numbered(phase: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint of a phase, complete or not, oldest first."""
    found = []
    for folder in phase.glob("checkpoint-*"):
        number = folder.name.removeprefix("checkpoint-")
        if number.isdigit():
            found.append((int(number), folder))
    return sorted(found)


def thin_out(phase: Path, *, step: int, keep: int, best: BestScore) -> None:
    """Remove what is neither among the newest `keep` checkpoints nor the best one.

    The best one loses its optimizer state once it is not among the newest. What lies after
    `step` is left alone: a run that goes on from an earlier checkpoint will write it again.
    May be called at any time, and again after a kill; what cannot be removed is only told of.

    Args:
        phase: the folder of a phase.
        step: the steps the phase has finished.
        keep: how many checkpoints to keep that training can go on from.
        best: the best evaluation so far.
    """
    try:
        there = [(n, folder) for n, folder in numbered(phase) if n <= step]
        newest = [n for n, folder in there if _can_go_on(folder)][-keep:]
        for number, folder in there:
            if number == best.step and is_complete(folder):
                crown(folder, best)
                if number not in newest:
                    _strip(folder)
            elif number in newest:
                (folder / BEST_FILE).unlink(missing_ok=True)
            else:
                remove_folder(folder)
    except (OSError, ValueError, KeyError, RunFolderError) as error:
        log.warning("Old checkpoints in %s cannot be removed: %s", phase, error)


def last_good(phase: Path, step: int) -> tuple[int, Path] | None:
    """The newest checkpoint to go on from that is not after `step`; else the oldest there is."""
    there = [(number, folder) for number, folder in numbered(phase) if _can_go_on(folder)]
    good = [one for one in there if one[0] <= step]
    return good[-1] if good else next(iter(there), None)


def _can_go_on(folder: Path) -> bool:
    return is_complete(folder) and (folder / OPTIMIZER_FILE).exists()


def crown(folder: Path, best: BestScore) -> None:
    """Mark a folder as the best one so far."""
    text = json.dumps({"step": best.step, "validation_accuracy": best.accuracy}) + "\n"
    if not (folder / BEST_FILE).exists():
        write_atomic(folder / BEST_FILE, text.encode())


def _strip(folder: Path) -> None:
    """Remove the optimizer state; the list of files first, so that a kill leaves no lie."""
    file = folder / STATE_FILE
    state = json.loads(file.read_text(encoding="utf-8"))
    if OPTIMIZER_FILE in state["files"]:
        state["files"] = {
            name: checksum
            for name, checksum in state["files"].items()
            if name.split("/")[0] not in (OPTIMIZER_FILE, SHARDS_FOLDER)
        }
        write_atomic(file, (json.dumps(state, indent=2) + "\n").encode())
    (folder / OPTIMIZER_FILE).unlink(missing_ok=True)
    if (folder / SHARDS_FOLDER).exists():
        remove_folder(folder / SHARDS_FOLDER)
