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
import logging
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import to_jsonable_python
from rich.filesize import decimal
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grouper.config.loading import resolved_yaml
from grouper.config.schema import GRPOConfig, Recipe, SFTConfig
from grouper.errors import CheckpointError, ModelError, RunFolderError, first_line, is_out_of_memory
from grouper.evaluation.items import checked
from grouper.files import (
    TOO_DEEP,
    checksum,
    dumps,
    refusing,
    remove_folder,
    whole_folder,
    write_atomic,
)
from grouper.models.folders import ADAPTER_FILE, BEST_FILE, RECIPE_FILE, STATE_FILE
from grouper.models.loading import save_policy
from grouper.models.merging import whole
from grouper.models.policy import Policy
from grouper.models.process_group import ProcessGroup
from grouper.runs.folder import OUR_FOLDERS, RunFolder
from grouper.runs.records import MOST_STEPS
from grouper.training.optimizers import Optimizer, state_bytes
from grouper.training.parallel import split_as
from grouper.training.state import COUNTERS, BestScore, TrainState

log = logging.getLogger(__name__)

# In a checkpoint that training can continue from.
OPTIMIZER_FOLDER = "optimizer"
# Beside it: rollouts of the next step that have been drawn already.
AHEAD_FILE = "ahead.json"

# Tokenizer, configuration and headers beside the tensors.
MARGIN = 1.02
# Bytes of optimizer state that are put together and copied at a time to be written.
_FILE_BYTES = 1 << 29


# What is saved


# What every state file has.
_KEYS = (
    *("phase", *COUNTERS, "difficulty", "best"),
    *("policy_version", "started_from", "recipe_hash", "files"),
)


class _SavedBest(BaseModel, strict=True):
    step: int | None
    accuracy: float
    interval: list[float] | None
    pending: int | None


class _SavedState(BaseModel, strict=True):
    """The types of what a state file holds."""

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


# Saving


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
        # Where drawing has failed, the next step says so.
        if resumable and state.ahead is not None and state.ahead.exception() is None:
            drawn = to_jsonable_python(state.ahead.result(), fallback=str)
            write_atomic(folder / AHEAD_FILE, dumps(drawn).encode())
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
            "difficulty": None if state.difficulty is None else state.difficulty.seen,
            "best": asdict(state.best),
        }
        _write_state(folder, {**record, "files": contents(folder)})
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


# Whether a saved folder still is what was saved


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint or final folder was written completely."""
    return (folder / STATE_FILE).is_file()


def contents(folder: Path) -> dict[str, str]:
    """File -> CRC-32 in hex.

    Without the state file, and without the mark of the best one, which comes and goes.
    """
    return {
        path.relative_to(folder).as_posix(): checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (STATE_FILE, BEST_FILE)
    }


def damage(folder: Path, *, only_tensors: bool = False) -> str | None:
    """What is wrong with a saved folder, in a few words, or None if it is intact.

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
            compared = not only_tensors or path.suffix == ".safetensors"
            if compared and checksum(path) != written:
                return f"its {name} is damaged or was edited (other bytes than were written)"
    except CheckpointError as error:
        return error.what
    except OSError as error:
        return f"its {name} cannot be read ({error})"
    return None


def require_intact(model: str) -> None:
    """Refuse a model of a run whose weights are not those that were written; others pass.

    Where only small files differ, as after an edit, there is a warning.

    Raises:
        ModelError: a file of its weights is damaged, or one of its files is missing.
        CheckpointError: its state is damaged.
    """
    folder = Path(model).expanduser()
    if not is_complete(folder):
        return
    problem = damage(folder)
    if problem is None:
        return
    if damage(folder, only_tensors=True) is None:
        log.warning("%s: %s. It is used as it is.", folder, problem)
        return
    raise ModelError(
        f"{problem}, and it would be another model than was trained",
        where=str(folder),
        fix="Restore it from a backup, or name another model of the run (--checkpoint).",
    )


