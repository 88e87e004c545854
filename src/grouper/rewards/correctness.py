"""Rewards for being right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grouper.config import GradingConfig
from grouper.grading import Grader
from grouper.rewards.base import Content, RewardBuilder, RewardFunction, RewardLayout, texts_of
from grouper.types import Grade, Verdict

__all__ = ["CORRECTNESS", "correctness"]


def correctness(layout: RewardLayout, *, value: float = 1.0) -> RewardFunction:
    """`value` for a correct answer, 0 for any other; None where the reference cannot be read.

    Uses the grades it is handed. Without them (inside TRL) it grades by itself, taking the
    references from `reference_answer`, `answer` or `solution`, whichever comes first.
    """
    grader: Grader | None = None

    def function(
        *, prompts: Sequence[Content], completions: Sequence[Content], **columns: Any
    ) -> list[float | None]:
        del prompts
        nonlocal grader
        grades: Sequence[Grade] | None = columns.get("grades")
        if grades is None:
            grader = grader or Grader(layout.contract, GradingConfig())
            grades = grader.grade(texts_of(completions), _references(columns))
        return [
            None if grade.verdict is Verdict.NOT_SCORED else value if grade.correct else 0.0
            for grade in grades
        ]

    return function


def _references(columns: dict[str, Any]) -> list[str]:
    for name in ("reference_answer", "answer", "solution"):
        if columns.get(name) is not None:
            return [_answer_part(str(reference)) for reference in columns[name]]
    raise ValueError("correctness needs a column reference_answer, answer or solution")


def _answer_part(reference: str) -> str:
    """The final answer where a GSM8K solution (`... #### 72`) is given as the reference."""
    return reference.rpartition("####")[2].strip() if "####" in reference else reference


CORRECTNESS: dict[str, RewardBuilder] = {"correctness": correctness}
