"""`grouper eval`, `preview`, `data difficulty`, `plan` and `bench`: models and steps, measured."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.opening import (
    chosen_model,
    models_not_here,
    open_recipe,
    require_writable,
    run_of,
    sampled_by,
    show_plan,
)
from grouper.cli.text import counted, duration, show, table, warn
from grouper.config.loading import load_recipe
from grouper.errors import ConfigError
from grouper.evaluation.result import EvaluationResult
from grouper.models.folders import RECIPE_FILE, is_model, require_model_folder, trained_model
from grouper.runs.folder import RunFolder
from grouper.runs.samples import in_words, printable
from grouper.types import SamplingParams

if TYPE_CHECKING:
    from grouper.advice.checks import Finding, Samples
    from grouper.advice.measuring import Bench
    from grouper.advice.run_plan import PhasePlan, RunPlan
    from grouper.evaluation.compare import Comparison
    from grouper.runs.progress import Progress
    from grouper.types import AnswerFormat, Rollout


def progress(*, quiet: bool) -> Progress:
    """A progress display, which log messages go to as well."""
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
    engine: str | None,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Measure models, and print the results beside earlier ones."""
    opened = open_recipe(recipe, sampled_by(engine, overrides))
    run = run_of(recipe, opened)
    # Never in an exported folder, which a later run replaces.
    home = Path(opened.output_dir).expanduser() / opened.name if is_model(run) else run
    target = (output_dir or home / "eval_runs").expanduser()
    folders = [Path(path).expanduser() for path in others]
    stored = [folder for folder in folders if (folder / "evaluations").is_dir()]
    recorded = [_recorded(folder, split) for folder in stored]
    measured = [str(folder) for folder in folders if folder not in stored]
    subjects = _labelled([*measured, *(models or [trained_model(opened, run)])])
    for model in subjects.values():
        require_model_folder(model, where="--model")
    require_writable(target)
    made_with = run / RECIPE_FILE
    if not models and made_with.is_file() and load_recipe(made_with).prompt != opened.prompt:
        warn(
            f"the run in {run} was trained with other `prompt` settings than these; measure it by "
            f"its own recipe with `grouper eval {run}`."
        )

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
    labelled = [dataclasses.replace(r, name=n) for r, n in zip(fresh, subjects, strict=True)]
    show_results([*recorded, *labelled])
    for label, result in zip(subjects, fresh, strict=True):
        click.echo(f"Items of {label}: {target / label / 'evaluations' / result.name}.jsonl.gz")


def _labelled(models: Iterable[str]) -> dict[str, str]:
    """Label -> model; the labels are file names: `demo-grpo-final`, `Qwen-Qwen3-0.6B`."""
    subjects: dict[str, str] = {}
    for model in dict.fromkeys(models):
        path = Path(model).expanduser()
        parts = path.parts[-2:]
        if path.exists():  # from the run it lies in
            path = path.resolve()
            runs = [folder for folder in path.parents[:2] if (folder / RECIPE_FILE).is_file()]
            parts = path.relative_to([*runs, path][0].parent).parts
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).lstrip("._-") or "model"
        subjects[f"{label}-{len(subjects) + 1}" if label in subjects else label] = model
    return subjects


def _recorded(folder: Path, split: str) -> EvaluationResult:
    """The evaluation of a run's last phase, or the latest one in a folder of eval_runs."""
    found = [r for r in RunFolder(folder).read_evaluations() if r.split == split]
    if not found:
        raise ConfigError(
            f"there is no evaluation on {split} problems in it",
            where=f"--compare {folder}",
            fix="Measure it first with `grouper eval`, or name its model folder instead.",
        )
    name = folder.resolve().name
    if (folder / "run.json").exists():  # several runs all call theirs `grpo`
        return dataclasses.replace(found[-1], name=f"{name}-{found[-1].name}")
    written = {r.name: (folder / f"evaluations/{r.name}.json").stat().st_mtime for r in found}
    return dataclasses.replace(max(found, key=lambda result: written[result.name]), name=name)


