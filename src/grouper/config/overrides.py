"""Settings before they are a recipe: YAML as people write it, dotted keys, and names for several.

`load_recipe` and `Recipe.override` both go through here, so that a setting means the same in a
file, on the command line and in Python.

`grpo.algorithm: dapo` is a row of `presets.yaml`, `{name: "stack:gsm8k-xml"}` among the rewards one
of `stacks.yaml`. Both are expanded, so that the resolved recipe has every part. In Python:
`GRPOConfig(algorithm="dapo")`, `stack("gsm8k-xml")`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import yaml
from pydantic import TypeAdapter

from grouper.errors import ConfigError, RewardError, require_known
from grouper.files import table


class _Loader(yaml.SafeLoader):
    """`yaml.safe_load` that reads 5e-6 as a number, and refuses keys written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        places: dict[str, int] = {}
        for place, (key, _) in enumerate(node.value):
            if places.setdefault(str(key.value), place) != place:  # lists and mappings, too
                what = f"the key {key.value!r} is written twice"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot in the mantissa and a sign in the exponent; people write 5e-6 and 1e6.
_FLOAT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, as JSON has it: a date is text.

    What an alias names is copied: setting it in one place does not change the other.

    Raises:
        ConfigError: it is not YAML, has a key twice, a date as a key or too many aliases, or is
            nested too deeply; with the line if it is known.
    """
    try:
        if len(text) > _LONGEST_TEXT:
            raise ValueError(f"it has {len(text):,} characters: is it a file of data?")
        _require_few_copies(text)
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
        return json.loads(json.dumps(value, default=str))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        # ValueError: an impossible date, int() of more digits than Python reads, or aliases.
        # TypeError: a date as a key.
        what = getattr(error, "problem", None) or str(error).split(";")[0]
        what = "it is nested too deeply" if isinstance(error, RecursionError) else what
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}" if mark else where
        raise ConfigError(f"this is not valid YAML: {what}", where=place) from error


# Characters of a recipe: to read many more takes minutes.
_LONGEST_TEXT = 1_000_000
# Aliases of a recipe, and characters and values of it once each is replaced by what it names.
_MOST_ALIASES, _MOST_COPIED = 20, 1_000_000


def _require_few_copies(text: str) -> None:
    """Raise `ValueError` if the aliases of a text stand for more than anyone would write."""
    if "*" not in text:
        return
    aliases = (event for event in yaml.parse(text) if isinstance(event, yaml.AliasEvent))
    if len([*islice(aliases, _MOST_ALIASES + 1)]) > _MOST_ALIASES:
        raise ValueError(f"more than {_MOST_ALIASES} aliases")
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = (
                part for entry in inner for part in (entry if type(entry) is tuple else (entry,))
            )
            own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
            sizes[id(node)] = 1 + own + sum(map(size, parts))
        return sizes[id(node)]

    # Kept until the end: sizes are found by identity.
    root = yaml.compose(text, Loader=_Loader)
    if root is not None and size(root) > _MOST_COPIED:
        raise ValueError("its aliases stand for too much text")


def as_json(data: dict[str, Any], overrides: Sequence[str], *, where: str) -> str:
    """The settings with overrides, as JSON, stacks of rewards expanded; changes `data`.

    Args:
        data: the settings of a recipe, nested by section.
        overrides: `section.key=value`; later ones win.
        where: the file or recipe named in errors.

    Raises:
        ConfigError: an override that cannot be applied, or a value that JSON does not have.
        RewardError: as `expand_stacks`.
    """
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
        if not equals or not all(parts):
            raise ConfigError(f"{override!r} is not an override", fix="Write section.key=value.")
        put(data, parts, parse_yaml(value, override))
    if "rewards" in data:
        data["rewards"] = expand_stacks(data["rewards"])
    try:
        return json.dumps(data, allow_nan=False, default=str)
    except ValueError as error:
        raise ConfigError("a setting is infinite or not a number", where=where) from error


def changed(
    data: dict[str, Any], overrides: Sequence[str], sections: Mapping[str, Any], *, where: str
) -> str:
    """The settings of a loaded recipe with changes, as JSON: first `sections`, then overrides.

    Args:
        data: what the recipe has set; may be changed.
        overrides: `section.key=value`; later ones win.
        sections: nested settings, merged into what is there; a section object counts as what was
            set on it.
        where: the recipe named in errors.

    Raises:
        ConfigError, RewardError: as `as_json`.
    """
    section = data.get("grpo", {})
    # The parts of the algorithm are filled in again: the changes may name another one.
    parts = PRESETS.get(section.get("algorithm"), {}).items()
    data["grpo"] = {key: value for key, value in section.items() if (key, value) not in parts}
    # Sections as what was set on them, also inside lists; numbers of NumPy as numbers.
    new = TypeAdapter(Any).dump_python(sections, mode="json", exclude_unset=True, fallback=_plain)
    return as_json(_merged(data, new), overrides, where=where)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(type(value), "tolist") else str(value)


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def put(data: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set a value in place, at the key of these parts.

    Sections on the way are made, and so is a list, if its entry 0 is what is set.

    Raises:
        ConfigError: a part is no position of a list, or lies inside what is no section.
    """
    node: Any = data
    for position, part in enumerate(parts, start=1):
        where = ".".join(parts[:position])
        key: Any = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                what = f"{part!r} is not a position in a list of {len(node)}, counted from 0"
                raise ConfigError(what, where=where)
            key = int(part)
        if position == len(parts):
            inside = value
        elif isinstance(node, dict) and node.get(key) is None:
            inside = [{}] if parts[position] == "0" else {}
        elif isinstance(node, list) and isinstance(node[key], str):  # a reward by its name
            inside = {"name": node[key]}
        elif isinstance(node[key], dict | list):
            inside = node[key]
        else:
            what = f"holds {node[key]!r}, which has no settings inside"
            raise ConfigError(what, where=where, fix=f"Set {where} itself.")
        node[key] = inside
        node = inside


