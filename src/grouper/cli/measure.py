"""`grouper eval`, `compare`, `preview`, `plan`, `bench` and `data difficulty`: what is measured."""

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
from grouper.cli.opening import (
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
    show_json,
    table,
    warn,
    warn_of_losses,
)
from grouper.config.loading import load_recipe
from grouper.errors import ConfigError, counted, duration
from grouper.evaluation.result import EvaluationResult
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
from grouper.runs.samples import in_words, printable
from grouper.types import SamplingParams

if TYPE_CHECKING:
    from grouper.advice.checks import Finding, Samples
    from grouper.advice.measuring import Bench
    from grouper.advice.run_plan import PhasePlan, RunPlan
    from grouper.config.schema import Recipe
    from grouper.data import ProblemSet
    from grouper.evaluation.compare import Comparison
    from grouper.evaluation.suites import Suite
    from grouper.runs.progress import Progress
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
    given = {name: value for name, value in sampling.items() if value is not None}
    settings = [] if seed is None else [f"seed={seed}"]
    if on is None:  # a suite has its own problems and sampling
        if len(prompts) > 1:
            raise click.UsageError("several prompts are tried on suites: add --on.")
        settings += [f"evaluation.{name}={value}" for name, value in given.items()]
        settings += [] if limit is None else [f"data.{split}.limit={limit}"]
        settings += [f"prompt.format={name}" for name in prompts]
    opened, run, model = _asked(
        recipe, sampled_by(engine, (*overrides, *settings)), may_be_model=on is not None
    )
    # Never in an exported folder, which a later run replaces.
    home = opened.run_folder if is_model(run) else run
    target = (output_dir or home / "eval_runs").expanduser()
    wanted = _wanted(opened, run, models or ((model,) if model else ()), checkpoint)
    implied = with_base is None and not models
    base = _base(opened, run, fetch=bool(with_base)) if with_base or implied else None
    subjects = _labelled([*filter(None, [base]), *wanted])
    for subject in subjects.values():
        require_model_folder(subject, where="--model")
    files.require_writable(target)
    own = run / RECIPE_FILE
    if not (models or prompts) and own.is_file() and load_recipe(own).prompt != opened.prompt:
        warn(
            f"the run in {run} was trained with other `prompt` settings than these; measure it by "
            f"its own recipe with `grouper eval {run}`."
        )
    plans = [_Measurement(opened, split, None, None)]
    if on is not None:
        limits = {"limit": limit, "tokens": given.pop("max_new_tokens", None)}
        suites = [part.strip() for part in on.split(",")]
        bare = not own.is_file()
        plans = _on_suites(opened, suites, prompts, subjects, bare=bare, **limits, **given)
    to_do = [
        (label, model, plan)
        for label, model in subjects.items()
        for plan in plans
        if model == base or not plan.only_base
    ]
    if dry_run:
        _show_sizes(to_do, target)
        return
    display = progress(quiet=quiet)
    with display.within("eval"):
        found = _measured(to_do, target, display)
    if as_json:
        rows = [{"problems": name, **comparison.numbers} for name, comparison in found.items()]
        show_json({"evaluations": rows})
        return
    for name, comparison in found.items():
        if on is not None:
            click.echo(click.style(f"\n{name}", bold=True))
        show_results(comparison)
    show(*(f"Items: {target / label / 'evaluations'}" for label in subjects))


def _wanted(
    recipe: Recipe, run: Path, named: Sequence[str], checkpoint: str | None
) -> Sequence[str]:
    """The models that are named, else the one that the run has trained."""
    if named and checkpoint is not None:
        raise click.UsageError("--checkpoint is one of a run, and a model is named: give one.")
    return named or [trained_model(recipe, run, checkpoint=checkpoint, say=warn)]


