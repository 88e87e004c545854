"""Names of other trainers: one table for flags, for hints in errors and for importers.

The table is `aliases.json`. A row of its `names` (TRL 1.16's own fields, with their `default` by
phase) and `others` has one of

- `to`: our key, in which `{phase}` is the phase that is configured; `values` maps their values
  to ours;
- `computed`: the keys that are computed from it and others; `same` where its value is usually
  theirs, `reward` where it is a parameter of that reward;
- `why`: there is no counterpart, and this is the reason;
- `now`: the row of its present name.

`flags` and `batches` are read by `cli/flags.py`, `messages` by `checks`. `former` has `key` or
`key=value` of older versions of Grouper, with what to write now: a key, which keeps the value that
the old one was given, `key=value`, or a sentence. A key without a dot stands for that name in any
section.
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
def tables() -> dict[str, Any]:
    """`aliases.json`."""
    file = importlib.resources.files("grouper.config") / "aliases.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


@cache
def aliases() -> dict[str, Row]:
    """The rows of other trainers' names, with underscores."""
    return {**tables()["names"], **tables()["others"]}


def alias(name: str) -> tuple[str, Row] | None:
    """The present name and its row, for a name in any spelling (`--max-steps`), or None."""
    name = name.lstrip("-").replace("-", "_")
    name = aliases().get(name, {}).get("now", name)
    return (name, aliases()[name]) if name in aliases() else None


def keys_of(row: Row, phase: str) -> list[str]:
    """The keys of the recipe that a row leads to; none where it has no counterpart."""
    keys = str(row.get("to") or row.get("computed") or "").format(phase=phase)
    return keys.split(", ") if keys else []


def word_of(value: Any) -> str:
    """How a row's `values` has a value: `true`, `none`, or as it is written."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


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


@cache
def of_set_ups() -> dict[str, Row]:
    """Names in files of other trainers that `aliases` lacks, with their section and without it."""
    every = (pair for table in dialects()[:-1] for pair in table["rows"].items())
    rows = {name: row for name, row in every if name not in aliases()}
    return {**{name.rpartition(".")[2]: row for name, row in rows.items()}, **rows}


def dialect_of(data: Mapping[Any, Any]) -> Row | None:
    """The dialect of a file, by its names and those below its headings; None if there is none."""
    levels = [data, *(value for value in data.values() if isinstance(value, Mapping))]
    names = {str(name) for level in levels for name in level}
    *systems, trl = dialects()
    found = (dialect for dialect in systems if names & {*dialect["marks"]})
    # Other trainers have a name or two in common with TRL.
    known = sum(alias(name) is not None for name in names)
    return next(found, trl if known > len(names) / 4 else None)
