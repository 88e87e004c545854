"""Base, SFT and GRPO on the same problems: one table, and a verdict on each difference."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grouper.errors import DataError, counted
from grouper.evaluation.result import (
    OUTCOMES,
    Accuracy,
    EvaluationItem,
    EvaluationResult,
    Outcome,
)
from grouper.evaluation.statistics import (
    CONFIDENCE,
    Interval,
    PairedComparison,
    Verdict,
    paired_comparison,
    t_interval,
)
from grouper.types import Verdict as Graded

_LABELS = {"base": "base", "sft": "SFT", "grpo": "GRPO"}
# More subjects or levels than this are not a table to read.
_MANY_PARTS = 40

# What a difference is made of.
Cause = Literal["format", "extraction", "truncation", "reasoning"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one result differs from another on the same problems."""

    before: str
    after: str
    paired: PairedComparison
    causes: Mapping[Cause, float]
    """The parts of the difference: what was wrong with completions that are right in the other
    result. `format`: no answer in the format, though the maths is right, or no answer at all;
    `extraction`: an answer in the format that could not be read, though the maths is right;
    `truncation`: cut off before an answer; `reasoning`: a wrong answer. From the base to GRPO by
    way of SFT, those of both stages together."""
    seeds: Interval | None = None
    """Of the difference over several seeds of one recipe."""

    @property
    def verdict(self) -> Verdict:
        """That over the problems; with several seeds the interval over them must agree."""
        doubtful = self.seeds is not None and self.seeds.covers(0.0)
        return "no evidence" if doubtful else self.paired.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several results of the same problems, and their paired differences."""

    results: tuple[EvaluationResult, ...]
    """On the problems that all have."""
    differences: tuple[Difference, ...]
    """Each result against the one before it, then the last against the first."""
    left_out: int = 0
    """Problems that are not in all of the results, or there with another reference."""
    seeds: Mapping[str, Sequence[EvaluationResult]] = field(default_factory=dict)
    """The seeds of each result that is pooled from several."""

    @property
    def numbers(self) -> dict[str, Any]:
        """As JSON."""
        seeds = {name: [one.accuracy for one in found] for name, found in self.seeds.items()}
        return {
            "results": [{"name": r.name, **r.numbers} for r in self.results],
            "differences": [{**asdict(d), "verdict": d.verdict} for d in self.differences],
            "left_out": self.left_out,
            "accuracies_of_seeds": seeds,
        }


def compare(
    results: Sequence[EvaluationResult],
    *,
    seeds: Mapping[str, Sequence[EvaluationResult]] | None = None,
) -> Comparison:
    """Compare results on the problems that they share, in the order given (base, SFT, GRPO).

    Args:
        results: their names differ.
        seeds: the seeds of those that `pool` has made of several.

    Raises:
        DataError: they share no problem.
    """
    seeds = seeds or {}
    problems = [{*result.problems} for result in results]
    ids = [{name for name, _ in of_result} for of_result in problems]
    shared = set.intersection(*problems) if problems else set()
    left_out = len(set().union(*ids)) - len(shared)
    # Ids are often row numbers: of other problems some have the same answer by chance.
    if len(results) > 1 and 2 * len(shared) <= (named := len(set.intersection(*ids))):
        raise DataError(
            f"the evaluations {' and '.join(repr(result.name) for result in results)} share no "
            "problem: an id and its reference answer would have to be the same, as they are for "
            f"{len(shared)} of the {named} ids in common",
            where="comparing evaluations",
            fix="Measure every model on the same problems. Seeds with problems of their own are "
            "paired: name the same ones in each arm, in the same order.",
        )
    if left_out:
        results = [_of_problems(result, shared) for result in results]
        seeds = {
            name: [_of_problems(one, shared, number) for number, one in enumerate(found)]
            for name, found in seeds.items()
        }
    first = results[0].scores if results else {}
    common = [name for name in first if all(name in result.scores for result in results)]
    stages = list(itertools.pairwise(results))
    causes = [_causes(before, after, common) for before, after in stages]
    pairs = list(stages)
    if len(results) > 2:
        first_and_last = (results[0], results[-1])
        pairs.append(first_and_last)
        causes.append(_along(causes) if _is_one_path(results) else _causes(*first_and_last, common))
    differences = [
        Difference(
            before=before.name,
            after=after.name,
            paired=paired_comparison(
                [before.scores[name] for name in common],
                [after.scores[name] for name in common],
                samples=round(min(len(r.light) for r in (before, after)) / len(shared)),
            ),
            causes=causes_of_pair,
            seeds=_over_seeds(seeds.get(before.name), seeds.get(after.name)),
        )
        for (before, after), causes_of_pair in zip(pairs, causes, strict=True)
    ]
    return Comparison(
        results=tuple(results),
        differences=tuple(differences),
        left_out=left_out,
        seeds=seeds,
    )


def pool(name: str, seeds: Sequence[EvaluationResult]) -> EvaluationResult:
    """The results of several seeds of one recipe as one: further samples of the same problems.

    Where each seed has problems of its own, they are all of these problems.
    """
    own = any(seed.problems != seeds[0].problems for seed in seeds)
    samples = max(seed.samples for seed in seeds)
    items = [
        replace(
            item,
            problem_id=_of_seed(item.problem_id, number) if own else item.problem_id,
            sample=number * samples + item.sample,
        )
        for number, seed in enumerate(seeds)
        for item in seed.light
    ]
    return replace(seeds[0], name=name, items=tuple(items), samples=samples)


def _of_seed(problem: str, number: int) -> str:
    """The name of a problem of one seed's own."""
    return f"{problem} (seed {number})"


