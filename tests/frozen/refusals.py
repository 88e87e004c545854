"""Every refusal that a user can cause with one command or one call: its paragraph, its exit code.

`python tests/frozen/refusals.py` records them again in `refusals.json`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import refusals_of_data
import refusals_of_recipes
import refusals_of_runs
from frozen import save
from frozen_calls import Row, done, make_tiny_run

ROWS: dict[str, Row] = {
    row.name: row
    for row in (*refusals_of_recipes.ROWS, *refusals_of_data.ROWS, *refusals_of_runs.ROWS)
}


def refusal(row: Row, folder: Path, tiny: Path | None) -> dict[str, Any]:
    """What is recorded of a row that is done in the new folder."""
    told = done(row, folder, tiny)
    return {"exit code": told.code, "text": told.err.splitlines()}


def record() -> None:
    with tempfile.TemporaryDirectory() as place:
        tiny = make_tiny_run(Path(place) / "run")
        recorded = {
            name: refusal(row, Path(place) / str(number), tiny)
            for number, (name, row) in enumerate(ROWS.items())
        }
    accepted = [name for name, told in recorded.items() if told["exit code"] == 0]
    assert not accepted, f"not refused: {accepted}"
    save("refusals", recorded)


if __name__ == "__main__":
    record()
