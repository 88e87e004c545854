"""`grouper eval`: evaluate models on the problems of a recipe, or on benchmarks."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper import files
from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.results import show_results
from grouper.cli.text import progress, show, show_json, warn
from grouper.errors import ConfigError, plural

if TYPE_CHECKING:
    from grouper.config.schema import Recipe
    from grouper.data import ProblemSet
    from grouper.evaluation.compare import Comparison
    from grouper.evaluation.result import EvaluationResult
    from grouper.evaluation.suites import SamplingChanges, Suite
    from grouper.evaluation.twin_problems import TwinComparison
    from grouper.runs.progress import Progress

EXAMPLES = """
grouper eval outputs/demo                          the trained model and its base model
grouper eval demo --model ./my-model               any model on the demo's problems
grouper eval outputs/demo --samples 8 --temperature 0.8
grouper eval ./my-model --on gsm8k,math500         public benchmarks
grouper eval outputs/demo --on mine.jsonl --limit 200
grouper eval outputs/demo --on gsm8k --twins       also on the same problems with other numbers
"""


@click.command("eval", cls=Command, examples=EXAMPLES)
@options.recipe
@click.option(
    "--on",
    metavar="SUITES",
    help="Benchmark suites or files, separated by commas, instead of RECIPE's problems.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="PATH",
    help="Model or adapter folder, GGUF file or Hub name; several are compared in this order.  "
    "[default: the model that the recipe's run has trained]",
)
@options.checkpoint
@click.option(
    "--samples", metavar="K", type=options.WholeNumber(1), help="Number of completions per problem."
)
@click.option(
    "--temperature",
    metavar="X",
    type=options.Number(0),
    help="Sampling temperature; 0 is greedy.",
)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="FORMAT",
    help="Prompt format (see `grouper recipes formats`); several are tried with the same number "
    "of samples and tokens.  [default: RECIPE's own]",
)
@click.option(
    "--limit", metavar="N", type=options.WholeNumber(1), help="Evaluate only the first N problems."
)
@click.option(
    "--with-base/--no-base",
    default=None,
    help="Also evaluate the model before training, on benchmarks with their few-shot prompt, too.  "
    "[default: for a run]",
)
@click.option(
    "--top-p",
    metavar="X",
    type=options.Number(0),
    help="Sample from the most likely tokens that make up this share of the probability.",
)
@click.option(
    "--top-k",
    metavar="N",
    type=options.WholeNumber(0),
    help="Sample from the N most likely tokens; 0 means all.",
)
@click.option(
    "--min-p",
    metavar="X",
    type=options.Number(0),
    help="Drop tokens whose probability is below this fraction of the most likely one.",
)
@click.option(
    "--max-new-tokens",
    metavar="N",
    type=options.WholeNumber(1),
    help="Maximum length of a completion in tokens.",
)
@options.seed
@click.option(
    "--twins",
    is_flag=True,
    help="Also evaluate on the problems' twins: the same with other numbers, where the marked "
    "steps of the worked solution prove the new answer.",
)
@click.option(
    "--split",
    type=click.Choice(["test", "validation"]),
    default="test",
    show_default=True,
    help="Which problems of the recipe to evaluate on.",
)
@click.option(
    "--output-dir",
    metavar="DIR",
    type=options.PATH,
    help="Folder for the folder of each evaluation.  [default: <output_dir>/<name>/eval_runs]",
)
@options.as_json
@options.dry_run
@options.engine
@options.quiet
def evaluate(
    recipe: str,
    overrides: tuple[str, ...],
    *,
    models: tuple[str, ...],
    checkpoint: str | None,
    on: str | None,
    prompts: tuple[str, ...],
    twins: bool,
    split: str,
    limit: int | None,
    with_base: bool | None,
    output_dir: Path | None,
    engine: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    samples: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    max_new_tokens: int | None,
) -> None:
    """Evaluate models on a recipe's problems or on benchmarks.

    Reports accuracy with its interval, the shares of correct, wrong, missing and truncated
    answers, pass@k and maj@k, format, reasoning, each reward separately, and accuracy and rewards
    by subject, level and length.

    RECIPE is a shipped name, a YAML file, or a run folder; with --on also a model folder or a Hub
    name. Prompts, sampling and grading are the recipe's, as in training. A benchmark has its own
    sampling settings, and its own prompts for a model without a recipe. Benchmarks: gsm8k, math,
    math500, aime24, aime25, aime26, hmmt25, hmmt26, brumo25, amc23, minerva, olympiad, svamp,
    gsm-plus, asdiv, or a file; NAME=PATH reads a local copy. An interrupted evaluation is
    continued by the same command, and one that is complete is not repeated with the same settings.
    """
    from grouper.cli.recipe_args import sampled_by
    from grouper.evaluation.suites import SamplingChanges
    from grouper.models.folders import RECIPE_FILE, is_model, require_model_folder

    sampling = SamplingChanges(
        samples=samples, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
    )
    settings = [] if seed is None else [f"seed={seed}"]
    if on is None:
        _require_one_prompt(prompts)
        # A suite has its own problems and sampling.
        settings += _as_overrides(split, limit, prompts, max_new_tokens, sampling)
    opened, run, model = _open_first_argument(
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
    subjects = _labeled(measured_models)
    for subject in subjects.values():
        require_model_folder(subject, where="--model")
    files.require_writable(target)
    if not (models or prompts):
        _warn_of_other_prompt(run, opened)
    plans = [_Plan(opened, split, None, None)]
    if on is not None:
        suites = [name.strip() for name in on.split(",")]
        bare = not (run / RECIPE_FILE).is_file()
        plans = _on_suites(
            opened,
            suites,
            prompts,
            subjects,
            bare=bare,
            limit=limit,
            tokens=max_new_tokens,
            sampling=sampling,
        )
    if twins:
        plans += _twin_plans(plans)
    to_do = _pairs(subjects, plans, base)
    if dry_run:
        _show_sizes(to_do, target)
        return
    display = progress(quiet=quiet)
    with display.within("eval"):
        comparisons = _measured(to_do, target, display)
    if as_json:
        _show_numbers(comparisons, _twin_comparisons(comparisons, plans))
        return
    _show_comparisons(comparisons, named=on is not None)
    show(*(comparison.sentence for comparison in _twin_comparisons(comparisons, plans)))
    show(*(f"Items: {target / label / 'evaluations'}" for label in subjects))


def _show_comparisons(comparisons: Mapping[str, Comparison], *, named: bool) -> None:
    """Print comparisons, each below the name of its problems if `named`."""
    for name, comparison in comparisons.items():
        if named:
            click.echo(click.style(f"\n{name}", bold=True))
        show_results(comparison)


def _show_numbers(
    comparisons: Mapping[str, Comparison], beside_twins: Sequence[TwinComparison]
) -> None:
    """Print comparisons as JSON."""
    rows = []
    for name, comparison in comparisons.items():
        rows.append({"problems": name, **comparison.numbers})
    numbers: dict[str, Any] = {"evaluations": rows}
    if beside_twins:
        numbers["twins"] = [dataclasses.asdict(comparison) for comparison in beside_twins]
    show_json(numbers)


def _twin_plans(plans: Sequence[_Plan]) -> list[_Plan]:
    """Return the plans to evaluate on the twins of the plans' problems, in the same way.

    Raises:
        DataError: the problems of a plan have no twins.
    """
    from grouper.evaluation.twin_problems import twins_of

    twin_plans = []
    for plan in plans:
        name = f"{plan.name} with other numbers"
        twins = twins_of(plan.problems, plan.recipe.seed)
        twin_plans.append(dataclasses.replace(plan, name=name, twins_of=plan, twins=twins))
    return twin_plans


def _twin_comparisons(
    comparisons: Mapping[str, Comparison], plans: Sequence[_Plan]
) -> list[TwinComparison]:
    """Compare each result on twins with that of the same model on their originals."""
    from grouper.evaluation.twin_problems import compare_twins

    twin_comparisons = []
    # Plans in several prompts have one name, and one comparison.
    names = {plan.name: plan.twins_of.name for plan in plans if plan.twins_of is not None}
    for name, name_of_originals in names.items():
        originals = {result.name: result for result in comparisons[name_of_originals].results}
        for result in comparisons[name].results:
            original = originals[result.name]
            twin_comparisons.append(compare_twins(result.name, original, result))
    return twin_comparisons


def _require_one_prompt(prompts: Sequence[str]) -> None:
    """Raise `UsageError` if there are several prompts, which are for suites alone."""
    if len(prompts) > 1:
        raise click.UsageError("several prompts are tried on suites: add --on.")


def _as_overrides(
    split: str,
    limit: int | None,
    prompts: Sequence[str],
    tokens: int | None,
    sampling: SamplingChanges,
) -> list[str]:
    """Return the flags about problems, prompt and sampling as overrides of the recipe."""
    settings = sampling.set_values
    if tokens is not None:
        settings["max_new_tokens"] = tokens
    overrides = [f"evaluation.{name}={value}" for name, value in settings.items()]
    if limit is not None:
        overrides.append(f"data.{split}.limit={limit}")
    overrides += [f"prompt.format={name}" for name in prompts]
    return overrides


def _warn_of_other_prompt(run: Path, recipe: Recipe) -> None:
    """Warn if a run was trained with another prompt than that of a recipe."""
    from grouper.config.loading import load_recipe
    from grouper.models.folders import RECIPE_FILE

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
    from grouper.models.trained import trained_model

    if named and checkpoint is not None:
        raise click.UsageError("--checkpoint is one of a run, and a model is named: give one.")
    return named or [trained_model(recipe, run, checkpoint=checkpoint, say=warn)]


def _measured(
    to_do: Sequence[tuple[str, str, _Plan]], target: Path, display: Progress
) -> dict[str, Comparison]:
    """Measure models, and compare them: one comparison per set of problems."""
    from grouper import api
    from grouper.evaluation.compare import compare

    results: dict[str, list[EvaluationResult]] = {}
    for label, model, plan in to_do:
        result = api.evaluate(
            plan.recipe,
            model,
            split=plan.part,
            problems=plan.problems,
            suite=plan.suite,
            are_twins=plan.twins_of is not None,
            folder=target / label,
            display=display,
        )
        name = f"{label} {plan.prompt}" if plan.prompt else label
        results.setdefault(plan.name, []).append(dataclasses.replace(result, name=name))
    return {name: compare(set_results) for name, set_results in results.items()}


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One set of problems, with one prompt."""

    recipe: Recipe
    name: str
    suite: Suite | None
    prompt: str | None
    """The format, where there are several; None: the recipe's own, or the only one."""
    only_base: bool = False
    twins_of: _Plan | None = None
    """Another plan, of whose problems these are the twins."""
    twins: ProblemSet | None = None
    """The twins."""

    @property
    def part(self) -> str:
        """The part of the recipe's data that the problems are."""
        if self.suite is not None:
            return "test"
        return self.name if self.twins_of is None else self.twins_of.part

    @functools.cached_property
    def problems(self) -> ProblemSet:
        """The problems, loaded once for all models."""
        from grouper.training.problem_sets import require_part

        if self.twins is not None:
            return self.twins
        return require_part(self.recipe, self.part)


