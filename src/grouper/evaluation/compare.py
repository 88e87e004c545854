"""Base, SFT and GRPO on the same problems: one table, and a verdict on each difference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grouper.errors import DataError
from grouper.evaluation.result import OUTCOMES, Accuracy, EvaluationResult, Outcome
from grouper.evaluation.statistics import PairedComparison, paired_comparison

_LABELS = {"base": "base", "sft": "SFT", "grpo": "GRPO"}
# More subjects or levels than this are not a table to read.
_MANY_PARTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one result differs from another on the same problems."""

    before: str
    after: str
    paired: PairedComparison
    from_format: float | None
    """Share of a gain that came from completions without an answer or cut off, or None where
    there is no gain. The rest came from wrong answers made right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several results of the same problems, and their paired differences."""

    results: tuple[EvaluationResult, ...]
    differences: tuple[Difference, ...]
    """Each result against the one before it, then the last against the first."""
    confidence: float


def compare(results: Sequence[EvaluationResult], *, confidence: float = 0.95) -> Comparison:
    """Compare results of the same problems, in the order given (base, SFT, GRPO).

    Raises:
        DataError: the results are not of the same problems with the same number of samples.
    """
    for result in results[1:]:
        _require_same_items(results[0], result)
    problems = dict.fromkeys(item.problem_id for result in results for item in result.items)
    common = [name for name in problems if all(name in result.scores for result in results)]
    pairs = list(itertools.pairwise(results))
    if len(results) > 2:
        pairs.append((results[0], results[-1]))
    differences = [
        Difference(
            before=before.name,
            after=after.name,
            paired=paired_comparison(
                [before.scores[name] for name in common],
                [after.scores[name] for name in common],
                confidence=confidence,
            ),
            from_format=_share_from_format(before, after, set(common)),
        )
        for before, after in pairs
        if common
    ]
    return Comparison(results=tuple(results), differences=tuple(differences), confidence=confidence)


def _require_same_items(first: EvaluationResult, other: EvaluationResult) -> None:
    mine, theirs = ({(i.problem_id, i.sample): i.answer for i in r.items} for r in (first, other))
    if mine == theirs:
        return
    changed = sum(mine[key] != theirs[key] for key in mine.keys() & theirs.keys())
    raise DataError(
        f"evaluations {first.name!r} and {other.name!r} are not of the same items: "
        f"{len(mine.keys() - theirs.keys())} only in the first, "
        f"{len(theirs.keys() - mine.keys())} only in the second, {changed} with another reference "
        "answer",
        where="comparing evaluations",
        fix="Measure every model on the same problems with the same number of samples.",
    )


def _share_from_format(
    before: EvaluationResult, after: EvaluationResult, common: set[str]
) -> float | None:
    """Net gain of items that had no answer (or were cut off), as a share of the whole net gain.

    An item that was right before and has no answer after counts against it.
    """
    format_gain = gain = 0
    for old, new in zip(before.items, after.items, strict=True):
        change = new.correct - old.correct
        if change and old.problem_id in common:
            gain += change
            wrong = old if new.correct else new
            format_gain += change * (wrong.outcome in ("no_answer", "truncated"))
    return format_gain / gain if gain > 0 else None


def label(name: str) -> str:
    """The name of a result in tables.

    >>> label("grpo"), label("validation-grpo-000020")
    ('GRPO', 'validation-grpo-000020')
    """
    return _LABELS.get(name, name)


# --- notes on a comparison -----------------------------------------------------------------------


def _notes(comparison: Comparison) -> list[str]:
    results = comparison.results
    problems = len({item.problem_id for item in results[0].items})
    each = "1 completion" if results[0].samples == 1 else f"{results[0].samples} completions"
    notes = [f"{problems} problems, {each} each{_shared(results)}."]
    if comparison.differences:
        methods = sorted({d.paired.method for d in comparison.differences})
        notes.append(f"Paired by problem: {'; '.join(methods)}.")
    if any(result.lenient is not None for result in results):
        notes.append("Lenient: accuracy % with the answer taken from anywhere, in any format.")
    shares = [
        f"{100 * min(1.0, d.from_format):.0f} % of {label(d.after)} - {label(d.before)}"
        for d in comparison.differences
        if d.paired.verdict == "better" and d.from_format is not None and d.from_format > 0.5
    ]
    if shares:
        notes.append(
            f"{_FORMAT}: {' and '.join(shares)} comes from completions that had no answer or were "
            "cut off before; that part of the gain may be format rather than maths."
        )
    for outcome, what in _NO_VERDICT.items():
        counts = [(label(r.name), r.split_counts[outcome]) for r in results]
        if any(count for _, count in counts):
            notes.append(f"{what}: {', '.join(f'{name} {count}' for name, count in counts)}.")
    unread = [(label(r.name), *r.text_alone) for r in results]
    if any(count for _, count, _ in unread):
        shown = ", ".join(f"{name} {count} ({right} right)" for name, count, right in unread)
        notes.append(f"Problems whose reference cannot be read, graded by text alone: {shown}.")
    return notes


def _shared(results: Sequence[EvaluationResult]) -> str:
    """What all measurements had in common, as far as the settings kept with the results show."""
    sampling: list[Any] = [result.card.get("sampling") for result in results]
    seeds = {result.card.get("seed") for result in results}
    if len(results) == 1:
        return ""
    if None in sampling:
        return "; the same problems"
    if any(other != sampling[0] for other in sampling):
        return "; the same problems, sampled in different ways"
    if sampling[0]["temperature"] > 0 and len(seeds) > 1:
        return "; the same problems, drawn with different seeds"
    return "; the same problems and draws for every model"


