"""What the model wrote and how a run is doing, for a terminal; both only read the run folder."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grouper.errors import RunFolderError
from grouper.evaluation.compare import label
from grouper.report.panels import RunView, Series, panels_of
from grouper.runs.folder import RunFolder
from grouper.runs.lock import is_running
from grouper.runs.samples import printable

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

# Characters of a text, from its end, where the question or the answer is.
PROMPT, COMPLETION = 600, 3000
VERDICTS = {"correct": "bold green", "incorrect": "bold red", "no_answer": "bold yellow"}
# In `watch`: points of a curve, all of which 80 columns show, characters of its name, and events.
POINTS, NAME, EVENTS = 16, 40, 4


# --- grouper show --------------------------------------------------------------------------------


def rollouts(
    run: RunFolder,
    *,
    step: int | None = None,
    problem: str | None = None,
    verdict: str | None = None,
    best: bool = False,
    worst: bool = False,
) -> Iterator[Row]:
    """Stored rollouts, the newest step first; a file is read when its first row is asked for.

    Args:
        run: the run folder.
        step: of this GRPO step alone.
        problem: of the problems whose id has this in it.
        verdict: with this verdict alone.
        best: of the newest step that has any: the highest reward first.
        worst: the same with the lowest first.

    Raises:
        RunFolderError: there are none.
    """
    files = run.rollout_files()
    wanted = [(number, file) for _, number, file in files if step in (None, number)]
    if not wanted:
        known = f"there are those of steps {files[0][1]} to {files[-1][1]}" if files else ""
        raise RunFolderError(
            "no rollouts are stored" + (f" of step {step}" if files else ""),
            where=str(run.path),
            fix=f"Rollouts are written in each step of GRPO; {known or 'none has been done yet'}.",
        )
    # Decoding JSON takes most of the time: a line without the id is not worth it.
    needle = json.dumps(problem or "")[1:-1] if (problem or "").isascii() else ""
    for _, file in reversed(wanted):
        found = (
            row
            for row in _rows(run, file, needle)
            if (problem or "") in row["problem_id"] and verdict in (None, row["verdict"])
        )
        if not best and not worst:
            yield from found
        elif ranked := [row for row in found if row["reward"] is not None]:
            yield from sorted(ranked, key=lambda row: float(row["reward"]), reverse=best)
            return


def _rows(run: RunFolder, file: Path, needle: str) -> Iterator[Row]:
    """The rows of a file that hold a text; a damaged end is reported and left out."""
    try:
        yield from run.shown_rollouts(file, needle)
    except RunFolderError as error:
        log.warning("%s", error.paragraph())


def in_words(row: Row) -> Text:
    """A rollout for people, without anything that steers their terminal."""
    rewards = (row["rewards"] or {}).items()
    parts = ", ".join(f"{printable(name)} {_number(v)}" for name, v in rewards)
    verdict = row["verdict"]
    return Text.assemble(
        (printable(f"{row['phase']} step {row['step']}  "), "bold"),
        (verdict.replace("_", " "), VERDICTS.get(verdict, "bold")),
        f"  {printable(row['problem_id'])}, sample {row['sample']}\n",
        f"reward {_number(row['reward'])} ({parts})  advantage {_number(row['advantage'])}  "
        f"{row['tokens']} tokens, {printable(row['finish_reason']).replace('_', ' ')}\n",
        (_end(row["prompt"], PROMPT) + "\n", "dim"),
        _end(row["completion"], COMPLETION) + "\n",
        (f"read as {_end(row['extracted'] or 'nothing', 200)}, the reference is ", "italic"),
        (f"{_end(row['answer'], 200)}: {_end(row['reason'], 200)}\n", "italic"),
    )


def changes(run: RunFolder, before: int, after: int, problem: str | None) -> Iterator[Table]:
    """The same problems at two GRPO steps, side by side.

    Validation problems where both steps were evaluated, else problems that were drawn in both.

    Raises:
        RunFolderError: the steps have no problem in common.
    """
    names = [f"validation-grpo-{step:06d}" for step in (before, after)]
    evaluated = [result for name in names if (result := run.read_evaluation(name)) is not None]
    if len(evaluated) == len(names):
        rows: list[Iterable[Row]] = [map(asdict, result.items) for result in evaluated]
    else:
        rows = [rollouts(run, step=step, problem=problem) for step in (before, after)]
    sides: list[dict[str, Row]] = [{}, {}]
    for side, found in zip(sides, rows, strict=True):
        for row in found:  # the first sample of each problem
            if (problem or "") in row["problem_id"]:
                side.setdefault(row["problem_id"], row)
    common = [name for name in sides[0] if name in sides[1]]
    if not common:
        raise RunFolderError(
            f"steps {before} and {after} have no problem in common",
            where=str(run.path),
            fix="A problem is drawn again in a later epoch; validation problems are the same at "
            "every evaluation: name two steps that were evaluated.",
        )
    for name in common:
        reference = _end(sides[0][name]["answer"], 80)
        table = Table(title=Text(f"{printable(name)}: the reference is {reference}"))
        for step, side in zip((before, after), sides, strict=True):
            verdict = side[name]["verdict"]
            style = VERDICTS.get(verdict, "bold")
            table.add_column(Text(f"step {step}: {verdict.replace('_', ' ')}", style), ratio=1)
        table.add_row(*(Text(_end(side[name]["completion"], COMPLETION)) for side in sides))
        yield table


def _end(text: str, most: int) -> str:
    left = len(text) - most
    return printable(text if left <= 0 else f"[{left:,} characters] ... {text[-most:]}")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


# --- grouper watch -------------------------------------------------------------------------------


def watch(run: RunFolder, console: Console, *, seconds: float) -> None:
    """Show how a run is doing until it ends; without a terminal once.

    Args:
        run: the run folder.
        console: where.
        seconds: between updates, or four times as long as an update takes if that is more.
    """
    if console.is_terminal:
        with Live(frame(run), console=console, screen=True, auto_refresh=False) as live:
            while is_running(run.path):
                started = time.process_time()
                live.update(frame(run), refresh=True)
                # Reading a long run takes seconds: it is not to take a whole core from the run.
                time.sleep(max(seconds, 4 * (time.process_time() - started)))
    console.print(frame(run))


def frame(run: RunFolder) -> RenderableType:
    """State, progress, every curve with its first and last value, and the latest events."""
    try:
        view = RunView.of(run)
    except RunFolderError as error:  # a file is being replaced
        return Text(error.paragraph())
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(max_width=NAME, no_wrap=True)
    table.add_column("first", justify="right", min_width=9)
    table.add_column("now", justify="right", min_width=9)
    table.add_column(no_wrap=True)
    last = view.reports[-1].phase if view.reports else ""
    for panel in panels_of(view):
        if panel.phase == last and not panel.stacked:
            for series in panel.series:
                table.add_row(*map(Text, _curve(f"{panel.title} {series.name}".strip(), series)))
    events = [f"{r.phase} {r.step}: {printable(e)}" for r in view.reports for e in r.events]
    sample = next(rollouts(run), None) if run.rollout_files() else None
    return Group(
        Text(f"{printable(view.name)}: {_progress(view)}", style="bold"),
        table,
        Text("\n".join(events[-EVENTS:]), style="yellow", overflow="ellipsis"),
        in_words(sample) if sample else Text("No rollout has been drawn yet."),
    )


def _progress(view: RunView) -> str:
    """Which step it is at, and how long the rest of the phase takes."""
    state = "running" if is_running(view.folder.path) else "not running"
    if not view.reports:
        return f"{state}, no step has been done yet"
    report = view.reports[-1]
    steps = view.of_phase(report.phase)
    total = getattr(getattr(view.recipe, report.phase, None), "steps", None)
    text = f"{state}, {label(report.phase)} step {report.step}"
    if not total or "time.step" not in report.tallies:
        return text
    recent = [r.mean("time.step") for r in steps[-20:] if "time.step" in r.tallies]
    each = sum(recent) / len(recent)
    left = max(0, total - report.step) * each
    return f"{text} of {total}, {each:.2f} s per step, {left / 60:.0f} min to go"


def _curve(name: str, series: Series) -> tuple[str, str, str, str]:
    thin = replace(series, bounds=None).thinned(POINTS)
    low, high = float(thin.values.min()), float(thin.values.max())
    blocks = "▁▂▃▄▅▆▇█"
    size = (high - low) or 1.0
    line = "".join(blocks[int((value - low) / size * 7.999)] for value in thin.values)
    return name, f"{series.values[0]:.4g}", f"{series.values[-1]:.4g}", line
