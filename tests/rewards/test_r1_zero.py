"""System B: the format is two strings; the answer pays only where they are there."""

from __future__ import annotations

import pytest
from reward_calls import R1_ZERO, RIGHT, UNREADABLE, WRONG, score, score_grade


@pytest.mark.parametrize(
    ("text", "value", "original"),
    [
        (" so 4 </think> <answer> 4 </answer>", 1, 1),
        (" </answer> </think> <answer>", 0, 1),  # the source asks for two strings, wherever
        (" so 4 </think> <answer> </answer>", 0, 1),
        (" so 4 </think><answer> 4 </answer>", 0, 0),
        (" so 4 </think>\n<answer> 4 </answer>", 0, 0),
        (" so 4 </think> <answer> 4", 0, 0),
        ("", 0, 0),
    ],
)
def test_format(text: str, value: float, original: float) -> None:
    for wanted, params in ((value, {}), (original, {"variant": "original"})):
        assert score("r1_zero_format", R1_ZERO, text, **params) == wanted
        assert score_grade("r1_zero_answer", RIGHT, text, layout=R1_ZERO, **params) == wanted
        assert score_grade("r1_zero_answer", WRONG, text, layout=R1_ZERO, **params) == 0
        unreadable = score_grade("r1_zero_answer", UNREADABLE, text, layout=R1_ZERO, **params)
        assert unreadable is None


def test_the_answer_is_symbolic() -> None:
    text = " half </think> <answer> 0.5 </answer>"
    assert score("r1_zero_answer", R1_ZERO, text, r"\frac{1}{2}") == 1
