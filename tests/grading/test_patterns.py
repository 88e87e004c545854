"""The table of regular expressions: every example is matched by its pattern."""

from __future__ import annotations

import pytest

from grouper.grading.patterns import PATTERNS, TABLE, Row


@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_the_example_is_matched(row: Row) -> None:
    whole = PATTERNS[row.name].fullmatch(row.example)
    match = PATTERNS[row.name].search(row.example) if row.match else whole
    assert match is not None
    assert match[0] == (row.match or row.example)


def test_names_are_not_repeated() -> None:
    assert len(PATTERNS) == len(TABLE)
