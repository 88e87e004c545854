"""System B: the format is two strings; the answer pays only where they are there."""

from __future__ import annotations

import pytest
from reward_calls import R1_ZERO, RIGHT, UNREADABLE, WRONG, score, score_grade


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" so 4 </think> <answer> 4 </answer>", 1),
        (" </answer> </think> <answer>", 1),  # the source asks no more than that
        (" so 4 </think><answer> 4 </answer>", 0),
        (" so 4 </think>\n<answer> 4 </answer>", 0),
        (" so 4 </think> <answer> 4", 0),
        ("", 0),
    ],
)
def test_format(text: str, value: float) -> None:
    assert score("r1_zero_format", R1_ZERO, text) == value
    assert score_grade("r1_zero_answer", RIGHT, text, layout=R1_ZERO) == value
    assert score_grade("r1_zero_answer", WRONG, text, layout=R1_ZERO) == 0
    assert score_grade("r1_zero_answer", UNREADABLE, text, layout=R1_ZERO) is None


def test_the_answer_is_symbolic() -> None:
    text = " half </think> <answer> 0.5 </answer>"
    assert score("r1_zero_answer", R1_ZERO, text, r"\frac{1}{2}") == 1
