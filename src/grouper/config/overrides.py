"""Settings before they are a recipe: YAML as people write it, and dotted keys.

`load_recipe` and `Recipe.override` both go through here, so that a setting means the same in a
file, on the command line and in Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import TypeAdapter

from grouper.config.named import PRESETS, expand_stacks
from grouper.errors import ConfigError

# Of twenty aliases at most, the largest settings have about 3 ** (20 / 3) copies.
_MOST_ALIASES = 20


class _Loader(yaml.SafeLoader):
    """`yaml.safe_load` that reads 5e-6 as a number, and refuses keys written twice."""

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


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    What an alias names is copied: setting it in one place does not change the other.

    Raises:
        ConfigError: it is not YAML, has a key twice or too many aliases, or is nested too deeply;
            with the line if it is known.
    """
    try:
        events = yaml.parse(text) if "*" in text else ()
        aliases = sum(isinstance(event, yaml.AliasEvent) for event in events)
        if aliases > _MOST_ALIASES:
            raise ValueError(f"more than {_MOST_ALIASES} aliases")
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
        return json.loads(json.dumps(value, default=str)) if aliases else value
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        # ValueError: an impossible date, int() of more digits than Python reads, or aliases.
        # TypeError: a date as a key, beside an alias.
        what = getattr(error, "problem", None) or str(error).split(";")[0]
        if isinstance(error, RecursionError):
            what = "brackets or sections are nested too deeply"
        raise ConfigError(
            f"this is not valid YAML: {what}",
            where=f"{where}, line {mark.line + 1}" if mark else where,
        ) from error


def as_json(data: dict[str, Any], overrides: Sequence[str], *, where: str) -> str:
    """The settings with overrides, as JSON, stacks of rewards expanded; changes `data`.

    Args:
        data: the settings of a recipe, nested by section.
        overrides: `section.key=value`; later ones win.
        where: the file or recipe named in errors.

    Raises:
        ConfigError: an override that cannot be applied, or a value that JSON does not have.
    """
    for override in overrides:
        apply(data, override)
    if "rewards" in data:
        data["rewards"] = expand_stacks(data["rewards"])
    try:
        return json.dumps(data, allow_nan=False, default=str)
    except ValueError as error:
        raise ConfigError(
            "a setting is infinite or not a number", where=where, fix="Give a finite value."
        ) from error


def changed(
    data: dict[str, Any], overrides: Sequence[str], sections: Mapping[str, Any], *, where: str
) -> str:
    """The settings of a loaded recipe with changes, as JSON: first `sections`, then overrides.

    Args:
        data: what the recipe has set; changed in place.
        overrides: `section.key=value`; later ones win.
        sections: nested settings, merged into what is there; a section object counts as what was
            set on it.
        where: the recipe named in errors.

    Raises:
        ConfigError: as `as_json`.
    """
    section = data.get("grpo", {})
    # The parts of the algorithm are filled in again: the changes may name another one.
    parts = PRESETS.get(section.get("algorithm"), {}).items()
    data["grpo"] = {key: value for key, value in section.items() if (key, value) not in parts}
    # Sections as what was set on them, also inside lists; numbers of NumPy as numbers.
    how: dict[str, Any] = {"mode": "json", "exclude_unset": True, "fallback": _plain}
    _merge(data, TypeAdapter(Any).dump_python(sections, **how))
    return as_json(data, overrides, where=where)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(type(value), "tolist") else str(value)


def _merge(data: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def apply(data: dict[str, Any], override: str) -> None:
    """Set one dotted key in place; the schema refuses unknown ones."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{override!r} is not an override", fix="Write section.key=value, as in grpo.steps=20."
        )
    put(data, parts, parse_yaml(text, override))


def put(data: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set a value in place, at the key of these parts; sections on the way are made."""
    node: Any = data
    for position, part in enumerate(parts[:-1], start=1):
        node = _step_into(node, part, where=".".join(parts[:position]))
    key = _index(node, parts[-1], ".".join(parts)) if isinstance(node, list) else parts[-1]
    node[key] = value


def _step_into(node: Any, part: str, where: str) -> Any:
    child = node[_index(node, part, where)] if isinstance(node, list) else node.get(part)
    if child is None and isinstance(node, dict):
        child = node[part] = {}
    if isinstance(child, str) and isinstance(node, list):  # a list of rewards by their names
        child = node[int(part)] = {"name": child}
    if not isinstance(child, dict | list):
        raise ConfigError(
            f"holds {child!r}, which has no settings inside",
            where=where,
            fix=f"Set {where} itself.",
        )
    return child


def _index(node: list[Any], part: str, where: str) -> int:
    if part.isdecimal() and int(part) < len(node):
        return int(part)
    raise ConfigError(
        f"{part!r} is not a position in a list of {len(node)}",
        where=where,
        fix=f"Use 0 to {len(node) - 1}." if node else "",
    )
