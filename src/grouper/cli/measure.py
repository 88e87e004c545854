"""`grouper eval`, `compare`, `preview`, `plan`, `bench` and `data difficulty`: measurements."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper import files
from grouper.cli.recipe_args import (
    chosen_model,
    models_not_here,
    open_recipe,
    run_of,
    sampled_by,
    show_plan,
)
from grouper.cli.text import (
    is_follower,
    short,
    show,
    show_blocks,
    show_json,
    table,
    warn,
    warn_of_losses,
)
from grouper.config.loading import load_recipe
from grouper.errors import ConfigError, duration, plural
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.models.folders import (
    RECIPE_FILE,
    is_model,
    on_this_machine,
    recipe_for,
    require_model_folder,
)
from grouper.models.folders import run_of as run_of_model
from grouper.models.trained import trained_model
from grouper.runs.folder import PHASES, RunFolder
from grouper.runs.lock import is_running
from grouper.runs.samples import describe_reward, printable
from grouper.types import SamplingParams

if TYPE_CHECKING:
    from grouper.advice.bench import Bench
    from grouper.advice.checks import Finding, Samples
    from grouper.advice.plan import PhasePlan, RunPlan
    from grouper.config.schema import Recipe
    from grouper.data import ProblemSet
    from grouper.evaluation.compare import Comparison
    from grouper.evaluation.suites import Suite
    from grouper.runs.progress import Progress
    from grouper.tables import Table
    from grouper.types import AnswerFormat, Rollout


def progress(*, quiet: bool = False, **settings: Any) -> Progress:
    """A progress display, which log messages go to as well; of several processes rank 0 has one.

    Args:
        quiet: show results and warnings alone.
        settings: others of `Progress`.
    """
    from grouper.runs.progress import Progress, setup_logging

    display = Progress(quiet=quiet or is_follower(), **settings)
    setup_logging(None, console=None if is_follower() else display.console)
    return display


# --- grouper eval --------------------------------------------------------------------------------


def evaluate(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    models: tuple[str, ...],
    checkpoint: str | None,
    on: str | None,
    prompts: tuple[str, ...],
    split: str,
    limit: int | None,
    with_base: bool | None,
    output_dir: Path | None,
    engine: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    **sampling: Any,
) -> None:
    """Measure models, and print the results side by side."""
    sampling = {name: value for name, value in sampling.items() if value is not None}
    settings = [] if seed is None else [f"seed={seed}"]
    if on is None:
        # A suite has its own problems and sampling.
        settings += _as_overrides(split, limit, prompts, sampling)
    opened, run, model = _asked(
        recipe, sampled_by(engine, (*overrides, *settings)), may_be_model=on is not None
    )
    # Never in an exported folder, which a later run replaces.
    home = opened.run_folder if is_model(run) else run
    target = (output_dir or home / "eval_runs").expanduser()
    named_models = models or ((model,) if model else ())
    measured_models = list(_models_to_measure(opened, run, named_models, checkpoint))
    is_base_implied = with_base is None and not models
    base = None
    if with_base or is_base_implied:
        base = _base(opened, run, fetch=bool(with_base))
        measured_models = [*filter(None, [base]), *measured_models]
    subjects = _labelled(measured_models)
    for subject in subjects.values():
        require_model_folder(subject, where="--model")
    files.require_writable(target)
    if not (models or prompts):
        _warn_of_other_prompt(run, opened)
    plans = [_Measurement(opened, split, None, None)]
    if on is not None:
        limits = {"limit": limit, "tokens": sampling.pop("max_new_tokens", None)}
        suites = [name.strip() for name in on.split(",")]
        bare = not (run / RECIPE_FILE).is_file()
        plans = _on_suites(opened, suites, prompts, subjects, bare=bare, **limits, **sampling)
    to_do = _pairs(subjects, plans, base)
    if dry_run:
        _show_sizes(to_do, target)
        return
    display = progress(quiet=quiet)
    with display.within("eval"):
        comparisons = _measured(to_do, target, display)
    if as_json:
        _show_numbers(comparisons)
        return
    for name, comparison in comparisons.items():
        if on is not None:
            click.echo(click.style(f"\n{name}", bold=True))
        show_results(comparison)
    show(*(f"Items: {target / label / 'evaluations'}" for label in subjects))


def _show_numbers(comparisons: Mapping[str, Comparison]) -> None:
    """Print comparisons as JSON."""
    rows = []
    for name, comparison in comparisons.items():
        rows.append({"problems": name, **comparison.numbers})
    show_json({"evaluations": rows})


def _as_overrides(
    split: str, limit: int | None, prompts: Sequence[str], sampling: Mapping[str, Any]
) -> list[str]:
    """Return the flags about problems, prompt and sampling as overrides of the recipe."""
    if len(prompts) > 1:
        raise click.UsageError("several prompts are tried on suites: add --on.")
    overrides = [f"evaluation.{name}={value}" for name, value in sampling.items()]
    if limit is not None:
        overrides.append(f"data.{split}.limit={limit}")
    overrides += [f"prompt.format={name}" for name in prompts]
    return overrides


def _warn_of_other_prompt(run: Path, recipe: Recipe) -> None:
    """Warn if a run was trained with another prompt than that of a recipe."""
    path = run / RECIPE_FILE
    if path.is_file() and load_recipe(path).prompt != recipe.prompt:
        warn(
            f"the run in {run} was trained with other `prompt` settings than these; measure it by "
            f"its own recipe with `grouper eval {run}`."
        )


def _models_to_measure(
    recipe: Recipe, run: Path, named: Sequence[str], checkpoint: str | None
) -> Sequence[str]:
    """Return the named models, else the one that the run has trained."""
    if named and checkpoint is not None:
        raise click.UsageError("--checkpoint is one of a run, and a model is named: give one.")
    return named or [trained_model(recipe, run, checkpoint=checkpoint, say=warn)]


def _measured(
    to_do: Sequence[tuple[str, str, _Measurement]], target: Path, display: Progress
) -> dict[str, Comparison]:
    """Measure models, and compare them: one comparison per set of problems."""
    from grouper import api
    from grouper.evaluation.compare import compare

    results: dict[str, list[EvaluationResult]] = {}
    for label, model, plan in to_do:
        result = api.evaluate(
            plan.recipe,
            model,
            split=plan.name if plan.suite is None else "test",
            problems=plan.problems,
            suite=plan.suite,
            folder=target / label,
            display=display,
        )
        name = f"{label} {plan.prompt}" if plan.prompt else label
        results.setdefault(plan.name, []).append(dataclasses.replace(result, name=name))
    return {name: compare(set_results) for name, set_results in results.items()}


@dataclasses.dataclass(frozen=True)
class _Measurement:
    """One set of problems, asked in one way."""

    recipe: Recipe
    name: str
    suite: Suite | None
    prompt: str | None
    """The format, where there are several; None: the recipe's own, or the only one."""
    only_base: bool = False

    @functools.cached_property
    def problems(self) -> ProblemSet:
        """Loaded once for all models."""
        from grouper.training.problem_sets import require_part

        return require_part(self.recipe, self.name if self.suite is None else "test")


