"""What a certificate is made of: the records of one or several runs, and of control runs.

Everything is read from run folders. A record that is damaged does not stop a certificate; it is
kept as `damage`, and the item `records` names it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from grouper.config.loading import load_recipe, resolved_yaml
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, DataError, GrouperError, RunFolderError
from grouper.evaluation.compare import Comparison, Difference, compare_arms
from grouper.evaluation.result import EvaluationResult
from grouper.models.folders import RECIPE_FILE, identity_of
from grouper.models.trained import Saved, saved_models
from grouper.runs.folder import PHASES, PLANNED_SEEDS, RunFolder
from grouper.runs.lock import is_running
from grouper.runs.probes import RecordedProbe, read_probes
from grouper.runs.records import Changes, RunInfo, recipe_changes
from grouper.runs.twin_results import RecordedTwins, pair_twins
from grouper.training.problem_sets import ProblemSets, load_problem_sets

# The problems that a certificate is about.
SPLIT = "test"
# Settings that may differ between two seeds of one recipe.
_OF_A_SEED = {"name", "seed"}
# Settings that may differ between a run and its control.
_OF_A_CONTROL = {*_OF_A_SEED, "grpo.start_from", "grpo.shuffle_rewards"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """The record of one run."""

    path: Path
    recipe: Recipe
    info: RunInfo
    results: tuple[EvaluationResult, ...]
    """Its evaluations on test problems, by phase and step."""
    base_otherwise: tuple[EvaluationResult, ...]
    """The model before training on test problems, as `grouper eval` has measured it afterwards."""
    models: tuple[Saved, ...]
    """The models that it has saved."""
    probes: tuple[RecordedProbe, ...]
    twins: tuple[RecordedTwins, ...]
    damage: tuple[str, ...] = ()
    """Records that could not be read, each with its file."""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def base(self) -> EvaluationResult | None:
        """The model before training; None where it was not measured."""
        return next((result for result in self.results if result.phase == PHASES[0]), None)

    @property
    def last(self) -> EvaluationResult | None:
        """The model of the last phase; None where no trained model was measured."""
        trained = [result for result in self.results if result.phase != PHASES[0]]
        return trained[-1] if trained else None

    @property
    def before_grpo(self) -> EvaluationResult | None:
        """The model that GRPO began with; None where it was not measured."""
        earlier = [result for result in self.results if result.phase != PHASES[-1]]
        return earlier[-1] if earlier else None

    @property
    def is_finished(self) -> bool:
        """Whether the model of its last phase was measured."""
        return self.last is not None and self.recipe.phases[-1:] == (self.last.phase,)

    def steps_taken(self, phase: str) -> int | None:
        """Return the last step of a phase that the metrics record; None: they record none."""
        steps = [row.step for row in self.folder.read_metrics_rows() if row.phase == phase]
        return max(steps, default=None)

    def rollout_groups(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rollouts of each group of GRPO, in the order of steps and groups."""
        rows = self.folder.read_rollouts(PHASES[-1])
        for _, group in itertools.groupby(rows, key=itemgetter("step", "group")):
            yield list(group)

    def planned_steps(self, phase: str) -> int | None:
        """Return the steps that the recipe names for a phase; None: it names epochs."""
        return (self.recipe.sft if phase == "sft" else self.recipe.grpo).steps

    @property
    def model(self) -> Saved | None:
        """The saved model that `last` has measured; None where it is no longer there."""
        last = self.last
        if last is None:
            return None
        for saved in self.models:
            if (saved.phase, saved.step) == (last.phase, last.step) and saved.is_final:
                return saved
        return None

    @property
    def base_model(self) -> str:
        """The folder or Hub name of the model before training."""
        return self.recipe.model.path or str(self.path / PHASES[0])

    @property
    def base_hash(self) -> str | None:
        """The identity of its weights; None where it is not on this machine."""
        return _identity(self.base_model, self.recipe.model.revision)

    @property
    def model_hash(self) -> str | None:
        """The identity of the weights of that model; None where it, or its base, is not here."""
        return None if self.model is None else _identity(str(self.model.folder))


