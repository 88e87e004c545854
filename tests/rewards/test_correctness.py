"""Correctness with grades, and by itself as inside TRL."""

from __future__ import annotations

import pytest

from grouper.rewards import REWARDS
from grouper.types import AnswerContract, AnswerFormat, AnswerKind, Grade, Verdict

LAYOUT = AnswerFormat(
    name="t",
    template="{reasoning}{answer}",
    contract=AnswerContract(kind=AnswerKind.BOXED),
    tags=None,
)


def test_uses_the_grades_it_is_given() -> None:
    grades = [
        Grade(verdict=verdict, extracted=None, rung="text", reason="")
        for verdict in (Verdict.CORRECT, Verdict.TIMEOUT, Verdict.NO_ANSWER, Verdict.NOT_SCORED)
    ]
    function = REWARDS["correctness"](LAYOUT, value=2.0)
    scores = function(prompts=["q"] * 4, completions=["?"] * 4, grades=grades)
    assert scores == [2.0, 0.0, 0.0, None]


@pytest.mark.parametrize(("timeout", "expected"), [(0.0, 0.0), (-0.5, -0.5), (None, None)])
def test_the_recipe_says_what_an_unjudged_answer_earns(
    timeout: float | None, expected: float | None
) -> None:
    grades = [
        Grade(verdict=verdict, extracted="x", rung="symbolic", reason="")
        for verdict in (Verdict.TIMEOUT, Verdict.CRASH)
    ]
    function = REWARDS["correctness"](LAYOUT, timeout=timeout)
    found = function(prompts=["q"] * 2, completions=["?"] * 2, grades=grades)
    assert found == [expected, expected]


@pytest.mark.parametrize("column", ["reference_answer", "answer", "solution"])
def test_grades_by_itself_as_trl_calls_it(column: str) -> None:
    function = REWARDS["correctness"](LAYOUT)
    completions = [[{"role": "assistant", "content": text}] for text in (r"\boxed{4.0}", "4")]
    columns = {column: ["2+2=4\n#### 4", "4"], "trainer_state": None}
    assert function(prompts=[[]] * 2, completions=completions, **columns) == [1.0, 0.0]


def test_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="needs a column"):
        REWARDS["correctness"](LAYOUT)(prompts=["q"], completions=["4"])


def test_the_accuracy_of_an_unreadable_reference() -> None:
    grades = [
        Grade(verdict=verdict, extracted=None, rung="text", reason="")
        for verdict in (Verdict.CORRECT, Verdict.INCORRECT, Verdict.NOT_SCORED)
    ]
    given = {"prompts": ["q"] * 3, "completions": ["?"] * 3, "grades": grades}
    assert REWARDS["accuracy"](LAYOUT)(**given) == [1.0, 0.0, None]
    assert REWARDS["accuracy"](LAYOUT, variant="original")(**given) == [1.0, 0.0, 0.5]
