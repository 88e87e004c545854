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
from typing import Any

import yaml
from pydantic import TypeAdapter

from grouper.errors import ConfigError, RewardError, require_known
from grouper.files import load_table


class _Loader(yaml.SafeLoader):
    """`yaml.safe_load` that reads 5e-6 as a number, and refuses keys written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            # A key may be a list or a mapping, which has no hash: its text does.
            key = str(key_node.value)
            if key in keys:
                problem = f"the key {key_node.value!r} is written twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot in the mantissa and a sign in the exponent; people write 5e-6 and 1e6.
_FLOAT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text to a value that JSON can hold: a date is text.

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
        if isinstance(error, RecursionError):
            problem = "it is nested too deeply"
        else:
            first_clause = str(error).split(";")[0]
            problem = getattr(error, "problem", None) or first_clause
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}" if mark else where
        raise ConfigError(f"this is not valid YAML: {problem}", where=place) from error


# Characters of a recipe: to read many more takes minutes.
_LONGEST_TEXT = 1_000_000
_MOST_ALIASES = 20
# Characters and values of a recipe, once each alias is replaced by what it names.
_MOST_COPIED = 1_000_000


def _require_few_copies(text: str) -> None:
    """Raise `ValueError` if the aliases of a text stand for more than anyone would write."""
    if "*" not in text:
        return
    alias_count = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):
            alias_count += 1
        if alias_count > _MOST_ALIASES:
            raise ValueError(f"more than {_MOST_ALIASES} aliases")
    # Kept until the end: sizes are looked up by identity.
    root = yaml.compose(text, Loader=_Loader)
    if root is not None and _expanded_size(root, {}) > _MOST_COPIED:
        raise ValueError("its aliases stand for too much text")


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Count the characters and values of a node, every alias replaced by what it names.

    Args:
        node: the root of a tree in which an alias is the node that it names.
        sizes: id of a node -> its size; sizes that are computed are added.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    size = 1
    if isinstance(node, yaml.ScalarNode):
        size += len(node.value)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            size += _expanded_size(key, sizes)
            size += _expanded_size(value, sizes)
    elif isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            size += _expanded_size(entry, sizes)
    sizes[id(node)] = size
    return size


def as_json(data: dict[str, Any], overrides: Sequence[str], *, where: str) -> str:
    """Apply overrides to settings, expand stacks of rewards, and return JSON; changes `data`.

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
        # `rewards[0].weight` is the same key as `rewards.0.weight`.
        dotted_key = re.sub(r"\[(\d+)\]", r".\1", key.strip())
        names = dotted_key.split(".")
        if not equals or not all(names):
            raise ConfigError(f"{override!r} is not an override", fix="Write section.key=value.")
        put(data, names, parse_yaml(value, override))
    if "rewards" in data:
        data["rewards"] = expand_stacks(data["rewards"])
    try:
        return json.dumps(data, allow_nan=False, default=str)
    except ValueError as error:
        raise ConfigError("a setting is infinite or not a number", where=where) from error


def changed(
    data: dict[str, Any], overrides: Sequence[str], sections: Mapping[str, Any], *, where: str
) -> str:
    """Change the settings of a loaded recipe, first by `sections`, then by overrides; return JSON.

    Args:
        data: the settings of the recipe that are set; may be changed.
        overrides: `section.key=value`; later ones win.
        sections: nested settings, merged into those of the recipe; a section object counts as
            the settings that were set on it.
        where: the recipe named in errors.

    Raises:
        ConfigError, RewardError: as `as_json`.
    """
    grpo = data.get("grpo", {})
    # The settings of the algorithm are filled in again: the changes may name another one.
    preset_items = PRESETS.get(grpo.get("algorithm"), {}).items()
    data["grpo"] = dict(item for item in grpo.items() if item not in preset_items)
    # Sections become the settings that are set on them, also inside lists.
    adapter = TypeAdapter(Any)
    changes = adapter.dump_python(sections, mode="json", exclude_unset=True, fallback=_plain)
    merged = _merged(data, changes)
    return as_json(merged, overrides, where=where)


def _plain(value: Any) -> Any:
    """Return a number or an array of NumPy as JSON has it, anything else as text."""
    if hasattr(type(value), "tolist"):
        return value.tolist()
    return str(value)


def _merged(old: Any, new: Any) -> Any:
    """Merge nested settings into others; the new ones win."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    merged = dict(old)
    for key, value in new.items():
        merged[key] = _merged(old.get(key), value)
    return merged


def put(data: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set a value in place, at the key of these parts.

    Sections on the way are created, and so is a list, if its entry 0 is set.

    Raises:
        ConfigError: a part is no position of a list, or lies inside what is no section.
    """
    node: Any = data
    for position, part in enumerate(parts, start=1):
        where = ".".join(parts[:position])
        key: Any = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                problem = f"{part!r} is not a position in a list of {len(node)}, counted from 0"
                raise ConfigError(problem, where=where)
            key = int(part)
        if position == len(parts):
            inner = value
        elif isinstance(node, dict) and node.get(key) is None:
            inner = [{}] if parts[position] == "0" else {}
        elif isinstance(node, list) and isinstance(node[key], str):
            # A reward may be written as its name alone.
            inner = {"name": node[key]}
        elif isinstance(node[key], dict | list):
            inner = node[key]
        else:
            problem = f"holds {node[key]!r}, which has no settings inside"
            raise ConfigError(problem, where=where, fix=f"Set {where} itself.")
        node[key] = inner
        node = inner


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
PRESETS: dict[str, dict[str, Any]] = load_table("grouper.config", "presets.yaml")
STACKS = {name: Stack(**row) for name, row in load_table("grouper.config", "stacks.yaml").items()}


def named_stack(name: str) -> Stack:
    """Return the stack of that name.

    Raises:
        RewardError: there is none.
    """
    require_known("stack", name, STACKS, where="rewards", error=RewardError)
    return STACKS[name]


def expand_stacks(entries: Any) -> Any:
    """Expand every name and every `stack:name` in a recipe's raw `rewards`.

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
    expanded_rows: list[Any] = []
    for row in rows:
        expanded_rows += _expanded(row)
    return expanded_rows


def _expanded(entry: Any) -> Sequence[Any]:
    """Expand one entry of `rewards`: a stack to its rewards, a name to a reward."""
    if isinstance(entry, str):
        entry = {"name": entry}
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return [entry]
    weight = entry.get("weight", 1.0)
    if entry.keys() - {"name", "weight"} or not isinstance(weight, int | float):
        problem = f"{name} takes a number as its weight and nothing else"
        fix = f"`grouper rewards show {name}` prints its entries: copy and change those."
        raise RewardError(problem, where="rewards", fix=fix)
    scaled_rows = []
    for row in named_stack(name.removeprefix(PREFIX)).rewards:
        scaled_weight = weight * row.get("weight", 1.0)
        scaled_rows.append({**row, "weight": scaled_weight})
    return scaled_rows
