"""`grouper runs`, `report`, `show`, `watch`, `diagnose` and `env`: what is there already."""

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

from grouper.cli.text import definitions, show_json, table, warn, warn_of_losses
from grouper.cli.text import show as print_rich
from grouper.config.loading import load_recipe
from grouper.config.schema import Recipe
from grouper.errors import ConfigError, GrouperError, counted, installed
from grouper.evaluation.result import EvaluationResult
from grouper.files import processors, require_writable
from grouper.models.folders import RECIPE_FILE
from grouper.runs.folder import PHASES, RunFolder
from grouper.runs.lock import is_running


def runs(folder: str | None, *, as_json: bool) -> None:
    """Print the runs of a folder, the latest last."""
    place = Path(folder or Recipe.model_fields["output_dir"].default).expanduser()
    if not place.is_dir():
        raise ConfigError("there is no folder of this name", where=str(place))
    found = []
    for path in sorted(entry for entry in place.iterdir() if entry.is_dir()):
        # One of the two may be damaged, or a link to nothing.
        if any(os.path.lexists(path / name) for name in (RECIPE_FILE, "run.json")):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                found.append(_run(path))
    found.sort(key=lambda row: row["when"])
    if as_json:
        show_json(found)
    elif not found:
        click.echo(f"There are no runs in {place}.")
    else:
        columns = ("name", "state", "step", "accuracy %", "when")
        rows = [["-" if row[n] is None else str(row[n]) for n in columns] for row in found]
        table(columns, rows, box=None)


def _run(path: Path) -> dict[str, Any]:
    """One row of the list of runs."""
    run = RunFolder(path)
    steps: list[dict[str, Any]] = []
    tested: list[EvaluationResult] = []
    try:
        recipe, steps = load_recipe(path / RECIPE_FILE), run.metrics_rows()
        # Those of a run on its test problems; reading every validation takes seconds.
        tested = [r for phase in PHASES if (r := run.read_evaluation(phase)) is not None]
        state = "finished" if run.has_finished(recipe.phases) else "stopped"
        warn_of_losses(run)
    except GrouperError as error:  # one of many: the others are listed anyway
        warn(error.paragraph())
        state = "damaged"
    state = "running" if is_running(path) else state
    # The others are gone a moment later, where a run goes on: half-written files, and its lock.
    files = [file for file in path.iterdir() if not file.name.startswith(".")]
    last = max((file.lstat().st_mtime for file in files), default=path.stat().st_mtime)
    return {
        "name": path.name,
        "state": state,
        "step": "{phase} {step}".format_map(steps[-1]) if steps else None,
        "accuracy %": round(100 * tested[-1].overall.mean, 1) if tested else None,
        "when": datetime.fromtimestamp(last).astimezone().isoformat(" ", "minutes"),
    }


def report(runs: tuple[str, ...], *, output: Path | None) -> None:
    """Write what runs hold as one HTML file, and print its path."""
    if len({Path(run).expanduser().resolve() for run in runs}) < len(runs):
        raise click.UsageError("the same run is named twice.")
    folders = [_opened(run) for run in runs]
    target = (output or (Path() if len(runs) > 1 else folders[0].path)).expanduser()
    target = target / "report.html" if target.is_dir() else target
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
    """Print what the model wrote in training."""
    if best and worst:
        raise click.UsageError("--best and --worst are opposite orders: give one.")
    if diff is not None and (step is not None or verdict or best or worst):
        raise click.UsageError("--diff compares two steps: only --problem and -n go with it.")
    from grouper.report.terminal import changes, in_words, rollouts

    folder = _opened(run)
    if diff is not None:
        print_rich(*itertools.islice(changes(folder, *diff, problem), count))
        return
    found = rollouts(folder, step=step, problem=problem, verdict=verdict, best=best, worst=worst)
    row = None
    for row in itertools.islice(found, count):
        print_rich(in_words(row))
    if row is None:
        click.echo("No rollout matches.")


def watch(run: str, *, every: float) -> None:
    """Show how a run is doing until it ends."""
    from rich.console import Console

    from grouper.report.terminal import watch as follow

    follow(_opened(run), Console(), seconds=every)


def _opened(run: str) -> RunFolder:
    """A run folder that exists; a warning names what it has lost."""
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
        done = ", ".join(f"{counted(n, 'step')} of {phase}" for phase, n in steps.items() if n)
        click.echo(f"{run}: {done}")
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
    """Print what a bug report needs."""
    facts = _environment()
    if as_json:
        show_json(facts)
    for title, rows in () if as_json else facts.items():
        definitions(rows.items(), title.capitalize())


def _environment() -> dict[str, dict[str, str]]:
    import torch

    from grouper.kernels.cpu.library import kernels_in_use
    from grouper.models.device import machine_memory

    versions = {"grouper-rl": version("grouper-rl"), "python": platform.python_version()}
    extras: dict[str, str] = {}
    for need in requires("grouper-rl") or ():
        package, extra = re.findall(r"^[\w-]+", need)[0], re.search(r"extra == \W(\w+)", need)
        found = installed(package)
        if extra is None:
            versions[package] = found
        elif extra[1] != "dev":
            extras[extra[1]] = ", ".join(filter(None, (extras.get(extra[1]), f"{package} {found}")))
    devices = {
        "system": platform.platform(),
        "cpu": f"{processors()} of {os.cpu_count()} processors, {torch.get_num_threads()} threads",
        "memory": f"{machine_memory() / 2**30:.1f} GiB",
    }
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{card.name}, {card.total_memory / 2**30:.1f} GiB"
    if torch.backends.mps.is_available():
        devices["mps"] = "shares the memory"
    kernels = {"cpu": kernels_in_use()}
    return {"versions": versions, "devices": devices, "extras": extras, "kernels": kernels}
