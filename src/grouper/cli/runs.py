"""`grouper runs`: the runs of a folder."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from grouper.cli import options
from grouper.cli.commands import Command
from grouper.cli.text import show_json, table, warn, warn_of_losses
from grouper.errors import ConfigError, GrouperError
from grouper.runs.lock import is_running

if TYPE_CHECKING:
    from grouper.evaluation.result import EvaluationResult

EXAMPLES = """
grouper runs
grouper runs outputs --json
"""


@click.command("runs", cls=Command, examples=EXAMPLES)
@click.argument("folder", required=False, metavar="[FOLDER]")
@options.as_json
def runs(folder: str | None, *, as_json: bool) -> None:
    """List runs with their state, step and accuracy.

    Lists the runs in FOLDER (outputs by default), the latest last: whether each is running,
    stopped or finished, its last step, its accuracy on the test problems, and when it was last
    written. Resume a run by its name: grouper run --resume NAME.
    """
    from grouper.config.schema import Recipe
    from grouper.models.folders import RECIPE_FILE

    parent = Path(folder or Recipe.model_fields["output_dir"].default).expanduser()
    if not parent.is_dir():
        raise ConfigError("there is no folder of this name", where=str(parent))
    rows = []
    for path in sorted(entry for entry in parent.iterdir() if entry.is_dir()):
        # One of the two may be damaged, or a link to nothing.
        if os.path.lexists(path / RECIPE_FILE) or os.path.lexists(path / "run.json"):
            # A run may be deleted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                rows.append(_run(path))
    rows.sort(key=lambda row: row["when"])
    if as_json:
        show_json(rows)
    elif not rows:
        click.echo(f"There are no runs in {parent}.")
    else:
        columns = ("name", "state", "step", "accuracy %", "when")
        cells = [[_cell(row[name]) for name in columns] for row in rows]
        table(columns, cells)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _run(path: Path) -> dict[str, Any]:
    """Return a row of the list of runs."""
    from grouper.config.loading import load_recipe
    from grouper.models.folders import RECIPE_FILE
    from grouper.runs.folder import PHASES, RunFolder

    run = RunFolder(path)
    steps: list[dict[str, Any]] = []
    results: list[EvaluationResult] = []
    try:
        recipe = load_recipe(path / RECIPE_FILE)
        steps = run.metrics_rows()
        # Only the results on test problems: reading every validation takes seconds.
        by_phase = [run.read_evaluation(phase) for phase in PHASES]
        results = [result for result in by_phase if result is not None]
        state = "finished" if run.has_finished(recipe.phases) else "stopped"
        warn_of_losses(run)
    except GrouperError as error:
        # One damaged run does not stop the list.
        warn(error.paragraph())
        state = "damaged"
    if is_running(path):
        state = "running"
    # Hidden files, half-written ones and the lock, may be gone a moment later.
    files = [file for file in path.iterdir() if not file.name.startswith(".")]
    times = [file.lstat().st_mtime for file in files]
    last_time = max(times, default=path.stat().st_mtime)
    return {
        "name": path.name,
        "state": state,
        "step": "{phase} {step}".format_map(steps[-1]) if steps else None,
        "accuracy %": round(100 * results[-1].overall.mean, 1) if results else None,
        "when": datetime.fromtimestamp(last_time).astimezone().isoformat(" ", "minutes"),
    }
