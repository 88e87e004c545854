"""Options, arguments and ways of showing things that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.advice.recipe_checks import check_recipe
from grouper.cli.fallbacks import fallbacks
from grouper.cli.launch import is_follower
from grouper.config.loading import load_recipe, resolved_yaml
from grouper.config.schema import Recipe
from grouper.errors import ConfigError
from grouper.models.folders import RECIPE_FILE, is_model, local_model

if TYPE_CHECKING:
    from rich.console import Console

Command = Callable[..., Any]

dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Check what can be checked without loading a model, say what was not, print the resolved "
    "recipe and the sizes. Python files that the recipe names (rewards, hooks, trackers) are "
    "executed.",
)
model_option = click.option(
    "--model",
    metavar="PATH",
    help="A model folder, adapter folder or Hub name. Left out: what GRPO would start from.",
)
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Only the result, no progress.")


def recipe_arguments(command: Command, *, required: bool = True) -> Command:
    """RECIPE and any number of section.key=value."""
    command = click.argument("overrides", nargs=-1, metavar="[section.key=value]...")(command)
    return click.argument("recipe", metavar="RECIPE", required=required)(command)


def open_recipe(name: str, overrides: Sequence[str], *, runs_here: bool = True) -> Recipe:
    """Load a recipe with overrides, check it against all tables, and show its warnings.

    Args:
        name: a shipped name, a YAML file, or a run folder, whose own recipe is meant.
        overrides: `section.key=value`. A model in ./models or ./.models comes before the Hub.
        runs_here: refuse what needs a file or library that this machine lacks; a default of the
            recipe's gives way to what there is, with a warning.

    Raises:
        ConfigError: every problem at once.
    """
    recipe = read_recipe(name, overrides)
    local = local_model(recipe.model.path or "")
    if local != (recipe.model.path or ""):
        overrides = (*overrides, f"model.path={local}", "model.revision=null")
        recipe = read_recipe(name, overrides)
    if runs_here:
        instead = fallbacks(name, recipe, overrides)
        if instead:
            recipe = read_recipe(name, (*overrides, *(override for override, _ in instead)))
        for _, text in instead:
            warn(text)
    for text in check_recipe(recipe, runs_here=runs_here):
        warn(text)
    return recipe


def read_recipe(name: str, overrides: Sequence[str]) -> Recipe:
    """Load a recipe with overrides, from wherever `name` says (see `open_recipe`)."""
    folder = run_folder_of(name)
    return load_recipe(name if folder is None else folder / RECIPE_FILE, overrides)


def run_folder_of(name: str) -> Path | None:
    """The run folder that RECIPE names, or None where it is a shipped name or a file.

    Raises:
        ConfigError: a folder without a recipe.
    """
    folder = Path(name).expanduser()
    if "/" not in name or not folder.is_dir():
        return None
    if not (folder / RECIPE_FILE).is_file():
        raise ConfigError(
            f"this folder has no {RECIPE_FILE}, so it is not the folder of a run",
            where=name,
            fix="Give a shipped recipe, a YAML file, or <output_dir>/<name> of a run.",
        )
    return folder


def run_of(name: str, recipe: Recipe) -> Path:
    """The run folder that RECIPE names, else where a run of the recipe goes, there or not."""
    return run_folder_of(name) or Path(recipe.output_dir).expanduser() / recipe.name


def start_of_grpo(recipe: Recipe, run: Path) -> str | None:
    """What GRPO would start from in a run folder; None where the recipe makes a new model first.

    Args:
        recipe: what is run.
        run: its folder, whether it is there or not; a model folder is meant itself.
    """
    if is_model(run):
        return str(run)
    final, base = run / "sft" / "final", run / "base"
    found = recipe.grpo.start_from or (str(final) if final.is_dir() else recipe.model.path)
    return found or (str(base) if base.is_dir() else None)


def chosen_model(model: str | None, recipe: Recipe, run: Path) -> str | None:
    """What `--model` names, else what GRPO would start from; None where that is to be made first.

    Raises:
        ModelError: a folder that holds no model.
    """
    from grouper.models.folders import require_model_folder

    subject = model or start_of_grpo(recipe, run)
    if subject is not None:
        require_model_folder(subject, where=str(run) if model is None else "--model")
    return subject


def warn(text: str) -> None:
    """Show a warning on standard error, once for all processes of a run."""
    if is_follower():
        return
    click.echo(click.style("warning: ", fg="yellow") + text, err=True)


def show_plan(
    recipe: Recipe,
    sizes: Sequence[str],
    warnings: Sequence[str] = (),
    *,
    leaks: Sequence[str] = (),
    unchecked: Sequence[str] = (),
) -> None:
    """What a dry run prints: the resolved recipe, then the sizes as YAML comments.

    Args:
        recipe: what would be run.
        sizes: one line each.
        warnings: for standard error.
        leaks: held-out problems that training sees; repeated in the last line.
        unchecked: what was not looked at.
    """
    for text in warnings:
        warn(text)
    click.echo(resolved_yaml(recipe))
    for line in sizes:
        click.echo(f"# {line}")
    last = "Everything that was looked at checks out"
    last += f", but {' and '.join(leaks)}." if leaks else "."
    if unchecked:
        last += f" Not checked: {'; '.join(unchecked)}."
    click.echo(f"# Dry run: no model was loaded and nothing was written. {last}")


def models_not_here(recipe: Recipe, *models: str) -> list[str]:
    """Of some models, those that are not on this machine, as `show_plan` takes them."""
    from grouper.models.folders import on_this_machine

    own, revision = recipe.model.path, recipe.model.revision
    missing = [m for m in models if not on_this_machine(m, revision if m == own else None)]
    return [f"the model {model!r}, which is not on this machine" for model in missing]


def output_console() -> Console:
    """Standard output for tables; a file or pipe is as wide as they need."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=120)