_NO_VERDICT: Mapping[Outcome, str] = {
    "timeout": "Grader timeouts, counted as not correct",
    "crash": "Grader crashes, counted as not correct",
    "not_scored": "Completions whose reference answer cannot be read, taking no part",
}
_FORMAT = "Format"

# --- tables and lines ----------------------------------------------------------------------------


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


def _results_table(comparison: Comparison) -> Table:
    results = comparison.results
    lenient = any(result.lenient is not None for result in results)
    k = max(result.samples for result in results)
    optional = [*(["lenient"] if lenient else []), *([f"pass@{k}"] if k > 1 else [])]
    rows = [
        [
            label(result.name),
            _interval(result.overall),
            *([_percent(result.lenient.mean if result.lenient else None)] if lenient else []),
            *([_percent(result.pass_at_k.get(k))] if k > 1 else []),
            *(str(result.split_counts[outcome]) for outcome in OUTCOMES[:4]),
            _number(result.mean_tokens),
        ]
        for result in results
    ]
    accuracy = f"accuracy % [{100 * comparison.confidence:g} %]"
    outcomes = ("correct", "wrong", "no answer", "cut off")
    return _table(["model", accuracy, *optional, *outcomes, "tokens"], rows)


def _differences_table(comparison: Comparison) -> Table:
    rows: list[list[RenderableType]] = []
    for difference in comparison.differences:
        paired = difference.paired
        after, before = label(difference.after), label(difference.before)
        low, high = 100 * paired.interval.low, 100 * paired.interval.high
        sentence = f"{after} is {paired.verdict} than {before}"
        if paired.verdict == "no evidence":
            sentence = "no evidence of a change"
        rows.append(
            [
                f"{after} - {before}",
                f"{100 * paired.difference:+.1f} [{low:+.1f}, {high:+.1f}]",
                str(paired.higher),
                str(paired.lower),
                "p<0.001" if paired.p_value < 0.001 else f"p={paired.p_value:.3f}",
                Text(sentence, style=_STYLE[paired.verdict]),
            ]
        )
    points = f"points [{100 * comparison.confidence:g} %]"
    return _table(["difference", points, "up", "down", "test", "verdict"], rows)


_STYLE = {"better": "bold green", "worse": "bold red", "no evidence": "yellow"}


def render_parts(results: Sequence[EvaluationResult], *, by: str) -> RenderableType | None:
    """Accuracy by `subject` or `level`, one column per result; None where problems have none."""
    parts = [result.by_subject if by == "subject" else result.by_level for result in results]
    names = list(dict.fromkeys(name for part in parts for name in part))[:_MANY_PARTS]
    if not names:
        return None
    rows = []
    for name in names:
        found = [part.get(name) for part in parts]
        count = next(accuracy.problems for accuracy in found if accuracy is not None)
        rows.append([name, str(count), *(_interval(one, 0) if one else "-" for one in found)])
    return _table([by, "problems", *(label(result.name) for result in results)], rows)


def render_metrics(results: Sequence[EvaluationResult]) -> RenderableType | None:
    """Format, reasoning and each reward, one row per result; None where none was measured."""
    known = [(label(r.name), r.metrics) for r in results if r.metrics is not None]
    if not known:
        return None
    names = list(dict.fromkeys(name for _, metrics in known for name in metrics.rewards))
    rows = [
        [
            name,
            _percent(metrics.format_accuracy),
            _percent(metrics.with_reasoning),
            _number(metrics.reasoning_length),
            _number(metrics.reward, 3),
            *(_number(metrics.rewards.get(part), 3) for part in names),
        ]
        for name, metrics in known
    ]
    return _table(["model", "format %", "reasoning %", "characters", "reward", *names], rows)


def render_rewards_by_subject(result: EvaluationResult) -> RenderableType | None:
    """The mean of each reward by subject; None where no problem has one."""
    parts = result.rewards_by_subject
    if not parts:
        return None
    names = list(dict.fromkeys(name for means in parts.values() for name in means))
    rows = [[part, *(_number(parts[part].get(name), 3) for name in names)] for part in parts]
    return _table([f"rewards of {label(result.name)}", *names], rows)


def metrics_line(result: EvaluationResult) -> str | None:
    """Format, accuracy, reasoning and reward in a line for a log; None where not measured."""
    found = result.metrics
    if found is None:
        return None
    length = found.reasoning_length
    shown = "" if math.isnan(length) else f" ({length:.0f} characters)"
    return (
        f"{result.name}: format {_percent(found.format_accuracy)} %, "
        f"answers {_percent(found.answer_accuracy)} %, "
        f"reasoning {_percent(found.with_reasoning)} %{shown}, "
        f"reward {_number(found.reward, 3)}"
    )


def _table(titles: Sequence[str], rows: Iterable[Sequence[RenderableType]]) -> Table:
    """A table whose first column names its rows, with numbers in the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, title in enumerate(titles):
        words = place == 0 or title == "verdict"
        # The second column may be an interval, which holds a space.
        table.add_column(title, justify="left" if words else "right", no_wrap=place < 2)
    for row in rows:
        table.add_row(*row)
    return table


def _interval(accuracy: Accuracy, digits: int = 1) -> str:
    low, high = accuracy.interval.low, accuracy.interval.high
    return f"{_percent(accuracy.mean)} [{_percent(low, digits)}, {_percent(high, digits)}]"


def _percent(value: float | None, digits: int = 1) -> str:
    return _number(None if value is None else 100 * value, digits)


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