def _asked(
    name: str, overrides: tuple[str, ...], *, may_be_model: bool
) -> tuple[Recipe, Path, str | None]:
    """Return the recipe, its run folder, and the model where the first argument is one."""
    folder = Path(name).expanduser()
    hub = name.count("/") == 1 and not folder.exists() and not Path(name).suffix
    bare = hub or (is_model(folder) and not (folder / RECIPE_FILE).is_file())
    if bare and not may_be_model and not hub:
        raise ConfigError(
            f"{name} is a model, and says nothing of the problems it is to be measured on",
            where="RECIPE",
            fix=f"Add --on SUITE (gsm8k, math500, a file), or name a recipe: grouper eval RECIPE "
            f"--model {name}",
        )
    if not (may_be_model and bare):
        opened = open_recipe(name, overrides)
        return opened, run_of(name, opened), None
    if run := run_of_model(name):
        return open_recipe(str(run), overrides), run, name
    opened = recipe_for(name, None, "boxed").override(*overrides)
    return opened, Path(opened.output_dir).expanduser() / next(iter(_labelled([name]))), name


def _base(recipe: Recipe, run: Path, *, fetch: bool) -> str | None:
    """Return the model before the training of a run; None where there is no run or no such model.

    A model that is not on this machine is returned only if it may be fetched.
    """
    if is_model(run) or not (run / "run.json").is_file():
        return None
    base = str(run / "base") if (run / "base").is_dir() else recipe.model.path
    if fetch or base is None or on_this_machine(base, recipe.model.revision):
        return base
    warn(f"the model before training, {base}, is not on this machine; --with-base fetches it.")
    return None


