"""`grouper recipes`: shipped recipes, settings by name, prompt formats, other trainers' files."""

from __future__ import annotations

import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli import options
from grouper.cli.commands import Group
from grouper.cli.text import definitions
from grouper.errors import ConfigError
from grouper.files import write_atomic

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

EXAMPLES = """
grouper recipes show demo > mine.yaml && grouper run ./mine.yaml
grouper recipes show demo grpo.beta=0.01       with a setting changed
grouper recipes fields grpo                    every setting of one section
grouper recipes fields learning rate           settings by name or meaning
grouper recipes fields num_generations         our name for another trainer's setting
grouper recipes from trl.yaml -o mine.yaml     import another trainer's file
"""


@click.group("recipes", cls=Group, invoke_without_command=True, examples=EXAMPLES)
@click.pass_context
def recipes(context: click.Context) -> None:
    """List recipes, settings and prompt formats.

    Without a command, lists the shipped recipes. A recipe is a YAML file that describes a whole
    run. Any setting can also be overridden on the command line, as section.key=value.
    """
    if context.invoked_subcommand is None:
        from grouper.config.loading import list_recipes

        definitions(list_recipes())


@recipes.command("show")
@options.recipe
def show(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print a recipe with every default filled in.

    The output is YAML that can be run.
    """
    from grouper.config.loading import load_recipe, resolved_yaml

    click.echo(resolved_yaml(load_recipe(recipe, overrides)), nl=False)


@recipes.command("fields")
@click.argument("words", nargs=-1, metavar="[WORD]...")
def fields(words: tuple[str, ...]) -> None:
    """Print every setting with its meaning, or find one.

    Prints type, default and meaning.

    WORD is a section or setting, such as grpo, data.train or grpo.steps. Any other words select
    the settings that have all of them in their name or meaning, or that another trainer calls by
    that name, such as num_generations.
    """
    from grouper.config.checks import settings
    from grouper.config.schema import Recipe

    all_fields = dict(settings(Recipe))
    section = ".".join(words)
    keys = [key for key in all_fields if _lies_in(key, section)] or _search(words, all_fields)
    definitions([(key.replace("[]", ""), _describe(all_fields[key])) for key in keys])


@recipes.command("from")
@click.argument("file", metavar="FILE")
@click.option(
    "-o", "--output", metavar="FILE", type=options.PATH, help="Write the recipe to this file."
)
@click.option(
    "--nproc",
    metavar="N",
    type=options.WholeNumber(1),
    default=1,
    show_default=True,
    help="Number of processes that FILE was written for; its batch sizes are per process.",
)
def import_file(file: str, output: Path | None, nproc: int) -> None:
    """Convert another trainer's file into a recipe.

    FILE is YAML or JSON with TRL's settings, Python with its GRPOConfig or SFTConfig (it is read,
    not run), or YAML of the setups behind math-r1-zero and openmath-dapo. Settings without a
    counterpart are listed at the top of the recipe with the reason; settings that FILE leaves out
    have that trainer's defaults. What cannot be trained (num_generations 1) is refused.
    """
    from grouper.cli.recipe_args import require_new
    from grouper.compat.importing import import_recipe
    from grouper.data.reading import source_named
    from grouper.rewards import REWARDS

    require_new(output, "--output")
    imported = import_recipe(file, source_named=source_named, rewards=REWARDS, nproc=nproc)
    if output is None:
        click.echo(imported.text, nl=False)
        return
    write_atomic(output, imported.text.encode())
    for name, reason in imported.left_out.items():
        click.echo(f"{name}: {reason}", err=True)
    path = shlex.quote(str(output) if "/" in str(output) else f"./{output}")
    click.echo(f"Written to {output}: grouper run {path} --dry-run", err=True)


@recipes.command("formats")
def formats() -> None:
    """List the prompt formats.

    A recipe gives one of these names as `prompt.format`.
    """
    from grouper.config.schema import PromptConfig
    from grouper.prompts import FORMATS, make_format

    rows = []
    for name in FORMATS:
        fmt = make_format(PromptConfig(format=name))
        rows.append((name, fmt.description))
    definitions(rows)


def _lies_in(key: str, section: str) -> bool:
    """Tell whether a key is `section` itself or below it; every key is below the empty one."""
    if not section:
        return True
    section_key = section.replace("[]", "")
    return f"{key}.".replace("[]", "").startswith(f"{section_key}.")


def _search(words: Sequence[str], fields: Mapping[str, FieldInfo]) -> list[str]:
    """Find the settings that have every word in name or meaning, or that the words stand for.

    Raises:
        ConfigError: there is none.
    """
    from grouper.compat.hints import advice, meant

    _, counterparts = meant("_".join(words), fields)
    keys = []
    for key, field in fields.items():
        text = f"{key} {field.description}".lower()
        is_counterpart = any(_lies_in(key, counterpart) for counterpart in counterparts)
        if is_counterpart or all(word.lower() in text for word in words):
            keys.append(key)
    if not keys:
        raise ConfigError(
            f"no setting has {' '.join(words)!r} in its name or meaning",
            fix=advice((words[-1].rpartition(".")[2],), "...", fields),
        )
    return keys


def _describe(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        # Recipes write a tuple as a list.
        value = list(value)
    value_text = "none" if value is None else repr(value)
    default = "required" if field.is_required() else f"default {value_text}"
    meaning = f": {' '.join(field.description.split())}" if field.description else ""
    return f"({_kind(field.annotation)}, {default}){meaning}"


def _kind(annotation: Any) -> str:
    """Describe a type in the words of a recipe: `int | none`, `list of str`, `mapping`."""
    origin = typing.get_origin(annotation)
    inner = typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(map(str, inner))
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(_kind, inner))
    if origin is tuple:
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return "mapping"
    return "none" if annotation is types.NoneType else str(annotation.__name__)
