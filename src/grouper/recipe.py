"""Recipes: read the YAML, apply overrides, write it back whole, name it by a hash.

    defaults (config.py)  <  recipe file  <  `section.key=value`

Relative paths inside a recipe are relative to the folder the command runs in.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from grouper.config import Recipe
from grouper.errors import ConfigError, did_you_mean
from grouper.presets import PRESETS
from grouper.rewards import expand_stacks
from grouper.validation import validate_json

__all__ = [
    "list_recipes",
    "load_recipe",
    "recipe_hash",
    "resolved_yaml",
]

# What may differ between two runs of the same experiment.
NOT_THE_EXPERIMENT = (
    "output_dir",
    "description",
    "reading",
    "threads",
    "device",
    "parallel",
    "watchdog_minutes",
    "skip_sft",
    "skip_grpo",
    "alarms",
    "tracking.trackers",
)


class _Loader(yaml.SafeLoader):
    """`yaml.safe_load` that reads 5e-6 as a number and refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is written twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot in the mantissa and a sign in the exponent; people write 5e-6 and 1e6.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or file, with `section.key=value` overrides applied.

    Args:
        name_or_path: a shipped name (`demo`), or a path: anything that ends in `.yaml` or
            `.yml`, or holds a `/`.
        overrides: dotted key and YAML value (`grpo.steps=20`, `model.lora={rank: 8}`,
            `rewards.0.weight=2`); later ones win.

    Raises:
        ConfigError: unknown recipe, unreadable YAML, or every wrong or unknown setting at once.
    """
    text, where = _read(name_or_path)
    data = _parse_yaml(text, where)
    if not isinstance(data, dict):
        raise ConfigError(
            f"the recipe is a {type(data).__name__}, not settings with names",
            where=where,
            fix="Write it as `name: ...`, `model: ...`, `data: ...`.",
        )
    for override in overrides:
        _apply(data, override)
    _fill_in_preset(data)
    if "rewards" in data:
        data["rewards"] = expand_stacks(data["rewards"])
    try:
        as_json = json.dumps(data, allow_nan=False, default=str)
    except ValueError as error:
        raise ConfigError(
            "a setting is infinite or not a number", where=where, fix="Give a finite value."
        ) from error
    return validate_json(Recipe, as_json, where=where)


def _fill_in_preset(data: dict[str, Any]) -> None:
    """The parts of `grpo.algorithm` that the recipe does not set; a wrong name is found later."""
    section = data.get("grpo")
    name = section.get("algorithm") if isinstance(section, dict) else None
    if isinstance(section, dict) and isinstance(name, str) and name in PRESETS:
        data["grpo"] = {**PRESETS[name], **section}


def list_recipes() -> list[tuple[str, str]]:
    """(name, description) of every shipped recipe, by name."""
    recipes = [load_recipe(name) for name in _shipped()]
    return [(recipe.name, recipe.description) for recipe in recipes]


def resolved_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults included, as YAML that `load_recipe` reads back unchanged."""
    return yaml.safe_dump(
        recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100
    )


def recipe_hash(recipe: Recipe) -> str:
    """16 hex digits that name the experiment.

    What `NOT_THE_EXPERIMENT` lists does not count: texts, the machine, which phases are skipped.
    """
    exclude: dict[str, Any] = {}
    for name in NOT_THE_EXPERIMENT:
        section, _, field = name.partition(".")
        exclude[section] = {field} if field else True
    data = recipe.model_dump(mode="json", exclude=exclude)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _shipped() -> list[str]:
    folder = importlib.resources.files("grouper") / "recipes"
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def _read(name_or_path: str | Path) -> tuple[str, str]:
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name).expanduser()
        if not path.is_file():
            near = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
            raise ConfigError(
                "there is no recipe file of this name", where=name, fix=did_you_mean(name, near)
            )
        return _decode(path), name
    shipped = _shipped()
    if name not in shipped:
        raise ConfigError(
            f"there is no recipe {name!r}",
            fix=f"{did_you_mean(name, shipped)} A file of your own is given as a path "
            f"(./{name}.yaml).",
        )
    resource = importlib.resources.files("grouper") / "recipes" / f"{name}.yaml"
    return resource.read_text(encoding="utf-8"), f"recipe {name}"


def _decode(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error})", where=str(path)) from error


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"this is not valid YAML: {getattr(error, 'problem', None) or error}",
            where=f"{where}{line}",
        ) from error


def _apply(data: dict[str, Any], override: str) -> None:
    """Set one dotted key in place; unknown keys are left for the schema to complain about."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{override!r} is not an override", fix="Write section.key=value, as in grpo.steps=20."
        )
    node: Any = data
    for position, part in enumerate(parts[:-1]):
        node = _step_into(node, part, where=".".join(parts[: position + 1]))
    value = _parse_yaml(text, override)
    if isinstance(node, list):
        node[_index(node, parts[-1], key)] = value
    else:
        node[parts[-1]] = value


def _step_into(node: Any, part: str, where: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, where)]
    child = node.get(part)
    if child is None:
        child = node[part] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(f"holds {child!r}, which has no settings inside", where=where)
    return child


def _index(node: list[Any], part: str, where: str) -> int:
    if part.isdecimal() and int(part) < len(node):
        return int(part)
    raise ConfigError(
        f"{part!r} is not a position in a list of {len(node)}",
        where=where,
        fix=f"Use 0 to {len(node) - 1}." if node else "",
    )
