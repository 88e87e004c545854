"""`grouper runs`, `report`, `show`, `watch`, `diagnose` and `env`: inspect runs and the machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import click

from grouper.cli.text import (
    definitions,
    output_console,
    show_blocks,
    show_json,
    table,
    warn,
    warn_of_losses,
)
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, GrouperError, installed, plural
from grouper.evaluation.result import EvaluationResult
from grouper.files import processors, require_writable
from grouper.models.folders import RECIPE_FILE
from grouper.runs.folder import PHASES, RunFolder
from grouper.runs.lock import is_running


def runs(folder: str | None, *, as_json: bool) -> None:
    """Print the runs of a folder, the latest last."""
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


def report(runs: tuple[str, ...], *, output: Path | None) -> None:
    """Write a report of runs as one HTML file, and print its path."""
    paths = {Path(run).expanduser().resolve() for run in runs}
    if len(paths) < len(runs):
        raise click.UsageError("the same run is named twice.")
    folders = [_opened(run) for run in runs]
    default = Path() if len(runs) > 1 else folders[0].path
    target = (output or default).expanduser()
    if target.is_dir():
        target = target / "report.html"
    require_writable(target.absolute(), "Name another file with --output.")
    from grouper.report.page import write_report

    written = write_report(folders, target)
    click.echo(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")


def show(
    run: str,
    *,
    step: int | None,
    problem: str | None,
    verdict: str | None,
    best: bool,
    worst: bool,
    diff: tuple[int, int] | None,
    count: int,
) -> None:
    """Print completions of training."""
    if best and worst:
        raise click.UsageError("--best and --worst are opposite orders: give one.")
    if diff is not None and (step is not None or verdict or best or worst):
        raise click.UsageError("--diff compares two steps: only --problem and -n go with it.")
    from grouper.report.terminal import changes, rollout_text, rollouts

    folder = _opened(run)
    if diff is not None:
        show_blocks([*itertools.islice(changes(folder, *diff, problem), count)])
        return
    rows = rollouts(folder, step=step, problem=problem, verdict=verdict, best=best, worst=worst)
    row = None
    for row in itertools.islice(rows, count):
        output_console().print(rollout_text(row), highlight=False)
    if row is None:
        click.echo("No rollout matches.")


def watch(run: str, *, every: float) -> None:
    """Show how a run is doing until it ends."""
    from rich.console import Console

    from grouper.report.terminal import watch as follow

    follow(_opened(run), Console(), seconds=every)


def _opened(run: str) -> RunFolder:
    """Open a run folder, which must exist; a warning names lost records."""
    folder = RunFolder(Path(run).expanduser())
    folder.read_info()
    warn_of_losses(folder)
    return folder


def diagnose(run: str, *, as_json: bool) -> int:
    """Print the findings; 1 if one of them is a fault."""
    from grouper.advice.checks import find, read_record

    record = read_record(Path(run).expanduser())
    warn_of_losses(record.folder)
    findings = find(record)
    for error in record.damaged:
        warn(f"left out: {error.paragraph()}")
    steps = {"sft": len(record.sft), "grpo": len(record.grpo)}
    if as_json:
        show_json({"run": run, "steps": steps, "findings": [*map(asdict, findings)]})
    else:
        done = [f"{plural(count, 'step')} of {phase}" for phase, count in steps.items() if count]
        click.echo(f"{run}: {', '.join(done)}")
        for finding in findings:
            first, last = finding.steps
            title = click.style(finding.name, bold=True)
            click.echo(f"\n{title} ({finding.phase} {first}-{last})")
            click.echo(f"  {finding.what}.\n  {finding.fix}")
        if not findings:
            click.echo("Nothing that Grouper knows of went wrong.")
    return int(any(finding.is_fault for finding in findings))


# --- grouper env ---------------------------------------------------------------------------------


def env(*, as_json: bool) -> None:
    """Print the facts for a bug report."""
    facts = _environment()
    if as_json:
        show_json(facts)
        return
    for title, rows in facts.items():
        definitions(rows.items(), title.capitalize())


def _environment() -> dict[str, dict[str, str]]:
    import torch

    from grouper.kernels.cpu.library import kernels_in_use
    from grouper.models.device import machine_memory

    versions = {"grouper-rl": version("grouper-rl"), "python": platform.python_version()}
    extras: dict[str, str] = {}
    for requirement in requires("grouper-rl") or ():
        package = re.findall(r"^[\w-]+", requirement)[0]
        package_version = installed(package)
        extra_match = re.search(r"extra == \W(\w+)", requirement)
        if extra_match is None:
            versions[package] = package_version
            continue
        extra = extra_match[1]
        if extra == "dev":
            continue
        text = f"{package} {package_version}"
        extras[extra] = f"{extras[extra]}, {text}" if extra in extras else text
    devices = {
        "system": platform.platform(),
        "cpu": f"{processors()} of {os.cpu_count()} processors, {torch.get_num_threads()} threads",
        "memory": f"{machine_memory() / 2**30:.1f} GiB",
    }
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB"
    if torch.backends.mps.is_available():
        devices["mps"] = "shares the memory"
    kernels = {"cpu": kernels_in_use()}
    return {"versions": versions, "devices": devices, "extras": extras, "kernels": kernels}