def _of_problems(
    result: EvaluationResult, shared: set[tuple[str, str]], seed: int | None = None
) -> EvaluationResult:
    """The items of these problems; those of a seed may have its number in their names there."""
    items = tuple(
        item
        for item in result.light
        if (item.problem_id, item.answer) in shared
        or (seed is not None and (_of_seed(item.problem_id, seed), item.answer) in shared)
    )
    return replace(result, items=items)


def _over_seeds(
    before: Sequence[EvaluationResult] | None,
    after: Sequence[EvaluationResult] | None,
) -> Interval | None:
    """The interval of a difference over seeds, each paired with its own; None without several."""
    if before is None or after is None or len(before) != len(after) or len(before) < 2:
        return None
    changes = [new.accuracy - old.accuracy for old, new in zip(before, after, strict=True)]
    # Where seeds agree, as wide as if one completion of one seed had come out differently.
    n, items = len(changes), min(len(one.light) for one in (*before, *after))
    return t_interval(changes, least=(n - 1) / n / max(1, items) ** 2, most=1.0)


def _causes(
    before: EvaluationResult, after: EvaluationResult, common: Sequence[str]
) -> dict[Cause, float]:
    """The parts of the difference of the accuracies, which they add up to.

    Every sample of a problem is paired with every one in the other result: a pair that became
    right counts for what was wrong before, one that became wrong against what is wrong after.
    """
    failed = [_failures(result) for result in (before, after)]
    found = dict.fromkeys(CAUSES, 0.0)
    for name in common:
        old, new = before.scores[name], after.scores[name]
        for cause in CAUSES:
            gained = failed[0].get((name, cause), 0.0) * new
            lost = failed[1].get((name, cause), 0.0) * old
            found[cause] += (gained - lost) / len(common)
    return found


# The stages of a run, each of which begins with the model of the one before.
_PATH = ("base", "sft", "grpo")


def _is_one_path(results: Sequence[EvaluationResult]) -> bool:
    """Whether results are those of the stages of a run, in their order."""
    return tuple(result.phase for result in results) == _PATH


def _along(stages: Sequence[Mapping[Cause, float]]) -> dict[Cause, float]:
    """The causes of the stages of a run together.

    Compared directly, nearly all of the gain would be booked on what was wrong with the base at
    first sight, as that it was cut off: not on the reasoning that GRPO taught after SFT had mended
    this.
    """
    return {cause: math.fsum(stage[cause] for stage in stages) for cause in CAUSES}


