"""Names of other trainers: one table for flags, for hints in errors and for importers.

The table is `aliases.json`. A row of its `names` (TRL 1.16's own fields, with their `default` by
phase) and `others` has one of

- `to`: our key, in which `{phase}` is the phase that is configured; `values` maps their values
  to ours;
- `computed`: the keys that are computed from it and others; `same` where its value is usually
  theirs, `reward` where it is a parameter of that reward;
- `why`: there is no counterpart, and this is the reason;
- `now`: the row of its present name.

`flags` and `batches` are read by `cli/flags.py`, `messages` by `checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from grouper.files import read_json, table

Row = dict[str, Any]

# Files of `dialects/`, TRL's last: a name that has no row in another has TRL's.
_DIALECTS = ("math-r1-zero", "openmath-dapo", "trl")


@cache
def tables() -> dict[str, Any]:
    """`aliases.json`."""
    return read_json(Path(__file__).with_name("aliases.json"), "a table of names")


@cache
def aliases() -> dict[str, Row]:
    """The rows of other trainers' names, with underscores."""
    return {**tables()["names"], **tables()["others"]}


def plain_name(name: Any) -> str:
    """A name without dashes: `max_steps` of `--max-steps`."""
    return str(name).lstrip("-").replace("-", "_")


def alias(name: str) -> Row | None:
    """The row of a name in any spelling (`--max-steps`), or of what it is called now, or None."""
    name = plain_name(name)
    return aliases().get(aliases().get(name, {}).get("now", name))


def word_of(value: Any) -> str:
    """How a row's `values` has a value: `true`, `none`, or as it is written."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


@cache
def dialects() -> tuple[Row, ...]:
    """The tables that files of other trainers are read by, each with a row for every name."""
    *systems, trl = (table("grouper.config", f"dialects/{name}.yaml") for name in _DIALECTS)
    for name, row in trl["rows"].items():
        row.setdefault("default", aliases().get(name, {}).get("default", {}))
    for dialect, shared in [(trl, aliases()), *((system, trl["rows"]) for system in systems)]:
        dialect["rows"] |= {n: row for n, row in shared.items() if n not in dialect["rows"]}
    return (*systems, trl)


@cache
def of_set_ups() -> dict[str, Row]:
    """The rows of names in files of other trainers, with their section and without it."""
    rows = {name: row for dialect in dialects()[:-1] for name, row in dialect["rows"].items()}
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
