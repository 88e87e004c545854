"""Names of other trainers: one table for flags, for hints in errors and for importers.

The table is `aliases.json`. A row of its `names` (TRL 1.16's own fields, with their `default` by
phase) and `others` has one of

- `to`: our key, in which `{phase}` is the phase that is configured; `values` maps their values
  to ours;
- `computed`: the keys that are computed from it and others; `same` where its value is usually
  theirs;
- `why`: there is no counterpart, and this is the reason;
- `now`: the row of its present name.

A row of `flags` is a flag of the training commands, and `also` has its other names. It is shown
in `--help` where it has a `help`. It has

- `to`: the key that it sets, in which `{phases}` is each phase that runs; `values` as above;
- or `spells`: what it sets, for each value that it takes;
- or `of_trackers`: what it sets in every tracker;
- or none of these: `cli/flags.py` has a function for it;
- `first`: settings that everything else on the command line overrides;
- `text`: its value is never a number, `switch`: it needs no value, `list`: it takes several,
  `repeats`: it may be given more than once.

`batches` has the batch sizes of the five systems. `former` has `key` or `key=value` of older
versions of Grouper, with what to write now: a key, which keeps the value that the old one was
given, `key=value`, or a sentence. A key without a dot stands for that name in any section.
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
def _tables() -> dict[str, Any]:
    file = importlib.resources.files("grouper.config") / "aliases.json"
    tables: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return tables


@cache
def aliases() -> dict[str, Row]:
    """The rows of other trainers' names, with underscores."""
    return {**_tables()["names"], **_tables()["others"]}


def alias(name: str) -> tuple[str, Row] | None:
    """The present name and its row, for a name in any spelling (`--max-steps`), or None."""
    name = name.lstrip("-").replace("-", "_")
    row = aliases().get(name, {})
    name = row.get("now", name)
    return (name, aliases()[name]) if name in aliases() else None


def former() -> dict[str, str]:
    """What to write instead of settings of older versions of Grouper."""
    rows: dict[str, str] = _tables()["former"]
    return rows


def keys_of(row: Row, phase: str) -> list[str]:
    """The keys of the recipe that a row leads to; none where it has no counterpart."""
    keys = str(row.get("to") or row.get("computed") or "").format(phase=phase)
    return keys.split(", ") if keys else []


@cache
def dialects() -> tuple[Row, ...]:
    """The tables that files of other trainers are read by: `dialects/`, with TRL's last.

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
    """The dialect of a file, by its names and those below its headings; None if there is none."""
    levels = [data, *(value for value in data.values() if isinstance(value, Mapping))]
    names = {str(name) for level in levels for name in level}
    *systems, trl = dialects()
    found = (dialect for dialect in systems if names & {*dialect["marks"]})
    return next(found, trl if any(map(alias, names)) else None)


@cache
def flags() -> dict[str, Row]:
    """Flag, with dashes -> its row; an alias with `to` is a flag that help does not show."""
    table = dict(_tables()["flags"])
    for name, row in aliases().items():
        flag = flag_named(name)
        if "to" in row and flag not in table:
            default = next(iter(row.get("default", {}).values()), None)
            kind = {"switch": isinstance(default, bool), "text": isinstance(default, str)}
            table[flag] = {"to": row["to"], "values": row.get("values", {}), **kind}
    return table


def flag_named(name: str) -> str:
    """The flag of a name in any spelling, with dashes: `max-steps` of `steps` and `max_steps`.

    A name that no flag has comes back with dashes.
    """
    name = name.replace("_", "-")
    return _flag_of().get(name, name)


@cache
def _flag_of() -> dict[str, str]:
    """Other name -> flag."""
    older = {name: row["now"] for name, row in aliases().items() if "now" in row}
    found = {name.replace("_", "-"): now.replace("_", "-") for name, now in older.items()}
    for flag, row in _tables()["flags"].items():
        found |= dict.fromkeys(row.get("also", ()), flag)
    return found


def batch_of(system: str, phase: str) -> tuple[int, int]:
    """A system's batch size of a device and its accumulation steps, by its recipe's name.

    1 and 1 for any other recipe.
    """
    size, accumulation = _tables()["batches"].get(system, {}).get(phase, (1, 1))
    return size, accumulation