def _failures(result: EvaluationResult) -> dict[tuple[str, Cause], float]:
    """(problem, cause) -> share of its samples that are not right for it."""
    samples = Counter(item.problem_id for item in result.light)
    found: dict[tuple[str, Cause], float] = {}
    for item in result.light:
        if not item.correct:
            key = item.problem_id, _cause(item)
            found[key] = found.get(key, 0.0) + 1 / samples[item.problem_id]
    return found


def _cause(item: EvaluationItem) -> Cause:
    """What is wrong with a completion that is not correct."""
    if item.outcome == "truncated":
        return "truncation"
    if item.outcome == "no_answer":
        return "reasoning" if item.lenient_outcome == "wrong" else "format"
    misread = item.verdict in (Graded.UNPARSEABLE, Graded.TIMEOUT, Graded.CRASH)
    return "extraction" if misread or item.lenient else "reasoning"


def changed_problems(
    before: EvaluationResult, after: EvaluationResult
) -> list[tuple[float, EvaluationItem, EvaluationItem]]:
    """(change of the score, an item before, an item after) of each problem whose score changed.

    The items are the first ones that show it. Those that were won most clearly come first.
    """
    found = []
    old, new = (
        {(item.problem_id, item.correct): item for item in reversed(result.light)}
        for result in (before, after)
    )
    for name in before.scores.keys() & after.scores.keys():
        change = after.scores[name] - before.scores[name]
        if change:
            found.append((change, old[name, change < 0], new[name, change > 0]))
    return sorted(found, key=lambda row: (-row[0], row[1].problem_id))


def label(name: str) -> str:
    """The name of a result in tables.

    >>> label("grpo"), label("validation-grpo-000020")
    ('GRPO', 'validation-grpo-000020')
    """
    return _LABELS.get(name, name)


# --- notes on a comparison -----------------------------------------------------------------------


def _notes(comparison: Comparison) -> list[str]:
    results = comparison.results
    problems = len(results[0].problems)
    *fewer, most = sorted({result.samples for result in results})
    each = "".join(f"{count} or " for count in fewer) + counted(most, "completion")
    pooled = any(len(r.light) > len(r.problems) * r.samples for r in results)
    each += " each from every seed" if pooled else " each"
    notes = [f"{counted(problems, 'problem')}, {each}{_shared(results, comparison.seeds)}."]
    if comparison.differences:
        methods = sorted({d.paired.method for d in comparison.differences})
        notes.append(f"Paired by problem: {'; '.join(methods)}.")
    if any(result.lenient is not None for result in results):
        notes.append("Lenient: accuracy % with the answer taken from anywhere, in any format.")
    if comparison.left_out:
        notes.append(
            f"Left out: {counted(comparison.left_out, 'problem')}, which not all of them have "
            "with the same reference."
        )
    notes += _on_differences(comparison)
    for outcome, what in _NO_VERDICT.items():
        counts = [(label(r.name), r.split_counts[outcome]) for r in results]
        if any(count for _, count in counts):
            notes.append(f"{what}: {', '.join(f'{name} {count}' for name, count in counts)}.")
    unread = [(label(r.name), *r.text_alone) for r in results]
    if any(count for _, count, _ in unread):
        shown = ", ".join(f"{name} {count} ({right} right)" for name, count, right in unread)
        notes.append(f"Problems whose reference cannot be read, graded by text alone: {shown}.")
    return notes


def _on_differences(comparison: Comparison) -> Iterator[str]:
    """What each difference is made of, and how it is over seeds."""
    for difference in comparison.differences:
        parts = [f"{name} {100 * difference.causes[name]:+.1f}" for name in CAUSES]
        if difference.verdict != "no evidence":
            yield f"Causes of {_title(difference)}, in points: {', '.join(parts)}."
        sizes = [len(comparison.seeds.get(n, [0])) for n in (difference.before, difference.after)]
        if difference.seeds is not None:
            yield f"Over {sizes[1]} seeds {_title(difference)}: {_points(difference.seeds)}."
        elif max(sizes) > 1:
            yield (
                f"No interval over seeds of {_title(difference)}, which have "
                f"{sizes[1]} and {sizes[0]}: the verdict is that over problems alone."
            )


