"""How much a save will write, and whether there is room for it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from grouper.config.schema import PhaseConfig
from grouper.errors import RunFolderError
from grouper.models.policy import Policy
from grouper.training.optimizers import Optimizer

__all__ = [
    "check_room_for_run",
    "free_bytes",
    "optimizer_bytes",
    "require_room",
    "size_in_words",
    "weight_bytes",
]

log = logging.getLogger(__name__)

MARGIN = 1.02
"""Tokenizer, configuration and headers beside the tensors."""


def weight_bytes(policy: Policy) -> int:
    """Bytes of what is saved of a policy: the adapter alone, or all weights, tied ones once."""
    saved = (
        policy.model.named_parameters() if policy.adapter is None else policy.trainable().items()
    )
    return sum(value.numel() * value.element_size() for _, value in saved)


def optimizer_bytes(policy: Policy, optimizer: Optimizer) -> int:
    """Bytes of the optimizer state; before the first step what AdamW's two moments will take."""
    held = sum(
        value.numel() * value.element_size()
        for part in optimizer.parts
        for moments in part.state.values()
        for value in moments.values()
        if isinstance(value, Tensor)
    )
    expected = 2 * sum(p.numel() * p.element_size() for p in policy.trainable().values())
    return held or expected


def free_bytes(path: Path) -> int:
    """What this user may still write where `path` is, or will be."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free


def size_in_words(count: float) -> str:
    """Bytes in the unit that people would use.

    >>> size_in_words(3_210_000_000), size_in_words(48_300_000), size_in_words(2_500)
    ('3.2 GB', '48.3 MB', '2.5 kB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def require_room(path: Path, needed: float) -> None:
    """Refuse to begin a write that cannot be finished.

    Args:
        path: where it will be written.
        needed: bytes of its tensors.

    Raises:
        RunFolderError: there is less room than that.
    """
    free = free_bytes(path)
    if free < needed * MARGIN:
        raise RunFolderError(
            f"this takes about {size_in_words(needed)}, and {size_in_words(free)} are free",
            where=str(path),
            fix="Free some space, or set output_dir to another disk (a run can be moved as a whole "
            "and continued with --resume).",
        )


def check_room_for_run(
    run: Path, policy: Policy, optimizer: Optimizer, phases: Mapping[str, PhaseConfig]
) -> None:
    """Warn before training where the checkpoints of the run may not find room.

    Args:
        run: the run folder; what already lies in it counts as room.
        policy: the model.
        optimizer: of its phase.
        phases: name -> settings of the phases that are still to be finished.

    Raises:
        RunFolderError: not even the final models would fit.
    """
    weights, moments = weight_bytes(policy), optimizer_bytes(policy, optimizer)
    there = sum(
        file.stat().st_size for name in phases for file in (run / name).rglob("*") if file.is_file()
    )
    require_room(run, max(0, len(phases) * weights - there))
    wanted = -there
    for phase in phases.values():
        # One more than is kept: the new one is whole before the oldest goes.
        number = phase.keep_checkpoints + 1
        best = weights if phase.keep_best and phase.evaluate_every else 0
        wanted += number * (weights + moments) + best + weights
    free = free_bytes(run)
    if free < wanted * MARGIN:
        log.warning(
            "The checkpoints of this run may take %s, and %s are free at %s. Free some space, set "
            "output_dir to another disk, or lower keep_checkpoints; a save that fails is told and "
            "training goes on.",
            size_in_words(wanted),
            size_in_words(free),
            run,
        )
