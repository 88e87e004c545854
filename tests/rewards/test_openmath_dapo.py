"""System D by hand, both ends of the total included."""

from __future__ import annotations

import pytest
from reward_calls import DAPO, score

GOOD = "a\nb<end_working_out><SOLUTION>100</SOLUTION>"


@pytest.mark.parametrize(
    ("text", "exact", "approximate"),
    [
        (GOOD, 3, 1.5),
        ("<start_working_out>" + GOOD, 3, 1.5),
        ("a <end_working_out>\n\n<SOLUTION> 1 </SOLUTION>\n", 3, 1.5),
        (GOOD + "so", 0, 1.5),
        ("a<end_working_out> so <SOLUTION>1</SOLUTION>", 0, 1.5),
        ("a<end_working_out><SOLUTION> </SOLUTION>", 0, 1.5),
        ("a<start_working_out>" + GOOD, 0, 1.5),  # opened again in the middle
        ("a<SOLUTION>1</SOLUTION>", 0, 0),
        (GOOD + "</SOLUTION>", 0, 0),
        (GOOD + GOOD, 0, -3),
        ("a<end_working_out>", 0, -1.5),
        ("", 0, -3),
    ],
)
def test_formats(text: str, exact: float, approximate: float) -> None:
    assert score("dapo_exact_format", DAPO, text) == exact
    assert score("dapo_approximate_format", DAPO, text) == approximate


@pytest.mark.parametrize(
    ("answer", "reference", "value", "number"),
    [
        ("100", "100", 5, 3),
        (" 100\n", "100", 3.5, 3),
        ("1 00", "100", 3.5, -1.5),  # the first number is 1
        ("100.0", "100", 2, 3),
        ("90", "100", 2, 2.5),
        ("110", "100", 2, 2.5),
        ("89", "100", 1.5, 1.5),
        ("120", "100", 1.5, 1.5),
        ("121", "100", -2, -1.5),
        ("-95", "-100", 2, 2.5),
        ("95", "-100", -2, -1.5),
        ("0", "0", 5, 3),
        ("0.01", "0", -2, -1.5),
        ("100 or 7", "100", -2, 3),  # a list: the ladder of numbers is fooled
        ("x=100", "100", -2, 3),
        ("none", "100", -2, -1.5),
        ("", "100", -2, -1.5),
        ("a+b", "a+b", 5, -1.5),
    ],
)
def test_ladders(answer: str, reference: str, value: float, number: float) -> None:
    text = f"a<end_working_out><SOLUTION>{answer}</SOLUTION>"
    assert score("dapo_answer", DAPO, text, reference) == value
    assert score("dapo_number", DAPO, text, reference) == number
    worst = {-2: -2.5}.get(value, value)
    assert score("dapo_answer", DAPO, text, reference, variant="original") == worst
    outer = {3: 4.0, -1.5: -2.0}.get(number, number)
    assert score("dapo_number", DAPO, text, reference, variant="original") == outer


def total(text: str, variant: str) -> float:
    ladders = ("dapo_answer", "dapo_number")
    formats = ("dapo_exact_format", "dapo_approximate_format")
    return sum(score(name, DAPO, text, "100", variant=variant) for name in ladders) + sum(
        score(name, DAPO, text) for name in formats
    )


@pytest.mark.parametrize(
    ("variant", "low", "high"), [("default", -6.5, 12.5), ("original", -7.5, 13.5)]
)
def test_totals(variant: str, low: float, high: float) -> None:
    assert total(GOOD, variant) == high
    for text in ("", "100", GOOD * 2 + "<SOLUTION>"):
        assert total(text, variant) == low


def test_the_last_closed_solution_counts() -> None:
    text = "<SOLUTION>1</SOLUTION><SOLUTION>100</SOLUTION>"
    assert score("dapo_answer", DAPO, text, "100") == 5
    assert score("dapo_answer", DAPO, text + "<SOLUTION>", "100") == -2


def test_steps_can_be_set() -> None:
    assert score("dapo_answer", DAPO, GOOD, "99", within_10=1.0) == 1.0
    assert score("dapo_answer", DAPO, "", "99", wrong=-9.0, variant="original") == -9.0
