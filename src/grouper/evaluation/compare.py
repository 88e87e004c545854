"""Comparison of results on the same problems: one table, and a verdict on each difference."""

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

from grouper.errors import DataError, plural
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
# Rows of a table of subjects or levels; more are hard to read.
_MANY_PARTS = 40

# Causes of a difference.
Cause = Literal["format", "extraction", "truncation", "reasoning"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of one result from another on the same problems."""

    before: str
    after: str
    paired: PairedComparison
    causes: Mapping[Cause, float]
    """The parts of the difference, by the fault of completions that are right in the other result.
    `format`: no answer in the format, though the math is right, or no answer at all; `extraction`:
    an answer in the format that could not be read, though the math is right; `truncation`: cut off
    before an answer; `reasoning`: a wrong answer. From the base to GRPO by way of SFT, the causes
    of both stages together."""
    seeds: Interval | None = None
    """The interval of the difference over several seeds of one recipe."""

    @property
    def verdict(self) -> Verdict:
        """The verdict over the problems; with several seeds the interval over them must agree."""
        if self.seeds is not None and self.seeds.covers(0.0):
            return "no evidence"
        return self.paired.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several results of the same problems, and their paired differences."""

    results: tuple[EvaluationResult, ...]
    """The results on the problems that all have."""
    differences: tuple[Difference, ...]
    """Each result against the previous one, then the last against the first."""
    left_out: int = 0
    """Problems that are not in all of the results, or in one with another reference."""
    seeds: Mapping[str, Sequence[EvaluationResult]] = field(default_factory=dict)
    """The seeds of each result that is pooled from several."""

    @property
    def numbers(self) -> dict[str, Any]:
        """All numbers by name, for JSON."""
        accuracies_of_seeds = {}
        for name, seeds in self.seeds.items():
            accuracies_of_seeds[name] = [seed.accuracy for seed in seeds]
        results = [{"name": result.name, **result.numbers} for result in self.results]
        differences = []
        for difference in self.differences:
            fields = asdict(difference)
            fields["verdict"] = difference.verdict
            differences.append(fields)
        return {
            "results": results,
            "differences": differences,
            "left_out": self.left_out,
            "accuracies_of_seeds": accuracies_of_seeds,
        }


def compare(
    results: Sequence[EvaluationResult],
    *,
    seeds: Mapping[str, Sequence[EvaluationResult]] | None = None,
) -> Comparison:
    """Compare results on the problems that they share, in the order given (base, SFT, GRPO).

    Args:
        results: results with different names.
        seeds: the seeds of the results that `pool` has combined.

    Raises:
        DataError: they share no problem, or none that was scored in all of them.
    """
    shared, left_out = _shared_problems(results)
    seeds = seeds or {}
    if left_out:
        results = [_of_problems(result, shared) for result in results]
        shared_seeds = {}
        for name, seed_results in seeds.items():
            shared_seeds[name] = [
                _of_problems(result, shared, number) for number, result in enumerate(seed_results)
            ]
        seeds = shared_seeds
    first_scores = results[0].scores if results else {}
    scored_ids = [
        problem_id
        for problem_id in first_scores
        if all(problem_id in result.scores for result in results)
    ]

    if len(results) > 1 and not scored_ids:
        raise DataError(
            "no problem could be scored in every result",
            where="the reference answers",
            fix="`grouper data audit` lists references that cannot be read.",
        )

    pairs = list(itertools.pairwise(results))
    causes = [_causes(before, after, scored_ids) for before, after in pairs]
    if len(results) > 2:
        first = results[0]
        last = results[-1]
        pairs.append((first, last))
        if _are_stages_of_a_run(results):
            causes.append(_sum_causes(causes))
        else:
            causes.append(_causes(first, last, scored_ids))

    differences = []
    for (before, after), pair_causes in zip(pairs, causes, strict=True):
        fewest_items = min(len(before.slim), len(after.slim))
        paired = paired_comparison(
            [before.scores[problem_id] for problem_id in scored_ids],
            [after.scores[problem_id] for problem_id in scored_ids],
            samples=round(fewest_items / len(shared)),
        )
        seeds_before = seeds.get(before.name)
        seeds_after = seeds.get(after.name)
        differences.append(
            Difference(
                before=before.name,
                after=after.name,
                paired=paired,
                causes=pair_causes,
                seeds=_interval_over_seeds(seeds_before, seeds_after),
            )
        )
    return Comparison(
        results=tuple(results),
        differences=tuple(differences),
        left_out=left_out,
        seeds=seeds,
    )


def _shared_problems(
    results: Sequence[EvaluationResult],
) -> tuple[set[tuple[str, str]], int]:
    """Return (id, reference) of the problems that all results have, and the number of others.

    Raises:
        DataError: they share no problem.
    """
    if not results:
        return set(), 0
    problems = [set(result.problems) for result in results]
    ids = [{problem_id for problem_id, _ in keys} for keys in problems]
    shared = set.intersection(*problems)
    shared_ids = set.intersection(*ids)
    # Ids are often row numbers: by chance, some other problems have the same answer.
    if len(results) > 1 and 2 * len(shared) <= len(shared_ids):
        names = " and ".join(repr(result.name) for result in results)
        raise DataError(
            f"the evaluations {names} share no "
            "problem: an id and its reference answer would have to be the same, as they are for "
            f"{len(shared)} of the {len(shared_ids)} ids in common",
            where="comparing evaluations",
            fix="Measure every model on the same problems. Seeds with problems of their own are "
            "paired: name the same ones in each arm, in the same order.",
        )
    all_ids = set().union(*ids)
    return shared, len(all_ids) - len(shared)


def pool(name: str, seeds: Sequence[EvaluationResult]) -> EvaluationResult:
    """Combine several seeds of one recipe, as further samples of the same problems.

    If each seed has problems of its own, the result has the problems of all.
    """
    different_problems = any(seed.problems != seeds[0].problems for seed in seeds)
    samples = max(seed.samples for seed in seeds)
    items = []
    for number, seed in enumerate(seeds):
        for item in seed.slim:
            problem_id = item.problem_id
            if different_problems:
                problem_id = _id_in_pool(problem_id, number)
            sample = number * samples + item.sample
            items.append(replace(item, problem_id=problem_id, sample=sample))
    return replace(seeds[0], name=name, items=tuple(items), samples=samples)


def _id_in_pool(problem_id: str, seed_number: int) -> str:
    """Return the id in a pool of a problem that one seed alone has."""
    return f"{problem_id} (seed {seed_number})"


def _of_problems(
    result: EvaluationResult, shared: set[tuple[str, str]], seed_number: int | None = None
) -> EvaluationResult:
    """Keep the items of these problems, which may have the ids of a pool for those of a seed."""
    items = []
    for item in result.slim:
        ids = [item.problem_id]
        if seed_number is not None:
            ids.append(_id_in_pool(item.problem_id, seed_number))
        if any((problem_id, item.answer) in shared for problem_id in ids):
            items.append(item)
    return replace(result, items=tuple(items))


def _interval_over_seeds(
    before: Sequence[EvaluationResult] | None,
    after: Sequence[EvaluationResult] | None,
) -> Interval | None:
    """Return the interval of a difference over paired seeds; None without several."""
    if before is None or after is None:
        return None
    n = len(before)
    if n < 2 or len(after) != n:
        return None
    changes = [new.accuracy - old.accuracy for old, new in zip(before, after, strict=True)]
    fewest_items = min(len(seed.slim) for seed in (*before, *after))
    # Where seeds agree, as wide as if one completion of one seed had come out differently.
    least = (n - 1) / n / max(1, fewest_items) ** 2
    return t_interval(changes, least=least, most=1.0)


def _causes(
    before: EvaluationResult, after: EvaluationResult, problem_ids: Sequence[str]
) -> dict[Cause, float]:
    """Divide the difference of the accuracies among its causes.

    Every sample of a problem is paired with every one in the other result: a pair that became
    right counts for the fault before, and one that became wrong against the fault after.
    """
    failures_before = _failures(before)
    failures_after = _failures(after)
    causes = dict.fromkeys(CAUSES, 0.0)
    for problem_id in problem_ids:
        for cause in CAUSES:
            key = (problem_id, cause)
            gained = failures_before.get(key, 0.0) * after.scores[problem_id]
            lost = failures_after.get(key, 0.0) * before.scores[problem_id]
            causes[cause] += (gained - lost) / len(problem_ids)
    return causes


# The stages of a run, each of which begins with the model of the previous one.
_STAGES = ("base", "sft", "grpo")


def _are_stages_of_a_run(results: Sequence[EvaluationResult]) -> bool:
    """Tell whether results are those of the stages of a run, in their order."""
    return tuple(result.phase for result in results) == _STAGES


def _sum_causes(stages: Sequence[Mapping[Cause, float]]) -> dict[Cause, float]:
    """Add the causes of the stages of a run.

    Compared directly, nearly all of the gain would count for the first fault of the base, such as
    truncation, and not for the reasoning that GRPO improved after SFT had removed this fault.
    """
    return {cause: math.fsum(stage[cause] for stage in stages) for cause in CAUSES}


def _failures(result: EvaluationResult) -> dict[tuple[str, Cause], float]:
    """Return (problem, cause) -> share of its samples that are not right for this cause."""
    samples = Counter(item.problem_id for item in result.slim)
    shares: dict[tuple[str, Cause], float] = {}
    for item in result.slim:
        if not item.correct:
            key = (item.problem_id, _cause(item))
            shares[key] = shares.get(key, 0.0) + 1 / samples[item.problem_id]
    return shares


def _cause(item: EvaluationItem) -> Cause:
    """Return why a completion is not correct."""
    if item.outcome == "truncated":
        return "truncation"
    if item.outcome == "no_answer":
        return "reasoning" if item.lenient_outcome == "wrong" else "format"
    misread = item.verdict in (Graded.UNPARSEABLE, Graded.TIMEOUT, Graded.CRASH)
    return "extraction" if misread or item.lenient else "reasoning"


def changed_problems(
    before: EvaluationResult, after: EvaluationResult
) -> list[tuple[float, EvaluationItem, EvaluationItem]]:
    """List (change of the score, item before, item after) of problems whose score changed.

    The items are the first ones that show the change. The largest gains come first.
    """
    old_items = _first_items(before)
    new_items = _first_items(after)
    changed = []
    for name in before.scores.keys() & after.scores.keys():
        change = after.scores[name] - before.scores[name]
        if not change:
            continue
        old_item = old_items[name, change < 0]
        new_item = new_items[name, change > 0]
        changed.append((change, old_item, new_item))
    return sorted(changed, key=lambda row: (-row[0], row[1].problem_id))


def _first_items(result: EvaluationResult) -> dict[tuple[str, bool], EvaluationItem]:
    """Return (problem, correct) -> its first item."""
    return {(item.problem_id, item.correct): item for item in reversed(result.slim)}


def label(name: str) -> str:
    """Return the name of a result in tables.

    >>> label("grpo"), label("validation-grpo-000020")
    ('GRPO', 'validation-grpo-000020')
    """
    return _LABELS.get(name, name)


# --- notes on a comparison -----------------------------------------------------------------------


def _notes(comparison: Comparison) -> list[str]:
    """Write the sentences below a table of results."""
    results = comparison.results
    notes = [_note_on_problems(comparison)]
    if comparison.differences:
        methods = sorted({d.paired.method for d in comparison.differences})
        notes.append(f"Paired by problem: {'; '.join(methods)}.")
    if any(result.lenient is not None for result in results):
        notes.append("Lenient: accuracy % with the answer taken from anywhere, in any format.")
    if comparison.left_out:
        notes.append(
            f"Left out: {plural(comparison.left_out, 'problem')}, which not all of them have "
            "with the same reference."
        )
    notes += _notes_on_differences(comparison)
    for outcome, description in _NO_VERDICT.items():
        counts = [result.split_counts[outcome] for result in results]
        if any(counts):
            by_model = [
                f"{label(result.name)} {result.split_counts[outcome]}" for result in results
            ]
            notes.append(f"{description}: {', '.join(by_model)}.")
    unreadable = []
    for result in results:
        count, right = result.text_alone
        unreadable.append(f"{label(result.name)} {count} ({right} right)")
    if any(result.text_alone[0] for result in results):
        notes.append(
            "Problems whose reference cannot be read, graded by text alone: "
            f"{', '.join(unreadable)}."
        )
    return notes


def _note_on_problems(comparison: Comparison) -> str:
    """Write the number of problems and completions, and the settings that results share."""
    results = comparison.results
    *smaller_counts, largest_count = sorted({result.samples for result in results})
    counts = "".join(f"{count} or " for count in smaller_counts)
    completions = counts + plural(largest_count, "completion")
    is_pooled = any(len(r.slim) > len(r.problems) * r.samples for r in results)
    each = "each from every seed" if is_pooled else "each"
    problems = plural(len(results[0].problems), "problem")
    return f"{problems}, {completions} {each}{_shared_settings(comparison)}."


def _notes_on_differences(comparison: Comparison) -> Iterator[str]:
    """Write the causes of each difference, and its interval over seeds."""
    for difference in comparison.differences:
        title = _title(difference)
        if difference.verdict != "no evidence":
            causes = [f"{cause} {100 * difference.causes[cause]:+.1f}" for cause in CAUSES]
            yield f"Causes of {title}, in points: {', '.join(causes)}."
        seeds_before = len(comparison.seeds.get(difference.before, [0]))
        seeds_after = len(comparison.seeds.get(difference.after, [0]))
        if difference.seeds is not None:
            yield f"Over {seeds_after} seeds {title}: {_points(difference.seeds)}."
        elif max(seeds_before, seeds_after) > 1:
            yield (
                f"No interval over seeds of {title}, which have "
                f"{seeds_after} and {seeds_before}: the verdict is that over problems alone."
            )


def _shared_settings(comparison: Comparison) -> str:
    """Describe the settings that all results share, by those recorded with them."""
    results = comparison.results
    if len(results) == 1 or results[0].name in comparison.seeds:
        return ""
    sampling: list[Any] = [result.card.get("sampling") for result in results]
    if None in sampling:
        return "; the same problems"
    if any(settings != sampling[0] for settings in sampling):
        return "; the same problems, sampled in different ways"
    seeds = {result.card.get("seed") for result in results}
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
    """Render results, differences and notes as tables for a rich console (80 columns up)."""
    if not comparison.results:
        return Text("Nothing was evaluated.")
    renderables: list[RenderableType] = [_results_table(comparison)]
    if comparison.differences:
        renderables.append(Text())
        renderables.append(_differences_table(comparison))
    renderables.append(Text())
    renderables += [Text(note, style="dim") for note in _notes(comparison)]
    return Group(*renderables)


def _results_table(comparison: Comparison) -> Table:
    results = comparison.results
    k = max(result.samples for result in results)
    columns = {
        "model": [label(r.name) for r in results],
        f"accuracy % [{100 * CONFIDENCE:g} %]": [_interval(r.overall) for r in results],
    }
    if any(r.lenient is not None for r in results):
        means = [r.lenient.mean if r.lenient else None for r in results]
        columns["lenient"] = [_percent(mean) for mean in means]
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
        paired = difference.paired
        verdict = difference.verdict
        sentence = f"{label(difference.after)} is {verdict} than {label(difference.before)}"
        if verdict == "no evidence":
            sentence = "no evidence of a change"
        test = "p<0.001" if paired.p_value < 0.001 else f"p={paired.p_value:.3f}"
        rows.append(
            [
                _title(difference),
                f"{100 * paired.difference:+.1f} {_points(paired.interval)}",
                str(paired.higher),
                str(paired.lower),
                test,
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
    """Yield (`subject`, `level` or `length`, tables of accuracy and rewards), if there are any."""
    for by in ("subject", "level", "length"):
        tables = [_accuracy_by(results, by)]
        if by != "length":
            tables.append(_rewards_by(results, by))
        measured = [table for table in tables if table is not None]
        if measured:
            yield by, measured


def _accuracy_by(results: Sequence[EvaluationResult], by: str) -> Table | None:
    """Make a table with a row per name and a column per result; None where there is no name."""
    accuracies: list[Mapping[str, Accuracy]] = [getattr(result, f"by_{by}") for result in results]
    all_names = _names_in(accuracies)
    names = all_names[:_MANY_PARTS]
    if not names:
        return None
    models = [label(result.name) for result in results]

    def shortest_length(name: str) -> int:
        shortest, _, _ = name.partition("-")
        return int(shortest)

    if by == "length":
        names.sort(key=shortest_length)
    rows = []
    for name in names:
        row = [name]
        of_models = [by_name.get(name) for by_name in accuracies]
        # The problems in a range of lengths differ from model to model.
        if by != "length":
            first = next(accuracy for accuracy in of_models if accuracy)
            row.append(str(first.problems))
        row += [_interval(accuracy, 0) if accuracy else "-" for accuracy in of_models]
        rows.append(row)
    if by == "length":
        return table(["tokens", *models], rows)
    more = len(all_names) - len(names)
    if more > 0:
        empty_cells = [""] * (1 + len(models))
        rows.append([f"and {more} more", *empty_cells])
    return table([by, "problems", *models], rows)


def _rewards_by(results: Sequence[EvaluationResult], by: str) -> Table | None:
    """Make a table of mean rewards, a row per name and result; None where none was measured."""
    rewards: list[Mapping[str, Mapping[str, float]]] = [
        getattr(result, f"rewards_by_{by}") for result in results
    ]
    names = _names_in(rewards)[:_MANY_PARTS]
    if not names:
        return None
    all_means = [means for by_name in rewards for means in by_name.values()]
    components = _names_in(all_means)
    rows = []
    for name in names:
        for result, by_name in zip(results, rewards, strict=True):
            if name in by_name:
                means = by_name[name]
                cells = [_number(means.get(component), 3) for component in components]
                rows.append([name, label(result.name), *cells])
    return table([f"rewards by {by}", "model", *components], rows)


def _names_in(mappings: Iterable[Iterable[str]]) -> list[str]:
    """List all names, each once, in the order in which they first occur."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def render_answers(results: Sequence[EvaluationResult]) -> RenderableType:
    """Render pass@k, maj@k, the split with the answer taken from anywhere, and the lengths."""
    sizes = sorted({k for result in results for k in result.pass_at_k} - {1})
    rows = []
    for k in sizes:
        chances = [_percent(result.pass_at_k.get(k)) for result in results]
        rows.append([f"pass@{k} %", *chances])
    if any(result.majority is not None for result in results):
        majorities = [_percent(result.majority) for result in results]
        rows.append(["maj@k %", *majorities])
    lenient = [r.lenient_counts for r in results if r.lenient_counts is not None]
    if len(lenient) == len(results):
        for outcome, name in zip(OUTCOMES, _SPLIT, strict=False):
            counts = [str(counts_of_model[outcome]) for counts_of_model in lenient]
            rows.append([f"leniently {name}", *counts])
    tokens_right = [_number(result.tokens_right) for result in results]
    tokens_wrong = [_number(result.tokens_wrong) for result in results]
    rows.append(["tokens, right", *tokens_right])
    rows.append(["tokens, others", *tokens_wrong])
    # A column per model, since there may be any number of k.
    titles = ["answers", *(label(result.name) for result in results)]
    return table(titles, rows)


def render_metrics(results: Sequence[EvaluationResult]) -> RenderableType | None:
    """Render format, reasoning and rewards, a row per result; None where none was measured."""
    measured = [(label(r.name), r.metrics) for r in results if r.metrics is not None]
    if not measured:
        return None
    components = _names_in(metrics.rewards for _, metrics in measured)
    rows = []
    for name, metrics in measured:
        rewards = [metrics.rewards.get(component) for component in components]
        rows.append(
            [
                name,
                _percent(metrics.format_accuracy),
                _percent(metrics.with_reasoning),
                _number(metrics.reasoning_length),
                _number(metrics.reward, 3),
                *(_number(reward, 3) for reward in rewards),
            ]
        )
    return table(["model", "format %", "reasoning %", "characters", "reward", *components], rows)


def metrics_line(result: EvaluationResult) -> str | None:
    """Write format, accuracy, reasoning and reward in a line for a log; None: not measured."""
    metrics = result.metrics
    if metrics is None:
        return None
    length = ""
    if not math.isnan(metrics.reasoning_length):
        length = f" ({metrics.reasoning_length:.0f} characters)"
    return (
        f"{result.name}: format {_percent(metrics.format_accuracy)} %, "
        f"answers {_percent(metrics.answer_accuracy)} %, "
        f"reasoning {_percent(metrics.with_reasoning)} %{length}, "
        f"reward {_number(metrics.reward, 3)}"
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
    """Make a table of texts, with numbers at the right.

    No text is markup, because many are a model's.

    Args:
        titles: titles of the columns.
        rows: rows of a text per column.
        lines: draw lines between the cells; without them the first column names the rows.
        style: more arguments of rich's `Table`.
    """
    rows = list(rows)
    rich_table = Table(**style) if lines else Table(**_PLAIN, **style)
    for position, title in enumerate(titles):
        names_rows = position == 0 and not lines
        has_numbers = any(_IS_NUMBER.match(str(row[position])) for row in rows)
        # The second column may be an interval, which has a space.
        no_wrap = position < 2 and not lines
        justify: Literal["left", "right"] = "right" if has_numbers and not names_rows else "left"
        rich_table.add_column(Text(title), justify=justify, no_wrap=no_wrap)
    for row in rows:
        cells = [cell if isinstance(cell, Text) else Text(cell) for cell in row]
        rich_table.add_row(*cells)
    return rich_table


def _interval(accuracy: Accuracy, digits: int = 1) -> str:
    low = _percent(accuracy.interval.low, digits)
    high = _percent(accuracy.interval.high, digits)
    return f"{_percent(accuracy.mean)} [{low}, {high}]"


def _percent(value: float | None, digits: int = 1) -> str:
    return _number(None if value is None else 100 * value, digits)


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
