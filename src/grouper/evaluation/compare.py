"""Base, SFT and GRPO on the same problems: one table, and one honest sentence a difference."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from grouper.errors import DataError
from grouper.evaluation.result import Accuracy, EvaluationResult, Outcome
from grouper.evaluation.statistics import PairedComparison, paired_comparison

_LABELS = {"base": "base", "sft": "SFT", "grpo": "GRPO"}
_MANY_PARTS = 40
"""Subjects and levels beyond this are no longer a table to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one result differs from another on the same problems."""

    before: str
    after: str
    paired: PairedComparison
    from_format: float | None
    """Share of a gain that came from completions without an answer or cut off, or None where
    there is no gain. The rest came from wrong answers made right."""

    @property
    def mostly_format(self) -> bool:
        return self.from_format is not None and self.from_format > 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several results of the same problems, and their paired differences."""

    results: tuple[EvaluationResult, ...]
    differences: tuple[Difference, ...]
    """Each result against the one before it, then the last against the first."""
    left_out: int
    """Problems without a readable reference in some result; in no difference."""
    confidence: float


def compare(results: Sequence[EvaluationResult], *, confidence: float = 0.95) -> Comparison:
    """Compare results of the same problems, in the order given (base, SFT, GRPO).

    Raises:
        DataError: the results are not of the same problems with the same number of samples.
    """
    for result in results[1:]:
        _check_same_items(results[0], result)
    common = [
        problem_id
        for problem_id in dict.fromkeys(item.problem_id for r in results for item in r.items)
        if all(problem_id in result.scores for result in results)
    ]
    pairs = list(itertools.pairwise(results))
    if len(results) > 2:
        pairs.append((results[-1], results[0])[::-1])
    total = len({item.problem_id for r in results for item in r.items})
    return Comparison(
        results=tuple(results),
        differences=tuple(_difference(a, b, common, confidence) for a, b in pairs if common),
        left_out=total - len(common),
        confidence=confidence,
    )


def _check_same_items(first: EvaluationResult, other: EvaluationResult) -> None:
    mine, theirs = ({(i.problem_id, i.sample): i.answer for i in r.items} for r in (first, other))
    if mine == theirs:
        return
    only = len(mine.keys() - theirs.keys()), len(theirs.keys() - mine.keys())
    changed = sum(mine[key] != theirs[key] for key in mine.keys() & theirs.keys())
    raise DataError(
        f"evaluations {first.name!r} and {other.name!r} are not of the same items: {only[0]} only "
        f"in the first, {only[1]} only in the second, {changed} with another reference answer",
        where="comparing evaluations",
        fix="Measure every model on the same problems with the same number of samples.",
    )


def _difference(
    before: EvaluationResult, after: EvaluationResult, common: Sequence[str], confidence: float
) -> Difference:
    return Difference(
        before=before.name,
        after=after.name,
        paired=paired_comparison(
            [before.scores[id_] for id_ in common],
            [after.scores[id_] for id_ in common],
            confidence=confidence,
        ),
        from_format=_share_from_format(before, after, set(common)),
    )


def _share_from_format(
    before: EvaluationResult, after: EvaluationResult, common: set[str]
) -> float | None:
    """Net gain of items that had no answer (or were cut off), as a share of the whole net gain.

    An item that was right before and has no answer after counts against it.
    """
    format_gain = gain = 0
    for old, new in zip(before.items, after.items, strict=True):
        if old.problem_id not in common or old.correct == new.correct:
            continue
        change = 1 if new.correct else -1
        gain += change
        if (old if new.correct else new).outcome in ("no_answer", "truncated"):
            format_gain += change
    return format_gain / gain if gain > 0 else None


def label(name: str) -> str:
    """How a result is called in tables.

    >>> label("grpo"), label("validation-grpo-000020")
    ('GRPO', 'validation-grpo-000020')
    """
    return _LABELS.get(name, name)


def _percent(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f}"


def _accuracy_cell(accuracy: Accuracy, digits: int = 1) -> str:
    low, high = accuracy.interval.low, accuracy.interval.high
    return f"{_percent(accuracy.mean)} [{_percent(low, digits)}, {_percent(high, digits)}]"


