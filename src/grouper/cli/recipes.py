"""`grouper recipes`: what can be run, and every setting, format and source by name."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
from pydantic.fields import FieldInfo

from grouper.cli.groups import NamingGroup
from grouper.config.aliases import aliases
from grouper.config.checks import meant, nearest, renamed, settings
from grouper.config.schema import Recipe
from grouper.errors import ConfigError

EXAMPLES = """\b
Examples:
  grouper recipes show demo > mine.yaml && grouper run ./mine.yaml
  grouper recipes show demo grpo.beta=0.01       with a setting changed
  grouper recipes fields grpo                    every setting of one section
  grouper recipes fields learning rate           settings by name or meaning
  grouper recipes fields num_generations         what another trainer's setting is called here
  grouper recipes from trl.yaml -o mine.yaml     a file of another trainer's
"""


@click.group("recipes", cls=NamingGroup, invoke_without_command=True, epilog=EXAMPLES)
@click.pass_context
def recipes_command(ctx: click.Context) -> None:
    """List the shipped recipes, or look one up.

    A recipe is a YAML file that describes a whole run. Any setting can also be changed on the
    command line, as section.key=value.
    """
    if ctx.invoked_subcommand is None:
        from grouper.config.loading import list_recipes

        _table(list_recipes())


@recipes_command.command("show", short_help="Print a recipe with every default filled in.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[section.key=value]...")
def show_command(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print RECIPE with every default filled in, as YAML that can be run."""
    from grouper.config.loading import load_recipe, resolved_yaml

    click.echo(resolved_yaml(load_recipe(recipe, overrides)), nl=False)


@recipes_command.command("fields", short_help="Print every setting with its meaning, or find one.")
@click.argument("words", nargs=-1, metavar="[WORD]...")
def fields_command(words: tuple[str, ...]) -> None:
    """Print every setting with its type, default and meaning.

    WORD is a section or setting, such as grpo, data.train or grpo.steps; else the settings are
    printed whose names and meanings have every WORD in them, and those that stand for a name from
    another trainer, such as num_generations.
    """
    fields = dict(settings(Recipe))
    keys = [key for key in fields if _lies_in(key, ".".join(words))] or _search(words, fields)
    _table([(key.replace("[]", ""), _describe(fields[key])) for key in keys])


def _lies_in(key: str, section: str) -> bool:
    """Whether a key is a setting or one of a section; all are in the empty one."""
    return not section or f"{key}.".replace("[]", "").startswith(f"{section.replace('[]', '')}.")


def _search(words: Sequence[str], fields: Mapping[str, FieldInfo]) -> list[str]:
    """The keys of the settings that have every word in name or meaning, or that they stand for.

    Raises:
        ConfigError: there is none.
    """
    row, counterparts = meant("_".join(words), fields)
    found = [
        key
        for key, field in fields.items()
        if any(_lies_in(key, counterpart) for counterpart in counterparts)
        or all(word.lower() in f"{key} {field.description}".lower() for word in words)
    ]
    if not found:
        name = words[-1].rpartition(".")[2]
        gone = next((v for k, v in renamed().items() if k.rpartition(".")[2] == name), "")
        foreign = f"It is another trainer's, without a counterpart: {row['why']}." if row else ""
        parts = {part for key in fields for part in key.replace("[]", "").split(".")}
        near = nearest(name, {*parts, *aliases()})
        raise ConfigError(
            f"no setting has {' '.join(words)!r} in its name or meaning",
            fix=gone or foreign or (f"Did you mean {near!r}?" if near else ""),
        )
    return found


@recipes_command.command("from", short_help="Turn another trainer's file into a recipe.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write it there.")
@click.option(
    "--as", "phase", type=click.Choice(["sft", "grpo"]), help="Whose settings a TRL file holds."
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    help="Processes the file was written for; its batch sizes are those of one.",
)
def from_command(
    file: Path, output: Path | None, phase: Literal["sft", "grpo"] | None, nproc: int
) -> None:
    """Print a recipe for FILE, which another trainer reads.

    FILE is YAML, JSON or Python with TRL's GRPOConfig or SFTConfig (Python is read, not run), or
    the YAML of the set-ups that math-r1-zero and openmath-dapo follow. What has no counterpart is
    listed at the top of the recipe with the reason; what FILE leaves out is as it is there. What
    cannot be trained (num_generations 1) is refused.
    """
    from grouper.config.importing import import_recipe
    from grouper.data.sources import source_named
    from grouper.files import write_atomic
    from grouper.rewards import REWARDS

    if output is not None and output.exists():
        raise ConfigError(
            f"{output} exists already",
            where="--output",
            fix="Name another file, or move this one away.",
        )
    imported = import_recipe(
        file, source_named=source_named, rewards=REWARDS, phase=phase, nproc=nproc
    )
    if output is None:
        click.echo(imported.text, nl=False)
        return
    write_atomic(output, imported.text.encode())
    for name, why in imported.left_out.items():
        click.echo(f"{name}: {why}", err=True)
    shown = f"./{output}" if "/" not in str(output) else str(output)
    click.echo(f"Written to {output}: grouper run {shown} --dry-run", err=True)


@recipes_command.command("from-trl", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def from_trl_command(words: tuple[str, ...]) -> None:
    """Say what this command is called now."""
    raise ConfigError(
        "`recipes from-trl` has another name", fix=f"Type `grouper recipes from {' '.join(words)}`."
    )


@recipes_command.command("formats")
def formats_command() -> None:
    """List the prompt formats (`prompt.format`)."""
    from grouper.config.schema import PromptConfig
    from grouper.prompts import FORMATS, make_format

    _table([(name, make_format(PromptConfig(format=name)).description) for name in FORMATS])


@recipes_command.command("sources")
def sources_command() -> None:
    """List the data sources (`data.*.source`)."""
    from grouper.data import SOURCES

    _table([(name, source.description) for name, source in SOURCES.items()])


@recipes_command.command("rewards")
def rewards_command() -> None:
    """List the built-in rewards (`rewards[].name`)."""
    from grouper.rewards import REWARDS

    _table([(name, _first_line(builder.__doc__)) for name, builder in REWARDS.items()])


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0]


def _table(rows: list[tuple[str, str]]) -> None:
    formatter = click.HelpFormatter(width=100)
    formatter.write_dl(rows, col_max=40)
    click.echo(formatter.getvalue(), nl=False)


def _describe(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    default = "required" if field.is_required() else f"default {_default(value)}"
    meaning = f": {field.description}" if field.description else ""
    return f"({_kind(field.annotation)}, {default}){meaning}"


def _default(value: Any) -> str:
    return "none" if value is None else repr(list(value) if isinstance(value, tuple) else value)


def _kind(annotation: Any) -> str:
    """A type in the words of a recipe: `int | none`, `list of str`, `mapping`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
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