def _measured(
    to_do: Sequence[tuple[str, str, _Measurement]], target: Path, display: Progress
) -> dict[str, Comparison]:
    """What is measured, compared: one table per set of problems."""
    from grouper import api
    from grouper.evaluation.compare import compare

    found: dict[str, list[EvaluationResult]] = {}
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
        shown = f"{label} {plan.prompt}" if plan.prompt else label
        found.setdefault(plan.name, []).append(dataclasses.replace(result, name=shown))
    return {name: compare(results) for name, results in found.items()}


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
    """The recipe, its run folder, and the model where the first argument is one."""
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
    """The model before the training of a run; None where there is no run or no such model.

    Unless it is to be fetched, only one that is on this machine.
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
    """Each suite in each prompt: those named, the recipe's own, or what suits a bare model.

    The base of a run is also asked in the suite's few-shot prompt: it was never taught the other.
    """
    from grouper.evaluation.suites import recipe_on, suite_named
    from grouper.models.loading import context_length, load_tokenizer, shape_of

    lengths = [context_length(shape_of(model, None)) for model in subjects.values()]
    room = min((length // 2 for length in lengths if length is not None), default=None)
    found = []
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
            chats = all(load_tokenizer(model).chat_template for model in subjects.values())
            ways = [(suite.prompts[0 if chats else -1], False)]
        elif not ways:
            ways = [(None, False), (suite.prompts[-1], True)]
        for prompt, only_base in ways:
            changed = recipe_on(recipe, suite, prompt=prompt, tokens=longest, **sampling)
            shown = prompt if len(ways) > 1 else None
            found.append(_Measurement(changed, suite.name, suite, shown, only_base))
    return found


def _show_sizes(to_do: Sequence[tuple[str, str, _Measurement]], target: Path) -> None:
    sizes = []
    for label, model, plan in to_do:
        k, count = plan.recipe.evaluation.samples, len(plan.problems)
        what = f"{counted(count, plan.name + ' problem')} x {k} = {k * count:,} completions"
        way = f" in {plan.prompt}" if plan.prompt else ""
        sizes.append(f"{model}: {what}{way}, to {target / label}")
    recipe = to_do[0][-1].recipe
    missing = models_not_here(recipe, *dict.fromkeys(model for _, model, _ in to_do))
    show_plan(recipe, sizes, unchecked=[*missing, "the rewards"])


def _labelled(models: Iterable[str]) -> dict[str, str]:
    """Label -> model; the labels are file names: `demo-grpo-final`, `Qwen-Qwen3-0.6B`."""
    subjects: dict[str, str] = {}
    for model in dict.fromkeys(models):
        path = Path(model).expanduser()
        parts = path.parts[-2:]
        if path.exists():  # from the run it lies in
            path = path.resolve()
            parts = path.relative_to((run_of_model(model) or path).parent).parts
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).lstrip("._-") or "model"
        subjects[f"{label}-{len(subjects) + 1}" if label in subjects else label] = model
    return subjects


def _recorded(place: Path, split: str) -> EvaluationResult:
    """A recorded evaluation: that of a run's last phase, or the latest one in another folder.

    Args:
        place: a run folder, a folder of eval_runs, or the summary of one evaluation.
        split: `test`, `validation`, or the name of a suite.
    """
    if _is_summary(place) and (one := RunFolder(place.parent.parent).read_evaluation(place.stem)):
        return one
    is_run = (place / "run.json").exists()
    later = sorted((place / "eval_runs").glob("*")) if is_run else []
    found = [
        (folder, result)
        for folder in (place, *later)
        for result in RunFolder(folder).read_evaluations()
        if result.split == split
    ]
    if not found:
        raise ConfigError(
            f"there is no evaluation on {split} problems in it",
            where=str(place),
            fix="Measure it first with `grouper eval`, or name its model folder instead.",
        )

    def age(pair: tuple[Path, EvaluationResult]) -> tuple[float, ...]:
        folder, result = pair
        measured = (folder / "evaluations" / f"{result.name}.json").stat().st_mtime
        return (PHASES.index(result.phase), result.step, measured) if is_run else (measured,)

    own = [pair for pair in found if pair[0] == place]
    return max(own or found, key=age)[1]


def _is_summary(place: Path) -> bool:
    return place.suffix == ".json" and place.absolute().parent.name == "evaluations"


def show_results(comparison: Comparison, *, parts: bool = True) -> None:
    """Print results side by side: accuracy, differences and rewards; if `parts`, also lenient
    verdicts, pass@k, and everything by subject, level and length.
    """
    from grouper.evaluation import compare

    results = comparison.results
    settings = [result.card.get("sampling") for result in results]
    if any(setting != settings[0] for setting in settings):
        warn("these models were not measured with the same sampling settings.")
    show(compare.render_table(comparison))
    by_part = [table for _, tables in compare.render_parts(results) for table in tables]
    more = [compare.render_answers(results)] if parts else []
    for found in (*more, compare.render_metrics(results), *(by_part if parts else ())):
        if found is not None:
            show("", found)
    show("")


# --- grouper compare -----------------------------------------------------------------------------


def compare(arms: tuple[str, ...], *, on: str, items: int, as_json: bool) -> None:
    """Compare what was measured before; runs with commas between them are seeds of one arm."""
    places = [[Path(part).expanduser() for part in arm.split(",") if part] for arm in arms]
    every = [place for arm in places for place in arm]
    for place in every:
        _look_at(place)
    if not all(places):
        raise click.UsageError("there is nothing beside a comma.")
    if len({place.resolve() for place in every}) < len(every):
        raise click.UsageError("the same run cannot be two seeds of one arm, nor two arms.")
    if len(places) == 1 and len(places[0]) == 1 and not (places[0][0] / "run.json").exists():
        raise click.UsageError("name at least two things to compare, or one run.")
    if len(places) == 1:
        found = stages(places[0], on=on)
    else:
        recorded = {place: _recorded(place, on) for place in every}
        after = {run: recorded[run].phase for run in every if (run / "run.json").exists()}
        if len({*after.values()}) > 1:  # perhaps one of them was stopped
            phases = ", ".join(f"{run} after {phase}" for run, phase in after.items())
            warn(f"these runs were not measured after the same phase: {phases}.")
        measured = [[recorded[place] for place in arm] for arm in places]
        found = _pooled(dict(zip(_arm_names(places), measured, strict=True)))
    if as_json:
        show_json(found.numbers)
        return
    show_results(found)
    show_changes(found.results[0], found.results[-1], items)


def _look_at(place: Path) -> None:
    """Warn where a run goes on, or has lost something; raise `ConfigError` if nothing is there."""
    if not place.exists():
        raise ConfigError("there is nothing here", where=str(place), fix="Check the path.")
    if is_running(place):
        warn(f"the run in {place} goes on; this is what it has measured so far.")
    elif (place / "run.json").exists():
        warn_of_losses(RunFolder(place))


def stages(runs: Sequence[Path], *, on: str = "test") -> Comparison:
    """Base, SFT and GRPO of a run, or of several seeds of one recipe.

    Args:
        runs: their folders.
        on: the problems, `test` or `validation`; the last evaluation of each phase counts.

    Raises:
        ConfigError: nothing was measured on them in one of the runs.
    """
    of_runs = [
        {r.phase: r for r in RunFolder(run).read_evaluations() if r.split == on} for run in runs
    ]
    names = [name for name in PHASES if all(name in found for found in of_runs)]
    if not names:
        raise ConfigError(
            f"the {on} problems were not measured in every one of them",
            where=", ".join(map(str, runs)),
            fix="Finish the runs (--resume), or name their evaluations.",
        )
    return _pooled({name: [found[name] for found in of_runs] for name in names})


def _pooled(arms: Mapping[str, Sequence[EvaluationResult]]) -> Comparison:
    from grouper.evaluation.compare import compare, pool

    seeds = {name: found for name, found in arms.items() if len(found) > 1}
    results = [
        pool(name, found) if name in seeds else dataclasses.replace(found[0], name=name)
        for name, found in arms.items()
    ]
    return compare(results, seeds=seeds)


def _arm_names(arms: Sequence[Sequence[Path]]) -> list[str]:
    """What tables call them: `demo`, `demo-grpo` for a summary of it, or whole paths where two
    would have the same name.
    """
    first = [arm[0].resolve() for arm in arms]
    names = [
        f"{path.parents[1].name}-{path.stem}" if _is_summary(path) else path.name for path in first
    ]
    if len({*names}) < len(names):
        names = [*map(str, first)]
    more = [f" and {len(arm) - 1} more" if len(arm) > 1 else "" for arm in arms]
    return [f"{name}{others}" for name, others in zip(names, more, strict=True)]


def show_changes(before: EvaluationResult, after: EvaluationResult, count: int) -> None:
    """Print the problems won and lost, at most `count` of each, side by side."""
    from grouper.evaluation.compare import changed_problems, label

    changes = changed_problems(before, after)
    won = [row for row in changes if row[0] > 0]
    lost = [row for row in changes if row[0] < 0][::-1]
    show(f"{counted(len(won), 'problem')} won and {len(lost)} lost by {label(after.name)}")
    rows = [
        (old.problem_id, f"{100 * change:+.0f}", *(short(t, 30) for t in (old.answer, *both)))
        for change, old, new in (*won[:count], *lost[:count])
        for both in [[i.extracted or i.outcome.replace("_", " ") for i in (old, new)]]
    ]
    if rows:
        table(("problem", "points", "reference", label(before.name), label(after.name)), rows)


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
        seen = api.preview(opened, subject, display=display, **drawn)
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
        asked = seen.prepared.text(group.prompt.token_ids)
        click.echo(printable(f"{asked}\nReference: {group.problem.answer}"))
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
    click.echo(f"\nRight:     {right} of {counted(len(seen.rollouts), 'sample')}")
    click.echo(
        f"Diversity: {seen.diversity:.2f} (0: all the same, 1: no two the same); tokens drawn with "
        f"a mean probability of {seen.certainty:.3f}"
    )
    click.echo(
        f"Rewards:   mean variance {seen.reward_variance:.4f}; something to learn from on "
        f"{sum(seen.signal)} of {counted(len(seen.groups), 'problem')}"
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
        found = api.pass_rates(opened, subject, path, samples=samples, display=display)
    solved = Counter(correct for correct, _ in found.values())
    for correct in range(samples + 1):
        bar = "#" * round(40 * solved[correct] / max(solved.values()))
        click.echo(f"solved {correct:>3} of {samples}  {solved[correct]:>6,}  {bar}".rstrip())
    click.echo(f"\n{counted(len(found), 'problem')}: {path}")


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
        from grouper.advice.run_plan import plan_run

        found = plan_run(opened, device=device, tokens_per_second=tokens_per_second)
    if as_json:
        show_json(found.as_dict())
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
        line = f"{line}, {counted(phase.steps, 'step')}, {bound}{phase.tokens:,} tokens"
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
        show_json(seen.as_dict())
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


def _show_times(seen: Bench) -> None:
    last = ["no kernels"] if seen.plain_reports else []
    rows = []
    for name, metric, form in files.table("grouper.cli", "bench.yaml"):
        spread = seen.spread(metric)
        if spread:
            share = f"{seen.share(metric[5:]):.0%}" if name.endswith(", s") else ""
            plain = [form.format(seen.spread(metric, plain=True)["median"]) for _ in last]
            rows.append((name, *map(form.format, spread.values()), share, *plain))
    table(("", "min", "median", "max", "share", *last), rows)
