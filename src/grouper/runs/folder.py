"""The run folder: the record of a run, always local, readable without Grouper.

    <output>/<run>/recipe.yaml                     the resolved recipe
                   run.json                        its hash, package versions, data fingerprints,
                                                   and the changes that --allow-changes made
                   metrics.jsonl                   one flat line per step
                   rollouts/grpo-000001.jsonl.gz   every rollout of a step
                   evaluations/<name>.json         summary; <name>.jsonl.gz beside it: each item
                   training.log  report.html  curves.png
                   base/                           the recipe's new random model, if it has one
                   {sft,grpo}/checkpoint-<step>/   and final/ (written by training, like base/)
                   nan_dump/<phase>-<step>/        why a run stopped by itself
                   eval_runs/<model>/              what `grouper eval` measured afterwards
                   trackers/                       what TensorBoard or W&B write, if they are used

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
from grouper.evaluation.items import StoredItems, Unfinished, row_of
from grouper.evaluation.result import EvaluationResult
from grouper.files import (
    append_line,
    checksum,
    delete,
    read_json,
    read_lines,
    reading,
    refused,
    refusing,
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
# What reward functions that vary have answered.
ANSWERS_FILE = "reward_answers.jsonl"

PHASES = records.PHASES

PICTURES = ("report.html", "curves.png")
_FILES = ("recipe.yaml", "metrics.jsonl", "training.log", *PICTURES, ANSWERS_FILE)
OUR_FOLDERS = (*PHASES, "rollouts", "evaluations", "eval_runs", "nan_dump", "trackers")
# What may be in a folder without a `run.json`: the run was killed at its very start, or a model was
# measured before anything was trained.
_LEFTOVERS = {"recipe.yaml", "training.log", "eval_runs", LOCK_FILE}
# Settings that nothing before the first step depends on.
_OF_TRAINING = ("sft.", "grpo.", "skip_sft", "skip_grpo")
_ROLLOUTS = re.compile(rf"({'|'.join(PHASES)})-(\d+)\.jsonl\.gz")
_EVALUATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*")
_DAMAGED = "the summary of the evaluation is damaged"
_NO_STATE = "the state of the final model is damaged"


def _read(path: Path, what: str, parse: Callable[[dict[str, Any]], Value]) -> Value:
    """A record in a JSON file; a `RunFolderError` that says `what` where it is damaged."""
    content = read_json(path, what)
    with reading(path, what, "Restore the file, or delete it."):
        found = parse(content)
    return found  # noqa: RET504 - to mypy the block above may swallow an error


def _settings(split: str, card: Mapping[str, Any]) -> list[str]:
    """What two evaluations have in common where one may replace the other."""
    # Through JSON, as a stored card went.
    return [split, *(json.dumps(card.get(name), sort_keys=True) for name in _MEASURED_BY)]


# In a card: what is measured, on which problems, and how it is drawn, graded and rewarded.
_MEASURED_BY = (
    *("model", "model_hash", "data", "seed", "sampling", "n", "k", "prompt_of_item_0"),
    *("grading", "rewards", "code", "computed", "drawn"),
)


class Intent(TypedDict, total=False):
    """What may happen to a run that is in the folder already; by default nothing."""

    resume: bool
    """Continue it (or start one, if there is none)."""
    overwrite: bool
    """Delete it, whatever its recipe."""
    allow_changes: bool
    """Continue it although recipe, data or code changed; `run.json` lists what did."""


class LostItemsError(RunFolderError):
    """Of an evaluation only its summary is left."""


class RunFolder:
    """Reads and writes one run folder. Only one process of a run may write.

    Example: `RunFolder(Path("outputs/gsm8k")).read_metrics()`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._info, self._recipe = self.path / "run.json", self.path / "recipe.yaml"
        self._metrics = self.path / "metrics.jsonl"
        self._opened = time.monotonic()
        self._elapsed_before: float | None = None
        """`elapsed_s` of the step before the first one that is appended here."""
        self.measuring = contextlib.ExitStack()
        """Closing it lets other processes measure what this one has begun."""

    # --- a new run, or one that goes on

    @classmethod
    def create(
        cls, path: Path | str, now: RunInfo, *, recipe_yaml: str, **intent: Unpack[Intent]
    ) -> RunFolder:
        """Start a run folder, or open one to continue it.

        Args:
            path: `<output>/<run>`; made if it is missing.
            now: what the run is; a folder of another recipe hash is refused.
            recipe_yaml: the resolved recipe as text.
            intent: what may happen to a run that is there.

        Raises:
            RunFolderError: the folder holds another experiment, a run that is neither to be
                continued nor overwritten, or things that are not a run; it cannot be written;
                or the data or the code changed since the run began.
        """
        folder = cls(path)
        found = folder.check(now.recipe_hash, recipe_yaml, **intent)
        with refusing(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            sweep(folder.path)
        untrained = found and folder.is_untrained()
        if found and intent.get("overwrite"):
            folder._clear()
        elif (
            untrained
            and not intent.get("allow_changes")
            and not folder._base_still_holds(now, recipe_yaml)
        ):
            folder._clear(keep=("eval_runs",))
        if folder._info.exists():
            allowed = untrained or intent.get("allow_changes", False)
            info = folder._continued(now, recipe_yaml, allowed)
            folder._rewrite_metrics(lambda _: True)  # a kill may have cut its last line
            # The new hash goes before the new recipe: after a kill in between, the new recipe can
            # go on, and the old one is refused.
            folder._write_info(info)
        write_atomic(folder._recipe, recipe_yaml.encode())
        if not folder._info.exists():
            # A folder with this file is a run folder, so it is written last.
            folder._write_info(now)
        return folder

    def _continued(self, now: RunInfo, recipe_yaml: str, allowed: bool) -> RunInfo:
        """The information on the run that is there, with the changes that the user allowed.

        From which phase and step on they hold is not known yet.

        Raises:
            RunFolderError: data or code changed, and that is not allowed.
        """
        info = self.read_info()
        changes = content_changes(info, now)
        if changes and not allowed:
            kinds = dict.fromkeys(key.partition(".")[0] for key in changes)
            raise RunFolderError(
                f"the {' and the '.join(kinds)} changed since this run began: "
                + ", ".join(sorted(key.partition(".")[2] for key in changes)),
                where=str(self.path),
                fix="Put back what was there, start a new run under another name, or continue "
                "anyway with --resume --allow-changes.",
            )
        old, new = info.recipe_hash, now.recipe_hash
        if old != new:
            changes |= self._changes_to(recipe_yaml)
        if old != new or changes:
            info.changes.append(Change(hash_before=old, hash=new, changes=changes))
        info.recipe_hash = new
        info.fingerprints |= now.fingerprints
        info.code |= now.code
        return info

    def check(self, recipe_hash: str, recipe_yaml: str = "", **intent: Unpack[Intent]) -> bool:
        """Whether `create` would find a run here to continue or delete. Touches nothing.

        With `recipe_yaml`, a refusal names the settings that differ. A run that is continued may be
        given more steps or epochs, and save more or less, without `allow_changes`. One that has
        trained nothing stands in nobody's way: it is continued, or begun again by another recipe.

        Raises:
            RunFolderError: `create` would refuse the folder, but for changed data or code.
        """
        require_writable(self._info, "Set output_dir to a folder you may write to.")
        try:
            content = sorted(entry.name for entry in self.path.iterdir())
        except FileNotFoundError:
            return False
        except OSError as error:
            refused(error, self.path)
        if not self._info.exists():
            others = [n for n in content if n not in _LEFTOVERS and not n.endswith(".tmp")]
            if others:
                raise RunFolderError(
                    f"the folder is not empty and not a run of Grouper (it holds {others[0]!r})",
                    where=str(self.path),
                    fix="Choose another name or output_dir for the run.",
                )
            return False
        if intent.get("overwrite"):
            return True
        there = self.read_info().recipe_hash
        if self.is_untrained():
            return True
        changes = {} if there == recipe_hash else self._changes_to(recipe_yaml)
        allowed = intent.get("allow_changes") or (intent.get("resume") and are_harmless(changes))
        if there != recipe_hash and not allowed:
            shown = f": {describe_changes(changes)}" if changes else ""
            raise RunFolderError(
                f"the folder holds a run of another recipe (hash {there}, yours is {recipe_hash})"
                + shown,
                where=str(self.path),
                fix="Give this run another name or output_dir, go back to the settings in its "
                "recipe.yaml, delete it with --overwrite, or continue it anyway with --resume "
                "--allow-changes.",
            )
        if not intent.get("resume"):
            raise RunFolderError(
                f"the folder already holds a run of this recipe (hash {there})",
                where=str(self.path),
                fix=f"Continue it with `{self.resume_command}`, start again with --overwrite, or "
                "give this run another name.",
            )
        return True

    @property
    def resume_command(self) -> str:
        """The command that continues the run, whatever recipe it was started from."""
        name = str(self.path)
        # Without a slash it would be the name of a recipe.
        return f"grouper run {shlex.quote(name if '/' in name else f'./{name}')} --resume"

    def is_untrained(self) -> bool:
        """Whether no step has been done: nothing but the base may have been measured."""
        trained = ("rollouts/*", "nan_dump/*", *(f"{phase}/*" for phase in PHASES[1:]))
        if self._metrics.exists() and self._metrics.stat().st_size > 0:
            return False
        return not any(any(self.path.glob(pattern)) for pattern in trained)

    def is_unmeasured(self) -> bool:
        """Whether no completion of an evaluation has been kept, finished or not."""
        return not any((self.path / "evaluations").glob("**/*.jsonl*"))

    def _base_still_holds(self, now: RunInfo, recipe_yaml: str) -> bool:
        """Whether the base model and its evaluation would be the same in the run as it is now."""
        info = self.read_info()
        if content_changes(info, now):
            return False
        if info.recipe_hash == now.recipe_hash:
            return True
        changes = self._changes_to(recipe_yaml)
        return bool(changes) and all(key.startswith(_OF_TRAINING) for key in changes)

    def discard(self) -> None:
        """Undo `create` where the folder was new: a run that never began leaves nothing.

        Otherwise the next attempt, with the mistake corrected, would be refused as another recipe.
        """
        self._clear(keep=("eval_runs",))
        with contextlib.suppress(OSError):  # there are files that are not ours
            self.path.rmdir()

    def _clear(self, *, keep: Sequence[str] = ()) -> None:
        with refusing(self.path):
            for name in OUR_FOLDERS:
                if name not in keep and (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            # `run.json` last: a clearing that was interrupted can be done again.
            for name in (*_FILES, self._info.name):
                (self.path / name).unlink(missing_ok=True)

    # --- what the run is

    def read_info(self) -> RunInfo:
        """The content of `run.json`.

        Raises:
            RunFolderError: there is none, or it is damaged.
        """
        return _read(self._info, "this is not a run folder of Grouper", records.parse_info)

    def recipe_hashes(self) -> set[str]:
        """Of the recipe, and of what it was before changes that were allowed."""
        info = self.read_info()
        return {info.recipe_hash, *(change.hash_before for change in info.changes)}

    @cached_property
    def _signature(self) -> dict[str, str]:
        """What records of this run carry, so that those of another one are not taken for its own.

        Empty in a folder that is no run, as those of `grouper eval`.
        """
        return {"recipe_hash": self.read_info().recipe_hash} if self._info.exists() else {}

    @cached_property
    def _signatures(self) -> set[str]:
        """The signatures that records of this run may have; empty: any."""
        return self.recipe_hashes() if self._info.exists() else set()

    def _require_own(self, signature: object, what: str, file: Path) -> None:
        """Raise `RunFolderError` if a record carries the signature of another run."""
        if signature is None or not self._signatures or str(signature) in self._signatures:
            return
        # Read again: another process, or another object, may have let the run change its recipe.
        vars(self).pop("_signatures", None)
        own = self._signatures
        if str(signature) not in own:
            raise RunFolderError(
                f"{what} is of another run (recipe hash {signature}, this one has "
                f"{', '.join(sorted(own))})",
                where=str(file),
                fix="Put back the file that was written here, or delete this one.",
            )

    def record_resolved(self, numbers: Mapping[str, int]) -> None:
        """Record settings that followed from the data: `resolved` of `run.json`."""
        info = self.read_info()
        info.resolved = dict(numbers)
        self._write_info(info)

    def changes_begin_at(self, phase: str, step: int) -> Changes:
        """Record where changes take effect that were allowed since the last step; returns them."""
        info = self.read_info()
        latest: Changes = {}
        for change in info.changes:
            if change.step is None:
                change.phase, change.step = phase, step
                for key, (old, new) in change.changes.items():
                    latest[key] = [latest.get(key, [old])[0], new]
        if latest:
            self._write_info(info)
        return latest

    def _write_info(self, info: RunInfo) -> None:
        for derived in ("_signature", "_signatures"):
            self.__dict__.pop(derived, None)
        write_atomic(self._info, f"{info.model_dump_json(indent=2)}\n".encode())

    def _changes_to(self, recipe_yaml: str) -> Changes:
        """What another resolved recipe has different; none where one of the two is not known.

        Raises:
            RunFolderError: the recipe of the run is damaged.
        """
        changes: Changes = {}
        if recipe_yaml and self._recipe.exists():
            fix = "Restore the file: what has changed since can only be told by it."
            with reading(self._recipe, "the recipe of the run is damaged", fix):
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
            with refusing(self._metrics):
                sync(self._metrics)
                sync(self.path)

    def read_metrics(self) -> list[StepReport]:
        """All steps in the order they were written.

        Raises:
            RunFolderError: a line is damaged; a last line without its end is left out instead.
        """
        return [records.report_of(row) for _, row in self._metrics_lines()]

    def metrics_rows(self) -> list[dict[str, Any]]:
        """The same as the flat rows of the file."""
        return [row.model_dump() for _, row in self._metrics_lines()]

    def _metrics_lines(self) -> list[tuple[str, records.MetricsRow]]:
        if not self._metrics.exists():
            return []
        fix = "It was damaged after it was written; restore the file or delete the line."
        with reading(self._metrics, "the file cannot be read", fix):
            text = self._metrics.read_text(encoding="utf-8", errors="replace")
        found = []
        # A kill can leave the last line half-written; only lines with their end count.
        for number, line in enumerate(text.split("\n")[:-1], start=1):
            with reading(self._metrics, f"line {number} cannot be read", fix):
                row = records.parse_step(line)
            self._require_own(row.recipe_hash, f"line {number}", self._metrics)
            found.append((line, row))
        return found

    def _rewrite_metrics(self, wanted: Callable[[records.MetricsRow], bool]) -> None:
        """Forget the steps that are not wanted; the lines of the others stay as they are."""
        if self._metrics.exists():
            kept = "".join(f"{line}\n" for line, row in self._metrics_lines() if wanted(row))
            write_atomic(self._metrics, kept.encode())

    # --- rollouts

    def write_rollouts(self, phase: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record every rollout of a step, one line each: the rows of `records.rollout_rows`."""
        found = [{**row, **self._signature} for row in rows]
        write_lines(self.path / "rollouts" / f"{phase}-{step:06d}.jsonl.gz", found)

    def read_rollouts(
        self, phase: str | None = None, step: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Rollouts in order of phase, step, group and sample; of one phase or step if given."""
        for file_phase, file_step, file in self.rollout_files():
            if phase in (None, file_phase) and step in (None, file_step):
                for row in read_lines(file, records.parse_rollout):
                    self._require_own(row.recipe_hash, "the file", file)
                    yield row.model_dump(exclude_unset=True)

    def shown_rollouts(self, file: Path, text: str = "") -> Iterator[dict[str, Any]]:
        """The rows of a file of rollouts, of any version, to look at.

        Args:
            file: one of `rollout_files`.
            text: leave out lines without it before they are decoded.

        Raises:
            RunFolderError: it is damaged, or of another run.
        """
        for row in read_lines(file, lambda line: rollout_of(line) if text in line else None):
            if row is not None:
                self._require_own(row["recipe_hash"], "the file", file)
                yield row

    def has_finished(self, phases: Sequence[str]) -> bool:
        """Whether each of these phases has left its final model, and has not gone on since."""
        steps: dict[str, int] = {row.phase: row.step for _, row in self._metrics_lines()}
        finished = {phase: self._finished_steps(phase) for phase in phases}
        return all(
            done is not None and done >= steps.get(phase, 0) for phase, done in finished.items()
        )

    def _finished_steps(self, phase: str) -> int | None:
        """The steps of a phase's final model; None where there is none."""
        file = self.path / phase / "final" / STATE_FILE
        if not file.is_file():
            return None
        step = read_json(file, _NO_STATE).get("step")
        if type(step) is not int or not 0 <= step <= MOST_STEPS:
            raise RunFolderError(
                f"{_NO_STATE} (step: {step!r} is no number of steps)",
                where=str(file),
                fix="Restore the file.",
            )
        return step

    def rollout_files(self) -> list[tuple[str, int, Path]]:
        """(phase, step, file) of every step whose rollouts are stored, in order."""
        files = [*(self.path / "rollouts").glob("*")]
        named = [(match, file) for file in files if (match := _ROLLOUTS.fullmatch(file.name))]
        found = [(match[1], int(match[2]), file) for match, file in named]
        return sorted(found, key=lambda one: (PHASES.index(one[0]), one[1]))

    # --- evaluations

    def write_evaluation(self, result: EvaluationResult) -> None:
        """Record an evaluation; one of the same name is replaced."""
        if not _EVALUATION.fullmatch(result.name):
            raise ValueError(f"{result.name!r} cannot be a file name")
        summary, items = self._evaluation_files(result.name)
        # Written as they came, unless the evaluation was made elsewhere.
        if getattr(result.items, "path", None) != items.absolute():
            # Never an old summary beside new items.
            delete(summary)
            write_lines(items, map(row_of, result.items))
        # The summary last: an evaluation without one does not exist.
        content = {**records.evaluation_summary(result), "items_crc32": checksum(items)}
        # Strict readers of JSON know no NaN, as that of an accuracy where nothing was scored.
        finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
        text = json.dumps(finite, indent=2)
        write_atomic(summary, (text + "\n").encode())
        Unfinished(summary.parent, result.name, {}).delete()  # not before: it can be gone on with
        self.measuring.close()

    def name_for(self, name: str, split: str, card: Mapping[str, Any]) -> str:
        """The name itself, or with a number where one of other settings has it.

        Where there is none yet, no other process may measure it until it has been written.

        Args:
            name: wanted for an evaluation.
            split: of the evaluation.
            card: of the evaluation.

        Raises:
            RunFolderError: another process is measuring it.
        """
        for number in itertools.count(1):
            chosen = name if number == 1 else f"{name}-{number}"
            summary, items = self._evaluation_files(chosen)
            unfinished = Unfinished(summary.parent, chosen, card)
            if unfinished.of_others():
                continue
            if summary.exists() and not items.exists():
                log.warning("The items of %s are lost; it is measured again.", summary)
                delete(summary)
            if not summary.exists():
                self.measuring.callback(RunLock(unfinished.folder, "evaluation").release)
                return chosen
            there = read_json(summary, _DAMAGED)
            if _settings(there["split"], there["card"]) == _settings(split, card):
                return chosen
        raise AssertionError

    def read_evaluation(self, name: str) -> EvaluationResult | None:
        """The evaluation of that name, or None where it was not finished.

        Raises:
            LostItemsError: only its summary is left.
            RunFolderError: a file of it is damaged, or of another run or evaluation.
        """
        return self._load_evaluation(name)

    def _load_evaluation(self, name: str) -> EvaluationResult | None:
        """Read an evaluation in this process alone, whoever asks; `read_evaluation` says how."""
        summary, items = self._evaluation_files(name)
        if not summary.exists():
            return None
        try:
            if not items.exists():
                raise LostItemsError(
                    "the items of this evaluation are lost, and nothing can be said of it",
                    where=str(items),
                    fix=f"Restore the file, or delete {summary} and continue the run with "
                    "--resume, which measures it again.",
                )
            stored = StoredItems.read(items)
            found = _read(summary, _DAMAGED, lambda found: records.evaluation_of(found, stored))
            self._require_whole(name, found)
        except RunFolderError:
            if not summary.exists():  # a run that goes on has taken it back meanwhile
                return None
            raise
        return found

    def _require_whole(self, name: str, found: EvaluationResult) -> None:
        """Raise `RunFolderError` if the two files of an evaluation do not belong here together."""
        summary, items = self._evaluation_files(name)
        self._require_own(found.card.get("recipe_hash"), "the evaluation", summary)
        what = None
        if found.name != name:
            what = f"this is the summary of the evaluation {found.name!r}"
        elif read_json(summary, _DAMAGED).get("items_crc32", checksum(items)) != checksum(items):
            what = f"{items.name} is damaged, or holds other items than this summary was made of"
        if what is not None:
            raise RunFolderError(
                what,
                where=str(summary),
                fix="Put back the files that were written here, or delete both.",
            )

    def read_evaluations(self) -> list[EvaluationResult]:
        """All evaluations by phase, step and name; raises as `read_evaluation` does."""
        summaries = (self.path / "evaluations").glob("*.json")
        found = filter(None, [self._load_evaluation(path.stem) for path in summaries])
        return sorted(found, key=lambda r: (PHASES.index(r.phase), r.step, r.name))

    def _evaluation_files(self, name: str) -> tuple[Path, Path]:
        """Summary and items."""
        folder = self.path / "evaluations"
        return folder / f"{name}.json", folder / f"{name}.jsonl.gz"

    # --- the record as a whole

    def truncate_to(self, phase: str, step: int) -> None:
        """Forget everything after a checkpoint, so that resuming equals never having stopped.

        Keeps all of the earlier phases, and of `phase` itself the steps up to `step`.
        """
        here = (PHASES.index(phase), step)

        def later(of_phase: str, of_step: int) -> bool:
            return (PHASES.index(of_phase), of_step) > here

        self._rewrite_metrics(lambda row: not later(row.phase, row.step))
        for file_phase, file_step, file in self.rollout_files():
            if later(file_phase, file_step):
                delete(file)
        for path in sorted((self.path / "evaluations").glob("*.json")):
            content = read_json(path, _DAMAGED)
            if later(content["phase"], content["step"]):
                for file in self._evaluation_files(path.stem):
                    delete(file)

    def losses(self, recipe: Recipe | None = None) -> list[str]:
        """Records of finished phases that are not there, by name.

        Args:
            recipe: of the run; left out: evaluations are not looked for.

        Raises:
            RunFolderError: metrics or a state are damaged.
        """
        done = {phase: self._finished_steps(phase) for phase in PHASES[1:]}
        finished = {phase: step for phase, step in done.items() if step is not None}
        lost = self.holes(finished)
        for phase in PHASES[1:]:
            final = self.path / phase / "final"
            if final.is_dir() and phase not in finished:
                lost.append(f"{STATE_FILE} of {phase}/final")
        for summary in sorted((self.path / "evaluations").glob("*.json")):
            if not self._evaluation_files(summary.stem)[1].exists():
                lost.append(f"the items of the evaluation {summary.stem}")
        if finished and not _is_whole_log(self.path / "training.log"):
            lost.append("training.log, and the warnings that it held")
        if recipe is not None and finished and recipe_hash(recipe) not in self.recipe_hashes():
            lost.append("its own recipe.yaml, in whose place there is another one")
        if recipe is not None and recipe.data.test is not None and finished:
            for name in ("base", *finished):
                if not self._evaluation_files(name)[0].exists():
                    lost.append(f"the evaluation of {name}")
        return lost

    def holes(self, steps: Mapping[str, int]) -> list[str]:
        """What the record should hold and does not: files and lines that were lost, by name.

        Args:
            steps: phase -> the steps that it has done.
        """
        rows: set[tuple[str, int]] = {(row.phase, row.step) for _, row in self._metrics_lines()}
        files = {(phase, step) for phase, step, f in self.rollout_files() if _has_content(f)}
        lost = {"the lines of metrics.jsonl": rows, "the rollouts": files}
        return [
            f"{what} of {phase} step {numbers_in_words(missing)}"
            for what, there in lost.items()
            for phase, last in steps.items()
            if what != "the rollouts" or phase == "grpo"
            if (missing := [n for n in range(1, last + 1) if (phase, n) not in there])
        ]


def _is_whole_log(file: Path) -> bool:
    """Whether a log holds lines of text, the last of them with its end."""
    try:
        content = file.read_bytes()
    except OSError:  # missing, a folder, a link to nothing
        return False
    return content.endswith(b"\n") and b"\0" not in content


def _has_content(file: Path) -> bool:
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
        RunFolderError: it is not one, or (when a table is first looked at) it is damaged.
    """

    def __init__(self, path: Path | str) -> None:
        # Tables are read when they are looked at, from whatever folder the process is in by then.
        self._folder = RunFolder(Path(path).expanduser().absolute())
        self.path = self._folder.path
        self.info = self._folder.read_info().model_dump()
        """The content of `run.json`."""

    @cached_property
    def metrics(self) -> Table:
        """One row per step: `phase`, `step`, `time`, `elapsed_s`, `status`, `events`, metrics."""
        return self._folder.metrics_rows()

    @cached_property
    def rollouts(self) -> Table:
        """One row per rollout, with its reward, and each component as `rewards/<name>`."""
        return [flat(row) for row in self._folder.read_rollouts()]

    @cached_property
    def evaluations(self) -> Table:
        """One row per evaluation: its settings and every number derived from its items."""
        return [flat(evaluation_summary(result)) for result in self._results]

    @cached_property
    def completions(self) -> Table:
        """One row per completion of every evaluation, with the same names as `rollouts`."""
        return [
            flat({"evaluation": result.name, **asdict(item), "outcome": item.outcome})
            for result in self._results
            for item in result.items
        ]

    @cached_property
    def _results(self) -> list[EvaluationResult]:
        return self._folder.read_evaluations()


def load_run(path: Path | str) -> LoadedRun:
    """Read the record of a run; see `LoadedRun`.

    Example: `load_run("outputs/demo").metrics[-1]["solve_rate"]`.
    """
    return LoadedRun(path)
