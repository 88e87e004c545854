"""`grouper eval`: measure models on a recipe's problems, and compare them item by item."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper.cli.options import (
    dry_run_option,
    models_not_here,
    open_recipe,
    output_console,
    quiet_option,
    recipe_arguments,
    run_of,
    show_plan,
    warn,
)
from grouper.config.aliases import flag_named
from grouper.config.loading import load_recipe, recipe_hash, resolved_yaml
from grouper.config.schema import Recipe
from grouper.data import ProblemSet
from grouper.errors import ConfigError
from grouper.evaluation.result import EvaluationResult
from grouper.files import write_atomic
from grouper.models.folders import is_model, trained_model
from grouper.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from grouper.tracking.live import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """A model to measure, and where its evaluation goes."""

    model: str
    label: str
    folder: Path


EXAMPLES = """\b
Examples:
  grouper eval outputs/demo                          what this run trained
  grouper eval demo --model ./my-model               any model on the demo's problems
  grouper eval outputs/demo --compare outputs/demo-2
  grouper eval outputs/demo evaluation.samples=8 evaluation.temperature=0.8
"""


# Underscores, and the other names of --model.
SETTINGS = {"token_normalize_func": flag_named}


@click.command("eval", epilog=EXAMPLES, context_settings=SETTINGS)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="PATH",
    help="A model folder, adapter folder or Hub name; several are compared in this order. "
    "Left out: what the recipe's run has trained.",
)
@click.option(
    "--compare",
    "others",
    multiple=True,
    metavar="PATH",
    help="Something to compare with: a model, a run folder, or a folder of eval_runs.",
)
@click.option(
    "--split", type=click.Choice(["test", "validation"]), default="test", show_default=True
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="Where the folder of each evaluation goes.  [default: <output_dir>/<name>/eval_runs]",
)
@dry_run_option
@quiet_option
@recipe_arguments
def eval_command(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    models: tuple[str, ...],
    others: tuple[str, ...],
    split: str,
    output_dir: Path | None,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Measure models on the test problems of RECIPE: accuracy with its interval, the split into
    correct, wrong, no answer and cut off, pass@k, format, reasoning and each reward apart, and all
    of them by subject and level.

    RECIPE is a shipped name, a YAML file, or a run folder. Prompts, sampling and grading are the
    recipe's, as in training.
    """
    opened = open_recipe(recipe, overrides)
    run = run_of(recipe, opened)
    target = (output_dir or _home(opened, run) / "eval_runs").expanduser()
    recorded = [result for path in others for result in _recorded(Path(path), split)]
    measured = [path for path in others if not _has_evaluations(Path(path))]
    subjects = _subjects([*measured, *(models or [trained_model(opened, run)])], target)
    _warn_of_another_prompt(opened, run, using_run=not models)
    problems = _problems(opened, split)
    if dry_run:
        _dry_run(opened, subjects, problems, split)
        return
    fresh = _measure_all(opened, subjects, problems, split, quiet=quiet)
    _show([*recorded, *fresh])
    for subject in subjects:
        click.echo(f"Items of {subject.label}: {subject.folder / 'evaluations'}")


def _home(recipe: Recipe, run: Path) -> Path:
    """Where evaluations lie: never in a folder that was handed over, which a later run replaces."""
    return Path(recipe.output_dir).expanduser() / recipe.name if is_model(run) else run


def _subjects(models: Sequence[str], target: Path) -> list[_Subject]:
    subjects: list[_Subject] = []
    for model in dict.fromkeys(models):
        label = name = _label(model)
        taken = {subject.label for subject in subjects}
        number = 2
        while label in taken:
            label, number = f"{name}-{number}", number + 1
        subjects.append(_Subject(model=model, label=label, folder=target / label))
    return subjects


def _label(model: str) -> str:
    """A file name that tells models apart: `demo-grpo-final`, `Qwen-Qwen3-0.6B`."""
    path = Path(model).expanduser()
    parts = path.resolve().parts if path.exists() else path.parts
    keep = 1
    if path.exists() and len(parts) > 3:
        keep = 3 if parts[-2] in ("sft", "grpo") else 2 if parts[-1] == "base" else 1
    elif not path.exists():
        keep = 2
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts[-keep:]))
    return text.lstrip("._-") or "model"


def _has_evaluations(path: Path) -> bool:
    return (path.expanduser() / "evaluations").is_dir()


def _recorded(path: Path, split: str) -> list[EvaluationResult]:
    """The last evaluation that a run folder or a folder of eval_runs holds."""
    folder = path.expanduser()
    if not _has_evaluations(folder):
        return []
    found = [r for r in RunFolder(folder).read_evaluations() if r.split == split]
    if not found:
        raise ConfigError(
            f"there is no evaluation on {split} problems in it",
            where=f"--compare {path}",
            fix="Measure it first with `grouper eval`, or name its model folder instead.",
        )
    last = found[-1]
    # Several runs all call theirs `grpo`.
    name = (
        last.name if last.name.startswith(folder.name) else f"{folder.resolve().name}-{last.name}"
    )
    return [dataclasses.replace(last, name=name)]


