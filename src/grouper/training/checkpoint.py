"""Checkpoints: whole or absent. The folder appears under its name only when all of it is on disk.

    <run>/<phase>/checkpoint-<step>/   weights or adapter, tokenizer, template, generation config,
                                       optimizer/, trainer_state.json; best.json in the best one
    <run>/<phase>/final/               the same without the optimizer

`trainer_state.json` is written last, is the mark that the folder is complete, and holds the
checksums by which a damaged one is found.

`optimizer/rank<rank>-<number>.safetensors` holds what one process keeps, as `part.parameter.name`.
Where the weights are split over processes (FSDP2), each process writes its rows of every moment,
and their rows by rank are the whole tensor; everything else is written by rank 0. Any number of
processes reads what any other number has written, each one no more than the rows that it holds.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import zlib
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from grouper.algorithms.batching import TrainBatch
from grouper.config.loading import resolved_yaml
from grouper.config.schema import GRPOConfig, Recipe, SFTConfig
from grouper.errors import CheckpointError, RunFolderError
from grouper.files import refusing, remove_folder, whole_folder, write_atomic
from grouper.models.folders import ADAPTER_FILE, RECIPE_FILE
from grouper.models.loading import save_policy
from grouper.models.policy import Policy
from grouper.rewards import RewardStack
from grouper.tracking.run_folder import RunFolder
from grouper.training.curriculum import DifficultyBand, ProblemStream
from grouper.training.metrics import StepClock
from grouper.training.optimizers import Optimizer, state_bytes
from grouper.training.parallel import ParallelPolicy
from grouper.training.update import is_out_of_memory

__all__ = [
    "OPTIMIZER_FOLDER",
    "STATE_FILE",
    "BestScore",
    "TrainState",
    "check_room_for_run",
    "check_save_path",
    "export_to_save_path",
    "is_complete",
    "is_finished",
    "last_good",
    "latest_checkpoint",
    "load_optimizer",
    "read_state",
    "rotate",
    "save_checkpoint",
    "save_final",
    "save_optimizer",
]

log = logging.getLogger(__name__)

# Written last: its presence says that a folder is complete.
STATE_FILE = "trainer_state.json"
# In the folder of the best checkpoint so far; says by which evaluation it is that.
BEST_FILE = "best.json"
# In a checkpoint that training can go on from.
OPTIMIZER_FOLDER = "optimizer"

# Tokenizer, configuration and headers beside the tensors.
MARGIN = 1.02
# Bytes of optimizer state that are copied from an accelerator to be written.
_FILE_BYTES = 1 << 31
_CHUNK = 1 << 24
_OF_THE_RUN = ("sft", "grpo", "base", "rollouts", "evaluations", "eval_runs", "incident")


# What is saved


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


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Where a phase is: what a checkpoint holds, and what is made anew from the recipe.

    The schedule and SFT's place in the problem stream are functions of `step`, so they need no
    entry.
    """

    phase: str
    step: int
    """Steps finished in this phase."""
    replica: ParallelPolicy
    """The policy, as this process runs it."""
    optimizer: Optimizer
    total: int
    """Steps of the whole phase."""
    stream: ProblemStream
    """The order in which problems are met; a function of the recipe, so it is not saved."""
    clock: StepClock
    """Where the seconds of a step go; not saved."""
    reference: dict[str, Tensor] | None = None
    """GRPO: the weights a KL term holds on to, as the replica holds its own; not saved."""
    started_from: str = ""
    """The model folder the phase began with."""
    skipped: int = 0
    """Updates in a row that were skipped because something was not finite."""
    position: int = 0
    """GRPO: problems of the stream met so far, those passed over or replaced among them."""
    epoch_ended: bool = False
    """Whether the last step met the last item of an epoch."""
    difficulty: DifficultyBand | None = None
    rewards: RewardStack | None = None
    """GRPO: counts the groups that a reward function failed on."""
    best: BestScore = field(default_factory=BestScore)
    alarms: dict[str, Any] = field(default_factory=dict)
    """What the live checks remember of the last steps, as JSON values."""
    asked: dict[str, str] = field(default_factory=dict)
    """What hooks ask for after the last step, and which one does."""
    suspect: TrainBatch | None = None
    """The last step, where it was skipped; not saved."""

    def count_update(self, *, applied: bool, batch: TrainBatch | None) -> None:
        """Count one update, applied or skipped.

        Args:
            applied: whether the optimizer was stepped.
            batch: the step, where it was not.
        """
        self.skipped = 0 if applied else self.skipped + 1
        self.suspect = batch

    @property
    def policy(self) -> Policy:
        return self.replica.policy

    def counters(self) -> dict[str, Any]:
        """What `trainer_state.json` holds to go on from, beside step, weights and optimizer."""
        return {
            "skipped": self.skipped,
            "position": self.position,
            "epoch_ended": self.epoch_ended,
            "difficulty": None if self.difficulty is None else self.difficulty.state_dict(),
            "reward_failures": None if self.rewards is None else self.rewards.state(),
            "best": self.best.state_dict(),
            "alarms": self.alarms,
            "asked": self.asked,
            "total": self.total,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put what `trainer_state.json` holds back into a fresh state.

        What the recipe has only had since (`--allow-changes`) starts anew.
        """
        self.step, self.skipped = int(saved["step"]), int(saved["skipped"])
        self.position, self.epoch_ended = int(saved["position"]), bool(saved["epoch_ended"])
        if self.difficulty is not None and saved["difficulty"] is not None:
            self.difficulty.load_state_dict(saved["difficulty"])
        if self.rewards is not None:
            self.rewards.load_state(saved["reward_failures"])
        self.best.load_state_dict(saved["best"])
        self.alarms, self.asked = saved["alarms"], dict(saved["asked"])
        if self.total > int(saved["total"]):
            # The phase was given more steps since a hook ended it.
            self.asked.pop("stop", None)


# Saving


def save_checkpoint(
    run: Path, state: TrainState, tokenizer: Any, *, recipe_hash: str, resumable: bool = True
) -> Path:
    """Save `checkpoint-<step>` of a phase.

    Every process of the run calls it. Rank 0 writes, in the same form as a run of one process; only
    an optimizer state that is split over processes is written by each of them.

    Args:
        run: the run folder.
        state: what to save.
        tokenizer: saved beside the weights.
        recipe_hash: of the run.
        resumable: with the optimizer state, so that training can go on from it.

    Raises:
        RunFolderError: on every process: the disk is full or not writable. Nothing is left
            half-written, and what was there before still is.
    """
    folder = run / state.phase / f"checkpoint-{state.step}"
    more = {"recipe_hash": recipe_hash, **state.counters()}
    _save(folder, state, tokenizer, more, resumable=resumable)
    return folder


def save_final(
    run: Path, state: TrainState, tokenizer: Any, *, recipe_hash: str, total: int
) -> Path:
    """Save `<phase>/final`, the model a phase hands on.

    Args:
        run: the run folder.
        state: what to save.
        tokenizer: saved beside the weights.
        recipe_hash: of the run.
        total: steps that the phase was to have; fewer where its target was reached.

    Raises:
        RunFolderError: as `save_checkpoint`.
    """
    folder = run / state.phase / "final"
    more = {"recipe_hash": recipe_hash, "total": total}
    _save(folder, state, tokenizer, more, resumable=False)
    return folder


def _save(
    target: Path, state: TrainState, tokenizer: Any, more: dict[str, Any], *, resumable: bool
) -> None:
    processes, moments = state.replica.processes, state.optimizer.state_dict() if resumable else {}
    needed = weight_bytes(state.policy) + sum(
        value.nbytes for value in moments.values() if isinstance(value, Tensor)
    )
    record = {
        "phase": state.phase,
        "step": state.step,
        "policy_version": state.policy.version,
        "started_from": state.started_from,
        **more,
    }

    def begin() -> Path:
        with refusing(target):
            require_room(target, needed)
            folder = stack.enter_context(whole_folder(target))
            if resumable:
                (folder / OPTIMIZER_FOLDER).mkdir()
        return folder

    def finish() -> None:
        with refusing(target):
            save_policy(state.policy, tokenizer, folder, weights)
            if state.best.step == state.step:
                mark_best(folder, state.best)
            # A checkpoint never knows of steps that the record could still lose.
            RunFolder(target.parent.parent).flush_metrics()
            _write_state(folder, {**record, "files": contents(folder)})
            stack.close()

    problem: RunFolderError | None = None
    # Open on rank 0 alone; the others write into its folder while it waits for them.
    with ExitStack() as stack:
        folder = processes.on_rank0(begin)
        try:
            with refusing(target):
                if resumable:
                    save_optimizer(state.optimizer, folder / OPTIMIZER_FOLDER, processes.rank)
        except RunFolderError as error:
            problem = error
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            # There is no room for the copy that is written.
            problem = RunFolderError(
                f"the optimizer state cannot be written: {str(error).splitlines()[0]}",
                where=str(target),
                fix="Free some memory; `grouper plan` says what each part takes.",
            )
        for refusal in filter(None, processes.gather(problem)):
            raise refusal
        weights = state.replica.whole_weights()
        processes.on_rank0(finish)


def save_optimizer(optimizer: Optimizer, folder: Path, rank: int) -> None:
    """Write what this process holds of the state: its rows, and as rank 0 what all have alike.

    Args:
        optimizer: whose state.
        folder: exists; every process that holds a part of the state writes into it.
        rank: of this process.

    Raises:
        RunFolderError: the folder is not there for a process that has something to write.
        OSError, SafetensorError: the disk is full.
    """
    state = optimizer.state_dict()
    numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    # One entry, so that equal states are equal bytes: safetensors writes several in any order.
    record = {"rank": rank, "optimizer": optimizer.describe(), "numbers": numbers}
    metadata = {"grouper": json.dumps(record)}
    files: dict[int, dict[str, Tensor]] = {0: {}} if rank == 0 else {}
    size, seen = 0, set()
    for key, value in state.items():
        if key in numbers or (rank > 0 and not isinstance(value, DTensor)):
            continue
        held = value.to_local() if isinstance(value, DTensor) else value
        # bitsandbytes has one table for all weights; safetensors wants each tensor by itself.
        held = held.clone() if held.data_ptr() in seen else held
        seen.add(held.data_ptr())
        files.setdefault(size // _FILE_BYTES, {})[key] = held
        size += held.nbytes
    if files and not folder.is_dir():
        raise RunFolderError(
            f"process {rank} does not find this folder",
            where=str(folder),
            fix="Set output_dir to a folder that every process may write to.",
        )
    for number, tensors in files.items():
        written = {key: value.cpu().contiguous() for key, value in tensors.items()}
        save_file(written, folder / f"rank{rank}-{number}.safetensors", metadata=metadata)


def load_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """Put what `save_optimizer` wrote into an optimizer, split as its weights are now.

    Raises:
        CheckpointError: it is of another optimizer, or of other weights.
    """
    try:
        with ExitStack() as stack:
            files = []
            for path in folder.glob("*.safetensors"):
                file = stack.enter_context(safe_open(path, framework="pt"))
                files.append((json.loads(file.metadata()["grouper"]), file))
            if not files:
                raise ValueError("there is none in this version's format")
            files.sort(key=lambda pair: int(pair[0]["rank"]))
            record = files[0][0]
            if record["optimizer"] != optimizer.describe():
                raise ValueError("it is of another optimizer, or of other weights")
            state: dict[str, Any] = record["numbers"]
            holders: dict[str, list[Any]] = {}
            for _, file in files:
                for key in file.keys():  # noqa: SIM118 - it is not a mapping
                    holders.setdefault(key, []).append(file)
            for key, those in holders.items():
                state[key] = _read(key, those, optimizer.parameter(key))
        optimizer.load_state_dict(state)
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"the optimizer state does not fit: {str(error).splitlines()[0]}",
            where=str(folder),
            fix="Go on with the optimizer and the model of that run, or start this phase again.",
        ) from error


def _read(key: str, files: list[Any], parameter: Tensor) -> Tensor:
    """One tensor of the state, from the files that hold its rows by rank.

    Of one that is split as its parameter is, only the rows that this process holds are read.
    """
    pieces = [file.get_slice(key) for file in files]
    lengths = [(piece.get_shape() or [0])[0] for piece in pieces]
    whole: list[int] = pieces[0].get_shape()
    if not whole:
        number: Tensor = files[0].get_tensor(key)
        return number.clone()
    whole[0] = sum(lengths)
    # Copies in any case: a piece is a view of the file's bytes, at whatever address.
    if not isinstance(parameter, DTensor) or whole != list(parameter.shape):
        return torch.cat([piece[:] for piece in pieces])
    first, last = _rows_held(parameter)
    rows = []
    for piece, length in zip(pieces, lengths, strict=True):
        rows.append(piece[max(first, 0) : max(last, 0)])
        first, last = first - length, last - length
    held = torch.cat(rows)
    moment: Any = torch.zeros_like(parameter, dtype=held.dtype, requires_grad=False)
    moment.to_local().copy_(held)
    return cast("Tensor", moment)


def _rows_held(parameter: DTensor) -> tuple[int, int]:
    """First row of a split weight that this process holds, and the one after its last.

    FSDP2 splits as `torch.chunk` does: equal shares, of which the last ones are shorter or empty.
    """
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    share = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * share, rows)
    last = min(first + share, rows)
    assert parameter.placements[0].is_shard(0)
    assert last - first == len(parameter.to_local())
    return first, last


# Whether a saved folder still is what was saved


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint or final folder was written to its end."""
    return (folder / STATE_FILE).is_file()


def contents(folder: Path) -> dict[str, str]:
    """File -> CRC-32 in hex.

    The state file is left out, and the mark of the best one, which comes and goes.
    """
    return {
        path.relative_to(folder).as_posix(): _checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (STATE_FILE, BEST_FILE)
    }


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def damage(folder: Path, *, only_tensors: bool = False) -> str | None:
    """What is wrong with a saved folder, in a few words, or None where it is whole.

    Every file is read and compared with the checksum that was taken when it was written.

    Args:
        folder: to look at.
        only_tensors: of the other files look only at their presence.
    """
    if not is_complete(folder):
        return f"it is incomplete (no {STATE_FILE})"
    name = STATE_FILE
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if min(int(state["step"]), int(state["policy_version"])) < 0:
            raise ValueError("a number below zero")
        for name, checksum in dict(state["files"]).items():
            path = folder / name
            if not path.is_file():
                return f"its {name} is missing"
            compared = not only_tensors or path.suffix == ".safetensors"
            if compared and _checksum(path) != checksum:
                return f"its {name} is damaged or was edited (other bytes than were written)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {name} cannot be read ({error})"
    return None


def _write_state(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the readable state, whose presence says that the folder is complete."""
    write_atomic(folder / STATE_FILE, (json.dumps(record, indent=2) + "\n").encode())


class _Readable(dict[str, Any]):
    """A part of `trainer_state.json`, which says so where it lacks a key."""

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        super().__init__(content)
        self._file = file

    def __missing__(self, key: str) -> NoReturn:
        _refuse_state(self._file, f"the state has no {key!r}")


def read_state(folder: Path) -> dict[str, Any]:
    """The readable state of a complete checkpoint or final folder.

    Raises:
        CheckpointError: the file is damaged; later, when a key is asked for that it lacks.
    """
    file = folder / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(
            file.read_text(encoding="utf-8"), object_hook=partial(_Readable, file)
        )
    except (OSError, ValueError) as error:
        _refuse_state(file, f"the state cannot be read ({error})")
    return state


def _refuse_state(file: Path, what: str) -> NoReturn:
    raise CheckpointError(
        what, where=str(file), fix="Delete this folder; --resume then uses what is before it."
    )


# What to go on from


def numbered(phase: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint of a phase, complete or not, oldest first."""
    found = [(folder.name.partition("-")[2], folder) for folder in phase.glob("checkpoint-*")]
    return sorted((int(number), folder) for number, folder in found if number.isdigit())


def _is_resumable(folder: Path) -> bool:
    """Whether it was saved to go on from; the best one keeps its weights alone after a while.

    True where the state cannot be read: a damaged one is to be named, not passed over.
    """
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        # In whatever format: one of an earlier version is refused when it is read, not passed over.
        return any(name.startswith(OPTIMIZER_FOLDER) for name in state["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _to_go_on_from(phase: Path) -> list[tuple[int, Path]]:
    """As `numbered`, complete and resumable."""
    return [(n, f) for n, f in numbered(phase) if is_complete(f) and _is_resumable(f)]


def latest_checkpoint(
    run: Path, phase: str, *, recipe_hashes: Collection[str]
) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint to go on from and its readable state, or None.

    Damaged ones are named and skipped.

    Args:
        run: the run folder.
        phase: `sft` or `grpo`.
        recipe_hashes: of the run, and of what it was before changes that the user allowed.

    Raises:
        CheckpointError: it belongs to another recipe, or there are only damaged ones.
    """
    damaged = []
    for _, folder in reversed(numbered(run / phase)):
        if not _is_resumable(folder):
            continue
        problem = damage(folder)
        if problem is not None:
            log.warning("%s is skipped: %s.", folder, problem)
            damaged.append(f"{folder.name}: {problem}")
            continue
        state = read_state(folder)
        theirs = state["recipe_hash"]
        if theirs not in recipe_hashes:
            raise CheckpointError(
                f"this checkpoint was written by recipe {theirs[:12]}, this is "
                f"{', '.join(sorted(recipe_hashes))}",
                where=str(folder),
                fix="Continue with the recipe.yaml of that run, or use another name or output_dir.",
            )
        return folder, state
    if damaged:
        raise CheckpointError(
            f"no checkpoint of {phase} can be used: {damaged[0]}",
            where=str(run / phase),
            fix=f"Restore one from a backup, or delete {run / phase} to train {phase} again.",
        )
    return None


def is_finished(run: Path, phase: str, total: int) -> bool:
    """Whether the final folder of a phase is there and whole; a damaged one is made again.

    One of which only small files were edited is reported and used: its weights are still whole.
    A phase that has been given more steps since is not finished, unless GRPO has begun from it.

    Args:
        run: the run folder.
        phase: `sft` or `grpo`.
        total: steps that the phase is to have now.

    Raises:
        CheckpointError: `sft/final` is damaged while a GRPO that began from it is not finished.
    """
    final = run / phase / "final"
    if not is_complete(final):
        return False
    problem = damage(final)
    begun = phase == "sft" and any(is_complete(folder) for _, folder in numbered(run / "grpo"))
    if problem is not None and phase == "sft" and is_complete(run / "grpo" / "final"):
        return True
    if problem is not None and damage(final, only_tensors=True) is None:
        log.warning("%s: %s. It is used as it is.", final, problem)
        problem = None
    if problem is None:
        before = int(read_state(final)["total"])
        if total > before and begun:
            log.warning("SFT stays at %d steps of %d: GRPO has begun from it.", before, total)
        return total <= before or begun
    if begun:
        raise CheckpointError(
            f"{problem}, and GRPO has begun from it",
            where=str(final),
            fix=f"Restore it from a backup, or delete it and {run / 'grpo'} to go on from the last "
            "checkpoint of SFT.",
        )
    log.warning("%s is skipped: %s. It is made again.", final, problem)
    return False


def last_good(phase: Path, step: int) -> tuple[int, Path] | None:
    """The newest checkpoint to go on from that is not after `step`; else the oldest there is."""
    there = _to_go_on_from(phase)
    good = [one for one in there if one[0] <= step]
    return good[-1] if good else next(iter(there), None)


# Which checkpoints stay: the newest few, to go on from, and the best one, to use


def rotate(phase: Path, *, step: int, keep: int, best: BestScore) -> None:
    """Remove what is neither among the newest `keep` checkpoints nor the best one.

    The best one loses its optimizer state once it is not among the newest. What lies after
    `step` is left alone: a run that goes on from an earlier checkpoint will write it again.
    May be called at any time, and again after a kill; what cannot be removed is only reported.

    Args:
        phase: the folder of a phase.
        step: the steps the phase has finished.
        keep: how many checkpoints to keep that training can go on from.
        best: the best evaluation so far.
    """
    try:
        newest = [number for number, _ in _to_go_on_from(phase) if number <= step][-keep:]
        for number, folder in numbered(phase):
            if number > step:
                break
            if number == best.step and is_complete(folder):
                mark_best(folder, best)
                if number not in newest:
                    _remove_optimizer(folder)
            elif number in newest:
                (folder / BEST_FILE).unlink(missing_ok=True)
            else:
                remove_folder(folder)
    except (OSError, CheckpointError, RunFolderError) as error:
        log.warning("Old checkpoints in %s cannot be removed: %s", phase, error)


def mark_best(folder: Path, best: BestScore) -> None:
    """Mark a folder as the best one so far."""
    text = json.dumps({"step": best.step, "validation_accuracy": best.accuracy}) + "\n"
    if not (folder / BEST_FILE).exists():
        write_atomic(folder / BEST_FILE, text.encode())


def _remove_optimizer(folder: Path) -> None:
    """Leave the weights alone; the list of files goes first, so that a kill leaves no lie."""
    if _is_resumable(folder):
        state, ours = read_state(folder), f"{OPTIMIZER_FOLDER}/"
        files = {name: crc for name, crc in state["files"].items() if not name.startswith(ours)}
        _write_state(folder, {**state, "files": files})
    if (folder / OPTIMIZER_FOLDER).exists():
        shutil.rmtree(folder / OPTIMIZER_FOLDER)


# Room on the disk


def weight_bytes(policy: Policy) -> int:
    """Bytes of what is saved of a policy: the adapter alone, or all weights, tied ones once."""
    alone = policy.adapter is None
    saved = policy.model.parameters() if alone else policy.trainable().values()
    return sum(value.nbytes for value in saved)


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
    run: Path, policy: Policy, phases: Mapping[str, SFTConfig | GRPOConfig]
) -> None:
    """Warn before training where the checkpoints of the run may not find room.

    Args:
        run: the run folder; what already lies in it counts as room.
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
        best = weights if phase.keep_best and phase.evaluate_every else 0
        wanted += number * (weights + state_bytes(phase.optimizer, policy)) + best + weights
    free = free_bytes(run)
    if free < wanted * MARGIN:
        log.warning(
            "The checkpoints of this run may take %s, and %s are free at %s. Free some space, set "
            "output_dir to another disk, or lower keep_checkpoints; a save that fails is reported "
            "and training goes on.",
            size_in_words(wanted),
            size_in_words(free),
            run,
        )


# `save_path`: what a run has trained, once more in a folder of its own, ready to be passed on


def check_save_path(recipe: Recipe, run: Path) -> None:
    """Refuse, before anything is trained, a folder that must not be replaced at the end.

    Args:
        recipe: names the folder.
        run: the run folder.

    Raises:
        RunFolderError: it holds something else than an earlier export, or is part of the run.
    """
    if recipe.save_path is None:
        return
    where, target = f"save_path: {recipe.save_path}", Path(recipe.save_path).expanduser()
    here, there = run.resolve(), target.resolve()
    inside = there.relative_to(here).parts[:1] if there.is_relative_to(here) else ("",)
    if here.is_relative_to(there) or inside[0] in _OF_THE_RUN:
        raise RunFolderError(
            "this folder is part of the run, or holds it, and would be replaced",
            where=where,
            fix="Name a folder of its own.",
        )
    with refusing(target):
        entries = list(target.iterdir()) if target.exists() else []
    names = {entry.name for entry in entries}
    if names and not ({RECIPE_FILE} < names and names & {ADAPTER_FILE, "config.json"}):
        raise RunFolderError(
            "this folder holds something else than a model that a run has handed over, and would "
            "be replaced",
            where=where,
            fix="Name a new folder, or empty this one.",
        )
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    if folders:
        raise RunFolderError(
            f"{', '.join(folders)} in this folder is from elsewhere, and would be deleted with it",
            where=where,
            fix="Move it, or name a new folder.",
        )


def export_to_save_path(recipe: Recipe, run: Path) -> str | None:
    """Copy what the run has trained last to `save_path`, whole or not at all.

    The folder gets the adapter alone where there is one, else the weights; tokenizer, chat
    template, generation config; and the recipe.

    Args:
        recipe: names the folder; written into it.
        run: the run folder.

    Returns:
        A line that says so; None where there is nothing to do.

    Raises:
        RunFolderError: as `check_save_path`; the disk is full or not writable.
    """
    finals = [run / phase / "final" for phase in ("grpo", "sft")]
    skipped = {"grpo": recipe.skip_grpo, "sft": recipe.skip_sft}
    trained = [f for f in finals if not skipped[f.parent.name] and is_complete(f)]
    if recipe.save_path is None or not trained:
        return None
    check_save_path(recipe, run)
    target = Path(recipe.save_path).expanduser()
    with whole_folder(target) as folder:
        for file in sorted(trained[0].iterdir()):
            if file.is_file() and file.name not in (STATE_FILE, BEST_FILE):
                shutil.copyfile(file, folder / file.name)
        (folder / RECIPE_FILE).write_text(resolved_yaml(recipe), encoding="utf-8")
        what = "the adapter" if (folder / ADAPTER_FILE).is_file() else "the model"
    return f"Saved {what} of {trained[0]} to {target}."
