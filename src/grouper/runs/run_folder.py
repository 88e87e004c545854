"""The run folder: the record of a run, always local, readable without Grouper.

    <output>/<run>/recipe.yaml                     the resolved recipe
                   run.json                        its hash, package versions, data fingerprints,
                                                   and the changes that --allow-changes made
                   metrics.jsonl                   one line a step
                   rollouts/grpo-000001.jsonl.gz   every rollout of a step
                   evaluations/<name>.json         summary; <name>.jsonl.gz beside it: each item
                   training.log  curves.png  times.png
                   base/                           the recipe's new random model, if it has one
                   {sft,grpo}/checkpoint-<step>/   and final/ (written by training, like base/)
                   incident/<phase>-<step>/        why a run stopped by itself
                   eval_runs/<label>/              what `grouper eval` measured afterwards
                   trackers/                       what TensorBoard or W&B write, where asked for

Two equal runs leave equal bytes in everything but `training.log`, `times.png`, `trackers/`, the
`host` part of `run.json` and the metrics `time.*`, `memory.*` and `host.*`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grouper.evaluation.result import EvaluationResult
from grouper.files import (
    delete,
    read_json,
    read_lines,
    refused,
    sweep,
    write_atomic,
    write_lines,
)
from grouper.runs import records
from grouper.runs.evaluation_files import EvaluationFiles
from grouper.runs.identity import (
    Changes,
    content_changes,
    entries_of_change,
    host,
    numbers_in_words,
    only_prolongs,
    recipe_changes,
    refuse_changed_contents,
)
from grouper.runs.metrics_file import MetricsFile
from grouper.runs.refusals import refuse_another_recipe, refuse_the_run, refuse_unless_ours
from grouper.types import RolloutGroup, StepReport

logger = logging.getLogger(__name__)

PHASES = ("base", "sft", "grpo")
"""In the order in which they happen; `base` is the model before training."""

ANSWERS_FILE = "reward_answers.jsonl"
"""What reward functions that vary have answered."""

_OURS = (
    "metrics.jsonl",
    "training.log",
    "curves.png",
    "times.png",
    "recipe.yaml",
    ANSWERS_FILE,
)
OUR_FOLDERS = (
    "rollouts",
    "evaluations",
    "base",
    "sft",
    "grpo",
    "eval_runs",
    "incident",
    "trackers",
)
_ROLLOUTS = re.compile(r"([a-z]+)-(\d+)\.jsonl\.gz")


class RunFolder:
    """Reads and writes one run folder. Only one process of a run may write.

    Example: `RunFolder(Path("outputs/gsm8k")).read_metrics()`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        recipe_yaml: str,
        recipe_hash: str,
        versions: Mapping[str, str],
        fingerprints: Mapping[str, str],
        code: Mapping[str, str] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        allow_changes: bool = False,
        threads: int = 0,
        processes: int = 1,
    ) -> RunFolder:
        """Start a run folder, or open one to continue it.

        Args:
            path: `<output>/<run>`; made if it is missing.
            recipe_yaml: the resolved recipe as text.
            recipe_hash: names the experiment; a folder of another hash is refused.
            versions: package -> version.
            fingerprints: data set -> hash of what was read.
            code: file of the user's own -> hash of its source.
            resume: continue the run that is there (or start, if there is none).
            overwrite: delete the run that is there, whatever its recipe.
            allow_changes: continue it although recipe, data or code changed; `run.json` lists
                what did.
            threads: CPU threads of this process; recorded.
            processes: of the run; recorded.

        Raises:
            RunFolderError: the folder holds another experiment, a run that is neither to be
                continued nor overwritten, or things that are not a run; it cannot be written;
                or the data or the code changed since the run began.
        """
        folder = cls(path)
        found = cls.check(
            path,
            recipe_hash=recipe_hash,
            recipe_yaml=recipe_yaml,
            resume=resume,
            overwrite=overwrite,
            allow_changes=allow_changes,
        )
        folder._prepare(clear=found and overwrite)
        known = folder.read_info() if folder._info.exists() else {}
        contents = {"fingerprints": dict(fingerprints), "code": dict(code or {})}
        changes = folder._changed(known, recipe_hash, recipe_yaml, contents, allow_changes)
        info = {
            "format": 1,
            "recipe_hash": recipe_hash,
            "versions": known.get("versions") or dict(versions),
            **{name: {**known.get(name, {}), **now} for name, now in contents.items()},
            "host": known.get("host") or host(threads, processes),
            "changes": [*known.get("changes", []), *changes],
        }
        folder._begin(info, recipe_yaml, known=bool(known))
        return folder

    def _begin(self, info: Mapping[str, Any], recipe_yaml: str, *, known: bool) -> None:
        """Write both files that make a folder the folder of a run.

        One with a `run.json` is a run folder, so that comes last in a new one. In one that is
        known the new hash goes before the new recipe: after a kill in between, the new recipe can
        go on, and the old one is refused.
        """
        if known:
            self._write_info(info)
        write_atomic(self._recipe, recipe_yaml.encode())
        if not known:
            self._write_info(info)

    def _changed(
        self,
        known: Mapping[str, Any],
        recipe_hash: str,
        recipe_yaml: str,
        contents: Mapping[str, Mapping[str, str]],
        allowed: bool,
    ) -> list[dict[str, Any]]:
        """The entry in `run.json` for changes that the user allowed; none where nothing changed."""
        if not known:
            return []
        changes = content_changes(known, contents)
        if changes and not allowed:
            refuse_changed_contents(changes, self.path)
        if known["recipe_hash"] != recipe_hash:
            changes |= recipe_changes(self._recipe.read_text(encoding="utf-8"), recipe_yaml)
        self._metrics.repair()
        return list(entries_of_change(known["recipe_hash"], recipe_hash, changes))

    @classmethod
    def check(
        cls,
        path: Path | str,
        *,
        recipe_hash: str,
        recipe_yaml: str | None = None,
        resume: bool = False,
        overwrite: bool = False,
        allow_changes: bool = False,
    ) -> bool:
        """Whether `create` would find a run there to continue or delete. Touches nothing.

        With `recipe_yaml`, a refusal names the settings that differ.

        A run that is continued may be given more steps or epochs without `allow_changes`.

        Raises:
            RunFolderError: `create` would refuse the folder, but for changed data or code.
        """
        folder = cls(path)
        content = folder._content()
        if not content:
            return False
        if not folder._info.exists():
            refuse_unless_ours(folder.path, content)
            return False
        if not overwrite:
            there = str(folder.read_info().get("recipe_hash"))
            before, now = (folder._recipe_text, recipe_yaml) if recipe_yaml else ("", "")
            prolonged = resume and only_prolongs(recipe_changes(before, now) if before else {})
            if not allow_changes and not prolonged:
                refuse_another_recipe(folder.path, there, recipe_hash, before=before, now=now)
            if not resume:
                refuse_the_run(folder.path, there)
        return True

    def close(self) -> None:
        """End what goes on beside the folder; the folder itself holds nothing open."""

    def discard(self) -> None:
        """Undo `create` where the folder was new: a run that never began leaves nothing behind.

        Otherwise the next try, with what was wrong put right, would be refused as another recipe.
        """
        self._clear(keep=("eval_runs",))
        with contextlib.suppress(OSError):  # something that is not ours lies there, too
            self.path.rmdir()

    def read_info(self) -> dict[str, Any]:
        """The content of `run.json`.

        Raises:
            RunFolderError: there is none, or it is damaged.
        """
        return read_json(self._info, "this is not a run folder of Grouper")

    def recipe_hashes(self) -> set[str]:
        """Of the recipe, and of what it was before changes that were allowed."""
        info = self.read_info()
        return {info["recipe_hash"], *(change["hash_before"] for change in info.get("changes", []))}

    def record_resolved(self, numbers: Mapping[str, int]) -> None:
        """Record settings that followed from the data: `resolved` of `run.json`."""
        info = self.read_info()
        if info.get("resolved") != dict(numbers):
            self._write_info({**info, "resolved": dict(numbers)})

    def changes_begin_at(self, phase: str, step: int) -> Changes:
        """Record where the changes of this resume take effect; returns them."""
        info = self.read_info()
        latest: Changes = {}
        for change in info.get("changes", []):
            if change["step"] is None:
                change |= {"phase": phase, "step": step}
                latest = change["changes"]
        if latest:
            self._write_info(info)
        return latest

    def append_metrics(self, report: StepReport) -> None:
        """Add one step to `metrics.jsonl`, flushed to the operating system.

        Raises:
            RunFolderError: the disk is full, or the like; no part of the line is left behind.
        """
        self._metrics.append(report)

    def flush_metrics(self) -> None:
        """Wait until every line of `metrics.jsonl` is on disk; raises as `append_metrics` does."""
        self._metrics.flush()

    def holes(self, steps: Mapping[str, int]) -> list[str]:
        """What the record should hold and does not: files and lines that were lost, by name.

        Args:
            steps: phase -> the steps that it has done.
        """
        rows = {(report.phase, report.step) for report in self.read_metrics()}
        files = {
            (phase, step) for phase, step, file in self._rollout_files() if file.stat().st_size
        }
        lost = {"the lines of metrics.jsonl": rows, "the rollouts": files}
        return [
            f"{what} of {phase} step {numbers_in_words(missing)}"
            for what, there in lost.items()
            for phase, last in steps.items()
            if what != "the rollouts" or phase == "grpo"
            if (missing := [n for n in range(1, last + 1) if (phase, n) not in there])
        ]

    def read_metrics(self) -> list[StepReport]:
        """All steps in the order they were written.

        Raises:
            RunFolderError: a line is damaged; a last line without its end is left out instead.
        """
        return self._metrics.read()

    def write_rollouts(
        self,
        phase: str,
        step: int,
        groups: Sequence[RolloutGroup],
        advantages: Sequence[float | None],
        *,
        with_ids: bool = False,
    ) -> None:
        """Record every rollout of a step, one line each.

        Args:
            phase: `grpo`.
            step: as in the step's report: the first step is 1.
            groups: all groups that were sampled, with signal or without.
            advantages: one a rollout, in the order of the groups and of their rollouts; None for
                a rollout that took no part.
            with_ids: also keep prompt ids, sampled ids and their log-probs.
        """
        lines = records.rollouts_to_json(phase, step, groups, advantages, with_ids=with_ids)
        write_lines(self.path / "rollouts" / f"{phase}-{step:06d}.jsonl.gz", lines)

    def read_rollouts(
        self, phase: str | None = None, step: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Rollouts in order of phase, step, group and sample; of one phase or step if given."""
        for file_phase, file_step, file in self._rollout_files():
            if phase in (None, file_phase) and step in (None, file_step):
                yield from read_lines(file)

    def write_evaluation(self, result: EvaluationResult) -> None:
        """Record an evaluation; one of the same name is replaced."""
        self._evaluations.write(result)

    def read_evaluation(self, name: str) -> EvaluationResult | None:
        """The evaluation of that name, or None where it was not finished."""
        return self._evaluations.read(name)

    def read_evaluations(self) -> list[EvaluationResult]:
        """All evaluations by phase, step and name."""
        found = self._evaluations.read_all()
        return sorted(found, key=lambda r: (PHASES.index(r.phase), r.step, r.name))

    def truncate_to(self, phase: str, step: int) -> None:
        """Forget everything after a checkpoint, so that resuming equals never having stopped.

        Keeps all of the earlier phases, and of `phase` itself the steps up to `step`.
        """
        here = (PHASES.index(phase), step)

        def later(of_phase: str, of_step: int) -> bool:
            return (PHASES.index(of_phase), of_step) > here

        self._metrics.keep(lambda report: not later(report.phase, report.step))
        for file_phase, file_step, file in list(self._rollout_files()):
            if later(file_phase, file_step):
                delete(file)
        self._evaluations.forget(later)

    @property
    def _info(self) -> Path:
        return self.path / "run.json"

    @property
    def _metrics(self) -> MetricsFile:
        return MetricsFile(self.path / "metrics.jsonl")

    @property
    def _evaluations(self) -> EvaluationFiles:
        return EvaluationFiles(self.path / "evaluations")

    @property
    def _recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def _recipe_text(self) -> str:
        return self._recipe.read_text(encoding="utf-8") if self._recipe.exists() else ""

    def _write_info(self, info: Mapping[str, Any]) -> None:
        write_atomic(self._info, (json.dumps(info, indent=2) + "\n").encode())

    def _prepare(self, *, clear: bool) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            sweep(self.path)
        except OSError as error:
            refused(error, self.path)
        if clear:
            self._clear()

    def _content(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            refused(error, self.path)

    def _clear(self, *, keep: Sequence[str] = ()) -> None:
        try:
            for name in OUR_FOLDERS:
                if name not in keep and (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            for name in _OURS:
                (self.path / name).unlink(missing_ok=True)
            # Last: a clearing that was interrupted can be done again.
            self._info.unlink()
        except OSError as error:
            refused(error, self.path)

    def _rollout_files(self) -> Iterator[tuple[str, int, Path]]:
        found = []
        for file in (self.path / "rollouts").glob("*.jsonl.gz"):
            match = _ROLLOUTS.fullmatch(file.name)
            if match and match[1] in PHASES:
                found.append((PHASES.index(match[1]), int(match[2]), file))
        for phase, step, file in sorted(found):
            yield PHASES[phase], step, file
