"""Names of other trainers: one table for flags, for hints in errors and for importers.

The table is `aliases.json`. A row of its `names` (TRL 1.16's own fields, with their `default` by
phase) and `others` has one of

- `to`: our key, in which `{phase}` is the phase that is configured; `values` maps their values
  to ours;
- `computed`: the keys that are computed from it and others; `same` where its value is usually
  theirs, `reward` where it is a parameter of that reward;
- `why`: there is no counterpart, and this is the reason;
- `now`: the row of its present name.

`flags` and `batches` are read by `flags.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from grouper.files import load_table, read_json

Row = dict[str, Any]

# Files of `dialects/`, TRL's last: a name that has no row in another has TRL's.
_DIALECTS = ("math-r1-zero", "openmath-dapo", "trl")


@cache
def tables() -> dict[str, Any]:
    """Read `aliases.json`."""
    path = Path(__file__).with_name("aliases.json")
    return read_json(path, "a table of names")


@cache
def aliases() -> dict[str, Row]:
    """Return the rows of other trainers' names, with underscores."""
    trl_names = tables()["names"]
    other_names = tables()["others"]
    return {**trl_names, **other_names}


def plain_name(name: Any) -> str:
    """Return a name without dashes: `max_steps` of `--max-steps`."""
    text = str(name).lstrip("-")
    return text.replace("-", "_")


def alias(name: str) -> Row | None:
    """Find the row of a name in any spelling (`--max-steps`), or of its present name, or None."""
    name = plain_name(name)
    row = aliases().get(name, {})
    present_name = row.get("now", name)
    return aliases().get(present_name)


def word_of(value: Any) -> str:
    """Spell a value as a row's `values` does: `true`, `none`, or as it is written."""
    text = str(value)
    if isinstance(value, bool | None):
        return text.lower()
    return text


@cache
def dialects() -> tuple[Row, ...]:
    """Read the tables of other trainers' files, each with a row for every name."""
    *systems, trl = [load_table("grouper.compat", f"dialects/{name}.yaml") for name in _DIALECTS]
    for name, row in trl["rows"].items():
        defaults = aliases().get(name, {}).get("default", {})
        row.setdefault("default", defaults)
    _add_missing_rows(trl, aliases())
    for system in systems:
        _add_missing_rows(system, trl["rows"])
    return (*systems, trl)


def _add_missing_rows(dialect: Row, shared_rows: Mapping[str, Row]) -> None:
    """Add the shared rows of names for which a dialect has no row of its own."""
    for name, row in shared_rows.items():
        dialect["rows"].setdefault(name, row)


@cache
def of_set_ups() -> dict[str, Row]:
    """Return the rows of names in files of other trainers, with their section and without it."""
    full_names: dict[str, Row] = {}
    for dialect in dialects()[:-1]:
        full_names |= dialect["rows"]
    short_names: dict[str, Row] = {}
    for name, row in full_names.items():
        short_name = name.rpartition(".")[2]
        short_names[short_name] = row
    # A full name wins over a short one that is spelled the same.
    return short_names | full_names


def dialect_of(data: Mapping[Any, Any]) -> Row | None:
    """Recognize the dialect of a file by its names and those below its headings, or return None."""
    names = {str(name) for name in data}
    for value in data.values():
        if isinstance(value, Mapping):
            names.update(str(name) for name in value)
    *systems, trl = dialects()
    for dialect in systems:
        marks = set(dialect["marks"])
        if names & marks:
            return dialect
    # Other trainers have a name or two in common with TRL.
    alias_count = sum(alias(name) is not None for name in names)
    return trl if alias_count > len(names) / 4 else None
