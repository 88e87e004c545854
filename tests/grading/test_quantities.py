"""Compound quantities: one amount in several units, and what only looks like one."""

from __future__ import annotations

from fractions import Fraction

import pytest

from grouper.grading.quantities import read_compound


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("5 feet 3 inches", Fraction(21, 4), "length"),
        ("5'3\"", Fraction(21, 4), "length"),
        ("5' 3''", Fraction(21, 4), "length"),
        ("18 dollars and 50 cents", Fraction(37, 2), "money"),
        (r"\$18 and 50 cents", Fraction(37, 2), "money"),
        ("1,200 dollars and 50 cents", Fraction(2401, 2), "money"),
        ("1 hour, 30 minutes, and 36 seconds", Fraction(151, 100), "time"),
        ("1 hr. 30 min.", Fraction(3, 2), "time"),
        ("2 weeks 3.5 days", Fraction(5, 2), "time"),
        ("1lb 4oz", Fraction(5, 4), "mass"),
    ],
)
def test_amounts(text: str, value: Fraction, kind: str) -> None:
    found = read_compound(text)
    assert found is not None
    assert (found.value, found.unit.kind) == (value, kind)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5 feet",
        "5 feet 3",
        "5 feet 3 pounds",
        "3 inches 5 feet",
        "5 feet 3 feet",
        "3 boys and 4 girls",
        "5 or 3 inches",
        "5 feet or 3 inches",
        "and 50 cents",
        "18 dollars and 50",
        r"\$18 apples and 50 cents",
        "1 week 2 days 3 hours 4 minutes 5 seconds",
        "1" * 200 + " feet 3 inches",
        "٣ feet 3 inches",
    ],
)
def test_what_is_no_compound(text: str) -> None:
    assert read_compound(text) is None
