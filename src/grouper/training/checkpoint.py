"""Checkpoints: whole or absent. The folder appears under its name only when all of it is on disk.

    <run>/<phase>/checkpoint-<step>/   weights or adapter, tokenizer, template, generation config,
                                       optimizer/, trainer_state.json; best.json in the best one
    <run>/<phase>/final/               the same without the optimizer

`trainer_state.json` is written last, is the mark that the folder is complete, and holds the
checksums by which a damaged one is found.

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

from pydantic_core import to_jsonable_python
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grouper.errors import CheckpointError, RunFolderError, first_line, is_out_of_memory
from grouper.files import dumps, refusing, whole_folder, write_atomic
from grouper.models.loading import save_policy
from grouper.models.merging import whole
from grouper.models.process_group import ProcessGroup
from grouper.runs.folder import RunFolder
from grouper.training.disk_room import require_room, weight_bytes
from grouper.training.optimizers import Optimizer
from grouper.training.parallel import split_as
from grouper.training.rollouts import ROLLOUTS_FILE
from grouper.training.rotation import mark_best
from grouper.training.saved_state import COUNTERS, OPTIMIZER_FOLDER, contents, write_state
from grouper.training.state import TrainState

# In place of `RolloutSource.saved` for a phase that draws no rollouts.
NOTHING_DRAWN = {"position": 0, "difficulty": None}

# Bytes of optimizer state that are put together and copied at a time to be written.
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

    Every process of the run calls it, and rank 0 writes: the files are those of a run of one
    process, whatever is split over processes.

    Args:
        run: the run folder.
        state: what to save.
        tokenizer: saved beside the weights.
        recipe_hash: of the run.
        resumable: include the optimizer state, so that training can continue from it.
        final: the phase is over; never includes the optimizer state.

    Raises:
        RunFolderError: on every process: the disk is full or not writable. Nothing is left
            half-written, and what was there before is untouched.
    """
    target = run / state.phase / ("final" if final else f"checkpoint-{state.step}")
    processes, resumable = state.replica.processes, resumable and not final
    moments = state.optimizer.state_dict().values() if resumable else ()
    needed = weight_bytes(state.replica.policy) + sum(
        m.nbytes for m in moments if isinstance(m, Tensor)
    )

    @refusing(target)
    def begin() -> Path:
        require_room(target, needed)
        return stack.enter_context(whole_folder(target))

    @refusing(target)
    def finish() -> None:
        save_policy(state.replica.policy, tokenizer, folder, weights)
        pending = None if state.rollouts is None else state.rollouts.next_rollouts
        # Where drawing has failed, the next step says so.
        if resumable and pending is not None and pending.exception() is None:
            rollouts = to_jsonable_python(pending.result(), fallback=str)
            write_atomic(folder / ROLLOUTS_FILE, dumps(rollouts).encode())
        if state.best.step == state.step:
            mark_best(folder, state.best)
        # A checkpoint must not be ahead of a record that could still be lost.
        RunFolder(run).flush_metrics()
        record = {
            "phase": state.phase,
            "policy_version": state.replica.policy.version,
            "started_from": state.started_from,
            "recipe_hash": recipe_hash,
            **{name: getattr(state, name) for name in COUNTERS},
            **(NOTHING_DRAWN if state.rollouts is None else state.rollouts.saved()),
            "best": asdict(state.best),
        }
        write_state(folder, {**record, "files": contents(folder)})
        stack.close()

    with ExitStack() as stack:  # open on rank 0 alone
        folder = processes.on_rank0(begin)
        if resumable:
            save_optimizer(state.optimizer, folder / OPTIMIZER_FOLDER, processes, named=target)
        weights = state.replica.whole_weights()
        processes.on_rank0(finish)
    return target


def save_optimizer(
    optimizer: Optimizer, folder: Path, processes: ProcessGroup, *, named: Path
) -> None:
    """Write the whole state of an optimizer; every process calls it, and rank 0 writes.

    Args:
        optimizer: whose state.
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
    files: dict[int, list[str]] = {0: []}
    size = 0
    for key in (key for key in state if key not in numbers):
        files.setdefault(size // _FILE_BYTES, []).append(key)
        size += state[key].nbytes

    def write(number: int, tensors: dict[str, Tensor]) -> None:
        try:
            with refusing(named):
                folder.mkdir(exist_ok=True)
                # Copies: bitsandbytes has one table for all weights, safetensors wants each alone.
                copies = {k: t.contiguous().to("cpu", copy=True) for k, t in tensors.items()}
                save_file(copies, folder / f"{number}.safetensors", metadata=metadata)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunFolderError(
                f"the optimizer state cannot be written: {first_line(error)}",
                where=str(named),
                fix="Free some memory; `grouper plan` says what each part takes.",
            ) from error

    for number, keys in files.items():
        tensors = {key: whole(state[key]) for key in keys}
        processes.on_rank0(partial(write, number, tensors))


def load_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """Load what `save_optimizer` wrote into an optimizer, sharded as its weights are now.

    Raises:
        CheckpointError: it is of another optimizer, or of other weights.
    """
    record, state = None, dict[str, Any]()
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                record = json.loads(file.metadata()["grouper"])
                if record["optimizer"] != optimizer.describe():
                    raise ValueError("it is of another optimizer, or of other weights")
                for key in file.keys():  # noqa: SIM118 - it is not a mapping
                    # Copies: a tensor is a view of the file's bytes, at whatever address.
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
