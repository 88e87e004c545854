"""System B: the pair of the r1-zero prompt on MATH. The total is the answer where the format holds.

The stack `math-r1-zero` pays the answer and records the format with weight 0.
"""

from __future__ import annotations

from grouper.rewards.base import RewardBuilder, RewardFunction, RewardLayout
from grouper.rewards.building import per_grade, per_text, tags_of
from grouper.types import Grade, Verdict

__all__ = ["R1_ZERO", "r1_zero_answer", "r1_zero_format"]


def r1_zero_format(layout: RewardLayout) -> RewardFunction:
    """1 where `</think> <answer>` (one space) and `</answer>` both occur; else 0.

    Range 0 to 1. Source: system B.
    """
    return per_text(
        "r1_zero_format",
        layout,
        (0.0, 1.0),
        lambda text: float(_has_format(text, layout, "r1_zero_format")),
    )


def r1_zero_answer(layout: RewardLayout) -> RewardFunction:
    """1 for a correct answer in a text whose format holds (`r1_zero_format`); else 0.

    Range 0 to 1; None where the reference cannot be read. Source: system B.
    """
    tags_of(layout, "r1_zero_answer")

    def score(grade: Grade, text: str) -> float | None:
        if grade.verdict is Verdict.NOT_SCORED:
            return None
        return float(grade.correct and _has_format(text, layout, "r1_zero_answer"))

    return per_grade("r1_zero_answer", layout, (0.0, 1.0), score)


def _has_format(text: str, layout: RewardLayout, name: str) -> bool:
    _, close, answer_open, answer_close = tags_of(layout, name)
    return f"{close} {answer_open}" in text and answer_close in text


R1_ZERO: dict[str, RewardBuilder] = {
    "r1_zero_format": r1_zero_format,
    "r1_zero_answer": r1_zero_answer,
}
