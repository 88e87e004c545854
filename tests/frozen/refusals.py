"""Every refusal that a user can cause with one command or one call: its paragraph, its exit code.

`python tests/frozen/refusals.py [ROW...]` records them in `refusals.json`, all or those named.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import refusals_of_data
import refusals_of_recipes
import refusals_of_runs
from frozen import choose, load, save
from frozen_calls import Row, done, make_tiny_run

ROWS: dict[str, Row] = {
    row.name: row
    for row in (*refusals_of_recipes.ROWS, *refusals_of_data.ROWS, *refusals_of_runs.ROWS)
}


def refusal(row: Row, folder: Path, tiny: Path | None) -> dict[str, Any]:
    """What is recorded of a row that is done in the new folder."""
    told = done(row, folder, tiny)
    return {"exit code": told.code, "text": told.err.splitlines()}


def record(names: Sequence[str]) -> None:
    """Record rows, all where none is named; the others stay as they were recorded."""
    recorded = load("refusals")
    with tempfile.TemporaryDirectory() as place:
        tiny = make_tiny_run(Path(place) / "run")
        for number, name in enumerate(choose(names, ROWS)):
            recorded[name] = refusal(ROWS[name], Path(place) / str(number), tiny)
    accepted = [name for name, told in recorded.items() if told["exit code"] == 0]
    assert not accepted, f"not refused: {accepted}"
    save("refusals", {name: recorded[name] for name in ROWS})


if __name__ == "__main__":
    record(sys.argv[1:])
