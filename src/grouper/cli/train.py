"""`grouper run`, `sft` and `grpo`, in this process or in several that it starts."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli import options
from grouper.cli.commands import TrainingCommand
from grouper.cli.launch import launch, require_devices
from grouper.cli.results import show_results, stages
from grouper.cli.text import is_follower, progress, show, warn
from grouper.errors import ConfigError
from grouper.tables import Line

if TYPE_CHECKING:
    from grouper.config.schema import Recipe
    from grouper.training.pipeline import RunResult

# Linux: a signal when the parent process dies.
PR_SET_PDEATHSIG = 1

RUN_EXAMPLES = """
grouper run demo                                 a few minutes on a laptop
grouper run demo --seeds 3                       three runs, and a comparison over them
grouper run demo --dry-run                       validate without loading a model
grouper run demo seed=1 name=demo-1 grpo.steps=20
grouper run ./mine.yaml --resume
grouper run --resume demo-1                      resume a run by its name
grouper run --config mine.yaml --nproc 2         one process per GPU
grouper run gsm8k-lite --model ./models/mine --max-steps 20 --tracker wandb --project math
grouper run r1-zero-numina --rewards accuracy,format --logging-steps 1 --save-steps 50
"""
SFT_EXAMPLES = """
grouper sft demo --steps 200 && grouper grpo demo --resume sft.steps=200
"""
GRPO_EXAMPLES = """
grouper grpo demo grpo.start_from=./my-model name=from-mine
"""


def _verdict_or_points(text: str) -> float:
    """Read `verdict`, which is 0, or a number of points as a share."""
    if text == "verdict":
        return 0.0
    try:
        points = float(text)
    except ValueError:
        points = math.nan
    if not 0 < points < 100:
        raise click.BadParameter(f"{text!r} is neither `verdict` nor a number of points.")
    return points / 100


def _training_options(function: options.Function) -> options.Function:
    """Add the options of the three commands that come before those of `run` alone."""
    decorators = (
        options.dry_run,
        options.first_trainer_flags,
        click.option(
            "--resume",
            is_flag=True,
            help="Resume the run in the folder, if there is one. RECIPE may then be the name of "
            "the run.",
        ),
        click.option(
            "--nproc",
            metavar="N",
            type=options.WholeNumber(1),
            default=1,
            show_default=True,
            help="Number of processes on this machine, one per GPU; for several machines use "
            "torchrun -m grouper.",
        ),
        click.option(
            "--config",
            metavar="FILE",
            help="Another way to give RECIPE: a file or a name.",
        ),
        click.option(
            "--allow-changes",
            is_flag=True,
            help="With --resume, continue although recipe, data or code changed; the changes are "
            "recorded.",
        ),
        click.option("--overwrite", is_flag=True, help="Delete the run in the folder first."),
        options.quiet,
        click.option(
            "-v",
            "--verbose",
            is_flag=True,
            help="Print every metric of each step, in one long line.",
        ),
    )
    # Decorators nearest to the function come last in help.
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


@click.command("run", cls=TrainingCommand, examples=RUN_EXAMPLES)
@options.optional_recipe
@_training_options
@click.option(
    "--skip-sft", is_flag=True, help="Start GRPO from the run's sft/final or the base model."
)
@click.option("--skip-grpo", is_flag=True, help="Stop after SFT.")
@click.option(
    "--seeds",
    metavar="N",
    type=options.WholeNumber(1),
    default=1,
    show_default=True,
    help="Run with the recipe's seed and the N-1 seeds after it, one run after another, and "
    "compare them.",
)
@click.option(
    "--until",
    metavar="VERDICT|POINTS",
    type=_verdict_or_points,
    help="With --seeds, stop before N seeds once the last phase's gain has a verdict other than "
    "`no evidence`, or its interval over seeds is this many points wide on either side. The "
    "interval allows for the looks after every seed.",
)
@options.trainer_flags
def run(
    recipe: str | None,
    overrides: tuple[str, ...],
    *,
    skip_sft: bool,
    skip_grpo: bool,
    seeds: int,
    until: float | None,
    **settings: Any,
) -> None:
    """Run a recipe: base evaluation, SFT, GRPO and a comparison.

    All are evaluated on the same problems. RECIPE is a shipped name (see `grouper recipes`) or a
    YAML file. Override any setting on the command line with section.key=value; `grouper recipes
    fields` lists the settings.

    Everything is written to <output_dir>/<name>: the resolved recipe, metrics, every rollout,
    evaluations with each item, checkpoints, the final models, report.html, curves.png. Ctrl-C
    saves a checkpoint before the run stops, and --resume continues it.
    """
    if skip_sft:
        overrides = (*overrides, "skip_sft=true")
    if skip_grpo:
        overrides = (*overrides, "skip_grpo=true")
    _run_phases(("sft", "grpo"), recipe, overrides, seeds=seeds, until=until, **settings)


@click.command("sft", cls=TrainingCommand, examples=SFT_EXAMPLES)
@options.optional_recipe
@_training_options
@options.trainer_flags
def sft(recipe: str | None, overrides: tuple[str, ...], **settings: Any) -> None:
    """Run only the SFT phase of a recipe.

    The same as `grouper run RECIPE --skip-grpo`.

    The trained model is saved in <output_dir>/<name>/sft/final; `grouper grpo RECIPE --resume`
    continues from it.
    """
    _run_phases(("sft",), recipe, (*overrides, "skip_grpo=true"), **settings)


@click.command("grpo", cls=TrainingCommand, examples=GRPO_EXAMPLES)
@options.optional_recipe
@_training_options
@options.trainer_flags
def grpo(recipe: str | None, overrides: tuple[str, ...], **settings: Any) -> None:
    """Run only the GRPO phase of a recipe.

    The same as `grouper run RECIPE --skip-sft`.

    Training starts from `grpo.start_from` if the recipe sets it, else from the run's sft/final,
    else from the base model, and the output names which.
    """
    _run_phases(("grpo",), recipe, (*overrides, "skip_sft=true"), **settings)


def _run_phases(
    phases: tuple[str, ...],
    recipe: str | None,
    overrides: tuple[str, ...],
    *,
    config: str | None,
    resume: bool,
    allow_changes: bool,
    overwrite: bool,
    nproc: int,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
    seeds: int = 1,
    until: float | None = None,
    **flags: Any,
) -> None:
    """Train the phases of a command, as far as the recipe does not skip them.

    Args:
        phases: `sft`, `grpo`, or both.
        recipe: RECIPE as typed.
        overrides: `section.key=value`, those that skip the phases of other commands among them.
        config: RECIPE as an option.
        resume: continue the run.
        allow_changes: continue it although something changed.
        overwrite: delete the run first.
        nproc: number of processes on this machine.
        dry_run: validate only.
        quiet: print the result only.
        verbose: print every metric.
        seeds: number of runs.
        until: half width of the interval over seeds that ends them early, a share; 0: a verdict
            does. None: there are as many as that.
        flags: flags of other trainers, which spell overrides, so that the resolved recipe shows
            them.
    """
    from grouper.cli.recipe_args import open_recipe, read_recipe
    from grouper.compat.flags import CommandLine, spelled_out
    from grouper.rewards.user_code import load_hook
    from grouper.runs.trackers import check_trackers

    intent = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    _require_consistent(intent, seeds, until)
    name, overrides = _named(recipe, config, overrides)
    if resume:
        name = _run_of_that_name(name, overrides, flags["output_dir"])
    line = CommandLine(
        name=name,
        overrides=overrides,
        phases=phases,
        nproc=nproc,
        typed=flags,
        read_recipe=read_recipe,
    )
    all_overrides, notes = spelled_out(line)
    _print_notes(notes)
    # A dry run reports a missing library together with the problems of data and model.
    opened = open_recipe(name, all_overrides, packages=not dry_run)
    if not opened.phases:
        warn("nothing is trained: both phases are skipped, and the base model is measured alone.")
    if resume or overwrite:
        _require_same_folder(name, opened)
    check_trackers(opened.tracking)
    for hook in opened.hooks:
        load_hook(hook)
    if dry_run:
        _dry_run(opened, intent)
        return
    switches = {"quiet": quiet, "verbose": verbose}
    if seeds == 1:
        for _ in _run_all([opened], intent, nproc=nproc, **switches):
            pass
        return
    finished: list[Path] = []
    for folder in _run_all(_seeds(opened, seeds), intent, nproc=nproc, **switches):
        finished.append(folder)
        if until is not None and _is_settled(finished, until, seeds):
            break
    click.echo(click.style(f"\n{len(finished)} seeds of {opened.name}", bold=True))
    most_seeds = None if until is None else seeds
    show_results(stages(finished, most_seeds=most_seeds), parts=False)


def _require_consistent(intent: Mapping[str, bool], seeds: int, until: float | None) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: they do.
    """
    from grouper.evaluation.sequential import MOST_SEEDS

    if intent["resume"] and intent["overwrite"]:
        raise click.UsageError("--resume continues the run, --overwrite deletes it: give one.")
    if intent["allow_changes"] and not intent["resume"]:
        raise click.UsageError("--allow-changes is about a run that is continued: add --resume.")
    if until is not None and not 2 < seeds <= MOST_SEEDS:
        raise click.UsageError(
            "--until decides after each seed whether there is another: add --seeds N, with N "
            f"from 3 to {MOST_SEEDS}, the most that there may be."
        )


