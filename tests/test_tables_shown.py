"""Tables fit the terminal, whatever their width, and mean the same in Markdown."""

from __future__ import annotations

import re

import pytest
from evaluation.plain import plain
from evaluation.test_compare import BASE, GRPO, SFT

from grouper.evaluation.compare import compare
from grouper.evaluation.result_tables import comparison_blocks
from grouper.tables import Cell, Line, Table, as_markdown, table


@pytest.mark.parametrize("width", [60, 70, 80, 100, 140])
@pytest.mark.parametrize("lines", [False, True])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_broken(width, lines):
    titles = ["model", *(f"column {number}" for number in range(12))]
    rows = [["base", *(f"{number}{number}.25" for number in range(12))]]
    text = plain(table(titles, rows, lines=lines), width=width)
    assert max(map(len, text.splitlines())) <= width
    for number in range(12):
        assert len(re.findall(rf"(?<![\d.]){number}{number}\.25(?!\d)", text)) == 1


@pytest.mark.parametrize("width", [60, 72, 80])
def test_a_comparison_keeps_every_number_at_any_width(width):
    blocks = comparison_blocks(compare([BASE, SFT, GRPO]))
    text = plain(blocks, width=width)
    assert max(map(len, text.splitlines())) <= width
    for block in blocks:
        if isinstance(block, Table):
            for row in block.rows:
                assert row[1].text in text


def test_parts_of_a_divided_table_begin_with_the_names_of_the_rows():
    rows = [["first", *["1.25"] * 20], ["second", *["2.5"] * 20]]
    text = plain(table(["name", *["value"] * 20], rows), width=60)
    parts = text.split("\n\n")
    assert len(parts) > 1
    for part in parts:
        header, first, second = part.strip().splitlines()
        assert header.startswith("name")
        assert first.startswith("first")
        assert second.startswith("second")


@pytest.mark.parametrize("width", [60, 80])
def test_long_names_of_rows_leave_room_for_numbers(width):
    """Evaluations are named after their files."""
    name = "run-of-a-long-name-validation-grpo-000016 - run-of-a-long-name-validation-grpo-000000"
    rows = [[name, "+9.4 [+2.3, +16.1]", "16", "4", "p=0.012", f"{name} is better"]]
    text = plain(
        table(["difference", "points", "up", "down", "test", "verdict"], rows), width=width
    )
    assert max(map(len, text.splitlines())) <= width
    for number in rows[0][1:5]:
        assert number in text


def test_a_long_name_is_whole_where_there_is_room():
    name = "Reward by weighted component total"
    text = plain(table(["", "first", "now"], [[name, "1", "2"]]), width=60)
    assert name in text


def test_long_texts_are_wrapped_at_words():
    sentence = "a long sentence that a terminal of sixty columns cannot have on one of its lines"
    text = plain(table(["name", "number", "words"], [["a", "1", sentence]]), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert set(sentence.split()) <= set(text.split())


def test_numbers_are_at_the_right_and_names_at_the_left():
    text = plain(table(["name", "value"], [["1", "1"], ["22", "22"]]))
    assert text.splitlines()[1:] == ["1         1", "22       22"]


def test_a_row_has_a_cell_for_each_column():
    with pytest.raises(AssertionError, match="has not 2 cells"):
        table(["a", "b"], [["1"]])


def test_markdown_has_rows_that_a_text_cannot_break():
    text = as_markdown(table(["a", "b"], [["x\n| y", Cell("1", "good")]]))
    assert text.splitlines() == ["| a | b |", "|---|---:|", "| x \\| y | 1 |"]
    assert as_markdown(Line("one\ntwo")) == "- one two"


def test_markup_of_a_text_is_text():
    text = plain([table(["[bold]a[/]"], [["[red]b"]]), Line("[i]c")])
    assert text.splitlines() == ["[bold]a[/]", "[red]b", "[i]c"]


def test_no_text_steers_a_terminal_or_a_card():
    """Subjects and answers come from data files and models."""
    steering = "red \x1b[31m\u202e"
    blocks = [table([steering], [[steering]], title=steering), Line(steering)]
    for text in (plain(blocks), *map(as_markdown, blocks)):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\x1b[31m\\u202e" in text
