"""The tables of the page: results, findings, parts of the problems, recipe and environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grouper.errors import DataError, RunFolderError
from grouper.evaluation.compare import label
from grouper.evaluation.result import EvaluationResult
from grouper.evaluation.result_tables import (
    answers_table,
    curve_tables,
    metrics_table,
    part_tables,
    result_blocks,
)
from grouper.report.completions import cut
from grouper.report.facts import held_out_results
from grouper.report.panels import RunView
from grouper.runs.contamination_blocks import contamination_blocks
from grouper.runs.records import describe_changes, flat_settings, numbers_in_words
from grouper.tables import Block, Cell, Line, Tone, table

MOST_EVENTS = 60

Section = tuple[str, list[Block]]
"""Heading and blocks."""

Views = Mapping[str, RunView]
"""Runs by their names."""


def table_sections(views: Views, completion_notes: Sequence[str]) -> dict[str, list[Section]]:
    """Return the tables of the page's sections by their ids.

    Sections that the script fills have an empty one.
    """
    empty: Section = ("", [])
    notes: list[Block] = [Line(note) for note in completion_notes]
    return {
        "results": [*_results(views)],
        "findings": [*_findings(views)],
        "curves": [empty],
        "completions": [("", notes)],
        "parts": [*_parts(views)],
        "recipe": [("", _side_by_side(views, _settings))],
        "environment": [("", _side_by_side(views, _environment))],
    }


def _results(views: Views) -> Iterator[Section]:
    """Yield the table of each set of problems; of several runs also of their last models."""
    measured_runs = 0
    for name, run in views.items():
        tests = held_out_results(run)
        measured_runs += bool(tests)
        for split, results in tests.items():
            heading = f"Results on {split}" if len(views) == 1 else f"{name}: results on {split}"
            section = [*result_blocks(results), answers_table(results), *curve_tables(results)]
            metrics = metrics_table(results)
            if metrics is not None:
                section.append(metrics)
            yield heading, section
        yield from _contamination(name if len(views) > 1 else "", run)
    if measured_runs > 1:
        last_results = last_results_of(views)
        yield "The last models against each other", [*result_blocks(last_results)]


def _contamination(name: str, run: RunView) -> Iterator[Section]:
    """Yield what probes and twins say of a run, if there are any."""
    try:
        blocks = contamination_blocks(run.folder.path)
    except (DataError, RunFolderError) as error:
        blocks = [Line(f"Left out: {error.paragraph()}")]
    if blocks:
        title = "Has the model read these problems before?"
        yield f"{name}: {title[0].lower()}{title[1:]}" if name else title, blocks


def last_results_of(views: Views) -> list[EvaluationResult]:
    """Return the last result of each run, on the first set of problems that all have."""
    tests_by_run = {name: held_out_results(run) for name, run in views.items()}
    tests_by_run = {name: tests for name, tests in tests_by_run.items() if tests}
    if not tests_by_run:
        return []
    # A run's own sets come before those that were measured afterwards.
    first_tests, *other_tests = tests_by_run.values()
    shared_splits = [split for split in first_tests if all(split in tests for tests in other_tests)]
    last_results: dict[str, EvaluationResult] = {}
    for name, tests in tests_by_run.items():
        splits = shared_splits or [*tests]
        last_results[name] = tests[splits[0]][-1]
    phases = {result.phase for result in last_results.values()}
    named_results = []
    for name, result in last_results.items():
        # The phases differ if a run was stopped.
        full_name = f"{name} ({label(result.phase)})" if len(phases) > 1 else name
        named_results.append(replace(result, name=full_name))
    return named_results


def _parts(views: Views) -> Iterator[Section]:
    """Yield the tables of each set of problems by subject, level and length."""
    for name, run in views.items():
        for split, results in held_out_results(run).items():
            for criterion, tables in part_tables(results):
                yield f"{name}: {split} by {criterion}", [*tables]


def _findings(views: Views) -> Iterator[Section]:
    """Yield the findings of each run, how often steps had each status, and events."""
    for name, run in views.items():
        findings, damaged = run.findings()
        section: list[Block] = []
        for finding in findings:
            steps = f"{label(finding.phase)} steps {finding.steps[0]} to {finding.steps[1]}"
            text = f"{steps} ({finding.name}): {finding}"
            section.append(Line(text, "unsure", "finding"))
        if run.trouble:
            section.append(Line(run.trouble))
        elif not section and run.reports:
            section.append(Line("No issues detected."))
        elif not section:
            section.append(Line("No step has been done yet."))
        section += [Line(f"Left out: {error.paragraph()}") for error in damaged]
        section += _status_table(run)
        section += _event_table(run)
        yield name if len(views) > 1 else "", section


def _status_table(run: RunView) -> list[Block]:
    """Count the steps of each phase by their status."""
    counts = Counter((report.phase, report.status) for report in run.reports)
    rows = []
    for (phase, status), count in counts.items():
        reports = run.of_phase(phase)
        steps = [report.step for report in reports if report.status == status]
        share = 100 * count / len(reports)
        row = (
            f"{label(phase)}: {status}",
            f"{share:.0f} %",
            f"steps {_steps(steps)}",
        )
        rows.append(row)
    return _table(("status of the steps", "share", "which"), rows)


def _event_table(run: RunView) -> list[Block]:
    """List the first events of a run."""
    events: list[tuple[str, str]] = []
    for report in run.reports:
        step = f"{report.phase} {report.step}"
        events += [(step, event) for event in report.events]
    rows = [(step, cut(event)) for step, event in events[:MOST_EVENTS]]
    return _table((f"{len(rows)} of {len(events)} events", "what happened"), rows)


def _steps(numbers: Sequence[int]) -> str:
    text = numbers_in_words(numbers)
    return text if len(text) < 160 else f"{text[:160]} ..."


def _settings(run: RunView) -> dict[str, Any]:
    """Return the settings of a run's recipe that differ from the defaults."""
    if run.recipe is None:
        return {"recipe": run.trouble}
    texts = {"name", "description", "note"}
    settings = run.recipe.model_dump(mode="json", exclude_defaults=True, exclude=texts)
    return dict(flat_settings(settings))


