"""The report: a run, or several, as one HTML file that needs no network.

What a model or a data set wrote is data: control characters and direction marks are shown as
escapes, HTML is escaped, long texts are cut, and the rest reaches the page as JSON that a script
puts into text nodes. The file stays below 3 MB: what is left out is said in it.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from rich.console import Group
from rich.table import Table
from rich.text import Text

from grouper.errors import DataError, RunFolderError
from grouper.evaluation.compare import (
    compare,
    label,
    render_answers,
    render_metrics,
    render_parts,
    render_table,
)
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.files import write_atomic
from grouper.report import charts
from grouper.report.curves import draw_curves
from grouper.report.panels import RunView, overlaid, panels_of
from grouper.runs.folder import PHASES, RunFolder
from grouper.runs.records import describe_changes, flat_settings, numbers_in_words
from grouper.runs.samples import printable

# Bytes of JSON that completions may take, for all runs together.
ROLLOUT_BYTES, EVALUATION_BYTES, TRACE_BYTES = 800_000, 700_000, 400_000
# Steps whose rollouts are looked at, and points of all curves of one metric together.
MOST_STEPS, MOST_POINTS = 40, 400
# Problems of a set whose completions may be in the page.
MOST_PROBLEMS = 300
# Characters of a text: its beginning and, after what is left out, its end.
HEAD, TAIL = 2400, 1200
MOST_EVENTS = 60
FIELDS = (
    "problem_id", "completion", "answer", "extracted", "verdict", "reason", "finish_reason",
    "tokens", "rewards", "reward", "advantage", "sample",
)  # fmt: skip
"""Of a rollout or an item of an evaluation, as the page has them."""


def write_report(runs: Sequence[RunFolder | RunView], path: Path | None = None) -> Path:
    """Write what the run folders hold so far as one HTML file.

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
    write_atomic(target, _page(views).encode("utf-8", "backslashreplace"))
    return target


def draw_pictures(folder: RunFolder) -> None:
    """Draw everything that is drawn of a run, into its folder."""
    run = RunView.of(folder)
    write_report([run])
    draw_curves(run)