def _write_state(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the readable state, whose presence marks the folder as complete."""
    write_atomic(folder / STATE_FILE, (json.dumps(record, indent=2) + "\n").encode())


def read_state(folder: Path) -> dict[str, Any]:
    """The readable state of a complete checkpoint or final folder.

    Raises:
        CheckpointError: the file is damaged, or was written by another version.
    """
    file = folder / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        missing = [key for key in _KEYS if key not in state]
        what = f"has no {missing[0]!r}" if missing else None
        if what is None:
            _check_state(state)
    except RecursionError:
        what = f"cannot be read ({TOO_DEEP})"
    except (OSError, ValueError, TypeError) as error:
        what = f"cannot be read ({error})"
    if what is None:
        return state
    raise CheckpointError(
        f"its {STATE_FILE} {what}",
        where=str(folder),
        fix="Delete this folder; --resume then uses what is before it.",
    )


# What to go on from


def numbered(phase: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint of a phase, complete or not, oldest first."""
    found = [(folder.name.partition("-")[2], folder) for folder in phase.glob("checkpoint-*")]
    return sorted((int(number), folder) for number, folder in found if number.isdigit())


def _is_resumable(folder: Path) -> bool:
    """Whether it holds an optimizer state; the best one loses its own after a while.

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
    """The newest intact checkpoint to continue from and its readable state, or None.

    Damaged ones are reported and skipped.

    Args:
        run: the run folder.
        phase: `sft` or `grpo`.
        recipe_hashes: of the run's recipe, now and before changes that the user allowed.

    Raises:
        CheckpointError: it belongs to another recipe, there are only damaged ones, or none although
            the phase has been finished.
    """
    first_problem = None
    for _, folder in reversed(numbered(run / phase)):
        if not _is_resumable(folder):
            continue
        problem = damage(folder)
        if problem is None:
            state = read_state(folder)
            theirs = state["recipe_hash"]
            if theirs in recipe_hashes:
                return folder, state
            raise CheckpointError(
                f"this checkpoint was written by recipe {theirs[:12]}, this is "
                f"{', '.join(sorted(recipe_hashes))}",
                where=str(folder),
                fix="Continue with the recipe.yaml of that run, or use another name or output_dir.",
            )
        log.warning("%s is skipped: %s.", folder, problem)
        first_problem = first_problem or f"{folder.name}: {problem}"
    again = f"Restore one from a backup, or delete {run / phase} to train {phase} again."
    if first_problem is None and is_complete(run / phase / "final"):
        first_problem = "only final/ is left, which has no optimizer state"
        again += " A run of its own can begin with final/ (model.path)."
    if first_problem is not None:
        raise CheckpointError(
            f"no checkpoint of {phase} can be used: {first_problem}",
            where=str(run / phase),
            fix=again,
        )
    return None


def is_finished(run: Path, phase: str, total: int) -> bool:
    """Whether the final folder of a phase exists and is intact; a damaged one is made again.

    If only small files were edited, that is reported and the folder is used, as its weights are
    intact.
    A phase that has been given more steps since is not finished, unless GRPO has started from it.

    Args:
        run: the run folder.
        phase: `sft` or `grpo`.
        total: steps that the phase is to have now.

    Raises:
        CheckpointError: `sft/final` is damaged, and a GRPO that started from it is not finished.
    """
    final, grpo = run / phase / "final", run / "grpo"
    if not is_complete(final):
        return False
    problem = damage(final)
    begun = phase == "sft" and any(is_complete(folder) for _, folder in numbered(grpo))
    if problem is not None and phase == "sft" and is_complete(grpo / "final"):
        return True
    if problem is None or damage(final, only_tensors=True) is None:
        if problem is not None:
            log.warning("%s: %s. It is used as it is.", final, problem)
        before = int(read_state(final)["total"])
        if total > before and begun:
            log.warning("SFT stays at %d steps of %d: GRPO has begun from it.", before, total)
        return total <= before or begun
    if begun:
        raise CheckpointError(
            f"{problem}, and GRPO has begun from it",
            where=str(final),
            fix=f"Restore it from a backup, or delete it and {grpo} to go on from the last "
            "checkpoint of SFT.",
        )
    log.warning("%s is skipped: %s. It is made again.", final, problem)
    return False


def last_good(phase: Path, step: int) -> str:
    """In words: the newest resumable checkpoint not after `step`, else the oldest there is."""
    found = [(n, folder) for n, folder in numbered(phase) if _is_usable(folder)]
    if not found:
        return "there is no checkpoint of this phase yet"
    number, folder = max((one for one in found if one[0] <= step), default=found[0])
    when = "from before these steps" if number <= step else "the oldest that is left"
    return f"{folder} is {when}"


def _is_usable(folder: Path) -> bool:
    return is_complete(folder) and _is_resumable(folder)


# Which checkpoints are kept: the newest few, to continue from, and the best one, to use


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
        newest = [number for number, folder in there if _is_usable(folder)][-keep:]
        for number, folder in there:
            if number == best.step and is_complete(folder):
                mark_best(folder, best)
                if number not in newest and (folder / OPTIMIZER_FOLDER).exists():
                    state = read_state(folder)
                    ours = f"{OPTIMIZER_FOLDER}/"
                    files = {f: crc for f, crc in state["files"].items() if not f.startswith(ours)}
                    # The list first, so that after a kill it names nothing that is gone.
                    _write_state(folder, {**state, "files": files})
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


# Room on the disk


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


# `save_path`: a copy of the trained model in a folder of its own, ready to be published


def check_save_path(recipe: Recipe, run: Path) -> None:
    """Refuse, before training, a folder that must not be replaced at the end.

    Args:
        recipe: names the folder.
        run: the run folder.

    Raises:
        RunFolderError: it holds anything but an earlier export, or is part of the run.
    """
    if recipe.save_path is None:
        return
    target = Path(recipe.save_path).expanduser()
    here, there = run.resolve(), target.resolve()
    with refusing(target):
        entries = list(target.iterdir()) if target.is_dir() else [target] * target.exists()
    names = {entry.name for entry in entries}
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    if here.is_relative_to(there) or any(there.is_relative_to(here / n) for n in OUR_FOLDERS):
        what = "this folder is part of the run, or holds it, and would be replaced"
        fix = "Name a folder of its own."
    elif names and not ({RECIPE_FILE} < names and names & {ADAPTER_FILE, "config.json"}):
        what = "this holds something other than a model saved by a run, and would be replaced"
        fix = "Name a new folder, or empty this one."
    elif folders:
        what = f"{', '.join(folders)} in this folder is from elsewhere, and would be deleted"
        fix = "Move it, or name a new folder."
    else:
        return
    raise RunFolderError(what, where=f"save_path: {recipe.save_path}", fix=fix)


def export_to_save_path(recipe: Recipe, run: Path) -> str | None:
    """Copy the last trained model of the run to `save_path`, completely or not at all.

    The folder gets the adapter alone if there is one, else the weights; tokenizer, chat template,
    generation config; and the recipe.

    Args:
        recipe: names the folder; written into it.
        run: the run folder.

    Returns:
        A line that says so; None if there is nothing to do.

    Raises:
        RunFolderError: as `check_save_path`; the disk is full or not writable.
    """
    finals = [run / phase / "final" for phase in reversed(recipe.phases)]
    trained = next(filter(is_complete, finals), None)
    if recipe.save_path is None or trained is None:
        return None
    check_save_path(recipe, run)
    target = Path(recipe.save_path).expanduser()
    with whole_folder(target) as folder:
        for file in sorted(trained.iterdir()):
            if file.is_file() and file.name not in (STATE_FILE, BEST_FILE):
                shutil.copyfile(file, folder / file.name)
        (folder / RECIPE_FILE).write_text(resolved_yaml(recipe), encoding="utf-8")
        what = "the adapter" if (folder / ADAPTER_FILE).is_file() else "the model"
    return f"Saved {what} of {trained} to {target}."
