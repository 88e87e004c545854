"""`grouper run`, `grouper sft`, `grouper grpo`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli.flags import CommandLine, TrainingCommand, add_flags, spelled_out
from grouper.cli.launch import (
    is_follower,
    launch,
    require_devices,
    stop_with_the_launcher,
    without_nproc,
)
from grouper.cli.options import (
    dry_run_option,
    open_recipe,
    output_console,
    quiet_option,
    recipe_arguments,
    show_plan,
)
from grouper.config.aliases import flag_named
from grouper.config.loading import is_shipped
from grouper.config.schema import Recipe
from grouper.models.folders import RECIPE_FILE
from grouper.rewards.calling import load_hook
from grouper.tracking.sinks.registry import check_trackers

if TYPE_CHECKING:
    from grouper.training.pipeline import RunResult

RUNS = str(Recipe.model_fields["output_dir"].default)
"""Where runs lie unless the recipe or the user says otherwise."""

# Underscores, and the other names of each flag.
SETTINGS = {"token_normalize_func": flag_named}


def _launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option(
            "--config", metavar="FILE", help="Another way to name RECIPE: a file, or a name."
        ),
        click.option(
            "--resume",
            is_flag=True,
            help="Continue the run in the folder, if any. RECIPE may then be the run's name.",
        ),
        click.option(
            "--allow-changes",
            is_flag=True,
            help="With --resume: go on although recipe, data or code changed; recorded.",
        ),
        click.option("--overwrite", is_flag=True, help="Delete the run in the folder first."),
        click.option(
            "--nproc",
            type=click.IntRange(min=1),
            default=1,
            help="Processes on this machine, one a GPU; several machines: torchrun -m grouper.",
        ),
    ]
    command = dry_run_option(quiet_option(command))
    for option in reversed(options):
        command = option(command)
    return recipe_arguments(add_flags(command), required=False)


RUN_EXAMPLES = """\b
Examples:
  grouper run demo                                 a few minutes on a laptop
  grouper run demo --dry-run                       check what needs no model, load nothing
  grouper run demo seed=1 name=demo-1 grpo.steps=20
  grouper run ./mine.yaml --resume
  grouper run --resume demo-1                      a run by its name
  grouper run --config mine.yaml --nproc 4         one process a GPU
  grouper run gsm8k-lite --model ./models/mine --max-steps 20 --tracker wandb --project maths
  grouper run r1-zero-numina --rewards accuracy,format --logging-steps 1 --save-steps 50
"""
SFT_EXAMPLES = """\b
Example:
  grouper sft demo --steps 200 && grouper grpo demo --resume sft.steps=200
"""
GRPO_EXAMPLES = """\b
Example:
  grouper grpo demo grpo.start_from=./my-model name=from-mine
"""


@click.command("run", cls=TrainingCommand, epilog=RUN_EXAMPLES, context_settings=SETTINGS)
@click.option("--skip-sft", is_flag=True, help="Start GRPO from the run's sft/final (or the base).")
@click.option("--skip-grpo", is_flag=True, help="Stop after SFT.")
@_launch_options
def run_command(
    recipe: str | None,
    overrides: tuple[str, ...],
    *,
    skip_sft: bool,
    skip_grpo: bool,
    **options: Any,
) -> None:
    """Run RECIPE: measure the base model, SFT, GRPO, and compare them on the same problems.

    RECIPE is a shipped name (see `grouper recipes`) or a YAML file. Any setting can be changed
    on the command line as section.key=value; `grouper recipes fields` lists them.

    Everything is written to <output_dir>/<name>: the resolved recipe, metrics, every rollout,
    evaluations with each item, checkpoints, the final models, curves.png, times.png. A run that
    was stopped (Ctrl-C saves first) goes on with --resume.
    """
    switches = {"skip_sft": skip_sft, "skip_grpo": skip_grpo}
    _start(recipe, overrides, ("sft", "grpo"), switches, **options)


@click.command("sft", cls=TrainingCommand, epilog=SFT_EXAMPLES, context_settings=SETTINGS)
@_launch_options
def sft_command(recipe: str | None, overrides: tuple[str, ...], **options: Any) -> None:
    """Run only the SFT phase of RECIPE: `grouper run RECIPE --skip-grpo`.

    The trained model lies in <output_dir>/<name>/sft/final; `grouper grpo RECIPE --resume` goes
    on from it.
    """
    _start(recipe, overrides, ("sft",), {"skip_grpo": True}, **options)


@click.command("grpo", cls=TrainingCommand, epilog=GRPO_EXAMPLES, context_settings=SETTINGS)
@_launch_options
def grpo_command(recipe: str | None, overrides: tuple[str, ...], **options: Any) -> None:
    """Run only the GRPO phase of RECIPE: `grouper run RECIPE --skip-sft`.

    Starts from `grpo.start_from` where the recipe names one, else from the run's sft/final, else
    from the base model, and says which.
    """
    _start(recipe, overrides, ("grpo",), {"skip_sft": True}, **options)


def _start(
    name: str | None,
    overrides: tuple[str, ...],
    phases: tuple[str, ...],
    switches: dict[str, bool],
    *,
    config: str | None,
    resume: bool,
    allow_changes: bool,
    overwrite: bool,
    nproc: int,
    dry_run: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Flags are spellings of overrides, so that the resolved recipe shows them."""
    if resume and overwrite:
        raise click.UsageError("--resume continues the run, --overwrite deletes it: give one.")
    if allow_changes and not resume:
        raise click.UsageError("--allow-changes is about a run that is continued: add --resume.")
    intent = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    name, overrides = _named(name, config, overrides)
    if resume:
        name = _run_of_that_name(name, overrides, flags["output_dir"])
    switched = tuple(f"{key}=true" for key, value in switches.items() if value)
    line = CommandLine(name=name, overrides=(*overrides, *switched), phases=phases, nproc=nproc)
    spelled, notes = spelled_out(flags, line)
    for note in () if is_follower() else notes:
        click.echo(f"note: {note}", err=True)
    recipe = open_recipe(name, spelled)
    check_trackers(recipe.tracking)
    for hook in recipe.hooks:
        load_hook(hook)
    if nproc > 1 and not dry_run:
        require_devices(nproc, recipe.device)
        arguments = click.get_current_context().find_root().obj
        sys.exit(launch(nproc, without_nproc(arguments)))
    if dry_run:
        _dry_run(recipe, intent)
    else:
        _train(recipe, intent, quiet=quiet)


