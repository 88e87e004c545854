"""Arguments and options that several commands share, and the types of their values.

A command lists its options in the order of its help: those that people use first come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from grouper.compat.flags import options as flag_options

Function = TypeVar("Function", bound=Callable[..., Any])

# There is no use for a count beyond a billion.
MOST = 10**9
MOST_SEED = 2**63 - 1
MOST_PORT = 2**16 - 1


# --- types of values -----------------------------------------------------------------------------


class WholeNumber(click.IntRange):
    """A whole number from `least` to `most`; help shows `least` alone."""

    name = "whole number"

    def __init__(self, least: int, most: int = MOST) -> None:
        super().__init__(min=least)
        self.most = most

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if not number <= self.most:
            self.fail(f"{number} is not a number up to {self.most:,}.", param, ctx)
        return number


class Number(click.FloatRange):
    """A number from `least` to a billion, and not NaN; help shows `least` alone."""

    name = "number"

    def __init__(self, least: float) -> None:
        super().__init__(min=least)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        # This refuses NaN, too, which compares with nothing.
        if not number <= MOST:
            self.fail(f"{number} is not a number up to {MOST:,}.", param, ctx)
        return number


class ExpandedPath(click.Path):
    """A path in which the shell may have left a `~`, as in `--output=~/x`."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return super().convert(Path(value).expanduser(), param, ctx)


PORT = WholeNumber(1, MOST_PORT)
PATH = ExpandedPath(path_type=Path)
EXISTING_FILE = ExpandedPath(exists=True, dir_okay=False, path_type=Path)


# --- arguments -----------------------------------------------------------------------------------

overrides = click.argument("overrides", nargs=-1, metavar="[section.key=value]...")


def recipe(function: Function) -> Function:
    """Add the arguments RECIPE and overrides of its settings."""
    return click.argument("recipe", metavar="RECIPE")(overrides(function))


def optional_recipe(function: Function) -> Function:
    """Add the arguments [RECIPE], which --config may name instead, and overrides."""
    argument = click.argument("recipe", required=False, metavar="[RECIPE]")
    return argument(overrides(function))


def source(function: Function) -> Function:
    """Add the arguments SOURCE and settings of how it is read."""
    settings = click.argument("settings", nargs=-1, metavar="[key=value]...")
    return click.argument("source", metavar="SOURCE")(settings(function))


# --- options -------------------------------------------------------------------------------------

dry_run = click.option(
    "--dry-run",
    is_flag=True,
    help="Validate the recipe without loading the model, and print what was not checked, sizes and "
    "the resolved recipe. Python files that the recipe names (rewards, hooks, trackers) are "
    "executed.",
)
quiet = click.option("-q", "--quiet", is_flag=True, help="Print the result only, no progress.")
as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of text."
)
model = click.option(
    "--model",
    metavar="PATH",
    help="Model or adapter folder, GGUF file or Hub name.  [default: the model that GRPO would "
    "start from]",
)
engine = click.option(
    "--engine",
    type=click.Choice(["native", "vllm"]),
    help="Sampling engine.  [default: the recipe's sampling.engine]",
)
seed = click.option(
    "--seed",
    metavar="N",
    type=WholeNumber(0, MOST_SEED),
    help="Random seed.  [default: the recipe's]",
)
checkpoint = click.option(
    "--checkpoint",
    metavar="best|last|N",
    help="Checkpoint of a run folder: the best by validation, the last one, or the one after N "
    "steps.  [default: the result, else the newest checkpoint, with a warning]",
)
format_name = click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="Prompt format; see `grouper recipes formats`.",
)
recipe_of_prompt = click.option(
    "--recipe",
    metavar="RECIPE",
    help="Recipe whose prompt format is used.  [default: the recipe of MODEL's run]",
)
max_new_tokens_of_answer = click.option(
    "--max-new-tokens",
    metavar="N",
    type=WholeNumber(1),
    help="Maximum length of an answer in tokens.",
)
adapter = click.option(
    "--adapter",
    is_flag=True,
    help="Write only the LoRA adapter, for a base model on the Hub.",
)
license_id = click.option(
    "--license",
    "license_id",
    metavar="ID",
    help="License on the model card, by its name on the Hub.  [default: the base model's]",
)


def rows_to_show(default: int) -> Callable[[Function], Function]:
    """Add --show, the number of rows to print."""
    return click.option(
        "--show",
        metavar="N",
        type=WholeNumber(0),
        default=default,
        show_default=True,
        help="Number of rows of each kind to print.",
    )


# --- flags of other trainers ---------------------------------------------------------------------

# Flags of other trainers that people use first. The other flags follow a command's own options.
_FIRST_FLAGS = ("model", "max-steps")


def first_trainer_flags(function: Function) -> Function:
    """Add --model and --max-steps of the training commands."""
    return _add_flags(function, _FIRST_FLAGS)


def trainer_flags(function: Function) -> Function:
    """Add the other flags of `compat.flags`, each with a list of the values that were typed."""
    names = [flag for flag in flag_options() if flag not in _FIRST_FLAGS]
    return _add_flags(function, names)


def _add_flags(function: Function, names: Sequence[str]) -> Function:
    rows = flag_options()
    # Decorators nearest to the function come last in help.
    for flag in reversed(names):
        function = click.option(f"--{flag}", **rows[flag])(function)
    return function
