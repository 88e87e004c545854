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
    ("answer", "reference", "value", "number", "old_value", "old_number"),
    [
        ("100", "100", 5, 3, 5, 4),
        (" 100\n", "100", 5, 3, 5, 4),  # the layout that the format itself prints
        ("\n100\n", "100", 5, 3, 5, 4),
        ("1 00", "100", 3.5, -1.5, 3.5, -2),  # the first number is 1
        ("1\n00", "100", 3.5, -1.5, -2.5, -2),
        ("100.0", "100", 2, 3, 2, 4),
        ("90", "100", 2, 2.5, 2, 2.5),
        ("110", "100", 2, 2.5, 2, 2.5),
        ("89", "100", 1.5, 1.5, 1.5, 1.5),
        ("120", "100", 1.5, 1.5, 1.5, 1.5),
        ("121", "100", -2, -1.5, -2.5, -2),
        ("1e2", "100", 2, 3, 2, -2),  # its first number is 1
        ("$100", "100", 2, 3, -2.5, 4),
        ("1,000", "1,000", 5, 3, 5, -1.5),  # a reference that `float` refuses
        ("-95", "-100", 2, 2.5, 2, 2.5),
        ("95", "-100", -2, -1.5, -2.5, -2),
        ("0", "0", 5, 3, 5, 4),
        ("0.0", "0", 2, 3, 5, 4),
        ("0.01", "0", -2, -1.5, -2.5, -2),
        ("100 or 7", "100", -2, 3, -2.5, 4),  # a list: the ladder of numbers is fooled
        ("x=100", "100", -2, 3, -2.5, 4),
        ("none", "100", -2, -1.5, -2.5, -1.5),
        ("", "100", -2, -1.5, -2.5, -1.5),
        ("a+b", "a+b", 5, -1.5, 5, -1.5),
    ],
)
def test_ladders(
    answer: str, reference: str, value: float, number: float, old_value: float, old_number: float
) -> None:
    text = f"a<end_working_out><SOLUTION>{answer}</SOLUTION>"
    assert score("dapo_answer", DAPO, text, reference) == value
    assert score("dapo_number", DAPO, text, reference) == number
    assert score("dapo_answer", DAPO, text, reference, variant="original") == old_value
    assert score("dapo_number", DAPO, text, reference, variant="original") == old_number


def total(text: str, variant: str) -> float:
    names = ("dapo_exact_format", "dapo_approximate_format", "dapo_answer", "dapo_number")
    return sum(score(name, DAPO, text, "100", variant=variant) for name in names)


def test_totals() -> None:
    assert total(GOOD, "default") == 12.5
    assert total("<start_working_out>" + GOOD, "original") == 13.5
    assert total(GOOD, "original") == 10.5  # the prompt has opened the first tag
    for text in ("", "100", "<SOLUTION>" * 2):
        assert total(text, "default") == total(text, "original") == -6.5
    assert total("<SOLUTION>9</SOLUTION>" * 2, "original") == -7.5


def test_the_original_reads_the_first_solution() -> None:
    text = "<SOLUTION>1</SOLUTION><SOLUTION>100</SOLUTION>"
    assert score("dapo_answer", DAPO, text, "100", variant="original") == -2.5
    assert score("dapo_number", DAPO, text, "1", variant="original") == 4


def test_the_last_closed_solution_counts() -> None:
    text = "<SOLUTION>1</SOLUTION><SOLUTION>100</SOLUTION>"
    assert score("dapo_answer", DAPO, text, "100") == 5
    assert score("dapo_answer", DAPO, text + "<SOLUTION>", "100") == -2


def test_steps_can_be_set() -> None:
    assert score("dapo_answer", DAPO, GOOD, "99", within_10=1.0) == 1.0
    assert score("dapo_answer", DAPO, "", "99", wrong=-9.0, variant="original") == -9.0
