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
from functools import cache
from typing import Any

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
