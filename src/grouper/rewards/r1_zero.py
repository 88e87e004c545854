"""System B: the pair of the r1-zero prompt on MATH. The total is the answer where the format holds.

The stack `math-r1-zero` pays the answer and records the format with weight 0.
"""

from __future__ import annotations

from collections.abc import Callable

from grouper.rewards.base import RewardBuilder, RewardFunction
from grouper.rewards.building import (
    check_variant,
    per_completion,
    per_grade,
    reward_builder,
    tags_of,
)
from grouper.rewards.format import format_holds
from grouper.types import AnswerFormat, Grade, Verdict


@reward_builder
def r1_zero_format(layout: AnswerFormat, *, variant: str = "default") -> RewardFunction:
    """1 where the format holds: `</think> <answer>` with one space, an answer, `</answer>`; else 0.

    Range 0 to 1. `variant: original` wants those two strings anywhere. Source: system B.
    """
    holds = _checker(layout, variant, "r1_zero_format")
    return per_completion("r1_zero_format", (0.0, 1.0), lambda text: float(holds(text)))


@reward_builder
def r1_zero_answer(layout: AnswerFormat, *, variant: str = "default") -> RewardFunction:
    """1 for a correct answer in a text whose format holds (as in `r1_zero_format`); else 0.

    Range 0 to 1; None where the reference cannot be read. Source: system B.
    """
    holds = _checker(layout, variant, "r1_zero_answer")

    def score(grade: Grade, text: str) -> float | None:
        if grade.verdict is Verdict.NOT_SCORED:
            return None
        return float(grade.correct and holds(text))

    return per_grade("r1_zero_answer", layout, (0.0, 1.0), score)


def _checker(layout: AnswerFormat, variant: str, name: str) -> Callable[[str], bool]:
    _, close, answer_open, answer_close = tags_of(layout, name)
    if check_variant(variant, name):
        return lambda text: f"{close} {answer_open}" in text and answer_close in text
    return lambda text: format_holds(text, layout)


R1_ZERO: dict[str, RewardBuilder] = {
    "r1_zero_format": r1_zero_format,
    "r1_zero_answer": r1_zero_answer,
}
