"""The optimizer state of FSDP2 on disk: every process writes its own share.

PyTorch's distributed checkpoint does the writing, and the reading whatever number of processes
wrote it; one process alone reads it, too. No process ever holds the whole of it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from grouper.errors import RunFolderError
from grouper.models.team import Team
from grouper.training.optimizers import Optimizer

__all__ = ["load_shards", "save_shards"]


def save_shards(optimizer: Optimizer, folder: Path, team: Team) -> None:
    """Write the state of every part into `folder`; called by all processes of the team.

    What lies there from a save that broke off is removed first.

    Raises:
        RunFolderError: on every process: one of them cannot write.
    """
    team.lead(lambda: shutil.rmtree(folder, ignore_errors=True))
    flat: dict[str, Any] = {
        f"{number}.{index}.{name}": value
        for number, part in enumerate(optimizer.parts)
        for index, moments in part.state_dict()["state"].items()
        for name, value in moments.items()
    }
    try:
        with _quiet():
            save(flat, checkpoint_id=str(folder))
    except CheckpointException as error:  # on every process, whoever of them had it
        raise RunFolderError(
            f"the optimizer state cannot be written: {str(error).splitlines()[0]}",
            where=str(folder),
            fix="Make room, or set output_dir to a folder that every process may write to.",
        ) from error


def load_shards(optimizer: Optimizer, folder: Path) -> None:
    """Put what `save_shards` wrote into the optimizer, split as its parameters are now.

    Raises:
        RuntimeError, ValueError, KeyError: it is of another optimizer or of other weights.
    """
    stored = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    flat = {
        key: _blank(optimizer, key, description)
        for key, description in stored.items()
        if hasattr(description, "size")
    }
    with _quiet():
        load(flat, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    for number, part in enumerate(optimizer.parts):
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in flat.items():
            where, index, name = key.split(".", 2)
            if int(where) == number:
                state.setdefault(int(index), {})[name] = value
        part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def _blank(optimizer: Optimizer, key: str, description: Any) -> Tensor:
    """A tensor to read one moment into: split as its parameter is, where it has its shape."""
    number, index, _ = key.split(".", 2)
    parameters = [p for group in optimizer.parts[int(number)].param_groups for p in group["params"]]
    parameter: Tensor = parameters[int(index)]
    dtype = description.properties.dtype
    if description.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(description.size, dtype=dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch says in several voices that one process reads alone, which is meant so."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
