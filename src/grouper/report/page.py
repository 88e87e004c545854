"""The report: a run, or several, as one HTML file that needs no network.

What a model or a data set wrote is data: control characters and direction marks are shown as
escapes, HTML is escaped, long texts are cut, and the rest reaches the page as JSON that a script
puts into text nodes. The file stays below 3 MB: what is left out is said in it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from grouper.errors import DataError, RunFolderError
from grouper.evaluation.compare import Difference, compare, label
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.evaluation.result_tables import (
    answers_table,
    metrics_table,
    part_tables,
    result_blocks,
)
from grouper.files import write_atomic
from grouper.printable import printable
from grouper.report import charts
from grouper.report.curves import draw_curves
from grouper.report.panels import RunView, overlaid, panels_of
from grouper.runs.folder import PHASES, RunFolder
from grouper.runs.records import describe_changes, flat_settings, numbers_in_words
from grouper.tables import Block, Cell, Line, Tone, table

# Bytes of JSON for the completions of all runs together, by where they come from.
ROLLOUT_BYTES = 800_000
EVALUATION_BYTES = 700_000
# Bytes of JSON for the tokens of rollouts.
TRACE_BYTES = 400_000
# Steps whose rollouts are read, for all runs together.
MOST_STEPS = 40
# Points of all curves of one metric together.
MOST_POINTS = 400
# Problems of a set whose completions may be in the page.
MOST_PROBLEMS = 300
# Characters of a long text: its beginning and, after the omitted middle, its end.
HEAD = 2400
TAIL = 1200
MOST_EVENTS = 60
FIELDS = (
    "problem_id", "completion", "answer", "extracted", "verdict", "reason", "finish_reason",
    "tokens", "rewards", "reward", "advantage", "sample",
)  # fmt: skip
"""Columns of a rollout, or of an item of an evaluation, in the page."""

Section = tuple[str, list[Block]]
"""Heading and blocks."""


def write_report(runs: Sequence[RunFolder | RunView], path: Path | None = None) -> Path:
    """Write a report of one or several runs, finished or not, as one HTML file.

    Args:
        runs: one, or several whose curves are laid over each other.
        path: the file; `report.html` in the first run folder by default.

    Returns:
        The path written.

    Raises:
        RunFolderError: a run cannot be read, or the file not written.
    """
    views = [run if isinstance(run, RunView) else RunView.of(run) for run in runs]
    target = path or views[0].folder.path / "report.html"
    # A text of a model may hold lone surrogates, which UTF-8 cannot carry.
    html = _page(views).encode("utf-8", "backslashreplace")
    write_atomic(target, html)
    return target


def draw_pictures(folder: RunFolder) -> None:
    """Write the report and the curves of a run into its folder."""
    run = RunView.of(folder)
    write_report([run])
    draw_curves(run)


def _page(runs: Sequence[RunView]) -> str:
    names = _names(runs)
    views = dict(zip(names, runs, strict=True))
    panels = panels_of(runs[0])
    if len(runs) > 1:
        panels_by_run = {name: panels_of(run) for name, run in views.items()}
        panels = overlaid(panels_by_run)
    most_points = max(20, MOST_POINTS // len(runs))
    drawings = [charts.chart(panel, most_points) for panel in panels]
    completions = _Completions(len(runs))
    for name, run in views.items():
        prefix = f"{name}: " if len(runs) > 1 else ""
        completions.add_evaluations(run, prefix)
        completions.add_rollouts(run, prefix)
    phase_lengths = [len(run.of_phase(phase)) for run in runs for phase in PHASES]
    steps_per_point = math.ceil(max(phase_lengths) / most_points)
    title = " against ".join(names) if len(runs) < 4 else f"{len(runs)} runs"
    states = "; ".join(f"{run.folder.path}: {_state(run)}" for run in runs)
    now = datetime.now().astimezone().isoformat(" ", "minutes")
    data = {
        "charts": [drawing["values"] for drawing in drawings],
        "inner": charts.INNER,
        "fields": ("source", "prompt", "trace", *FIELDS),
        "sources": completions.sources,
        "prompts": list(completions.prompts),
        "rows": completions.rows,
    }
    template = _templates().get_template("report.html")
    return template.render(
        title=title,
        about=f"{states}. Written {now} by Grouper {version('grouper-rl')}.",
        parts=_sections(views, completions.notes),
        size=steps_per_point,
        label=label,
        panels=[*zip(panels, drawings, strict=True)],
        data=_json(data),
    )


def _names(runs: Sequence[RunView]) -> list[str]:
    """Name the runs by their folders; by their paths if two folders have the same name."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        return [str(run.folder.path) for run in runs]
    return names


