"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from grouper.config import Recipe
from grouper.recipe import check_recipe, load_recipe

__all__ = ["open_recipe", "recipe_arguments", "warn"]

Command = Callable[..., Any]


def recipe_arguments(command: Command) -> Command:
    """RECIPE and any number of section.key=value."""
    command = click.argument("overrides", nargs=-1, metavar="[section.key=value]...")(command)
    return click.argument("recipe", metavar="RECIPE")(command)


def open_recipe(name: str, overrides: Sequence[str]) -> Recipe:
    """Load a recipe with overrides, check it against all tables, and show its warnings.

    Raises:
        ConfigError: every problem at once.
    """
    recipe = load_recipe(name, overrides)
    for text in check_recipe(recipe):
        warn(text)
    return recipe


def warn(text: str) -> None:
    """Show a warning on standard error."""
    click.echo(click.style("warning: ", fg="yellow") + text, err=True)
