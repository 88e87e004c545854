"""Completions and progress of a run, for a terminal; both only read the run folder."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from grouper.errors import RunFolderError
from grouper.evaluation.compare import label
from grouper.printable import printable
from grouper.report.panels import RunView, Series, panels_of
from grouper.runs.folder import RunFolder
from grouper.runs.lock import is_running
from grouper.tables import STYLES, Cell, Table, Tone, for_terminal, table
from grouper.types import FinishReason, Verdict

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

# Characters of a text, from its end, where the question or the answer is.
PROMPT = 600
COMPLETION = 3000
VERDICTS: Mapping[str, Tone] = {
    "correct": "good",
    "incorrect": "bad",
    "no_answer": "unsure",
    "truncated": "unsure",
}
# Points of a curve in `watch`: as many as fit into 80 columns.
POINTS = 16
# Characters of a curve's name.
NAME = 40
# Events below the curves.
EVENTS = 4
# A curve is drawn with these characters, from its lowest value to its highest.
_BLOCKS = "▁▂▃▄▅▆▇█"


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
    """Yield stored rollouts, the newest step first; a file is read when its first row is needed.

    Args:
        run: the run folder.
        step: yield the rollouts of this GRPO step alone.
        problem: yield those of problems whose id contains this text.
        verdict: yield those with this verdict alone.
        best: yield those of the newest step that has any, the highest reward first.
        worst: the same with the lowest first.

    Raises:
        RunFolderError: there are none.
    """
    stored = run.rollout_files()
    files = [file for _, number, file in stored if step in (None, number)]
    if not files:
        raise _no_rollouts(run, step, [number for _, number, _ in stored])
    for file in reversed(files):
        rows = _matching_rows(run, file, problem or "", verdict)
        if not best and not worst:
            yield from rows
            continue
        ranked = [row for row in rows if row["reward"] is not None]
        if ranked:
            yield from sorted(ranked, key=lambda row: float(row["reward"]), reverse=best)
            return


def _no_rollouts(run: RunFolder, step: int | None, stored_steps: Sequence[int]) -> RunFolderError:
    """Describe which rollouts are missing, and which are stored."""
    problem = "no rollouts are stored"
    state = "none has been done yet"
    if stored_steps:
        problem = f"{problem} of step {step}"
        state = f"there are those of steps {stored_steps[0]} to {stored_steps[-1]}"
    fix = f"Rollouts are written in each step of GRPO; {state}."
    return RunFolderError(problem, where=str(run.path), fix=fix)


def _matching_rows(run: RunFolder, file: Path, problem: str, verdict: str | None) -> Iterator[Row]:
    """Yield the rows of a file whose problem id contains a text and that have a verdict."""
    # Decoding JSON takes most of the time: lines without the id are skipped.
    needle = json.dumps(problem)[1:-1] if problem.isascii() else ""
    for row in _rows(run, file, needle):
        if problem in row["problem_id"] and verdict in (None, verdict_of(row)):
            yield row


def _rows(run: RunFolder, file: Path, needle: str) -> Iterator[Row]:
    """Yield the rows of a file that hold a text; a damaged end is reported and left out."""
    try:
        yield from run.shown_rollouts(file, needle)
    except RunFolderError as error:
        log.warning("%s", error.paragraph())


def verdict_of(row: Row) -> str:
    """Return the verdict of a row; without an answer, `truncated` where it met the token limit."""
    has_no_answer = row["verdict"] == Verdict.NO_ANSWER
    if has_no_answer and row["finish_reason"] == FinishReason.LENGTH:
        return "truncated"
    return str(row["verdict"])


def rollout_text(row: Row) -> Text:
    """Describe a rollout, without characters that steer a terminal."""
    rewards = row["rewards"] or {}
    components = ", ".join(f"{printable(name)} {_number(rewards[name])}" for name in rewards)
    step = printable(f"{row['phase']} step {row['step']}  ")
    problem = printable(row["problem_id"])
    verdict = verdict_of(row)
    reward = f"reward {_number(row['reward'])} ({components})"
    advantage = f"advantage {_number(row['advantage'])}"
    finish_reason = printable(row["finish_reason"]).replace("_", " ")
    extracted = _end(row["extracted"] or "nothing", 200)
    reference = _end(row["answer"], 200)
    reason = _end(row["reason"], 200)
    return Text.assemble(
        (step, "bold"),
        (verdict.replace("_", " "), STYLES[VERDICTS.get(verdict, "strong")]),
        f"  {problem}, sample {row['sample']}\n",
        f"{reward}  {advantage}  {row['tokens']} tokens, {finish_reason}\n",
        (_end(row["prompt"], PROMPT) + "\n", "dim"),
        _end(row["completion"], COMPLETION) + "\n",
        (f"read as {extracted}, the reference is ", "italic"),
        (f"{reference}: {reason}\n", "italic"),
    )


def changes(run: RunFolder, before: int, after: int, problem: str | None) -> Iterator[Table]:
    """Yield a table for each problem of two GRPO steps, their completions side by side.

    The problems are those of validation where both steps were evaluated, else those that both
    steps sampled.

    Raises:
        RunFolderError: the steps have no problem in common.
    """
    result_before = run.read_evaluation(f"validation-grpo-{before:06d}")
    result_after = run.read_evaluation(f"validation-grpo-{after:06d}")
    rows_before: Iterable[Row]
    rows_after: Iterable[Row]
    if result_before is not None and result_after is not None:
        rows_before = map(asdict, result_before.items)
        rows_after = map(asdict, result_after.items)
    else:
        rows_before = rollouts(run, step=before, problem=problem)
        rows_after = rollouts(run, step=after, problem=problem)
    sides = [_first_samples(rows_before, problem), _first_samples(rows_after, problem)]
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
        headers = []
        completions = []
        for step, side in zip((before, after), sides, strict=True):
            row = side[name]
            verdict = verdict_of(row)
            header = f"step {step}: {verdict.replace('_', ' ')}"
            headers.append(Cell(header, VERDICTS.get(verdict, "strong")))
            completions.append(_end(row["completion"], COMPLETION))
        title = f"{printable(name)}: the reference is {reference}"
        yield table(headers, [completions], title=title, lines=True)


def _first_samples(rows: Iterable[Row], problem: str | None) -> dict[str, Row]:
    """Return the first sample of each problem whose id contains a text."""
    samples: dict[str, Row] = {}
    for row in rows:
        if (problem or "") in row["problem_id"]:
            samples.setdefault(row["problem_id"], row)
    return samples


def _end(text: str, most: int) -> str:
    """Return the end of a text, with the number of characters before it."""
    omitted = len(text) - most
    if omitted > 0:
        text = f"[{omitted:,} characters] ... {text[-most:]}"
    return printable(text)


def _beginning(name: str) -> str:
    """Return the beginning of a long name."""
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


# --- grouper watch -------------------------------------------------------------------------------


def watch(run: RunFolder, console: Console, *, seconds: float) -> None:
    """Show how a run is doing until it ends; without a terminal once.

    Args:
        run: the run folder.
        console: the terminal.
        seconds: time between updates; at least four times as long as an update takes.
    """
    if console.is_terminal:
        with Live(frame(run), console=console, screen=True, auto_refresh=False) as live:
            while is_running(run.path):
                start = time.process_time()
                live.update(frame(run), refresh=True)
                update_seconds = time.process_time() - start
                # Reading a long run takes seconds: it must not take a whole core from the run.
                pause = max(seconds, 4 * update_seconds)
                time.sleep(pause)
    console.print(frame(run))


def frame(run: RunFolder) -> RenderableType:
    """Return state, progress, every curve with its first and last value, and the latest events."""
    try:
        view = RunView.of(run)
    except RunFolderError as error:
        # This happens while a file is being replaced.
        return Text(error.paragraph())
    rows = []
    current_phase = view.reports[-1].phase if view.reports else ""
    for panel in panels_of(view):
        if panel.phase == current_phase and not panel.stacked:
            for series in panel.series:
                name = f"{panel.title} {series.name}".strip()
                first, last, curve = _curve(series)
                rows.append((_beginning(name), first, last, curve))
    events: list[str] = []
    for report in view.reports:
        step = f"{report.phase} {report.step}"
        events += [f"{step}: {printable(event)}" for event in report.events]
    sample = next(rollouts(run), None) if run.rollout_files() else None
    return Group(
        Text(f"{printable(view.name)}: {_progress(view)}", style="bold"),
        for_terminal(table(("", "first", "now", ""), rows)),
        Text("\n".join(events[-EVENTS:]), style="yellow", overflow="ellipsis"),
        rollout_text(sample) if sample else Text("No rollout has been drawn yet."),
    )


def _progress(view: RunView) -> str:
    """Return the current step, and the remaining time of the phase."""
    state = "running" if is_running(view.folder.path) else "not running"
    if not view.reports:
        return f"{state}, no step has been done yet"
    report = view.reports[-1]
    steps = view.of_phase(report.phase)
    phase_settings = getattr(view.recipe, report.phase, None)
    total = getattr(phase_settings, "steps", None)
    text = f"{state}, {label(report.phase)} step {report.step}"
    if not total or "time.step" not in report.tallies:
        return text
    recent_steps = [step for step in steps[-20:] if "time.step" in step.tallies]
    seconds = [step.mean("time.step") for step in recent_steps]
    seconds_per_step = sum(seconds) / len(seconds)
    minutes_left = max(0, total - report.step) * seconds_per_step / 60
    return f"{text} of {total}, {seconds_per_step:.2f} s per step, {minutes_left:.0f} min to go"


def _curve(series: Series) -> tuple[str, str, str]:
    """Return the first value, the last value, and the curve as a line of characters."""
    thinned = replace(series, bounds=None).thinned(POINTS)
    low = float(thinned.values.min())
    high = float(thinned.values.max())
    size = (high - low) or 1.0
    curve = ""
    for value in thinned.values:
        level = int((value - low) / size * 7.999)
        curve += _BLOCKS[level]
    return f"{series.values[0]:.4g}", f"{series.values[-1]:.4g}", curve
