"""Saved folders of a phase: whether they are intact, and which one to continue from."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from grouper.errors import CheckpointError, ModelError
from grouper.evaluation.items import checked
from grouper.files import TOO_DEEP, checksum, write_atomic
from grouper.models.folders import BEST_FILE, STATE_FILE
from grouper.runs.records import MOST_STEPS

log = logging.getLogger(__name__)


# Subfolder of the checkpoints that training can continue from.
OPTIMIZER_FOLDER = "optimizer"


# Fields of a state that are saved without conversion.
COUNTERS = ("step", "total", "skipped", "epoch_ended", "checks", "asked")
# Keys that every state file has.
_KEYS = (
    "phase",
    *COUNTERS,
    "position",
    "difficulty",
    "best",
    "policy_version",
    "started_from",
    "recipe_hash",
    "files",
)


class _SavedBest(BaseModel, strict=True):
    step: int | None
    accuracy: float
    interval: list[float] | None
    pending: int | None


class _SavedState(BaseModel, strict=True):
    """The types of the values in a state file."""

    phase: Literal["sft", "grpo"]
    step: int = Field(ge=0, le=MOST_STEPS)
    total: int = Field(ge=0, le=MOST_STEPS)
    skipped: int = Field(ge=0)
    position: int = Field(ge=0)
    epoch_ended: bool
    checks: dict[str, Any]
    asked: dict[str, str]
    difficulty: dict[str, Any] | None
    best: _SavedBest
    policy_version: int
    started_from: str
    recipe_hash: str
    files: dict[str, str]


_check_state = checked(_SavedState.model_validate)


def is_complete(folder: Path) -> bool:
    """Return whether a checkpoint or final folder was written completely."""
    return (folder / STATE_FILE).is_file()


def contents(folder: Path) -> dict[str, str]:
    """Compute the checksums of a folder's files: relative path -> CRC-32 in hex.

    The state file is left out, and so is the mark of the best checkpoint, which is added and
    removed later.
    """
    return {
        path.relative_to(folder).as_posix(): checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (STATE_FILE, BEST_FILE)
    }


def find_damage(folder: Path, *, only_tensors: bool = False) -> str | None:
    """Describe the damage of a saved folder in a few words; None if it is intact.

    Every file is read and compared with the checksum that was taken when it was written.

    Args:
        folder: to check.
        only_tensors: check only the presence of the other files.
    """
    if not is_complete(folder):
        return f"it is incomplete (no {STATE_FILE})"
    name = STATE_FILE
    try:
        for name, written in read_state(folder)["files"].items():
            path = folder / name
            if not path.is_file():
                return f"its {name} is missing"
            is_compared = not only_tensors or path.suffix == ".safetensors"
            if is_compared and checksum(path) != written:
                return f"its {name} is damaged or was edited (other bytes than were written)"
    except CheckpointError as error:
        return error.what
    except OSError as error:
        return f"its {name} cannot be read ({error})"
    return None


def require_intact(model: str) -> None:
    """Refuse a model of a run whose weights are damaged; models from elsewhere pass.

    If only small files differ, as after an edit, there is a warning.

    Raises:
        ModelError: a file of its weights is damaged, or one of its files is missing.
        CheckpointError: its state is damaged.
    """
    folder = Path(model).expanduser()
    if not is_complete(folder):
        return
    problem = find_damage(folder)
    if problem is None:
        return
    if find_damage(folder, only_tensors=True) is None:
        log.warning("%s: %s. It is used as it is.", folder, problem)
        return
    raise ModelError(
        f"{problem}, and it would be another model than was trained",
        where=str(folder),
        fix="Restore it from a backup, or name another model of the run (--checkpoint).",
    )


def write_state(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the readable state, whose presence marks the folder as complete."""
    write_atomic(folder / STATE_FILE, (json.dumps(record, indent=2) + "\n").encode())


def read_state(folder: Path) -> dict[str, Any]:
    """Read the state of a complete checkpoint or final folder.

    Raises:
        CheckpointError: the file is damaged, or was written by another version.
    """
    file = folder / STATE_FILE
    problem: str | None = None
    try:
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        missing = [key for key in _KEYS if key not in state]
        if missing:
            problem = f"has no {missing[0]!r}"
        else:
            _check_state(state)
    except RecursionError:
        problem = f"cannot be read ({TOO_DEEP})"
    except (OSError, ValueError, TypeError) as error:
        problem = f"cannot be read ({error})"
    if problem is None:
        return state
    raise CheckpointError(
        f"its {STATE_FILE} {problem}",
        where=str(folder),
        fix="Delete this folder; --resume then uses what is before it.",
    )