# --- names that stand for several settings -------------------------------------------------------

PREFIX = "stack:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Rewards that belong together; see `stacks.yaml`."""

    description: str
    format: str
    rewards: Sequence[dict[str, Any]]
    fails: Sequence[str] = ()


# Algorithm -> the settings of `grpo` that it stands for.
PRESETS: dict[str, dict[str, Any]] = table("grouper.config", "presets.yaml")
STACKS = {name: Stack(**row) for name, row in table("grouper.config", "stacks.yaml").items()}


def named_stack(name: str) -> Stack:
    """The stack of that name.

    Raises:
        RewardError: there is none.
    """
    require_known("stack", name, STACKS, where="rewards", error=RewardError)
    return STACKS[name]


def expand_stacks(entries: Any) -> Any:
    """A recipe's raw `rewards` with every name and every `stack:name` expanded.

    A reward may be its name alone, and so may the whole list. The weight of a stack scales all of
    its rewards. Anything else is left to the schema.

    Raises:
        RewardError: no such stack, or a setting other than `weight` beside it.

    >>> expand_stacks([{"name": "stack:math-r1-zero", "weight": 2}])
    [{'name': 'r1_zero_answer', 'weight': 2.0}, {'name': 'r1_zero_format', 'weight': 0.0}]
    >>> expand_stacks("accuracy")
    [{'name': 'accuracy'}]
    """
    rows = [entries] if isinstance(entries, str) else entries
    if not isinstance(rows, list):
        return rows
    return [inner for row in rows for inner in _expanded(row)]


def _expanded(entry: Any) -> Sequence[Any]:
    if isinstance(entry, str):
        entry = {"name": entry}
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return [entry]
    weight = entry.get("weight", 1.0)
    if entry.keys() - {"name", "weight"} or not isinstance(weight, int | float):
        what = f"{name} takes a number as its weight and nothing else"
        fix = f"`grouper rewards show {name}` prints its entries: copy and change those."
        raise RewardError(what, where="rewards", fix=fix)
    rows = named_stack(name.removeprefix(PREFIX)).rewards
    return [{**row, "weight": weight * row.get("weight", 1.0)} for row in rows]