def _on_suites(
    recipe: Recipe,
    suites: Sequence[str],
    prompts: Sequence[str],
    subjects: Mapping[str, str],
    *,
    bare: bool,
    limit: int | None,
    tokens: int | None,
    **sampling: Any,
) -> list[_Measurement]:
    """Plan each suite in each prompt: the named ones, the recipe's own, or that of a bare model.

    The base model of a run is evaluated with the suite's few-shot prompt, too, because it has not
    seen the run's format.
    """
    from grouper.evaluation.suites import recipe_on, suite_named
    from grouper.models.loading import context_length, load_tokenizer, shape_of

    lengths = [context_length(shape_of(model, None)) for model in subjects.values()]
    room = min((length // 2 for length in lengths if length is not None), default=None)
    plans = []
    for text in suites:
        suite = suite_named(text)
        if limit is not None:
            data = suite.data.model_copy(update={"limit": limit})
            suite = dataclasses.replace(suite, data=data)
        longest = tokens or min(suite.tokens, room or suite.tokens)
        if longest < suite.tokens and tokens is None:
            warn(f"{suite.name}: completions end at {longest} tokens, half of the model's context.")
        ways: list[tuple[str | None, bool]] = [(name, False) for name in prompts]
        if not ways and bare:
            have_chat = all(load_tokenizer(model).chat_template for model in subjects.values())
            prompt_of_models = suite.prompts[0] if have_chat else suite.prompts[-1]
            ways = [(prompt_of_models, False)]
        elif not ways:
            ways = [(None, False), (suite.prompts[-1], True)]
        for prompt, only_base in ways:
            changed = recipe_on(recipe, suite, prompt=prompt, tokens=longest, **sampling)
            prompt_name = prompt if len(ways) > 1 else None
            plans.append(_Measurement(changed, suite.name, suite, prompt_name, only_base))
    return plans


def _pairs(
    subjects: Mapping[str, str], plans: Sequence[_Measurement], base: str | None
) -> list[tuple[str, str, _Measurement]]:
    """Return (label, model, plan) of every measurement; some plans are for the base alone."""
    pairs = []
    for label, model in subjects.items():
        model_plans = [plan for plan in plans if model == base or not plan.only_base]
        pairs += [(label, model, plan) for plan in model_plans]
    return pairs


def _show_sizes(to_do: Sequence[tuple[str, str, _Measurement]], target: Path) -> None:
    sizes = []
    for label, model, plan in to_do:
        samples = plan.recipe.evaluation.samples
        count = len(plan.problems)
        problems = plural(count, f"{plan.name} problem")
        prompt = f" in {plan.prompt}" if plan.prompt else ""
        size = f"{problems} x {samples} = {samples * count:,} completions"
        sizes.append(f"{model}: {size}{prompt}, to {target / label}")
    recipe = to_do[0][-1].recipe
    missing = models_not_here(recipe, *dict.fromkeys(model for _, model, _ in to_do))
    show_plan(recipe, sizes, unchecked=[*missing, "the rewards"])


def _labelled(models: Iterable[str]) -> dict[str, str]:
    """Label models by file names: `demo-grpo-final`, `Qwen-Qwen3-0.6B`."""
    subjects: dict[str, str] = {}
    for model in dict.fromkeys(models):
        path = Path(model).expanduser()
        names = path.parts[-2:]
        if path.exists():
            # The label begins with the name of the model's run.
            path = path.resolve()
            run = run_of_model(model) or path
            names = path.relative_to(run.parent).parts
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(names)).lstrip("._-") or "model"
        if label in subjects:
            label = f"{label}-{len(subjects) + 1}"
        subjects[label] = model
    return subjects


def _recorded(place: Path, split: str) -> EvaluationResult:
    """Read a recorded evaluation: that of a run's last phase, or the latest in another folder.

    Args:
        place: a run folder, a folder of eval_runs, or the summary of one evaluation.
        split: `test`, `validation`, or the name of a suite.
    """
    if _is_summary(place):
        summary = RunFolder(place.parent.parent).read_evaluation(place.stem)
        if summary:
            return summary
    is_run = (place / "run.json").exists()
    later = sorted((place / "eval_runs").glob("*")) if is_run else []
    pairs: list[tuple[Path, EvaluationResult]] = []
    for folder in (place, *later):
        results = RunFolder(folder).read_evaluations()
        pairs += [(folder, result) for result in results if result.split == split]
    if not pairs:
        raise ConfigError(
            f"there is no evaluation on {split} problems in it",
            where=str(place),
            fix="Measure it first with `grouper eval`, or name its model folder instead.",
        )

    def age(pair: tuple[Path, EvaluationResult]) -> tuple[float, ...]:
        folder, result = pair
        time = (folder / "evaluations" / f"{result.name}.json").stat().st_mtime
        return (PHASES.index(result.phase), result.step, time) if is_run else (time,)

    pairs_of_run = [pair for pair in pairs if pair[0] == place]
    _, result = max(pairs_of_run or pairs, key=age)
    return result


def _is_summary(place: Path) -> bool:
    return place.suffix == ".json" and place.absolute().parent.name == "evaluations"


def show_results(comparison: Comparison, *, parts: bool = True) -> None:
    """Print results side by side: accuracy, differences and rewards; if `parts`, also lenient
    verdicts, pass@k, and everything by subject, level and length.
    """
    from grouper.evaluation import result_tables

    results = comparison.results
    settings = [result.card.get("sampling") for result in results]
    if any(setting != settings[0] for setting in settings):
        warn("these models were not measured with the same sampling settings.")
    show_blocks(result_tables.comparison_blocks(comparison))
    tables: list[Table] = []
    if parts:
        tables.append(result_tables.answers_table(results))
    metrics = result_tables.metrics_table(results)
    if metrics is not None:
        tables.append(metrics)
    if parts:
        for _, tables_of_criterion in result_tables.part_tables(results):
            tables += tables_of_criterion
    for table_of_results in tables:
        show("", table_of_results)
    show("")


# --- grouper compare -----------------------------------------------------------------------------


def compare(arms: tuple[str, ...], *, on: str, items: int, as_json: bool) -> None:
    """Compare recorded evaluations; runs with commas between them are seeds of one arm."""
    places = []
    for arm in arms:
        names = [name for name in arm.split(",") if name]
        places.append([Path(name).expanduser() for name in names])
    every = [place for arm_places in places for place in arm_places]
    for place in every:
        _look_at(place)
    if not all(places):
        raise click.UsageError("there is nothing beside a comma.")
    if len({place.resolve() for place in every}) < len(every):
        raise click.UsageError("the same run cannot be two seeds of one arm, nor two arms.")
    if len(places) == 1 and len(places[0]) == 1 and not (places[0][0] / "run.json").exists():
        raise click.UsageError("name at least two things to compare, or one run.")
    if len(places) == 1:
        comparison = stages(places[0], on=on)
    else:
        recorded = {place: _recorded(place, on) for place in every}
        phases = {run: recorded[run].phase for run in every if (run / "run.json").exists()}
        if len(set(phases.values())) > 1:
            # Perhaps one of the runs was stopped.
            text = ", ".join(f"{run} after {phase}" for run, phase in phases.items())
            warn(f"these runs were not measured after the same phase: {text}.")
        results = [[recorded[place] for place in arm_places] for arm_places in places]
        comparison = _pooled(dict(zip(_arm_names(places), results, strict=True)))
    if as_json:
        show_json(comparison.numbers)
        return
    show_results(comparison)
    show_changes(comparison.results[0], comparison.results[-1], items)


def _look_at(place: Path) -> None:
    """Warn of a run that goes on or has lost records; raise `ConfigError` for a missing path."""
    if not place.exists():
        raise ConfigError("there is nothing here", where=str(place), fix="Check the path.")
    if is_running(place):
        warn(f"the run in {place} goes on; this is what it has measured so far.")
    elif (place / "run.json").exists():
        warn_of_losses(RunFolder(place))


def stages(runs: Sequence[Path], *, on: str = "test") -> Comparison:
    """Compare base, SFT and GRPO of a run, or of several seeds of one recipe.

    Args:
        runs: their folders.
        on: the problems, `test` or `validation`; the last evaluation of each phase counts.

    Raises:
        ConfigError: nothing was measured on them in one of the runs.
    """
    by_run = []
    for run in runs:
        results = RunFolder(run).read_evaluations()
        by_run.append({result.phase: result for result in results if result.split == on})
    names = [name for name in PHASES if all(name in by_phase for by_phase in by_run)]
    if not names:
        raise ConfigError(
            f"the {on} problems were not measured in every one of them",
            where=", ".join(map(str, runs)),
            fix="Finish the runs (--resume), or name their evaluations.",
        )
    return _pooled({name: [by_phase[name] for by_phase in by_run] for name in names})


def _pooled(arms: Mapping[str, Sequence[EvaluationResult]]) -> Comparison:
    """Compare arms, each the mean of its seeds."""
    from grouper.evaluation.compare import compare, pool

    seeds = {}
    results = []
    for name, arm_results in arms.items():
        if len(arm_results) > 1:
            seeds[name] = arm_results
            results.append(pool(name, arm_results))
        else:
            results.append(dataclasses.replace(arm_results[0], name=name))
    return compare(results, seeds=seeds)


def _arm_names(arms: Sequence[Sequence[Path]]) -> list[str]:
    """Name arms for tables: `demo`, `demo-grpo` for a summary of it; their paths if two names are
    the same.
    """
    paths = [arm[0].resolve() for arm in arms]
    names = []
    for path in paths:
        name = f"{path.parents[1].name}-{path.stem}" if _is_summary(path) else path.name
        names.append(name)
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    counts = [f" and {len(arm) - 1} more" if len(arm) > 1 else "" for arm in arms]
    return [f"{name}{count}" for name, count in zip(names, counts, strict=True)]


def _answer_of(item: EvaluationItem) -> str:
    return item.extracted or item.outcome.replace("_", " ")


def show_changes(before: EvaluationResult, after: EvaluationResult, count: int) -> None:
    """Print the problems won and lost, at most `count` of each, side by side."""
    from grouper.evaluation.compare import changed_problems, label

    changes = changed_problems(before, after)
    won = [change for change in changes if change[0] > 0]
    lost = [change for change in reversed(changes) if change[0] < 0]
    show(f"{plural(len(won), 'problem')} won and {len(lost)} lost by {label(after.name)}")
    rows = []
    for change, old, new in (*won[:count], *lost[:count]):
        row = (
            old.problem_id,
            f"{100 * change:+.0f}",
            short(old.answer, 30),
            short(_answer_of(old), 30),
            short(_answer_of(new), 30),
        )
        rows.append(row)
    if rows:
        columns = ("problem", "points", "reference", label(before.name), label(after.name))
        table(columns, rows, lines=True)


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

    display = progress(quiet=quiet)
    with display.within("preview"):
        samples = api.preview(opened, subject, display=display, **drawn)
    causes = find(samples)
    click.echo(f"Model:     {subject}")
    _show_samples(samples)
    _summarise(samples, causes)
    return 1 if causes else 0


def _show_samples(samples: Samples) -> None:
    defaults = dataclasses.asdict(SamplingParams())
    settings = []
    for name, value in dataclasses.asdict(samples.groups[0].params).items():
        is_always_shown = name in ("temperature", "max_new_tokens")
        default = None if is_always_shown else defaults.get(name)
        if value != default:
            settings.append(f"{name} {value}")
    click.echo(f"Sampling:  {', '.join(settings)}")
    for group in samples.groups:
        click.echo(click.style(f"\nProblem {group.problem.id}", bold=True))
        prompt = samples.prepared.text(group.prompt.token_ids)
        click.echo(printable(f"{prompt}\nReference: {group.problem.answer}"))
        for number, rollout in enumerate(group.rollouts, start=1):
            click.echo(click.style(f"\n[{number} of {len(group.rollouts)}] ", fg="cyan"), nl=False)
            _show_rollout(rollout, samples.prepared.format)


def _show_rollout(rollout: Rollout, fmt: AnswerFormat) -> None:
    from grouper.advice.checks import tags_in

    completion = rollout.completion
    grade = rollout.grade
    tags = tags_in(completion.text, fmt)
    missing = [tag for tag, is_present in tags.items() if not is_present]
    lines = (
        f"reward {describe_reward(rollout.reward)}",
        f"answer {grade.extracted or 'none'}: {grade.verdict.value} ({grade.reason})",
        f"tags {len(tags) - len(missing)} of {len(tags)}"
        + (f", missing {', '.join(missing)}" if missing else "")
        + f"; {len(completion.token_ids)} tokens, ended by {completion.finish_reason.value}",
        fmt.prefix + completion.text,
    )
    click.echo(printable("\n".join(lines)))


def _summarise(samples: Samples, causes: Sequence[Finding]) -> None:
    right = sum(rollout.grade.correct for rollout in samples.rollouts)
    click.echo(f"\nRight:     {right} of {plural(len(samples.rollouts), 'sample')}")
    click.echo(
        f"Diversity: {samples.diversity:.2f} (0: all the same, 1: no two the same); tokens drawn "
        f"with a mean probability of {samples.certainty:.3f}"
    )
    click.echo(
        f"Rewards:   mean variance {samples.reward_variance:.4f}; something to learn from on "
        f"{sum(samples.signal)} of {plural(len(samples.groups), 'problem')}"
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
    subject = model or trained_model(opened, run, say=warn)
    require_model_folder(subject, where="--model")
    path = (output or run / "pass_rates.jsonl").expanduser()
    files.require_writable(path)

    from grouper import api

    display = progress(quiet=quiet)
    with display.within("difficulty"):
        rates = api.pass_rates(opened, subject, path, samples=samples, display=display)
    solved = Counter(correct for correct, _ in rates.values())
    for correct in range(samples + 1):
        bar = "#" * round(40 * solved[correct] / max(solved.values()))
        click.echo(f"solved {correct:>3} of {samples}  {solved[correct]:>6,}  {bar}".rstrip())
    click.echo(f"\n{plural(len(rates), 'problem')}: {path}")


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

    with progress().track("planning"):  # importing torch takes as long as the plan
        from grouper.advice.plan import plan_run

        run_plan = plan_run(opened, device=device, tokens_per_second=tokens_per_second)
    if as_json:
        show_json(run_plan.as_dict())
    else:
        _show_plan(run_plan)


def _show_plan(run_plan: RunPlan) -> None:
    size, unit = (2**30, "GiB") if run_plan.peak >= 2**30 else (2**20, "MiB")
    # Columns of zeros are left out.
    names = [field.name for field in dataclasses.fields(run_plan.memory[0]) if field.name != "name"]
    used_names = [name for name in names if any(getattr(row, name) for row in run_plan.memory)]
    rows = []
    for memory in run_plan.memory:
        values = [getattr(memory, name) / size for name in (*used_names, "peak")]
        rows.append((memory.name, *(f"{value:.2f}" for value in values)))
    parameters = f"{run_plan.parameters:,} parameters, {run_plan.trainable:,} of them trained"
    show(f"{parameters}, on {run_plan.device}")
    show("")
    columns = ("part", *(name.replace("_", " ") for name in used_names), "peak")
    table(columns, rows, title=f"{unit} at the worst moment", lines=True)
    peak = "The peak is the sum of its row; a chunk of logits is a part of the activations."
    if run_plan.device == "cpu":
        peak += " The process may hold up to half as much again: glibc keeps freed memory."
    show(peak, "")
    first_card = run_plan.cards[0]
    phases = [f"{phase}.tokens_per_micro_batch" for phase in first_card.tokens_per_micro_batch]
    cards = []
    for card in run_plan.cards:
        settings = (*card.tokens_per_micro_batch.values(), card.max_slots)
        largest = ("none" if value is None else f"{value:,}" for value in settings)
        cards.append((f"{card.gib} GB", "yes" if card.fits else "no", *largest))
    columns = ("card", "fits", *phases, "sampling.max_slots")
    table(columns, cards, title="What fits, and the largest settings that would", lines=True)
    show("", *map(_phase_line, run_plan.phases), *(f"Note: {note}" for note in run_plan.notes))


def _phase_line(phase: PhasePlan) -> str:
    bound = "at most " if phase.name == "grpo" else ""
    line = f"{phase.name}: {bound}{phase.tokens_per_step:,} tokens a step"
    if phase.steps is not None:
        line = f"{line}, {plural(phase.steps, 'step')}, {bound}{phase.tokens:,} tokens"
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

    from grouper.advice.bench import bench as measure_steps

    report = measure_steps(opened, model=subject, progress=progress(quiet=quiet), **measured)
    if as_json:
        show_json(report.as_dict())
    else:
        _show_bench(report)


def _show_bench(report: Bench) -> None:
    grpo = report.recipe.grpo
    tokens = report.spread("completion/tokens")
    length = f" of {tokens['median']:.0f} tokens" if tokens else ""
    forced = "" if report.completion_tokens is None else " (made so)"
    size, unit = (1e12, "TFLOP/s") if report.matrix_rate >= 1e12 else (1e9, "GFLOP/s")
    show(
        f"{report.model}: {report.parameters:,} parameters on {report.device}, "
        f"{plural(report.threads, 'thread')}; "
        f"large {report.dtype} products run at {report.matrix_rate / size:.3g} {unit}",
        f"{plural(len(report.reports), 'step')} after {report.warmup} to warm up, each "
        f"{plural(grpo.prompts_per_step, 'prompt')} x {grpo.group_size} completions{length}"
        f"{forced}, all of them trained on",
        "",
    )
    _show_times(report)
    of_what = "in the whole process"
    if report.memory_bytes is not None:
        of_what = f"of {report.memory_bytes / 2**30:.0f} GiB on the GPU"
    show(f"Peak memory: {report.peak_bytes / 2**30:.2f} GiB {of_what}")
    if report.token_limit is not None:
        show(
            f"Memory ran out: slices have had at most {report.token_limit:,} tokens since. Set "
            f"grpo.tokens_per_micro_batch={report.token_limit} to begin there."
        )
    show(
        f"The recipe's {report.recipe_steps:,} GRPO steps: {duration(3600 * report.hours)}, "
        "evaluations and checkpoints not counted"
    )


def _show_times(report: Bench) -> None:
    columns = ["", "min", "median", "max", "share"]
    if report.plain_reports:
        columns.append("no kernels")
    rows = []
    for name, metric, number_format in files.load_table("grouper.cli", "bench.yaml"):
        spread = report.spread(metric)
        if not spread:
            continue
        row = [name]
        row += [number_format.format(value) for value in spread.values()]
        row.append(f"{report.share(metric[5:]):.0%}" if name.endswith(", s") else "")
        if report.plain_reports:
            plain_spread = report.spread(metric, plain=True)
            row.append(number_format.format(plain_spread["median"]))
        rows.append(row)
    table(columns, rows, lines=True)
