"""Reasoning steps and repetition, by hand."""

from __future__ import annotations

import math

import pytest
from reward_calls import THINK, score

from grouper.errors import RewardError
from grouper.rewards import REWARDS


@pytest.mark.parametrize(
    ("text", "markers"),
    [
        ("", 0),
        ("4 is the answer", 0),
        ("Step 1: add. Step 2: halve.", 2),
        ("1. add\n2. halve\n3. done", 3),
        ("- add\n* halve", 2),
        ("First, add. Second, halve. Next, check. Finally, 4.", 4),
        ("First add\nFinally halve", 2),
        ("firstly\n-5 + 3\n2.5 is it\nStep by step", 0),
        ("Step 1: a\n" * 50, 50),
    ],
)
def test_reasoning_steps(text: str, markers: int) -> None:
    assert score("reasoning_steps", THINK, text) == pytest.approx(min(1, markers / 3))
    assert score("reasoning_steps", THINK, text, enough=100) == pytest.approx(markers / 100)


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("", 0),
        ("two words", 0),
        ("a b c d", 0),
        ("a b c a b c", 1 / 4),  # abc bca cab abc
        ("A b c a B c", 1 / 4),
        ("x " * 12, 9 / 10),
    ],
)
def test_repetition(text: str, repeated: float) -> None:
    assert score("repetition_penalty", THINK, text) == pytest.approx(-0.1 * repeated)
    assert score("repetition_penalty", THINK, text, max_penalty=-1) == pytest.approx(-repeated)


def test_no_repetition_is_zero_and_not_minus_zero() -> None:
    for text in ("a b c d", "two words"):
        assert math.copysign(1, score("repetition_penalty", THINK, text)) == 1


def test_repetition_in_tokens_and_characters() -> None:
    function = REWARDS["repetition_penalty"](THINK, unit="tokens", n=2)
    (value,) = function(prompts=["q"], completions=["one"], completion_ids=[[5, 6, 5, 6]])
    assert value == pytest.approx(-0.1 / 3)
    assert score("repetition_penalty", THINK, "abAb", unit="characters", n=2) == pytest.approx(
        -0.1 / 3
    )
    with pytest.raises(ValueError, match="needs completion_ids"):
        function(prompts=["q"], completions=["one"])
    with pytest.raises(RewardError, match="'lines' is not a unit of the reward"):
        score("repetition_penalty", THINK, "x", unit="lines")


def test_shorter_n_grams() -> None:
    assert score("repetition_penalty", THINK, "a a b", n=1) == pytest.approx(-0.1 / 3)


def test_paying_for_repetition_is_refused() -> None:
    with pytest.raises(RewardError, match="rewards repetition"):
        score("repetition_penalty", THINK, "x", max_penalty=0.1)
    with pytest.raises(RewardError, match="enough is 0"):
        score("reasoning_steps", THINK, "x", enough=0)
