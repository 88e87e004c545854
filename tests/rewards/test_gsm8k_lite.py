"""System C: 1.0 + 0.1 + 0.1."""

from __future__ import annotations

import pytest
from reward_calls import XML, score

GOOD = "<reasoning>\na\n</reasoning>\n<answer>\n42\n</answer>"


@pytest.mark.parametrize(
    ("text", "reference", "correct", "numeric"),
    [
        (GOOD, "42", 1.0, 0.1),
        (GOOD, "42.0000009", 1.0, 0.1),
        (GOOD, "42.00001", 0, 0.1),
        ("<answer>1,234</answer>", "1234", 1.0, 0.1),
        ("<answer>$5</answer>", "5", 1.0, 0.1),
        ("<answer>7.</answer>", "7", 1.0, 0.1),
        ("<answer>1e3</answer>", "1000", 1.0, 0.1),
        ("<answer>blue</answer>", "blue", 1.0, 0),
        ("<answer>Blue</answer>", "blue", 0, 0),
        ("<answer>42 apples</answer>", "42", 0, 0),
        ("<answer>41, 42</answer>", "42", 0, 0),
        ("so\n#### 42", "42", 1.0, 0.1),
        (" 42 ", "42", 1.0, 0.1),  # the whole text
        ("it is 42", "42", 0, 0),
        ("", "42", 0, 0),
        ("<answer>" + "9" * 400 + "</answer>", "42", 0, 0),
        ("<answer>nan</answer>", "nan.", 0, 0),
    ],
)
def test_answers(text: str, reference: str, correct: float, numeric: float) -> None:
    assert score("lite_correctness", XML, text, reference) == correct
    assert score("lite_numeric", XML, text) == numeric


@pytest.mark.parametrize(
    ("text", "share"),
    [(GOOD, 1), (GOOD * 2, 1), ("<answer>4</answer>", 0.5), ("</answer>", 0.25), ("", 0)],
)
def test_tags_present(text: str, share: float) -> None:
    assert score("lite_tags_present", XML, text) == pytest.approx(0.1 * share)