def _open_first_argument(
    name: str, overrides: tuple[str, ...], *, may_be_model: bool
) -> tuple[Recipe, Path, str | None]:
    """Return the recipe, its run folder, and the model where the first argument is one."""
    from grouper.cli.recipe_args import open_recipe, run_of
    from grouper.models.folders import RECIPE_FILE, is_model, recipe_for
    from grouper.models.folders import run_of as run_of_model

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
        opened = open_recipe(name, overrides, trains=False)
        return opened, run_of(name, opened), None
    if run := run_of_model(name):
        return open_recipe(str(run), overrides, trains=False), run, name
    opened = recipe_for(name, None, "boxed").override(*overrides)
    return opened, Path(opened.output_dir).expanduser() / next(iter(_labeled([name]))), name


def _base(recipe: Recipe, run: Path, *, fetch: bool) -> str | None:
    """Return the model before the training of a run; None where there is no run or no such model.

    A model that is not on this machine is returned only if it may be fetched.
    """
    from grouper.models.folders import is_model, on_this_machine

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
    sampling: SamplingChanges,
) -> list[_Plan]:
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
            changed = recipe_on(recipe, suite, prompt=prompt, tokens=longest, changes=sampling)
            prompt_name = prompt if len(ways) > 1 else None
            plans.append(_Plan(changed, suite.name, suite, prompt_name, only_base))
    return plans


def _pairs(
    subjects: Mapping[str, str], plans: Sequence[_Plan], base: str | None
) -> list[tuple[str, str, _Plan]]:
    """Return (label, model, plan) of every measurement; some plans are for the base alone."""
    pairs = []
    for label, model in subjects.items():
        model_plans = [plan for plan in plans if model == base or not plan.only_base]
        pairs += [(label, model, plan) for plan in model_plans]
    return pairs


def _show_sizes(to_do: Sequence[tuple[str, str, _Plan]], target: Path) -> None:
    from grouper.cli.recipe_args import models_not_here, show_plan

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


def _labeled(models: Iterable[str]) -> dict[str, str]:
    """Label models by file names: `demo-grpo-final`, `Qwen-Qwen3-0.6B`."""
    from grouper.models.folders import run_of as run_of_model

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