def _is_settled(runs: Sequence[Path], until: float, most: int) -> bool:
    """Say how far the seeds so far decide the last phase's gain, and whether that is enough.

    The newest run records how many seeds there may be: its intervals have to allow for that.

    Args:
        runs: their folders.
        until: as of `_run_phases`.
        most: seeds that there may be.
    """
    from grouper.evaluation.compare import label
    from grouper.runs.folder import RunFolder

    RunFolder(runs[-1]).record_planned_seeds(most)
    if len(runs) < 2:
        return False
    comparison = stages(runs, most_seeds=most)
    if not comparison.differences or comparison.last_stage.seeds is None:
        warn("--until needs two phases measured on the same problems: there is nothing to decide.")
        return False
    gain = comparison.last_stage
    interval = gain.seeds
    assert interval is not None
    half = (interval.high - interval.low) / 2
    settled = half <= until if until else gain.verdict != "no evidence"
    click.echo(
        f"\nAfter {len(runs)} of up to {most} seeds, {label(gain.after)} over "
        f"{label(gain.before)}: {100 * gain.paired.difference:+.1f} points "
        f"[{100 * interval.low:+.1f}, {100 * interval.high:+.1f}], {gain.verdict}. "
        f"{'That is enough.' if settled else 'Another seed follows.'}"
    )
    return settled


