"""Cosine, length and soft overlong, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from reward_calls import RIGHT, THINK, UNREADABLE, WRONG, score_grade

from grouper.errors import RewardError
from grouper.rewards import REWARDS


@pytest.mark.parametrize(
    ("characters", "right", "wrong"),
    [
        (0, 1.0, -0.5),
        (500, 0.9, -0.3),
        (1000, 0.8, -0.1),
        (2000, 0.8, -0.1),  # clamped
        (100_000, 0.8, -0.1),
    ],
)
def test_cosine(characters: int, right: float, wrong: float) -> None:
    text = "x" * characters
    assert score_grade("cosine", RIGHT, text) == pytest.approx(right)
    assert score_grade("cosine", WRONG, text) == pytest.approx(wrong)
    assert score_grade("cosine", UNREADABLE, text) is None


def test_the_original_cosine_rises_again() -> None:
    assert score_grade("cosine", RIGHT, "x" * 2000, variant="original") == pytest.approx(1.0)
    assert score_grade("cosine", WRONG, "x" * 2000, variant="original") == pytest.approx(-0.5)
    assert score_grade("cosine", UNREADABLE, "x" * 1000, variant="original") == pytest.approx(-0.1)


def test_cosine_is_settable() -> None:
    params = {"min_correct": 0.0, "max_correct": 2.0, "scale": 10.0}
    assert score_grade("cosine", RIGHT, "x" * 5, **params) == pytest.approx(1.0)
    assert score_grade("cosine", WRONG, "", min_wrong=-3.0) == -3.0
    with pytest.raises(RewardError, match="scale is 0"):
        score_grade("cosine", RIGHT, scale=0)


def length(prompts: list[str], sizes: list[int], grades: list[Any]) -> list[Any]:
    return list(
        REWARDS["length"](THINK)(
            prompts=prompts,
            completions=["x"] * len(sizes),
            grades=grades,
            completion_ids=[[0] * size for size in sizes],
        )
    )


def test_length_within_one_prompt() -> None:
    grades = [RIGHT, RIGHT, WRONG, WRONG, UNREADABLE]
    assert length(["q"] * 5, [10, 20, 10, 30, 30], grades) == [0.5, 0.0, 0.0, -0.5, None]
    assert length(["q"] * 2, [7, 7], [RIGHT, WRONG]) == [0.0, 0.0]


def test_length_compares_the_completions_of_one_prompt_only() -> None:
    assert length(["a", "b", "a", "b"], [10, 100, 20, 300], [RIGHT] * 4) == [0.5, 0.5, -0.5, -0.5]


def test_the_unit_of_a_length_is_named() -> None:
    given: dict[str, Any] = {
        "prompts": ["q"] * 2,
        "completions": ["a b c", "abcd efgh"],
        "grades": [RIGHT, RIGHT],
        "completion_ids": [[1] * 7, [1] * 6],
    }
    assert REWARDS["length"](THINK)(**given) == [-0.5, 0.5]
    assert REWARDS["length"](THINK, unit="characters")(**given) == [0.5, -0.5]
    assert REWARDS["length"](THINK, unit="words")(**given) == [-0.5, 0.5]
    for unit, scale in (("tokens", 7), ("characters", 5), ("words", 3)):
        assert REWARDS["cosine"](THINK, unit=unit, scale=scale)(**given)[0] == pytest.approx(0.8)
    with pytest.raises(RewardError, match="Use tokens, characters or words"):
        REWARDS["length"](THINK, unit="bytes")


def test_tokens_are_never_guessed() -> None:
    for function in (
        REWARDS["length"](THINK),
        REWARDS["soft_overlong"](THINK, max_tokens=4, buffer_tokens=2),
        REWARDS["cosine"](THINK, unit="tokens"),
    ):
        with pytest.raises(ValueError, match="needs completion_ids"):
            function(prompts=["q"], completions=["ab"], grades=[RIGHT])


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0), (75, 0), (80, -0.2), (100, -1), (101, -1), (9999, -1)]
)
def test_soft_overlong(tokens: int, value: float) -> None:
    function = REWARDS["soft_overlong"](THINK, max_tokens=100, buffer_tokens=25)
    (got,) = function(prompts=["q"], completions=["x"], completion_ids=[[0] * tokens])
    assert got == pytest.approx(value)


@pytest.mark.parametrize(("most", "buffer"), [(100, 0), (100, 101), (100, -1)])
def test_an_impossible_buffer_is_refused(most: int, buffer: int) -> None:
    with pytest.raises(RewardError, match="buffer_tokens"):
        REWARDS["soft_overlong"](THINK, max_tokens=most, buffer_tokens=buffer)