def _shared(results: Sequence[EvaluationResult], seeds_of: Mapping[str, Any]) -> str:
    """What all measurements had in common, as far as the settings kept with the results show."""
    sampling: list[Any] = [result.card.get("sampling") for result in results]
    seeds = {result.card.get("seed") for result in results}
    if len(results) == 1 or results[0].name in seeds_of:
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

# --- tables and lines ----------------------------------------------------------------------------


def render_table(comparison: Comparison) -> RenderableType:
    """The table of results, the differences, and the notes, for a rich console (80 columns up)."""
    if not comparison.results:
        return Text("Nothing was evaluated.")
    parts: list[RenderableType] = [_results_table(comparison)]
    if comparison.differences:
        parts += [Text(), _differences_table(comparison)]
    parts.append(Text())
    return Group(*parts, *(Text(note, style="dim") for note in _notes(comparison)))


def _results_table(comparison: Comparison) -> Table:
    results = comparison.results
    k = max(result.samples for result in results)
    columns = {
        "model": [label(r.name) for r in results],
        f"accuracy % [{100 * CONFIDENCE:g} %]": [_interval(r.overall) for r in results],
    }
    if any(r.lenient is not None for r in results):
        columns["lenient"] = [_percent(r.lenient.mean if r.lenient else None) for r in results]
    if k > 1:
        columns[f"pass@{k}"] = [_percent(r.pass_at_k.get(k)) for r in results]
    for outcome, name in zip(OUTCOMES, _SPLIT, strict=False):
        columns[name] = [str(r.split_counts[outcome]) for r in results]
    columns["tokens"] = [_number(r.mean_tokens) for r in results]
    return table([*columns], zip(*columns.values(), strict=True))


_SPLIT = ("correct", "wrong", "no answer", "cut off")


def _differences_table(comparison: Comparison) -> Table:
    rows: list[list[str | Text]] = []
    for difference in comparison.differences:
        paired, verdict = difference.paired, difference.verdict
        sentence = f"{label(difference.after)} is {verdict} than {label(difference.before)}"
        if verdict == "no evidence":
            sentence = "no evidence of a change"
        rows.append(
            [
                _title(difference),
                f"{100 * paired.difference:+.1f} {_points(paired.interval)}",
                str(paired.higher),
                str(paired.lower),
                "p<0.001" if paired.p_value < 0.001 else f"p={paired.p_value:.3f}",
                Text(sentence, style=_STYLE[verdict]),
            ]
        )
    points = f"points [{100 * CONFIDENCE:g} %]"
    return table(["difference", points, "up", "down", "test", "verdict"], rows)


def _title(difference: Difference) -> str:
    return f"{label(difference.after)} - {label(difference.before)}"


def _points(interval: Interval) -> str:
    return f"[{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


_STYLE = {"better": "bold green", "worse": "bold red", "no evidence": "yellow"}


def render_parts(
    results: Sequence[EvaluationResult],
) -> Iterator[tuple[str, list[Table]]]:
    """(`subject`, `level` or `length`, its tables: accuracy and rewards), where there are any."""
    for by in ("subject", "level", "length"):
        tables = [_accuracy_by(results, by)]
        tables += [] if by == "length" else [_rewards_by(results, by)]
        if found := [table for table in tables if table is not None]:
            yield by, found


