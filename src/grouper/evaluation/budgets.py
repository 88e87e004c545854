"""Accuracy against tokens, from the completions of an evaluation: nothing is sampled again.

Comparisons between models of unequal length are comparisons of budgets as well. One curve shortens
the completions, the other counts how many samples of a problem are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grouper.evaluation.result import (
    Accuracy,
    EvaluationItem,
    EvaluationResult,
    group_by,
    majority_of,
    mean_of,
)
from grouper.evaluation.statistics import pass_at_k
from grouper.types import FinishReason

# Budgets are these parts of the longest completion allowed.
PARTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """An evaluation as it would be with fewer tokens for each completion."""

    tokens: int
    """The budget."""
    accuracy: Accuracy
    """A completion that does not end within the budget counts as wrong. Below the whole budget this
    is a lower bound: a text that is cut off may hold its answer already."""
    attempted: float
    """Share of the completions that end within the budget with an answer."""
    precision: float
    """Share of these that are correct; NaN where there are none."""


def budget_curve(result: EvaluationResult, parts: int = PARTS) -> list[BudgetPoint]:
    """Return what the evaluation is at 1/parts, 2/parts, .. of its budget of tokens.

    Draws are addressed by their position, so that a smaller budget would have sampled the same
    tokens and stopped earlier.

    Args:
        result: every item has its number of tokens.
        parts: points of the curve.
    """
    items = result.scored_items
    if not items:
        return []
    budget = budget_of(result)
    points = []
    for part in range(1, parts + 1):
        tokens = math.ceil(budget * part / parts)
        within = [item for item in items if _ends_within(item, tokens, budget)]
        answered = [item for item in within if item.extracted is not None]
        right = {(item.problem_id, item.sample) for item in within if item.correct}
        scores: dict[str, list[float]] = {}
        for item in items:
            score = float((item.problem_id, item.sample) in right)
            scores.setdefault(item.problem_id, []).append(score)
        points.append(
            BudgetPoint(
                tokens=tokens,
                accuracy=Accuracy.of(list(scores.values())),
                attempted=len(answered) / len(items),
                precision=mean_of(item.correct for item in answered),
            )
        )
    return points


def budget_of(result: EvaluationResult) -> int:
    """Return the tokens that a completion of this evaluation might have had."""
    longest = max(item.tokens for item in result.slim)
    sampling = result.card.get("sampling")
    if isinstance(sampling, dict):
        return max(longest, int(sampling.get("max_new_tokens") or longest))
    return longest


def _ends_within(item: EvaluationItem, tokens: int, budget: int) -> bool:
    """Tell whether a completion ends by itself within so many tokens, or is cut off by all."""
    if item.finish_reason is FinishReason.LENGTH:
        return tokens >= budget
    return item.tokens <= tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesPoint:
    """An evaluation that uses k samples of each problem; every number is a mean over problems."""

    k: int
    tokens: float
    """Generated for a problem."""
    average: float
    """avg@k: share of the samples that are correct; the same for every k but for chance."""
    majority: float
    """maj@k: the most frequent answer is right."""
    certain: float
    """The sample that the model was most certain of is right: that of the highest mean log-prob of
    its tokens. NaN where log-probs were not kept."""
    best: float
    """pass@k: a verifier that makes no mistake finds a right one."""


def samples_curve(result: EvaluationResult) -> list[SamplesPoint]:
    """Return what k = 1, 2, 4, .. samples of each problem give.

    pass@k is the unbiased estimate over all subsets; the others are means over the blocks of k
    samples in their order, of which a last one that is not whole is left out.
    """
    samples = result.samples
    by_problem = group_by(result.scored_items, lambda item: item.problem_id)
    problems = [items for items in by_problem.values() if len(items) >= samples]
    if samples < 2 or not problems:
        return []
    sizes = sorted({2**power for power in range(samples.bit_length())} | {samples})
    points = []
    for k in sizes:
        if k > samples:
            continue
        points.append(
            SamplesPoint(
                k=k,
                tokens=k * mean_of(item.tokens for items in problems for item in items),
                average=_over_blocks(problems, k, lambda block: mean_of(i.correct for i in block)),
                majority=_over_blocks(problems, k, majority_of),
                certain=_over_blocks(problems, k, _most_certain),
                best=mean_of(
                    pass_at_k(len(items), sum(item.correct for item in items), k)
                    for items in problems
                ),
            )
        )
    return points


def _over_blocks(
    problems: Sequence[Sequence[EvaluationItem]],
    k: int,
    score: Callable[[Sequence[EvaluationItem]], float],
) -> float:
    """Return the mean over problems of the mean score of their blocks of k samples."""
    means = []
    for items in problems:
        starts = range(0, len(items) - k + 1, k)
        means.append(mean_of(score(items[start : start + k]) for start in starts))
    return mean_of(means)


def _most_certain(block: Sequence[EvaluationItem]) -> float:
    """Return whether the sample with the highest mean log-prob is correct; NaN without log-probs.

    Samples that are equally certain count with their share.
    """
    certainties = [item.logprob for item in block if item.logprob is not None]
    if len(certainties) < len(block):
        return math.nan
    highest = max(certainties)
    return mean_of(item.correct for item in block if item.logprob == highest)
