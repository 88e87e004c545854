"""Comparison of results on the same problems, with a verdict on each difference."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from grouper.errors import DataError
from grouper.evaluation.result import EvaluationItem, EvaluationResult
from grouper.evaluation.sequential import sequential_interval
from grouper.evaluation.statistics import (
    Interval,
    PairedComparison,
    Verdict,
    paired_comparison,
    t_interval,
)
from grouper.types import Verdict as Graded

_LABELS = {"base": "base", "sft": "SFT", "grpo": "GRPO"}
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
    most_seeds: int | None = None
    """Seeds there might have been, where results decided after each whether to add another; the
    interval over seeds is then wider (`sequential`)."""

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
    def last_stage(self) -> Difference:
        """The difference of the last result from the one before it."""
        pairs = len(self.results) - 1
        return self.differences[pairs - 1]

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
    most_seeds: int | None = None,
) -> Comparison:
    """Compare results on the problems that they share, in the order given (base, SFT, GRPO).

    Args:
        results: results with different names.
        seeds: the seeds of the results that `pool` has combined.
        most_seeds: as of `Difference`.

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
                seeds=_interval_over_seeds(seeds_before, seeds_after, most_seeds),
                most_seeds=most_seeds,
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


def compare_arms(
    arms: Mapping[str, Sequence[EvaluationResult]], *, most_seeds: int | None = None
) -> Comparison:
    """Compare arms by name, each the mean of its seeds.

    Args:
        arms: the result of each seed.
        most_seeds: as of `Difference`.

    Raises:
        DataError: as of `compare`.
    """
    seeds = {}
    results = []
    for name, arm_results in arms.items():
        if len(arm_results) > 1:
            seeds[name] = arm_results
            results.append(pool(name, arm_results))
        else:
            results.append(replace(arm_results[0], name=name))
    return compare(results, seeds=seeds, most_seeds=most_seeds)


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
    most_seeds: int | None,
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
    if most_seeds is not None:
        return sequential_interval(changes, most_seeds, least=least, furthest=1.0)
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
