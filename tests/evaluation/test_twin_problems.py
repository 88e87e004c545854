"""Problems beside their twins: which are measured, and what the pair says."""

from __future__ import annotations

import pytest
from test_budgets import item, result_of

from grouper.data import ProblemSet
from grouper.errors import DataError
from grouper.evaluation.twin_problems import compare_twins, twins_of
from grouper.types import Problem


def problem(number: int, solution: str) -> Problem:
    return Problem(
        id=f"p/{number}",
        question=f"Ann has {20 + number} pens and buys 17 more. How many has she?",
        answer=str(37 + number),
        source="mine",
        columns={"answer": solution},
    )


def marked(number: int) -> str:
    return f"{20 + number}+17=<<{20 + number}+17={37 + number}>>{37 + number}"


def test_only_marked_solutions_have_twins_and_they_keep_their_ids() -> None:
    problems = ProblemSet(
        name="mine",
        problems=(problem(1, marked(1)), problem(2, "Add them."), problem(5, marked(5))),
    )
    twins = twins_of(problems, key=0)
    assert [twin.id for twin in twins.problems] == ["p/1", "p/5"]
    assert twins.left_out == 1
    assert twins.name == "mine (twins)"
    for twin, original in zip(twins.problems, problems.problems[::2], strict=True):
        assert twin.question != original.question
        assert twin.answer != original.answer
    assert twins_of(problems, key=0) == twins


def test_without_marks_there_is_a_sentence() -> None:
    with pytest.raises(DataError, match="no problem has a twin"):
        twins_of(ProblemSet(name="mine", problems=(problem(2, "Add them."),)), key=0)


def test_a_model_that_knows_the_answers_is_worse_on_twins() -> None:
    originals = result_of([item(n, 0, 10, "1") for n in range(40)])
    twins = result_of([item(n, 0, 10, "1" if n < 15 else "2") for n in range(30)])
    found = compare_twins("mine", originals, twins)
    assert (found.original, found.paired.problems) == (1.0, 30)
    assert found.paired.difference == pytest.approx(-0.5)
    assert found.paired.verdict == "worse"
    assert found.sentence == (
        "mine: of 30 problems with a twin, 100.0 % right as they are and 50.0 % with other "
        f"numbers: -50.0 points [{100 * found.paired.interval.low:+.1f}, "
        f"{100 * found.paired.interval.high:+.1f}], it knows these problems better than others of "
        "their kind."
    )


def test_equal_results_are_no_evidence() -> None:
    result = result_of([item(n, 0, 10, str(1 + n % 2)) for n in range(30)])
    assert "no evidence of a difference." in compare_twins("mine", result, result).sentence
