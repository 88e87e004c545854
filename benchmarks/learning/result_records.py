"""Small records of real runs: what a page of results is made of, without weights and completions.

A record has everything that a claim rests on: the settings, the machine, each evaluation with every
problem's verdict, each validation, each step's rewards, and how long it took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import where
from grouper.evaluation.result import Accuracy, EvaluationResult
from grouper.evaluation.statistics import PairedComparison, paired_comparison
from grouper.runs.folder import RunFolder
from grouper.training.metrics import MAXRSS_BYTES

__all__ = [
    "accuracy_cell",
    "change_cell",
    "compare_records",
    "keep_record",
    "read_records",
    "record_of",
    "record_run",
    "run_grouper",
    "source_lines",
    "step_columns",
]

Record = dict[str, Any]

# What is kept of each step.
STEP_COLUMNS = (
    "loss",
    "reward/total",
    "solve_rate",
    "groups/mixed",
    "completion/tokens",
    "completion/truncated",
    "policy/entropy",
    "grad_norm",
    "time.step",
    "time.decode",
    "time.update",
    "time.trained_tokens_per_second",
    "time.sampled_tokens_per_second",
)


def run_grouper(command: Sequence[str], *, threads: int) -> Record:
    """Run `grouper COMMAND` in a process of its own.

    Returns:
        `seconds` of this process and `peak_bytes` of the memory that it held at most.

    Raises:
        SystemExit: it failed; its output has been shown.
    """
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    child = subprocess.Popen([sys.executable, "-m", "grouper", *command], env=environment)
    # Of this child alone: `RUSAGE_CHILDREN` has the largest of all children so far.
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(child.returncode)
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "peak_bytes": usage.ru_maxrss * MAXRSS_BYTES,
    }


def record_run(folder: Path, command: Sequence[str], *, threads: int) -> Record:
    """Run `grouper COMMAND --resume` and make the record of the run in `folder`.

    Seconds and peak memory are those of the whole run only where one process did all of it: they
    are left out where the run had begun before.
    """
    had_begun = folder.exists()
    used = run_grouper([*command, "--resume"], threads=threads)
    record = record_of(folder)
    if not had_begun:
        record |= used
    return record


def record_of(folder: Path) -> Record:
    """Read a finished run.

    Returns:
        `recipe` (as it was resolved), `machine`, `evaluations` by name, `validation` (phase ->
        step -> accuracy) and `steps` (phase -> column -> a number a step).
    """
    run = RunFolder(folder)
    evaluations = {}
    validation: dict[str, dict[str, Record]] = {}
    for result in run.read_evaluations():
        if result.split == "test":
            evaluations[result.name] = evaluation_record(result)
        else:
            curve = validation.setdefault(result.phase, {})
            curve[str(result.step)] = rounded(result.overall.numbers)
    return {
        "recipe": (folder / "recipe.yaml").read_text(encoding="utf-8"),
        "machine": {**where(), "threads": run.read_info().host["threads"]},
        "evaluations": evaluations,
        "validation": validation,
        "steps": step_columns(run),
    }


def evaluation_record(result: EvaluationResult) -> Record:
    """What one evaluation found; `right` has a character a problem, in the order of the data."""
    lenient = result.lenient
    metrics = result.metrics
    scores = result.scores.values()
    return {
        **rounded(result.overall.numbers),
        "lenient": None if lenient is None else rounded(lenient.numbers),
        "format": None if metrics is None else round(metrics.format_accuracy, 4),
        "cut_off": round(result.cut_off, 4),
        "mean_tokens": round(result.mean_tokens, 1),
        "outcomes": result.split_counts,
        "by_subject": parts(result.by_subject),
        "by_level": parts(result.by_level),
        "right": "".join(str(round(score)) for score in scores) if result.samples == 1 else "",
    }


def parts(accuracies: Mapping[str, Accuracy]) -> Record:
    return {name: rounded(accuracy.numbers) for name, accuracy in accuracies.items()}


def rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: round(number, 4) for name, number in numbers.items()}


def step_columns(run: RunFolder) -> dict[str, dict[str, list[float | None]]]:
    """Phase -> column -> the mean of each step; null where a step has none."""
    columns: dict[str, dict[str, list[float | None]]] = {}
    rows = run.metrics_rows()
    for phase in ("sft", "grpo"):
        of_phase = [row for row in rows if row["phase"] == phase]
        for name in (*STEP_COLUMNS, "elapsed_s"):
            values = [row.get(name) for row in of_phase]
            if any(value is not None for value in values):
                kept = columns.setdefault(phase, {})
                kept[name] = [None if value is None else float(f"{value:.4g}") for value in values]
    return columns


def read_records(file: Path) -> dict[str, Record]:
    """Read a file of records: name of a run -> its record; empty where there is no file."""
    if not file.exists():
        return {}
    records: dict[str, Record] = json.loads(file.read_text(encoding="utf-8"))
    return records


def keep_record(file: Path, name: str, record: Record) -> None:
    """Add a record to a file of records."""
    records = {**read_records(file), name: record}
    file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


# --- what a page says of them --------------------------------------------------------------------


def compare_records(before: Record, after: Record) -> PairedComparison:
    """Pair two evaluations of the same problems."""
    return paired_comparison(
        [float(verdict) for verdict in before["right"]],
        [float(verdict) for verdict in after["right"]],
    )


def accuracy_cell(evaluation: Record) -> str:
    """Accuracy with its interval, in per cent.

    >>> accuracy_cell({"accuracy": 0.379, "low": 0.32, "high": 0.4401})
    '37.9 [32.0, 44.0]'
    """
    return "{accuracy:.1%} [{low:.1%}, {high:.1%}]".format(**evaluation).replace("%", "")


def change_cell(paired: PairedComparison) -> str:
    """The change in points with its interval and what follows from it."""
    low, high = 100 * paired.interval.low, 100 * paired.interval.high
    points = f"{100 * paired.difference:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"{points}, {paired.verdict}"


def source_lines(records: Sequence[Record]) -> list[str]:
    """Machine, versions and commit of the records, each different one once."""
    lines = []
    for record in records:
        machine = record["machine"]
        commit, _, changes = machine["commit"].partition(" ")
        source = f"commit {commit[:10]} {changes}".rstrip()
        line = (
            f"{machine['cpu']}, {machine['threads']} thread(s), torch {machine['torch']}, "
            f"transformers {machine['transformers']}; {source}."
        )
        if line not in lines:
            lines.append(line)
    return lines
