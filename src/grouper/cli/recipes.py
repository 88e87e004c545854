"""`grouper recipes`: what can be run, every setting by name, and other trainers' files."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
from pydantic.fields import FieldInfo

from grouper.cli.opening import require_new
from grouper.cli.text import definitions
from grouper.config.aliases import aliases
from grouper.config.checks import meant, nearest, renamed, settings
from grouper.config.loading import list_recipes, load_recipe, resolved_yaml
from grouper.config.schema import PromptConfig, Recipe
from grouper.errors import ConfigError


def listed() -> None:
    """Print the shipped recipes."""
    definitions(list_recipes())


def show(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print a whole recipe."""
    click.echo(resolved_yaml(load_recipe(recipe, overrides)), nl=False)


def formats() -> None:
    """Print the prompt formats."""
    from grouper.prompts import FORMATS, make_format

    definitions([(n, make_format(PromptConfig(format=n)).description) for n in FORMATS])


def fields(words: tuple[str, ...]) -> None:
    """Print the settings of a section, or those that the words find."""
    known = dict(settings(Recipe))
    keys = [key for key in known if _lies_in(key, ".".join(words))] or _search(words, known)
    definitions([(key.replace("[]", ""), _describe(known[key])) for key in keys])


def imported(
    file: Path | str, output: Path | None, phase: Literal["sft", "grpo"] | None, nproc: int
) -> None:
    """Print or write a recipe for another trainer's file."""
    from grouper.config.importing import import_recipe
    from grouper.data.naming import source_named
    from grouper.files import write_atomic
    from grouper.rewards import REWARDS

    if output is not None:
        require_new(output, "--output")
    found = import_recipe(
        Path(file), source_named=source_named, rewards=REWARDS, phase=phase, nproc=nproc
    )
    if output is None:
        click.echo(found.text, nl=False)
        return
    write_atomic(output, found.text.encode())
    for name, why in found.left_out.items():
        click.echo(f"{name}: {why}", err=True)
    shown = f"./{output}" if "/" not in str(output) else str(output)
    click.echo(f"Written to {output}: grouper run {shown} --dry-run", err=True)


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