def _named(
    name: str | None, config: str | None, overrides: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """The recipe and the overrides; with --config the first argument is an override, too."""
    if config is not None:
        given = overrides if name is None else (name, *overrides)
        extra = next((text for text in given if "=" not in text), None)
        if extra is not None:
            raise click.UsageError(f"--config names the recipe, and so does {extra!r}: give one.")
        return _recipe_of(config), given
    if name is None:
        raise click.UsageError("Missing argument 'RECIPE': a name from `grouper recipes`, or FILE.")
    return name, overrides


def _run_of_that_name(name: str, overrides: tuple[str, ...], output_dirs: tuple[str, ...]) -> str:
    """The folder of a run that is continued by its name; a recipe's name is the recipe."""
    if "/" in name or Path(name).suffix or is_shipped(name):
        return name
    keys = [text.partition("=")[2] for text in overrides if text.startswith("output_dir=")]
    folder = Path([RUNS, *keys, *output_dirs][-1]).expanduser() / name
    return str(folder) if (folder / RECIPE_FILE).is_file() else name


def _recipe_of(config: str) -> str:
    """A file, first of all; a shipped recipe's name does as well."""
    is_name = "/" not in config and not Path(config).suffix and not Path(config).exists()
    return config if is_name or "/" in config else f"./{config}"


def _dry_run(recipe: Recipe, intent: dict[str, bool]) -> None:
    from grouper.advice.dry_run import make_plan
    from grouper.tracking.live import Progress, setup_logging

    setup_logging(None, console=Progress().console)
    plan = make_plan(recipe, **intent)
    show_plan(recipe, plan.sizes, plan.warnings, leaks=plan.leaks, unchecked=plan.unchecked)


def _train(recipe: Recipe, intent: dict[str, bool], *, quiet: bool) -> None:
    from grouper.api import train
    from grouper.tracking.live import Progress, setup_logging
    from grouper.training.run import Run

    stop_with_the_launcher()
    progress = Progress(quiet=quiet or is_follower(), log_every=recipe.tracking.log_every)
    setup_logging(None, console=None if is_follower() else progress.console)
    with Run(recipe, progress, **intent) as run:
        result = train(run)
    if not is_follower():
        _report(recipe, result)


def _report(recipe: Recipe, result: RunResult) -> None:
    from grouper.evaluation.compare import render_parts, render_table

    console = output_console()
    if result.comparison is not None:
        console.print()
        console.print(render_table(result.comparison))
        for part in ("subject", "level"):
            if len(getattr(result.results[0], f"by_{part}")) > 1:
                console.print()
                console.print(render_parts(result.results, by=part))
    if recipe.note and not (recipe.skip_sft or recipe.skip_grpo):
        console.print()
        # One line a paragraph: the terminal knows better than the recipe where to break them.
        for paragraph in recipe.note.strip().split("\n\n"):
            console.print(" ".join(paragraph.split()), highlight=False, markup=False)
    console.print()
    console.print(f"Run folder: {result.path}", highlight=False, soft_wrap=True)
    console.print(f"Curves:     {result.path / 'curves.png'}", highlight=False, soft_wrap=True)