def show_results(results: Sequence[EvaluationResult], comparison: Comparison | None = None) -> None:
    """Print results side by side: accuracy and differences, pass@k, rewards, and by part."""
    from grouper.evaluation import compare

    settings = [result.card.get("sampling") for result in results]
    if any(setting != settings[0] for setting in settings):
        warn("these models were not measured with the same sampling settings.")
    show(compare.render_table(comparison or compare.compare(results)))
    for result in results:
        if result.samples > 1:
            shown = ", ".join(f"{k}: {100 * value:.1f}" for k, value in result.pass_at_k.items())
            show(f"pass@k % of {result.name}: {shown}")
    parts = [compare.render_parts(results, by=by) for by in ("subject", "level")]
    rewards = map(compare.render_rewards_by_subject, results)
    for found in (compare.render_metrics(results), *parts, *rewards):
        if found is not None:
            show("", found)
    show("")


# --- grouper preview -----------------------------------------------------------------------------


def preview(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    engine: str | None,
    quiet: bool,
    **drawn: int,
) -> int:
    """Draw and print samples; 1 if there is nothing to learn from them."""
    opened = open_recipe(recipe, sampled_by(engine, overrides))
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

    seen = api.preview(opened, subject, display=progress(quiet=quiet), **drawn)
    causes = find(seen)
    click.echo(f"Model:     {subject}")
    _show_samples(seen)
    _summarise(seen, causes)
    return 1 if causes else 0


def _show_samples(seen: Samples) -> None:
    params, usual = dataclasses.asdict(seen.groups[0].params), dataclasses.asdict(SamplingParams())
    usual = {k: v for k, v in usual.items() if k not in ("temperature", "max_new_tokens")}
    shown = [f"{name} {value}" for name, value in params.items() if usual.get(name) != value]
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
    """Measure pass rates, and print a histogram."""
    opened = open_recipe(recipe, overrides)
    run = run_of(recipe, opened)
    subject = model or trained_model(opened, run)
    require_model_folder(subject, where="--model")
    path = (output or run / "pass_rates.jsonl").expanduser()
    require_writable(path)

    from grouper import api

    found = api.pass_rates(opened, subject, path, samples=samples, display=progress(quiet=quiet))
    solved = Counter(correct for correct, _ in found.values())
    for correct in range(samples + 1):
        bar = "#" * round(40 * solved[correct] / max(solved.values()))
        click.echo(f"solved {correct:>3} of {samples}  {solved[correct]:>6,}  {bar}".rstrip())
    click.echo(f"\n{len(found):,} problems: {path}")


# --- grouper plan --------------------------------------------------------------------------------


def plan(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    device: str | None,
    tokens_per_second: float | None,
    as_json: bool,
) -> None:
    """Print memory, cards and times of a run."""
    # Read by the libraries when they are imported.
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    opened = open_recipe(recipe, overrides, runs_here=False)

    from grouper.advice.run_plan import plan_run

    found = plan_run(opened, device=device, tokens_per_second=tokens_per_second)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _show_plan(found)


def _show_plan(found: RunPlan) -> None:
    size, unit = (2**30, "GiB") if found.peak >= 2**30 else (2**20, "MiB")
    # Columns of zeros are left out.
    names = [field.name for field in dataclasses.fields(found.memory[0]) if field.name != "name"]
    shown = [name for name in names if any(getattr(part, name) for part in found.memory)]
    rows = [
        (part.name, *(f"{getattr(part, name) / size:.2f}" for name in (*shown, "peak")))
        for part in found.memory
    ]
    show(f"{found.parameters:,} parameters, {found.trainable:,} of them trained, on {found.device}")
    show("")
    columns = ("part", *(name.replace("_", " ") for name in shown), "peak")
    table(columns, rows, title=f"{unit} at the worst moment")
    peak = "The peak is the sum of its row; a chunk of logits is a part of the activations."
    if found.device == "cpu":
        peak += " The process may hold up to half as much again: glibc keeps freed memory."
    show(peak, "")
    phases = [f"{phase}.tokens_per_micro_batch" for phase in found.cards[0].tokens_per_micro_batch]
    cards = []
    for card in found.cards:
        settings = (*card.tokens_per_micro_batch.values(), card.max_slots)
        largest = ("none" if value is None else f"{value:,}" for value in settings)
        cards.append((f"{card.gib} GB", "yes" if card.fits else "no", *largest))
    columns = ("card", "fits", *phases, "sampling.max_slots")
    table(columns, cards, title="What fits, and the largest settings that would")
    show("", *map(_phase_line, found.phases), *(f"Note: {note}" for note in found.notes))