def _print_notes(notes: Sequence[str]) -> None:
    """Print notes on standard error, once for all processes of a run."""
    if is_follower():
        return
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _require_same_folder(name: str, opened: Recipe) -> None:
    """Raise `ConfigError` if NAME is a run folder and its recipe names another one."""
    from grouper.cli.recipe_args import run_folder_of

    folder = run_folder_of(name)
    if folder is not None and folder.resolve() != opened.run_folder.resolve():
        problem = f"the recipe of the run in this folder names another one, {opened.run_folder}"
        fix = f"If the run was moved, name its folder {opened.name} and add --output-dir PARENT."
        raise ConfigError(problem, where=name, fix=fix)


def _run_all(
    runs: Sequence[Recipe], intent: dict[str, bool], *, nproc: int, quiet: bool, verbose: bool
) -> Iterator[Path]:
    """Run recipes one after another, each in `nproc` processes, and yield the folder of each."""
    from grouper.config.loading import recipe_hash, resolved_yaml
    from grouper.runs.folder import RunFolder

    if not is_follower():
        # Mistakes are reported before torch is imported and data are read.
        for recipe in runs:
            folder = RunFolder(recipe.run_folder)
            folder.check(recipe_hash(recipe), resolved_yaml(recipe), **intent)
    if nproc > 1 and "WORLD_SIZE" not in os.environ:
        require_devices(nproc, runs[0].device)
        switches = {**intent, "quiet": quiet, "verbose": verbose}
        options = [f"--{name.replace('_', '-')}" for name, is_on in switches.items() if is_on]
        for recipe in runs:
            with tempfile.TemporaryDirectory(prefix="grouper-") as temporary_folder:
                file = Path(temporary_folder) / f"{recipe.name}.yaml"
                file.write_text(resolved_yaml(recipe), encoding="utf-8")
                code = launch(nproc, ["run", str(file), *options])
                if code:
                    sys.exit(code)
            yield recipe.run_folder
        return
    for recipe in runs:
        _train(recipe, intent, quiet=quiet, verbose=verbose)
        yield recipe.run_folder


