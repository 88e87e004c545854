"""Names of other trainers: one table for flags, for hints in errors and for importers.

The table is `aliases.json`. A row of it has one of

- `to`: our key, in which `{phase}` is the phase that it is said for; `values` where theirs have
  other names here;
- `computed`: the keys that it takes part in;
- `why`: there is no counterpart, and this is the reason;
- `now`: the row that has its present name.

Rows of TRL 1.16's own fields have their `default` by phase.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

Row = dict[str, Any]


@cache
def aliases() -> dict[str, Row]:
    """Every row by its name, in underscores."""
    file = importlib.resources.files("grouper.config") / "aliases.json"
    table = json.loads(file.read_text(encoding="utf-8"))
    return {**table["names"], **table["others"]}


def alias(name: str) -> tuple[str, Row] | None:
    """The present name and its row, for a name in any spelling (`--max-steps`), or None."""
    name = name.lstrip("-").replace("-", "_")
    row = aliases().get(name, {})
    name = row.get("now", name)
    return (name, aliases()[name]) if name in aliases() else None


def keys_of(row: Row, phase: str) -> list[str]:
    """The keys of the recipe that a row leads to; none where it has no counterpart."""
    keys = str(row.get("to") or row.get("computed") or "").format(phase=phase)
    return keys.split(", ") if keys else []


@cache
def dialects() -> tuple[Row, ...]:
    """What files of other trainers are read by: one of `dialects/` each, TRL's last.

    A name that has no row in it has TRL's.
    """
    folder = importlib.resources.files("grouper.config") / "dialects"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    *systems, trl = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in files)
    for name, row in trl["rows"].items():
        row.setdefault("default", aliases().get(name, {}).get("default", {}))
    for table, shared in [(trl, aliases()), *((system, trl["rows"]) for system in systems)]:
        table["rows"] |= {name: row for name, row in shared.items() if name not in table["rows"]}
    return (*systems, trl)


def dialect_of(data: Mapping[Any, Any]) -> Row | None:
    """The dialect of a file, by its names and those below its headings; None where it has none."""
    levels = [data, *(value for value in data.values() if isinstance(value, Mapping))]
    names = {str(name) for level in levels for name in level}
    *systems, trl = dialects()
    found = (dialect for dialect in systems if names & {*dialect["marks"]})
    return next(found, trl if any(map(alias, names)) else None)
