"""Room on the disk for what a run saves."""

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


# Tokenizer, configuration and headers beside the tensors.
MARGIN = 1.02


def weight_bytes(policy: Policy) -> int:
    """Bytes of what is saved of a policy: the adapter alone, or all weights, tied ones once."""
    saved = policy.model.parameters() if policy.adapter is None else policy.trainable().values()
    return sum(value.nbytes for value in saved)


def free_bytes(path: Path) -> int:
    """Free disk space for this user where `path` is, or will be."""
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
        run: the run folder; what it already holds counts as room.
        policy: the model.
        phases: name -> settings of the phases that are still to be finished.

    Raises:
        RunFolderError: not even the final models would fit.
    """
    weights = weight_bytes(policy)
    there = sum(
        file.stat().st_size for name in phases for file in (run / name).rglob("*") if file.is_file()
    )
    require_room(run, max(0, len(phases) * weights - there))
    wanted = -there
    for phase in phases.values():
        # One more than is kept: the new one is whole before the oldest goes.
        number = phase.keep_checkpoints + 1
        best = weights if phase.evaluate_every else 0
        wanted += number * (weights + state_bytes(phase.optimizer, policy)) + best + weights
    free = free_bytes(run)
    if free < wanted * MARGIN:
        log.warning(
            "The checkpoints of this run may take %s, and %s are free at %s. Free some space, set "
            "output_dir to another disk, or lower keep_checkpoints; a save that fails is reported "
            "and training goes on.",
            decimal(wanted),
            decimal(free),
            run,
        )