def _environment(run: RunView) -> dict[str, Any]:
    """Return the versions, machine, data and code of a run, and the changes on its way."""
    info = run.folder.read_info()
    facts: dict[str, Any] = {"recipe": info.recipe_hash}
    facts |= info.versions
    facts |= info.host
    facts |= info.resolved or {}
    facts |= {f"data: {name}": mark for name, mark in info.fingerprints.items()}
    facts |= {f"code: {name}": mark for name, mark in info.code.items()}
    for number, change in enumerate(info.changes, start=1):
        start = "not used yet"
        if change.phase:
            start = f"from {change.phase} step {change.step} on"
        changes = describe_changes(change.changes, limit=50)
        facts[f"change {number}"] = f"{start}: {changes}"
    return facts


def _side_by_side(views: Views, facts_of: Callable[[RunView], Mapping[str, Any]]) -> list[Block]:
    """Make a table of one row per setting and a column per run; differences are marked."""
    facts_by_run = [facts_of(run) for run in views.values()]
    # dict: each key once, in order.
    keys: dict[str, None] = {}
    for facts in facts_by_run:
        keys |= dict.fromkeys(facts)
    rows = []
    for key in keys:
        values = [str(facts.get(key, "-")) for facts in facts_by_run]
        tone: Tone = "unsure" if len(set(values)) > 1 else "plain"
        row = [Cell(cut(key))]
        row += [Cell(cut(value), tone) for value in values]
        rows.append(row)
    head = ("", *views) if len(views) > 1 else ("", "value")
    return _table(head, rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> list[Block]:
    """Make a table, unless it has no rows."""
    return [table(titles, rows)] if rows else []