def _identity(model: str, revision: str | None = None) -> str | None:
    try:
        return identity_of(model, revision)
    except GrouperError:
        # The base of an adapter is not on this machine.
        return None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The records that a certificate judges."""

    runs: tuple[RunEvidence, ...]
    """Seeds of one recipe."""
    controls: tuple[RunEvidence, ...] = ()
    """Runs of the same recipe with shuffled rewards."""
    left_out: tuple[Path, ...] = ()
    """Finished runs of the same recipe with other seeds that lie beside these, unnamed."""
    _sets: dict[Path, ProblemSets | str] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether the model before training and the last one were measured in every run."""
        return all(run.base is not None and run.last is not None for run in self.runs)

    @property
    def with_controls(self) -> tuple[RunEvidence, ...]:
        """The runs and their controls."""
        return (*self.runs, *self.controls)

    @property
    def planned_seeds(self) -> int | None:
        """Seeds that there might have been, where results decided after each about another."""
        planned = [run.info.host.get(PLANNED_SEEDS) for run in self.runs]
        numbers = [number for number in planned if isinstance(number, int)]
        if not numbers:
            return None
        return max(*numbers, len(self.runs))

    def problem_sets(self, run: RunEvidence) -> ProblemSets | str:
        """Read the data of a run; return why not, where it is not here or has changed since."""
        if run.path not in self._sets:
            self._sets[run.path] = _problem_sets(run)
        return self._sets[run.path]

    @cached_property
    def comparison(self) -> Comparison | None:
        """The base against the last model, over all seeds; None where one was not measured."""
        if not self.measured:
            return None
        bases = [run.base for run in self.runs if run.base is not None]
        lasts = [run.last for run in self.runs if run.last is not None]
        arms = {bases[0].phase: bases, lasts[0].phase: lasts}
        return compare_arms(arms, most_seeds=self.planned_seeds)

    @property
    def gain(self) -> Difference | None:
        """From the base to the last model."""
        return None if self.comparison is None else self.comparison.last_stage


def gather(runs: Sequence[Path], controls: Sequence[Path] = ()) -> Evidence:
    """Read the records of runs and of control runs.

    Raises:
        ConfigError: a folder is named twice, a run is in progress, or the runs are not seeds of one
            recipe.
        RunFolderError: a folder is no run.
    """
    every = [*runs, *controls]
    if len({path.resolve() for path in every}) < len(every):
        raise ConfigError(
            "the same run is named twice",
            where=", ".join(map(str, every)),
            fix="Name every run once; a control is a run of its own.",
        )
    for path in every:
        if is_running(path):
            raise ConfigError(
                "this run is still in progress",
                where=str(path),
                fix="Wait for its end; `grouper compare` shows what there is so far.",
            )
    read_runs = tuple(_read(path) for path in runs)
    read_controls = tuple(_read(path) for path in controls)
    first = read_runs[0]
    for run in read_runs:
        _require_same_recipe(first, run, _OF_A_SEED, "they are not seeds of one recipe")
        if run.recipe.grpo.shuffle_rewards:
            raise ConfigError(
                "this is a control run, with shuffled rewards",
                where=str(run.path),
                fix=f"Name it with --control {run.path}.",
            )
    seeds = [run.recipe.seed for run in read_runs]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"two of these runs have the same seed: {', '.join(map(str, seeds))}",
            where=", ".join(map(str, runs)),
            fix="Name one run of each seed: a copy is no second seed.",
        )
    for control in read_controls:
        _require_same_recipe(first, control, _OF_A_CONTROL, "it is no control of this recipe")
        if not control.recipe.grpo.shuffle_rewards:
            raise ConfigError(
                "the rewards of this run were not shuffled",
                where=f"--control {control.path}",
                fix="A control has grpo.shuffle_rewards=true, and is otherwise the same.",
            )
    left_out = tuple(_other_seeds(read_runs))
    return Evidence(runs=read_runs, controls=read_controls, left_out=left_out)


