"""The tables of evaluations: results side by side, differences, parts, answers and rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grouper.errors import DataError, plural
from grouper.evaluation.budgets import BudgetPoint, SamplesPoint, budget_curve, samples_curve
from grouper.evaluation.compare import CAUSES, Comparison, Difference, compare, label
from grouper.evaluation.result import OUTCOME_NAMES, OUTCOMES, Accuracy, EvaluationResult, Outcome
from grouper.evaluation.statistics import CONFIDENCE, Interval, Verdict
from grouper.tables import Block, Cell, Line, Table, Tone, table

# Rows of a table of subjects or levels; more are hard to read.
_MANY_PARTS = 40


def comparison_blocks(comparison: Comparison) -> list[Block]:
    """Return results, differences and notes as tables and lines."""
    if not comparison.results:
        return [Line("Nothing was evaluated.")]
    blocks: list[Block] = [_results_table(comparison)]
    if comparison.differences:
        blocks.append(_differences_table(comparison))
    blocks += [Line(note) for note in _notes(comparison)]
    return blocks


def result_blocks(results: Sequence[EvaluationResult]) -> list[Block]:
    """Compare results; where no problem was scored in all of them, return each by itself."""
    try:
        return comparison_blocks(compare(results))
    except DataError as error:
        blocks: list[Block] = []
        for result in results:
            blocks += comparison_blocks(compare([result]))
        return [*blocks, Line(error.paragraph(), "unsure")]


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
    for outcome in _SPLIT:
        name = OUTCOME_NAMES[outcome]
        columns[name] = [str(r.split_counts[outcome]) for r in results]
    columns["tokens"] = [_number(r.mean_tokens) for r in results]
    return table([*columns], zip(*columns.values(), strict=True))


# The outcomes that are counted in columns.
_SPLIT = OUTCOMES[:4]


def _differences_table(comparison: Comparison) -> Table:
    rows: list[list[str | Cell]] = []
    for difference in comparison.differences:
        paired = difference.paired
        verdict = difference.verdict
        sentence = f"{label(difference.after)} is {verdict} than {label(difference.before)}"
        if verdict == "no evidence":
            sentence = "no evidence of a change"
        test = "p<0.001" if paired.p_value < 0.001 else f"p={paired.p_value:.3f}"
        rows.append(
            [
                difference_title(difference),
                f"{100 * paired.difference:+.1f} {_points(paired.interval)}",
                str(paired.higher),
                str(paired.lower),
                test,
                Cell(sentence, TONES[verdict]),
            ]
        )
    points = f"points [{100 * CONFIDENCE:g} %]"
    return table(["difference", points, "up", "down", "test", "verdict"], rows)


def difference_title(difference: Difference) -> str:
    """Name the two results of a difference, the later one first."""
    return f"{label(difference.after)} - {label(difference.before)}"


def _points(interval: Interval) -> str:
    return f"[{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


TONES: Mapping[Verdict, Tone] = {"better": "good", "worse": "bad", "no evidence": "unsure"}


def part_tables(
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


def answers_table(results: Sequence[EvaluationResult]) -> Table:
    """Return pass@k, maj@k, the split with the answer taken from anywhere, and the lengths."""
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
        for outcome in _SPLIT:
            name = OUTCOME_NAMES[outcome]
            counts = [str(counts_of_model[outcome]) for counts_of_model in lenient]
            rows.append([f"leniently {name}", *counts])
    tokens_right = [_number(result.tokens_right) for result in results]
    tokens_wrong = [_number(result.tokens_wrong) for result in results]
    rows.append(["tokens, right", *tokens_right])
    rows.append(["tokens, others", *tokens_wrong])
    # A column per model, since there may be any number of k.
    titles = ["answers", *(label(result.name) for result in results)]
    return table(titles, rows)


def curve_tables(results: Sequence[EvaluationResult]) -> list[Table]:
    """Return the tables of accuracy against tokens: of a completion, and of several samples."""
    tables = []
    curves = [budget_curve(result) for result in results]
    if all(curves):
        tables.append(_budgets_table(results, curves))
    samples = [(label(result.name), samples_curve(result)) for result in results]
    if any(curve for _, curve in samples):
        tables.append(_samples_table(samples))
    return tables


def _budgets_table(
    results: Sequence[EvaluationResult], curves: Sequence[Sequence[BudgetPoint]]
) -> Table:
    """Make a table with a row per budget, and a column per model."""
    rows = []
    for points in zip(*curves, strict=True):
        cells = []
        for point in points:
            shares = (point.accuracy.mean, point.attempted, point.precision)
            cells.append(" / ".join(_percent(share) for share in shares))
        budgets = dict.fromkeys(f"{point.tokens:,}" for point in points)
        rows.append([" or ".join(budgets), *cells])
    models = [label(result.name) for result in results]
    return table(["tokens: right / answered / right of these %", *models], rows)


def _samples_table(curves: Iterable[tuple[str, Sequence[SamplesPoint]]]) -> Table:
    """Make a table with a row per model and number of samples."""
    rows = []
    for name, curve in curves:
        for point in curve:
            shares = (point.average, point.majority, point.certain, point.best)
            cells = [_percent(share) for share in shares]
            rows.append([name, str(point.k), f"{point.tokens:,.0f}", *cells])
    titles = ["samples", "k", "tokens a problem", "avg@k", "maj@k", "most certain of k", "pass@k"]
    return table(titles, rows)


def metrics_table(results: Sequence[EvaluationResult]) -> Table | None:
    """Return format, reasoning and rewards, a row per result; None where none was measured."""
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


# --- sentences below the tables ------------------------------------------------------------------


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
        title = difference_title(difference)
        if difference.verdict != "no evidence":
            causes = [f"{cause} {100 * difference.causes[cause]:+.1f}" for cause in CAUSES]
            yield f"Causes of {title}, in points: {', '.join(causes)}."
        seeds_before = len(comparison.seeds.get(difference.before, [0]))
        seeds_after = len(comparison.seeds.get(difference.after, [0]))
        if difference.seeds is not None:
            how = ""
            if difference.most_seeds is not None:
                how = f", valid after each of up to {difference.most_seeds}"
            yield f"Over {seeds_after} seeds {title}: {_points(difference.seeds)}{how}."
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
        return "; the same problems, sampled with different seeds"
    return "; the same problems and random seeds for every model"


_NO_VERDICT: Mapping[Outcome, str] = {
    "timeout": "Grader timeouts, counted as not correct",
    "crash": "Grader crashes, counted as not correct",
    "not_scored": "Completions whose reference answer cannot be read, excluded",
}


# Share of truncated completions above which the accuracy says little about the model.
_MOSTLY = 0.5


def log_line(result: EvaluationResult) -> str:
    """Write what an evaluation during a run has found in a line.

    Example: `GRPO step 8, validation: 49.2 % [40.7, 57.8] correct, format 98.4 %, reward 0.492`.
    """
    model = label(result.phase)
    if result.phase != "base":
        model += f" step {result.step}"
    line = f"{model}, {result.split}: {_interval(result.overall, unit=' %')} correct"
    metrics = result.metrics
    if metrics is not None:
        line += f", format {_percent(metrics.format_accuracy)} %"
        line += f", reward {_number(metrics.reward, 3)}"
    if result.cut_off > _MOSTLY:
        line += f"; {_percent(result.cut_off)} % truncated"
    return line


def verdict_sentence(comparison: Comparison, split: str) -> str:
    """Say whether the last of several models is better than the first.

    Args:
        comparison: of two models or more.
        split: the set of problems, `test` or `validation`.
    """
    first, last = comparison.results[0], comparison.results[-1]
    difference = comparison.differences[-1]
    before, after = label(difference.before), label(difference.after)
    answers: Mapping[Verdict, str] = {
        "better": f"Yes: {after} is better than {before}.",
        "worse": f"No: {after} is worse than {before}.",
        "no evidence": f"No evidence of a change from {before} to {after}.",
    }
    return (
        f"{answers[difference.verdict]} {_percent(first.accuracy)} % before and "
        f"{_percent(last.accuracy)} % after, of {last.overall.problems} {split} problems: "
        f"{change_in_points(difference)}."
    )


def change_in_points(difference: Difference) -> str:
    """Write a difference in points with its interval."""
    paired = difference.paired
    return f"{100 * paired.difference:+.1f} points {_points(paired.interval)}"


def _interval(accuracy: Accuracy, digits: int = 1, *, unit: str = "") -> str:
    low = _percent(accuracy.interval.low, digits)
    high = _percent(accuracy.interval.high, digits)
    return f"{_percent(accuracy.mean)}{unit} [{low}, {high}]"


def _percent(value: float | None, digits: int = 1) -> str:
    return _number(None if value is None else 100 * value, digits)


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