def numbered(phase: Path) -> list[tuple[int, Path]]:
    """List (step, folder) of every checkpoint of a phase, complete or not, oldest first."""
    checkpoints = []
    for folder in phase.glob("checkpoint-*"):
        _, _, number = folder.name.partition("-")
        if number.isdigit():
            checkpoints.append((int(number), folder))
    return sorted(checkpoints)


def is_resumable(folder: Path) -> bool:
    """Return whether a folder holds an optimizer state; the best one loses it after a while.

    True if the state cannot be read: a damaged checkpoint is reported, not passed over.
    """
    try:
        # In any format: one of an earlier version is refused when it is read, not passed over.
        return any(name.startswith(OPTIMIZER_FOLDER) for name in read_state(folder)["files"])
    except CheckpointError:
        return True


def latest_checkpoint(
    run: Path, phase: str, *, recipe_hashes: Collection[str]
) -> tuple[Path, dict[str, Any]] | None:
    """Find the newest intact checkpoint to continue from; damaged ones are reported and skipped.

    Args:
        run: the run folder.
        phase: `sft` or `grpo`.
        recipe_hashes: of the run's recipe, now and before changes that the user allowed.

    Returns:
        The folder and its readable state; None if the phase has no checkpoint.

    Raises:
        CheckpointError: it belongs to another recipe, there are only damaged ones, or none although
            the phase has been finished.
    """
    first_problem = None
    for _, folder in reversed(numbered(run / phase)):
        if not is_resumable(folder):
            continue
        problem = find_damage(folder)
        if problem is None:
            state = read_state(folder)
            recipe_hash = state["recipe_hash"]
            if recipe_hash in recipe_hashes:
                return folder, state
            raise CheckpointError(
                f"this checkpoint was written by recipe {recipe_hash[:12]}, this is "
                f"{', '.join(sorted(recipe_hashes))}",
                where=str(folder),
                fix="Continue with the recipe.yaml of that run, or use another name or output_dir.",
            )
        log.warning("%s is skipped: %s.", folder, problem)
        if first_problem is None:
            first_problem = f"{folder.name}: {problem}"
    fix = f"Restore one from a backup, or delete {run / phase} to train {phase} again."
    if first_problem is None and is_complete(run / phase / "final"):
        first_problem = "only final/ is left, which has no optimizer state"
        fix += " A run of its own can begin with final/ (model.path)."
    if first_problem is not None:
        raise CheckpointError(
            f"no checkpoint of {phase} can be used: {first_problem}",
            where=str(run / phase),
            fix=fix,
        )
    return None


def is_finished(run: Path, phase: str, total: int) -> bool:
    """Return whether the final folder of a phase exists and is intact; a damaged one is made again.

    If only small files were edited, that is reported and the folder is used, as its weights are
    intact. A phase that has been given more steps since is not finished, unless GRPO has started
    from it.

    Args:
        run: the run folder.
        phase: `sft` or `grpo`.
        total: steps of the phase in the recipe.

    Raises:
        CheckpointError: `sft/final` is damaged, and a GRPO that started from it is not finished.
    """
    final = run / phase / "final"
    grpo = run / "grpo"
    if not is_complete(final):
        return False
    problem = find_damage(final)
    grpo_has_begun = phase == "sft" and any(is_complete(folder) for _, folder in numbered(grpo))
    if problem is not None and phase == "sft" and is_complete(grpo / "final"):
        return True
    if problem is None or find_damage(final, only_tensors=True) is None:
        if problem is not None:
            log.warning("%s: %s. It is used as it is.", final, problem)
        finished_total = int(read_state(final)["total"])
        if total > finished_total and grpo_has_begun:
            log.warning(
                "SFT stays at %d steps of %d: GRPO has begun from it.", finished_total, total
            )
        return total <= finished_total or grpo_has_begun
    if grpo_has_begun:
        raise CheckpointError(
            f"{problem}, and GRPO has begun from it",
            where=str(final),
            fix=f"Restore it from a backup, or delete it and {grpo} to go on from the last "
            "checkpoint of SFT.",
        )
    log.warning("%s is skipped: %s. It is made again.", final, problem)
    return False


def last_good(phase: Path, step: int) -> str:
    """Name, in words, the newest resumable checkpoint not after `step`, else the oldest one."""
    usable = [(number, folder) for number, folder in numbered(phase) if is_usable(folder)]
    if not usable:
        return "there is no checkpoint of this phase yet"
    not_after = [folder for number, folder in usable if number <= step]
    if not_after:
        return f"{not_after[-1]} is from before these steps"
    _, oldest = usable[0]
    return f"{oldest} is the oldest that is left"


def is_usable(folder: Path) -> bool:
    """Return whether training can continue from a folder."""
    return is_complete(folder) and is_resumable(folder)
