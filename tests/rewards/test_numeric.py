"""Plain decimals, and nothing that only looks like one."""

from __future__ import annotations

import pytest
from grouper.rewards.published import plain_number


@pytest.mark.parametrize(
    ("text", "whole", "first"),
    [
        ("42", 42, 42),
        ("-3.5", -3.5, -3.5),
        (".5", 0.5, 0.5),
        ("1,234,567.8", 1234567.8, 1234567.8),
        ("$12", 12, 12),
        ("12%", None, 12),
        ("1/2", None, 1),
        ("7-5", None, 7),
        ("1e5", 1e5, 1e5),
        ("-2.5E-1", -0.25, -0.25),
        ("7.", 7, 7),
        ("1e999", None, None),
        ("2e", None, 2),
        ("1,200.", 1200, 1200),
        ("nan", None, None),
        ("inf", None, None),
        ("٤٢", None, None),
        ("", None, None),
        ("9" * 301, None, None),
    ],
)
def test_table(text: str, whole: float | None, first: float | None) -> None:
    assert plain_number(text) == whole
    assert plain_number(text, first=True) == first
