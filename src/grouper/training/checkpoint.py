"""Checkpoints, complete or absent: a folder appears under its name once all of it is on disk.

    <run>/<phase>/checkpoint-<step>/   weights or adapter, tokenizer, template, generation config,
                                       optimizer/, trainer_state.json; best.json in the best one
    <run>/<phase>/final/               the same without the optimizer

`trainer_state.json` is written last and marks the folder as complete. It holds the checksums by
which a damaged folder is recognized.

`optimizer/<number>.safetensors` holds the unsharded optimizer state as `part.parameter.name`, so
that any number of processes can read it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grouper.errors import CheckpointError, RunFolderError, first_line, is_out_of_memory
from grouper.files import os_errors_as, whole_folder
from grouper.models.loading import save_policy
from grouper.models.merging import unsharded
from grouper.models.process_group import ProcessGroup
from grouper.runs.folder import RunFolder
from grouper.training.disk_room import require_room, weight_bytes
from grouper.training.optimizers import Optimizer
from grouper.training.parallel import split_as
from grouper.training.rotation import mark_best
from grouper.training.saved_state import COUNTERS, OPTIMIZER_FOLDER, contents, write_state
from grouper.training.state import TrainState

# Replaces `RolloutSource.saved` in a phase without rollouts.
NOTHING_DRAWN = {"position": 0, "difficulty": None}

# Bytes of optimizer state per file; one file at a time is gathered and copied to be written.
_FILE_BYTES = 1 << 29


def save_checkpoint(
    run: Path,
    state: TrainState,
    tokenizer: Any,
    *,
    recipe_hash: str,
    resumable: bool = True,
    final: bool = False,
) -> Path:
    """Save `checkpoint-<step>` of a phase, or `final`, its result.

    Every process of the run calls it, and rank 0 writes. The files are the same for any number of
    processes.

    Args:
        run: the run folder.
        state: what to save.
        tokenizer: saved beside the weights.
        recipe_hash: of the run.
        resumable: include the optimizer state, so that training can continue from it.
        final: the phase is over; never includes the optimizer state.

    Returns:
        The folder.

    Raises:
        RunFolderError: on every process: the disk is full or not writable. Nothing is left
            half-written, and an earlier folder is untouched.
    """
    name = "final" if final else f"checkpoint-{state.step}"
    target = run / state.phase / name
    processes = state.replica.processes
    policy = state.replica.policy
    resumable = resumable and not final
    needed = weight_bytes(policy)
    if resumable:
        for value in state.optimizer.state_dict().values():
            if isinstance(value, Tensor):
                needed += value.nbytes

    @os_errors_as(target)
    def begin() -> Path:
        require_room(target, needed)
        return stack.enter_context(whole_folder(target))

    @os_errors_as(target)
    def finish() -> None:
        save_policy(policy, tokenizer, folder, weights)
        if resumable and state.rollouts is not None:
            state.rollouts.write_next(folder)
        if state.best.step == state.step:
            mark_best(folder, state.best)
        # A checkpoint must not be ahead of a record that could still be lost.
        RunFolder(run).flush_metrics()
        record = _state_record(state, recipe_hash)
        write_state(folder, {**record, "files": contents(folder)})
        stack.close()

    with ExitStack() as stack:  # holds the new folder on rank 0, nothing on the others
        folder = processes.on_rank0(begin)
        if resumable:
            save_optimizer(state.optimizer, folder / OPTIMIZER_FOLDER, processes, named=target)
        weights = state.replica.whole_weights()
        processes.on_rank0(finish)
    return target


def _state_record(state: TrainState, recipe_hash: str) -> dict[str, Any]:
    """Return the readable state of a phase, without the checksums of files."""
    counters = {name: getattr(state, name) for name in COUNTERS}
    position = NOTHING_DRAWN
    if state.rollouts is not None:
        position = state.rollouts.saved()
    return {
        "phase": state.phase,
        "policy_version": state.replica.policy.version,
        "started_from": state.started_from,
        "recipe_hash": recipe_hash,
        **counters,
        **position,
        "best": asdict(state.best),
    }


def save_optimizer(
    optimizer: Optimizer, folder: Path, processes: ProcessGroup, *, named: Path
) -> None:
    """Write the unsharded state of an optimizer; every process calls it, and rank 0 writes.

    Args:
        optimizer: whose state is written.
        folder: to create.
        processes: that hold the state.
        named: the checkpoint, for error messages.

    Raises:
        RunFolderError: the disk is full, or there is no memory for the copy that is written.
    """
    state = optimizer.state_dict()
    numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    # One entry, so that equal states are equal bytes: safetensors writes several in any order.
    metadata = {"grouper": json.dumps({"optimizer": optimizer.describe(), "numbers": numbers})}
    # File number -> keys of its tensors. The first file is written even if there are no tensors.
    keys_of_file: dict[int, list[str]] = {0: []}
    size = 0
    for key, value in state.items():
        if isinstance(value, Tensor):
            keys_of_file.setdefault(size // _FILE_BYTES, []).append(key)
            size += value.nbytes

    def write(number: int, tensors: dict[str, Tensor]) -> None:
        try:
            with os_errors_as(named):
                folder.mkdir(exist_ok=True)
                # Copies: tensors of bitsandbytes share memory, which safetensors does not accept.
                copies = {
                    key: tensor.contiguous().to("cpu", copy=True) for key, tensor in tensors.items()
                }
                save_file(copies, folder / f"{number}.safetensors", metadata=metadata)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunFolderError(
                f"the optimizer state cannot be written: {first_line(error)}",
                where=str(named),
                fix="Free some memory; `grouper plan` says what each part takes.",
            ) from error

    for number, keys in keys_of_file.items():
        tensors = {key: unsharded(state[key]) for key in keys}
        processes.on_rank0(partial(write, number, tensors))


def load_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """Load the files of `save_optimizer` into an optimizer, sharded as its weights are now.

    Raises:
        CheckpointError: they are of another optimizer, or of other weights.
    """
    record = None
    state: dict[str, Any] = {}
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                record = json.loads(file.metadata()["grouper"])
                if record["optimizer"] != optimizer.describe():
                    raise ValueError("it is of another optimizer, or of other weights")
                for key in file.keys():  # noqa: SIM118 - it is not a mapping
                    # A copy: the tensor is a view of the file's bytes, which may be unaligned.
                    tensor = file.get_tensor(key).clone()
                    state[key] = split_as(tensor, optimizer.parameter(key))
        if record is None:
            raise ValueError("there is none in this version's format")
        optimizer.load_state_dict({**state, **record["numbers"]})
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"the optimizer state does not fit: {first_line(error)}",
            where=str(folder),
            fix="Go on with the optimizer and the model of that run, or start this phase again.",
        ) from error