def _read(path: Path) -> RunEvidence:
    folder = RunFolder(path)
    info = folder.read_info()
    recipe = load_recipe(path / RECIPE_FILE)
    damage: list[str] = []
    results: list[EvaluationResult] = []
    base_otherwise: list[EvaluationResult] = []
    twins: list[RecordedTwins] = []
    models: list[Saved] = []
    probes: list[RecordedProbe] = []
    with _noted(damage):
        results += _on_test(folder)
    with _noted(damage):
        models += saved_models(path)
    with _noted(damage):
        probes += read_probes(path)
    for later_folder in sorted((path / "eval_runs").glob("*")):
        with _noted(damage):
            later = RunFolder(later_folder).read_evaluations()
            base_otherwise += [
                result for result in later if result.phase == PHASES[0] and result.split == SPLIT
            ]
            twins += pair_twins(later_folder.name, later)
    return RunEvidence(
        path=path,
        recipe=recipe,
        info=info,
        results=tuple(results),
        base_otherwise=tuple(base_otherwise),
        models=tuple(models),
        probes=tuple(probes),
        twins=tuple(twins),
        damage=tuple(damage),
    )


@contextmanager
def _noted(damage: list[str]) -> Iterator[None]:
    """Add what cannot be read to the damage of a run, and go on."""
    try:
        yield
    except (DataError, RunFolderError) as error:
        damage.append(error.paragraph())


def _on_test(folder: RunFolder) -> list[EvaluationResult]:
    """Read a run's own evaluations on test problems, by phase and step."""
    return [result for result in folder.read_evaluations() if result.split == SPLIT]


def _require_same_recipe(
    first: RunEvidence, other: RunEvidence, allowed: Iterable[str], problem: str
) -> None:
    changes = _changes(first.recipe, other.recipe)
    started_from_sft = other.recipe.grpo.start_from is not None
    if first.recipe.phases != other.recipe.phases and not started_from_sft:
        phases = [first.recipe.phases, other.recipe.phases]
        changes["phases"] = [" and ".join(names) or "none" for names in phases]
    different = [key for key in changes if key not in allowed]
    if different:
        key = different[0]
        old, new = changes[key]
        raise ConfigError(
            f"{problem}: {key} is {old} in {first.path} and {new} in {other.path}",
            where=str(other.path),
            fix="Certify runs of one recipe; `grouper compare` compares those of several.",
        )


def _changes(first: Recipe, other: Recipe) -> Changes:
    """Return the settings that differ; one that an older file does not have is as by default."""
    return recipe_changes(resolved_yaml(first), resolved_yaml(other))


def _other_seeds(runs: Sequence[RunEvidence]) -> Iterator[Path]:
    """Yield the finished runs of other seeds of the recipe that lie beside one of these."""
    first = runs[0]
    named_seeds = {run.recipe.seed for run in runs}
    places = dict.fromkeys(run.path.resolve().parent for run in runs)
    for place in places:
        for info_file in sorted(place.glob("*/run.json")):
            path = info_file.parent
            try:
                recipe = load_recipe(path / RECIPE_FILE)
                if recipe.seed in named_seeds or recipe.phases != first.recipe.phases:
                    continue
                if _changes(first.recipe, recipe).keys() - _OF_A_SEED:
                    continue
                phases = [result.phase for result in _on_test(RunFolder(path))]
                if set(recipe.phases[-1:]) <= set(phases) and not is_running(path):
                    yield path
            except (GrouperError, OSError):
                # What cannot be read is no seed of this recipe that anyone could choose.
                continue


def _problem_sets(run: RunEvidence) -> ProblemSets | str:
    try:
        sets = load_problem_sets(run.recipe)
    except GrouperError as error:
        return f"the data of {run.path.name} cannot be read here ({error.what})"
    for name, fingerprint in run.info.fingerprints.items():
        if name in sets.fingerprints and sets.fingerprints[name] != fingerprint:
            return f"data.{name} of {run.path.name} is no longer what the run has read"
    return sets


# --- digests -------------------------------------------------------------------------------------


def digests(run: RunEvidence) -> dict[str, str]:
    """Return relative path -> SHA-256 of every file that a certificate depends on.

    They are the recipe, the record of the steps, the rollouts, the evaluations, the probes, and
    the model that was measured.
    """
    root = run.path
    files = [root / name for name in ("recipe.yaml", "run.json", "metrics.jsonl")]
    for pattern in (
        "rollouts/*.jsonl.gz",
        "evaluations/*",
        "eval_runs/*/evaluations/*",
        "probes/*.json",
    ):
        files += sorted(root.glob(pattern))
    if run.model is not None:
        files += sorted(path for path in run.model.folder.rglob("*") if path.is_file())
    digest_of = {}
    for file in files:
        if file.is_file():
            digest_of[file.relative_to(root).as_posix()] = _sha256(file)
    return digest_of


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
