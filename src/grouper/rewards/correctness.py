"""Rewards for being right, by the grader's verdict."""

from __future__ import annotations

from grouper.rewards.base import RewardBuilder, RewardFunction
from grouper.rewards.building import check_variant, nothing_or, per_grade, reward_builder
from grouper.types import AnswerFormat, Grade, Verdict


@reward_builder
def correctness(
    layout: AnswerFormat, *, value: float = 1.0, timeout: float | None = 0.0
) -> RewardFunction:
    """`value` for a correct answer, 0 for any other; None where the reference cannot be read.

    Range 0 to `value`. An answer that the grader could not judge in time, or that crashed its
    worker, earns `timeout`: like any wrong answer unless the recipe says otherwise, and
    `timeout: null` takes the rollout out of its group.

    Uses the grades it is handed. Without them (inside TRL) it grades by itself, taking the
    references from `reference_answer`, `answer` or `solution`, whichever comes first.
    """

    def score(grade: Grade, text: str) -> float | None:
        del text
        if grade.verdict is Verdict.NOT_SCORED:
            return None
        if grade.verdict in (Verdict.TIMEOUT, Verdict.CRASH):
            return timeout
        return value if grade.correct else 0.0

    low, high = nothing_or(value)
    unjudged = 0.0 if timeout is None else timeout
    return per_grade("correctness", layout, (min(low, unjudged), max(high, unjudged)), score)


@reward_builder
def accuracy(layout: AnswerFormat, *, variant: str = "default") -> RewardFunction:
    """1 for a correct answer, 0 for any other; None where the reference cannot be read.

    Range 0 to 1. `variant: original` pays 0.5 for every completion of an unreadable reference.
    Source: system E.
    """
    unreadable = 0.5 if check_variant(variant, "accuracy") else None

    def score(grade: Grade, text: str) -> float | None:
        del text
        return unreadable if grade.verdict is Verdict.NOT_SCORED else float(grade.correct)

    return per_grade("accuracy", layout, (0.0, 1.0), score)


CORRECTNESS: dict[str, RewardBuilder] = {"correctness": correctness, "accuracy": accuracy}