def _results_table(comparison: Comparison) -> Table:
    results = comparison.results
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("model", no_wrap=True)
    table.add_column(
        f"accuracy % [{100 * comparison.confidence:g} %]", justify="right", no_wrap=True
    )
    measured = any(result.lenient is not None for result in results)
    if measured:
        table.add_column("lenient", justify="right", no_wrap=True)
    k = max((result.samples for result in results), default=1)
    if k > 1:
        table.add_column(f"pass@{k}", justify="right")
    columns: dict[str, Outcome] = {
        "correct": "correct",
        "wrong": "wrong",
        "no answer": "no_answer",
        "cut off": "truncated",
    }
    for title in (*columns, "tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        counts = result.split_counts
        cells = [label(result.name), _accuracy_cell(result.overall)]
        if measured:
            cells.append("-" if result.lenient is None else _percent(result.lenient.mean))
        if k > 1:
            cells.append(_percent(result.pass_at_k.get(k, math.nan)))
        cells += [str(counts[outcome]) for outcome in columns.values()]
        table.add_row(*cells, f"{result.mean_tokens:.0f}")
    return table


def _p(value: float) -> str:
    return "p<0.001" if value < 0.001 else f"p={value:.3f}"


def _sentence(difference: Difference) -> str:
    paired = difference.paired
    after, before = label(difference.after), label(difference.before)
    if paired.verdict == "no evidence":
        return "no evidence of a change"
    return f"{after} is {paired.verdict} than {before}"


_STYLE = {"better": "bold green", "worse": "bold red", "no evidence": "yellow"}


def _differences_table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("difference", no_wrap=True)
    table.add_column(f"points [{100 * comparison.confidence:g} %]", justify="right", no_wrap=True)
    table.add_column("up", justify="right")
    table.add_column("down", justify="right")
    table.add_column("test", no_wrap=True)
    table.add_column("verdict")
    for difference in comparison.differences:
        paired = difference.paired
        low, high = 100 * paired.interval.low, 100 * paired.interval.high
        table.add_row(
            f"{label(difference.after)} - {label(difference.before)}",
            f"{100 * paired.difference:+.1f} [{low:+.1f}, {high:+.1f}]",
            str(paired.higher),
            str(paired.lower),
            _p(paired.p_value),
            Text(_sentence(difference), style=_STYLE[paired.verdict]),
        )
    return table


def _notes(comparison: Comparison) -> list[str]:
    first = comparison.results[0]
    problems = len({item.problem_id for item in first.items})
    each = "1 completion" if first.samples == 1 else f"{first.samples} completions"
    notes = [f"{problems} problems, {each} each{_shared(comparison.results)}."]
    if comparison.differences:
        methods = sorted({d.paired.method for d in comparison.differences})
        notes.append(f"Paired by problem: {'; '.join(methods)}.")
    if any(result.lenient is not None for result in comparison.results):
        notes.append("Lenient: accuracy % with the answer taken from anywhere, in any format.")
    notes += _format_notes(comparison)
    for outcome, what in _NO_VERDICT.items():
        counts = [(label(r.name), r.split_counts[outcome]) for r in comparison.results]
        if any(count for _, count in counts):
            notes.append(f"{what}: {', '.join(f'{name} {count}' for name, count in counts)}.")
    unread = [(label(r.name), *r.text_alone) for r in comparison.results]
    if any(count for _, count, _ in unread):
        shown = ", ".join(f"{name} {count} ({right} right)" for name, count, right in unread)
        notes.append(f"Problems whose reference cannot be read, graded by text alone: {shown}.")
    return notes


def _shared(results: Sequence[EvaluationResult]) -> str:
    """What every model was measured with, as far as the settings kept with the results say."""
    if len(results) == 1:
        return ""
    sampling = [r.card["sampling"] for r in results if r.card.get("sampling") is not None]
    seeds = [result.card.get("seed") for result in results]
    if len(sampling) < len(results):
        return "; the same problems"
    if any(other != sampling[0] for other in sampling):
        return "; the same problems, sampled in different ways"
    if sampling[0]["temperature"] > 0 and len(set(seeds)) > 1:
        return "; the same problems, drawn with different seeds"
    return "; the same problems and draws for every model"


_NO_VERDICT: Mapping[Outcome, str] = {
    "timeout": "Grader timeouts, counted as not correct",
    "crash": "Grader crashes, counted as not correct",
    "not_scored": "Completions whose reference answer cannot be read, taking no part",
}
_FORMAT = "Format"


def _format_notes(comparison: Comparison) -> list[str]:
    shares = [
        f"{100 * min(1.0, d.from_format or 0):.0f} % of {label(d.after)} - {label(d.before)}"
        for d in comparison.differences
        if d.mostly_format and d.paired.verdict == "better"
    ]
    if not shares:
        return []
    shown = " and ".join(shares)
    note = (
        f"{_FORMAT}: {shown} comes from completions that had no answer or were cut off before; "
        "that part of the gain may be format rather than maths."
    )
    return [note]


def render_table(comparison: Comparison) -> RenderableType:
    """The table of results, the differences, and the notes, for a rich console (80 columns up)."""
    if not comparison.results:
        return Text("Nothing was evaluated.")
    parts: list[RenderableType] = [_results_table(comparison)]
    if comparison.differences:
        parts += [Text(), _differences_table(comparison)]
    parts.append(Text())
    parts += [
        Text(note, style="yellow" if note.startswith(_FORMAT) else "dim")
        for note in _notes(comparison)
    ]
    return Group(*parts)


def render_parts(results: Sequence[EvaluationResult], *, by: str) -> RenderableType | None:
    """Accuracy by `subject` or `level`, one column a result; None where problems have none."""
    parts = [result.by_subject if by == "subject" else result.by_level for result in results]
    names = list(dict.fromkeys(name for part in parts for name in part))[:_MANY_PARTS]
    if not names:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(by)
    table.add_column("problems", justify="right")
    for result in results:
        table.add_column(label(result.name), justify="right")
    for name in names:
        found = [part.get(name) for part in parts]
        count = next(accuracy.problems for accuracy in found if accuracy is not None)
        table.add_row(name, str(count), *(_accuracy_cell(a, 0) if a else "-" for a in found))
    return table


def render_plain(renderable: RenderableType, *, width: int = 100) -> str:
    """The same as plain text without colours, for files and logs."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
