"""`grouper eval`, `preview` and `data difficulty`: what a model does on a recipe's problems."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from grouper.cli.opening import (
    chosen_model,
    models_not_here,
    open_recipe,
    require_writable,
    run_of,
    show_plan,
)
from grouper.cli.text import show, warn
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import ConfigError
from grouper.evaluation.result import EvaluationResult
from grouper.models.folders import is_model, require_model_folder, trained_model
from grouper.runs.folder import RunFolder
from grouper.runs.samples import in_words, printable

if TYPE_CHECKING:
    from grouper.advice.checks import Finding, Samples
    from grouper.runs.progress import Progress
    from grouper.types import AnswerFormat, Rollout


def progress(*, quiet: bool) -> Progress:
    """Where progress and warnings go."""
    from grouper.runs.progress import Progress, setup_logging

    display = Progress(quiet=quiet)
    setup_logging(None, console=display.console)
    return display


# --- grouper eval --------------------------------------------------------------------------------


def evaluate(
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
    """Measure models, and print them beside what was measured before."""
    opened = open_recipe(recipe, overrides)
    run = run_of(recipe, opened)
    # Never in a folder that was handed over, which a later run replaces.
    home = Path(opened.output_dir).expanduser() / opened.name if is_model(run) else run
    target = (output_dir or home / "eval_runs").expanduser()
    recorded = [result for path in others for result in _recorded(Path(path), split)]
    measured = [path for path in others if not _has_evaluations(Path(path))]
    subjects = _labelled([*measured, *(models or [trained_model(opened, run)])])
    for model in subjects.values():
        require_model_folder(model, where="--model")
    require_writable(target)
    if not models:
        _warn_of_another_prompt(opened, run)

    from grouper.training.problem_sets import require_part

    problems = require_part(opened, split)
    if dry_run:
        k = opened.evaluation.samples
        total = f"{len(problems):,} {split} problems x {k} = {k * len(problems):,} completions"
        sizes = [f"{model}: {total}, to {target / label}" for label, model in subjects.items()]
        missing = models_not_here(opened, *subjects.values())
        show_plan(opened, sizes, unchecked=[*missing, "the rewards"])
        return

    from grouper import api

    display = progress(quiet=quiet)
    fresh = [
        api.evaluate(
            opened,
            model,
            split=split,
            problems=problems,
            folder=target / label,
            display=display,
        )
        for label, model in subjects.items()
    ]
    shown = [dataclasses.replace(r, name=n) for r, n in zip(fresh, subjects, strict=True)]
    _show_results([*recorded, *shown])
    for label, result in zip(subjects, fresh, strict=True):
        click.echo(f"Items of {label}: {target / label / 'evaluations' / result.name}.jsonl.gz")


def _labelled(models: Sequence[str]) -> dict[str, str]:
    """Label -> model; the labels are file names that tell the models apart."""
    subjects: dict[str, str] = {}
    for model in dict.fromkeys(models):
        label = name = _label(model)
        number = 2
        while label in subjects:
            label, number = f"{name}-{number}", number + 1
        subjects[label] = model
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
    """The evaluation of a run's last phase, or the latest one in a folder of eval_runs."""
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
    name = folder.resolve().name
    if (folder / "run.json").exists():  # several runs all call theirs `grpo`
        return [dataclasses.replace(found[-1], name=f"{name}-{found[-1].name}")]
    files = {result.name: folder / "evaluations" / f"{result.name}.json" for result in found}
    latest = max(found, key=lambda result: files[result.name].stat().st_mtime)
    return [dataclasses.replace(latest, name=name)]


def _warn_of_another_prompt(recipe: Recipe, run: Path) -> None:
    """The run may have been made with overrides that this command line does not repeat."""
    made_with = run / "recipe.yaml"
    if made_with.is_file() and load_recipe(made_with).prompt != recipe.prompt:
        warn(
            f"the run in {run} was trained with other `prompt` settings than these; measure it by "
            f"its own recipe with `grouper eval {run}`."
        )


def _show_results(results: Sequence[EvaluationResult]) -> None:
    from grouper.evaluation.compare import (
        compare,
        render_metrics,
        render_parts,
        render_rewards_by_subject,
        render_table,
    )

    settings = [result.card.get("sampling") for result in results]
    if any(setting != settings[0] for setting in settings):
        warn("these models were not measured with the same sampling settings.")
    show(render_table(compare(results)))
    for result in results:
        if result.samples > 1:
            shown = ", ".join(f"{k}: {100 * value:.1f}" for k, value in result.pass_at_k.items())
            show(f"pass@k % of {result.name}: {shown}")
    parts = [render_parts(results, by=by) for by in ("subject", "level")]
    for table in (render_metrics(results), *parts, *map(render_rewards_by_subject, results)):
        if table is not None:
            show("", table)
    show("")


# --- grouper preview -----------------------------------------------------------------------------