def _accuracy_by(results: Sequence[EvaluationResult], by: str) -> Table | None:
    """A row per part and a column per result; None where there is no part."""
    parts: list[Mapping[str, Accuracy]] = [getattr(result, f"by_{by}") for result in results]
    every = list(dict.fromkeys(name for part in parts for name in part))
    names, more = every[:_MANY_PARTS], len(every) - _MANY_PARTS
    if not names:
        return None
    models = [label(result.name) for result in results]
    found = {name: [part.get(name) for part in parts] for name in names}
    cells = {n: [_interval(one, 0) if one else "-" for one in found[n]] for n in names}
    if by == "length":  # each model has problems of its own in a range
        names.sort(key=lambda name: int(name.partition("-")[0]))
        return table(["tokens", *models], [[name, *cells[name]] for name in names])
    counts = {n: next(str(one.problems) for one in found[n] if one) for n in names}
    rows = [[n, counts[n], *cells[n]] for n in names]
    rows += [[f"and {more} more", *[""] * (1 + len(models))]] if more > 0 else []
    return table([by, "problems", *models], rows)


def _rewards_by(results: Sequence[EvaluationResult], by: str) -> Table | None:
    """The mean of each reward, a row per part and result; None where none was measured."""
    rewards: list[Mapping[str, Mapping[str, float]]] = [
        getattr(result, f"rewards_by_{by}") for result in results
    ]
    parts = list(dict.fromkeys(part for found in rewards for part in found))[:_MANY_PARTS]
    if not parts:
        return None
    names = list(dict.fromkeys(n for found in rewards for means in found.values() for n in means))
    rows = [
        [part, label(result.name), *(_number(found[part].get(name), 3) for name in names)]
        for part in parts
        for result, found in zip(results, rewards, strict=True)
        if part in found
    ]
    return table([f"rewards by {by}", "model", *names], rows)


def render_answers(results: Sequence[EvaluationResult]) -> RenderableType:
    """pass@k, maj@k, the split with the answer taken from anywhere, and the lengths."""
    sizes = sorted({k for result in results for k in result.pass_at_k if k > 1})
    shown = {f"pass@{k} %": [_percent(r.pass_at_k.get(k)) for r in results] for k in sizes}
    if any(result.majority is not None for result in results):
        shown["maj@k %"] = [_percent(r.majority) for r in results]
    lenient = [r.lenient_counts for r in results if r.lenient_counts is not None]
    if len(lenient) == len(results):
        for outcome, name in zip(OUTCOMES, _SPLIT, strict=False):
            shown[f"leniently {name}"] = [str(counts[outcome]) for counts in lenient]
    shown["tokens, right"] = [_number(r.tokens_right) for r in results]
    shown["tokens, others"] = [_number(r.tokens_wrong) for r in results]
    # A column per model: there may be any number of k.
    titles = ["answers", *(label(result.name) for result in results)]
    return table(titles, [[name, *cells] for name, cells in shown.items()])


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
    return table(["model", "format %", "reasoning %", "characters", "reward", *names], rows)


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


_PLAIN: dict[str, Any] = {
    "box": None,
    "pad_edge": False,
    "padding": (0, 2, 0, 0),
    "header_style": "bold",
}
_IS_NUMBER = re.compile(r"[-+]?\d|p[<=]|-$")


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    lines: bool = False,
    **style: Any,
) -> Table:
    """A table of texts, none of which is markup: many are a model's. Numbers are at the right.

    Args:
        titles: of the columns.
        rows: a text per column.
        lines: between the cells; without them the first column names the rows.
        style: more arguments of rich's.
    """
    made, rows = Table(**style) if lines else Table(**_PLAIN, **style), [*rows]
    for place, title in enumerate(titles):
        numbers = any(_IS_NUMBER.match(str(row[place])) for row in rows) and (lines or place > 0)
        # The second column may be an interval, which holds a space.
        whole = not lines and place < 2
        made.add_column(Text(title), justify="right" if numbers else "left", no_wrap=whole)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def _interval(accuracy: Accuracy, digits: int = 1) -> str:
    low, high = accuracy.interval.low, accuracy.interval.high
    return f"{_percent(accuracy.mean)} [{_percent(low, digits)}, {_percent(high, digits)}]"


def _percent(value: float | None, digits: int = 1) -> str:
    return _number(None if value is None else 100 * value, digits)


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