def _warn_of_another_prompt(recipe: Recipe, run: Path, *, using_run: bool) -> None:
    """The run may have been made with overrides that this command line does not repeat."""
    made_with = run / "recipe.yaml"
    if not using_run or not made_with.is_file():
        return
    if load_recipe(made_with).prompt != recipe.prompt:
        warn(
            f"the run in {run} was trained with other `prompt` settings than these; measure it by "
            f"its own recipe with `grouper eval {run}`."
        )


def _problems(recipe: Recipe, split: str) -> ProblemSet:
    from grouper.training.problem_sets import load_part

    problems = load_part(recipe, split)
    if problems is None:
        raise ConfigError(
            f"the recipe has no {split} problems",
            where=f"data.{split}",
            fix="Name some in the recipe, or choose the other --split.",
        )
    return problems


def _dry_run(
    recipe: Recipe, subjects: Sequence[_Subject], problems: ProblemSet, split: str
) -> None:
    from grouper.models.folders import require_model_folder

    sizes = []
    k = recipe.evaluation.samples
    for subject in subjects:
        require_model_folder(subject.model, where="--model")
        sizes.append(
            f"{subject.model}: {len(problems):,} {split} problems x {k} = "
            f"{k * len(problems):,} completions, to {subject.folder}"
        )
    unchecked = [*models_not_here(recipe, *(subject.model for subject in subjects)), "the rewards"]
    show_plan(recipe, sizes, unchecked=unchecked)


def _measure_all(
    recipe: Recipe,
    subjects: Sequence[_Subject],
    problems: ProblemSet,
    split: str,
    *,
    quiet: bool,
) -> list[EvaluationResult]:
    from grouper.models.folders import require_model_folder
    from grouper.tracking.live import Progress, setup_logging

    progress = Progress(quiet=quiet)
    setup_logging(None, console=progress.console)
    for subject in subjects:
        require_model_folder(subject.model, where="--model")
    return [_measure(recipe, subject, problems, split, progress) for subject in subjects]


def _measure(
    recipe: Recipe, subject: _Subject, problems: ProblemSet, split: str, progress: Progress
) -> EvaluationResult:
    from grouper.evaluation.evaluate import evaluate
    from grouper.evaluation.metrics import Behaviour
    from grouper.training.prepare import prepare
    from grouper.training.problem_sets import ProblemSets

    phase, step = _training_of(subject.model)
    with prepare(recipe, ProblemSets(**{split: problems}), model=subject.model) as prepared:
        items = prepared.test if split == "test" else prepared.validation
        total = len(items) * recipe.evaluation.samples
        with progress.track(f"evaluating {subject.label}", total) as task:
            result = evaluate(
                name=subject.label if split == "test" else f"{subject.label}-{split}",
                phase=phase,
                step=step,
                split=split,
                items=items,
                sampler=prepared.sampler(prepared.load(subject.model)),
                grader=prepared.grader,
                params=prepared.evaluation_params(),
                samples=recipe.evaluation.samples,
                seed=recipe.seed,
                progress=task,
                behaviour=Behaviour.where_wanted(recipe, prepared.format, prepared.rewards),
                card={
                    "recipe_hash": recipe_hash(recipe),
                    "model": subject.model,
                    "data": problems.fingerprint,
                },
            )
    write_atomic(subject.folder / "recipe.yaml", resolved_yaml(recipe).encode())
    RunFolder(subject.folder).write_evaluation(result)
    return result


def _training_of(model: str) -> tuple[str, int]:
    """The phase and steps that made a model folder of ours; any other model is a base."""
    file = Path(model).expanduser() / "trainer_state.json"
    if not file.is_file():
        return "base", 0
    state = json.loads(file.read_text(encoding="utf-8"))
    return str(state["phase"]), int(state["step"])


def _show(results: Sequence[EvaluationResult]) -> None:
    from grouper.evaluation.compare import compare, render_parts, render_table
    from grouper.evaluation.metrics import render_metrics, render_rewards_by_subject

    console = output_console()
    settings = [result.card.get("sampling") for result in results]
    if any(setting != settings[0] for setting in settings):
        warn("these models were not measured with the same sampling settings.")
    console.print(render_table(compare(results)))
    for result in results:
        if result.samples > 1:
            shown = ", ".join(f"{k}: {100 * value:.1f}" for k, value in result.pass_at_k.items())
            console.print(f"pass@k % of {result.name}: {shown}", highlight=False)
    tables = [
        render_metrics(results),
        *(render_parts(results, by=by) for by in ("subject", "level")),
        *map(render_rewards_by_subject, results),
    ]
    for table in tables:
        if table is not None:
            console.print()
            console.print(table)
    console.print()