def _page(runs: Sequence[RunView]) -> str:
    names = [run.name for run in runs]
    names = names if len({*names}) == len(names) else [str(run.folder.path) for run in runs]
    views = dict(zip(names, runs, strict=True))
    panels = panels_of(runs[0])
    if len(runs) > 1:
        panels = overlaid({name: panels_of(run) for name, run in views.items()})
    most = max(20, MOST_POINTS // len(runs))
    drawn = [charts.chart(panel, most) for panel in panels]
    completions = _Completions(len(runs))
    for name, run in views.items():
        prefix = f"{name}: " if len(runs) > 1 else ""
        completions.add_evaluations(run, prefix)
        completions.add_rollouts(run, prefix)
    size = -(-max(len(run.of_phase(phase)) for run in runs for phase in PHASES) // most)
    state = "; ".join(f"{run.folder.path}: {_state(run)}" for run in runs)
    now = datetime.now().astimezone().isoformat(" ", "minutes")
    return (
        _templates()
        .get_template("report.html")
        .render(
            title=" against ".join(names) if len(runs) < 4 else f"{len(runs)} runs",
            about=f"{state}. Written {now} by Grouper {version('grouper-rl')}.",
            parts={
                "verdict": [*_verdicts(views), *_results(views)],
                "findings": [*_findings(views)],
                "curves": [("", [])],
                "parts": [*_parts(views)],
                "completions": [("", [*map(_cell, completions.notes)])],
                "same": [("", [])],
                "recipe": [("", _side_by_side(views, _settings))],
                "environment": [("", _side_by_side(views, _environment))],
            },
            size=size,
            label=label,
            panels=[*zip(panels, drawn, strict=True)],
            data=_json(
                {
                    "charts": [chart["values"] for chart in drawn],
                    "inner": charts.INNER,
                    "fields": ("source", "prompt", "trace", *FIELDS),
                    "sources": completions.sources,
                    "prompts": list(completions.prompts),
                    "rows": completions.rows,
                }
            ),
        )
    )


def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("grouper.report"),
        autoescape=True,
        finalize=lambda value: (
            printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _json(value: Any) -> Markup:
    """JSON inside a script element: ASCII, and nothing that HTML could take for its own."""
    # A browser's JSON knows no NaN and infinities.
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    text = json.dumps(finite, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # noqa: S704 - everything that could end the element is escaped above


# --- sections: (heading, tables and lines) -------------------------------------------------------

Part = tuple[str, list[dict[str, Any]]]
Views = Mapping[str, RunView]


def _state(run: RunView) -> str:
    if run.recipe and run.folder.has_finished(run.recipe.phases):
        return "finished"
    last = run.reports[-1] if run.reports else None
    return f"at {label(last.phase)} step {last.step}" if last else "before its first step"


def _tests(run: RunView) -> dict[str, list[EvaluationResult]]:
    """Set of problems -> base, SFT and GRPO, as far as they were measured on it.

    Validation counts where no other set was measured twice: its first result and its last. What
    was measured afterwards follows.
    """
    splits: dict[str, list[EvaluationResult]] = {}
    for result in run.evaluations:
        splits.setdefault(result.split, []).append(result)
    validations = splits.pop("validation", [])
    if not any(len(results) > 1 for results in splits.values()):
        ends = [validations[0], validations[-1]][: len(validations)] if validations else []
        named = [replace(r, name=f"{label(r.phase)} step {r.step}") for r in ends]
        splits = {**({"validation": named} if named else {}), **splits}
    return {**splits, **{name: [*results] for name, results in run.later.items()}}


def _verdicts(views: Views) -> Iterator[Part]:
    """What the first set of problems says about the last model of each run against its first."""
    for name, run in views.items():
        # One that was measured twice comes before the others.
        tests = sorted(_tests(run).items(), key=lambda test: len(test[1]) < 2)
        nothing = "unsure", "Nothing has been measured on held-out problems yet."
        tone, text = _verdict(*tests[0]) if tests else nothing
        yield name if len(views) > 1 else "", [{"text": text, "tone": tone, "kind": "verdict"}]


def _verdict(split: str, results: Sequence[EvaluationResult]) -> tuple[str, str]:
    """Its tone, and the sentences."""
    try:  # on the problems that both have, as the difference is
        found = compare([*results[:1], *results[1:][-1:]])
        results, differences = found.results, found.differences
    except DataError:
        differences = ()
    first, last = results[0], results[-1]
    before, after = label(first.name), label(last.name)
    problems = f"{last.overall.problems} {split} problems"
    if not differences:
        text = f"{after} solves {100 * last.accuracy:.1f} % of {problems}"
        return "unsure", f"{text}; there is nothing to compare it with yet."
    paired = differences[0].paired
    low, high = (100 * end for end in (paired.interval.low, paired.interval.high))
    tone, text = {
        "better": ("good", f"Yes: {after} is better than {before}."),
        "worse": ("bad", f"No: {after} is worse than {before}."),
    }.get(paired.verdict, ("unsure", f"No evidence of a change from {before} to {after}."))
    return tone, (
        f"{text} {100 * first.accuracy:.1f} % before and {100 * last.accuracy:.1f} % after, of "
        f"{problems}: {100 * paired.difference:+.1f} points [{low:+.1f}, {high:+.1f}]."
    )


def _results(views: Views) -> Iterator[Part]:
    """The table of each set of problems; of several runs also of their last models, paired."""
    for name, run in views.items():
        for split, results in _tests(run).items():
            heading = f"Results on {split}" if len(views) == 1 else f"{name}: results on {split}"
            more = [render_answers(results), render_metrics(results)]
            yield heading, [*compared(results), *(b for table in more for b in blocks(table))]
    tests = {name: found for name, run in views.items() if (found := _tests(run))}
    if len(tests) > 1:
        # On the first set that all have: a run's own, before what was measured afterwards.
        first, *others = tests.values()
        shared = [split for split in first if all(split in found for found in others)]
        last = {name: found[(shared or [*found])[0]][-1] for name, found in tests.items()}
        if len({result.phase for result in last.values()}) > 1:  # perhaps one was stopped
            last = {f"{name} ({label(result.phase)})": result for name, result in last.items()}
        named = [replace(result, name=name) for name, result in last.items()]
        yield "The last models against each other", [*compared(named)]


def compared(results: Sequence[EvaluationResult]) -> Iterator[dict[str, Any]]:
    """The table of some models, or of each alone where they share no problem."""
    try:
        yield from blocks(render_table(compare(results)))
    except DataError as error:
        for result in results:
            yield from blocks(render_table(compare([result])))
        yield {"text": error.paragraph(), "tone": "unsure"}


def _parts(views: Views) -> Iterator[Part]:
    for name, run in views.items():
        for split, results in _tests(run).items():
            for by, tables in render_parts(results):
                yield f"{name}: {split} by {by}", [b for table in tables for b in blocks(table)]


def _findings(views: Views) -> Iterator[Part]:
    """What went wrong, how often steps taught something and why others did not, and events."""
    for name, run in views.items():
        findings, damaged = run.findings()
        blocks = [
            {
                "text": f"{label(f.phase)} steps {f.steps[0]} to {f.steps[1]} ({f.name}): {f}",
                "tone": "unsure",
                "kind": "finding",
            }
            for f in findings
        ]
        nothing = "Nothing that Grouper knows of went wrong." if run.reports else ""
        if run.trouble or not blocks:
            blocks.append(_cell(run.trouble or nothing or "No step has been done yet."))
        blocks += [_cell(f"Left out: {error.paragraph()}") for error in damaged]
        counts = Counter((r.phase, r.status) for r in run.reports)
        rows = [
            (
                _cell(f"{label(phase)}: {status}"),
                _cell(f"{100 * count / len(run.of_phase(phase)):.0f} %"),
                _words(_steps([r.step for r in run.of_phase(phase) if r.status == status])),
            )
            for (phase, status), count in counts.items()
        ]
        events = [(f"{r.phase} {r.step}", e) for r in run.reports for e in r.events]
        blocks += _table(("status of the steps", "share", "which"), rows)
        shown = [(_cell(step), _words(event)) for step, event in events[:MOST_EVENTS]]
        blocks += _table((f"{len(shown)} of {len(events)} events", "what happened"), shown)
        yield name if len(views) > 1 else "", blocks


def _steps(numbers: Sequence[int]) -> str:
    text = numbers_in_words(numbers)
    return text if len(text) < 160 else f"{text[:160]} ..."


def _settings(run: RunView) -> dict[str, Any]:
    """Those of its recipe that differ from the defaults."""
    if run.recipe is None:
        return {"recipe": run.trouble}
    texts = {"name", "description", "note"}
    own = run.recipe.model_dump(mode="json", exclude_defaults=True, exclude=texts)
    return dict(flat_settings(own))


def _environment(run: RunView) -> dict[str, Any]:
    """What a run was made with, and the changes on its way."""
    info = run.folder.read_info()
    facts = {"recipe": info.recipe_hash, **info.versions, **info.host, **(info.resolved or {})}
    facts |= {f"data: {name}": mark for name, mark in info.fingerprints.items()}
    facts |= {f"code: {name}": mark for name, mark in info.code.items()}
    for number, change in enumerate(info.changes, start=1):
        begun = f"from {change.phase} step {change.step} on" if change.phase else "not used yet"
        facts[f"change {number}"] = f"{begun}: {describe_changes(change.changes, limit=50)}"
    return facts


def _side_by_side(
    views: Views, facts_of: Callable[[RunView], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One row per setting and a column per run; where these differ, it is marked."""
    tables, rows = [*map(facts_of, views.values())], []
    for key in dict.fromkeys(key for found in tables for key in found):
        values = [str(found.get(key, "-")) for found in tables]
        tone = "words unsure" if len({*values}) > 1 else "words"
        rows.append([_words(key), *({**_words(value), "tone": tone} for value in values)])
    return _table(("", *views) if len(views) > 1 else ("", "value"), rows)


# --- blocks: a table, or a line of text ----------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Any]) -> list[dict[str, Any]]:
    """A table, unless it has no rows."""
    return [{"head": head, "rows": rows}] if rows else []


_TONES = {"green": "good", "red": "bad", "yellow": "unsure"}


def blocks(thing: Any) -> Iterator[dict[str, Any]]:
    """Tables and lines for a terminal as the page takes them."""
    if isinstance(thing, Group):
        for inner in thing.renderables:
            yield from blocks(inner)
    elif isinstance(thing, Table):
        columns = [
            [_cell(cell, "left" if column.justify == "left" else "") for cell in column.cells]
            for column in thing.columns
        ]
        head = [str(column.header) for column in thing.columns]
        yield from _table(head, [*zip(*columns, strict=True)])
    elif isinstance(thing, Text | str) and str(thing):
        yield _cell(thing)


def _cell(thing: Any, tone: str = "") -> dict[str, str]:
    style = str(getattr(thing, "style", ""))
    tones = [t for color, t in _TONES.items() if color in style]
    return {"text": str(thing), "tone": " ".join([tone, *tones]).strip()}


def _words(text: object) -> dict[str, str]:
    """A cell that may be wrapped."""
    return {"text": _cut(str(text)), "tone": "words"}


# --- completions ---------------------------------------------------------------------------------


def _cut(text: str) -> str:
    """A text for people: what steers a terminal or the page is escaped, and what is long is cut."""
    if len(text) > HEAD + TAIL:
        left_out = f"\n[... {len(text) - HEAD - TAIL:,} characters are left out here ...]\n"
        text = text[:HEAD] + left_out + text[-TAIL:]
    return printable(text)


@dataclass
class _Completions:
    """Collects what the page holds of rollouts and evaluations, and says what it leaves out."""

    runs: int
    rows: list[list[Any]] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    trace_room: int = 0

    def _source(self, name: str, compared: str = "") -> int:
        self.sources.append({"name": name, "compared": compared})
        return len(self.sources) - 1

    def _put(self, source: int, row: Mapping[str, Any]) -> int:
        """Add a row; returns how many bytes it takes, its tokens left out."""
        before, prompt = len(self.prompts), _cut(row["prompt"])
        place = self.prompts.setdefault(prompt, before)
        values = [_cut(v) if isinstance(v := row.get(name), str) else v for name in FIELDS]
        self.rows.append([source, place, self._trace(row), *values])
        return len(json.dumps([values, prompt if place == before else place]))

    def _trace(self, row: Mapping[str, Any]) -> list[Any] | None:
        """The tokens of a rollout with what was recorded of each, if there is room for them."""
        texts = row.get("token_texts")  # which no item of an evaluation has
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
        """Problems of each set in turn: what got worse, better, stayed wrong, stayed right."""
        groups = _tests(run)
        validations = [r for r in run.evaluations if r.split == "validation"]
        if validations and "validation" not in groups:
            groups["validation"] = validations[-1:]
        budget = EVALUATION_BYTES // (self.runs * max(1, len(groups)))
        for name, results in groups.items():
            compared = name if len(results) > 1 or self.runs > 1 else ""
            ids, kept, left = _in_turn(results), 0, budget
            wanted = {*ids[:MOST_PROBLEMS]}
            items: dict[str, list[tuple[int, EvaluationItem]]] = {}
            for result in results:
                source = self._source(f"{prefix}{label(result.name)} on {result.split}", compared)
                for item in result.items:
                    if item.problem_id in wanted:
                        items.setdefault(item.problem_id, []).append((source, item))
            for problem in ids[:MOST_PROBLEMS]:
                if left < 0:
                    break
                kept += 1
                left -= sum(self._put(source, asdict(item)) for source, item in items[problem])
            if kept < len(ids):
                self.notes.append(
                    f"{prefix}Of {name}, {kept} of {len(ids)} problems are here, in turn those "
                    "that got worse, got better, stayed wrong and stayed right."
                )

    def add_rollouts(self, run: RunView, prefix: str) -> None:
        """Evenly spaced steps, and of each those rollouts first whose tokens were recorded."""
        files = run.folder.rollout_files()
        count = min(len(files), MOST_STEPS // self.runs)
        chosen = [files[i * (len(files) - 1) // max(1, count - 1)] for i in range(count)]
        budget = ROLLOUT_BYTES // (self.runs * max(1, count))
        kept = whole = 0
        for phase, step, file in chosen:
            try:
                rows = [*run.folder.shown_rollouts(file)]
            except RunFolderError as error:
                self.notes.append(f"Left out: {error.paragraph()}")
                continue
            rows.sort(key=lambda row: row["token_texts"] is None)
            source, left = self._source(f"{prefix}{label(phase)} step {step}"), budget
            self.trace_room += TRACE_BYTES // (self.runs * count)  # what is left is for later ones
            for row in rows:
                if left < 0:
                    break
                left -= self._put(source, row)
                kept += 1
            whole += len(rows)
        if not files:
            self.notes.append(f"{prefix}No rollouts are stored in the run folder.")
        elif kept < whole or count < len(files):
            self.notes.append(
                f"{prefix}Rollouts of {count} of {len(files)} steps are here, evenly spaced, "
                f"and {kept:,} of the {whole:,} of these steps. `grouper show` reads all of them."
            )


def _in_turn(results: Sequence[EvaluationResult]) -> list[str]:
    """Problem ids in turn: one that got worse, got better, stayed wrong, stayed right."""
    first, last = results[0].scores, results[-1].scores
    kinds: list[list[str]] = [[], [], [], []]
    for name in {**first, **last}:
        before, after = first.get(name, 0.0), last.get(name, 0.0)
        kinds[0 if after < before else 1 if after > before else 2 if after < 1 else 3].append(name)
    turns: Iterable[tuple[str | None, ...]] = itertools.zip_longest(*kinds)
    return [name for turn in turns for name in turn if name is not None]
