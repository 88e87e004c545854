"""Room on the disk for the checkpoints and models of a run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from rich.filesize import decimal

from grouper.config.schema import GRPOConfig, SFTConfig
from grouper.errors import RunFolderError
from grouper.models.policy import Policy
from grouper.training.optimizers import state_bytes

log = logging.getLogger(__name__)


# Factor on the bytes of tensors, for tokenizer, configuration and headers.
MARGIN = 1.02


def weight_bytes(policy: Policy) -> int:
    """Return the bytes of a saved policy: the adapter alone, or all weights, tied ones once."""
    if policy.adapter is None:
        return sum(parameter.nbytes for parameter in policy.model.parameters())
    return sum(parameter.nbytes for parameter in policy.trainable().values())


def free_bytes(path: Path) -> int:
    """Return the free disk space, in bytes, for this user where `path` is, or will be."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free


def require_room(path: Path, needed: int) -> None:
    """Refuse to start a write that cannot be finished.

    Args:
        path: where it will be written.
        needed: bytes of its tensors.

    Raises:
        RunFolderError: there is less room than that.
    """
    free = free_bytes(path)
    if free < needed * MARGIN:
        raise RunFolderError(
            f"this takes about {decimal(needed)}, and {decimal(free)} are free",
            where=str(path),
            fix="Free some space, or set output_dir to another disk (a run can be moved as a whole "
            "and continued with --resume).",
        )


def check_room_for_run(
    run: Path, policy: Policy, phases: Mapping[str, SFTConfig | GRPOConfig]
) -> None:
    """Warn before training if the checkpoints of the run may not fit on the disk.

    Args:
        run: the run folder; the bytes of the files in it count as room.
        policy: the model.
        phases: name -> settings of the phases that are still to be finished.

    Raises:
        RunFolderError: not even the final models would fit.
    """
    weights = weight_bytes(policy)
    used = sum(_folder_bytes(run / name) for name in phases)
    require_room(run, max(0, len(phases) * weights - used))
    needed = -used
    for phase in phases.values():
        # One more than is kept: the new one is complete before the oldest is removed.
        checkpoints = phase.keep_checkpoints + 1
        needed += checkpoints * (weights + state_bytes(phase.optimizer, policy))
        if phase.evaluate_every:
            needed += weights  # of the best checkpoint
        needed += weights  # of the final model
    free = free_bytes(run)
    if free < needed * MARGIN:
        log.warning(
            "The checkpoints of this run may take %s, and %s are free at %s. Free some space, set "
            "output_dir to another disk, or lower keep_checkpoints; a save that fails is reported "
            "and training goes on.",
            decimal(needed),
            decimal(free),
            run,
        )


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder and its subfolders."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
