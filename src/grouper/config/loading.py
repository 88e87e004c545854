"""Recipes: read the YAML, apply overrides, write it back whole, name it by a hash.

    defaults (schema.py)  <  recipe file  <  `section.key=value`

Relative paths inside a recipe are relative to the folder the command runs in.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from grouper.config.checks import guest_room, validate_json
from grouper.config.overrides import as_json, parse_yaml
from grouper.config.schema import ASIDE, SINCE, Recipe
from grouper.errors import ConfigError, did_you_mean
from grouper.files import load_table


def _marked(mark: str, model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key and default, as JSON values, of every setting or section with a mark."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        section = field.annotation
        if mark in field.metadata:
            default = field.default
            if isinstance(default, BaseModel):
                default = default.model_dump(mode="json")
            yield key, default
        elif isinstance(section, type) and issubclass(section, BaseModel):
            yield from _marked(mark, section, f"{key}.")


# Settings and sections that may differ between two runs of the same experiment.
NOT_THE_EXPERIMENT = tuple(key for key, _ in _marked(ASIDE, Recipe))
# Settings that are part of the experiment only where they differ from their default.
ADDED_SINCE = dict(_marked(SINCE, Recipe))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe of that name or file, with `section.key=value` overrides applied.

    Args:
        name_or_path: a shipped name (`demo`), or a path: anything that ends in `.yaml`, `.yml`
            or `.json`, or holds a `/`.
        overrides: dotted key and YAML value (`grpo.steps=20`, `model.lora={rank: 8}`,
            `rewards.0.weight=2`); later ones win.

    Raises:
        ConfigError: unknown recipe, unreadable YAML, or every wrong or unknown setting at once.
        RewardError: an unknown stack of rewards.
    """
    text, where = _read(name_or_path)
    data = parse_yaml(text, where)
    if not isinstance(data, dict):
        content = "empty" if data is None else f"a {type(data).__name__}"
        problem = f"the recipe is {content}, not settings with names"
        fix = "Write it as `name: ...`, `model: ...`, `data: ...`."
        raise ConfigError(problem, where=where, fix=fix)
    if "name" not in data:
        unknown = {key: value for key, value in data.items() if key not in Recipe.model_fields}
        dialect = guest_room("aliases").dialect_of(unknown)
        if dialect is not None:
            raise _foreign(f"a file for {dialect['label']}", where)
    json_text = as_json(data, overrides, where=where)
    return validate_json(Recipe, json_text, where=where)


def _foreign(content: str, where: str) -> ConfigError:
    """Describe a file that is no recipe, and the command that makes a recipe of it."""
    problem = f"this is {content}, not a recipe"
    fix = f"`grouper recipes from {where} -o mine.yaml` makes one of it."
    return ConfigError(problem, where=where, fix=fix)


@cache
def shipped_recipes() -> dict[str, str]:
    """Read the recipes that come with Grouper: name, in order -> YAML."""
    folder = importlib.resources.files("grouper.config") / "recipes"
    texts: dict[str, str] = {}
    for file in folder.iterdir():
        name = Path(file.name).stem
        texts[name] = file.read_text(encoding="utf-8")
    return dict(sorted(texts.items()))


def list_recipes() -> list[tuple[str, str]]:
    """List (name, description) of every shipped recipe, by name."""
    recipes = []
    for name in shipped_recipes():
        settings = load_table("grouper.config", f"recipes/{name}.yaml")
        recipes.append((name, settings["description"]))
    return recipes


def resolved_yaml(recipe: Recipe, *, defaults: bool = True) -> str:
    """Write the recipe as YAML that `load_recipe` reads back unchanged.

    Args:
        recipe: to write.
        defaults: also the settings that it leaves out.
    """
    settings = recipe.model_dump(mode="json", exclude_unset=not defaults)
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100)


def recipe_hash(recipe: Recipe) -> str:
    """Return 16 hex digits that name the experiment: all its settings but those marked `ASIDE`.

    Those marked `SINCE` count where they are not at their default.
    """
    data = recipe.model_dump(mode="json")
    for key in (*NOT_THE_EXPERIMENT, *ADDED_SINCE):
        *sections, name = key.split(".")
        section = data
        for section_name in sections:
            section = section[section_name]
        if key in NOT_THE_EXPERIMENT or section[name] == ADDED_SINCE[key]:
            del section[name]
    text = json.dumps(data, sort_keys=True)
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()[:16]


def _read(name_or_path: str | Path) -> tuple[str, str]:
    """Read a recipe's text; return it, and how errors name the recipe."""
    name = str(name_or_path)
    if name.endswith(".py"):
        raise _foreign("Python", name)
    has_file_name = name.endswith((".yaml", ".yml", ".json")) or "/" in name
    if isinstance(name_or_path, Path) or has_file_name:
        path = Path(name).expanduser()
        if not path.is_file():
            neighbors = [str(file) for file in path.parent.glob("*.y*ml")]
            fix = did_you_mean(name, neighbors)
            raise ConfigError("there is no recipe file of this name", where=name, fix=fix)
        return read_text(path), name
    shipped = shipped_recipes()
    if name not in shipped:
        suggestion = did_you_mean(name, shipped)
        fix = f"{suggestion} A file of your own is given as a path (./{name}.yaml)."
        raise ConfigError(f"there is no recipe {name!r}", fix=fix)
    return shipped[name], f"recipe {name}"


def read_text(path: Path) -> str:
    """Read a UTF-8 file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error})", where=str(path)) from error