def _sections(views: Views, notes: Sequence[str]) -> dict[str, list[Section]]:
    """Return the sections of the page by their ids; those that the script fills have no blocks."""
    empty: Section = ("", [])
    completion_notes: list[Block] = [Line(note) for note in notes]
    return {
        "verdict": [*_verdicts(views), *_results(views)],
        "findings": [*_findings(views)],
        "curves": [empty],
        "parts": [*_parts(views)],
        "completions": [("", completion_notes)],
        "same": [empty],
        "recipe": [("", _side_by_side(views, _settings))],
        "environment": [("", _side_by_side(views, _environment))],
    }


def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("grouper.report"),
        autoescape=True,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _escaped(value: Any) -> Any:
    """Escape control characters of a text that is not HTML already."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def _json(value: Any) -> Markup:
    """Write JSON for a script element: ASCII, without characters that HTML could interpret."""
    # A browser's JSON knows no NaN and infinities.
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    text = json.dumps(finite, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # noqa: S704 - everything that could end the element is escaped above


# --- sections ------------------------------------------------------------------------------------

Views = Mapping[str, RunView]


def _state(run: RunView) -> str:
    if run.recipe and run.folder.has_finished(run.recipe.phases):
        return "finished"
    if not run.reports:
        return "before its first step"
    last_report = run.reports[-1]
    return f"at {label(last_report.phase)} step {last_report.step}"


def _tests(run: RunView) -> dict[str, list[EvaluationResult]]:
    """Group the results of base, SFT and GRPO by the set of problems they were measured on.

    Validation counts where no other set was measured twice: its first result and its last.
    Results that were measured after the run come last.
    """
    splits: dict[str, list[EvaluationResult]] = {}
    for result in run.evaluations:
        splits.setdefault(result.split, []).append(result)
    validations = splits.pop("validation", [])
    tests: dict[str, list[EvaluationResult]] = {}
    has_repeated_test = any(len(results) > 1 for results in splits.values())
    if validations and not has_repeated_test:
        tests["validation"] = [_with_step(result) for result in _first_and_last(validations)]
    tests |= splits
    for name, results in run.later.items():
        tests[name] = list(results)
    return tests


def _with_step(result: EvaluationResult) -> EvaluationResult:
    """Name a result by its phase and step."""
    return replace(result, name=f"{label(result.phase)} step {result.step}")


def _first_and_last(results: Sequence[EvaluationResult]) -> list[EvaluationResult]:
    """Return the first result and, if there are more, the last."""
    if len(results) == 1:
        return [results[0]]
    return [results[0], results[-1]]


def _verdicts(views: Views) -> Iterator[Section]:
    """Compare the last model of each run with its first, on the first set of problems."""
    for name, run in views.items():
        # Sets that were measured twice come before the others.
        tests = sorted(_tests(run).items(), key=lambda test: len(test[1]) < 2)
        if tests:
            split, results = tests[0]
            tone, text = _verdict(split, results)
        else:
            tone = "unsure"
            text = "Nothing has been measured on held-out problems yet."
        heading = name if len(views) > 1 else ""
        yield heading, [Line(text, tone, "verdict")]


def _verdict(split: str, results: Sequence[EvaluationResult]) -> tuple[Tone, str]:
    """Return the tone of a verdict, and its sentences."""
    differences: Sequence[Difference] = ()
    try:
        # Only the problems that both have: the difference is about them.
        comparison = compare(_first_and_last(results))
        results = comparison.results
        differences = comparison.differences
    except DataError:
        # No problem was scored in both, and the last model is reported alone.
        pass
    first = results[0]
    last = results[-1]
    first_name = label(first.name)
    last_name = label(last.name)
    problems = f"{last.overall.problems} {split} problems"
    if not differences:
        text = f"{last_name} solves {100 * last.accuracy:.1f} % of {problems}"
        return "unsure", f"{text}; there is nothing to compare it with yet."
    paired = differences[0].paired
    tone: Tone
    if paired.verdict == "better":
        tone = "good"
        text = f"Yes: {last_name} is better than {first_name}."
    elif paired.verdict == "worse":
        tone = "bad"
        text = f"No: {last_name} is worse than {first_name}."
    else:
        tone = "unsure"
        text = f"No evidence of a change from {first_name} to {last_name}."
    low = 100 * paired.interval.low
    high = 100 * paired.interval.high
    return tone, (
        f"{text} {100 * first.accuracy:.1f} % before and {100 * last.accuracy:.1f} % after, of "
        f"{problems}: {100 * paired.difference:+.1f} points [{low:+.1f}, {high:+.1f}]."
    )


def _results(views: Views) -> Iterator[Section]:
    """Yield the table of each set of problems; of several runs also of their last models."""
    tests_by_run = {}
    for name, run in views.items():
        tests = _tests(run)
        if tests:
            tests_by_run[name] = tests
        for split, results in tests.items():
            heading = f"Results on {split}" if len(views) == 1 else f"{name}: results on {split}"
            section = [*result_blocks(results), answers_table(results)]
            metrics = metrics_table(results)
            if metrics is not None:
                section.append(metrics)
            yield heading, section
    if len(tests_by_run) > 1:
        last_results = _last_results(tests_by_run)
        yield "The last models against each other", [*result_blocks(last_results)]


def _last_results(
    tests_by_run: Mapping[str, Mapping[str, Sequence[EvaluationResult]]],
) -> list[EvaluationResult]:
    """Return the last result of each run, on the first set of problems that all have."""
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
        for split, results in _tests(run).items():
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
            section.append(Line("Nothing that Grouper knows of went wrong."))
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
    rows = [(step, _cut(event)) for step, event in events[:MOST_EVENTS]]
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
        row = [Cell(_cut(key))]
        row += [Cell(_cut(value), tone) for value in values]
        rows.append(row)
    head = ("", *views) if len(views) > 1 else ("", "value")
    return _table(head, rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> list[Block]:
    """Make a table, unless it has no rows."""
    return [table(titles, rows)] if rows else []


# --- completions ---------------------------------------------------------------------------------


def _cut(text: str) -> str:
    """Omit the middle of a long text, and escape characters that steer a terminal or the page."""
    omitted = len(text) - HEAD - TAIL
    if omitted > 0:
        note = f"\n[... {omitted:,} characters are left out here ...]\n"
        text = text[:HEAD] + note + text[-TAIL:]
    return printable(text)


@dataclass
class _Completions:
    """Rollouts and evaluations of the page, with notes of those that are left out."""

    runs: int
    rows: list[list[Any]] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    trace_room: int = 0
    """Bytes that are left for the tokens of rollouts."""

    def _source(self, name: str, compared: str = "") -> int:
        """Add a source of completions; return its position."""
        self.sources.append({"name": name, "compared": compared})
        return len(self.sources) - 1

    def _put(self, source: int, row: Mapping[str, Any]) -> int:
        """Add a row; return its size in bytes without its tokens."""
        prompt = _cut(row["prompt"])
        is_new_prompt = prompt not in self.prompts
        position = self.prompts.setdefault(prompt, len(self.prompts))
        values = []
        for name in FIELDS:
            value = row.get(name)
            values.append(_cut(value) if isinstance(value, str) else value)
        self.rows.append([source, position, self._trace(row), *values])
        stored_prompt = prompt if is_new_prompt else position
        return len(json.dumps([values, stored_prompt]))

    def _trace(self, row: Mapping[str, Any]) -> list[Any] | None:
        """Return the tokens of a rollout with their records, if there is room for them."""
        # No item of an evaluation has texts of tokens.
        texts = row.get("token_texts")
        if texts is None:
            return None
        trace: list[Any] = [[printable(text) for text in texts]]
        for name in ("logprobs", "trainer_logprobs", "entropies"):
            values = row.get(name)
            trace.append(values and [round(value, 3) for value in values])
        trace.append(row.get("clipped") or [])
        size = len(json.dumps(trace))
        if size > self.trace_room:
            return None
        self.trace_room -= size
        return trace

    def add_evaluations(self, run: RunView, prefix: str) -> None:
        """Add problems of each set in turn: got worse, got better, stayed wrong, stayed right."""
        groups = _tests(run)
        validations = [result for result in run.evaluations if result.split == "validation"]
        if validations and "validation" not in groups:
            groups["validation"] = validations[-1:]
        budget = EVALUATION_BYTES // (self.runs * max(1, len(groups)))
        for name, results in groups.items():
            compared = name if len(results) > 1 or self.runs > 1 else ""
            ids = _in_turn(results)
            candidates = ids[:MOST_PROBLEMS]
            items: dict[str, list[tuple[int, EvaluationItem]]] = {id_: [] for id_ in candidates}
            for result in results:
                source = self._source(f"{prefix}{label(result.name)} on {result.split}", compared)
                for item in result.items:
                    if item.problem_id in items:
                        items[item.problem_id].append((source, item))
            problem_count = 0
            room = budget
            for problem_items in items.values():
                if room < 0:
                    break
                problem_count += 1
                for source, item in problem_items:
                    room -= self._put(source, asdict(item))
            if problem_count < len(ids):
                self.notes.append(
                    f"{prefix}Of {name}, {problem_count} of {len(ids)} problems are here, in turn "
                    "those that got worse, got better, stayed wrong and stayed right."
                )

    def add_rollouts(self, run: RunView, prefix: str) -> None:
        """Add evenly spaced steps, and of each those rollouts first whose tokens were recorded."""
        files = run.folder.rollout_files()
        step_count = min(len(files), MOST_STEPS // self.runs)
        budget = ROLLOUT_BYTES // (self.runs * max(1, step_count))
        rollout_count = 0
        total = 0
        for index in range(step_count):
            phase, step, file = files[index * (len(files) - 1) // max(1, step_count - 1)]
            try:
                rows = [*run.folder.shown_rollouts(file)]
            except RunFolderError as error:
                self.notes.append(f"Left out: {error.paragraph()}")
                continue
            rows.sort(key=lambda row: row["token_texts"] is None)
            source = self._source(f"{prefix}{label(phase)} step {step}")
            room = budget
            # Room that a step leaves is for later ones.
            self.trace_room += TRACE_BYTES // (self.runs * step_count)
            for row in rows:
                if room < 0:
                    break
                room -= self._put(source, row)
                rollout_count += 1
            total += len(rows)
        if not files:
            self.notes.append(f"{prefix}No rollouts are stored in the run folder.")
        elif rollout_count < total or step_count < len(files):
            self.notes.append(
                f"{prefix}Rollouts of {step_count} of {len(files)} steps are here, evenly spaced, "
                f"and {rollout_count:,} of the {total:,} of these steps. `grouper show` reads all "
                "of them."
            )


def _in_turn(results: Sequence[EvaluationResult]) -> list[str]:
    """Return problem ids in turn: got worse, got better, stayed wrong, stayed right."""
    first_scores = results[0].scores
    last_scores = results[-1].scores
    worse: list[str] = []
    better: list[str] = []
    still_wrong: list[str] = []
    still_right: list[str] = []
    for name in first_scores | last_scores:
        first_score = first_scores.get(name, 0.0)
        last_score = last_scores.get(name, 0.0)
        if last_score < first_score:
            worse.append(name)
        elif last_score > first_score:
            better.append(name)
        elif last_score < 1:
            still_wrong.append(name)
        else:
            still_right.append(name)
    names: list[str] = []
    for turn in itertools.zip_longest(worse, better, still_wrong, still_right):
        names += [name for name in turn if name is not None]
    return names