def _phase_line(phase: PhasePlan) -> str:
    bound = "at most " if phase.name == "grpo" else ""
    line = f"{phase.name}: {bound}{phase.tokens_per_step:,} tokens a step"
    if phase.steps is not None:
        line = f"{line}, {phase.steps:,} steps, {bound}{phase.tokens:,} tokens"
    if phase.seconds is not None:
        line = f"{line}, about {duration(phase.seconds)}"
    return line


# --- grouper bench -------------------------------------------------------------------------------


def bench(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    model: str | None,
    as_json: bool,
    quiet: bool,
    **measured: Any,
) -> None:
    """Take steps, and print where their seconds went."""
    opened = open_recipe(recipe, overrides)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "bench measures one process",
            where="torchrun",
            fix="Call it without torchrun; a run of several processes has the same figures in "
            "metrics.jsonl, under time.*.",
        )
    subject = chosen_model(model, opened, run_of(recipe, opened))

    from grouper.advice import measuring

    seen = measuring.bench(opened, model=subject, progress=progress(quiet=quiet), **measured)
    if as_json:
        click.echo(json.dumps(seen.as_dict(), indent=2))
    else:
        _show_bench(seen)


def _show_bench(seen: Bench) -> None:
    grpo, tokens = seen.recipe.grpo, seen.spread("completion/tokens")
    length = f" of {tokens['median']:.0f} tokens" if tokens else ""
    forced = "" if seen.completion_tokens is None else " (made so)"
    size, unit = (1e12, "TFLOP/s") if seen.matrix_rate >= 1e12 else (1e9, "GFLOP/s")
    show(
        f"{seen.model}: {seen.parameters:,} parameters on {seen.device}, "
        f"{counted(seen.threads, 'thread')}; "
        f"large {seen.dtype} products run at {seen.matrix_rate / size:.3g} {unit}",
        f"{counted(len(seen.reports), 'step')} after {seen.warmup} to warm up, each "
        f"{counted(grpo.prompts_per_step, 'prompt')} x {grpo.group_size} completions{length}"
        f"{forced}, all of them trained on",
        "",
    )
    _show_times(seen)
    of_what = "in the whole process"
    if seen.memory_bytes is not None:
        of_what = f"of {seen.memory_bytes / 2**30:.0f} GiB on the GPU"
    show(f"Peak memory: {seen.peak_bytes / 2**30:.2f} GiB {of_what}")
    if seen.token_limit is not None:
        show(
            f"Memory ran out: slices have had at most {seen.token_limit:,} tokens since. Set "
            f"grpo.tokens_per_micro_batch={seen.token_limit} to begin there."
        )
    show(
        f"The recipe's {seen.recipe_steps:,} GRPO steps: {duration(3600 * seen.hours)}, "
        "evaluations and checkpoints not counted"
    )


_ROWS = (
    *((f"{part}, s", f"time.{part}", "{:.3f}")
      for part in ("prefill", "decode", "grade", "update", "other", "step")),
    ("sampled tok/s", "time.sampled_tokens_per_second", "{:,.0f}"),
    ("trained tok/s", "time.trained_tokens_per_second", "{:,.0f}"),
    ("MFU of sampling", "time.mfu_sample", "{:.1%}"),
    ("MFU of the update", "time.mfu_update", "{:.1%}"),
    ("MFU of the step", "time.mfu", "{:.1%}"),
)  # fmt: skip


def _show_times(seen: Bench) -> None:
    last = ["no kernels"] if seen.plain_reports else []
    rows = []
    for name, metric, form in _ROWS:
        spread = seen.spread(metric)
        if spread:
            share = f"{seen.share(metric[5:]):.0%}" if name.endswith(", s") else ""
            plain = [form.format(seen.spread(metric, plain=True)["median"]) for _ in last]
            rows.append((name, *map(form.format, spread.values()), share, *plain))
    table(("", "min", "median", "max", "share", *last), rows)