def _seeds(recipe: Recipe, count: int) -> list[Recipe]:
    """Return the recipe with its own seed and the following ones, each a run of its own.

    Raises:
        ConfigError: under torchrun, whose processes cannot begin a second run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "several seeds are several runs, one after another",
            where="--seeds",
            fix="Call it without torchrun; --nproc starts the processes of each run.",
        )
    recipes = []
    for seed in range(recipe.seed, recipe.seed + count):
        changes = {"seed": seed, "name": f"{recipe.name}-seed{seed}"}
        recipes.append(recipe.model_copy(update=changes))
    return recipes


def _named(
    name: str | None, config: str | None, overrides: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Return the recipe and the overrides; with --config the first argument is an override."""
    if config is not None:
        if name is not None:
            overrides = (name, *overrides)
        for text in overrides:
            if "=" not in text:
                problem = f"--config names the recipe, and so does {text!r}"
                raise click.UsageError(f"{problem}: give one.")
        # Usually a file, but the name of a shipped recipe is accepted.
        is_name = not Path(config).suffix and not Path(config).exists()
        if is_name or "/" in config:
            return config, overrides
        return f"./{config}", overrides
    if name is None:
        raise click.UsageError("Missing argument 'RECIPE': a name from `grouper recipes`, or FILE.")
    return name, overrides


def _run_of_that_name(name: str, overrides: tuple[str, ...], output_dirs: tuple[str, ...]) -> str:
    """Return the folder of the run of that name; the name of a recipe is returned unchanged."""
    from grouper.config.loading import shipped_recipes
    from grouper.config.schema import Recipe
    from grouper.models.folders import RECIPE_FILE

    if "/" in name or Path(name).suffix or name in shipped_recipes():
        return name
    output_dir = str(Recipe.model_fields["output_dir"].default)
    for text in overrides:
        if text.startswith("output_dir="):
            output_dir = text.partition("=")[2]
    if output_dirs:
        output_dir = output_dirs[-1]
    folder = Path(output_dir).expanduser() / name
    return str(folder) if (folder / RECIPE_FILE).is_file() else name


def _dry_run(recipe: Recipe, intent: dict[str, bool]) -> None:
    from grouper.advice.dry_run import make_plan
    from grouper.cli.recipe_args import show_plan

    with progress().within("reading and preparing the data"):
        plan = make_plan(recipe, **intent)
    show_plan(recipe, plan.sizes, plan.warnings, leaks=plan.leaks, unchecked=plan.unchecked)


def _train(recipe: Recipe, intent: dict[str, bool], *, quiet: bool, verbose: bool) -> None:
    from grouper.api import train
    from grouper.training.run import Run

    # A process that torchrun or `--nproc` started ends with its launcher, as on SIGTERM; only on
    # Linux, elsewhere the processes of a killed launcher go on to the end.
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    display = progress(quiet=quiet, verbose=verbose, log_every=recipe.tracking.log_every)
    with Run(recipe, display, **intent) as opened:
        result = train(opened)
    _report(recipe, result)


def _report(recipe: Recipe, result: RunResult) -> None:
    """Print the recipe's note, where things are, and last what came out."""
    from grouper.evaluation.result_tables import verdict_sentence

    show("")
    if recipe.note and not (recipe.skip_sft or recipe.skip_grpo):
        # One line per paragraph, which the terminal wraps.
        for paragraph in recipe.note.strip().split("\n\n"):
            show(Line(" ".join(paragraph.split()), "plain"))
        show("")
    show(f"Run folder: {result.path}", f"Report:     {result.path / 'report.html'}")
    show(f"By subject, level and length: grouper compare {result.path}")
    if result.comparison is None:
        return
    show("")
    show_results(result.comparison, parts=False)
    show(verdict_sentence(result.comparison, "test"))
