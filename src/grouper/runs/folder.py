"""The run folder: the record of a run, always local, readable without Grouper.

    <output>/<run>/recipe.yaml                     the resolved recipe
                   run.json                        its hash, package versions, data fingerprints,
                                                   and the changes that --allow-changes made
                   metrics.jsonl                   one flat line per step
                   rollouts/grpo-000001.jsonl.gz   every rollout of a step
                   evaluations/<name>.json         summary; <name>.jsonl.gz beside it: each item
                   training.log  report.html  curves.png
                   ended.json                      how the last process ended
                   base/                           the recipe's new random model, if it has one
                   {sft,grpo}/checkpoint-<step>/   and final/ (written by training, like base/)
                   nan_dump/<phase>-<step>/        evidence of why a run stopped by itself
                   eval_runs/<model>/              later results of `grouper eval`
                   probes/<set>.json               later results of `grouper probe`
                   certificate.json  .html         what `grouper certify` has found
                   trackers/                       files of TensorBoard or W&B, if they are used

Two equal runs leave equal bytes in everything but `training.log`, the pictures, `trackers/`, the
`host` part of `run.json` and, of the metrics, `time`, `elapsed_s`, `time.*`, `memory.*` and
`host.*`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from grouper.config.loading import recipe_hash
from grouper.config.schema import Recipe
from grouper.errors import RunFolderError
from grouper.evaluation.items import PartialEvaluation, StoredItems, row_of
from grouper.evaluation.result import EvaluationResult
from grouper.files import (
    append_line,
    checksum,
    delete,
    os_errors_as,
    raise_os_error,
    read_errors_as,
    read_json,
    read_lines,
    require_writable,
    sweep,
    sync,
    write_atomic,
    write_lines,
)
from grouper.models.folders import STATE_FILE
from grouper.runs import records
from grouper.runs.lock import LOCK_FILE, RunLock
from grouper.runs.records import (
    MOST_STEPS,
    Change,
    Changes,
    RunEnd,
    RunInfo,
    are_harmless,
    content_changes,
    describe_changes,
    evaluation_summary,
    flat,
    numbers_in_words,
    recipe_changes,
    rollout_of,
)
from grouper.types import StepReport

log = logging.getLogger(__name__)

Value = TypeVar("Value")
# Answers of reward functions that are not deterministic.
ANSWERS_FILE = "reward_answers.jsonl"

PHASES = records.PHASES

PICTURES = ("report.html", "curves.png")
END_FILE = "ended.json"
# Entry of a run's `host`: the seeds that there might have been (`run --until`).
PLANNED_SEEDS = "planned seeds"
# What `grouper certify` says of a run.
CERTIFICATE_FILE = "certificate.json"
_FILES = (
    "recipe.yaml",
    "metrics.jsonl",
    "training.log",
    *PICTURES,
    ANSWERS_FILE,
    END_FILE,
    CERTIFICATE_FILE,
    "certificate.html",
)
OUR_FOLDERS = (
    *PHASES,
    "rollouts",
    "evaluations",
    "eval_runs",
    "probes",
    "nan_dump",
    "trackers",
)
# Allowed in a folder without a `run.json`: the run was killed at its very start, or a model was
# measured before anything was trained.
_LEFTOVERS = {"recipe.yaml", "training.log", "eval_runs", LOCK_FILE}
# Settings of training alone: the base model and its evaluation do not depend on them.
_OF_TRAINING = ("sft.", "grpo.", "skip_sft", "skip_grpo")
_ROLLOUTS = re.compile(rf"({'|'.join(PHASES)})-(\d+)\.jsonl\.gz")
_EVALUATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*")
_DAMAGED = "the summary of the evaluation is damaged"
_NO_STATE = "the state of the final model is damaged"


def _read(path: Path, problem: str, parse: Callable[[dict[str, Any]], Value]) -> Value:
    """Read a record from a JSON file.

    Raises:
        RunFolderError: the file is damaged; the message is `problem`.
    """
    content = read_json(path, problem)
    with read_errors_as(path, problem, "Restore the file, or delete it."):
        record = parse(content)
    return record  # noqa: RET504 - to mypy the block above may swallow an error


def _settings(split: str, card: Mapping[str, Any]) -> list[str]:
    """Return the settings that are equal in two evaluations if one may replace the other."""
    # As JSON: the card of a stored evaluation has been read from JSON.
    return [split, *(json.dumps(card.get(name), sort_keys=True) for name in _MEASURED_BY)]


# Entries of a card: the model, the problems, and how completions are sampled, graded and rewarded.
_MEASURED_BY = (
    "model",
    "model_hash",
    "data",
    "seed",
    "sampling",
    "n",
    "k",
    "prompt_of_item_0",
    "grading",
    "rewards",
    "code",
    "computed",
    "drawn",
)


class Intent(TypedDict, total=False):
    """Permissions about a run that is in the folder already; by default it is refused."""

    resume: bool
    """Continue it (or start one, if there is none)."""
    overwrite: bool
    """Delete it, whatever its recipe."""
    allow_changes: bool
    """Continue it although recipe, data or code changed; `run.json` lists the changes."""


class LostItemsError(RunFolderError):
    """Only the summary of an evaluation is left."""


class RunFolder:
    """Reads and writes one run folder. Only one process of a run may write.

    Example: `RunFolder(Path("outputs/gsm8k")).read_metrics()`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._info = self.path / "run.json"
        self._recipe = self.path / "recipe.yaml"
        self._metrics = self.path / "metrics.jsonl"
        self._opened = time.monotonic()
        self._elapsed_before: float | None = None
        """`elapsed_s` of the step before the first one that is appended here."""
        self.measuring = contextlib.ExitStack()
        """Locks of evaluations that this process has begun; closing it releases them."""

    # --- a new run, or one that is continued

    @classmethod
    def create(
        cls, path: Path | str, new_info: RunInfo, *, recipe_yaml: str, **intent: Unpack[Intent]
    ) -> RunFolder:
        """Start a run folder, or open one to continue it.

        Args:
            path: `<output>/<run>`; made if it is missing.
            new_info: description of the run; a folder of another recipe hash is refused.
            recipe_yaml: the resolved recipe as text.
            intent: permissions about a run that is in the folder already.

        Raises:
            RunFolderError: the folder holds another experiment, a run that is neither to be
                continued nor overwritten, or things that are not a run; it cannot be written;
                or the data or the code changed since the run began.
        """
        folder = cls(path)
        exists = folder.check(new_info.recipe_hash, recipe_yaml, **intent)
        with os_errors_as(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            sweep(folder.path)
        untrained = exists and folder.is_untrained()
        if exists and intent.get("overwrite"):
            folder._clear()
        elif (
            untrained
            and not intent.get("allow_changes")
            and not folder._base_still_holds(new_info, recipe_yaml)
        ):
            folder._clear(keep=("eval_runs",))
        if folder._info.exists():
            allowed = untrained or intent.get("allow_changes", False)
            info = folder._continued(new_info, recipe_yaml, allowed)
            folder._rewrite_metrics(lambda _: True)  # a kill may have truncated its last line
            # The new hash is written before the new recipe: after a kill in between, the new recipe
            # can continue the run, and the old one is refused.
            folder._write_info(info)
        write_atomic(folder._recipe, recipe_yaml.encode())
        if not folder._info.exists():
            # A folder with this file is a run folder, so it is written last.
            folder._write_info(new_info)
        return folder

    def _continued(self, new_info: RunInfo, recipe_yaml: str, allowed: bool) -> RunInfo:
        """Return the description of the existing run, with the changes that the user allowed.

        The phase and step where the changes begin are not known yet.

        Raises:
            RunFolderError: data or code changed, and that is not allowed.
        """
        info = self.read_info()
        changes = content_changes(info, new_info)
        if changes and not allowed:
            categories = dict.fromkeys(key.partition(".")[0] for key in changes)
            names = sorted(key.partition(".")[2] for key in changes)
            raise RunFolderError(
                f"the {' and the '.join(categories)} changed since this run began: "
                + ", ".join(names),
                where=str(self.path),
                fix="Put back what was there, start a new run under another name, or continue "
                "anyway with --resume --allow-changes.",
            )
        old_hash = info.recipe_hash
        new_hash = new_info.recipe_hash
        if old_hash != new_hash:
            changes |= self._changes_to(recipe_yaml)
        if old_hash != new_hash or changes:
            info.changes.append(Change(hash_before=old_hash, hash=new_hash, changes=changes))
        info.recipe_hash = new_hash
        info.fingerprints |= new_info.fingerprints
        info.code |= new_info.code
        return info

    def check(self, recipe_hash: str, recipe_yaml: str = "", **intent: Unpack[Intent]) -> bool:
        """Return whether `create` would find a run here to continue or delete. Changes nothing.

        With `recipe_yaml`, a refusal names the settings that differ. A run that is continued may be
        given more steps or epochs, and save more or less, without `allow_changes`. A run that has
        trained nothing is never refused: it is continued, or begun again by another recipe.

        Raises:
            RunFolderError: `create` would refuse the folder, but for changed data or code.
        """
        require_writable(self._info, "Set output_dir to a folder you may write to.")
        try:
            names = sorted(entry.name for entry in self.path.iterdir())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise_os_error(error, self.path)
        if not self._info.exists():
            foreign = [
                name for name in names if name not in _LEFTOVERS and not name.endswith(".tmp")
            ]
            if foreign:
                raise RunFolderError(
                    f"the folder is not empty and not a run of Grouper (it holds {foreign[0]!r})",
                    where=str(self.path),
                    fix="Choose another name or output_dir for the run.",
                )
            return False
        if intent.get("overwrite"):
            return True
        existing_hash = self.read_info().recipe_hash
        if self.is_untrained():
            return True
        if existing_hash != recipe_hash:
            self._refuse_other_recipe(existing_hash, recipe_hash, recipe_yaml, intent)
        if not intent.get("resume"):
            raise RunFolderError(
                f"the folder already holds a run of this recipe (hash {existing_hash})",
                where=str(self.path),
                fix=f"Continue it with `{self.resume_command}`, start again with --overwrite, or "
                "give this run another name.",
            )
        return True

    def _refuse_other_recipe(
        self, existing_hash: str, recipe_hash: str, recipe_yaml: str, intent: Intent
    ) -> None:
        """Raise `RunFolderError`, unless the run may be continued with the other recipe."""
        changes = self._changes_to(recipe_yaml)
        if intent.get("allow_changes"):
            return
        if intent.get("resume") and are_harmless(changes):
            return
        details = f": {describe_changes(changes)}" if changes else ""
        raise RunFolderError(
            f"the folder holds a run of another recipe (hash {existing_hash}, yours is "
            f"{recipe_hash}){details}",
            where=str(self.path),
            fix="Give this run another name or output_dir, go back to the settings in its "
            "recipe.yaml, delete it with --overwrite, or continue it anyway with --resume "
            "--allow-changes.",
        )

    @property
    def resume_command(self) -> str:
        """The command that continues the run, whatever recipe it was started from."""
        name = str(self.path)
        if "/" not in name:  # without a slash it would be the name of a recipe
            name = f"./{name}"
        return f"grouper run {shlex.quote(name)} --resume"

    def is_untrained(self) -> bool:
        """Return whether no step has been done: at most the base model has been measured."""
        if self._metrics.exists() and self._metrics.stat().st_size > 0:
            return False
        patterns = ["rollouts/*", "nan_dump/*"]
        patterns += [f"{phase}/*" for phase in PHASES[1:]]
        return not any(any(self.path.glob(pattern)) for pattern in patterns)

    def is_unmeasured(self) -> bool:
        """Return whether there is no completion of any evaluation, finished or not."""
        return not any((self.path / "evaluations").glob("**/*.jsonl*"))

    def _base_still_holds(self, new_info: RunInfo, recipe_yaml: str) -> bool:
        """Return whether the new run would have the same base model and evaluation of it."""
        info = self.read_info()
        if content_changes(info, new_info):
            return False
        if info.recipe_hash == new_info.recipe_hash:
            return True
        changes = self._changes_to(recipe_yaml)
        return bool(changes) and all(key.startswith(_OF_TRAINING) for key in changes)

    def discard(self) -> None:
        """Undo `create` of a new folder: a run that never began leaves nothing.

        Otherwise the next attempt, with the mistake corrected, would be refused as another recipe.
        """
        self._clear(keep=("eval_runs",))
        with contextlib.suppress(OSError):  # the folder holds files that are not of a run
            self.path.rmdir()

    def _clear(self, *, keep: Sequence[str] = ()) -> None:
        """Delete the files and folders of a run, without those to keep."""
        with os_errors_as(self.path):
            for name in OUR_FOLDERS:
                if name not in keep and (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            # `run.json` last, so that an interrupted clearing can be repeated.
            for name in (*_FILES, self._info.name):
                (self.path / name).unlink(missing_ok=True)

    # --- the description of the run

    def read_info(self) -> RunInfo:
        """Read `run.json`.

        Raises:
            RunFolderError: there is none, or it is damaged.
        """
        return _read(self._info, "this is not a run folder of Grouper", records.parse_info)

    def read_end(self) -> RunEnd | None:
        """Read how the process that last wrote this run ended; None: it still runs, or was killed.

        A damaged file counts as missing: nothing but the report's state depends on it.
        """
        try:
            return records.parse_end(json.loads((self.path / END_FILE).read_text("utf-8")))
        except (OSError, ValueError):
            return None

    def write_end(self, end: RunEnd | None) -> None:
        """Write how the process of this run ends; None when one begins.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        file = self.path / END_FILE
        if end is None:
            with os_errors_as(file):
                file.unlink(missing_ok=True)
        else:
            write_atomic(file, end.model_dump_json().encode())

    def recipe_hashes(self) -> set[str]:
        """Return the hashes of the recipe, now and before changes that were allowed."""
        info = self.read_info()
        return {info.recipe_hash, *(change.hash_before for change in info.changes)}

    @cached_property
    def _signature(self) -> dict[str, str]:
        """Entry that marks the records of this run as its own.

        It is empty in a folder that is no run, as the folders of `grouper eval`.
        """
        if not self._info.exists():
            return {}
        return {"recipe_hash": self.read_info().recipe_hash}

    @cached_property
    def _signatures(self) -> set[str]:
        """The signatures that records of this run may have; empty: any."""
        if not self._info.exists():
            return set()
        return self.recipe_hashes()

    def _require_own(self, signature: object, record: str, file: Path) -> None:
        """Raise `RunFolderError` if a record carries the signature of another run."""
        if signature is None or not self._signatures or str(signature) in self._signatures:
            return
        # Read again: another process, or another object, may have let the run change its recipe.
        vars(self).pop("_signatures", None)
        signatures = self._signatures
        if str(signature) not in signatures:
            raise RunFolderError(
                f"{record} is of another run (recipe hash {signature}, this one has "
                f"{', '.join(sorted(signatures))})",
                where=str(file),
                fix="Put back the file that was written here, or delete this one.",
            )

    def record_resolved(self, numbers: Mapping[str, int]) -> None:
        """Record settings that followed from the data, as `resolved` of `run.json`."""
        info = self.read_info()
        info.resolved = dict(numbers)
        self._write_info(info)

    def record_planned_seeds(self, seeds: int) -> None:
        """Record that results decided after each seed whether there was another, up to a number."""
        info = self.read_info()
        host = {**info.host, PLANNED_SEEDS: seeds}
        self._write_info(info.model_copy(update={"host": host}))

    def changes_begin_at(self, phase: str, step: int) -> Changes:
        """Record that the changes allowed since the last step take effect here; return them."""
        info = self.read_info()
        latest: Changes = {}
        for change in info.changes:
            if change.step is not None:
                continue
            change.phase = phase
            change.step = step
            for key, (old, new) in change.changes.items():
                first_old = latest[key][0] if key in latest else old
                latest[key] = [first_old, new]
        if latest:
            self._write_info(info)
        return latest

    def _write_info(self, info: RunInfo) -> None:
        """Write `run.json`, and drop the cached signatures that depend on it."""
        for derived in ("_signature", "_signatures"):
            self.__dict__.pop(derived, None)
        write_atomic(self._info, f"{info.model_dump_json(indent=2)}\n".encode())

    def _changes_to(self, recipe_yaml: str) -> Changes:
        """Return the settings that differ in another resolved recipe.

        Empty if one of the two recipes is not known.

        Raises:
            RunFolderError: the recipe of the run is damaged.
        """
        changes: Changes = {}
        if recipe_yaml and self._recipe.exists():
            fix = "Restore the file: what has changed since can only be told by it."
            with read_errors_as(self._recipe, "the recipe of the run is damaged", fix):
                changes = recipe_changes(self._recipe.read_text(encoding="utf-8"), recipe_yaml)
        return changes

    # --- metrics

    def append_metrics(self, report: StepReport) -> None:
        """Add one step to `metrics.jsonl`, flushed to the operating system.

        Raises:
            RunFolderError: the disk is full, or the like; no part of the line is left in the file.
        """
        if self._elapsed_before is None:
            rows = self._metrics_lines()
            self._elapsed_before = rows[-1][1].elapsed_s if rows else 0.0
        elapsed = self._elapsed_before + time.monotonic() - self._opened
        row = records.metrics_row(report, elapsed=elapsed)
        append_line(self._metrics, {**row, **self._signature})

    def flush_metrics(self) -> None:
        """Wait until every line of `metrics.jsonl` is on disk; raises as `append_metrics` does."""
        if self._metrics.exists():
            with os_errors_as(self._metrics):
                sync(self._metrics)
                sync(self.path)

    def read_metrics(self) -> list[StepReport]:
        """Read all steps in the order they were written.

        Raises:
            RunFolderError: a line is damaged; a last line without its end is left out instead.
        """
        return [records.report_of(row) for _, row in self._metrics_lines()]

    def read_metrics_rows(self) -> list[records.MetricsRow]:
        """Read all steps as `read_metrics`, with their times."""
        return [row for _, row in self._metrics_lines()]

    def metrics_rows(self) -> list[dict[str, Any]]:
        """Read all steps as the flat rows of the file."""
        return [row.model_dump() for _, row in self._metrics_lines()]

    def _metrics_lines(self) -> list[tuple[str, records.MetricsRow]]:
        """Read (line, row) of every step."""
        if not self._metrics.exists():
            return []
        fix = "It was damaged after it was written; restore the file or delete the line."
        with read_errors_as(self._metrics, "the file cannot be read", fix):
            text = self._metrics.read_text(encoding="utf-8", errors="replace")
        lines = []
        # A kill can leave the last line half-written; only lines with their end count.
        for number, line in enumerate(text.split("\n")[:-1], start=1):
            with read_errors_as(self._metrics, f"line {number} cannot be read", fix):
                row = records.parse_step(line)
            self._require_own(row.recipe_hash, f"line {number}", self._metrics)
            lines.append((line, row))
        return lines

    def _rewrite_metrics(self, is_kept: Callable[[records.MetricsRow], bool]) -> None:
        """Remove steps from `metrics.jsonl`; the lines of the others stay as they are."""
        if self._metrics.exists():
            text = "".join(f"{line}\n" for line, row in self._metrics_lines() if is_kept(row))
            write_atomic(self._metrics, text.encode())

    # --- rollouts

    def write_rollouts(self, phase: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record every rollout of a step, one line each: the rows of `records.rollout_rows`."""
        signed_rows = [{**row, **self._signature} for row in rows]
        write_lines(self.path / "rollouts" / f"{phase}-{step:06d}.jsonl.gz", signed_rows)

    def read_rollouts(
        self, phase: str | None = None, step: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield rollouts in order of phase, step, group and sample.

        Args:
            phase: only rollouts of this phase.
            step: only rollouts of this step.
        """
        for file_phase, file_step, file in self.rollout_files():
            if phase in (None, file_phase) and step in (None, file_step):
                for row in read_lines(file, records.parse_rollout):
                    self._require_own(row.recipe_hash, "the file", file)
                    yield row.model_dump(exclude_unset=True)

    def shown_rollouts(self, file: Path, text: str = "") -> Iterator[dict[str, Any]]:
        """Yield the rows of a file of rollouts, of any version, for display.

        Args:
            file: one of `rollout_files`.
            text: leave out lines without it before they are decoded.

        Raises:
            RunFolderError: it is damaged, or of another run.
        """

        def parse(line: str) -> dict[str, Any] | None:
            return rollout_of(line) if text in line else None

        for row in read_lines(file, parse):
            if row is not None:
                self._require_own(row["recipe_hash"], "the file", file)
                yield row

    def has_finished(self, phases: Sequence[str]) -> bool:
        """Return whether each of these phases has a final model, and no steps after it."""
        last_steps: dict[str, int] = {row.phase: row.step for _, row in self._metrics_lines()}
        final_steps = {phase: self._finished_steps(phase) for phase in phases}
        return all(
            final_step is not None and final_step >= last_steps.get(phase, 0)
            for phase, final_step in final_steps.items()
        )

    def _finished_steps(self, phase: str) -> int | None:
        """Return the steps of a phase's final model; None if there is none."""
        file = self.path / phase / "final" / STATE_FILE
        if not file.is_file():
            return None
        step = read_json(file, _NO_STATE).get("step")
        if type(step) is not int or not 0 <= step <= MOST_STEPS:
            raise RunFolderError(
                f"{_NO_STATE} (step: {step!r} is not a number of steps)",
                where=str(file),
                fix="Restore the file.",
            )
        return step

    def rollout_files(self) -> list[tuple[str, int, Path]]:
        """List (phase, step, file) of every step whose rollouts are stored, in order."""
        files = []
        for file in (self.path / "rollouts").glob("*"):
            match = _ROLLOUTS.fullmatch(file.name)
            if match is not None:
                files.append((match[1], int(match[2]), file))
        return sorted(files, key=lambda entry: (PHASES.index(entry[0]), entry[1]))

    # --- evaluations

    def write_evaluation(self, result: EvaluationResult) -> None:
        """Record an evaluation; one of the same name is replaced."""
        if not _EVALUATION.fullmatch(result.name):
            raise ValueError(f"{result.name!r} cannot be a file name")
        summary, items = self._evaluation_files(result.name)
        # The items of an evaluation in this folder have been written while it was measured.
        if getattr(result.items, "path", None) != items.absolute():
            # The old summary must never be beside the new items.
            delete(summary)
            write_lines(items, map(row_of, result.items))
        # The summary last: an evaluation without one does not exist.
        content = {**records.evaluation_summary(result), "items_crc32": checksum(items)}
        # Strict readers of JSON do not accept NaN, the accuracy of an evaluation without scores.
        finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
        text = json.dumps(finite, indent=2)
        write_atomic(summary, (text + "\n").encode())
        # Not earlier: until the summary is written, it is needed to continue the evaluation.
        PartialEvaluation(summary.parent, result.name, {}).delete()
        self.measuring.close()

    def name_for(self, name: str, split: str, card: Mapping[str, Any]) -> str:
        """Return a name for an evaluation: `name`, or with a number if other settings have it.

        If there is no evaluation of the name yet, no other process may measure it until it has been
        written.

        Args:
            name: preferred name of the evaluation.
            split: of the evaluation.
            card: of the evaluation.

        Raises:
            RunFolderError: another process is measuring it.
        """
        for number in itertools.count(1):
            candidate = name if number == 1 else f"{name}-{number}"
            summary, items = self._evaluation_files(candidate)
            unfinished = PartialEvaluation(summary.parent, candidate, card)
            if unfinished.of_others():
                continue
            if summary.exists() and not items.exists():
                log.warning("The items of %s are lost; it is measured again.", summary)
                delete(summary)
            if not summary.exists():
                self.measuring.callback(RunLock(unfinished.folder, "evaluation").release)
                return candidate
            existing = read_json(summary, _DAMAGED)
            if _settings(existing["split"], existing["card"]) == _settings(split, card):
                return candidate
        raise AssertionError

    def read_evaluation(self, name: str) -> EvaluationResult | None:
        """Read the evaluation of a name; None if it was not finished.

        Raises:
            LostItemsError: only its summary is left.
            RunFolderError: a file of it is damaged, or of another run or evaluation.
        """
        return self._load_evaluation(name)

    def _load_evaluation(self, name: str) -> EvaluationResult | None:
        """Read an evaluation in this process alone; raises as `read_evaluation` does."""
        summary, items = self._evaluation_files(name)
        if not summary.exists():
            return None
        try:
            if not items.exists():
                raise LostItemsError(
                    "the items of this evaluation are lost, so it cannot be reported",
                    where=str(items),
                    fix=f"Restore the file, or delete {summary} and continue the run with "
                    "--resume, which measures it again.",
                )
            stored = StoredItems.read(items)
            result = _read(
                summary, _DAMAGED, lambda content: records.evaluation_of(content, stored)
            )
            self._require_intact(name, result)
        except RunFolderError:
            if not summary.exists():  # a run that resumes has deleted it in the meantime
                return None
            raise
        return result

    def _require_intact(self, name: str, result: EvaluationResult) -> None:
        """Raise `RunFolderError` if the two files of an evaluation do not belong here together."""
        summary, items = self._evaluation_files(name)
        self._require_own(result.card.get("recipe_hash"), "the evaluation", summary)
        problem = None
        if result.name != name:
            problem = f"this is the summary of the evaluation {result.name!r}"
        elif read_json(summary, _DAMAGED).get("items_crc32", checksum(items)) != checksum(items):
            problem = f"{items.name} is damaged, or holds other items than this summary was made of"
        if problem is not None:
            raise RunFolderError(
                problem,
                where=str(summary),
                fix="Put back the files that were written here, or delete both.",
            )

    def read_evaluations(self) -> list[EvaluationResult]:
        """Read all evaluations by phase, step and name; raises as `read_evaluation` does."""
        results = []
        for summary in (self.path / "evaluations").glob("*.json"):
            result = self._load_evaluation(summary.stem)
            if result is not None:
                results.append(result)
        return sorted(
            results, key=lambda result: (PHASES.index(result.phase), result.step, result.name)
        )

    def _evaluation_files(self, name: str) -> tuple[Path, Path]:
        """Return the paths of an evaluation's summary and items."""
        folder = self.path / "evaluations"
        return folder / f"{name}.json", folder / f"{name}.jsonl.gz"

    # --- truncation and missing records

    def truncate_to(self, phase: str, step: int) -> None:
        """Delete the record after a checkpoint, so that resuming equals never having stopped.

        All records of earlier phases are kept, and those of `phase` up to `step`.
        """
        checkpoint = (PHASES.index(phase), step)

        def is_later(record_phase: str, record_step: int) -> bool:
            return (PHASES.index(record_phase), record_step) > checkpoint

        self._rewrite_metrics(lambda row: not is_later(row.phase, row.step))
        for file_phase, file_step, file in self.rollout_files():
            if is_later(file_phase, file_step):
                delete(file)
        for path in sorted((self.path / "evaluations").glob("*.json")):
            content = read_json(path, _DAMAGED)
            if is_later(content["phase"], content["step"]):
                for file in self._evaluation_files(path.stem):
                    delete(file)

    def losses(self, recipe: Recipe | None = None) -> list[str]:
        """List the missing records of finished phases, by name.

        Args:
            recipe: of the run; default: missing evaluations are not listed.

        Raises:
            RunFolderError: metrics or a state are damaged.
        """
        finished: dict[str, int] = {}
        for phase in PHASES[1:]:
            step = self._finished_steps(phase)
            if step is not None:
                finished[phase] = step
        lost = self.missing_records(finished)
        for phase in PHASES[1:]:
            final = self.path / phase / "final"
            if final.is_dir() and phase not in finished:
                lost.append(f"{STATE_FILE} of {phase}/final")
        for path in sorted((self.path / "evaluations").glob("*.json")):
            _, items = self._evaluation_files(path.stem)
            if not items.exists():
                lost.append(f"the items of the evaluation {path.stem}")
        if finished and not _is_complete_log(self.path / "training.log"):
            lost.append("training.log, and the warnings that it held")
        if recipe is not None and finished:
            lost += self._missing_by_recipe(recipe, list(finished))
        return lost

    def _missing_by_recipe(self, recipe: Recipe, finished: Sequence[str]) -> list[str]:
        """List the missing records that the recipe of a run shows to be missing.

        Args:
            recipe: the recipe in the run folder.
            finished: the finished phases.
        """
        lost = []
        if recipe_hash(recipe) not in self.recipe_hashes():
            lost.append("its own recipe.yaml, in whose place there is another one")
        if recipe.data.test is not None:
            for name in ("base", *finished):
                summary, _ = self._evaluation_files(name)
                if not summary.exists():
                    lost.append(f"the evaluation of {name}")
        return lost

    def missing_records(self, steps: Mapping[str, int]) -> list[str]:
        """List the lines of metrics and the files of rollouts that are missing, by name.

        Args:
            steps: phase -> the steps that it has done.
        """
        recorded_steps = {(row.phase, row.step) for _, row in self._metrics_lines()}
        sampled_steps = {
            (phase, step) for phase, step, file in self.rollout_files() if _has_content(file)
        }
        missing_records = []
        for phase, last in steps.items():
            missing = [n for n in range(1, last + 1) if (phase, n) not in recorded_steps]
            if missing:
                numbers = numbers_in_words(missing)
                missing_records.append(f"the lines of metrics.jsonl of {phase} step {numbers}")
        if "grpo" in steps:
            missing = [n for n in range(1, steps["grpo"] + 1) if ("grpo", n) not in sampled_steps]
            if missing:
                numbers = numbers_in_words(missing)
                missing_records.append(f"the rollouts of grpo step {numbers}")
        return missing_records


def _is_complete_log(file: Path) -> bool:
    """Return whether a log consists of lines of text, the last of them with its end."""
    try:
        content = file.read_bytes()
    except OSError:  # missing, a folder, a link to nothing
        return False
    return content.endswith(b"\n") and b"\0" not in content


def _has_content(file: Path) -> bool:
    """Return whether a file exists and is not empty."""
    try:
        return file.stat().st_size > 0
    except OSError:  # a link to nothing
        return False


# --- the record of a run as tables ----------------------------------------------------------------

Table = list[dict[str, Any]]


class LoadedRun:
    """The record of a run as lists of flat rows; `pandas.DataFrame(run.metrics)` makes a frame.

    Args:
        path: of the run folder, finished or not.

    Raises:
        RunFolderError: it is not a run folder, or (on first use of a table) it is damaged.
    """

    def __init__(self, path: Path | str) -> None:
        # Absolute: tables are read on first use, when the process may be in another folder.
        self._folder = RunFolder(Path(path).expanduser().absolute())
        self.path = self._folder.path
        self.info = self._folder.read_info().model_dump()
        """The content of `run.json`."""

    @cached_property
    def metrics(self) -> Table:
        """Rows of steps: `phase`, `step`, `time`, `elapsed_s`, `status`, `events`, metrics."""
        return self._folder.metrics_rows()

    @cached_property
    def rollouts(self) -> Table:
        """Rows of rollouts, with the reward, and each component as `rewards/<name>`."""
        return [flat(row) for row in self._folder.read_rollouts()]

    @cached_property
    def evaluations(self) -> Table:
        """Rows of evaluations: settings, and every number derived from the items."""
        return [flat(evaluation_summary(result)) for result in self._results]

    @cached_property
    def completions(self) -> Table:
        """Rows of the completions of every evaluation, with the same names as `rollouts`."""
        rows = []
        for result in self._results:
            for item in result.items:
                row = {"evaluation": result.name, **asdict(item), "outcome": item.outcome}
                rows.append(flat(row))
        return rows

    @cached_property
    def _results(self) -> list[EvaluationResult]:
        return self._folder.read_evaluations()


def load_run(path: Path | str) -> LoadedRun:
    """Read the record of a run; see `LoadedRun`.

    Example: `load_run("outputs/demo").metrics[-1]["solve_rate"]`.
    """
    return LoadedRun(path)