def preview(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    samples: int,
    problems: int,
    quiet: bool,
) -> int:
    """Draw and show samples; 1 where they give nothing to learn from."""
    opened = open_recipe(recipe, overrides)
    run = run_of(recipe, opened)
    subject = chosen_model(model, opened, run)
    if subject is None:
        raise ConfigError(
            "there is no model to sample from: the recipe makes a new one, and was not run yet",
            where=str(run),
            fix="Name a model with --model, or run SFT first with `grouper sft`.",
        )

    from grouper import api
    from grouper.advice.checks import find

    display = progress(quiet=quiet)
    seen = api.preview(opened, subject, samples=samples, problems=problems, display=display)
    causes = find(seen)
    click.echo(f"Model:     {subject}")
    _show_samples(seen)
    _summarise(seen, causes)
    return 1 if causes else 0


_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_new_tokens": 0, "stop": (), "include_stop": 1}


def _show_samples(seen: Samples) -> None:
    params = asdict(seen.groups[0].params)
    stop = params.pop("stop")
    shown = [f"{name} {value:g}" for name, value in params.items() if _OFF.get(name) != value]
    shown += [f"stop {', '.join(map(repr, stop))}"] if stop else []
    click.echo(f"Sampling:  {', '.join(shown)}")
    for group in seen.groups:
        click.echo(click.style(f"\nProblem {group.problem.id}", bold=True))
        click.echo(printable(f"{group.problem.question}\nReference: {group.problem.answer}"))
        for number, rollout in enumerate(group.rollouts, start=1):
            click.echo(click.style(f"\n[{number} of {len(group.rollouts)}] ", fg="cyan"), nl=False)
            _show_rollout(rollout, seen.prepared.format)


def _show_rollout(rollout: Rollout, fmt: AnswerFormat) -> None:
    from grouper.advice.checks import tags_in

    completion, grade = rollout.completion, rollout.grade
    found = tags_in(completion.text, fmt)
    missing = [tag for tag, there in found.items() if not there]
    lines = (
        f"reward {in_words(rollout.reward)}",
        f"answer {grade.extracted or 'none'}: {grade.verdict.value} ({grade.reason})",
        f"tags {len(found) - len(missing)} of {len(found)}"
        + (f", missing {', '.join(missing)}" if missing else "")
        + f"; {len(completion.token_ids)} tokens, ended by {completion.finish_reason.value}",
        fmt.prefix + completion.text,
    )
    click.echo(printable("\n".join(lines)))


def _summarise(seen: Samples, causes: Sequence[Finding]) -> None:
    right = sum(rollout.grade.correct for rollout in seen.rollouts)
    click.echo(f"\nRight:     {right} of {len(seen.rollouts)} samples")
    click.echo(
        f"Diversity: {seen.diversity:.2f} (0: all the same, 1: no two the same); tokens drawn with "
        f"a mean probability of {seen.certainty:.3f}"
    )
    click.echo(
        f"Rewards:   mean variance {seen.reward_variance:.4f}; something to learn from on "
        f"{sum(seen.signal)} of {len(seen.groups)} problems"
    )
    for cause in causes:
        click.echo(click.style(f"Cause ({cause.name}): ", fg="red", bold=True) + f"{cause.what}.")
        click.echo(cause.fix)
    if not causes:
        fine = "rewards differ, and tags, stop token and prefix survive the tokenizer."
        click.echo(click.style("Nothing stands in the way: ", fg="green", bold=True) + fine)


# --- grouper data difficulty ---------------------------------------------------------------------


def difficulty(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    samples: int,
    output: Path | None,
    quiet: bool,
) -> None:
    """Measure pass rates, and print how they are distributed."""
    opened = open_recipe(recipe, overrides)
    run = run_of(recipe, opened)
    subject = model or trained_model(opened, run)
    require_model_folder(subject, where="--model")
    path = (output or run / "pass_rates.jsonl").expanduser()
    require_writable(path)

    from grouper import api

    found = api.pass_rates(opened, subject, path, samples=samples, display=progress(quiet=quiet))
    click.echo(_histogram([correct / total for correct, total in found.values()]))
    click.echo(f"\n{len(found):,} problems, {samples} samples each: {path}")


def _histogram(rates: Sequence[float], width: int = 40) -> str:
    """Bars of the problems by pass rate; never and always stand apart."""
    names = ("never solved", "up to 20%", "up to 40%", "up to 60%", "up to 80%", "below 100%")
    counts = dict.fromkeys((*names, "always solved"), 0)
    edges = (0.0, 0.2, 0.4, 0.6, 0.8)
    for rate in rates:
        name = "always solved" if rate == 1 else names[sum(rate > edge for edge in edges)]
        counts[name] += 1
    most = max(*counts.values(), 1)
    return "\n".join(
        f"{name:>13}  {count:>6,}  {'#' * round(width * count / most)}".rstrip()
        for name, count in counts.items()
    )
