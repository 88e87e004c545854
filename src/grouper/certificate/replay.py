"""Training the last steps of a run again, from the checkpoint before them.

A run is exactly reproducible from a checkpoint on the machine and with the versions that made it.
So its last steps are trained again in a copy, and what they leave is compared: the weights byte
for byte, and every completion of the rollouts and of the evaluation. A run that has kept no
checkpoint to continue from trains its last phase again from the start.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grouper import api
from grouper.certificate.evidence import RunEvidence
from grouper.config.schema import Recipe
from grouper.errors import GrouperError, Interrupted
from grouper.evaluation.result import EvaluationResult
from grouper.files import checksum, delete, remove_folder
from grouper.models.device import describe_hardware, find_device
from grouper.models.trained import Saved
from grouper.runs.folder import RunFolder
from grouper.runs.progress import Progress
from grouper.runs.records import describe_changes, that_differ
from grouper.training.run import describe_versions
from grouper.training.saved_state import is_resumable, numbered

# Suffix of files that are large and never appended to: linked, not copied.
_LINKED = ".safetensors"
# What a replay neither needs nor changes.
_LEFT_OUT = ("eval_runs", "probes", "trackers", "nan_dump", "report.html", "curves.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The last steps of a run, trained again."""

    first: int
    last: int
    different: tuple[str, ...] = ()
    """Files with other bytes than the run's."""
    reason: str | None = None
    """Why nothing could be trained again."""


def replay(run: RunEvidence, display: Progress) -> Replay:
    """Train the steps after a run's last checkpoint again, in a copy beside it.

    Args:
        run: a finished one.
        display: shows the progress.
    """
    model = run.model
    reason = _obstacle(run)
    if reason is not None or model is None:
        return Replay(first=0, last=0, reason=reason)
    start = _last_start(run, model)
    with tempfile.TemporaryDirectory(dir=run.path.parent, prefix=".replay-") as place:
        copy = Path(place) / run.recipe.name
        _copy(run.path, copy)
        _forget_after(copy, model.phase, start)
        try:
            api.train(_recipe_in(run, place), resume=True, display=display)
        except Interrupted:
            raise
        except GrouperError as error:
            # Other items are not lost with this one.
            return Replay(
                first=0, last=0, reason=f"The last steps cannot be trained: {error.what}."
            )
        different = tuple(_differences(run, copy, model, start))
    return Replay(first=start + 1, last=model.step, different=different)


def _obstacle(run: RunEvidence) -> str | None:
    """Return why a replay here could not give the same; None: it can."""
    if run.model is None:
        return f"{run.path} no longer has the model that was measured."
    if run.recipe.sampling.engine != "native":
        return "The samples are another engine's, which does not draw them again."
    if not [*run.model.folder.glob(f"*{_LINKED}")]:
        return f"The weights are in no file that ends in {_LINKED}."
    hardware = describe_hardware(find_device(run.recipe.device))
    machines = that_differ(run.info.host, {"hardware": hardware, "processes": 1})
    if machines:
        return (
            "The last steps can be trained again only on such a machine as then: "
            f"{describe_changes(machines)}."
        )
    versions = that_differ(run.info.versions, describe_versions(run.recipe))
    if versions:
        return (
            "The last steps can be trained again only with the versions of then: "
            f"{describe_changes(versions)}."
        )
    return None


def _last_start(run: RunEvidence, model: Saved) -> int:
    """Return the step of the last checkpoint before the end; 0: the start of the phase."""
    steps = [
        saved.step
        for saved in run.models
        if saved.phase == model.phase
        and saved.step < model.step
        and not saved.is_final
        and is_resumable(saved.folder)
    ]
    return max(steps, default=0)


def _copy(run: Path, copy: Path) -> None:
    """Copy a run folder; weights, which nothing appends to, are linked where that is possible."""

    def copy_file(source: str, target: str) -> str:
        if source.endswith(_LINKED):
            try:
                os.link(source, target)
            except OSError:
                return str(shutil.copy2(source, target))
            return target
        return str(shutil.copy2(source, target))

    ignored = shutil.ignore_patterns(*_LEFT_OUT, "*.lock")
    shutil.copytree(run, copy, copy_function=copy_file, ignore=ignored)


def _forget_after(copy: Path, phase: str, step: int) -> None:
    """Delete what a run has made after a step of its last phase, so that it is trained again."""
    remove_folder(copy / phase / "final")
    for number, folder in numbered(copy / phase):
        if number > step or not is_resumable(folder):
            remove_folder(folder)
    RunFolder(copy).truncate_to(phase, step)
    delete(copy / "ended.json")


def _recipe_in(run: RunEvidence, place: str) -> Recipe:
    """Return the recipe of a run that trains in a folder of its own, and tells nobody else."""
    recipe = run.recipe
    threads = run.info.host.get("threads")
    return recipe.model_copy(
        update={
            "output_dir": place,
            "save_path": None,
            "push_to": None,
            "hooks": (),
            # With other threads, sums are taken in another order.
            "threads": threads if isinstance(threads, int) else recipe.threads,
            "tracking": recipe.tracking.model_copy(update={"trackers": ()}),
        }
    )


def _differences(run: RunEvidence, copy: Path, model: Saved, start: int) -> Iterator[str]:
    """Yield the files of a run whose content is not that of the replay."""
    for file in sorted(model.folder.glob(f"*{_LINKED}")):
        name = file.relative_to(run.path)
        again = copy / name
        if not again.is_file() or checksum(file) != checksum(again):
            yield name.as_posix()
    replayed = RunFolder(copy)
    for phase, step, file in run.folder.rollout_files():
        if phase != model.phase or step <= start:
            continue
        if _rollouts(run.folder, phase, step) != _rollouts(replayed, phase, step):
            yield file.relative_to(run.path).as_posix()
    assert run.last is not None
    evaluation = replayed.read_evaluation(run.last.name)
    if evaluation is None or _completions(run.last) != _completions(evaluation):
        yield f"evaluations/{run.last.name}.jsonl.gz"


def _rollouts(folder: RunFolder, phase: str, step: int) -> list[tuple[Any, ...]]:
    """Return what the rollouts of a step are, whatever else a version records of them."""
    rows = folder.read_rollouts(phase, step)
    return [(row["problem_id"], row["completion"], row["reward"]) for row in rows]


def _completions(result: EvaluationResult) -> list[tuple[Any, ...]]:
    return [(item.problem_id, item.completion, item.correct) for item in result.items]
